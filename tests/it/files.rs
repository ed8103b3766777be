//! A store directory as a map of files, which tests damage, rebuild and open. Also the state of a store as
//! its caller sees it.

use std::collections::BTreeMap;
use std::sync::Arc;

use remanent::device::host::HostDevice;
use remanent::disk::Disk;
use remanent::error::{FileName, Folder};
use remanent::options::{LogOptions, ScrubSchedule, SnapshotSchedule};
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, Metadata, Options, PageId, PageInfo, Store};
use remanent_format::state::rebuild::RebuiltStore;

pub use crate::archive::Files;

impl Files {
    /// Reads the files that a process sees on a disk, except files that exist only to be locked. A store may
    /// be open on the disk. If a file is created, renamed or removed in the meantime, all files are read
    /// again.
    pub fn of(disk: &SimDisk) -> Self {
        let names = || -> Vec<FileName> {
            let folders = [Folder::Root, Folder::Log, Folder::Pages, Folder::Snapshots];
            let names = folders.into_iter().flat_map(|folder| {
                let names = Disk::list(disk, folder).unwrap();
                names.into_iter().filter_map(move |name| FileName::parse(folder, &name))
            });
            names.filter(|file| !matches!(file, FileName::Lock | FileName::Readers)).collect()
        };
        loop {
            let before = names();
            let files = before.iter().map(|file| Some((*file, disk.bytes(*file)?))).collect::<Option<_>>();
            if let Some(files) = files
                && names() == before
            {
                return Self(files);
            }
        }
    }

    /// Returns a disk that durably contains these files.
    pub fn disk(&self) -> SimDisk {
        let disk = SimDisk::new();
        for folder in Folder::INNER {
            disk.make_folder(folder).unwrap();
        }
        for (name, bytes) in &self.0 {
            let file = disk.create(*name).unwrap();
            file.write_at(0, bytes).unwrap();
            file.sync().unwrap();
        }
        for folder in [Folder::Root, Folder::Log, Folder::Pages, Folder::Snapshots] {
            disk.sync_folder(folder).unwrap();
        }
        disk
    }

    /// Returns the total length of all files in bytes.
    pub fn bytes_len(&self) -> usize {
        self.0.values().map(Vec::len).sum()
    }

    /// Returns the names of the files that `wanted` accepts.
    pub fn names(&self, wanted: impl Fn(FileName) -> bool) -> Vec<FileName> {
        self.0.keys().copied().filter(|file| wanted(*file)).collect()
    }

    /// Returns the names of the log segments.
    pub fn segments(&self) -> Vec<FileName> {
        self.names(|file| matches!(file, FileName::Segment(_)))
    }
}

/// The content of a store, as its caller sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    pub pages: Vec<PageInfo>,
    pub contents: BTreeMap<PageId, Vec<u8>>,
    pub root: Metadata,
}

impl State {
    /// Reads the state of an open store.
    pub fn of(store: &Store) -> Self {
        let pages: Vec<PageInfo> = store.pages().unwrap().collect();
        let read = |info: &PageInfo| {
            let mut bytes = vec![0; info.len as usize];
            store.read(info.page, 0, &mut bytes).unwrap();
            (info.page, bytes)
        };
        Self {
            contents: pages.iter().map(read).collect(),
            pages,
            root: Metadata::clone(&store.root().unwrap()),
        }
    }

    /// Returns the state that a rebuild computed.
    pub fn rebuilt(rebuilt: &RebuiltStore) -> Self {
        Self {
            pages: rebuilt.table.pages().collect(),
            contents: rebuilt.contents.clone(),
            root: Metadata::clone(rebuilt.table.root()),
        }
    }
}

/// Opens a store on a simulated disk, with small segments.
pub fn open(disk: &SimDisk) -> Result<Store, Error> {
    open_with(disk, small())
}

/// Opens a store on a simulated disk.
pub fn open_with(disk: &SimDisk, options: Options) -> Result<Store, Error> {
    Store::open_on(Arc::new(disk.clone()), Arc::new(HostDevice::new()), options)
}

/// Spares that a store keeps for opens on a full disk, in addition to its reserve.
pub const SPARES_FOR_OPENS: usize = 5;

/// Options with the smallest segments, so that a few batches fill several of them.
pub fn small() -> Options {
    let options = Options::new().log(LogOptions::new().segment_len(16 << 10));
    options.snapshots(SnapshotSchedule::never()).scrubs(ScrubSchedule::new().interval(None))
}
