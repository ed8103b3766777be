//! Defences of caller-owned and reused memory: no page, stream or command list ever contains bytes of
//! another.

use super::{Defence, Test, check, defence, it, refusal, unit};

const BLOCKS: &str = "src/device/cuda/resource/caching/blocks.rs";
const WAITS: Test = unit("device::cuda::resource::caching::tests::block_is_reused_only_after_its_work_ends");
const CHANGES: &str = "src/applier/changes.rs";
const GAP: Test = unit("applier::changes::tests::change_stream_reports_gap_once_in_order");
const CACHING: &str = "src/device/cuda/resource/caching/mod.rs";
const RANGES: &str = "src/device/lent_ranges.rs";
const APPLIER: &str = "src/applier/worker.rs";
const COMMIT: &str = "src/write/commit/mod.rs";
const PREPARED: &str = "src/write/commit/prepared.rs";
const SOURCES: &str = "src/write/batch/sources.rs";
const FROM_SOURCE: Test = it("sources::page_from_source_is_logged_by_reference");
const REPLACED: Test = it("sources::replace_from_source_changes_only_bytes_and_length");
const OVERWRITTEN: Test = it("bulk::moved_and_overwritten_page_has_new_bytes");
const REFUSED: Test = it("sources::refused_source_batch_removes_its_images");

