//! Copies between caller-owned device memory and stores that do not use that device. Pages of an earlier state are
//! loaded into the memory, and new pages are created from the memory.
//!
//! An image is loaded directly from its file into the memory, like when a store opens (`image_loader.rs`), and its
//! checksum is computed on the device (I12). The ranges that batches after the image changed are then copied to the
//! host, changed there, and copied back. A page whose length such a batch changed is composed on the host, window by
//! window.

use std::sync::Arc;
use std::{fmt, io};

use remanent_format::PageId;

use super::state::PastState;
use super::view::View;
use crate::base::allocation::{collected, make_room, push};
use crate::base::parallel;
use crate::base::process::{ForkGuard, Process};
use crate::device::sums::{sum_each, sums_in, sums_len};
use crate::device::{
    Access, CallerMemory, CommandList, Device, DeviceBytes, EngineDevice, Lane, MemoryLink, Span,
};
use crate::error::{Error, Refused, Result};
use crate::images::read::{ImageRequest, SummedBy};
use crate::memory::staging::StagingPool;
use crate::recovery::image_loader::{ImageLoader, threads};
use crate::write::batch::ByteSource;

/// The maximum number of bytes of unused staging memory that stay pinned between loads.
const STAGING_IDLE_BYTES: usize = 64 << 20;

/// The maximum number of bytes of a page that are changed at once on the host.
const CHANGED_AT_ONCE: u64 = 4 << 20;
/// The minimum distance in bytes between changed ranges that are copied separately. A copy of fewer bytes takes no
/// longer than the start of another copy.
const GAP_MIN: u64 = 256 << 10;

/// A copier between caller-owned memory on a device, such as the tensors of a model, and stores that do not use the
/// device. The copier loads pages of a [`View`] into that memory, and provides bytes from the memory to batches of any
/// store.
///
/// A copier keeps up to 64 MiB of pinned host memory between copies. Threads can share it.
///
/// ```
/// use remanent::device::CallerMemory;
/// use remanent::history::DeviceCopier;
/// use remanent::{DeviceChoice, Options, Place, Store};
/// let directory = tempfile::tempdir()?;
/// let store = Options::new().device(DeviceChoice::Host).open(directory.path())?;
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
    device: Arc<EngineDevice>,
    staging: StagingPool,
    link: Arc<MemoryLink>,
}

impl DeviceCopier {
    /// Creates a copier for any device, such as a simulated device in a test. Other callers use [`DeviceCopier::open`].
    #[doc(hidden)]
    #[must_use]
    pub fn open_on(device: Arc<dyn Device>) -> Self {
        let device = EngineDevice::new(device);
        let staging = StagingPool::new(device.clone(), STAGING_IDLE_BYTES);
        let parts = CopierParts { device, staging, link: Arc::default() };
        Self { opener: Process::current(), parts: Arc::new(ForkGuard::new(parts)) }
    }

    /// Returns a handle to caller-owned memory for [`load`](Self::load) and [`source`](Self::source). The owner of the
    /// memory is kept alive until the last handle is dropped.
    ///
    /// # Errors
    /// [`Error::Refused`] if the device detects that the memory is not as described; [`Error::Forked`]; a device
    /// error.
    pub fn caller_bytes(&self, memory: &CallerMemory) -> Result<DeviceBytes> {
        self.opener.check()?;
        DeviceBytes::adopt(&self.parts.device, memory, &self.parts.link)
    }

