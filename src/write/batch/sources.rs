//! Pages whose bytes a batch takes from sources: they are read when the batch is committed, piece by piece,
//! so that a page of any length takes little memory beside its own.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use remanent_format::limits::PAGE_LEN_MAX;
use remanent_format::{PageId, Place};

use super::{BatchStep, CopySources, CreatePage, NOWHERE, PageRef, WriteBatch};
use crate::base::allocation::push;
use crate::error::{Error, Result};

/// Bytes that a batch takes when it is committed: [`WriteBatch::create_from_source`],
/// [`WriteBatch::replace_from_source`]. A [`File`] is one.
///
/// The source is read by the thread that commits, or by others that it waits for: each page by one thread,
/// and the pages of a long batch by several. They hold no lock of the store meanwhile: a source may read
/// pages of the same store.
pub trait ByteSource: Debug + Send + Sync {
    /// Fills `bytes` with those from `offset` on.
    ///
    /// A range may be asked for again: a sample tells whether compression pays, and a page that does not
    /// compress after all is read once more. The page holds what one reading found from its start to its end.
    ///
    /// # Errors
    /// Why the bytes are not all there. The commit fails with [`Error::SourceFailed`], and nothing changed.
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;
}

impl ByteSource for File {
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(bytes, offset)
    }
}

/// A page whose bytes come from a source.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SourcePage<'a> {
    /// The operation's index in the batch.
    pub step: usize,
    pub page: PageId,
    /// The page's length in bytes, not 0.
    pub len: u64,
    pub source: &'a dyn ByteSource,
}

impl WriteBatch {
    /// Creates a page of the first `len` bytes of a source, which is read when the batch is committed.
    ///
    /// Memory is taken for a few pieces of 4 MiB beside the page's own, however long the page is. Where the
    /// sources of a batch give more than a quarter of a segment together, their bytes are written once: to an
    /// image file, which the log and the next snapshot only name. No other operation of the batch may change
    /// or copy the page's bytes.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use std::{fs, io};
    /// use remanent::{ByteSource, Options, Place, Store};
    /// let store = Store::temporary(Options::default())?;
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let path = directory.path().join("weights");
    /// # fs::write(&path, [7; 4096]).unwrap();
    /// let file = Arc::new(fs::File::open(&path).unwrap());
    ///
    /// /// The numbers from 0 on, in two bytes each.
    /// #[derive(Debug)]
    /// struct Numbers;
    ///
    /// impl ByteSource for Numbers {
    ///     fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
    ///         for (at, byte) in (offset..).zip(bytes) {
    ///             *byte = (at / 2).to_le_bytes()[(at % 2) as usize];
    ///         }
    ///         Ok(())
    ///     }
    /// }
    ///
    /// let mut batch = store.batch();
    /// batch.create_from_source(4096, file, Place::Host).key("weights");
    /// batch.create_from_source(6, Arc::new(Numbers), Place::Host);
    /// let pages = store.commit(batch)?.pages;
    /// assert_eq!(store.read_to_vec(pages[0])?, [7; 4096]);
    /// assert_eq!(store.read_to_vec(pages[1])?, [0, 0, 1, 0, 2, 0]);
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// The commit fails with [`Error::SourceFailed`], and nothing changed, if the source does not give that
    /// many bytes.
    pub fn create_from_source(
        &mut self,
        len: u64,
        source: Arc<dyn ByteSource>,
        place: Place,
    ) -> CreatePage<'_> {
        let CreatePage { step, page, .. } = self.create(len, place);
        self.step(BatchStep::Source { page: page.into(), len, source });
        CreatePage::new(self, step, page)
    }

    /// Makes a page's bytes the first `len` bytes of a source, as [`WriteBatch::create_from_source`] makes
    /// those of a new page. The page is `len` bytes long then. Key, metadata and place stay.
    ///
    /// The page goes to new memory, as by [`WriteBatch::resize`]: there must be room for it in the budget
    /// beside the old, and a pinned page refuses it.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use remanent::{Options, Place, Store};
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let path = directory.path().join("weights");
    /// # std::fs::write(&path, [8; 9]).unwrap();
    /// let store = Store::temporary(Options::default())?;
    /// let mut batch = store.batch();
    /// batch.create_from([7; 5], Place::Host);
    /// let page = store.commit(batch)?.pages[0];
    ///
    /// let file = Arc::new(std::fs::File::open(&path).unwrap());
    /// store.commit(store.batch().replace_from_source(page, 9, file))?;
    /// assert_eq!(store.read_to_vec(page)?, [8; 9]);
    /// # Ok::<(), remanent::Error>(())
    /// ```
    pub fn replace_from_source(
        &mut self,
        page: impl Into<PageRef>,
        len: u64,
        source: Arc<dyn ByteSource>,
    ) -> &mut Self {
        let page = self.own(page);
        self.resize(page, len).step(BatchStep::Source { page, len, source })
    }

    /// The pages whose bytes come from sources, in the order of the operations; those of length 0 are left
    /// out. `pages` are the ids of the new pages, `copied` is what the batch copies.
    ///
    /// # Errors
    /// `InvalidOperation` for a page that another operation changes or copies: its image would not be the
    /// page after the batch. `Limit`, `UnknownPage`, `OutOfMemory`.
    pub(crate) fn source_pages(&self, pages: &[PageId], copied: &CopySources) -> Result<Vec<SourcePage<'_>>> {
        let mut found = Vec::new();
        if !self.steps.iter().any(|step| matches!(step, BatchStep::Source { .. })) {
            return Ok(found);
        }
        let fates = self.fates(pages, |_| None);
        for (step, of_page) in self.steps.iter().enumerate() {
            let BatchStep::Source { page, len, source } = of_page else { continue };
            let (page, len) = (page.resolve(pages), *len);
            if page == NOWHERE {
                return Err(Error::UnknownPage { page });
            }
            if len > PAGE_LEN_MAX {
                return Err(Error::Limit { what: "page length", found: len, limit: PAGE_LEN_MAX });
            }
            if fates[&page].whole != Some(step) || copied.whole.contains(&page) {
                let reason = "another operation changes or copies the page that a source fills".to_owned();
                return Err(Error::InvalidOperation { index: step, reason });
            }
            if len > 0 {
                push(&mut found, SourcePage { step, page, len, source: &**source })?;
            }
        }
        Ok(found)
    }
}

impl SourcePage<'_> {
    /// Fills a slice with the page's bytes from an offset on.
    ///
    /// # Errors
    /// `SourceFailed`.
    pub fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.source.read_at(offset, bytes).map_err(|source| Error::SourceFailed {
            index: self.step,
            offset,
            source: Arc::new(source),
        })
    }
}
