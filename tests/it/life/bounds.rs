//! Bounds of the size of the directory and of the worker's memory.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use remanent::SnapshotId;
use remanent::disk::dir::DirReader;
use remanent::error::FileName;
use remanent_format::state::survey::Survey;

use super::model::Kept;
use super::text::Command;
use super::{LONG_PAGE_LEN_MAX, Life, PAGES_MAX, SEGMENT_LENS};

/// Number of snapshots after the deletion of a giant page until no file has space for such a page.
const GIANT_SNAPSHOTS: u64 = 5;
/// Number of opens after which a snapshot is triggered, and the minimum number of bytes that each open adds
/// to the log.
const RESTARTS_MAX: u64 = 16;
const FIRST_SEGMENT_LEN: u64 = 256 << 10;
/// Length of an empty store with its reserve.
const EMPTY_BYTES: u64 = 4 << 20;
/// Memory in addition to the pages, for streams and the test runner.
const MEMORY_OVER_PAGES: u64 = 256 << 20;

impl Life {
    pub(super) fn check_disk(&mut self) {
        let kept = self.kept();
        // Add the unused parts of the current segment, the next one and the spares, with the longest segments
        // of any open. Add segments that wait for reuse. Add the incarnations after two snapshots, each of
        // which begins with a segment that may be empty.
        let longest = SEGMENT_LENS.into_iter().max().expect("there are some");
        let spares = self.disk_len / 100 + longest;
        let constant = EMPTY_BYTES + 8 * longest + spares + 2 * (RESTARTS_MAX + 1) * FIRST_SEGMENT_LEN;
        let mut bound = self.model.disk_bytes_max(&kept, constant);
        let found = disk_bytes(&self.store());
        if found > bound {
            bound += self.bytes_beside_giants(&kept);
        }
        self.tally.disk_bytes_max = self.tally.disk_bytes_max.max(found);
        self.tally.disk_percent_max = self.tally.disk_percent_max.max(100 * found / bound);
        if found > bound {
            self.fail(&format!("the directory takes {found} bytes, and may take {bound}; kept: {kept:?}"));
        }
    }

    /// Returns the length of files that cannot be removed because a short image is in the same file as that
    /// of a giant page. If a named snapshot contains the short image, the file stays as long as that
    /// snapshot. Otherwise, the snapshot after the next one rewrites the image, and two more snapshots
    /// replace the older ones.
    fn bytes_beside_giants(&self, kept: &[Kept]) -> u64 {
        let is_recent = self.tally.snapshots <= self.last_giant + GIANT_SNAPSHOTS;
        let stays = |kept: &&Kept| is_recent || kept.name.is_some();
        let directory = self.store();
        let files = || -> Option<BTreeSet<u64>> {
            let survey = Survey::read(&DirReader::new(&directory)).ok()?;
            let mut files = BTreeSet::new();
            for kept in kept.iter().filter(stays) {
                let entries = survey.entries(SnapshotId(kept.id)).ok()?;
                files.extend(entries.filter_map(|entry| entry.image).map(|image| image.file));
            }
            Some(files)
        };
        let len = |file| {
            std::fs::metadata(directory.join(FileName::Pages(file).to_string())).map_or(0, |file| file.len())
        };
        let files = files().unwrap_or_default();
        files.into_iter().map(len).filter(|len| *len > LONG_PAGE_LEN_MAX).sum()
    }

    pub(super) fn check_memory(&mut self) {
        let found: u64 = self.ask(&Command::Peak).parse().unwrap();
        self.tally.memory_bytes_max = self.tally.memory_bytes_max.max(found);
        // A giant page exists in the store, in the follower's replica, and possibly in a copy for a snapshot.
        let bound = MEMORY_OVER_PAGES + LONG_PAGE_LEN_MAX * PAGES_MAX as u64 + 3 * self.giant_len_max;
        if found > bound {
            self.fail(&format!(
                "the process took {found} bytes, and its pages {}",
                self.model.now().page_bytes()
            ));
        }
    }
}

/// Returns the disk usage of the files of a directory.
pub fn disk_bytes(directory: &Path) -> u64 {
    let mut sum = 0;
    // A file that is removed in the meantime counts as empty.
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let Ok(metadata) = std::fs::symlink_metadata(entry.path()) else { continue };
        sum += if metadata.is_dir() { disk_bytes(&entry.path()) } else { metadata.blocks() * 512 };
    }
    sum
}