    /// Returns a source with which a batch of any store can create a page from device memory, for
    /// [`WriteBatch::create_from_source`](crate::WriteBatch::create_from_source).
    ///
    /// The commit copies the bytes piece by piece and compares the checksums on both sides of the bus. The caller must
    /// not change the bytes before the commit is complete.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use remanent::device::CallerMemory;
    /// use remanent::history::DeviceCopier;
    /// use remanent::{DeviceChoice, Options, Place};
    /// # let options = Options::new().device(DeviceChoice::Host);
    /// let copier = DeviceCopier::open(DeviceChoice::Host)?;
    /// // A stand-in for a tensor, which `CallerMemory::from_cuda` would describe.
    /// let tensor = CallerMemory::from_vec(b"weights".to_vec(), Place::Device(0));
    /// let tensor = Arc::new(copier.source(copier.caller_bytes(&tensor)?)?);
    ///
    /// let store = options.open_temporary()?;
    /// let mut batch = store.batch();
    /// batch.create_from_source(7, tensor, Place::Disk);
    /// let page = store.commit(batch)?.pages[0];
    /// assert_eq!(store.read_to_vec(page)?, b"weights");
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Refused`] for memory of another device; [`Error::Forked`].
    pub fn source(&self, bytes: DeviceBytes) -> Result<impl ByteSource + use<>> {
        self.opener.check()?;
        bytes.check_device(&self.parts.device)?;
        Ok(DeviceSource { opener: self.opener, parts: self.parts.clone(), bytes })
    }

    /// Loads whole pages of a view into device memory, each of the same length as its page. On return, all bytes have
    /// arrived and their checksums were verified at the destination. After an error, the contents of the memory are
    /// undefined.
    ///
    /// # Errors
    /// [`Error::UnknownPage`]; [`Error::Refused`] for memory of another length or of another device, memory that
    /// overlaps other memory of the call, and a page that is named twice; [`Error::Damaged`], [`Error::Overtaken`],
    /// [`Error::OutOfMemory`] as in [`View::read`]; [`Error::Device`] if the device failed or corrupted bytes in
    /// transit; [`Error::Forked`].
    pub fn load(&self, view: &View, pages: &[(PageId, &DeviceBytes)]) -> Result<()> {
        self.opener.check()?;
        let past = view.past()?;
        let CopierParts { device, staging, .. } = &**self.parts;
        let (mut targets, mut in_use) = (Vec::new(), Vec::new());
        for (page, bytes) in pages {
            let (page_len, len) = (past.page_len(*page)?, bytes.byte_len());
            if page_len != len {
                let reason = format!("page {page} is {page_len} bytes long");
                return Err(Error::Refused(Refused::Memory { len, reason }));
            }
            bytes.check_process()?;
            bytes.check_device(device)?;
            // These guards keep pages out of the memory until all bytes have arrived.
            let (use_of_range, target) = bytes.begin_write()?;
            push(&mut in_use, use_of_range)?;
            push(&mut targets, (*page, target))?;
        }
        DeviceBytes::check_apart(pages.iter().map(|(_, bytes)| *bytes))?;
        targets.sort_unstable_by_key(|(page, _)| *page);
        if let Some(pair) = targets.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            let reason = format!("page {} is named twice", pair[0].0);
            return Err(Error::Refused(Refused::Memory { len: pair[0].1.len, reason }));
        }
        LoadRun { past, device, staging, targets }.load()
    }

    /// Returns the CRC-32 of each range, computed on the device. The ranges may overlap, and none is changed.
    ///
    /// Bytes of a page that arrived in another way than by [`load`](Self::load), such as from another GPU, are the
    /// page's bytes if their checksum equals [`View::image_checksum`].
    ///
    /// ```
    /// use remanent::device::CallerMemory;
    /// use remanent::history::DeviceCopier;
    /// use remanent::{DeviceChoice, Place};
    /// let copier = DeviceCopier::open(DeviceChoice::Host)?;
    /// // A stand-in for a tensor, which `CallerMemory::from_cuda` would describe.
    /// let tensor = CallerMemory::from_vec(b"123456789".to_vec(), Place::Device(0));
    /// let tensor = copier.caller_bytes(&tensor)?;
    /// assert_eq!(copier.checksums(&[&tensor])?, [0xcbf4_3926]);
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Refused`] for memory of another device; [`Error::Forked`]; [`Error::OutOfMemory`]; a device error.
    pub fn checksums(&self, ranges: &[&DeviceBytes]) -> Result<Vec<u32>> {
        self.opener.check()?;
        let CopierParts { device, staging, .. } = &**self.parts;
        let mut sources = Vec::new();
        for bytes in ranges {
            bytes.check_process()?;
            bytes.check_device(device)?;
            push(&mut sources, bytes.arrived(Access::Read)?)?;
        }
        if sources.is_empty() {
            return Ok(Vec::new());
        }
        let count = sources.len();
        let commands = vec![sum_each(sources, 0)];
        let list = CommandList { commands, staging: vec![staging.take(sums_len(count))?.into_staging()] };
        let returned = device.finish(device.submit(Lane::Load, list)?)?;
        let sums = collected(sums_in(&returned[0][..sums_len(count)]));
        staging.put_all(returned);
        sums
    }
}

impl fmt::Debug for DeviceCopier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceCopier").field("device", &self.parts.device.label()).finish_non_exhaustive()
    }
}

/// A byte source that reads from device memory of a copier during a commit.
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

/// Loads pages of one state into device memory, for one call of [`DeviceCopier::load`].
struct LoadRun<'a> {
    past: &'a PastState,
    device: &'a EngineDevice,
    staging: &'a StagingPool,
    /// The device memory for each page, sorted by page.
    targets: Vec<(PageId, Span)>,
}

impl LoadRun<'_> {
    fn load(&self) -> Result<()> {
        let (mut images, mut changed, mut composed) = (Vec::new(), Vec::new(), Vec::new());
        for (page, target) in self.targets.iter().filter(|(_, target)| target.len > 0) {
            match self.past.image_below(*page) {
                Some((image, has_changes)) => {
                    push(&mut images, ImageRequest { page: *page, len: target.len, image })?;
                    if has_changes {
                        push(&mut changed, (*page, *target))?;
                    }
                }
                None => push(&mut composed, (*page, *target))?,
            }
        }
        match self.load_images(&mut images) {
            // Batches may have overwritten the damaged image completely. The pages are then composed without it.
            Err(Error::Damaged(_)) if !changed.is_empty() => {
                images.retain(|request| self.past.exact_image(request.page).is_some());
                self.load_images(&mut images)?;
                composed.append(&mut changed);
            }
            loaded => loaded?,
        }
        let change = |bytes: &mut Vec<u8>, index: usize| self.change(changed[index], bytes);
        parallel::map_indexed(threads(), changed.len(), Vec::new, change)?;
        let compose = |(): &mut (), index: usize| self.compose(composed[index]);
        parallel::map_indexed(threads(), composed.len(), || (), compose).map(drop)
    }

    /// Loads images, each into the memory of its page.
    fn load_images(&self, images: &mut [ImageRequest]) -> Result<()> {
        let target = |page: PageId| {
            let at = self.targets.binary_search_by_key(&page, |(page, _)| *page);
            Ok(self.targets[at.expect("each image is of a page with memory")].1)
        };
        // The view reads damaged files again, to distinguish damage from files that a writer has removed.
        self.past.read_with_retry(|source| {
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

    /// Changes a page whose image was loaded. `bytes` is memory that calls reuse.
    fn change(&self, (page, target): (PageId, Span), bytes: &mut Vec<u8>) -> Result<()> {
        for range in self.past.changed_ranges(page, GAP_MIN) {
            for at in range.clone().step_by(CHANGED_AT_ONCE as usize) {
                let len = CHANGED_AT_ONCE.min(range.end - at);
                let part = Span { offset: target.offset + at, len, ..target };
                make_room(bytes, (len as usize).saturating_sub(bytes.len()))?;
                bytes.resize(len as usize, 0);
                self.staging.download(Lane::Load, part, bytes)?;
                self.past.write_over(page, at, bytes)?;
                self.staging.upload(Lane::Load, part, bytes)?;
            }
        }
        Ok(())
    }

    /// Composes a page on the host, and uploads it window by window.
    fn compose(&self, (page, target): (PageId, Span)) -> Result<()> {
        self.past.stream(page, |at, bytes| {
            let target = Span { offset: target.offset + at, len: bytes.len() as u64, ..target };
            self.staging.upload(Lane::Load, target, bytes)
        })
    }
}
