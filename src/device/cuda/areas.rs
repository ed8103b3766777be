//! Areas: the units of memory between which a launch plan detects hazards. Two accesses to the same area, at least one
//! of which is a write, are treated as a hazard.

use std::collections::HashSet;
use std::hash::{BuildHasherDefault, Hasher};

use super::resource::Kind;

/// A unit of memory in a launch plan. Pieces in different areas never access the same byte.
///
/// Hazards are checked by area rather than by range, so a check costs one lookup even for two deltas of one page. A
/// batch that ends earlier than necessary costs one launch but never causes a wrong byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Area {
    /// Page memory, by kind and id.
    Memory(Kind, u64),
    /// The list's staging, by index.
    Staging(usize),
    /// Scratch in the GPU's own memory, which contains results before they are copied to staging.
    Scratch,
}

/// A collection of areas that is converted to a set only when it is queried.
///
/// Most command lists need no query: deltas read staging and write page memory, and a move reads one kind of memory and
/// writes another. For a list that moves 65,536 pages, building two sets of that many areas took longer than the rest
/// of the plan.
#[derive(Debug, Default)]
pub(super) struct AreaSet {
    /// The kinds of the areas, one bit each.
    kinds: u8,
    /// Areas not yet in the set. An area added twice in succession is listed once.
    noted: Vec<Area>,
    areas: Areas,
    newest: Option<Area>,
}

impl AreaSet {
    pub fn note(&mut self, area: Area) {
        if self.newest != Some(area) {
            self.kinds |= area.kind();
            self.noted.push(area);
            self.newest = Some(area);
        }
    }

    /// Returns the area that was added last.
    pub fn newest(&self) -> Option<&Area> {
        self.newest.as_ref()
    }

    pub fn contains(&mut self, area: Area) -> bool {
        if self.kinds & area.kind() == 0 {
            return false;
        }
        self.areas.extend(self.noted.drain(..));
        self.areas.contains(&area)
    }

    /// Removes all areas, and keeps the capacity.
    pub fn clear(&mut self) {
        (self.kinds, self.newest) = (0, None);
        self.noted.clear();
        self.areas.clear();
    }
}

impl Area {
    /// Returns the bit of the area's kind. Areas of different kinds are different.
    fn kind(self) -> u8 {
        match self {
            Self::Memory(kind, _) => 1 << kind as u8,
            Self::Staging(_) => 1 << Kind::ALL.len(),
            Self::Scratch => 2 << Kind::ALL.len(),
        }
    }
}

pub(super) type Areas = HashSet<Area, BuildHasherDefault<IdHasher>>;

/// Hashes ids by a multiplication. Ids rise, so a multiplication distributes them well enough. A hash that resists
/// attacks takes several times as long per delta, and a delta in a list of 10,000 costs the host only 0.26 µs in total
/// (`remanent-bench ceilings`).
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(29) ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }

    fn write_isize(&mut self, number: isize) {
        self.write_u64(number as u64);
    }
}
