//! Options of a store, in groups: [`MemoryOptions`], [`Tiers`], [`LogOptions`], [`ImageOptions`], [`SnapshotSchedule`],
//! [`Retention`] and [`ScrubSchedule`]. The feature `archive` adds `ArchiveOptions`.

#[cfg(feature = "archive")]
mod archive;
mod choices;
mod budget;
pub(crate) mod caller_memory;
#[cfg(feature = "nccl")]
mod gather;
mod images;
mod log;
mod memory;
mod retention;
mod schedules;
mod snapshot;
pub(crate) mod tiers;

#[cfg(feature = "nccl")]
use remanent_format::Place;
use remanent_format::limits::IDENTITY_LEN_MAX;

#[cfg(feature = "archive")]
pub use self::archive::ArchiveOptions;
pub use self::budget::Budget;
pub use self::choices::{Ack, Compression, Create, DeviceChoice, ImageIo, LogIo, PageLoad};
#[cfg(feature = "nccl")]
pub use self::gather::GatherMode;
#[cfg(feature = "nccl")]
pub(crate) use self::gather::{GatherSource, ImageExchange};
pub use self::images::ImageOptions;
pub use self::log::LogOptions;
pub use self::memory::MemoryOptions;
pub(crate) use self::memory::PageMemorySource;
pub use self::retention::Retention;
pub use self::schedules::{ScrubSchedule, SnapshotSchedule};
pub use self::snapshot::SnapshotOptions;
use self::tiers::Tiers;
use crate::error::{ArchiveError, Error, Invalid, Result};

/// Options for opening a store. Every option has a default.
///
/// [`open`](Self::open) opens a store with these options. It checks all values before it accesses the directory.
///
/// Related options form a group. Setting a group replaces all of its values. To change one value of a group, assign its
/// field.
///
/// ```
/// use remanent::options::{LogOptions, MemoryOptions, SnapshotSchedule};
/// use remanent::{Ack, Options, Place, Retention};
/// # let directory = tempfile::tempdir().unwrap();
/// # let path = directory.path().join("mystore");
/// let mut options = Options::new()
///     .ack(Ack::Durable)
///     .memory(MemoryOptions::new().budget(Place::Host, 1 << 30))
///     .log(LogOptions::new().segment_len(1 << 20))
///     .snapshots(SnapshotSchedule::new().log_bytes(64 << 20))
///     .retention(Retention::new().snapshots_kept(3));
/// options.log.spare_bytes = Some(0);
/// let store = options.open(&path)?;
/// assert_eq!(store.retention().snapshots_kept, 3);
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Options {
    /// The behavior of an open if the directory contains no store.
    pub create: Create,
    /// The guarantee that a batch must have before `commit` returns.
    pub ack: Ack,
    /// The device that holds the pages.
    pub device: DeviceChoice,
    /// The device of each slot, by slot number; empty if every slot is bound to `device`.
    pub slots: Vec<DeviceChoice>,
    /// The application-defined description of the store.
    pub identity: Option<Vec<u8>>,
    /// A hash of everything that determines the meaning of the pages' bytes.
    pub layout_fingerprint: Option<[u8; 32]>,
    /// The limits of memory for pages, and the options for loading pages at an open.
    pub memory: MemoryOptions,
    /// The order of places through which unused pages are demoted.
    pub tiers: Option<Tiers>,
    /// The options for writing the log.
    pub log: LogOptions,
    /// The options for writing images of pages.
    pub images: ImageOptions,
    /// The schedule of background snapshots.
    pub snapshots: SnapshotSchedule,
    /// The snapshots and the length of log that are kept.
    pub retention: Retention,
    /// The schedule of background scrubs.
    pub scrubs: ScrubSchedule,
    /// The archive of the store.
    #[cfg(feature = "archive")]
    pub archive: Option<ArchiveOptions>,
}

impl Options {
    /// Returns the default options.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets whether an open creates a store if there is none. Default: [`Create::IfEmpty`].
    #[must_use]
    pub fn create(mut self, create: Create) -> Self {
        self.create = create;
        self
    }

    /// Sets the guarantee that a batch must have before `commit` returns. Default: [`Ack::Logged`].
    #[must_use]
    pub fn ack(mut self, ack: Ack) -> Self {
        self.ack = ack;
        self
    }

    /// Sets the device that holds the pages. Default: [`DeviceChoice::Auto`].
    #[must_use]
    pub fn device(mut self, device: DeviceChoice) -> Self {
        self.device = device;
        self
    }

