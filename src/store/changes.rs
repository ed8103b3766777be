//! Hearing of what batches change, in this process.

use super::Store;
use crate::applier::ChangeStream;
use crate::error::Result;

#[cfg(doc)]
use crate::{applier::ChangeEvent, error::Error};

impl Store {
    /// A stream of what each batch changes from now on, told once the batch is applied: which pages, which of
    /// their bytes, and in what way. Batches never wait for it. A caller that falls back by some 65,000
    /// changes hears [`ChangeEvent::Lagged`] instead of the batches that it missed.
    ///
    /// A restore is told as [`ChangeEvent::Lagged`]: it replaces all pages.
    ///
    /// ```
    /// use remanent::{AppliedChange, ChangeEvent, Options, Place, Store};
    /// let store = Store::temporary(Options::default())?;
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
    /// [`Error::Poisoned`] if the store failed before; [`Error::Forked`].
    pub fn changes(&self) -> Result<ChangeStream> {
        self.check_process()?;
        ChangeStream::begin(&self.engine().applier)
    }
}
