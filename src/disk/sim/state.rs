//! Floor 3. What a simulated disk holds: what is on the medium, and what is only on its way there.
//!
//! The model, which is deliberately worse than any file system that the store is meant for:
//!
//! - A file has a *visible* content, which every reader sees at once and which outlives the process, and
//!   a *durable* one, which outlives a power cut. What was written since the last sync is *pending*: for
//!   each sector of 512 bytes every version that it has had since, and every length. A power cut leaves of
//!   each sector, and of the length, any one version or the durable one, independently: so writes are
//!   lost, reordered and torn between sectors.
//! - A folder has visible and durable names, and pending changes of names. A power cut keeps any subset
//!   of the changes in which each name's own changes are a prefix. Renames are atomic, as they are on
//!   every journaled file system.
//! - A sync of a file makes content and length durable, never the file's name.
//! - A link gives a file of another disk a name here; a power cut may take the name.
//! - A medium that lies (`lies.rs`) says that it wrote a sector, and did not, or wrote it elsewhere, or gives a
//!   sector's older self to who reads it next.
//! - A failed sync makes nothing durable, and a later one does not make up for it: those bytes stay
//!   pending until they are written again. That is what ext4 does.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::{Arc, LazyLock};

use remanent_format::limits::SECTOR_LEN;
use remanent_format::{FileName, Folder};

use super::event::Event;

/// A file itself, whatever its names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct FileId(pub(super) u64);

/// One sector's bytes with their hash, so that whole disks are compared without reading them.
#[derive(Debug)]
pub(super) struct Sector {
    bytes: [u8; SECTOR_LEN],
    hash: u64,
}

impl Sector {
    fn new(bytes: [u8; SECTOR_LEN]) -> Arc<Self> {
        let mut hasher = DefaultHasher::new();
        bytes.hash(&mut hasher);
        Arc::new(Self { bytes, hash: hasher.finish() })
    }

    /// Tells contents apart.
    pub(super) fn hash(&self) -> u64 {
        self.hash
    }

    pub(super) fn bytes(&self) -> &[u8; SECTOR_LEN] {
        &self.bytes
    }

    fn zero() -> Arc<Self> {
        static ZERO: LazyLock<Arc<Sector>> = LazyLock::new(|| Sector::new([0; SECTOR_LEN]));
        ZERO.clone()
    }
}

/// A file's length and bytes. Bytes of the last sector beyond the length are zero.
#[derive(Clone, Debug, Default)]
pub(super) struct Content {
    len: u64,
    sectors: Vec<Arc<Sector>>,
}

impl Content {
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn sector_count(&self) -> usize {
        self.sectors.len()
    }

    /// A sector; behind the end it is zeros.
    fn sector(&self, index: usize) -> Arc<Sector> {
        self.sectors.get(index).cloned().unwrap_or_else(Sector::zero)
    }

    /// Fills `out` from `offset`; false if the content ends before. Nothing can be read anywhere.
    pub(super) fn read(&self, offset: u64, out: &mut [u8]) -> bool {
        let end = offset.checked_add(out.len() as u64);
        if !out.is_empty() && end.is_none_or(|end| end > self.len) {
            return false;
        }
        for (index, within, piece) in pieces(offset, out.len()) {
            out[piece].copy_from_slice(&self.sectors[index].bytes[within]);
        }
        true
    }

    /// Sets the length: cuts, or extends with zeros.
    fn resize(&mut self, len: u64) {
        self.len = len;
        self.sectors.resize_with(len.div_ceil(SECTOR_LEN as u64) as usize, Sector::zero);
        let used = (len % SECTOR_LEN as u64) as usize;
        if used > 0
            && let Some(last) = self.sectors.last_mut()
            && last.bytes[used..].iter().any(|byte| *byte != 0)
        {
            let mut bytes = last.bytes;
            bytes[used..].fill(0);
            *last = Sector::new(bytes);
        }
    }
}

/// The sectors that `len` bytes at `offset` touch: index, range within the sector, range within the bytes.
fn pieces(offset: u64, len: usize) -> impl Iterator<Item = (usize, Range<usize>, Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == len {
            return None;
        }
        let at = offset + done as u64;
        let within = (at % SECTOR_LEN as u64) as usize;
        let count = (SECTOR_LEN - within).min(len - done);
        done += count;
        Some(((at / SECTOR_LEN as u64) as usize, within..within + count, done - count..done))
    })
}

