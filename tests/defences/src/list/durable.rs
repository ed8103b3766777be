//! Defences that make batches and snapshots durable: each sync, the durable marks, and the files that are
//! kept until their replacements are durable. `tests/it/crash/syncs/mod.rs` lists which sync of which
//! workload matters. Here, each sync is removed wherever its line of code runs.

use super::{Defence, Test, check, defence, it, refusal, unit};

const WRITER: &str = "src/log/writer.rs";
const WAITS: &str = "src/log/waits.rs";
const SYNC_GUARD: &str = "src/log/sync_guard.rs";
const KEEPER: &str = "src/log/threads.rs";
const STATE: &str = "src/log/state.rs";
const SEGMENTS: &str = "src/log/segments/mod.rs";
const CATALOG: &str = "src/catalog/mod.rs";
const CLOSING: &str = "src/log/segments/closing.rs";
const SEGMENT_FILE: &str = "src/log/segments/file.rs";
const OPENING_SEGMENT: &str = "src/log/segments/opening.rs";
const PUBLISH: &str = "src/catalog/publish.rs";
const IMAGES: &str = "src/images/mod.rs";
const GROWING: &str = "src/disk/growing/mod.rs";
const IMAGE_SPARES: &str = "src/disk/image_spares.rs";
const SIDE_BY_SIDE: &str = "src/images/writers.rs";
const PUBLICATION: &str = "src/snapshot/publication.rs";
const VERIFY: &str = "src/snapshot/verify.rs";
const RETAIN: &str = "src/snapshot/retain.rs";
const READBACK: &str = "src/applier/readback.rs";
const COPIER: &str = "src/history/copier.rs";
const IMAGE_LOADER: &str = "src/recovery/image_loader.rs";
const DEVICE_PAYLOAD: &str = "src/write/commit/capture/device_payload.rs";
const PROVISIONING: &str = "src/write/commit/provisioning.rs";
const IN_FLIGHT: &str = "src/applier/in_flight.rs";
const DELTAS: &str = "src/recovery/deltas.rs";
const LOAD: &str = "src/recovery/load.rs";
const COMMITS: Test = it("crash::commits::durable_commits_survive");
const ROLLS: Test = it("crash::commits::segment_changes_survive");
const OF_COMMITS: Test = it("crash::syncs::each_sync_of_commits_matters");
const OF_OPENINGS: Test = it("crash::syncs::each_sync_of_creations_and_openings_matters");
const OF_SNAPSHOTS: Test = it("crash::syncs::each_sync_of_snapshots_and_restores_matters");
const OF_IMAGE_WAYS: Test = it("image_ways::all_image_io_modes_write_the_same_files");
const RECYCLED: Test = it("crash::snapshots::replaced_snapshot_files_are_recycled");

const STAGING: &str = "src/memory/staging.rs";
const STORE_OPEN: &str = "src/store/open.rs";
const DISK_PAGE: &str = "src/images/disk_pages/page.rs";
const DISK_MOVES: &str = "src/write/commit/disk_moves.rs";
const DRAFT: &str = "src/write/commit/draft.rs";
const OF_DISK_PAGES: Test = unit("images::disk_pages::tests::page_equals_replayed_operations");

