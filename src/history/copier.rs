//! Copies between memory of the caller's on a device and stores that have nothing to do with that device:
//! pages of an earlier state go there, and new pages come from there.
//!
//! An image goes from its file to its page's memory as it does when a store opens (`image_loader.rs`), and is
//! summed where it arrives (I12). A page with batches after its image is put together by the host, window by
//! window.

use std::sync::Arc;
use std::{fmt, io};

use remanent_format::PageId;

use super::state::PastState;
use super::view::View;
use crate::base::allocation::push;
use crate::base::parallel;
use crate::base::process::{ForkGuard, Process};
use crate::device::{Access, CallerMemory, Device, DeviceBytes, Lane, MemoryLink, Span};
use crate::error::{Error, Result};
use crate::images::read::{ImageRequest, SummedBy};
use crate::memory::staging::StagingPool;
use crate::recovery::image_loader::{ImageLoader, threads};
use crate::write::batch::ByteSource;

/// Staging that stays pinned from one load to the next, at most.
const STAGING_IDLE_BYTES: usize = 64 << 20;

/// A device, to copy between memory of the caller's that lies there, such as the tensors of a model, and
/// stores that keep their pages elsewhere. Pages of a [`View`] are loaded to it, and a batch of any store
/// takes bytes from it.
///
/// It keeps up to 64 MiB of pinned host memory from one copy to the next. Threads may share it.
///
/// ```
/// use remanent::{CallerMemory, DeviceChoice, DeviceCopier, Options, Place, Store};
/// let directory = tempfile::tempdir()?;
/// let store = Store::open(directory.path(), Options::default().device(DeviceChoice::Host))?;
/// let mut batch = store.batch();
/// batch.create_from(b"weights".to_vec(), Place::Disk);
/// let page = store.commit(batch)?.pages[0];
///
/// let view = Store::open_read_only(directory.path())?;
/// let copier = DeviceCopier::open(DeviceChoice::Host)?;
/// // A stand-in for a tensor, which `CallerMemory::from_cuda` would describe.
/// let tensor = copier.caller_bytes(&CallerMemory::from_vec(vec![0; 7], Place::Device(0)))?;
/// copier.load(&view, &[(page, &tensor)])?;
/// let mut found = [0; 7];
/// tensor.read(0, &mut found)?;
/// assert_eq!(&found, b"weights");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct DeviceCopier {
    opener: Process,
    parts: Arc<ForkGuard<CopierParts>>,
}

struct CopierParts {
    device: Arc<dyn Device>,
    staging: StagingPool,
    link: Arc<MemoryLink>,
}

impl DeviceCopier {
    /// Copies from and to any device: the way in for tests, which bring simulated ones. Callers use
    /// [`DeviceCopier::open`].
    #[doc(hidden)]
    #[must_use]
    pub fn open_on(device: Arc<dyn Device>) -> Self {
        let staging = StagingPool::new(device.clone(), STAGING_IDLE_BYTES);
        let parts = CopierParts { device, staging, link: Arc::default() };
        Self { opener: Process::current(), parts: Arc::new(ForkGuard::new(parts)) }
    }

    /// The memory of the caller's own, for [`load`](Self::load) and [`source`](Self::source). Its owner is
    /// held until the last handle is gone.
    ///
    /// # Errors
    /// [`Error::MemoryRefused`] where the device can tell that it is not what the caller says;
    /// [`Error::Forked`]; a device error.
    pub fn caller_bytes(&self, memory: &CallerMemory) -> Result<DeviceBytes> {
        self.opener.check()?;
        DeviceBytes::adopt(&self.parts.device, memory, &self.parts.link)
    }

