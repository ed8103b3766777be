//! Pages whose bytes a batch reads from sources. Sources are read piece by piece when the batch is committed, so the
//! memory use of a commit does not depend on the length of the pages.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use remanent_format::limits::PAGE_LEN_MAX;
use remanent_format::{PageId, Place};

use super::page_refs::NO_PAGE;
use super::{BatchStep, CopySources, CreatePage, PageRef, WriteBatch};
use crate::base::allocation::push;
use crate::error::{Error, Invalid, IoAction, IoObject, Result};

/// A source of bytes that is read when a batch is committed. Pass a source to [`WriteBatch::create_from_source`] or
/// [`WriteBatch::replace_from_source`]. A [`File`] is a source.
///
/// The committing thread, or threads that it waits for, read the source. Each page is read by one thread, and several
/// threads read the pages of a long batch. These threads hold no lock of the store, so a source may read pages of the
/// same store.
pub trait ByteSource: Debug + Send + Sync {
    /// Fills `bytes` with the source's bytes starting at `offset`.
    ///
    /// A range may be requested again, because the store samples a page to decide whether to compress it, and rereads a
    /// page that turns out to be incompressible. The page contains the bytes of one complete pass from start to end.
    ///
    /// # Errors
    /// An error if the bytes cannot all be read. The commit then fails with [`Error::Io`] and leaves the
    /// store unchanged.
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;
}

impl ByteSource for File {
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(bytes, offset)
    }
}

/// A page of a batch whose bytes are read from a source.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SourcePage<'a> {
    /// The operation's index in the batch.
    pub step: usize,
    pub page: PageId,
    /// The page's length in bytes, which is never 0.
    pub len: u64,
    pub source: &'a dyn ByteSource,
}

impl WriteBatch {
    /// Creates a page from the first `len` bytes of a source, which is read when the batch is committed.
    ///
    /// The commit needs memory for the page, and for a few pieces of 4 MiB regardless of the page's length. If the
    /// sources of a batch total at least a quarter of a segment, their bytes are written once, to an image file. The
    /// log and the next snapshot then contain only references to the images. No other operation of the batch may change
    /// or copy the page's bytes.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use std::{fs, io};
    /// use remanent::batch::ByteSource;
    /// use remanent::{Place, Store};
    /// let store = Store::temporary()?;
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
    /// The commit fails with [`Error::Io`] and leaves the store unchanged if the source does not supply `len`
    /// bytes.
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

    /// Replaces a page's contents with the first `len` bytes of a source, and sets the page's length to `len`. The
    /// source is read as for [`WriteBatch::create_from_source`]. Key, metadata and place are unchanged.
    ///
    /// The page moves to new memory, as with [`WriteBatch::resize`]. The budget must have room for the new memory in
    /// addition to the old, and the commit fails if the page is pinned.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use remanent::{Place, Store};
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let path = directory.path().join("weights");
    /// # std::fs::write(&path, [8; 9]).unwrap();
    /// let store = Store::temporary()?;
    /// let mut batch = store.batch();
    /// batch.create_from([7; 5], Place::Host);
    /// let page = store.commit(batch)?.pages[0];
    ///
    /// let file = Arc::new(std::fs::File::open(&path).unwrap());
    /// store.commit(store.batch().replace_from_source(page, 9, file))?;
    /// assert_eq!(store.read_to_vec(page)?, [8; 9]);
    /// # Ok::<(), remanent::Error>(())
    /// ```
    pub fn replace_from_source<'k>(
        &mut self,
        page: impl Into<PageRef<'k>>,
        len: u64,
        source: Arc<dyn ByteSource>,
    ) -> &mut Self {
        let page = page.into();
        self.resize(page, len);
        let page = self.target(page);
        self.step(BatchStep::Source { page, len, source })
    }

    /// Returns the pages whose bytes are read from sources, in the order of the operations. Pages of length 0 are
    /// omitted. `pages` contains the ids of the new pages, and `copied` the pages and ranges that the batch copies.
    ///
    /// # Errors
    /// `Invalid` for a page that another operation changes or copies, because its image would differ from the page
    /// after the batch; `Limit`, `UnknownPage`, `OutOfMemory`.
    pub(crate) fn source_pages(&self, pages: &[PageId], copied: &CopySources) -> Result<Vec<SourcePage<'_>>> {
        let mut found = Vec::new();
        if !self.steps.iter().any(|step| matches!(step, BatchStep::Source { .. })) {
            return Ok(found);
        }
        let page_effects = self.page_effects(pages, |_| None);
        for (step, of_page) in self.steps.iter().enumerate() {
            let BatchStep::Source { page, len, source } = of_page else { continue };
            let (page, len) = (page.resolve(pages), *len);
            if page == NO_PAGE {
                return Err(Error::UnknownPage { page });
            }
            if len > PAGE_LEN_MAX {
                return Err(Error::Limit { what: "page length", found: len, limit: PAGE_LEN_MAX });
            }
            if page_effects[&page].whole != Some(step) || copied.whole.contains(&page) {
                let reason = "another operation changes or copies the page that a source fills".to_owned();
                return Err(Error::Invalid(Invalid::Operation { index: step, reason }));
            }
            if len > 0 {
                push(&mut found, SourcePage { step, page, len, source: &**source })?;
            }
        }
        Ok(found)
    }
}

impl SourcePage<'_> {
    /// Fills `bytes` with the source's bytes starting at `offset`.
    ///
    /// # Errors
    /// `Io`.
    pub fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.source.read_at(offset, bytes).map_err(|source| {
            Error::system(IoAction::Read, IoObject::Source { index: self.step, offset }, source)
        })
    }
}
