//! The state of a simulated disk, with durable and pending bytes and names.
//!
//! The model is deliberately worse than any file system for which the store is intended:
//!
//! - A file has a *visible* content, which every reader sees immediately and which survives the process, and a
//!   *durable* content, which survives a power cut. Changes since the last sync are *pending*: for each sector of 512
//!   bytes, every version since then, and every length. After a power cut, each sector and the length independently
//!   have one of these versions or the durable version. Thus writes are lost, reordered and torn between sectors.
//! - A folder has visible and durable names, and pending changes of names. A power cut keeps any subset of the changes
//!   in which the changes of each name form a prefix. Renames within a folder are atomic, as on every journaled file
//!   system. If a file is renamed to another folder, a power cut may keep either half of the rename.
//! - A sync of a file makes content and length durable, but never the name of the file.
//! - A link gives a file of another disk a name on this disk. A power cut may lose the name.
//! - A lying medium (`lies.rs`) reports a sector as written although it was not, or writes it elsewhere, or returns an
//!   older version of a sector to the next read.
//! - A failed sync makes nothing durable, and a later sync does not include the affected bytes. They stay pending until
//!   they are written again. This is the behavior of ext4.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use remanent_format::{FileName, Folder};

use super::event::DiskEvent;
use super::node::{FileId, Node, StampedVersion, sectors_of};

/// A change of a name in a folder, such as a link or a rename.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum NameChange {
    Link(FileName, FileId),
    Rename(FileName, FileName),
    Remove(FileName),
    Folder(Folder),
}

impl NameChange {
    /// Returns whether two changes affect the same name. A crash can then keep the later change only together with the
    /// earlier change.
    pub(super) fn meets(&self, other: &Self) -> bool {
        let names = |change: &Self| match *change {
            NameChange::Link(name, _) | NameChange::Remove(name) => [Some(name), None],
            NameChange::Rename(source, target) => [Some(source), Some(target)],
            NameChange::Folder(_) => [None, None],
        };
        let others = names(other);
        names(self).into_iter().flatten().any(|name| others.contains(&Some(name)))
    }
}

/// The files and folders that a folder contains.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Entries {
    pub(super) files: BTreeMap<FileName, FileId>,
    pub(super) folders: BTreeSet<Folder>,
}

impl Entries {
    fn apply(&mut self, change: NameChange) {
        match change {
            NameChange::Link(name, id) => {
                self.files.insert(name, id);
            }
            NameChange::Rename(source, target) => {
                let id = self.files.remove(&source).expect("a rename lasts only if its source does");
                self.files.insert(target, id);
            }
            NameChange::Remove(name) => {
                self.files.remove(&name);
            }
            NameChange::Folder(folder) => {
                self.folders.insert(folder);
            }
        }
    }
}

/// The visible and durable names in a folder, and the pending changes of names.
#[derive(Clone, Debug, Default)]
pub(super) struct Names {
    pub(super) visible: Entries,
    pub(super) durable: Entries,
    /// The changes since the folder was last synced, oldest first.
    pub(super) pending: Vec<StampedVersion<NameChange>>,
}

impl Names {
    fn change(&mut self, stamp: u64, change: NameChange) {
        self.visible.apply(change);
        self.pending.push(StampedVersion { stamp, value: change });
    }
}

/// The state of a whole disk.
#[derive(Clone, Debug, Default)]
pub(super) struct DiskState {
    pub(super) nodes: BTreeMap<FileId, Arc<Node>>,
    pub(super) folders: BTreeMap<Folder, Names>,
    next_file: u64,
    /// A counter that increases with every event and orders the pending versions.
    clock: u64,
}

impl DiskState {
    /// Returns whether a folder is visible. The store directory always exists.
    pub(super) fn has_folder(&self, folder: Folder) -> bool {
        folder == Folder::Root
            || self.folders.get(&Folder::Root).is_some_and(|root| root.visible.folders.contains(&folder))
    }

    /// Returns the visible entries of a folder.
    pub(super) fn entries(&self, folder: Folder) -> Entries {
        let known = self.has_folder(folder).then(|| self.folders.get(&folder)).flatten();
        known.map(|names| names.visible.clone()).unwrap_or_default()
    }

