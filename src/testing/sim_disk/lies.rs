//! Simulates a medium that reports writes falsely. There are three kinds of lies:
//!
//! - *Lost*: a write is reported as done, but the sector keeps its older bytes.
//! - *Misdirected*: a write is reported as done, but the bytes were written to another sector of any file.
//! - *Stale*: the write was done, but the first read returns the previous bytes once.
//!
//! No sync fails, and reads return the written data while the page cache contains it. After the next power cut, the data
//! is read from the medium.
//!
//! There is one lie at a time, and everything else on the disk is unchanged. A real run might have detected the lie by
//! reading back from the medium, but the simulation only replays the events of the run. Therefore these states are
//! worse than those of a real run.

use std::collections::HashSet;
use std::sync::Arc;

use remanent_format::FileName;
use remanent_format::limits::SECTOR_LEN;

use super::crash::{SplitMix, Walk};
use super::event::DiskEvent;
use super::node::{FileId, Sector};
use super::state::DiskState;
use super::{SimCore, SimDisk};

/// The effect of a write that the medium falsely reported as done, or whose first read is false.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LieKind {
    /// The write was lost. The sector is unchanged.
    Lost,
    /// The write was misdirected. The sector is unchanged, and another sector contains the bytes.
    Misdirected,
    /// The sector was written, but its next read returns the previous bytes.
    Stale,
}

/// A sector whose next read returns its previous bytes.
pub(super) struct Stale {
    id: FileId,
    sector: usize,
    older: Arc<Sector>,
}

impl SimCore {
    /// If a read includes the stale sector, replaces the sector's bytes in `out` with its previous bytes. Later reads
    /// return the current bytes.
    pub(super) fn age(&mut self, id: FileId, offset: u64, out: &mut [u8]) {
        let Some(stale) = self.stale.take_if(|stale| {
            let start = (stale.sector * SECTOR_LEN) as u64;
            stale.id == id && offset < start + SECTOR_LEN as u64 && start < offset + out.len() as u64
        }) else {
            return;
        };
        let start = (stale.sector * SECTOR_LEN) as u64;
        for (at, byte) in (start..).zip(stale.older.bytes()) {
            let target = at.checked_sub(offset).and_then(|at| out.get_mut(at as usize));
            target.into_iter().for_each(|target| *target = *byte);
        }
    }
}

/// A disk after a power cut at the end of its history. One sector of the disk was not written as reported.
#[derive(Debug)]
pub struct Lie {
    /// The disk after the power cut, unlocked and without faults and recorded events.
    pub disk: SimDisk,
    /// Whether the write was lost or misdirected, or whether the first read returns old bytes.
    pub kind: LieKind,
    /// The file that contains the sector, by the name with which the file was opened.
    pub file: FileName,
    /// The offset of the sector in the file, in bytes.
    pub offset: u64,
    /// The index in the disk's history of the sync that should have made the sector durable.
    pub event: usize,
}

impl SimDisk {
    /// Calls `each` with every lie whose disk differs from the true disk and from the disks of all earlier lies. For
    /// each sector that a sync made durable, the lies are the lost write, a misdirected write whose target depends on
    /// `seed`, and the stale read.
    pub fn lies(&self, seed: u64, mut each: impl FnMut(Lie)) {
        let mut random = SplitMix(seed);
        let mut walk = Walk::new(self);
        let events = walk.events.clone();
        let truth = at_last(walk.state.clone(), &events);
        let mut seen = HashSet::from([truth.hash()]);
        let mut seen_stale = HashSet::new();
        for (event, sync) in events.iter().enumerate() {
            let (DiskEvent::SyncFile { file, id } | DiskEvent::SyncWindow { file, id, .. }) = sync else {
                continue;
            };
            walk.go_to(event);
            let before = walk.state.clone();
            walk.go_to(event + 1);
            for sector in walk.state.node(*id).newly_durable(before.node(*id)) {
                for kind in [LieKind::Lost, LieKind::Misdirected] {
                    let mut state = walk.state.clone();
                    if kind == LieKind::Misdirected {
                        let others = state.durable_sectors((*id, sector));
                        let Some(target) = random.choose(&others) else { continue };
                        state.misdirect((*id, sector), *target);
                    }
                    state.node_mut(*id).lose_write(sector, before.node(*id));
                    let state = at_last(state, &events[event + 1..]);
                    if seen.insert(state.hash()) {
                        let (disk, offset) = (SimDisk::from_state(state), (sector * SECTOR_LEN) as u64);
                        each(Lie { disk, kind, file: *file, offset, event });
                    }
                }
                let older = before.node(*id).durable_sector(sector);
                let now = truth.nodes.get(id).map(|node| node.durable_sector(sector).hash());
                let differs = now.is_some_and(|now| now != older.hash());
                if differs && seen_stale.insert((*id, sector, older.hash())) {
                    let (disk, offset) = (SimDisk::from_state(truth.clone()), (sector * SECTOR_LEN) as u64);
                    disk.shared.lock().stale = Some(Stale { id: *id, sector, older });
                    each(Lie { disk, kind: LieKind::Stale, file: *file, offset, event });
                }
            }
        }
    }
}

