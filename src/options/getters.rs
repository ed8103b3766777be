//! Getters of [`Options`], for callers that pass them on.

use std::time::Duration;

use super::{
    Ack, Budget, Compression, Create, DeviceChoice, ImageIo, LogIo, Options, PageLoad, Retention, Tiers,
};

/// Getters for the options, named after the setters with the prefix `get_`.
///
/// ```
/// use remanent::{Ack, Options};
/// let options = Options::default().ack(Ack::Durable);
/// assert_eq!((options.get_ack(), options.get_segment_len()), (Ack::Durable, 16 << 20));
/// ```
impl Options {
    /// Returns what an open does if the directory contains no store.
    #[must_use]
    pub fn get_create(&self) -> Create {
        self.create
    }

    /// Returns the acknowledgement that `commit` waits for.
    #[must_use]
    pub fn get_ack(&self) -> Ack {
        self.ack
    }

    /// Returns how the log is written; `None` means the default for [`ack`](Self::ack).
    #[must_use]
    pub fn get_log_io(&self) -> Option<LogIo> {
        self.log_io
    }

    /// Returns how image files are written.
    #[must_use]
    pub fn get_image_io(&self) -> ImageIo {
        self.image_io
    }

    /// Returns the device that holds the pages.
    #[must_use]
    pub fn get_device(&self) -> DeviceChoice {
        self.device
    }

    /// Returns the devices of the slots; empty if every slot is bound to [`device`](Self::device).
    #[must_use]
    pub fn get_slots(&self) -> &[DeviceChoice] {
        &self.slots
    }

    /// Returns the maximum length of a log segment in bytes.
    #[must_use]
    pub fn get_segment_len(&self) -> u64 {
        self.segment_len
    }

    /// Returns how many bytes are reserved for deletes on a full disk.
    #[must_use]
    pub fn get_reserve_bytes(&self) -> u64 {
        self.reserve_bytes.unwrap_or(2 * self.segment_len)
    }

    /// Returns how many bytes of spare segments are kept beyond the reserve; `None` means a share of the file
    /// system.
    #[must_use]
    pub fn get_spare_bytes(&self) -> Option<u64> {
        self.spare_bytes
    }

    /// Returns the byte limits of places.
    #[must_use]
    pub fn get_budget(&self) -> &Budget {
        &self.budget
    }

    /// Returns the order of places through which unused pages are demoted, if one is set.
    #[must_use]
    pub fn get_tiers(&self) -> Option<&Tiers> {
        self.tiers.as_ref()
    }

    /// Returns the application-defined description of the store.
    #[must_use]
    pub fn get_identity(&self) -> Option<&[u8]> {
        self.identity.as_deref()
    }

    /// Returns the hash of everything that determines the meaning of the pages' bytes.
    #[must_use]
    pub fn get_layout_fingerprint(&self) -> Option<[u8; 32]> {
        self.layout_fingerprint
    }

    /// Returns the rules for which snapshots and how much log are kept.
    #[must_use]
    pub fn get_retention(&self) -> Retention {
        self.retention.clone()
    }

    /// Returns whether snapshots compress page images.
    #[must_use]
    pub fn get_compression(&self) -> Compression {
        self.compression
    }

    /// Returns when an open loads pages into memory.
    #[must_use]
    pub fn get_page_load(&self) -> PageLoad {
        self.page_load
    }

    /// Returns the number of log bytes after which a background snapshot is taken.
    #[must_use]
    pub fn get_snapshot_log_bytes(&self) -> Option<u64> {
        self.snapshot_log_bytes
    }

    /// Returns the time after which a background snapshot is taken.
    #[must_use]
    pub fn get_snapshot_interval(&self) -> Option<Duration> {
        self.snapshot_interval
    }

    /// Returns the rate limit of background snapshots in bytes per second.
    #[must_use]
    pub fn get_snapshot_bytes_per_second(&self) -> Option<u64> {
        self.snapshot_bytes_per_second
    }

    /// Returns the time between background scrubs.
    #[must_use]
    pub fn get_scrub_interval(&self) -> Option<Duration> {
        self.scrub_interval
    }

    /// Returns the rate limit of background scrubs in bytes per second.
    #[must_use]
    pub fn get_scrub_bytes_per_second(&self) -> Option<u64> {
        self.scrub_bytes_per_second
    }
}
