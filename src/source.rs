//! Floor 4. A store directory as the format crate reads it: `ReadAt` over the disk seam.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use remanent_format::{FileName, Folder, ReadAt};

use crate::disk::{Disk, DiskFile};
use crate::error::Error;
use crate::sync::Mutex;

/// Files that one source keeps open: those of a long history would exceed what a process may have.
const FILES_OPEN_MAX: usize = 64;

/// Reads a store directory; files stay open while it lives, some of them.
pub(crate) struct DiskSource {
    disk: Arc<dyn Disk>,
    way: Way,
    files: Mutex<HashMap<FileName, Arc<dyn DiskFile>>>,
}

/// Where bytes come from.
#[derive(Clone, Copy)]
enum Way {
    /// Whatever a process would see.
    Visible,
    /// The medium, where the system lets us ask past its cache.
    PastCache,
    /// The cache where it has them at once, else the medium.
    Proven,
}

impl DiskSource {
    /// Reads what a process would see.
    pub fn new(disk: Arc<dyn Disk>) -> Self {
        Self::by(disk, Way::Visible)
    }

    /// Reads from the medium where the system lets us. Only for bytes that are synced.
    pub fn past_cache(disk: Arc<dyn Disk>) -> Self {
        Self::by(disk, Way::PastCache)
    }

    /// Reads from the cache what it has, else from the medium. Only for bytes that were read past the cache once
    /// since they were synced.
    pub fn proven(disk: Arc<dyn Disk>) -> Self {
        Self::by(disk, Way::Proven)
    }

    fn by(disk: Arc<dyn Disk>, way: Way) -> Self {
        Self { disk, way, files: Mutex::default() }
    }

    fn file(&self, file: FileName) -> Result<Arc<dyn DiskFile>, Error> {
        let mut files = self.files.lock();
        if let Some(open) = files.get(&file) {
            return Ok(open.clone());
        }
        let open = self.disk.open(file, false)?;
        if files.len() == FILES_OPEN_MAX {
            files.clear();
        }
        files.insert(file, open.clone());
        Ok(open)
    }
}

impl ReadAt for DiskSource {
    fn list(&self, folder: Folder) -> io::Result<Vec<String>> {
        self.disk.list(folder).map_err(to_io)
    }

    fn len(&self, file: FileName) -> io::Result<Option<u64>> {
        match self.file(file).and_then(|open| open.len()).map_err(to_io) {
            Ok(len) => Ok(Some(len)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn read_at(&self, file: FileName, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let open = self.file(file).map_err(to_io)?;
        let read = match self.way {
            Way::Visible => open.read_at(offset, out),
            Way::PastCache => open.read_past_cache(offset, out),
            Way::Proven => open.read_proven(offset, out),
        };
        read.map_err(to_io)
    }
}

fn to_io(error: Error) -> io::Error {
    let kind = match &error {
        Error::Io { source, .. } | Error::Folder { source, .. } => source.kind(),
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}
