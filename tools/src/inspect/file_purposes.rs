//! The purpose of each file in a store directory, and whether the file may be deleted.

use std::collections::{BTreeMap, BTreeSet};

use remanent_format::image::ImageRef;
use remanent_format::log::Segment;
use remanent_format::op::{Op, decode_payload};
use remanent_format::{FileName, Folder, Lsn, SnapshotId};

use crate::read::partial_view::PartialView;
use crate::read::scan::Scan;
use crate::read::store_dir::StoreDir;

/// The reason why a file of a store directory exists, and whether the file can be deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason {
    /// Path relative to the store directory.
    pub file: String,
    /// Length of the file in bytes.
    pub bytes: u64,
    /// Purpose of the file, as text.
    pub why: String,
    /// Whether no state needs the file, so that deleting the file loses nothing. Delete files manually only while the
    /// store is closed.
    pub is_deletable: bool,
}

/// The uses of the files of a store: references from snapshots and batches, and the state of the log.
struct References {
    /// Number of the first log segment that each readable snapshot needs.
    log_from: BTreeMap<SnapshotId, u64>,
    /// The snapshots and batches that name each image file, as text.
    images: BTreeMap<u64, BTreeSet<String>>,
    /// Lsn of the batch that restores each table.
    restores: BTreeMap<u64, Lsn>,
    /// Highest segment number, or `None` if there is no segment.
    last_segment: Option<u64>,
    /// Highest number of a segment that contains frames.
    last_frames: u64,
    /// Files that an open, or a prune without rules, would remove.
    unneeded: BTreeSet<FileName>,
    /// Whether a process has the store open.
    is_open: bool,
}

/// Returns the purposes of all files, in the order of folders and names. `unneeded` contains the files that an open would
/// remove, or a prune without rules.
pub fn reasons(
    dir: &StoreDir,
    view: &PartialView,
    unneeded: BTreeSet<FileName>,
) -> std::io::Result<Vec<Reason>> {
    let files = dir.files()?;
    let names = files.iter().filter_map(|(folder, name, _)| FileName::parse(*folder, name));
    let references = References::collect(dir, view, unneeded, names);
    let reason = |(folder, name, bytes): (Folder, String, u64)| {
        let (file, (why, is_deletable)) = match FileName::parse(folder, &name) {
            Some(file) => (file.to_string(), references.why(view, file)),
            None if folder == Folder::Root => (name, ("not a file of a store".to_owned(), false)),
            None => (format!("{}/{name}", folder.name()), ("not a file of a store".to_owned(), false)),
        };
        Reason { file, bytes, why, is_deletable }
    };
    Ok(files.into_iter().map(reason).collect())
}

impl References {
    fn collect(
        dir: &StoreDir,
        view: &PartialView,
        unneeded: BTreeSet<FileName>,
        mut files: impl Iterator<Item = FileName>,
    ) -> Self {
        let last_frames = view.survey.log.segments().iter().rfind(|(_, segment)| segment.frames.is_some());
        let mut references = Self {
            log_from: view
                .survey
                .readable()
                .map(|manifest| (manifest.snapshot, manifest.redo.segment))
                .collect(),
            images: BTreeMap::new(),
            restores: BTreeMap::new(),
            last_segment: view.survey.log.segments().keys().next_back().copied(),
            last_frames: last_frames.map_or(0, |(number, _)| *number),
            unneeded,
            is_open: dir.holder().is_some(),
        };
        for manifest in view.survey.links.keys().filter_map(|link| view.survey.snapshot(*link).ok()) {
            let images = manifest.entries.iter().filter_map(|entry| entry.image);
            references.name_images(images, &format!("snapshot {}", manifest.snapshot));
        }
        let of_state = view.state.iter().flat_map(|state| state.resolved.bases.iter());
        let images: Vec<ImageRef> = of_state.filter_map(|(_, base)| base.image).collect();
        references.name_images(images.into_iter(), "the current state");
        // Read the whole log only if a file is left that the log may name, which is rare.
        let is_open = |file: FileName| match file {
            FileName::Pages(number) => !references.images.contains_key(&number),
            FileName::Table(_) => true,
            _ => false,
        };
        if files.any(is_open) {
            references.read_log(dir, view);
        }
        references
    }

    fn name_images(&mut self, images: impl Iterator<Item = ImageRef>, by: &str) {
        for (file, _) in images.flat_map(|image| image.files()) {
            self.images.entry(file).or_default().insert(by.to_owned());
        }
    }