    /// Memory of the device as the bytes of a new page, in a batch of any store: see
    /// [`WriteBatch::create_from_source`](crate::WriteBatch::create_from_source). The commit copies them
    /// piece by piece, and proves each on both sides of the bus. Until then the caller leaves them alone.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use remanent::{CallerMemory, DeviceChoice, DeviceCopier, Options, Place, Store};
    /// # let options = Options::default().device(DeviceChoice::Host);
    /// let copier = DeviceCopier::open(DeviceChoice::Host)?;
    /// // A stand-in for a tensor, which `CallerMemory::from_cuda` would describe.
    /// let tensor = CallerMemory::from_vec(b"weights".to_vec(), Place::Device(0));
    /// let tensor = Arc::new(copier.source(copier.caller_bytes(&tensor)?)?);
    ///
    /// let store = Store::temporary(options)?;
    /// let mut batch = store.batch();
    /// batch.create_from_source(7, tensor, Place::Disk);
    /// let page = store.commit(batch)?.pages[0];
    /// assert_eq!(store.read_to_vec(page)?, b"weights");
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::MemoryRefused`] for memory of another device; [`Error::Forked`].
    pub fn source(&self, bytes: DeviceBytes) -> Result<impl ByteSource + use<>> {
        self.opener.check()?;
        bytes.check_device(&self.parts.device)?;
        Ok(DeviceSource { opener: self.opener, parts: self.parts.clone(), bytes })
    }

    /// Fills memory of the device with whole pages of a view. Each is as long as its page. When this returns,
    /// every byte is there, and was proven where it arrived.
    ///
    /// After an error any of the memory may be filled or not.
    ///
    /// # Errors
    /// [`Error::UnknownPage`]; [`Error::MemoryRefused`] for memory of another length or of another device,
    /// memory that overlaps other memory of the call, and a page that is named twice; [`Error::Damaged`],
    /// [`Error::Overtaken`], [`Error::OutOfMemory`] as for [`View::read`]; [`Error::Device`] if the device
    /// failed, or changed bytes on their way; [`Error::Forked`].
    pub fn load(&self, view: &View, pages: &[(PageId, &DeviceBytes)]) -> Result<()> {
        self.opener.check()?;
        let past = view.past()?;
        let CopierParts { device, staging, .. } = &**self.parts;
        let (mut targets, mut in_use) = (Vec::new(), Vec::new());
        for (page, bytes) in pages {
            let (page_len, len) = (past.page_len(*page)?, bytes.byte_len());
            if page_len != len {
                let reason = format!("page {page} is {page_len} bytes long");
                return Err(Error::MemoryRefused { len, reason });
            }
            bytes.check_process()?;
            bytes.check_device(device)?;
            // Until all bytes have landed.
            let (use_of_range, target) = bytes.begin_write()?;
            push(&mut in_use, use_of_range)?;
            push(&mut targets, (*page, target))?;
        }
        DeviceBytes::check_apart(pages.iter().map(|(_, bytes)| *bytes))?;
        targets.sort_unstable_by_key(|(page, _)| *page);
        if let Some(pair) = targets.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            let reason = format!("page {} is named twice", pair[0].0);
            return Err(Error::MemoryRefused { len: pair[0].1.len, reason });
        }
        LoadRun { past, device: &**device, staging, targets }.load()
    }
}

impl fmt::Debug for DeviceCopier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceCopier").field("device", &self.parts.device.label()).finish_non_exhaustive()
    }
}

/// Memory of a device that a commit takes bytes from.
struct DeviceSource {
    opener: Process,
    parts: Arc<ForkGuard<CopierParts>>,
    bytes: DeviceBytes,
}

impl DeviceSource {
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.opener.check()?;
        let part = self.bytes.part(offset..offset.saturating_add(out.len() as u64))?;
        if out.is_empty() {
            return Ok(());
        }
        let source = part.arrived(Access::Read)?;
        self.parts.staging.download(Lane::Drain, source, out)
    }
}

impl ByteSource for DeviceSource {
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.read(offset, bytes).map_err(io::Error::other)
    }
}

impl fmt::Debug for DeviceSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes on {}", self.bytes.byte_len(), self.parts.device.label())
    }
}

/// A load of pages, each with the memory that takes it.
struct LoadRun<'a> {
    past: &'a PastState,
    device: &'a dyn Device,
    staging: &'a StagingPool,
    /// The memory of each page, in the order of the pages.
    targets: Vec<(PageId, Span)>,
}

impl LoadRun<'_> {
    fn load(&self) -> Result<()> {
        let (mut images, mut composed) = (Vec::new(), Vec::new());
        for (page, target) in self.targets.iter().filter(|(_, target)| target.len > 0) {
            match self.past.exact_image(*page) {
                Some(image) => push(&mut images, ImageRequest { page: *page, len: target.len, image })?,
                None => push(&mut composed, (*page, *target))?,
            }
        }
        self.load_images(&mut images)?;
        let compose = |(): &mut (), index: usize| self.compose(composed[index]);
        parallel::map_indexed(threads(), composed.len(), || (), compose).map(drop)
    }

    /// Loads pages that an image holds as they are.
    fn load_images(&self, images: &mut [ImageRequest]) -> Result<()> {
        let target = |page: PageId| {
            let at = self.targets.binary_search_by_key(&page, |(page, _)| *page);
            Ok(self.targets[at.expect("each image is of a page with memory")].1)
        };
        // Damage is looked at once more by the view, which tells it from files that a writer took away.
        self.past.twice(|source| {
            let loader = ImageLoader {
                device: self.device,
                staging: self.staging,
                source,
                lanes: &[Lane::Apply, Lane::Drain, Lane::Load],
                target: &target,
                summed_by: SummedBy::Device,
            };
            match loader.load(std::iter::once(&mut *images), threads()) {
                Err(Error::Damaged(damaged)) => Err(damaged.damage.clone()),
                loaded => Ok(loaded),
            }
        })?
    }

    /// Puts a page together, and brings it up window by window.
    fn compose(&self, (page, target): (PageId, Span)) -> Result<()> {
        self.past.stream(page, |at, bytes| {
            let target = Span { offset: target.offset + at, len: bytes.len() as u64, ..target };
            self.staging.upload(Lane::Load, target, bytes)
        })
    }
}
