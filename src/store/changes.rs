//! Reports the changes of each batch to subscribers within this process.

use super::Store;
use crate::applier::ChangeStream;
use crate::error::Result;

#[cfg(doc)]
use crate::{applier::ChangeEvent, error::Error};

impl Store {
    /// Returns a stream of the changes that each batch makes from now on: the changed pages, the changed bytes, and the
    /// kinds of change. A batch is reported after it is applied.
    ///
    /// Batches never wait for the stream. A subscriber that falls behind by about 65,000 changes receives
    /// [`ChangeEvent::Lagged`] instead of the batches that it missed. A restore replaces all pages, so it is also
    /// reported as [`ChangeEvent::Lagged`].
    ///
    /// ```
    /// use remanent::follow::{AppliedChange, ChangeEvent};
    /// use remanent::{Place, Store};
    /// let store = Store::temporary()?;
    /// let mut batch = store.batch();
    /// batch.create(100, Place::Host);
    /// let page = store.commit(batch)?.pages[0];
    ///
    /// let mut changes = store.changes()?;
    /// let mut batch = store.batch();
    /// batch.write(page, 10, b"abc").write(page, 13, b"de");
    /// let committed = store.commit(batch)?;
    /// let Some(ChangeEvent::Applied(batch)) = changes.next() else { panic!("a batch was applied") };
    /// assert_eq!(batch.lsn, committed.position.lsn);
    /// assert_eq!(batch.pages[0].page, page);
    /// assert_eq!(batch.pages[0].changes, [AppliedChange::Written { ranges: vec![10..15] }]);
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Poisoned`] if the store has failed; [`Error::Forked`].
    pub fn changes(&self) -> Result<ChangeStream> {
        self.check_process()?;
        ChangeStream::begin(&self.engine().applier)
    }
}
