//! The read-only disk of a reader of an archive: local files, and archived files whose parts are fetched when they are
//! read.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::sync::Arc;

use remanent_archive::Error as Failure;
use remanent_archive::line::{Archive, ListedPart, SystemNonces, fetch_part};
use remanent_archive::object::Role;
use remanent_archive::remote::RemoteBucket;
use remanent_archive::rules::Rules;
use remanent_format::{FileName, Folder, Lsn, SnapshotId};

use super::failures::error_of;
use super::part_cache::PartCache;
use crate::base::process::ForkGuard;
use crate::disk::{Disk, DiskFile, DiskLock, Hold, Window};
use crate::error::{Error, IoAction, Result};
use crate::options::{ImageIo, LogIo};

/// A read-only disk with the files of a view of an archive, or with the files that the batches of a run need.
pub(super) struct ArchivedDisk {
    /// The local files: STORE, the log, manifests and tables, which were written when the view or follower was opened.
    local: Arc<dyn Disk>,
    /// The files whose parts are fetched from the archive: image files and tables.
    files: BTreeMap<FileName, Arc<ArchivedFile>>,
    /// Keeps the temporary folder of the local files. A state without images needs the folder too.
    source: PartSource,
}

/// A shared handle to the source of file parts. A forked child does not drop the source, because the source contains
/// threads and a temporary folder of the parent.
pub(super) type PartSource = Arc<ForkGuard<SourceParts>>;

/// The contents of a [`PartSource`]: the bucket, the cache of fetched parts, and the temporary folder.
pub(super) struct SourceParts {
    pub url: String,
    pub bucket: RemoteBucket,
    pub cache: PartCache,
    /// The temporary folder of the local files. Dropping this value removes the folder.
    pub _folder: tempfile::TempDir,
}

/// A file whose parts are in an archive.
struct ArchivedFile {
    file: FileName,
    /// The batch that needs the file. Errors state this batch.
    lsn: Lsn,
    /// The parts by their offsets in the file, each with its number in the cache.
    parts: BTreeMap<u64, (usize, ListedPart)>,
    source: PartSource,
}

/// A lock without effect. No writer removes the files of an archived state while they are read.
struct NoLock;

impl DiskLock for NoLock {}

impl ArchivedDisk {
    /// Creates a disk with the files that batch `lsn` needs. `parts` contains the parts of these files, each with its
    /// number in the cache. If two parts of a file have the same offset, the later part is used.
    pub fn new(
        local: Arc<dyn Disk>,
        parts: impl IntoIterator<Item = (usize, ListedPart)>,
        lsn: Lsn,
        source: PartSource,
    ) -> Self {
        let mut files: BTreeMap<FileName, BTreeMap<u64, (usize, ListedPart)>> = BTreeMap::new();
        for (number, listed) in parts {
            let part = &listed.entry.part;
            let file = match part.role {
                Role::Images => FileName::Pages(part.file),
                Role::Table => FileName::Table(part.file),
                Role::Frames | Role::Link => continue,
            };
            files.entry(file).or_default().insert(part.offset, (number, listed));
        }
        let file =
            |(file, parts)| (file, Arc::new(ArchivedFile { file, lsn, parts, source: source.clone() }));
        let files = files.into_iter().map(file).collect();
        Self { local, files, source }
    }
}

impl SourceParts {
    /// Returns the archive from which the parts are fetched.
    pub fn archive(&self) -> Archive<'_, RemoteBucket, SystemNonces> {
        Archive { bucket: &self.bucket, nonces: &SystemNonces, rules: Rules::default() }
    }

    fn fetch(&self, part: &ListedPart, lsn: Lsn) -> Result<Vec<u8>> {
        self.bucket.block_on(fetch_part(self.archive(), part)).map_err(|failure| match failure {
            // This method does not know the newest snapshot of the archive.
            Failure::Overtaken { .. } => Error::Overtaken { lsn, snapshot: None },
            failure => error_of(&self.url, &failure),
        })
    }
}

impl ArchivedFile {
    /// Copies bytes of the file, starting at `offset`, to the start of `out`, and returns the number of copied bytes.
    /// All of these bytes are in one part, which is fetched if it is not cached.
    fn read_part(&self, offset: u64, out: &mut [u8]) -> Result<usize> {
        let failed = |error| Error::io(IoAction::Read, self.file, Some(offset), error);
        let source = self.source.check()?;
        let (start, (number, listed)) =
            self.parts.range(..=offset).next_back().ok_or_else(|| failed(end()))?;
        let skipped = offset - start;
        let len = listed.entry.part.len.saturating_sub(skipped).min(out.len() as u64) as usize;
        if len == 0 {
            return Err(failed(end()));
        }
        let part = source.cache.part(*number, || source.fetch(listed, self.lsn))?;
        part.read(&source.cache, skipped, &mut out[..len]).map_err(failed)?;
        Ok(len)
    }

