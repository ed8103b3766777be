//! A reserved part of the budget, from which memory is allocated later.

use std::collections::BTreeMap;
use std::sync::Arc;

use remanent_format::Place;

use super::account::Account;
use super::{Arena, PageMemory, Purpose};
use crate::base::allocation::make_room;
use crate::base::sync::atomic::{AtomicU64, Ordering};
use crate::device::{Lane, MemoryId};
use crate::error::{Error, Result};

/// Bytes of the budget that are reserved for later allocations, so that these allocations cannot fail for lack of
/// budget. Dropping the reservation returns the unused bytes to the budget.
pub struct Reservation<'a> {
    arena: &'a Arena,
    purpose: Purpose,
    left: Vec<(Arc<Account>, Place, AtomicU64)>,
    /// The lanes whose fences may be waited for, to release retired memory if the device is out of memory. If empty,
    /// only free memory is used.
    awaited: &'static [Lane],
}

impl Arena {
    /// Claims the requested bytes of every place. If one place has too few bytes left, claims nothing.
    pub(super) fn claim(
        &self,
        awaited: &'static [Lane],
        purpose: Purpose,
        sums: &BTreeMap<Place, u64>,
    ) -> Result<Reservation<'_>> {
        // If an account has too few bytes, dropping this value returns what was claimed from the other accounts.
        let mut reservation =
            Reservation { arena: self, purpose, left: Vec::with_capacity(sums.len()), awaited };
        for (place, sum) in sums {
            let account = self.account(*place);
            account.claim(*sum)?;
            reservation.left.push((account, *place, AtomicU64::new(*sum)));
        }
        Ok(reservation)
    }
}

impl Reservation<'_> {
    /// Allocates memory for a page, with unspecified contents, from the reserved bytes. If the device is out of memory
    /// and the reservation may wait for lanes, releases retired memory and tries again once. Several threads may
    /// allocate from one reservation.
    ///
    /// # Errors
    /// `OutOfMemory`, `Unavailable`, a device error. The bytes stay reserved.
    ///
    /// # Panics
    /// If fewer than `len` bytes are left for the place.
    pub fn allocate(&self, place: Place, len: u64) -> Result<PageMemory> {
        let left = self.left.iter().find(|(_, reserved, _)| *reserved == place);
        let (account, _, left) = left.unwrap_or_else(|| panic!("nothing is reserved in place {place}"));
        let taken = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(len));
        if let Err(left) = taken {
            panic!("{len} bytes of {left} that are left of a reservation in place {place}");
        }
        let memory = self.ask(place, len).inspect_err(|_| _ = left.fetch_add(len, Ordering::Relaxed))?;
        account.allocated(self.purpose, 1, len);
        Ok(PageMemory::new(memory, place, len, self.purpose))
    }

    /// Allocates memory for several pages, in order, like [`allocate`](Self::allocate), and appends it to `memory`. The
    /// pages must use the whole remaining reservation. On failure, `memory` contains the memory allocated before the
    /// failure.
    ///
    /// # Errors
    /// Same as [`allocate`](Self::allocate).
    pub(super) fn allocate_all(self, pages: &[(Place, u64)], memory: &mut Vec<PageMemory>) -> Result<()> {
        let Arena { device, .. } = self.arena;
        let mut made = Vec::new();
        make_room(&mut made, pages.len())?;
        let allocated = match device.allocate_all(pages, &mut made) {
            Err(Error::OutOfMemory { .. }) => self.arena.reap_awaiting(self.awaited).and_then(|()| {
                let rest = &pages[made.len()..];
                device.allocate_all(rest, &mut made)
            }),
            other => other,
        };
        let pages = &pages[..made.len()];
        for (account, place, left) in &self.left {
            let (mut count, mut len) = (0, 0);
            for (_, page_len) in pages.iter().filter(|(of, _)| of == place) {
                (count, len) = (count + 1, len + page_len);
            }
            let before = left.fetch_sub(len, Ordering::Relaxed);
            assert!(len <= before, "{len} bytes of {before} that are left in place {place}"); // I10
            account.allocated(self.purpose, count, len);
        }
        let named = |(memory, (place, len)): (MemoryId, &(Place, u64))| {
            PageMemory::new(memory, *place, *len, self.purpose)
        };
        memory.extend(made.into_iter().zip(pages).map(named));
        allocated
    }

    fn ask(&self, place: Place, len: u64) -> Result<MemoryId> {
        let Arena { device, .. } = self.arena;
        if self.awaited.is_empty() {
            return device.allocate_at_once(place, len);
        }
        match device.allocate(place, len) {
            Err(Error::OutOfMemory { .. }) => {
                self.arena.reap_awaiting(self.awaited)?;
                device.allocate(place, len)
            }
            other => other,
        }
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.left.iter_mut().for_each(|(account, _, left)| account.unclaim(*left.get_mut()));
    }
}
