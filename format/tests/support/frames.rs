//! Zstd frames written by hand (RFC 8878), so that no version of a compressor changes a pinned byte.

/// One frame with a block for each run: a byte, and how often it repeats. At most 255 bytes in all.
pub fn runs(runs: &[(u8, usize)]) -> Vec<u8> {
    let len: usize = runs.iter().map(|(_, count)| count).sum();
    // The magic; a descriptor that says: one segment, its length in one byte; the length.
    let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0x20, u8::try_from(len).expect("a short page")];
    for (index, (byte, count)) in runs.iter().enumerate() {
        let is_last = usize::from(index + 1 == runs.len());
        // Bit 0: the last block; bits 1 and 2: the kind, 1 for a run; above them its length.
        let head = is_last | 1 << 1 | count << 3;
        frame.extend_from_slice(&head.to_le_bytes()[..3]);
        frame.push(*byte);
    }
    frame
}