pub const LIST: &[Defence] = &[
    // Space that a close frees.
    defence(
        "a shortened segment is read back past the cache before it replaces the longer one",
        CLOSING,
        "target.read_bypassing_cache(at, piece)?;",
        "piece.copy_from_slice(expected);",
        it("footprints::ineffective_sync_at_close_loses_nothing"),
    ),
    defence(
        "a segment with a hole does not become a spare",
        SEGMENTS,
        "file.is_without_holes()?",
        "true",
        it("footprints::segment_with_hole_is_not_reused"),
    ),
    defence(
        "a close keeps the frames that a replay needs",
        STATE,
        "from.segment == number",
        "true",
        it("footprints::close_keeps_frames_of_kept_snapshots"),
    ),
    defence(
        "a close keeps log that retention keeps although no snapshot needs it",
        CATALOG,
        "redo.lsn == floor",
        "true",
        it("follow::ends::close_keeps_log_after_released_name"),
    ),
    // Pages on disk.
    defence(
        "an image of an older copy drops no block that a newer copy gave up",
        DISK_PAGE,
        "now.in_image > then.writes",
        "false",
        OF_DISK_PAGES,
    ),
    defence(
        "a page that was resized since takes no image of an earlier copy",
        DISK_PAGE,
        "now.number != then.number",
        "false",
        OF_DISK_PAGES,
    ),
    check(
        "what lay after a page's end does not come back",
        DISK_PAGE,
        "Arc::make_mut(block).forget(within..BLOCK_LEN);",
        OF_DISK_PAGES,
    ),
    defence(
        "a snapshot names no image of a page that the batch which wrote it changed afterwards",
        DISK_MOVES,
        "(!is_changed(info.page)).then_some((info.page, info.len))",
        "Some((info.page, info.len))",
        it("pages_on_disk::pages_round_trip_through_disk"),
    ),
    defence(
        "a page goes to disk by a snapshot's image only if the medium has that as it should be",
        DISK_MOVES,
        "damaged.contains(&(request.file, request.offset))",
        "false",
        it("pages_on_disk::image_is_verified_before_memory_is_freed"),
    ),
    defence(
        "a page with writes over its image does not come from disk by its image alone",
        DISK_PAGE,
        "self.blocks.is_empty()",
        "true",
        it("pages_on_disk::many_pages_move_at_once"),
    ),
    // Overlays (I7, I8).
    defence(
        "the file of an overlay's base is kept",
        "format/src/image/image_ref.rs",
        "Some((base.file, base.stored_len))",
        "None",
        it("overlays::overlay_base_is_kept_while_needed"),
    ),
    check(
        "a page of two files that are emptied is gathered once",
        "src/catalog/classify.rs",
        "                mentioned = sorted.mentioned()?;",
        it("overlays::page_in_two_wasteful_files_is_listed_once"),
    ),
    defence(
        "no overlay is laid over a base that is known to be damaged",
        "src/catalog/known_images.rs",
        "image.files().skip(1).any(|(file, _)| of_base(file))",
        "false",
        unit("catalog::known_images::tests::damaged_base_invalidates_its_overlays"),
    ),
    defence(
        "an overlay lies over an image that was read back",
        "src/catalog/known_images.rs",
        "(is_proven || named == *image)",
        "true",
        it("overlays::unverified_image_is_no_base"),
    ),
    defence(
        "an overlay keeps no file that is to be emptied",
        "src/snapshot/overlays.rs",
        "!self.wasteful.contains(&file)",
        "true",
        it("overlays::overlay_does_not_pin_wasteful_file"),
    ),
    defence(
        "an overlay has the pieces of the one before it",
        "src/images/disk_pages/overlay.rs",
        "proven.overlay().map_or(&[][..], Overlay::pieces)",
        "&[]",
        unit("images::disk_pages::tests::page_equals_replayed_operations"),
    ),
    defence(
        "a page that has another length than its image is written whole",
        DISK_PAGE,
        "self.image_len == self.len && image.page_len() == self.len",
        "true",
        unit("images::disk_pages::tests::overlay_contains_changes_since_full_image"),
    ),
    defence(
        "an overlay and its base are read as one",
        "src/images/read.rs",
        "self.len > RUN_BYTES || !self.image.is_whole()",
        "self.len > RUN_BYTES",
        it("overlays::pages_with_overlays_move_to_any_place"),
    ),
    defence(
        "a committer does not wait for a snapshot that cannot be taken",
        "src/images/disk_pages/mod.rs",
        "self.unreadable.lock().clone()",
        "None::<Error>",
        unit("images::disk_pages::tests::no_wait_for_impossible_snapshot"),
    ),
    check(
        "a page that cannot be read ends its snapshot, and not the store",
        "src/snapshot/mod.rs",
        "*is_unreadable = matches!(gathered, Err(Error::Damaged(_)));",
        it("overlays::damage_to_an_overlay_and_to_its_base_is_found"),
    ),
    defence(
        "memories of one call lie apart",
        "src/device/bytes.rs",
        "pair[0].overlaps(&pair[1])",
        "false",
        it("device_reads::unreadable_source_or_target_is_refused"),
    ),
    refusal(
        "a page of a view fits the memory that it is loaded to",
        COPIER,
        "page_len != len",
        it("device_copies::invalid_copy_target_is_refused"),
    ),
    refusal(
        "a page of a view is loaded to one memory",
        COPIER,
        "pair[0].0 == pair[1].0",
        it("device_copies::invalid_copy_target_is_refused"),
    ),
    check(
        "what waits for the applier counts as pending on disk pages",
        "src/images/disk_pages/mod.rs",
        "*claimed += bytes;",
        unit("images::disk_pages::tests::claim_counts_until_released"),
    ),
    defence(
        "a draft is stale if a page went to disk or came from there meanwhile",
        DRAFT,
        "!self.disk_ops(ops, Some(table))?.is_same(&draft.disk_ops)",
        "false",
        it("pages_on_disk::moves_writes_and_reads_run_concurrently"),
    ),
    check(
        "an open says that there are pages on disk",
        STORE_OPEN,
        "disk_pages.note(submitted.lens().map(|(_, place, _)| place));",
        it("pages_on_disk::a_store_holds_more_pages_than_memory"),
    ),
    check(
        "an open proves images of pages on disk that nothing has proven",
        LOAD,
        "prove(sealed, wanted)?;",
        it("pages_on_disk::open_verifies_unverified_images"),
    ),
    // The bus (I12).
    check(
        "long writes are summed where they arrive",
        PROVISIONING,
        "provision.sums = ArrivalSums::of(taken(), staging)?;",
        it("faults::bit_flips::long_write_rejects_bit_flips"),
    ),
    defence(
        "nothing is told of long writes before their sums are there",
        IN_FLIGHT,
        "unproven.map_or(u64::MAX, |list| list.pending.fence().value)",
        "u64::MAX",
        it("faults::bit_flips::long_write_rejects_bit_flips"),
    ),
    defence(
        "a replay's long writes are summed where they arrive",
        DELTAS,
        "self.crosses_bus",
        "false",
        it("faults::bit_flips::replay_of_long_writes_rejects_bit_flips"),
    ),
    defence(
        "a long write is summed before it is written over",
        "src/applier/commands.rs",
        "self.unsummed.any_in(target)",
        "false",
        it("faults::bit_flips::long_write_rejects_bit_flips"),
    ),
    defence(
        "a snapshot's bytes are summed where they lie",
        READBACK,
        "device.crosses_bus()",
        "false",
        it("faults::bit_flips::snapshot_rejects_bit_flips"),
    ),
    defence(
        "images are summed where they arrive",
        IMAGE_LOADER,
        "if device.crosses_bus() { collected(parts().copied())? } else { Vec::new() }",
        "Vec::new()",
        it("faults::bit_flips::open_rejects_bit_flips"),
    ),
    defence(
        "the parts of a long image prove it together",
        IMAGE_LOADER,
        "part.target.len < part.of.len",
        "false",
        it("faults::bit_flips::on_demand_load_rejects_bit_flips"),
    ),
    defence(
        "a payload that was born on the device is summed where it arrives",
        DEVICE_PAYLOAD,
        "of_device.is_none_or(|sums| arrived.iter().copied().eq(sums_in(sums)))",
        "of_device.is_none_or(|sums| arrived.len() == sums_in(sums).count())",
        it("faults::bit_flips::log_rejects_bit_flips"),
    ),
    defence(
        "a page that is put together on the host is summed where it arrives",
        STAGING,
        "returned.get(1).is_none_or(as_sent)",
        "returned.get(1).is_none_or(as_sent) || true",
        it("faults::bit_flips::open_rejects_bit_flips"),
    ),
    // Image files that are reused (I13).
    refusal(
        "a file that has a second name is not written over",
        IMAGE_SPARES,
        "!file.has_one_name()?",
        it("image_spares::hard_linked_spare_is_not_reused"),
    ),
    refusal(
        "a spare with holes is not written over",
        IMAGE_SPARES,
        "!file.is_without_holes()?",
        it("image_spares::sparse_spare_is_not_reused"),
    ),
    defence(
        "an ancestor's file is not written over",
        IMAGE_SPARES,
        "header.store == self.store",
        "header.store == self.store || true",
        it("image_spares::file_shared_with_fork_is_not_reused"),
    ),
    defence(
        "spares and images take at most twice what is named",
        IMAGE_SPARES,
        "bytes + spare.len <= bytes_max",
        "bytes + spare.len <= bytes_max + (1 << 40)",
        it("image_spares::spares_use_at_most_image_space"),
    ),
    defence(
        "spare image files give way to the log",
        SEGMENT_FILE,
        "self.image_spares.retry_without_spares(|| self.build_once(number, len, opening, content))",
        "self.build_once(number, len, opening, content)",
        it("image_spares::full_disk_releases_spares"),
    ),
    check(
        "the new names of spares are durable before their chunks",
        IMAGE_SPARES,
        "self.disk.sync_folder(Folder::Pages).inspect_err(|_| self.forget(reused.keys()))?;",
        it("image_spares::spares_hold_no_chunk_with_future_number"),
    ),
    defence(
        "an image that was written over is not damage",
        "src/follower/batch.rs",
        "self.source.is_gone(damage.file)",
        "false",
        it("image_spares::follower_of_overwritten_image_is_overtaken"),
    ),
    // The log.
    check("groups are synced", SYNC_GUARD, "range.window.sync(range.from, range.to - range.from)?;", COMMITS),
    defence(
        "a failed sync is the end",
        SYNC_GUARD,
        "self.make_durable().map_err(|error| self.log.fail(error))",
        "self.make_durable()",
        it("faults::disk_errors::disk_error_stops_store_without_loss"),
    ),
    // A stale mark has no effect until bytes are damaged. The damage then looks like a torn tail.
    defence(
        "frames carry the mark (I4)",
        WRITER,
        "header.encode()",
        "FrameHeader { durable: Lsn(0), ..header }.encode()",
        it("durable_marks::every_frame_carries_the_newest_durable_batch"),
    ),
    defence(
        "the mark of batches advances (I4)",
        WRITER,
        "header.encode()",
        "FrameHeader { durable: if kind == FrameKind::Seal { header.durable } else { Lsn(0) }, ..header }.encode()",
        it("durable_marks::every_frame_carries_the_newest_durable_batch"),
    ),
    refusal(
        "a busy period ends with a seal (I4)",
        KEEPER,
        "!state.sealed || (state.must_stop && state.is_seal_missed)",
        it("durable_marks::closed_log_ends_with_covering_seal"),
    ),
    defence(
        "two segments are ahead of a roll (I8)",
        STATE,
        "!long_enough || self.empty.len() < EMPTY_COUNT",
        "!long_enough",
        ROLLS,
    ),
    // Segments.
    defence(
        "segments are synced before they have a name",
        SEGMENT_FILE,
        "file.sync()?;\n            Ok(file)",
        "Ok(file)",
        OF_OPENINGS,
    ),
    defence(
        "spares with holes are not used again",
        SEGMENTS,
        "is_usable && spare.is_without_holes()?",
        "is_usable",
        it("store::sparse_segments_are_not_reused"),
    ),
    defence(
        "a spare that becomes an opening is synced before it has a name",
        OPENING_SEGMENT,
        "file.sync().map(|()| file)",
        "Ok(file)",
        OF_OPENINGS,
    ),
    defence(
        "headers of spares are synced before they have a name",
        SEGMENTS,
        "file.write_at(0, &header_block(&self.header(number, len, None)))?;\n        file.sync()?;",
        "file.write_at(0, &header_block(&self.header(number, len, None)))?;",
        OF_COMMITS,
    ),
    defence(
        "names of segments are synced",
        SEGMENT_FILE,
        "self.rename(source, FileName::Segment(number))?;\n        self.disk.sync_folder(Folder::Log)",
        "self.rename(source, FileName::Segment(number))",
        OF_COMMITS,
    ),
    // Small files and images.
    defence("small files are synced before they have a name", PUBLISH, "open.sync()", "Ok(())", OF_SNAPSHOTS),
    defence(
        "names of small files are synced",
        PUBLISH,
        "disk.sync_folder(file.folder())",
        "Ok(())",
        OF_SNAPSHOTS,
    ),
    defence("images are synced (I7)", GROWING, "self.file.sync()", "Ok(())", OF_SNAPSHOTS),
    defence(
        "the space of images is there before they are mapped",
        "src/disk/growing/parts.rs",
        "self.space.reach(end)?",
        "end",
        OF_IMAGE_WAYS,
    ),
    defence("an image file is cut only after it is unmapped", GROWING, "parts.unmap()", "()", OF_IMAGE_WAYS),
    refusal(
        "no part of a file is mapped past its end",
        "src/disk/mapped.rs",
        "range.end > file.metadata()?.len()",
        unit("disk::mapped::tests::put_goes_to_mapped_offset_never_past_file_end"),
    ),
    defence(
        "a store into a mapping without memory is an error, not a signal",
        "src/disk/mapped.rs",
        "populated.map_err(|source| Error::io(IoAction::Map, self.0.name, Some(offset), source))?",
        "drop(populated)",
        unit("disk::mapped::tests::write_to_truncated_mapping_is_an_error"),
    ),
    refusal(
        "a sync of images that lacks space made before stops the store",
        IMAGES,
        "!self.growing.gets_space_at_sync()",
        it("faults::disk_full::enospc_at_image_sync_stops_store_unless_buffered"),
    ),
    defence(
        "images on a nearly full disk take no more space than they need",
        GROWING,
        "self.file.reserve(made.end, needed)",
        "Err(error)",
        unit("disk::growing::tests::disk_is_full_exactly_when_bytes_do_not_fit"),
    ),
    defence(
        "a block of a long image keeps what was written of it before",
        "src/disk/growing/blocks.rs",
        "self.file.read_at(block, &mut old)?;",
        "",
        unit("disk::growing::tests::partial_block_rewrite_keeps_other_bytes"),
    ),
    check(
        "a long page's bytes are kept aside until they are gathered",
        "src/applier/worker.rs",
        "gather.before_write(range, memory, &self.arena, &mut self.list);",
        it("concurrent::long::long_page_gather_is_point_in_time_under_writes"),
    ),
    defence(
        "all image files of a snapshot are synced (I7)",
        SIDE_BY_SIDE,
        "parallel::map_indexed(count, count, || (), sync)",
        "parallel::map_indexed(count, 1, || (), sync)",
        it("crash::snapshots::snapshots_of_several_files_survive"),
    ),
    defence(
        "names of a snapshot's image files are synced (I7)",
        SIDE_BY_SIDE,
        "self.disk.sync_folder(Folder::Pages)",
        "Ok(())",
        OF_SNAPSHOTS,
    ),
    defence(
        "names of image files are synced (I7)",
        IMAGES,
        "self.disk.sync_folder(Folder::Pages)",
        "Ok(())",
        OF_SNAPSHOTS,
    ),
    // Snapshots, and the files that snapshots release.
    check(
        "the log is durable up to a snapshot's end (I7)",
        PUBLICATION,
        "self.engine.log.wait_durable(manifest.end)?;",
        it("crash::snapshots::snapshots_during_commits_survive"),
    ),
    defence(
        "images are read back past the cache (I7)",
        VERIFY,
        "self.images.iter().try_for_each(ImageWriters::verify)",
        "Result::<()>::Ok(())",
        OF_SNAPSHOTS,
    ),
    defence(
        "manifests are read back past the cache (I7)",
        PUBLISH,
        "check_published(&self.disk, self.file, &self.encoded.bytes(), self.threads)",
        "Ok(())",
        OF_SNAPSHOTS,
    ),
    refusal(
        "a record is durable before anything goes (I7)",
        WAITS,
        "state.seals_durable <= seals",
        it("snapshots::retention::kill_before_snapshot_record_keeps_other_versions"),
    ),
    defence(
        "snapshots with names are recorded before another is published (I7)",
        "src/catalog/mod.rs",
        "kept.is_recorded || kept.info.name.is_none()",
        "true",
        it("crash::snapshots::names_of_published_snapshots_survive"),
    ),
    defence(
        "images of batches are read back after a snapshot names them (I7)",
        "src/snapshot/verify.rs",
        "damaged(&DiskSource::bypassing_cache(disk.clone()), &mut self.of_batches, THREADS_MAX)?",
        "Vec::<(ImageRef, Damage)>::new()",
        it("snapshots::deferred::lost_batch_image_is_gathered_again_from_memory"),
    ),
    defence(
        "an open verifies images that only a batch without a mark names (I6)",
        "src/recovery/page_sources.rs",
        "was_on_disk && base.lsn <= mark",
        "was_on_disk",
        it("snapshots::deferred::on_demand_open_verifies_image_of_batch_without_mark"),
    ),
    defence(
        "a writer that recovers leaves a reader its segments (I8)",
        "src/recovery/mod.rs",
        "readers_locked_out.is_none()",
        "false",
        it("earlier_states::recovering_writer_keeps_segments_locked_by_reader"),
    ),
    defence(
        "a reader that holds a state looks whether it is there",
        "src/history/state.rs",
        "first.all(|file| present.contains(&file.name()))",
        "true",
        it("earlier_states::segments_removed_before_lock_are_not_damage"),
    ),
    defence(
        "a history leaves out links that others follow",
        "format/src/state/blame.rs",
        "reach.as_ref().is_none_or(|reach| reach.role(**id) != Role::Link)",
        "true",
        it("earlier_states::history_does_not_start_at_a_link"),
    ),
    refusal(
        "a snapshot that is read back late removes none after a restore",
        "src/snapshot/verify.rs",
        "!self.unverified.is_retention_owed()",
        it("snapshots::retention::restore_removes_no_snapshot_despite_late_verification"),
    ),
    check(
        "what a reader holds stays (I8)",
        RETAIN,
        "held.insert(*id);",
        it("earlier_states::state_locked_by_reader_stays_until_released"),
    ),
    defence(
        "links that others follow stay (I8)",
        RETAIN,
        "!links.contains(&id)",
        "true",
        it("crash::snapshots::snapshots_that_follow_each_other_survive"),
    ),
    defence(
        "images that a kept snapshot names stay (I8)",
        RETAIN,
        "!named.contains(&number)",
        "true",
        RECYCLED,
    ),
    defence(
        "images that kept batches name stay (I8)",
        RETAIN,
        "!catalog.files.is_for_batch(number, redo)",
        "true",
        it("bulk::files_stay_as_long_as_a_kept_frame_or_snapshot_names_them"),
    ),
    defence(
        "the floor is recorded before anything below it goes (I8)",
        RETAIN,
        "self.record(catalog, floor, |id| plan.snapshots.contains(id))",
        "self.record(catalog, catalog.floor, |id| plan.snapshots.contains(id))",
        it("bounds::states_below_floor_are_unreachable_except_named"),
    ),
    defence(
        "a number that nothing else says is taken keeps its file",
        RETAIN,
        "Some(number) == highest && number >= next_file",
        "Some(number) == highest && number < next_file",
        it("bounds::highest_numbered_file_stays_until_a_manifest_uses_it"),
    ),
    defence(
        "log that a kept snapshot needs stays (I8)",
        RETAIN,
        "log.segments.range(..bound)",
        "log.segments.range(..bound + 1)",
        RECYCLED,
    ),
];
