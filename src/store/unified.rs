//! Passes hints about pages in unified memory to the device. Hints are not logged, and a crash discards them.

use remanent_format::{PageId, Place};

use super::Store;
use crate::device::{UnifiedHint, UnifiedSupport};
use crate::engine::Engine;
use crate::error::{Error, Refused, Result};

impl Store {
    /// Returns which features the device supports for pages in [`Place::Unified`], or no feature in a forked child.
    #[must_use]
    pub fn unified_memory(&self) -> UnifiedSupport {
        if self.check_process().is_err() {
            return UnifiedSupport::default();
        }
        self.engine().device.unified_support()
    }

    /// Passes the device a hint on where to keep the memory of a page in [`Place::Unified`]. Hints change no bytes and
    /// no epoch, and are not logged, so a newly opened store has no hints.
    ///
    /// A hint covers the page's memory in whole system pages of 4 or 64 KiB, so other short pages in the same system
    /// page are affected too. A hint ends when the page gets other memory, which happens when the page is moved,
    /// resized, or changed while it is leased. [`move_to`](crate::WriteBatch::move_to) moves a page into or out of
    /// unified memory, without its hints.
    ///
    /// ```
    /// use remanent::device::{UnifiedHint, UnifiedSide};
    /// use remanent::{Error, Place, Store};
    /// let store = Store::temporary()?;
    /// let mut batch = store.batch();
    /// batch.create_from([7; 4096], Place::Unified);
    /// let page = store.commit(batch)?.pages[0];
    ///
    /// let hint = UnifiedHint::Prefer(Some(UnifiedSide::Gpu));
    /// match store.hint_unified(page, hint) {
    ///     Ok(()) => assert!(store.unified_memory().takes_hints),
    ///     Err(error) => assert!(matches!(error, Error::Refused { .. })),
    /// }
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::UnknownPage`]; [`Error::Refused`] for a page in another place, or if the device does not support
    /// hints ([`UnifiedSupport::takes_hints`]); [`Error::Device`] if the driver rejects the hint, which has no other
    /// effect; [`Error::Poisoned`] if the device is lost.
    pub fn hint_unified(&self, page: PageId, hint: UnifiedHint) -> Result<()> {
        self.check_process()?;
        let Engine { applier, device, poison, .. } = self.engine();
        poison.check()?;
        applier.unloaded().wait([page])?;
        let device = device.clone();
        let hinted = applier.turn(move |turn| {
            let place = turn.applied.table.get(page).ok_or(Error::UnknownPage { page })?.place;
            if place != Place::Unified {
                let reason = "only pages in unified memory move between a GPU and the host by themselves";
                return Err(Error::Refused(Refused::Hint { place, reason }));
            }
            // The hint is set within this closure, which runs between two batches, so that the page cannot move first.
            device.hint_unified(turn.applied.memory_of(page)?.span().memory, hint)
        });
        hinted.map_err(|error| match error {
            Error::Device { context_lost: false, .. } => error,
            error => poison.set_by_device(error),
        })
    }
}
