//! Loads pages together with other ranks: each rank loads a share of the images over its own bus, and the ranks
//! exchange the other images between their GPUs.
//!
//! All ranks have stores with the same pages. Each rank runs two tasks at the same time:
//!
//! - **Load**: read, upload and verify the images of its own share, in page order ([`plan`]).
//! - **Exchange**: gather a header of each rank ([`link`]). If all ranks have the same pages, exchange the shares in
//!   rounds ([`exchange`]), and verify each page that arrives with the checksum in the rank's own manifest (I12).
//!
//! A rank verifies pages only with its own manifest, and trusts no other rank. Pages that did not arrive, or arrived
//! with a wrong checksum, are loaded from the rank's own files afterwards.
//!
//! Each open sends one header, even if it fails before the exchange or loads nothing, so that the other ranks detect
//! immediately that this rank does not take part. A rank that cannot load its share marks its part of the next round as
//! invalid, and the other ranks load the rest themselves. Only a rank that ends without notifying the others makes them
//! wait for their time limit, and their opens then fail.
//!
//! Only images that were verified with their snapshot are exchanged. All other images must be read back from the rank's
//! own medium (I7). This module writes nothing to disk, so a crash loses nothing.

mod exchange;
mod link;
mod plan;

use remanent_format::PageTable;

use self::exchange::{Exchange, Exchanged};
use self::link::{Header, Link};
use self::plan::GatherPlan;
use super::Recovery;
use super::page_memory::PageMemories;
use super::report::GatherReport;
use crate::base::allocation::{append, collected, copied, push};
use crate::base::parallel;
use crate::base::sync::atomic::{AtomicBool, Ordering};
use crate::base::sync::{Mutex, mpsc};
use crate::error::Result;
use crate::images::read::ImageRequest;
use crate::options::{GatherSource, Options};

/// The number of parts in which a rank loads its share, unless the parts would be shorter than [`UNIT_LEN_MIN`].
const UNITS: u64 = 8;
/// The minimum length in bytes of a part of the share. At the end of each part, the bus is briefly idle.
const UNIT_LEN_MIN: u64 = 64 << 20;

/// A function that loads images, grouped by file, from this rank's files.
type Load<'l> = &'l (dyn Fn(&mut [Vec<ImageRequest>]) -> Result<()> + Sync);

/// The exchange of pages during an open, and its report. An open exchanges pages at most once.
pub(crate) struct OpenGather<'a> {
    source: Option<&'a GatherSource>,
    is_used: AtomicBool,
    report: Mutex<Option<GatherReport>>,
}

impl<'a> OpenGather<'a> {
    /// Creates the exchange that `options` request. A single rank exchanges nothing.
    pub fn new(options: &'a Options) -> Self {
        let source = options.memory.gather.as_ref().filter(|source| source.exchange.ranks() > 1);
        Self { source, is_used: AtomicBool::new(false), report: Mutex::default() }
    }

    /// Returns the exchange if no attempt of this open has used it yet.
    fn take(&self) -> Option<&'a GatherSource> {
        self.source.filter(|_| !self.is_used.swap(true, Ordering::Relaxed))
    }

    /// Returns the report of the exchange, or `None` if no exchange took place.
    pub fn report(&self) -> Option<GatherReport> {
        self.report.lock().clone()
    }
}

impl Recovery<'_> {
    /// Notifies the other ranks that this rank does not take part. Does nothing if the exchange was already started. An
    /// error is only logged, because it must not replace the result of the open.
    pub(super) fn decline_gather(&self) {
        let Some(source) = self.gather.take() else { return };
        let declined = Link::new(self, source).and_then(|link| link.headers(Header::default()).map(drop));
        if let Err(error) = declined {
            tracing::warn!(%error, "other ranks may wait for this one");
        }
    }

    /// Loads images together with the other ranks, and returns the images that remain to be loaded.
    ///
    /// # Errors
    /// The errors of `load`; `Error::Nccl` if another rank ends without notifying this one; a device error.
    pub(super) fn gather(
        &self,
        table: &PageTable,
        memories: &PageMemories<'_>,
        images: Vec<Vec<ImageRequest>>,
        load: Load<'_>,
    ) -> Result<Vec<Vec<ImageRequest>>> {
        let Some(source) = self.gather.take() else { return Ok(images) };
        let link = Link::new(self, source)?;
        let (mut shared, mut rest) = (Vec::new(), Vec::new());
        for mut of_file in images {
            let is_shared = |image: &mut ImageRequest| {
                image.len > 0 && table.get(image.page).is_some_and(|info| info.place == link.place)
            };
            append(&mut shared, of_file.extract_if(.., is_shared))?;
            push(&mut rest, of_file)?;
        }
        let (rank, ranks) = (source.exchange.rank(), source.exchange.ranks());
        let plan = GatherPlan::new(shared, ranks)?;
        let (progress, loaded) = mpsc::channel();
        let is_over = AtomicBool::new(false);
        let (plan, is_over) = (&plan, &is_over);
        let exchange = || {
            let exchanged = Exchange { link: &link, plan, loaded }.run(table, memories);
            is_over.store(exchanged.is_err(), Ordering::Relaxed);
            exchanged
        };
        // The exchange waits until the sender is dropped, which happens when the load ends, even after a failure.
        let (exchanged, own) =
            parallel::join(exchange, move || load_share(plan, rank, load, is_over, progress));
        let Exchanged { arrived, stopped } = exchanged?;
        own?;
        if let Some(reason) = &stopped {
            tracing::info!(reason, "pages are loaded without the other ranks");
        }
        let own = plan.share(rank);
        let total = |pages: &mut dyn Iterator<Item = usize>| {
            pages.fold((0, 0), |(count, bytes), page| (count + 1, bytes + plan.images()[page].len))
        };
        let (loaded_pages, loaded_bytes) = total(&mut own.clone());
        let (received_pages, received_bytes) = total(&mut (0..arrived.len()).filter(|page| arrived[*page]));
        *self.gather.report.lock() =
            Some(GatherReport { ranks, loaded_pages, loaded_bytes, received_pages, received_bytes, stopped });
        let missing = (0..arrived.len()).filter(|page| !arrived[*page] && !own.contains(page));
        append(&mut rest, by_file(missing.map(|page| plan.images()[page]))?)?;
        Ok(rest)
    }
}

/// Groups images by their file.
fn by_file(images: impl Iterator<Item = ImageRequest>) -> Result<Vec<Vec<ImageRequest>>> {
    let mut images = collected(images)?;
    images.sort_unstable_by_key(|image| (image.image.file, image.image.offset));
    images.chunk_by(|one, next| one.image.file == next.image.file).map(copied).collect()
}

/// Loads this rank's share in page order. After each part, sends the offset in the stream up to which pages are loaded.
/// If loading fails, the channel is closed.
fn load_share(
    plan: &GatherPlan,
    rank: u32,
    load: Load<'_>,
    is_over: &AtomicBool,
    progress: mpsc::Sender<u64>,
) -> Result<()> {
    let share = plan.share(rank);
    let unit_len = (plan.stream_len() / UNITS).max(UNIT_LEN_MIN);
    let mut next = share.start;
    while next < share.end && !is_over.load(Ordering::Relaxed) {
        let begin = next;
        let until = plan.start_of(begin).saturating_add(unit_len);
        while next < share.end && (next == begin || plan.end_of(next) <= until) {
            next += 1;
        }
        load(&mut by_file(plan.images()[begin..next].iter().copied())?)?;
        // Sending fails if the exchange has ended. The share must be loaded in any case.
        let _is_over = progress.send(plan.end_of(next - 1));
    }
    Ok(())
}
