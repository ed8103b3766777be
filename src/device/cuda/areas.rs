//! Areas: memory as a plan of launches tells it apart, and sets of them.

use std::collections::HashSet;
use std::hash::{BuildHasherDefault, Hasher};

use super::resource::Kind;

/// Memory as the plan tells it apart: pieces in different areas never touch the same byte.
///
/// Hazards are looked up by area and not by range. Two deltas of one page then only cost a lookup each, and a
/// batch that ends earlier than it must costs a launch, not a wrong byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Area {
    /// Page memory, by its kind and its id.
    Memory(Kind, u64),
    /// The list's staging, by its index.
    Staging(usize),
    /// Results on their way to staging, in the GPU's own memory.
    Scratch,
}

/// Areas, as a set as far as one was asked for.
///
/// Most lists ask for none: deltas read staging and write page memory, and pages that move from one kind of
/// memory to another are read in one and written in the other. For moves of 65,536 pages two sets of as many
/// areas took longer than the rest of their plan.
#[derive(Debug, Default)]
pub(super) struct AreaSet {
    /// The kinds of the areas, one bit each.
    kinds: u8,
    /// Those that are not in the set yet, but for the newest ones that came twice in a row.
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

    /// The area that was noted last.
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

    /// Forgets all areas, and keeps the room for others.
    pub fn clear(&mut self) {
        (self.kinds, self.newest) = (0, None);
        self.noted.clear();
        self.areas.clear();
    }
}

impl Area {
    /// The bit of its kind. Areas of different kinds are different ones.
    fn kind(self) -> u8 {
        match self {
            Self::Memory(kind, _) => 1 << kind as u8,
            Self::Staging(_) => 1 << Kind::ALL.len(),
            Self::Scratch => 2 << Kind::ALL.len(),
        }
    }
}

pub(super) type Areas = HashSet<Area, BuildHasherDefault<IdHasher>>;

/// Hashes ids, which rise: a multiplication spreads them well enough. A hash against attackers costs a delta
/// several times as much, and a delta of a list of 10,000 costs the host only 0.26 µs in all (`bench gpu`).
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
