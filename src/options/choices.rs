//! Options with a fixed set of values.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Invalid, Result};

/// The guarantee that a batch has when its commit is acknowledged. A `Durable` batch is also `Logged`. A batch is
/// `Applied` only after it is logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Ack {
    /// Later reads and kernels on the store's lanes observe the batch. The batch also survives the same failures as a
    /// `Logged` batch.
    Applied,
    /// The batch survives the death of the process at any instruction.
    #[default]
    Logged,
    /// The batch survives a power cut. On an in-memory file system such as tmpfs this is the same as
    /// `Logged`, because its files do not survive a power cut.
    Durable,
    /// The batch survives the loss of the machine: every restore of the archive that begins later contains it. The
    /// batch is also `Durable`. Only a store with an archive (the feature `archive`) gives this guarantee. Other stores
    /// return [`Error::Archive`].
    Archived,
}

/// The method by which the log is written to disk. All variants write the same bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LogIo {
    /// Writes the log through a shared memory mapping, and makes it durable with `msync`. A commit needs no system
    /// call. Requires a file system that overwrites blocks rather than writing changed blocks elsewhere.
    Mapped,
    /// Writes with `pwrite` and `fdatasync`. Works on every file system.
    Buffered,
    /// Writes each group of frames in one call, bypassing the page cache (`O_DIRECT`, `O_DSYNC`). A batch becomes
    /// `Logged` and `Durable` at the same time, and is applied only afterwards.
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

/// The method by which image files are written to disk. All variants write the same bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ImageIo {
    /// `Direct` for image files of at least 8 MiB and `Buffered` for shorter ones, whose space would take longer to
    /// allocate than their bytes take to write. `Buffered` for all files on tmpfs, and on file systems without direct
    /// I/O.
    #[default]
    Auto,
    /// Writes images through a shared mapping of preallocated space. Requires a file system that overwrites blocks
    /// rather than writing changed blocks elsewhere. Slower than the other variants for new files.
    ///
    /// On tmpfs with [`Compression::Off`], the device copies pages directly into reused image files, and the host does
    /// not access the bytes. For this purpose the files' memory is registered with the device, as far as the budget of
    /// [`Place::Pinned`] allows. The device reads the bytes back when the snapshot is verified.
    /// [`SnapshotStats::bytes_in_place`] counts these bytes.
    ///
    /// [`Place::Pinned`]: crate::Place::Pinned
    /// [`SnapshotStats::bytes_in_place`]: crate::stats::SnapshotStats::bytes_in_place
    Mapped,
    /// Writes with `pwrite` and `fdatasync`. Works on every file system.
    Buffered,
    /// Writes images bypassing the page cache (`O_DIRECT`), so a snapshot does not evict the cached data of other
    /// programs. The next open reads all images from disk. In measurements, this was the fastest way to write to a disk
    /// (`docs/measurements.md`). On an in-memory file system it is identical to `Buffered`.
    Direct,
}

impl fmt::Display for ImageIo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ImageIo::Auto => "auto",
            ImageIo::Mapped => "mapped",
            ImageIo::Buffered => "buffered",
            ImageIo::Direct => "direct",
        })
    }
}

/// The device that holds the pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceChoice {
    /// The first GPU if both the build and the machine support one, otherwise the host. [`RecoveryReport::device`]
    /// names the chosen device. For the host, it also states why no GPU is used.
    ///
    /// [`RecoveryReport::device`]: crate::store::RecoveryReport::device
    #[default]
    Auto,
    /// The GPU with this ordinal among those visible to the process. The open fails with [`Error::Unavailable`] if the
    /// GPU cannot be used.
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

    /// Parses `auto`, `host`, or `cuda:` followed by a number.
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
                    Err(Error::Invalid(Invalid::Option { option: "device", reason }))
                },
                |number| Ok(DeviceChoice::Cuda(number)),
            ),
        }
    }
}

/// The behavior of an open if the directory contains no store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Create {
    /// Creates a store if the directory is missing or contains no other files.
    #[default]
    IfEmpty,
    /// Fails with [`Error::NoStore`].
    Never,
}

/// The time at which an open loads pages into memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PageLoad {
    /// Loads all pages before the open returns.
    #[default]
    Eager,
    /// Loads the pages that the log changed before the open returns. Loads all other pages in the background, requested
    /// pages first. A page on disk that a durable batch wrote completely since the newest snapshot is verified when it
    /// is read, not at the open.
    OnDemand,
}

/// The compression of page images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Compression {
    /// Images are stored uncompressed.
    Off,
    /// Each page is compressed separately with zstd level 1, if a quick estimate predicts a saving of at
    /// least 12 %.
    #[default]
    Zstd,
}
