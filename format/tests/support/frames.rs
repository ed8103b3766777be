//! Handwritten zstd frames (RFC 8878), so that no version of a compressor changes a pinned byte.

/// Encodes one frame with a block for each run, given as a byte and its count. At most 255 bytes in total.
pub fn runs(runs: &[(u8, usize)]) -> Vec<u8> {
    let len: usize = runs.iter().map(|(_, count)| count).sum();
    // The magic number; a descriptor for a single segment with a one-byte length; the length.
    let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0x20, u8::try_from(len).expect("a short page")];
    for (index, (byte, count)) in runs.iter().enumerate() {
        let is_last = usize::from(index + 1 == runs.len());
        // Bit 0: last block. Bits 1 and 2: kind, 1 for a run. Higher bits: length.
        let head = is_last | 1 << 1 | count << 3;
        frame.extend_from_slice(&head.to_le_bytes()[..3]);
        frame.push(*byte);
    }
    frame
}
