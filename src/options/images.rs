//! Options of image files.

use super::{Compression, ImageIo};
#[cfg(doc)]
use crate::error::Error;

/// The minimum length in bytes of an image file that [`ImageIo::Auto`] writes with direct I/O. Direct writes allocate
/// space first and return the excess at the end. For a file of 3 MB that takes longer than it saves.
const DIRECT_LEN_MIN: u64 = 8 << 20;

/// Options for writing page images. Snapshots write images, and so do batches with long writes, before the batch is
/// logged. Reading images does not depend on these options.
///
/// ```
/// use remanent::Options;
/// use remanent::options::{Compression, ImageIo, ImageOptions};
/// let images = ImageOptions::new().io(ImageIo::Buffered).compression(Compression::Off);
/// let store = Options::new().images(images).open_temporary()?;
/// assert_eq!(store.recovered().image_io, "buffered");
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ImageOptions {
    /// The method by which image files are written to disk.
    pub io: ImageIo,
    /// Whether images are compressed.
    pub compression: Compression,
    /// The number of page bytes after which a snapshot writes a chunk of images; `None` uses the default. With a small
    /// value, even a small store has several chunks and several image files.
    #[doc(hidden)]
    pub chunk_len: Option<u64>,
}

impl ImageOptions {
    /// Returns the default options.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets how image files are written to disk. Default: [`ImageIo::Auto`].
    ///
    /// Use [`ImageIo::Buffered`] if pages are usually read soon after they were written, because their images then stay
    /// in the page cache. Use [`ImageIo::Mapped`] for a store on tmpfs with pages on a GPU. The open fails with
    /// [`Error::Invalid`] if the file system does not support `io`.
    #[must_use]
    pub fn io(mut self, io: ImageIo) -> Self {
        self.io = io;
        self
    }

    /// Sets whether images are compressed. Default: [`Compression::Zstd`].
    ///
    /// Use [`Compression::Off`] if CPU time matters more than disk space, or if the pages cannot be
    /// compressed. In measurements, bf16 weights were compressed to 0.78 of their size and zeros to nothing,
    /// while random bytes were stored uncompressed; a snapshot of 32 MiB took between half and twice as long
    /// as without compression (two busy cores).
    #[must_use]
    pub fn compression(mut self, compression: Compression) -> Self {
        self.compression = compression;
        self
    }

    /// Sets the number of page bytes after which a snapshot writes a chunk of images.
    #[doc(hidden)]
    #[must_use]
    pub fn chunk_len(mut self, bytes: u64) -> Self {
        self.chunk_len = Some(bytes);
        self
    }

    /// Returns these options for an image file of about `len` bytes: [`ImageIo::Auto`] is replaced with its choice.
    pub(crate) fn for_file(self, len: u64) -> Self {
        let io = match self.io {
            ImageIo::Auto if len >= DIRECT_LEN_MIN => ImageIo::Direct,
            ImageIo::Auto => ImageIo::Buffered,
            io => io,
        };
        Self { io, ..self }
    }

    /// Returns whether a device copies images directly to the mapped memory of files, if the file system supports that.
    /// With compression the device does not, because only the host compresses.
    pub(crate) fn is_in_place(self) -> bool {
        self.io == ImageIo::Mapped && self.compression == Compression::Off
    }
}