    /// Records the files that batches name: tables, and image files that were written before their batches were logged.
    fn read_log(&mut self, dir: &StoreDir, view: &PartialView) {
        for frame in Scan::new(dir, view.survey.store.store, &view.survey.log) {
            let payload = frame.payload.unwrap_or_default();
            for at in decode_payload(&payload).unwrap_or_default() {
                if let Op::Image { image, .. } = at.op {
                    self.name_images([image].into_iter(), "older batches in the log");
                }
                if let Op::Restore { table, table_crc, .. } = at.op {
                    self.restores.insert(table, frame.header.lsn);
                    if let Ok(manifest) = view.survey.read_table(dir, table, table_crc) {
                        let images = manifest.entries.iter().filter_map(|entry| entry.image);
                        let by = format!("the restore at lsn {}", frame.header.lsn);
                        self.name_images(images, &by);
                    }
                }
            }
        }
    }

    /// Returns the purpose of a file, and whether the file can be deleted.
    fn why(&self, view: &PartialView, file: FileName) -> (String, bool) {
        // A temporary file is a leftover unless a writer has the store open.
        let is_leftover = matches!(file, FileName::Temporary(..)) && !self.is_open;
        let is_unneeded = self.unneeded.contains(&file);
        let purpose_of = self.purpose_of(view, file);
        let why = if is_unneeded { format!("no longer needed: {purpose_of}") } else { purpose_of };
        (why, is_leftover || is_unneeded)
    }

    fn purpose_of(&self, view: &PartialView, file: FileName) -> String {
        match file {
            FileName::Store => "identity of the store; required to open it".to_owned(),
            FileName::Lock => "locked while a process has the store open".to_owned(),
            FileName::Readers => "locks that readers hold on snapshots".to_owned(),
            FileName::Archive => {
                "fences and batches that this directory archived; required to archive more".to_owned()
            }
            FileName::Unfetched => {
                "parts of image files that are only in the archive; required to open it".to_owned()
            }
            FileName::Segment(number) => match view.survey.log.segments().get(&number) {
                Some(found) => self.why_segment(number, found),
                None => "removed while the store was read".to_owned(),
            },
            FileName::Spare(_) => "space reserved for a later segment".to_owned(),
            FileName::ImageSpare(_) => "space reserved for later images".to_owned(),
            FileName::Pages(number) => match self.images.get(&number) {
                Some(by) => {
                    let by: Vec<&str> = by.iter().map(String::as_str).collect();
                    format!("images of {}", by.join(", "))
                }
                None => "not named by a readable snapshot or a batch in the log".to_owned(),
            },
            FileName::Table(number) => match self.restores.get(&number) {
                Some(lsn) => format!("state restored by lsn {lsn}; required for replay"),
                None => "not named by any restore in the log".to_owned(),
            },
            FileName::Manifest(number) => self.why_manifest(view, SnapshotId(number)),
            FileName::Temporary(..) if self.is_open => "being written".to_owned(),
            FileName::Temporary(..) => "left over from a writer that stopped".to_owned(),
        }
    }

    fn why_segment(&self, number: u64, segment: &Segment) -> String {
        let newest = self.log_from.iter().next_back();
        let oldest = self.log_from.iter().min_by_key(|(_, from)| **from);
        let empty = segment.frames.is_none();
        let why = match (newest, oldest) {
            _ if empty && Some(number) == self.last_segment => {
                "empty, created in advance; proves that no newer segment is missing".to_owned()
            }
            _ if empty && number > self.last_frames => "empty, created in advance".to_owned(),
            (Some((snapshot, from)), _) if number >= *from => {
                format!("log after snapshot {snapshot}, which recovery replays")
            }
            (_, Some((snapshot, from))) if number >= *from => {
                format!("log after snapshot {snapshot}, needed if a newer one is damaged")
            }
            (Some(_), _) => "log before the oldest snapshot".to_owned(),
            (None, _) => "log since the beginning; there is no snapshot".to_owned(),
        };
        match &segment.header {
            Ok(_) => why,
            Err(defect) => format!("{why}; its header is damaged: {defect}"),
        }
    }

    fn why_manifest(&self, view: &PartialView, snapshot: SnapshotId) -> String {
        match view.survey.links.get(&snapshot) {
            Some(Err(damage)) => format!("unreadable snapshot: {}", damage.defect),
            _ if view.state.as_ref().and_then(|state| state.base) == Some(snapshot) => {
                "snapshot from which recovery starts".to_owned()
            }
            _ if view.snapshots().all(|kept| kept != snapshot) => "needed by later snapshots".to_owned(),
            _ => "snapshot to start from if a newer one is damaged".to_owned(),
        }
    }
}