    /// Returns the file that currently has the visible name `file`, or `None`.
    pub(super) fn find(&self, file: FileName) -> Option<FileId> {
        let names = self.has_folder(file.folder()).then(|| self.folders.get(&file.folder())).flatten()?;
        names.visible.files.get(&file).copied()
    }

    /// Returns the number of visible names of a file.
    pub(super) fn names_of(&self, id: FileId) -> usize {
        let names = self.folders.values().flat_map(|names| names.visible.files.values());
        names.filter(|named| **named == id).count()
    }

    pub(super) fn node(&self, id: FileId) -> &Node {
        &self.nodes[&id]
    }

    /// Returns an id for a new file.
    pub(super) fn new_id(&self) -> FileId {
        FileId(self.next_file)
    }

    /// Returns the total length of all files that have a name.
    pub(super) fn used_bytes(&self) -> u64 {
        let named =
            Folder::INNER.into_iter().chain([Folder::Root]).flat_map(|folder| self.entries(folder).files);
        named.map(|(_, id)| self.node(id).visible.len()).sum()
    }

    /// Applies an event to the disk.
    pub(super) fn apply(&mut self, event: &DiskEvent) {
        self.clock += 1;
        let stamp = self.clock;
        match event {
            DiskEvent::Create { file, id } => {
                if self.find(*file) == Some(*id) {
                    self.node_mut(*id).set_len(stamp, 0);
                } else {
                    self.next_file = id.0 + 1;
                    self.nodes.insert(*id, Arc::default());
                    self.names_mut(file.folder()).change(stamp, NameChange::Link(*file, *id));
                }
            }
            DiskEvent::Link { file, id, node } => {
                self.next_file = id.0 + 1;
                self.nodes.insert(*id, node.clone());
                self.names_mut(file.folder()).change(stamp, NameChange::Link(*file, *id));
            }
            DiskEvent::Write { id, offset, bytes, .. } | DiskEvent::Put { id, offset, bytes, .. } => {
                self.node_mut(*id).write(stamp, *offset, bytes);
            }
            DiskEvent::Reserve { id, end, .. } => {
                let node = self.node_mut(*id);
                if node.visible.len() < *end {
                    node.set_len(stamp, *end);
                }
            }
            DiskEvent::SetLen { id, len, .. } => self.node_mut(*id).set_len(stamp, *len),
            DiskEvent::SyncFile { id, .. } => self.node_mut(*id).sync(0..usize::MAX),
            DiskEvent::SyncWindow { id, offset, len, .. } => {
                self.node_mut(*id).sync(sectors_of(*offset, *len))
            }
            DiskEvent::FailedSync { id, offset, len, .. } => {
                self.node_mut(*id).drop_sectors(sectors_of(*offset, *len))
            }
            DiskEvent::Rename { source, target } => {
                if source.folder() == target.folder() {
                    self.names_mut(source.folder()).change(stamp, NameChange::Rename(*source, *target));
                } else {
                    let id = self.find(*source).expect("a file that is renamed is there");
                    self.names_mut(source.folder()).change(stamp, NameChange::Remove(*source));
                    self.names_mut(target.folder()).change(stamp, NameChange::Link(*target, id));
                }
            }
            DiskEvent::Remove { file } => {
                self.names_mut(file.folder()).change(stamp, NameChange::Remove(*file));
            }
            DiskEvent::MakeFolder { folder } => {
                self.names_mut(Folder::Root).change(stamp, NameChange::Folder(*folder));
            }
            DiskEvent::SyncFolder { folder } => {
                let names = self.names_mut(*folder);
                names.durable = names.visible.clone();
                names.pending.clear();
            }
            DiskEvent::Damage { id, offset, bytes, .. } => self.node_mut(*id).damage(stamp, *offset, bytes),
            DiskEvent::Truncate { id, len, .. } => {
                let node = self.node_mut(*id);
                node.set_len(stamp, *len);
                node.sync(0..usize::MAX);
            }
            DiskEvent::Skipped { .. } | DiskEvent::Ack(_) => {}
        }
    }

