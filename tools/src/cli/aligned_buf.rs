//! Memory that input and output past the page cache accepts.

use std::ops::{Deref, DerefMut};

/// Alignment that every medium accepts, of memory, offsets and lengths.
pub const ALIGN: usize = 4096;

/// Bytes that begin at a multiple of [`ALIGN`]; zeros at first.
pub struct Aligned {
    room: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    /// A buffer of `len` bytes.
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