/// Returns the state of the disk after `events` and a power cut that discards all pending changes.
fn at_last(mut state: DiskState, events: &[DiskEvent]) -> DiskState {
    events.iter().for_each(|event| state.apply(event));
    state.after_power_cut(|_, _| false, |_| 0, |_, _| 0)
}

impl SplitMix {
    fn choose<'a, T>(&mut self, among: &'a [T]) -> Option<&'a T> {
        if among.is_empty() { None } else { among.get(self.below(among.len())) }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use remanent_format::Folder;

    use super::*;
    use crate::disk::Disk;

    /// Tests a disk with two files of two sectors. The second sector of the first file is written twice.
    #[test]
    fn lost_write_keeps_bytes_and_misdirected_one_hits_other_sector() {
        let disk = SimDisk::new();
        let [first, second] = [0, 1].map(|number| FileName::Temporary(Folder::Root, number));
        for (name, bytes) in [(first, [1, 2]), (second, [3, 4])] {
            let file = disk.create(name).unwrap();
            file.write_at(0, &bytes.map(|byte| [byte; SECTOR_LEN]).concat()).unwrap();
            file.sync().unwrap();
        }
        disk.sync_folder(Folder::Root).unwrap();
        let from = disk.events();
        let file = disk.open(first, true).unwrap();
        file.write_at(SECTOR_LEN as u64, &[5; SECTOR_LEN]).unwrap();
        file.sync().unwrap();
        let heads = |disk: &SimDisk| -> Vec<u8> {
            let bytes = [first, second].map(|file| disk.bytes(file).unwrap()).concat();
            bytes.chunks(SECTOR_LEN).map(|sector| sector[0]).collect()
        };
        let mut seen = BTreeSet::new();
        for seed in 0..20 {
            disk.lies(seed, |lie| {
                if lie.event > from && lie.kind != LieKind::Stale {
                    assert_eq!((lie.file, lie.offset), (first, SECTOR_LEN as u64));
                    seen.insert((lie.kind == LieKind::Misdirected, heads(&lie.disk)));
                }
            });
        }
        let expected = [(false, vec![1, 2, 3, 4]), (true, vec![5, 2, 3, 4]), (true, vec![1, 2, 5, 4])];
        assert_eq!(seen, BTreeSet::from(expected).into_iter().chain([(true, vec![1, 2, 3, 5])]).collect());
        assert_eq!(heads(&disk), [1, 5, 3, 4], "the disk itself is as it was");
    }

    #[test]
    fn overwritten_lie_has_no_effect() {
        let disk = SimDisk::new();
        let name = FileName::Temporary(Folder::Root, 0);
        let file = disk.create(name).unwrap();
        disk.sync_folder(Folder::Root).unwrap();
        for byte in [1, 2] {
            file.write_at(0, &[byte; SECTOR_LEN]).unwrap();
            file.sync().unwrap();
        }
        let mut found = Vec::new();
        disk.lies(0, |lie| {
            if lie.kind != LieKind::Stale {
                found.push((lie.kind, lie.disk.bytes(name).unwrap()[0]));
            }
        });
        assert_eq!(found, [(LieKind::Lost, 1)], "there is no other sector to strike");
    }

    #[test]
    fn stale_read_returns_older_bytes_once() {
        let disk = SimDisk::new();
        let name = FileName::Temporary(Folder::Root, 0);
        let file = disk.create(name).unwrap();
        disk.sync_folder(Folder::Root).unwrap();
        file.write_at(0, &[1; 3 * SECTOR_LEN]).unwrap();
        file.sync().unwrap();
        file.write_at(SECTOR_LEN as u64, &[2; SECTOR_LEN]).unwrap();
        file.sync().unwrap();
        let mut found = Vec::new();
        disk.lies(0, |lie| {
            if lie.kind == LieKind::Stale && lie.offset == SECTOR_LEN as u64 {
                let file = lie.disk.open(name, false).unwrap();
                // Reads the bytes before the sector, across its beginning, and across its end.
                let bytes = [(0, 512), (510, 4), (1022, 4)].map(|(offset, len)| {
                    let mut out = vec![0; len];
                    file.read_bypassing_cache(offset, &mut out).unwrap();
                    out
                });
                found.push(bytes.map(|bytes| bytes[bytes.len() - 2..].to_vec()));
            }
        });
        // The stale bytes are those before the first write of the sector, and those before the second.
        let again = vec![1, 1];
        let expected = [0, 1].map(|older| [again.clone(), vec![older; 2], again.clone()]);
        assert_eq!(found, expected);
    }
}