    /// Binds device slots to devices. Default: an empty list, which binds every slot to [`Options::device`].
    ///
    /// Pages in [`Place::Device`] number *n* are stored on the *n*-th device of the list, pages in all other places on
    /// the first. Slots are bound at each open, so a store can be reopened with fewer, more or different devices. An
    /// open or a batch that needs memory in a slot without a device fails with [`Error::Unavailable`].
    ///
    /// ```
    /// use remanent::{DeviceChoice, Options, Place};
    /// let options = Options::new().slots([DeviceChoice::Host, DeviceChoice::Host]);
    /// let store = options.open_temporary()?;
    /// let mut batch = store.batch();
    /// let one = batch.create(4, Place::Device(0)).page();
    /// let other = batch.create(4, Place::Device(1)).page();
    /// batch.write(one, 0, b"here").write(other, 0, b"more");
    /// store.commit(batch)?;
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// [`Place::Device`]: crate::Place::Device
    #[must_use]
    pub fn slots(mut self, devices: impl Into<Vec<DeviceChoice>>) -> Self {
        self.slots = devices.into();
        self
    }

    /// Returns the places of the device slots: one for each bound slot, or slot 0 alone if all slots share one device.
    #[cfg(feature = "nccl")]
    pub(crate) fn device_places(&self) -> impl Iterator<Item = Place> {
        (0..u32::try_from(self.slots.len().max(1)).unwrap_or(u32::MAX)).map(Place::Device)
    }

    /// Sets an application-defined description of the store, of at most 64 KiB. Default: none.
    ///
    /// The description is stored when the store is created. A later open with a different description fails with
    /// [`Error::Mismatch`]. An open without a description makes no comparison.
    #[must_use]
    pub fn identity(mut self, identity: impl Into<Vec<u8>>) -> Self {
        self.identity = Some(identity.into());
        self
    }

    /// Sets a hash of everything that determines the meaning of the pages' bytes. Default: none.
    ///
    /// The hash is stored when the store is created. A later open with a different hash fails with [`Error::Mismatch`].
    /// An open without a hash makes no comparison.
    #[must_use]
    pub fn layout_fingerprint(mut self, fingerprint: [u8; 32]) -> Self {
        self.layout_fingerprint = Some(fingerprint);
        self
    }

    /// Sets how much memory pages may use, and how an open loads them. Default: no limits, and an open loads
    /// all pages.
    #[must_use]
    pub fn memory(mut self, memory: MemoryOptions) -> Self {
        self.memory = memory;
        self
    }

    /// Sets an order of places through which unused pages are demoted when a place is full. Default: none, so
    /// a batch that does not fit in a place fails with [`Error::OverBudget`].
    #[must_use]
    pub fn tiers(mut self, tiers: Tiers) -> Self {
        self.tiers = Some(tiers);
        self
    }

    /// Sets how the log is written. Default: segments of up to 16 MiB, with the fastest method that the file system
    /// supports.
    #[must_use]
    pub fn log(mut self, log: LogOptions) -> Self {
        self.log = log;
        self
    }

    /// Sets how images of pages are written. Default: compressed, through the page cache.
    #[must_use]
    pub fn images(mut self, images: ImageOptions) -> Self {
        self.images = images;
        self
    }

    /// Sets when snapshots are taken in the background. Default: after 256 MiB of log or 60 seconds.
    #[must_use]
    pub fn snapshots(mut self, schedule: SnapshotSchedule) -> Self {
        self.snapshots = schedule;
        self
    }

    /// Sets which snapshots and how much log are kept. Default: two snapshots, and the log since the older of the two.
    ///
    /// Names given up with [`Retention::give_up`] are ignored here. Pass them to
    /// [`Store::prune`](crate::Store::prune).
    #[must_use]
    pub fn retention(mut self, retention: Retention) -> Self {
        self.retention = retention;
        self
    }

    /// Sets when the data on disk is scrubbed in the background. Default: every 24 hours, at 64 MiB per
    /// second.
    #[must_use]
    pub fn scrubs(mut self, schedule: ScrubSchedule) -> Self {
        self.scrubs = schedule;
        self
    }

    /// Sets the archive of the store. Default: none.
    #[cfg(feature = "archive")]
    #[must_use]
    pub fn archive(mut self, archive: ArchiveOptions) -> Self {
        self.archive = Some(archive);
        self
    }

    /// Returns an error if any value is invalid. Every open calls this before it accesses the directory.
    pub(crate) fn check(&self) -> Result<()> {
        if self.identity.as_ref().is_some_and(|identity| identity.len() > IDENTITY_LEN_MAX) {
            return invalid("identity", format!("longer than {IDENTITY_LEN_MAX} bytes"));
        }
        self.log.check()?;
        self.snapshots.check()?;
        self.retention.check()?;
        self.scrubs.check()?;
        #[cfg(feature = "archive")]
        self.archive.iter().try_for_each(ArchiveOptions::check)?;
        #[cfg(feature = "archive")]
        let has_archive = self.archive.is_some();
        #[cfg(not(feature = "archive"))]
        let has_archive = false;
        if self.ack == Ack::Archived && !has_archive {
            return Err(ArchiveError::absent().into());
        }
        self.tiers.iter().try_for_each(|tiers| tiers.check(&self.memory.budget))
    }
}

/// Returns the error for an invalid value of `option`.
fn invalid(option: &'static str, reason: String) -> Result<()> {
    Err(Error::Invalid(Invalid::Option { option, reason }))
}
