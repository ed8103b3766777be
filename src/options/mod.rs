//! Options of a store.

mod choices;
mod budget;
pub(crate) mod caller_memory;
mod retention;
mod snapshot;
mod getters;
mod page_memory;
pub(crate) mod tiers;

use std::collections::BTreeSet;
use std::time::Duration;

use remanent_format::limits::{IDENTITY_LEN_MAX, SEGMENT_LEN_MAX, SEGMENT_LEN_MIN};

pub use self::budget::Budget;
pub use self::choices::{Ack, Compression, Create, DeviceChoice, ImageIo, LogIo, PageLoad};
pub(crate) use self::page_memory::PageMemorySource;
pub use self::retention::Retention;
pub use self::snapshot::SnapshotOptions;
use self::tiers::Tiers;
use crate::error::{Error, Result};

/// Options for opening a store. Every option has a default.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    pub(crate) create: Create,
    pub(crate) ack: Ack,
    pub(crate) log_io: Option<LogIo>,
    pub(crate) image_io: ImageIo,
    pub(crate) device: DeviceChoice,
    pub(crate) slots: Vec<DeviceChoice>,
    pub(crate) segment_len: u64,
    pub(crate) reserve_bytes: Option<u64>,
    pub(crate) spare_bytes: Option<u64>,
    pub(crate) budget: Budget,
    pub(crate) tiers: Option<Tiers>,
    pub(crate) identity: Option<Vec<u8>>,
    pub(crate) layout_fingerprint: Option<[u8; 32]>,
    pub(crate) retention: Retention,
    pub(crate) compression: Compression,
    pub(crate) chunk_len: Option<u64>,
    pub(crate) replay_window_len: Option<u64>,
    pub(crate) page_load: PageLoad,
    pub(crate) page_memory: Option<PageMemorySource>,
    pub(crate) snapshot_log_bytes: Option<u64>,
    pub(crate) snapshot_interval: Option<Duration>,
    pub(crate) snapshot_bytes_per_second: Option<u64>,
    pub(crate) scrub_interval: Option<Duration>,
    pub(crate) scrub_bytes_per_second: Option<u64>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            create: Create::IfEmpty,
            ack: Ack::Logged,
            log_io: None,
            image_io: ImageIo::default(),
            device: DeviceChoice::Auto,
            slots: Vec::new(),
            segment_len: 16 << 20,
            reserve_bytes: None,
            spare_bytes: None,
            budget: Budget::default(),
            tiers: None,
            identity: None,
            layout_fingerprint: None,
            retention: Retention::default(),
            compression: Compression::default(),
            chunk_len: None,
            replay_window_len: None,
            page_load: PageLoad::default(),
            page_memory: None,
            snapshot_log_bytes: Some(256 << 20),
            snapshot_interval: Some(Duration::from_secs(60)),
            snapshot_bytes_per_second: None,
            scrub_interval: Some(Duration::from_secs(24 * 3600)),
            scrub_bytes_per_second: Some(64 << 20),
        }
    }
}

impl Options {
    /// Sets whether an open creates a store if there is none. Default: [`Create::IfEmpty`].
    #[must_use]
    pub fn create(mut self, create: Create) -> Self {
        self.create = create;
        self
    }

    /// Sets the acknowledgement that `commit` waits for. Default: [`Ack::Logged`].
    #[must_use]
    pub fn ack(mut self, ack: Ack) -> Self {
        self.ack = ack;
        self
    }

    /// Sets how the log is written to disk. Default: mapped, or direct if commits wait for a sync
    /// ([`Ack::Durable`]); buffered if the file system supports neither.
    #[must_use]
    pub fn log_io(mut self, io: LogIo) -> Self {
        self.log_io = Some(io);
        self
    }

