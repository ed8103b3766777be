//! The bytes of the pages in a state, read in windows. The base of a page is proven before any of its bytes are
//! returned. Memory is allocated for one window only.

use std::collections::BTreeMap;
use std::ops::Range;

use remanent_format::state::follow::Resolution;
use remanent_format::state::replay::ResolvedState;
use remanent_format::state::trail::{OpLocations, ProvenPage};
use remanent_format::{Damage, PageId, PageInfo, PageTable, SnapshotId};

use crate::read::store_dir::StoreDir;

/// Length of a window in bytes. Operations on scattered elements are read once per window.
const WINDOW_LEN: u64 = 32 << 20;

/// Returns the windows in which a page of `len` bytes is read.
pub fn windows(len: u64) -> impl Iterator<Item = Range<u64>> {
    (0..len).step_by(WINDOW_LEN as usize).map(move |from| from..len.min(from.saturating_add(WINDOW_LEN)))
}

/// The bytes of selected pages of a state. The bytes of each page are proven, or their damage is known.
pub struct PageBytes<'d> {
    dir: &'d StoreDir,
    base: Option<SnapshotId>,
    resolved: ResolvedState,
    op_locations: OpLocations,
    pages: BTreeMap<PageId, Result<ProvenPage, Damage>>,
}

impl<'d> PageBytes<'d> {
    /// Proves the pages of a state that `wanted` selects. Returns an error if their total length exceeds
    /// `page_bytes_max` bytes.
    pub fn prove(
        dir: &'d StoreDir,
        resolution: Resolution,
        op_locations: OpLocations,
        page_bytes_max: u64,
        wanted: impl Fn(&PageInfo) -> bool,
    ) -> Result<Self, Damage> {
        let mut resolution = resolution;
        let Resolution { resolved, .. } = &mut resolution;
        resolved.bases.retain(|page| resolved.table.get(page).as_ref().is_some_and(&wanted));
        resolution.check_page_bytes(page_bytes_max)?;
        let Resolution { base, resolved, .. } = resolution;
        let pages = resolved.bases.iter().map(|(page, _)| (page, op_locations.prove(dir, &resolved, page)));
        let pages = pages.collect();
        Ok(Self { dir, base, resolved, op_locations, pages })
    }

    /// Returns `self` if no page is lost, otherwise the damage of the first lost page.
    pub fn whole(self) -> Result<Self, Damage> {
        let first = self.damage().next().cloned();
        first.map_or(Ok(self), Err)
    }

    /// Returns the damage of all lost pages.
    pub fn damage(&self) -> impl Iterator<Item = &Damage> {
        self.lost().map(|(_, damage)| damage)
    }

    /// Returns the ids of all lost pages with their damage.
    pub fn lost(&self) -> impl Iterator<Item = (PageId, &Damage)> {
        self.pages.iter().filter_map(|(page, proven)| Some((*page, proven.as_ref().err()?)))
    }

    /// Returns the snapshot from which the state was computed, or `None` for the beginning of the log.
    pub fn base(&self) -> Option<SnapshotId> {
        self.base
    }

    /// Returns the pages and the root of the state.
    pub fn table(&self) -> &PageTable {
        &self.resolved.table
    }

    /// Returns the damage of a selected page as an error if the page is lost.
    pub fn check(&self, page: PageId) -> Result<(), Damage> {
        self.pages[&page].as_ref().map(drop).map_err(Clone::clone)
    }

    /// Reads a window of a selected page.
    pub fn window(&self, page: PageId, window: &Range<u64>) -> Result<Vec<u8>, Damage> {
        let proven = self.pages[&page].as_ref().map_err(Clone::clone)?;
        self.op_locations.window(self.dir, proven, window)
    }

    /// Passes the bytes of a selected page to `sink`, window by window.
    pub fn stream<E: From<Damage>>(
        &self,
        info: &PageInfo,
        mut sink: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.check(info.page)?;
        windows(info.len).try_for_each(|window| sink(&self.window(info.page, &window)?))
    }

    /// Returns the CRC-32 of a selected page. If no batch has changed the page since its image, the checksum of the
    /// image is returned without reading the page.
    pub fn crc32(&self, info: &PageInfo) -> Result<u32, Damage> {
        self.check(info.page)?;
        if let Some(image) = self.op_locations.exact_image(&self.resolved, info.page) {
            return Ok(image.raw_crc);
        }
        let mut sum = crc32fast::Hasher::new();
        self.stream(info, |bytes| -> Result<(), Damage> {
            sum.update(bytes);
            Ok(())
        })?;
        Ok(sum.finalize())
    }
}
