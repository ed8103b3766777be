//! The options as they are set, for a caller that passes them on.

use std::time::Duration;

use super::{
    Ack, Budget, Compression, Create, DeviceChoice, ImageIo, LogIo, Options, PageLoad, Retention, Tiers,
};

/// What the options are, each under the name by which it is set with `get_` before it.
///
/// ```
/// use remanent::{Ack, Options};
/// let options = Options::default().ack(Ack::Durable);
/// assert_eq!((options.get_ack(), options.get_segment_len()), (Ack::Durable, 16 << 20));
/// ```
impl Options {
    /// What is done where there is no store yet.
    #[must_use]
    pub fn get_create(&self) -> Create {
        self.create
    }

    /// What `commit` waits for.
    #[must_use]
    pub fn get_ack(&self) -> Ack {
        self.ack
    }

    /// How the log reaches the disk; `None` follows [`ack`](Self::ack).
    #[must_use]
    pub fn get_log_io(&self) -> Option<LogIo> {
        self.log_io
    }

    /// How images reach the disk.
    #[must_use]
    pub fn get_image_io(&self) -> ImageIo {
        self.image_io
    }

    /// Which device holds the pages.
    #[must_use]
    pub fn get_device(&self) -> DeviceChoice {
        self.device
    }

    /// The devices of the slots; none if every slot is the one device.
    #[must_use]
    pub fn get_slots(&self) -> &[DeviceChoice] {
        &self.slots
    }

    /// The length up to which log segments grow, in bytes.
    #[must_use]
    pub fn get_segment_len(&self) -> u64 {
        self.segment_len
    }

    /// Bytes held back for deletes on a full disk.
    #[must_use]
    pub fn get_reserve_bytes(&self) -> u64 {
        self.reserve_bytes.unwrap_or(2 * self.segment_len)
    }

    /// Bytes of spare segments beyond the reserve; `None` is a share of the file system.
    #[must_use]
    pub fn get_spare_bytes(&self) -> Option<u64> {
        self.spare_bytes
    }

    /// Byte limits a place.
    #[must_use]
    pub fn get_budget(&self) -> &Budget {
        &self.budget
    }

    /// The order of places through which pages go down, if there is one.
    #[must_use]
    pub fn get_tiers(&self) -> Option<&Tiers> {
        self.tiers.as_ref()
    }

    /// The caller's own description of the store.
    #[must_use]
    pub fn get_identity(&self) -> Option<&[u8]> {
        self.identity.as_deref()
    }

    /// The hash of what the meaning of the bytes depends on.
    #[must_use]
    pub fn get_layout_fingerprint(&self) -> Option<[u8; 32]> {
        self.layout_fingerprint
    }

    /// How much of the past is kept.
    #[must_use]
    pub fn get_retention(&self) -> Retention {
        self.retention.clone()
    }

    /// Whether snapshots compress images.
    #[must_use]
    pub fn get_compression(&self) -> Compression {
        self.compression
    }

    /// When an open brings pages into memory.
    #[must_use]
    pub fn get_page_load(&self) -> PageLoad {
        self.page_load
    }

    /// The growth of the log after which a snapshot is taken, in bytes.
    #[must_use]
    pub fn get_snapshot_log_bytes(&self) -> Option<u64> {
        self.snapshot_log_bytes
    }

    /// The time after which a snapshot is taken.
    #[must_use]
    pub fn get_snapshot_interval(&self) -> Option<Duration> {
        self.snapshot_interval
    }

    /// The pace of background snapshots.
    #[must_use]
    pub fn get_snapshot_bytes_per_second(&self) -> Option<u64> {
        self.snapshot_bytes_per_second
    }

    /// The time between scrubs.
    #[must_use]
    pub fn get_scrub_interval(&self) -> Option<Duration> {
        self.scrub_interval
    }

    /// The pace of background scrubs.
    #[must_use]
    pub fn get_scrub_bytes_per_second(&self) -> Option<u64> {
        self.scrub_bytes_per_second
    }
}