    fn read_only(&self, action: IoAction) -> Error {
        read_only(action, self.file)
    }
}

fn end() -> io::Error {
    ErrorKind::UnexpectedEof.into()
}

/// Returns the error for an attempt to change a file of an archive.
fn read_only(action: IoAction, file: FileName) -> Error {
    Error::io(action, file, None, ErrorKind::ReadOnlyFilesystem.into())
}

impl Disk for ArchivedDisk {
    fn label(&self) -> String {
        self.source.url.clone()
    }

    fn lock(&self) -> Result<Box<dyn DiskLock>> {
        Err(read_only(IoAction::Lock, FileName::Lock))
    }

    fn check_writer(&self) -> Result<()> {
        Ok(())
    }

    fn is_locked(&self) -> Result<bool> {
        Ok(false)
    }

    fn hold(&self, _id: SnapshotId) -> Result<Hold> {
        Ok(Hold::Held(Box::new(NoLock)))
    }

    fn try_retire(&self, _id: SnapshotId) -> Result<Option<Box<dyn DiskLock>>> {
        Ok(None)
    }

    fn is_held(&self, _id: SnapshotId) -> Result<bool> {
        Ok(true)
    }

    fn list(&self, folder: Folder) -> Result<Vec<String>> {
        if folder == Folder::Pages {
            let mut names: Vec<String> = self.files.keys().map(|file| file.name()).collect();
            names.extend(self.local.list(folder)?);
            names.sort_unstable();
            return Ok(names);
        }
        self.local.list(folder)
    }

    fn make_folder(&self, _folder: Folder) -> Result<()> {
        Err(read_only(IoAction::Create, FileName::Store))
    }

    fn sync_folder(&self, _folder: Folder) -> Result<()> {
        Err(read_only(IoAction::Sync, FileName::Store))
    }

    fn create(&self, file: FileName) -> Result<Arc<dyn DiskFile>> {
        Err(read_only(IoAction::Create, file))
    }

    fn open(&self, file: FileName, write: bool) -> Result<Arc<dyn DiskFile>> {
        if write {
            return Err(read_only(IoAction::Open, file));
        }
        match self.files.get(&file) {
            Some(open) => Ok(open.clone()),
            None => self.local.open(file, false),
        }
    }

    fn rename(&self, source: FileName, _target: FileName) -> Result<()> {
        Err(read_only(IoAction::Rename, source))
    }

    fn remove(&self, file: FileName) -> Result<()> {
        Err(read_only(IoAction::Remove, file))
    }

    fn refuses(&self, _io: LogIo) -> Result<Option<String>> {
        Ok(None)
    }

    fn refuses_images(&self, _io: ImageIo) -> Result<Option<String>> {
        Ok(None)
    }
}

impl DiskFile for ArchivedFile {
    fn len(&self) -> Result<u64> {
        Ok(self.parts.last_key_value().map_or(0, |(start, (_, listed))| start + listed.entry.part.len))
    }

    fn has_one_name(&self) -> Result<bool> {
        Ok(true)
    }

    fn write_at(&self, _offset: u64, _bytes: &[u8]) -> Result<()> {
        Err(self.read_only(IoAction::Write))
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < out.len() {
            done += self.read_part(offset + done as u64, &mut out[done..])?;
        }
        Ok(())
    }

    fn read_bypassing_cache(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.read_at(offset, out)
    }

    fn reserve(&self, _offset: u64, _end: u64) -> Result<bool> {
        Err(self.read_only(IoAction::Allocate))
    }

    fn write_direct(&self, _offset: u64, _blocks: &[u8]) -> Result<()> {
        Err(self.read_only(IoAction::Write))
    }

    fn cut(&self, _len: u64) -> Result<()> {
        Err(self.read_only(IoAction::Truncate))
    }

    fn mapped_part(&self, _range: Range<u64>) -> Result<Box<dyn Window>> {
        Err(self.read_only(IoAction::Map))
    }

    fn sync(&self) -> Result<()> {
        Err(self.read_only(IoAction::Sync))
    }

    fn window(&self, _io: LogIo) -> Result<Box<dyn Window>> {
        Err(self.read_only(IoAction::Map))
    }
}