pub const LIST: &[Defence] = &[
    // The caching allocator.
    defence(
        "a cached block is reused only after its work",
        BLOCKS,
        "point.has_passed()",
        "point.has_passed().map(|_| true)",
        WAITS,
    ),
    defence(
        "a block used by two streams is reused by neither alone",
        CACHING,
        "first.filter(is_one)",
        "first.filter(|first| is_one(first) || true)",
        WAITS,
    ),
    defence(
        "the per-thread default stream is not treated as one stream",
        CACHING,
        "*first != PER_THREAD",
        "true",
        unit("device::cuda::resource::caching::tests::per_thread_stream_block_waits_for_event_on_any_thread"),
    ),
    defence(
        "a cached segment with a block in use is kept",
        BLOCKS,
        "block.len == **len && matches!(block.state, BlockState::Free)",
        "block.len == **len",
        WAITS,
    ),
    // Streams of changes.
    refusal("a change stream reports a gap first", CHANGES, "state.lagged.is_some()", GAP),
    defence(
        "the queue of a change stream is bounded",
        CHANGES,
        "state.count + batch.count() <= QUEUED_MAX",
        "true",
        GAP,
    ),
    // Pages in caller-owned memory.
    refusal(
        "memory that a caller uses is not lent",
        RANGES,
        "uses.callers.iter().any(|(_, used, _)| used.overlaps(&range))",
        unit("device::lent_ranges::tests::range_in_use_is_not_lent"),
    ),
    defence(
        "only the store writes to memory in which a page lives",
        RANGES,
        "by != CallerUse::Stream(Access::Read)",
        "false",
        unit("device::lent_ranges::tests::a_range_is_lent_once_and_its_neighbours_are_free"),
    ),
    check(
        "lent memory is lent again only after the page's last list",
        "src/memory/arena/lent.rs",
        "self.handles.lock()[&memory].retire_loan();",
        it("lent_pages::memory_is_lent_again_as_soon_as_a_delete_is_committed"),
    ),
    refusal(
        "a new page in caller-owned memory is zeroed",
        APPLIER,
        "new.is_lent()",
        it("lent_pages::lent_page_touches_no_adjacent_caller_byte"),
    ),
    refusal(
        "a recovered page of zeros in caller-owned memory is zeroed",
        "src/recovery/load.rs",
        "memories.is_lent(*page)?",
        it("page_memory::pages_recover_into_given_memory"),
    ),
    // Memory that is filled before its batch is logged.
    defence(
        "memory that was filled in advance is not zeroed",
        APPLIER,
        "!batch.is_filled(page, &new)",
        "true",
        FROM_SOURCE,
    ),
    defence(
        "memory that was filled in advance gets no old bytes",
        APPLIER,
        "self.replace(&mut batch.versions, page, new, is_filled)",
        "self.replace(&mut batch.versions, page, new, false)",
        REPLACED,
    ),
    defence(
        "memory filled from disk is not mistaken for a filled image",
        APPLIER,
        "filled.has_image(page, memory.span().memory)",
        "filled.has(page, memory.span().memory)",
        OVERWRITTEN,
    ),
    refusal(
        "no other operation of the batch changes a page from a source",
        SOURCES,
        "page_effects[&page].whole != Some(step)",
        REFUSED,
    ),
    refusal("no operation copies a page from a source", SOURCES, "copied.whole.contains(&page)", REFUSED),
    refusal(
        "a batch with its own images is logged by its committer",
        PREPARED,
        "self.files().iter().any(|file| file.is_any())",
        it("sources::source_images_are_kept_under_any_lock_holder"),
    ),
    check(
        "images of a logged batch are kept",
        PREPARED,
        "self.files().into_iter().for_each(|file| file.logged(known, log, point));",
        FROM_SOURCE,
    ),
    // Captures of pages on disk.
    defence(
        "a captured image is not used for a page in memory",
        "src/write/commit/capture/captured_images.rs",
        "!is_one(&at.op) || disk_ops.has(index)",
        "!is_one(&at.op) || disk_ops.has(index) || true",
        unit("write::commit::capture::captured_images::tests::images_are_used_only_for_pages_still_on_disk"),
    ),
    defence(
        "a captured image has the device's bytes",
        "src/memory/staging.rs",
        "sent.is_none_or(|sum| sum == crc32fast::hash(out))",
        "sent.is_none_or(|_| true)",
        it("faults::bit_flips::captured_image_rejects_bit_flips"),
    ),
    refusal(
        "a page is captured whole only if all of it was compared",
        "src/write/commit/capture/mod.rs",
        "looked_at != len",
        it("captures::only_declared_ranges_are_compared"),
    ),
    defence(
        "captured changes beyond the memory limit become an image",
        "src/write/commit/capture/captured_images.rs",
        "room.checked_sub(capture.pending)",
        "Some(room)",
        it("disk_captures::pages_with_too_many_changes_are_written_whole"),
    ),
    defence(
        "captures of a batch share the memory for their bitmaps",
        "src/write/commit/capture/mod.rs",
        "matches!(begun, Err(Error::OverBudget { .. })) && !staged.is_empty()",
        "false",
        it("captures::captures_of_batch_share_bitmap_memory"),
    ),
    // Working copies with digests.
    defence(
        "a kept digest is that of the bytes in the payload",
        "src/write/commit/capture/device_payload.rs",
        "push(&mut digested, target)?;",
        "push(&mut digested, *span)?;",
        it("digests::a_change_in_the_middle_of_a_capture_is_not_lost"),
    ),
    defence(
        "a kept digest is that of the bytes in the image",
        "src/write/commit/capture/digests.rs",
        "self.committer.digests(vec![target], key, vec![gather])?",
        "self.committer.digests(vec![part(live, &wave)], key, vec![gather])?",
        it("digests::a_change_in_the_middle_of_a_capture_is_not_lost"),
    ),
    defence(
        "kept digests belong to the images that the payload names",
        "src/write/commit/capture/captured_images.rs",
        "named.contains_key(&page.step)",
        "!named.contains_key(&page.step)",
        it("digests::capture_needs_memory_for_one_piece"),
    ),
    defence(
        "memory has no digests before its first capture",
        "src/write/commit/capture/mod.rs",
        "unknown_digests(len)?",
        "self.all_digests(std::iter::once(memory), key.unwrap_or(memory))?",
        it("digests::first_capture_of_stored_memory_logs_all_of_it"),
    ),
    defence(
        "a capture keeps the digests of the copy",
        PREPARED,
        "self.captures.belong_to(changes, &self.digests);",
        "self.captures.belong_to(changes, &CapturedDigests::new());",
        it("digests::digest_capture_logs_changed_chunks"),
    ),
    // Memory that the store hands to a caller.
    check(
        "a leased page is not released",
        "src/write/commit/draft.rs",
        "self.engine.leases.check_unleased(handover.page)?;",
        it("releases::leased_or_pinned_page_cannot_be_released"),
    ),
    defence(
        "a release is durable before memory is handed out",
        "src/store/kernels.rs",
        "log.wait_durable(point.lsn)",
        "Ok(())",
        it("releases::a_release_is_durable_when_it_returns"),
    ),
    // Callers' streams.
    refusal(
        "the store does not use memory while a guard is open",
        "src/device/bytes.rs",
        "is_excluded && (self.stream.is_none() || access == Access::Write)",
        it("stream_guards::store_does_not_use_bytes_while_guard_is_open"),
    ),
    check(
        "a stream waits for another stream's write",
        "src/device/stream_guard.rs",
        "streams.hold_stream(stream, &point)?;",
        it("stream_guards::streams_are_ordered_if_one_writes"),
    ),
    defence(
        "a guard for reading a page waits for earlier batches",
        "src/device/stream_guard.rs",
        "self.link().applied()?",
        "passed",
        it("stream_guards::page_guard_reads_after_earlier_batches_and_forbids_writes"),
    ),
    check(
        "memory is reused after the work of streams",
        "src/write/commit/capture/stage_memory.rs",
        "return self.after_streams(staged);",
        it("stream_guards::memory_is_released_after_stream_work_without_blocking_drop"),
    ),
    // Long payloads in ordinary memory.
    defence(
        "a long payload is built again if a page moved to memory",
        COMMIT,
        "matches!(draft.payload, GrownBytes::Plain(_)) && draft.disk_ops.leaves_bytes(&ops)",
        "false",
        it("long_payloads::a_page_moves_while_a_long_payload_is_made_for_it"),
    ),
    defence(
        "released memory is freed even by a list without commands",
        APPLIER,
        "gives_up || !self.list.is_empty()",
        "!self.list.is_empty() && (gives_up || true)",
        it("long_payloads::memory_released_by_long_payload_is_reusable"),
    ),
    // Files that a device copies to.
    defence(
        "bytes in a file are those that the device sent",
        "src/images/in_place.rs",
        "Err(target.transfer_corrupted())",
        "Ok(())",
        it("in_place::bit_flip_on_transfer_to_file_is_detected_before_use"),
    ),
    defence(
        "a file that reads differently is read once more",
        "src/images/in_place.rs",
        "is_as_sent()? || is_as_sent()?",
        "is_as_sent()?",
        it("in_place::bit_flip_on_transfer_from_file_is_reread"),
    ),
    refusal(
        "only files in memory are registered",
        "src/disk/dir_file.rs",
        "!is_in_memory(&self.file).map_err(|errno| failed(errno.into()))?",
        it("in_place::registration_is_skipped_if_host_needs_bytes"),
    ),
    refusal(
        "memory that the device keeps counts toward the budget",
        "src/memory/arena/mod.rs",
        "kept.iter().any(|(kept, _)| *kept == index)",
        unit("memory::arena::tests::only_memory_kept_by_device_stays_counted"),
    ),
    refusal(
        "registered files are released for pages",
        "src/memory/arena/mod.rs",
        "self.release_files(requested.saturating_sub(available))",
        it("in_place::registered_files_respect_budget_and_yield_to_pages"),
    ),
    check(
        "registered files count toward the budget",
        "src/memory/arena/files.rs",
        "account.claim(len)?;",
        it("in_place::registered_files_respect_budget_and_yield_to_pages"),
    ),
    check(
        "a file is unregistered before it is removed",
        "src/disk/image_spares.rs",
        "self.drop_kept_ready(number);",
        it("in_place::removed_file_is_released"),
    ),
    defence(
        "a file that a device writes is not truncated",
        "src/disk/growing/mod.rs",
        "!matches!(self.way, WriteWay::InPlace)",
        "true",
        unit("disk::growing::tests::a_file_that_a_device_writes_keeps_its_length"),
    ),
];