/// The sectors that a range of bytes touches.
pub(super) fn sectors_of(offset: u64, len: u64) -> Range<usize> {
    let first = offset / SECTOR_LEN as u64;
    let end = if len == 0 { first } else { (offset + len).div_ceil(SECTOR_LEN as u64) };
    first as usize..end as usize
}

/// A version of something since its last sync, with the time at which it was made.
#[derive(Clone, Debug)]
pub(super) struct Version<T> {
    pub(super) stamp: u64,
    pub(super) value: T,
}

/// A file.
#[derive(Clone, Debug, Default)]
pub(super) struct Node {
    pub(super) visible: Content,
    pub(super) durable: Content,
    /// Each dirty sector's versions, oldest first; the last is the visible one.
    pub(super) sectors: BTreeMap<usize, Vec<Version<Arc<Sector>>>>,
    /// Lengths since the last sync, oldest first; the last is the visible one.
    pub(super) lengths: Vec<Version<u64>>,
    /// Dirty sectors that a failed sync has marked clean: no later sync writes them.
    lost: BTreeSet<usize>,
    /// Whether a failed sync has marked the length clean.
    length_lost: bool,
    /// Whether the medium holds something else than it said.
    lied_about: bool,
}

impl Node {
    fn write(&mut self, stamp: u64, offset: u64, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let end = offset + bytes.len() as u64;
        if end > self.visible.len {
            self.set_len(stamp, end);
        }
        for (index, within, piece) in pieces(offset, bytes.len()) {
            let mut sector = self.visible.sectors[index].bytes;
            sector[within].copy_from_slice(&bytes[piece]);
            self.set_sector(stamp, index, Sector::new(sector));
        }
    }

    fn set_sector(&mut self, stamp: u64, index: usize, sector: Arc<Sector>) {
        self.visible.sectors[index] = sector.clone();
        self.sectors.entry(index).or_default().push(Version { stamp, value: sector });
        self.lost.remove(&index);
    }

    fn set_len(&mut self, stamp: u64, len: u64) {
        // Sectors that are cut away read as zeros when the file grows again.
        let kept = len.div_ceil(SECTOR_LEN as u64) as usize;
        for index in kept..self.visible.sectors.len() {
            self.set_sector(stamp, index, Sector::zero());
        }
        self.visible.resize(len);
        self.lengths.push(Version { stamp, value: len });
        self.length_lost = false;
    }

    /// Makes the length and exactly these sectors durable: a window's sync promises no more.
    fn sync(&mut self, range: Range<usize>) {
        if !self.length_lost {
            self.lengths.clear();
            self.durable.resize(self.visible.len);
        }
        let dirty = self.sectors.range(range).map(|(index, _)| *index);
        let synced: Vec<usize> = dirty.filter(|index| !self.lost.contains(index)).collect();
        for index in synced {
            let versions = self.sectors.remove(&index).unwrap_or_default();
            if let (Some(slot), Some(version)) = (self.durable.sectors.get_mut(index), versions.last()) {
                slot.clone_from(&version.value);
            }
        }
    }

    /// A sync of these sectors, and of the length, has failed: see the head of this file.
    fn lose(&mut self, range: Range<usize>) {
        self.lost.extend(self.sectors.range(range).map(|(index, _)| *index));
        self.length_lost = !self.lengths.is_empty();
    }

    /// What a fault of the medium, or somebody else's hand, does: at once durable.
    fn damage(&mut self, stamp: u64, offset: u64, bytes: &[u8]) {
        self.write(stamp, offset, bytes);
        self.sync(sectors_of(offset, bytes.len() as u64));
    }

    /// Whether what is visible is durable.
    pub(super) fn is_clean(&self) -> bool {
        self.sectors.is_empty() && self.lengths.is_empty() && !self.lied_about
    }

    /// The sectors that hold on the medium what is visible: there is no telling whether the page cache has them.
    pub(super) fn clean_sectors(&self) -> impl Iterator<Item = usize> {
        let both = self.visible.sectors.iter().zip(&self.durable.sectors).enumerate();
        let is_clean = |index: &usize| !self.sectors.contains_key(index);
        both.filter(|(_, (visible, durable))| visible.hash == durable.hash)
            .map(|(index, _)| index)
            .filter(is_clean)
    }

