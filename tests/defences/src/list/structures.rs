//! Defences of all structures: checksums, limits, and consistency of fields (I9).

use super::{Defence, GOLDEN, Test, check, defence, refusal, stores};

const FRAME: &str = "format/src/frame.rs";
const SEGMENT: &str = "format/src/segment.rs";
const STORE: &str = "format/src/store.rs";
const IMAGE_FILE: &str = "format/src/image/file.rs";
const CHUNK: &str = "format/src/image/chunk.rs";
const IMAGE_REF: &str = "format/src/image/image_ref.rs";
const CODEC: &str = "format/src/image/codec.rs";
const OVERLAY: &str = "format/src/image/overlay/mod.rs";
const DECODE: &str = "format/src/manifest/decode.rs";
const CHECK: &str = "format/src/manifest/check.rs";
const ENVELOPE: &str = "format/src/value/envelope.rs";
const OPS: &str = "format/src/op/reader.rs";

/// The test of overlays, and of all fields of an entry that describe an overlay.
const OF_OVERLAYS: Test = Test {
    binary: "remanent_format",
    name: "image::overlay::tests::overlay_that_contradicts_its_entry_is_rejected",
};

pub const LIST: &[Defence] = &[
    // Frames: their headers.
    refusal("frame magic", FRAME, "raw.magic != FRAME_MAGIC", GOLDEN),
    check(
        "frame header checksum (I3)",
        FRAME,
        r#"check_crc("frame header", raw.header_crc, &bytes[..76])?;"#,
        GOLDEN,
    ),
    check(
        "frame reserved bytes",
        FRAME,
        r#"check_zero("reserved frame bytes", raw.reserved.into())?;"#,
        GOLDEN,
    ),
    check(
        "frame flags",
        FRAME,
        r#"check_limit("frame flags", raw.flags.into(), FLAG_GROUP_START.into())?;"#,
        GOLDEN,
    ),
    check(
        "frame payload length (I9)",
        FRAME,
        r#"check_limit("payload length", raw.payload_len.into(), FRAME_PAYLOAD_LEN_MAX)?;"#,
        GOLDEN,
    ),
    check("frame lsn limit", FRAME, r#"check_limit("frame's lsn", raw.lsn.0, NUMBER_MAX)?;"#, GOLDEN),
    // Frames: the order of the log (I3).
    refusal("frame store (I3)", FRAME, "header.store != store", GOLDEN),
    defence(
        "frame segment (I3)",
        FRAME,
        r#"("frame's segment", header.segment, segment)"#,
        r#"("off", 0, 0)"#,
        GOLDEN,
    ),
    defence(
        "frame offset (I3)",
        FRAME,
        r#"("frame's offset", header.offset, offset)"#,
        r#"("off", 0, 0)"#,
        GOLDEN,
    ),
    defence(
        "frame incarnation (I3)",
        FRAME,
        r#"("frame's incarnation", header.incarnation.number.into(), before.incarnation.number.into())"#,
        r#"("off", 0, 0)"#,
        GOLDEN,
    ),
    defence(
        "frame incarnation tag (I3)",
        FRAME,
        r#"("frame's incarnation tag", header.incarnation.random.into(), before.incarnation.random.into())"#,
        r#"("off", 0, 0)"#,
        GOLDEN,
    ),
    defence("frame lsn (I3)", FRAME, r#"("frame's lsn", header.lsn.0, lsn.0)"#, r#"("off", 0, 0)"#, GOLDEN),
    defence(
        "chain hash (I3)",
        FRAME,
        r#"("chain hash", header.chain_prev.into(), before.chain.into())"#,
        r#"("off", 0, 0)"#,
        GOLDEN,
    ),
    check(
        "mark above its frame (I4)",
        FRAME,
        r#"check_limit("durable mark", header.durable.0, lsn.0)?;"#,
        GOLDEN,
    ),
    defence(
        "payload checksum (I3)",
        FRAME,
        r#"check_crc("payload", header.payload_crc, payload)"#,
        "Ok(())",
        GOLDEN,
    ),
    refusal("seal length", FRAME, "!payload.len().is_multiple_of(VerifiedSnapshotRaw::LEN)", GOLDEN),
    check(
        "unknown flags in a seal",
        FRAME,
        r#"check_zero("unknown flags of a seal's entry", (raw.flags & !LOG_KEPT).into())?;"#,
        GOLDEN,
    ),
    // Segments.
    refusal("segment magic", SEGMENT, "raw.magic != SEGMENT_MAGIC", GOLDEN),
    check(
        "segment header checksum",
        SEGMENT,
        r#"check_crc("segment header", raw.header_crc, &bytes[..124])?;"#,
        GOLDEN,
    ),
    refusal("segment version", SEGMENT, "raw.version != FORMAT_VERSION", GOLDEN),
    check(
        "segment flags",
        SEGMENT,
        r#"check_limit("segment flags", u64::from(raw.flags), u64::from(FLAG_OPENING))?;"#,
        GOLDEN,
    ),
    refusal(
        "segment length",
        SEGMENT,
        "raw.segment_len < SEGMENT_LEN_MIN || !raw.segment_len.is_multiple_of(GROUP_ALIGN)",
        GOLDEN,
    ),
    refusal(
        "opening without incarnation (I5)",
        SEGMENT,
        "is_opening == (raw.incarnation.number == 0)",
        GOLDEN,
    ),
    refusal(
        "opening that accepts fewer batches than were proven (I5)",
        SEGMENT,
        "is_opening && raw.accepted < raw.predecessor.lsn",
        GOLDEN,
    ),
    refusal(
        "predecessor whose incarnation number is not lower (I5)",
        SEGMENT,
        "is_opening && raw.predecessor.incarnation.number >= raw.incarnation.number",
        GOLDEN,
    ),
    refusal("reserved bytes of a segment header", SEGMENT, "header.encode() != *bytes", GOLDEN),
    check(
        "segment number",
        SEGMENT,
        r#"check_equal("segment's number", header.segment, number)?;"#,
        stores("log_end_decisions_match_table"),
    ),
    check(
        "segment file length",
        SEGMENT,
        r#"check_equal("segment's length", header.segment_len, file_len)?;"#,
        stores("log_end_decisions_match_table"),
    ),
    defence(
        "segment store",
        SEGMENT,
        "header.store == store",
        "true",
        stores("log_end_decisions_match_table"),
    ),
    // STORE.
    refusal("STORE magic", STORE, "raw.magic != STORE_MAGIC", GOLDEN),
    check(
        "STORE header checksum",
        STORE,
        r#"check_crc("STORE header", raw.header_crc, &header[..60])?;"#,
        GOLDEN,
    ),
    refusal("STORE version and features", STORE, "raw.version > FORMAT_VERSION || unknown != 0", GOLDEN),
    check("STORE reserved bytes", STORE, r#"check_zeros("reserved STORE bytes", &raw.reserved)?;"#, GOLDEN),
    check(
        "STORE record length (I9)",
        STORE,
        r#"check_limit("STORE record length", raw.record_len.into(), STORE_RECORD_LEN_MAX as u64)?;"#,
        GOLDEN,
    ),
    check(
        "STORE length",
        STORE,
        r#"check_equal("STORE length", bytes.len() as u64, (StoreHeaderRaw::LEN + record.len()) as u64)?;"#,
        GOLDEN,
    ),
    check("STORE record checksum", STORE, r#"check_crc("STORE record", raw.record_crc, record)?;"#, GOLDEN),
    // Image files and chunks.
    refusal("image file magic", IMAGE_FILE, "raw.magic != IMAGE_FILE_MAGIC", GOLDEN),
    check(
        "image file header checksum",
        IMAGE_FILE,
        r#"check_crc("image file header", raw.header_crc, &bytes[..60])?;"#,
        GOLDEN,
    ),
    refusal("image file version", IMAGE_FILE, "raw.version != FORMAT_VERSION", GOLDEN),
    refusal("chunk magic", CHUNK, "raw.magic != CHUNK_MAGIC", GOLDEN),
    check(
        "chunk header checksum",
        CHUNK,
        r#"check_crc("chunk header", raw.header_crc, &bytes[..60])?;"#,
        GOLDEN,
    ),
    check(
        "chunk table length",
        CHUNK,
        r#"check_equal("table length", raw.table_len.into(), table_len)?;"#,
        GOLDEN,
    ),
    refusal("chunk store", CHUNK, "self.store != store", GOLDEN),
    check("chunk file", CHUNK, r#"check_equal("chunk's file", self.file, file)?;"#, GOLDEN),
    defence("chunk offset", CHUNK, r#"check_equal("chunk's offset", self.offset, offset)"#, "Ok(())", GOLDEN),
    check("image count", CHUNK, r#"check_limit("image count", count, CHUNK_IMAGES_MAX.into())?;"#, GOLDEN),
    check(
        "image offset in its chunk",
        CHUNK,
        r#"check_equal("image offset", header.image.offset, at)?;"#,
        GOLDEN,
    ),
    check(
        "chunk length",
        CHUNK,
        r#"check_equal("chunk length", self.chunk_len, align_up(at - self.offset, GROUP_ALIGN))?;"#,
        GOLDEN,
    ),
    refusal(
        "image with an Lsn but without page or epoch",
        CHUNK,
        "raw.lsn.0 != 0 && (raw.page.0 == 0 || raw.epoch.0 == 0)",
        GOLDEN,
    ),
    // Overlays.
    refusal("overlay magic", OVERLAY, "raw.magic != OVERLAY_MAGIC", GOLDEN),
    check(
        "reserved bytes of an overlay",
        OVERLAY,
        r#"check_zeros("reserved overlay bytes", &raw.reserved)?;"#,
        GOLDEN,
    ),
    refusal(
        "pieces of an overlay ascend, and are not empty",
        OVERLAY,
        "piece.start < end || piece.is_empty()",
        GOLDEN,
    ),
    check(
        "pieces of an overlay are within the page (I9)",
        OVERLAY,
        r#"check_limit("end of an overlay's piece", piece.end, len)?;"#,
        GOLDEN,
    ),
    check("the base of an overlay is an image of the same page", OVERLAY, "base.check(len)?;", GOLDEN),
    check(
        "an overlay has the base that the entry names",
        OVERLAY,
        r#"check_equal("image file of an overlay's base", self.base.file, base.file)?;"#,
        OF_OVERLAYS,
    ),
    check(
        "an overlay is shorter than its page",
        IMAGE_REF,
        r#"check_limit("stored length of an overlay", self.stored_len, len - 1)?;"#,
        GOLDEN,
    ),
    defence("the base of an overlay has a file and a length", IMAGE_REF, "base.check()", "Ok(())", GOLDEN),
    check(
        "no frame names an overlay",
        "format/src/op/writer.rs",
        "Codec::from_raw(image.codec.to_raw())?;",
        OF_OVERLAYS,
    ),
    check(
        "stored length of a raw image",
        IMAGE_REF,
        r#"check_equal("stored length of a raw image", self.stored_len, len)?;"#,
        GOLDEN,
    ),
    check(
        "stored length of a compressed image",
        IMAGE_REF,
        r#"check_limit("stored length of a compressed image", self.stored_len, len - 1)?;"#,
        GOLDEN,
    ),
    defence(
        "image payload checksum",
        IMAGE_REF,
        r#"check_crc("image", self.stored_crc, stored)"#,
        "Ok(())",
        GOLDEN,
    ),
    check(
        "decompressed page checksum",
        IMAGE_REF,
        r#"check_crc("page", self.raw_crc, &bytes)?;"#,
        stores("repository_inputs_pass_every_fuzz_target"),
    ),
    defence("decompressed length", CODEC, "total > len", "false", GOLDEN),
    // Manifests.
    check(
        "manifest header checksum",
        DECODE,
        r#"check_crc("manifest header", raw.header_crc, &header[..252])?;"#,
        GOLDEN,
    ),
    check("manifest body checksum", DECODE, r#"check_crc("manifest body", raw.body_crc, body)?;"#, GOLDEN),
    check(
        "manifest body length (I9)",
        DECODE,
        r#"check_limit("manifest body length", raw.body_len, MANIFEST_BODY_LEN_MAX)?;"#,
        GOLDEN,
    ),
    check(
        "manifest entry count (I9)",
        DECODE,
        r#"check_limit("entry count", raw.entry_count, fits(ManifestEntryRaw::LEN))?;"#,
        GOLDEN,
    ),
    check(
        "manifest name length",
        DECODE,
        r#"check_limit("snapshot name length", raw.name_len.into(), SNAPSHOT_NAME_LEN_MAX as u64)?;"#,
        GOLDEN,
    ),
    check(
        "manifest previous link of a base",
        DECODE,
        r#"check_zero("previous link of a base or table", raw.previous.0)?;"#,
        GOLDEN,
    ),
    check(
        "manifest number of the previous link",
        CHECK,
        r#"check_limit("previous link", previous.0, self.snapshot.0.saturating_sub(1))?;"#,
        GOLDEN,
    ),
    check(
        "manifest redo after its end",
        CHECK,
        r#"check_limit("redo lsn", self.redo.lsn.0, self.end.0)?;"#,
        GOLDEN,
    ),
    check("manifest pages ascend", CHECK, "self.check_order(range.clone())?;", GOLDEN),
    check(
        "manifest highest epoch",
        CHECK,
        r#"check_limit("page's epoch", entry.epoch.0, self.epoch_high.0)?;"#,
        GOLDEN,
    ),
    check(
        "manifest next page",
        CHECK,
        r#"check_limit("page id", page.0, self.next_page.saturating_sub(1))?;"#,
        GOLDEN,
    ),
    defence(
        "manifest next file",
        CHECK,
        r#"check_limit("image file", file, self.next_file.saturating_sub(1))"#,
        "Ok(())",
        GOLDEN,
    ),
    // Metadata, and the operations of a batch.
    check(
        "metadata length (I9)",
        ENVELOPE,
        r#"check_limit("metadata length", u64::from(len), limit.min(ROOT_LEN_MAX) as u64)?;"#,
        GOLDEN,
    ),
    check("metadata checksum", ENVELOPE, r#"check_crc("metadata", crc, content)?;"#, GOLDEN),
    refusal("bytes after the encoded metadata", ENVELOPE, "used != content.len()", GOLDEN),
    check(
        "operation count (I9)",
        OPS,
        r#"check_limit("operation count", head.op_count.into(), (payload.len() / OP_HEADER_LEN) as u64)?;"#,
        GOLDEN,
    ),
    check(
        "payload reserved bytes",
        OPS,
        r#"check_zero("reserved payload bytes", u64::from(head.reserved) | head.reserved_2)?;"#,
        GOLDEN,
    ),
    check(
        "image reserved bytes of an operation",
        OPS,
        r#"check_zeros("reserved image bytes", &raw.reserved)?;"#,
        GOLDEN,
    ),
    check("index padding", OPS, r#"check_zeros("index padding", &body[indices_len..values_at])?;"#, GOLDEN),
    // Tables of restores.
    check(
        "a table belongs to its restore",
        CHECK,
        r#"check_equal("end of the restored table", self.end.0, lsn.0)?;"#,
        stores("statements::mismatched_restore_table_is_refused"),
    ),
];