    /// Returns all sectors on the medium except the sector `except`.
    pub(super) fn durable_sectors(&self, except: (FileId, usize)) -> Vec<(FileId, usize)> {
        let of_node = |(id, node): (&FileId, &Arc<Node>)| {
            let id = *id;
            (0..node.durable.sector_count()).map(move |sector| (id, sector))
        };
        self.nodes.iter().flat_map(of_node).filter(|sector| *sector != except).collect()
    }

    /// Overwrites the durable bytes of sector `target` with those of sector `source`.
    pub(super) fn misdirect(&mut self, source: (FileId, usize), target: (FileId, usize)) {
        let bytes = self.node(source.0).durable.sector(source.1);
        let node = self.node_mut(target.0);
        node.durable.sectors[target.1] = bytes;
        node.differs_from_report = true;
    }

    pub(super) fn node_mut(&mut self, id: FileId) -> &mut Node {
        Arc::make_mut(self.nodes.get_mut(&id).expect("an open file exists"))
    }

    fn names_mut(&mut self, folder: Folder) -> &mut Names {
        self.folders.entry(folder).or_default()
    }

    /// Returns the disk after a power cut that kept the chosen versions of files and changes of names. `length` and
    /// `sector` choose versions as in [`Node::after_power_cut`].
    pub(super) fn after_power_cut(
        &self,
        keeps: impl Fn(Folder, usize) -> bool,
        length: impl Fn(FileId) -> usize,
        sector: impl Fn(FileId, usize) -> usize,
    ) -> Self {
        let mut folders: BTreeMap<Folder, Names> = self
            .folders
            .iter()
            .map(|(folder, names)| {
                let mut entries = names.durable.clone();
                let kept = names.pending.iter().enumerate().filter(|(index, _)| keeps(*folder, *index));
                kept.for_each(|(_, change)| entries.apply(change.value));
                (*folder, Names { visible: entries.clone(), durable: entries, pending: Vec::new() })
            })
            .collect();
        // If the entry of a folder is lost, its files are lost, too.
        let kept = folders.get(&Folder::Root).map(|root| root.durable.folders.clone()).unwrap_or_default();
        folders.retain(|folder, _| *folder == Folder::Root || kept.contains(folder));
        let named: BTreeSet<FileId> =
            folders.values().flat_map(|names| names.durable.files.values().copied()).collect();
        let nodes = named
            .into_iter()
            .map(|id| {
                let node = &self.nodes[&id];
                let kept = if node.is_clean() {
                    node.clone()
                } else {
                    Arc::new(node.after_power_cut(length(id), |index| sector(id, index)))
                };
                (id, kept)
            })
            .collect();
        Self { nodes, folders, next_file: self.next_file, clock: self.clock }
    }

    /// Returns the files that have a name, had a name or may have a name again. A crash can make no other file visible.
    pub(super) fn reachable(&self) -> BTreeSet<FileId> {
        let linked = |change: &StampedVersion<NameChange>| match change.value {
            NameChange::Link(_, id) => Some(id),
            _ => None,
        };
        self.folders
            .values()
            .flat_map(|names| {
                let named = names.visible.files.values().chain(names.durable.files.values()).copied();
                named.chain(names.pending.iter().filter_map(linked))
            })
            .collect()
    }

    /// Returns a hash of the state that a reader or a crash can observe, now or later.
    pub(super) fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for (folder, names) in &self.folders {
            (folder, &names.visible, &names.durable).hash(&mut hasher);
            names.pending.iter().for_each(|change| change.value.hash(&mut hasher));
        }
        for id in self.reachable() {
            let node = &self.nodes[&id];
            id.hash(&mut hasher);
            for content in [&node.visible, &node.durable] {
                content.len().hash(&mut hasher);
                content.sectors.iter().for_each(|sector| sector.hash().hash(&mut hasher));
            }
            for (index, versions) in &node.sectors {
                (index, versions.len(), node.lost.contains(index)).hash(&mut hasher);
                versions.iter().for_each(|version| version.value.hash().hash(&mut hasher));
            }
            node.lengths.iter().for_each(|version| version.value.hash(&mut hasher));
            node.length_lost.hash(&mut hasher);
        }
        hasher.finish()
    }
}
