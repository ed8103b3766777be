//! How a store is opened.

mod choices;
mod budget;
mod caller_memory;
mod retention;
mod snapshot;
mod getters;
mod page_memory;
mod tiers;

use std::collections::BTreeSet;
use std::time::Duration;

use remanent_format::limits::{IDENTITY_LEN_MAX, SEGMENT_LEN_MAX, SEGMENT_LEN_MIN};

pub use self::budget::Budget;
pub use self::caller_memory::{CallerMemory, HostMemory};
pub use self::choices::{Ack, Compression, Create, DeviceChoice, ImageIo, LogIo, PageLoad};
pub(crate) use self::page_memory::PageMemorySource;
pub use self::retention::Retention;
pub use self::snapshot::SnapshotOptions;
pub use self::tiers::Tiers;
use crate::error::{Error, Result};

/// How a store is opened. Every option has a default.
///
/// ```
/// use remanent::{Ack, Options, Store};
/// let store = Store::temporary(Options::default().ack(Ack::Durable).segment_len(1 << 20))?;
/// # drop(store);
/// # Ok::<(), remanent::Error>(())
/// ```
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
    /// What to do where there is no store yet. Default: [`Create::IfEmpty`].
    #[must_use]
    pub fn create(mut self, create: Create) -> Self {
        self.create = create;
        self
    }

    /// What `commit` waits for. Default: [`Ack::Logged`].
    #[must_use]
    pub fn ack(mut self, ack: Ack) -> Self {
        self.ack = ack;
        self
    }

    /// How the log reaches the disk. Default: mapped; direct where commits wait for a sync
    /// ([`Ack::Durable`]); buffered where the file system allows neither.
    #[must_use]
    pub fn log_io(mut self, io: LogIo) -> Self {
        self.log_io = Some(io);
        self
    }

    /// How images of pages reach the disk: those of snapshots, and those that are written ahead of a batch.
    /// Images are read however they were written. Default: [`ImageIo::Buffered`]. A way that the file system
    /// of the images does not know is refused with [`Error::InvalidOption`].
    ///
    /// ```
    /// use remanent::{ImageIo, Options, Store};
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

    /// Which device holds the pages. Default: [`DeviceChoice::Auto`].
    #[must_use]
    pub fn device(mut self, device: DeviceChoice) -> Self {
        self.device = device;
        self
    }

    /// Binds slots: pages in [`Place::Device`] number *n* live on the *n*-th of these, pages in every other
    /// place on the first. Slots are bound anew at each open, so a store may go on with fewer devices, more,
    /// or others; a page whose slot has none is refused with [`Error::PlaceUnavailable`]. Default: none, so
    /// that all slots are the one device of [`Options::device`].
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

    /// The length up to which log segments grow, in bytes, a multiple of 4096 of at least 16 KiB. Default: 16
    /// MiB. Every open begins with segments of 256 KiB, and each later one is twice as long as the one
    /// before: what an open takes from the disk follows from what it commits. Segments that snapshots make
    /// superfluous wait to be used again, see [`spare_bytes`](Self::spare_bytes).
    #[must_use]
    pub fn segment_len(mut self, bytes: u64) -> Self {
        self.segment_len = bytes;
        self
    }

    /// Space held back for deletes when the disk is full, in bytes, rounded up to whole segments of
    /// [`segment_len`](Self::segment_len). While the log's segments are shorter than that, so are those of
    /// the reserve. Default: two segments.
    ///
    /// A thread of the store makes the reserve after the open, and again after the batches that lengthened
    /// the log. A disk that others fill in those milliseconds has less of it.
    ///
    /// Batches that only delete find room for one in each 4 KiB of a segment but the first, if each is waited
    /// for, and each may delete 100 pages. The last segment that they take has 16 KiB: with a reserve of two
    /// segments of 256 KiB they are 66. A pause of 10 ms takes the room of one: the log is sealed then.
    ///
    /// Beside the reserve five segments of at least 16 KiB are kept for opens, seals and manifests, unless
    /// the reserve is 0. Where that is all that is left, and too little for the open after the next one,
    /// every batch is refused with [`Error::DiskFull`] until space comes back: so the store can still be
    /// opened.
    #[must_use]
    pub fn reserve_bytes(mut self, bytes: u64) -> Self {
        self.reserve_bytes = Some(bytes);
        self
    }

    /// Bytes of log segments that nothing needs any more and that wait to be used again, beyond the reserve:
    /// a log that grows into them need not wait for new ones. They give way to whatever finds the disk full,
    /// and to [`Store::prune`](crate::Store::prune). One stays in any case, unless this is 0. Default: a
    /// hundredth of the file system, but no more than 512 MiB.
    ///
    /// Image files that snapshots make superfluous wait as well, and the next snapshots write over them. With
    /// the images that are kept they take at most twice the bytes that the kept snapshots name. They are not
    /// counted here, and give way in the same way. If this is 0, none waits.
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

    /// Byte limits a place. Default: none.
    #[must_use]
    pub fn budget(mut self, budget: Budget) -> Self {
        self.budget = budget;
        self
    }

    /// An order of places: where one is full, pages that are not used go to the next one. Default: none, so
    /// that a batch for which a place has no room is refused with [`Error::OverBudget`].
    #[must_use]
    pub fn tiers(mut self, tiers: Tiers) -> Self {
        self.tiers = Some(tiers);
        self
    }

    /// The caller's own description of the store: given at creation it is kept, given later it must be
    /// the same. At most 64 KiB. Default: not compared.
    #[must_use]
    pub fn identity(mut self, identity: impl Into<Vec<u8>>) -> Self {
        self.identity = Some(identity.into());
        self
    }

    /// A hash of everything that the meaning of the pages' bytes depends on: given at creation it is
    /// kept, given later it must be the same. Default: not compared.
    #[must_use]
    pub fn layout_fingerprint(mut self, fingerprint: [u8; 32]) -> Self {
        self.layout_fingerprint = Some(fingerprint);
        self
    }

    /// Verified snapshots kept, with the log since the oldest of them; at least 1. With fewer than two a
    /// damaged image cannot be replayed around. Default: 2.
    #[must_use]
    pub fn snapshots_kept(mut self, count: usize) -> Self {
        self.retention.snapshots_kept = count;
        self
    }

    /// Snapshots that are younger than this are kept beyond [`Options::snapshots_kept`], with the log since
    /// the oldest of them. A snapshot is as old as the oldest time that it or a later one names, so that a
    /// clock that was fast for a while keeps nothing for longer; a time in the future is now. Default: zero.
    #[must_use]
    pub fn snapshots_kept_for(mut self, age: Duration) -> Self {
        self.retention.snapshots_kept_for = age;
        self
    }

    /// Bytes of log kept at least, with the newest snapshot from which they can be replayed: any state in
    /// them can be gone back to. What was written ahead of its batches is kept with them and not counted.
    /// While the log is shorter, all of it is kept, from its beginning. Default: 0, no more than the
    /// snapshots kept need.
    #[must_use]
    pub fn log_kept(mut self, bytes: u64) -> Self {
        self.retention.log_kept = bytes;
        self
    }

    /// How much of the past is kept: sets [`snapshots_kept`](Self::snapshots_kept),
    /// [`snapshots_kept_for`](Self::snapshots_kept_for) and [`log_kept`](Self::log_kept) together. Names that
    /// the rules give up are not looked at: [`Store::prune`](crate::Store::prune) gives up names.
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

    /// Whether snapshots compress the images of pages. Images are read however they are stored. Default:
    /// [`Compression::Zstd`]: pages of bf16 weights took 0.78 of their bytes and zeros none, bytes without
    /// order stayed as they are, and a snapshot of 32 MiB took between half and twice its time without (two
    /// busy cores). Off spends disk to save the processor.
    #[must_use]
    pub fn compression(mut self, compression: Compression) -> Self {
        self.compression = compression;
        self
    }

    /// After how many bytes of pages a snapshot writes a chunk of images, so that a small store can have
    /// several chunks, and several image files.
    #[doc(hidden)]
    #[must_use]
    pub fn chunk_len(mut self, bytes: u64) -> Self {
        self.chunk_len = Some(bytes.max(1));
        self
    }

    /// Bytes of the windows by which an open reads the log, so that a small log can have several. 0: one
    /// thread reads it.
    #[doc(hidden)]
    #[must_use]
    pub fn replay_window_len(mut self, bytes: u64) -> Self {
        self.replay_window_len = Some(bytes);
        self
    }

    /// When an open brings pages into memory. Default: [`PageLoad::Eager`], all of them before it returns.
    ///
    /// With [`PageLoad::OnDemand`] it returns when the page table is there, the memory of all pages is
    /// allocated and those are loaded that the log changed since the newest snapshot. The others are
    /// *unloaded*. They are loaded in the background, and whatever needs an unloaded page (a read, a lease, a
    /// batch that names it) has it loaded first and waits for it. [`Store::unloaded_pages`] tells how many
    /// are left, [`Store::wait_loaded`] waits for all of them.
    ///
    /// Pages stay unloaded only if the snapshot is recorded as verified; if a crash came before that, the
    /// open loads all of them. While any page is unloaded, nothing is removed for a snapshot that is taken,
    /// and [`Store::prune`] and a restore wait. An image that is found damaged is reported late: by
    /// everything that needs its page, with [`Error::Damaged`], and by the store, which is poisoned, but goes
    /// on being read. An eager open then finds all that it would have found, and passes over the snapshot if
    /// it can.
    ///
    /// ```
    /// use remanent::{Options, Place, PageLoad, Store};
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
    /// store.read(page, 0, &mut bytes)?; // loads the page, if nothing has yet
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

    /// A snapshot is taken in the background when the log has grown by this number of bytes since the last
    /// one began, images that were written ahead of their batches included: replaying the log takes no longer
    /// than that. `None`: not for this reason. Default: 256 MiB.
    #[must_use]
    pub fn snapshot_log_bytes(mut self, bytes: impl Into<Option<u64>>) -> Self {
        self.snapshot_log_bytes = bytes.into();
        self
    }

    /// A snapshot is taken in the background when this time has passed since the last one began, if there
    /// was a commit meanwhile. `None`: not for this reason. Default: 60 seconds.
    #[must_use]
    pub fn snapshot_interval(mut self, interval: impl Into<Option<Duration>>) -> Self {
        self.snapshot_interval = interval.into();
        self
    }

    /// How many bytes a second a snapshot taken in the background writes; one that the caller waits for goes
    /// as fast as it can. Default: no limit. One thread does all of it, whatever the limit is: of the
    /// processor a snapshot in the background takes one core.
    #[must_use]
    pub fn snapshot_bytes_per_second(mut self, bytes: impl Into<Option<u64>>) -> Self {
        self.snapshot_bytes_per_second = bytes.into();
        self
    }

    /// In the background the store reads what lies on disk, as [`Store::scrub`] does, when this time has
    /// passed since it was opened or since the last time began: damage is found, and mended from memory,
    /// while there is still a memory to mend it from. `None`: only when it is told to. Default: 24 hours.
    ///
    /// [`Store::scrub`]: crate::Store::scrub
    #[must_use]
    pub fn scrub_interval(mut self, interval: impl Into<Option<Duration>>) -> Self {
        self.scrub_interval = interval.into();
        self
    }

    /// How many bytes a second are read at most for that in the background. Default: 64 MiB, at which 1 TiB
    /// takes four hours and a half.
    #[must_use]
    pub fn scrub_bytes_per_second(mut self, bytes: impl Into<Option<u64>>) -> Self {
        self.scrub_bytes_per_second = bytes.into();
        self
    }

    /// Refuses values that cannot be used.
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

    /// Whole segments of the reserve.
    pub(crate) fn reserve_segments(&self) -> usize {
        let bytes = self.reserve_bytes.unwrap_or(2 * self.segment_len);
        usize::try_from(bytes.div_ceil(self.segment_len)).unwrap_or(usize::MAX)
    }
}