    /// The sectors that are durable with other bytes than they were before.
    pub(super) fn newly_durable(&self, before: &Self) -> Vec<usize> {
        let sectors = self.durable.sectors.iter().enumerate();
        sectors
            .filter(|(index, sector)| sector.hash != before.durable.sector(*index).hash)
            .map(|found| found.0)
            .collect()
    }

    /// A sector as it is on the medium; behind the file's end it is zeros.
    pub(super) fn durable_sector(&self, index: usize) -> Arc<Sector> {
        self.durable.sector(index)
    }

    /// A sector that was said to be durable is what it was before.
    pub(super) fn lose_write(&mut self, sector: usize, before: &Self) {
        self.durable.sectors[sector] = before.durable.sector(sector);
        self.lied_about = true;
    }

    /// The file after a power cut that left of each sector, and of the length, the chosen version: 0 is
    /// the durable one, n the n-th since.
    pub(super) fn after_power_cut(&self, length: usize, sector: impl Fn(usize) -> usize) -> Self {
        let mut content = self.durable.clone();
        let len = length.checked_sub(1).map_or(self.durable.len, |version| self.lengths[version].value);
        content.sectors.resize_with(len.div_ceil(SECTOR_LEN as u64) as usize, Sector::zero);
        for (index, versions) in &self.sectors {
            if let Some(slot) = content.sectors.get_mut(*index)
                && let Some(version) = sector(*index).checked_sub(1)
            {
                *slot = versions[version].value.clone();
            }
        }
        content.resize(len);
        Self { visible: content.clone(), durable: content, ..Self::default() }
    }
}

/// A change of names in one folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum NameChange {
    Link(FileName, FileId),
    Rename(FileName, FileName),
    Remove(FileName),
    Folder(Folder),
}

impl NameChange {
    /// Whether both concern one name, so that the later one can only last if the earlier one does.
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

/// What a folder holds.
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

/// A folder.
#[derive(Clone, Debug, Default)]
pub(super) struct Names {
    pub(super) visible: Entries,
    pub(super) durable: Entries,
    /// Changes since the last sync, oldest first.
    pub(super) pending: Vec<Version<NameChange>>,
}

impl Names {
    fn change(&mut self, stamp: u64, change: NameChange) {
        self.visible.apply(change);
        self.pending.push(Version { stamp, value: change });
    }
}

/// A whole disk.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    pub(super) nodes: BTreeMap<FileId, Arc<Node>>,
    pub(super) folders: BTreeMap<Folder, Names>,
    next_file: u64,
    /// Rises with every event; orders the versions.
    clock: u64,
}

impl State {
    /// Whether the folder exists, as the process sees it. The store directory always does.
    pub(super) fn has_folder(&self, folder: Folder) -> bool {
        folder == Folder::Root
            || self.folders.get(&Folder::Root).is_some_and(|root| root.visible.folders.contains(&folder))
    }

    /// The names in a folder, as the process sees them.
    pub(super) fn entries(&self, folder: Folder) -> Entries {
        let known = self.has_folder(folder).then(|| self.folders.get(&folder)).flatten();
        known.map(|names| names.visible.clone()).unwrap_or_default()
    }

    /// The file of that name, as the process sees it.
    pub(super) fn find(&self, file: FileName) -> Option<FileId> {
        let names = self.has_folder(file.folder()).then(|| self.folders.get(&file.folder())).flatten()?;
        names.visible.files.get(&file).copied()
    }

    pub(super) fn node(&self, id: FileId) -> &Node {
        &self.nodes[&id]
    }

    /// An id for a new file.
    pub(super) fn new_id(&self) -> FileId {
        FileId(self.next_file)
    }

    /// Bytes that the files take which have a name.
    pub(super) fn used_bytes(&self) -> u64 {
        let named =
            Folder::INNER.into_iter().chain([Folder::Root]).flat_map(|folder| self.entries(folder).files);
        named.map(|(_, id)| self.node(id).visible.len).sum()
    }

