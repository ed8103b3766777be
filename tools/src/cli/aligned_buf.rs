//! Memory buffers that are aligned for direct I/O.

use std::ops::{Deref, DerefMut};

/// Alignment in bytes that direct I/O requires of memory, offsets and lengths. Every medium accepts this alignment.
pub const ALIGN: usize = 4096;

/// A byte buffer that starts at a multiple of [`ALIGN`] and initially contains zeros.
pub struct Aligned {
    room: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    /// Creates a buffer of `len` zero bytes.
    pub fn new(len: usize) -> Self {
        let room = vec![0; len + ALIGN];
        let start = room.as_ptr().align_offset(ALIGN);
        Self { room, start, len }
    }
}

impl Deref for Aligned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.room[self.start..self.start + self.len]
    }
}

impl DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.room[self.start..self.start + self.len]
    }
}