    /// Sets how image files are written to disk. Default: [`ImageIo::Buffered`].
    ///
    /// This affects the images of snapshots and those written in advance of a batch; reading does not depend
    /// on it. The open fails with [`Error::InvalidOption`] if the file system does not support the chosen
    /// way.
    ///
    /// ```
    /// use remanent::options::ImageIo;
    /// use remanent::{Options, Store};
    /// let store = Store::temporary(Options::default().image_io(ImageIo::Buffered))?;
    /// assert_eq!(store.recovered().image_io, "buffered");
    /// # drop(store);
    /// # Ok::<(), remanent::Error>(())
    /// ```
    #[must_use]
    pub fn image_io(mut self, io: ImageIo) -> Self {
        self.image_io = io;
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
    /// Pages in [`Place::Device`] number *n* live on the *n*-th device of the list, pages in all other places
    /// on the first. Slots are bound at each open, so a store can be reopened with fewer, more or different
    /// devices. An open or a batch that needs memory in a slot without a device fails with
    /// [`Error::PlaceUnavailable`].
    ///
    /// ```
    /// use remanent::{DeviceChoice, Options, Place, Store};
    /// let options = Options::default().slots([DeviceChoice::Host, DeviceChoice::Host]);
    /// let store = Store::temporary(options)?;
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

    /// Sets the maximum length of a log segment in bytes. Default: 16 MiB.
    ///
    /// The length must be a multiple of 4096 and at least 16 KiB. Every open starts with segments of 64 KiB
    /// and lengthens them from one to the next, so that disk usage follows the amount of committed data. A
    /// segment takes at most a 64th of the file system, or 256 KiB if that is more, and less on a nearly full
    /// disk. Segments that a snapshot makes obsolete are reused; see [`spare_bytes`](Self::spare_bytes).
    #[must_use]
    pub fn segment_len(mut self, bytes: u64) -> Self {
        self.segment_len = bytes;
        self
    }

    /// Sets how many bytes of disk space are reserved for deletes on a full disk. Default: two segments.
    ///
    /// The size is rounded up to whole segments of [`segment_len`](Self::segment_len). As long as the log's
    /// segments are shorter than that, so are those of the reserve, which begin with 16 KiB at each open. A
    /// background thread allocates the reserve after the open, and again after batches that extended the log;
    /// if other programs fill the disk in those milliseconds, the reserve is smaller.
    ///
    /// A batch that only deletes can delete 100 pages. If each batch is waited for, it takes 4 KiB of a
    /// segment, whose first 4 KiB hold no batches. The last segment used in this way is 16 KiB long, so a
    /// reserve of two segments of 256 KiB has room for 66 batches. A pause of 10 ms takes the room of one
    /// more, because the log is then sealed.
    ///
    /// In addition to the reserve, five segments of at least 16 KiB are kept for opens, seals and manifests,
    /// unless the reserve is 0. When only these remain and they are too few for the open after the next one,
    /// every batch fails with [`Error::DiskFull`] until space is available again, so that the store can still
    /// be opened.
    #[must_use]
    pub fn reserve_bytes(mut self, bytes: u64) -> Self {
        self.reserve_bytes = Some(bytes);
        self
    }

    /// Sets how many bytes of obsolete log segments are kept for reuse, beyond the reserve. Default: a
    /// hundredth of the file system, but at most 512 MiB.
    ///
    /// A log that can reuse segments does not wait for new ones. Spare segments are removed when the disk is
    /// full, and by [`Store::prune`](crate::Store::prune). One is always kept, unless this is 0.
    ///
    /// Obsolete image files are kept as well, to be overwritten by the next snapshots, and are removed in the
    /// same situations. They do not count toward this limit: together with the images in use, they take at
    /// most twice the bytes that the kept snapshots name. If this is 0, no image files are kept for reuse.
    ///
    /// ```
    /// use remanent::{Options, Store};
    /// let store = Store::temporary(Options::default().spare_bytes(0))?;
    /// # drop(store);
    /// # Ok::<(), remanent::Error>(())
    /// ```
    #[must_use]
    pub fn spare_bytes(mut self, bytes: u64) -> Self {
        self.spare_bytes = Some(bytes);
        self
    }

    /// Sets byte limits for places. Default: none.
    #[must_use]
    pub fn budget(mut self, budget: Budget) -> Self {
        self.budget = budget;
        self
    }

    /// Sets an order of places through which unused pages are demoted when a place is full. Default: none, so
    /// a batch that does not fit in a place fails with [`Error::OverBudget`].
    #[must_use]
    pub fn tiers(mut self, tiers: Tiers) -> Self {
        self.tiers = Some(tiers);
        self
    }

    /// Sets an application-defined description of the store, of at most 64 KiB. Default: none.
    ///
    /// It is stored when the store is created. A later open with a different description fails with
    /// [`Error::IdentityMismatch`]; an open without one does not compare it.
    #[must_use]
    pub fn identity(mut self, identity: impl Into<Vec<u8>>) -> Self {
        self.identity = Some(identity.into());
        self
    }

    /// Sets a hash of everything that determines the meaning of the pages' bytes. Default: none.
    ///
    /// It is stored when the store is created. A later open with a different hash fails with
    /// [`Error::LayoutMismatch`]; an open without one does not compare it.
    #[must_use]
    pub fn layout_fingerprint(mut self, fingerprint: [u8; 32]) -> Self {
        self.layout_fingerprint = Some(fingerprint);
        self
    }

    /// Sets how many verified snapshots are kept, with the log since the oldest of them. Default: 2.
    ///
    /// The number must be at least 1. With fewer than two, the store cannot recover from a damaged image by
    /// replaying the log from an older snapshot.
    #[must_use]
    pub fn snapshots_kept(mut self, count: usize) -> Self {
        self.retention.snapshots_kept = count;
        self
    }

    /// Keeps snapshots younger than `age`, with the log since the oldest of them, in addition to those kept
    /// by [`Options::snapshots_kept`]. Default: zero.
    ///
    /// The age of a snapshot is computed from the oldest timestamp of it and all later ones, so a clock that
    /// was temporarily fast does not extend retention. A timestamp in the future counts as now.
    #[must_use]
    pub fn snapshots_kept_for(mut self, age: Duration) -> Self {
        self.retention.snapshots_kept_for = age;
        self
    }

    /// Sets the minimum number of log bytes to keep, with the newest snapshot from which they can be
    /// replayed. Default: 0, which keeps only the log that the kept snapshots need.
    ///
    /// The store can return to any state in this range. Images written in advance of the batches in it are
    /// also kept, but not counted. While the log is shorter, all of it is kept, from its beginning.
    #[must_use]
    pub fn log_kept(mut self, bytes: u64) -> Self {
        self.retention.log_kept = bytes;
        self
    }

    /// Sets all retention rules together: [`snapshots_kept`](Self::snapshots_kept),
    /// [`snapshots_kept_for`](Self::snapshots_kept_for) and [`log_kept`](Self::log_kept). Names that
    /// `retention` gives up are ignored; [`Store::prune`](crate::Store::prune) gives up names.
    ///
    /// ```
    /// use remanent::{Options, Retention, Store};
    /// let rules = Retention::default().snapshots_kept(5).log_kept(1 << 20);
    /// let store = Store::temporary(Options::default().retention(&rules))?;
    /// assert_eq!(store.retention(), rules);
    /// # Ok::<(), remanent::Error>(())
    /// ```
    #[must_use]
    pub fn retention(mut self, retention: &Retention) -> Self {
        self.retention =
            Retention { names_given_up: BTreeSet::new(), names_only: false, ..retention.clone() };
        self
    }

    /// Sets whether snapshots compress page images. Default: [`Compression::Zstd`].
    ///
    /// Reading does not depend on this option. In measurements, bf16 weights were compressed to 0.78 of their
    /// size and zeros to nothing, while random bytes were stored uncompressed; a snapshot of 32 MiB took
    /// between half and twice as long as without compression (two busy cores). [`Compression::Off`] uses more
    /// disk space and less CPU time.
    #[must_use]
    pub fn compression(mut self, compression: Compression) -> Self {
        self.compression = compression;
        self
    }

    /// Sets the number of page bytes after which a snapshot writes a chunk of images, so that a small store
    /// can have several chunks and several image files.
    #[doc(hidden)]
    #[must_use]
    pub fn chunk_len(mut self, bytes: u64) -> Self {
        self.chunk_len = Some(bytes.max(1));
        self
    }

    /// Sets the size in bytes of the windows in which an open reads the log, so that a small log can have
    /// several windows. With 0, one thread reads the whole log.
    #[doc(hidden)]
    #[must_use]
    pub fn replay_window_len(mut self, bytes: u64) -> Self {
        self.replay_window_len = Some(bytes);
        self
    }

    /// Sets when an open loads pages into memory. Default: [`PageLoad::Eager`], which loads all of them
    /// before the open returns.
    ///
    /// With [`PageLoad::OnDemand`], the open returns when the page table is complete, the memory of all pages
    /// is allocated, and the pages that the log changed since the newest snapshot are loaded. The other pages
    /// are *unloaded*, and are loaded in the background. A read, a lease or a batch that needs an unloaded
    /// page has it loaded next and waits for it. [`Store::unloaded_pages`] returns how many remain, and
    /// [`Store::wait_loaded`] waits for all of them.
    ///
    /// Pages stay unloaded only if the snapshot is recorded as verified; if a crash prevented that, the open
    /// loads all pages. While any page is unloaded, new snapshots remove nothing, and [`Store::prune`] and
    /// restores wait. A damaged image is detected only when its page is loaded: every call that needs the
    /// page then fails with [`Error::Damaged`], and the store is poisoned, but can still be read. The next
    /// eager open detects all damage that it would have found before, and skips the snapshot if it can.
    ///
    /// ```
    /// use remanent::options::PageLoad;
    /// use remanent::{Options, Place, Store};
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let path = directory.path().join("mystore");
    /// let store = Store::open(&path, Options::default())?;
    /// let mut batch = store.batch();
    /// let page = batch.create(4, Place::Host).page();
    /// batch.write(page, 0, b"then");
    /// let page = store.commit(batch)?.pages[0];
    /// store.snapshot()?;
    /// store.close()?;
    ///
    /// let store = Store::open(&path, Options::default().page_load(PageLoad::OnDemand))?;
    /// assert_eq!(store.recovered().unloaded_pages, 1);
    /// let mut bytes = [0; 4];
    /// store.read(page, 0, &mut bytes)?; // loads the page if it is not loaded yet
    /// assert_eq!(&bytes, b"then");
    /// store.wait_loaded()?;
    /// assert_eq!(store.unloaded_pages().pages, 0);
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// [`Store::unloaded_pages`]: crate::Store::unloaded_pages
    /// [`Store::wait_loaded`]: crate::Store::wait_loaded
    /// [`Store::prune`]: crate::Store::prune
    #[must_use]
    pub fn page_load(mut self, page_load: PageLoad) -> Self {
        self.page_load = page_load;
        self
    }

    /// Sets by how many bytes the log grows before a background snapshot is taken. `None` disables this
    /// trigger. Default: 256 MiB.
    ///
    /// The bytes are counted from the beginning of the last snapshot and include images written in advance of
    /// their batches. This bounds the amount of log to replay.
    #[must_use]
    pub fn snapshot_log_bytes(mut self, bytes: impl Into<Option<u64>>) -> Self {
        self.snapshot_log_bytes = bytes.into();
        self
    }

    /// Sets the time after which a background snapshot is taken. `None` disables this trigger. Default: 60
    /// seconds.
    ///
    /// The time is counted from the beginning of the last snapshot. No snapshot is taken if nothing was
    /// committed since then.
    #[must_use]
    pub fn snapshot_interval(mut self, interval: impl Into<Option<Duration>>) -> Self {
        self.snapshot_interval = interval.into();
        self
    }

    /// Limits how many bytes per second a background snapshot writes. Default: no limit.
    ///
    /// A snapshot that the caller waits for is not limited. Whatever the limit, a background snapshot runs on
    /// a single thread and uses at most one core.
    #[must_use]
    pub fn snapshot_bytes_per_second(mut self, bytes: impl Into<Option<u64>>) -> Self {
        self.snapshot_bytes_per_second = bytes.into();
        self
    }

    /// Sets the time between background scrubs. `None` disables them. Default: 24 hours.
    ///
    /// A background scrub reads the data on disk as [`Store::scrub`] does, so that damage is found while the
    /// page is still in memory and can be repaired from there. The time is counted from the open, or from the
    /// beginning of the last background scrub.
    ///
    /// [`Store::scrub`]: crate::Store::scrub
    #[must_use]
    pub fn scrub_interval(mut self, interval: impl Into<Option<Duration>>) -> Self {
        self.scrub_interval = interval.into();
        self
    }

    /// Limits how many bytes per second a background scrub reads. Default: 64 MiB, at which 1 TiB takes four
    /// and a half hours.
    #[must_use]
    pub fn scrub_bytes_per_second(mut self, bytes: impl Into<Option<u64>>) -> Self {
        self.scrub_bytes_per_second = bytes.into();
        self
    }

    /// Rejects invalid values.
    pub(crate) fn check(&self) -> Result<()> {
        let invalid = |option, reason: String| Err(Error::InvalidOption { option, reason });
        if !(SEGMENT_LEN_MIN..=SEGMENT_LEN_MAX).contains(&self.segment_len)
            || !self.segment_len.is_multiple_of(4096)
        {
            return invalid(
                "segment_len",
                format!(
                    "{} is no multiple of 4096 from 16 KiB to {} MiB",
                    self.segment_len,
                    SEGMENT_LEN_MAX >> 20
                ),
            );
        }
        if self.identity.as_ref().is_some_and(|identity| identity.len() > IDENTITY_LEN_MAX) {
            return invalid("identity", format!("longer than {IDENTITY_LEN_MAX} bytes"));
        }
        if self.snapshot_bytes_per_second == Some(0) {
            return invalid("snapshot_bytes_per_second", "no snapshot would ever end".to_owned());
        }
        if self.scrub_bytes_per_second == Some(0) {
            return invalid("scrub_bytes_per_second", "nothing would ever be read".to_owned());
        }
        if self.retention.snapshots_kept == 0 {
            return invalid("snapshots_kept", "at least one snapshot must be kept".to_owned());
        }
        self.tiers.iter().try_for_each(|tiers| tiers.check(&self.budget))
    }

    /// Returns the number of whole segments in the reserve, for segments that grow up to `segment_len` bytes.
    pub(crate) fn reserve_segments(&self, segment_len: u64) -> usize {
        let bytes = self.reserve_bytes.unwrap_or(2 * segment_len);
        usize::try_from(bytes.div_ceil(segment_len)).unwrap_or(usize::MAX)
    }
}
