//! Options of the log.

use remanent_format::limits::{SEGMENT_LEN_MAX, SEGMENT_LEN_MIN};

use super::{LogIo, invalid};
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;

/// Options for writing the log and for the disk space that its files occupy in addition to the kept log.
///
/// [`Retention::log_kept`](super::Retention::log_kept) sets how much of the log is kept.
///
/// ```
/// use remanent::Options;
/// use remanent::options::{LogIo, LogOptions};
/// let log = LogOptions::new().io(LogIo::Buffered).segment_len(64 << 10).spare_bytes(0);
/// let store = Options::new().log(log).open_temporary()?;
/// assert!(store.recovered().log_io.starts_with("buffered"));
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LogOptions {
    /// The method by which the log is written to disk; `None` chooses the fastest method that the file system supports.
    pub io: Option<LogIo>,
    /// The maximum length of a segment in bytes.
    pub segment_len: u64,
    /// Disk space reserved for deletes on a full disk, in bytes; `None` reserves two segments.
    pub reserve_bytes: Option<u64>,
    /// The number of bytes of obsolete segments kept for reuse; `None` keeps a share of the file system.
    pub spare_bytes: Option<u64>,
    /// The size, in bytes, of the windows in which an open reads the log. With a small value, even a short log is read
    /// in several windows. With 0, one thread reads the whole log.
    #[doc(hidden)]
    pub replay_window_len: Option<u64>,
}

impl Default for LogOptions {
    fn default() -> Self {
        Self {
            io: None,
            segment_len: 16 << 20,
            reserve_bytes: None,
            spare_bytes: None,
            replay_window_len: None,
        }
    }
}

impl LogOptions {
    /// Returns the default options.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets how the log is written to disk. Default: [`LogIo::Mapped`], or [`LogIo::Direct`] if commits wait for a sync
    /// ([`Ack::Durable`](super::Ack::Durable)). If the file system does not support the default, [`LogIo::Buffered`] is
    /// used.
    ///
    /// Change it if `remanent bench commit` shows that another method is faster on your disk. The open fails with
    /// [`Error::Invalid`] if the file system does not support `io`.
    #[must_use]
    pub fn io(mut self, io: LogIo) -> Self {
        self.io = Some(io);
        self
    }

    /// Sets the maximum length of a segment in bytes: a multiple of 4096, from 16 KiB to 4 GiB. Default: 16 MiB.
    ///
    /// Reduce it to bound the disk space of a small store. Every open starts with segments of 64 KiB and makes each
    /// later one longer, so that disk usage follows the amount of committed data. A segment uses at most a 64th of the
    /// file system, or 256 KiB if that is more, and less on a nearly full disk. Segments that a snapshot makes obsolete
    /// are reused; see [`spare_bytes`](Self::spare_bytes).
    #[must_use]
    pub fn segment_len(mut self, bytes: u64) -> Self {
        self.segment_len = bytes;
        self
    }

    /// Sets how many bytes of disk space are reserved for deletes on a full disk. Default: two segments.
    ///
    /// Increase it if more than about 100 deletes must succeed on a full disk; set it to 0 if space matters more. The
    /// size is rounded up to whole segments of [`segment_len`](Self::segment_len). While the log's segments are shorter
    /// than that, the reserve's segments are shorter too. They begin with 16 KiB at each open.
    ///
    /// A background thread allocates the reserve after the open, and again after batches that extended the log. If
    /// other programs fill the disk in those milliseconds, the reserve is smaller.
    ///
    /// A batch can delete 100 pages if it does nothing else. If the caller waits for each batch, each takes 4 KiB of a
    /// segment. The first 4 KiB of a segment contain no batches. The last segment used for deletes is 16 KiB long, so a
    /// reserve of two segments of 256 KiB has room for 66 batches. A pause of 10 ms uses the room of one more batch,
    /// because the log is then sealed.
    ///
    /// In addition to the reserve, five segments of at least 16 KiB are kept for opens, seals and manifests, unless the
    /// reserve is 0. When only these segments remain and they are too few for the open after the next one, every batch
    /// fails with [`Error::DiskFull`] until space is available again. The store can therefore still be opened.
    #[must_use]
    pub fn reserve_bytes(mut self, bytes: u64) -> Self {
        self.reserve_bytes = Some(bytes);
        self
    }

    /// Sets how many bytes of obsolete segments are kept for reuse, beyond the reserve. Default: a hundredth of the
    /// file system, but at most 512 MiB.
    ///
    /// Reduce it if disk space matters more than steady commit times: a log that can reuse segments does not wait for
    /// new ones. Spare segments are removed when the disk is full, and by [`Store::prune`](crate::Store::prune). One
    /// spare segment is always kept, unless `bytes` is 0.
    ///
    /// Obsolete image files are kept as well, for the next snapshots to overwrite, and are removed in the same
    /// situations. They do not count toward `bytes`: together with the images in use, they occupy at most twice the
    /// bytes that the kept snapshots name. If `bytes` is 0, no image files are kept for reuse.
    #[must_use]
    pub fn spare_bytes(mut self, bytes: u64) -> Self {
        self.spare_bytes = Some(bytes);
        self
    }

    /// Sets the size in bytes of the windows in which an open reads the log.
    #[doc(hidden)]
    #[must_use]
    pub fn replay_window_len(mut self, bytes: u64) -> Self {
        self.replay_window_len = Some(bytes);
        self
    }

    /// Returns an error if the segment length is invalid.
    pub(super) fn check(&self) -> Result<()> {
        let len = self.segment_len;
        if !(SEGMENT_LEN_MIN..=SEGMENT_LEN_MAX).contains(&len) || !len.is_multiple_of(4096) {
            let max = SEGMENT_LEN_MAX >> 20;
            return invalid(
                "log.segment_len",
                format!("{len} is no multiple of 4096 from 16 KiB to {max} MiB"),
            );
        }
        Ok(())
    }

    /// Returns the number of whole segments in the reserve. Its segments grow up to `segment_len` bytes.
    pub(crate) fn reserve_segments(&self, segment_len: u64) -> usize {
        let bytes = self.reserve_bytes.unwrap_or(2 * segment_len);
        usize::try_from(bytes.div_ceil(segment_len)).unwrap_or(usize::MAX)
    }
}