    /// Lets an event happen.
    pub(super) fn apply(&mut self, event: &Event) {
        self.clock += 1;
        let stamp = self.clock;
        match event {
            Event::Create { file, id } => {
                if self.find(*file) == Some(*id) {
                    self.node_mut(*id).set_len(stamp, 0);
                } else {
                    self.next_file = id.0 + 1;
                    self.nodes.insert(*id, Arc::default());
                    self.names_mut(file.folder()).change(stamp, NameChange::Link(*file, *id));
                }
            }
            Event::Link { file, id, node } => {
                self.next_file = id.0 + 1;
                self.nodes.insert(*id, node.clone());
                self.names_mut(file.folder()).change(stamp, NameChange::Link(*file, *id));
            }
            Event::Write { id, offset, bytes, .. } | Event::Put { id, offset, bytes, .. } => {
                self.node_mut(*id).write(stamp, *offset, bytes);
            }
            Event::SyncFile { id, .. } => self.node_mut(*id).sync(0..usize::MAX),
            Event::SyncWindow { id, offset, len, .. } => self.node_mut(*id).sync(sectors_of(*offset, *len)),
            Event::FailedSync { id, offset, len, .. } => self.node_mut(*id).lose(sectors_of(*offset, *len)),
            Event::Rename { source, target } => {
                self.names_mut(source.folder()).change(stamp, NameChange::Rename(*source, *target));
            }
            Event::Remove { file } => {
                self.names_mut(file.folder()).change(stamp, NameChange::Remove(*file));
            }
            Event::MakeFolder { folder } => {
                self.names_mut(Folder::Root).change(stamp, NameChange::Folder(*folder));
            }
            Event::SyncFolder { folder } => {
                let names = self.names_mut(*folder);
                names.durable = names.visible.clone();
                names.pending.clear();
            }
            Event::Damage { id, offset, bytes, .. } => self.node_mut(*id).damage(stamp, *offset, bytes),
            Event::Cut { id, len, .. } => {
                let node = self.node_mut(*id);
                node.set_len(stamp, *len);
                node.sync(0..usize::MAX);
            }
            Event::Skipped { .. } | Event::Ack(_) => {}
        }
    }

    /// All sectors on the medium but one.
    pub(super) fn durable_sectors(&self, except: (FileId, usize)) -> Vec<(FileId, usize)> {
        let of_node = |(id, node): (&FileId, &Arc<Node>)| {
            let id = *id;
            (0..node.durable.sector_count()).map(move |sector| (id, sector))
        };
        self.nodes.iter().flat_map(of_node).filter(|sector| *sector != except).collect()
    }

    /// What one sector holds is on the medium in another one's place.
    pub(super) fn misdirect(&mut self, source: (FileId, usize), target: (FileId, usize)) {
        let bytes = self.node(source.0).durable.sector(source.1);
        let node = self.node_mut(target.0);
        node.durable.sectors[target.1] = bytes;
        node.lied_about = true;
    }

    pub(super) fn node_mut(&mut self, id: FileId) -> &mut Node {
        Arc::make_mut(self.nodes.get_mut(&id).expect("an open file exists"))
    }

    fn names_mut(&mut self, folder: Folder) -> &mut Names {
        self.folders.entry(folder).or_default()
    }

    /// The disk after a power cut that left the chosen versions of files and changes of names. `length`
    /// and `sector` choose as in [`Node::after_power_cut`].
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
        // A folder whose own entry is lost takes its files with it.
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

    /// Files that have, had or may get a name again: all others cannot be seen after a crash.
    pub(super) fn reachable(&self) -> BTreeSet<FileId> {
        let linked = |change: &Version<NameChange>| match change.value {
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

    /// A hash of all that a crash or a reader can see, now or later.
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
                content.len.hash(&mut hasher);
                content.sectors.iter().for_each(|sector| sector.hash.hash(&mut hasher));
            }
            for (index, versions) in &node.sectors {
                (index, versions.len(), node.lost.contains(index)).hash(&mut hasher);
                versions.iter().for_each(|version| version.value.hash.hash(&mut hasher));
            }
            node.lengths.iter().for_each(|version| version.value.hash(&mut hasher));
            node.length_lost.hash(&mut hasher);
        }
        hasher.finish()
    }
}
