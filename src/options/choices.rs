//! Options that are one of a few: acknowledgement, log, images, device, creation, loading, compression.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// What an acknowledgement promises. `Durable` includes `Logged`; a batch is `Applied` only once it is
/// logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Ack {
    /// Later reads and kernels on the store's lanes see the batch. Survives what `Logged` does.
    Applied,
    /// Survives the death of the process at any instruction.
    #[default]
    Logged,
    /// Survives a power cut. On a file system in memory, such as tmpfs, it is no more than `Logged`: nothing
    /// there survives a power cut.
    Durable,
}

/// How the log reaches the disk. All ways write the same bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LogIo {
    /// Stores into a shared mapping, `msync`. No system call a commit. Needs a file system that
    /// overwrites in place.
    Mapped,
    /// `pwrite` and `fdatasync`, for every other file system.
    Buffered,
    /// One write past the page cache for each group of frames (`O_DIRECT`, `O_DSYNC`). A batch is `Logged`
    /// only when it is `Durable`, and not applied before.
    Direct,
}

impl fmt::Display for LogIo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LogIo::Mapped => "mapped",
            LogIo::Buffered => "buffered",
            LogIo::Direct => "direct",
        })
    }
}

/// How image files reach the disk. All ways write the same bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ImageIo {
    /// Stores into a shared mapping of space that was made before. Needs a file system that overwrites in
    /// place. Slower than the other ways where files are new.
    ///
    /// On tmpfs, with [`Compression::Off`], the device copies pages straight to image files that are written
    /// again, and the host touches none of their bytes: the files' memory is registered with the device, as
    /// far as the budget of [`Place::Pinned`] goes. The device reads them back when the snapshot is verified.
    /// [`SnapshotStats::bytes_in_place`] counts these bytes.
    ///
    /// [`Place::Pinned`]: crate::Place::Pinned
    /// [`SnapshotStats::bytes_in_place`]: crate::SnapshotStats::bytes_in_place
    Mapped,
    /// `pwrite` and `fdatasync`. On every file system.
    #[default]
    Buffered,
    /// Writes past the page cache (`O_DIRECT`), so that a snapshot leaves in the cache what other programs
    /// have there. An open that follows finds nothing of the images in the cache. The fastest way to a disk
    /// that was measured (`docs/measurements.md`); in a file system in memory it is no other than `Buffered`.
    Direct,
}

impl fmt::Display for ImageIo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ImageIo::Mapped => "mapped",
            ImageIo::Buffered => "buffered",
            ImageIo::Direct => "direct",
        })
    }
}

/// Which device holds the pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceChoice {
    /// The first GPU if this build and this machine have one, else the host. [`RecoveryReport::device`] says
    /// which it is, and why not a GPU.
    ///
    /// [`RecoveryReport::device`]: crate::RecoveryReport::device
    #[default]
    Auto,
    /// The GPU with this number among those that the process sees; no other will do.
    Cuda(u32),
    /// Ordinary host memory.
    Host,
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceChoice::Auto => f.write_str("auto"),
            DeviceChoice::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            DeviceChoice::Host => f.write_str("host"),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = Error;

    /// `auto`, `host`, or `cuda:` and a number.
    ///
    /// ```
    /// use remanent::DeviceChoice;
    /// assert_eq!("cuda:1".parse::<DeviceChoice>()?, DeviceChoice::Cuda(1));
    /// assert_eq!(DeviceChoice::Cuda(1).to_string(), "cuda:1");
    /// assert!("gpu".parse::<DeviceChoice>().is_err());
    /// # Ok::<(), remanent::Error>(())
    /// ```
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(DeviceChoice::Auto),
            "host" => Ok(DeviceChoice::Host),
            _ => text.strip_prefix("cuda:").and_then(|number| number.parse().ok()).map_or_else(
                || {
                    let reason = format!("`{text}` is none of `auto`, `host`, `cuda:0`, `cuda:1`, …");
                    Err(Error::InvalidOption { option: "device", reason })
                },
                |number| Ok(DeviceChoice::Cuda(number)),
            ),
        }
    }
}

/// What to do where there is no store yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Create {
    /// Create one, but only where no foreign file lies.
    #[default]
    IfEmpty,
    /// Fail with an error.
    Never,
}

/// When an open brings pages into memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PageLoad {
    /// All of them, before it returns.
    #[default]
    Eager,
    /// Those that the log changed before it returns, the others in the background, and first those that are
    /// asked for.
    OnDemand,
}

/// Whether snapshots compress the images of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Compression {
    /// Images stay uncompressed.
    Off,
    /// Each page for itself, with zstd at its first level, if a quick test says that it saves at least 12 %.
    #[default]
    Zstd,
}
