//! The disk of the model: the visible content, the durable content, and every state that a crash can leave.

use std::collections::BTreeMap;

use super::log::Block;

/// A value that is visible once written and durable later: a block of a file, or an entry of the folder.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Versions<T> {
    durable: T,
    /// Versions written since the durable one, oldest first. After a power cut, the value is any of these or
    /// the durable one.
    pending: Vec<T>,
    /// Whether a sync of the pending versions failed. They remain readable, but no later sync writes them,
    /// although it succeeds.
    stuck: bool,
}

impl<T: Clone> Versions<T> {
    pub fn durable(value: T) -> Self {
        Self { durable: value, pending: Vec::new(), stuck: false }
    }

    pub fn visible(&self) -> &T {
        self.pending.last().unwrap_or(&self.durable)
    }

    fn write(&mut self, value: T) {
        self.stuck = false;
        self.pending.push(value);
    }

    fn sync(&mut self) {
        if !self.stuck {
            self.durable = self.visible().clone();
            self.pending.clear();
        }
    }

    fn fail_sync(&mut self) {
        self.stuck = !self.pending.is_empty();
    }

    fn lose(&mut self) {
        self.pending.clear();
        self.stuck = false;
    }

    fn all(&self) -> impl Iterator<Item = &T> {
        std::iter::once(&self.durable).chain(&self.pending)
    }
}

/// Names in the only folder of the model.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Name {
    /// A segment of the log.
    Segment(u64),
    /// A file that does not belong to the store. The next open removes it.
    Temporary(u8),
}

/// The content of a file: blocks, each of which is written separately and may be torn.
pub type File = Vec<Versions<Block>>;

/// A folder and its files. A clone is the disk state after a kill of the process: all writes are visible, and
/// pending writes are still pending.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct Disk {
    files: Vec<File>,
    names: BTreeMap<Name, Versions<Option<usize>>>,
}

impl Disk {
    /// Returns the visible names and their files.
    pub fn list(&self) -> impl Iterator<Item = (Name, &File)> {
        self.names.iter().filter_map(|(&name, file)| Some((name, &self.files[(*file.visible())?])))
    }

    fn file(&mut self, name: Name) -> &mut File {
        let index = self.names[&name].visible().expect("the model writes only to files that it sees");
        &mut self.files[index]
    }

    fn bind(&mut self, name: Name, file: Option<usize>) {
        self.names.entry(name).or_insert_with(|| Versions::durable(None)).write(file);
    }

    pub fn create(&mut self, name: Name, len: usize) {
        self.files.push(vec![Versions::durable(Block::Nothing); len]);
        self.bind(name, Some(self.files.len() - 1));
    }

    pub fn write(&mut self, name: Name, position: usize, block: Block) {
        self.file(name)[position].write(block);
    }

    pub fn sync_file(&mut self, name: Name) {
        self.file(name).iter_mut().for_each(Versions::sync);
    }

    pub fn fail_sync(&mut self, name: Name) {
        self.file(name).iter_mut().for_each(Versions::fail_sync);
    }

    /// Renames a file, which changes two entries of the folder. A power cut may keep either change without
    /// the other.
    pub fn rename(&mut self, source: Name, target: Name) {
        let file = *self.names[&source].visible();
        self.bind(target, file);
        self.bind(source, None);
    }

    pub fn remove(&mut self, name: Name) {
        self.bind(name, None);
    }

    pub fn sync_folder(&mut self) {
        self.names.values_mut().for_each(Versions::sync);
    }

    /// Damages one durable block, for the tests in which damage must be detected.
    pub fn damage(&mut self, name: Name, position: usize) {
        self.file(name)[position] = Versions::durable(Block::Nothing);
    }

    /// Returns every disk state that a power cut can leave. Each pending block and each pending entry
    /// independently keeps its durable version or any later one.
    pub fn power_cuts(&self) -> Vec<Disk> {
        let mut images = vec![self.clone()];
        for (index, file) in self.files.iter().enumerate() {
            for (position, block) in file.iter().enumerate() {
                split(&mut images, block, |image| &mut image.files[index][position]);
            }
        }
        for (&name, file) in &self.names {
            split(&mut images, file, |image| image.names.get_mut(&name).expect("a clone has every name"));
        }
        images
    }

    /// Returns the disk state after a power cut that discards all pending versions.
    pub fn least_power_cut(&self) -> Disk {
        let mut disk = self.clone();
        disk.files.iter_mut().flatten().for_each(Versions::lose);
        disk.names.values_mut().for_each(Versions::lose);
        disk
    }

    /// Removes the files that have no name, so that disks with the same visible content are equal.
    pub fn tidy(mut self) -> Disk {
        let mut files: Vec<File> = Vec::new();
        let mut moved = vec![None; self.files.len()];
        self.names.retain(|_, file| file.all().any(Option::is_some));
        for versions in self.names.values_mut() {
            for file in std::iter::once(&mut versions.durable).chain(&mut versions.pending).flatten() {
                *file = *moved[*file].get_or_insert_with(|| {
                    files.push(std::mem::take(&mut self.files[*file]));
                    files.len() - 1
                });
            }
        }
        self.files = files;
        self
    }
}

/// Replaces every disk by one disk for each version that the cell may have.
fn split<T: Clone>(images: &mut Vec<Disk>, cell: &Versions<T>, at: impl Fn(&mut Disk) -> &mut Versions<T>) {
    if cell.pending.is_empty() {
        return;
    }
    *images = images
        .iter()
        .flat_map(|image| {
            cell.all().map(|version| {
                let mut image = image.clone();
                *at(&mut image) = Versions::durable(version.clone());
                image
            })
        })
        .collect();
}
