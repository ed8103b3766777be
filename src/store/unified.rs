//! Hints for pages in unified memory. They are the device's business: nothing is logged, and a crash ends
//! them.

use remanent_format::{PageId, Place};

use super::Store;
use crate::device::{UnifiedHint, UnifiedSupport};
use crate::engine::Engine;
use crate::error::{Error, Result};

impl Store {
    /// What the device can do for pages in [`Place::Unified`]. Nothing in a forked child.
    #[must_use]
    pub fn unified_memory(&self) -> UnifiedSupport {
        if self.check_process().is_err() {
            return UnifiedSupport::default();
        }
        self.engine().device.unified()
    }

    /// Tells the device where a page in [`Place::Unified`] best lies. This changes no
    /// byte, no batch and no epoch, and is not logged: an open begins without hints.
    ///
    /// A hint is of the page's memory, in whole pages of the system, of 4 or 64 KiB: short pages beside it
    /// have it as well. It ends when the page goes to other memory: moved, resized, or changed while it is
    /// leased. A page goes between unified memory and other places by
    /// [`move_to`](crate::WriteBatch::move_to), and takes no hint along.
    ///
    /// ```
    /// use remanent::{Error, Options, Place, Store, UnifiedHint, UnifiedSide};
    /// let store = Store::temporary(Options::default())?;
    /// let mut batch = store.batch();
    /// batch.create_from([7; 4096], Place::Unified);
    /// let page = store.commit(batch)?.pages[0];
    ///
    /// let hint = UnifiedHint::Prefer(Some(UnifiedSide::Gpu));
    /// match store.hint_unified(page, hint) {
    ///     Ok(()) => assert!(store.unified_memory().takes_hints),
    ///     Err(error) => assert!(matches!(error, Error::HintRefused { .. })),
    /// }
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::UnknownPage`]; [`Error::HintRefused`] for a page in another place, and where the device takes
    /// no hints ([`UnifiedSupport::takes_hints`]); [`Error::Device`] where the driver refuses the hint, which
    /// harms nothing; [`Error::Poisoned`] if the device is lost.
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
                return Err(Error::HintRefused { place, reason });
            }
            // In this turn, so that the page stays where it is.
            device.hint_unified(turn.applied.memory_of(page)?.span().memory, hint)
        });
        hinted.map_err(|error| match error {
            Error::Device { context_lost: false, .. } => error,
            error => poison.set_by_device(error),
        })
    }
}
