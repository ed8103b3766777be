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
        "a close keeps retained log that no snapshot needs",
        CATALOG,
        "redo.lsn == floor",
        "true",
        it("follow::ends::close_keeps_log_after_released_name"),
    ),
    // Pages on disk.
    defence(
        "an image of an older copy does not replace a newer image",
        DISK_PAGE,
        "now.in_image > then.writes",
        "false",
        OF_DISK_PAGES,
    ),
    defence(
        "a resized page rejects an image of an earlier copy",
        DISK_PAGE,
        "now.number != then.number",
        "false",
        OF_DISK_PAGES,
    ),
    check(
        "bytes after a page's end are discarded",
        DISK_PAGE,
        "self.change_block(last, |block| block.forget(within..BLOCK_LEN));",
        OF_DISK_PAGES,
    ),
    defence(
        "no snapshot names an image of a page that the same batch changes",
        DISK_MOVES,
        "(!is_changed(info.page)).then_some((info.page, info.len))",
        "Some((info.page, info.len))",
        it("pages_on_disk::pages_round_trip_through_disk"),
    ),
    defence(
        "a page moves to disk with a snapshot's image only if that is intact",
        DISK_MOVES,
        "damaged.contains(&(request.file, request.offset))",
        "false",
        it("pages_on_disk::image_is_verified_before_memory_is_freed"),
    ),
    defence(
        "a page with writes over its image is not loaded from the image alone",
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
        "a page with images in two files to be emptied is gathered once",
        "src/catalog/classify.rs",
        "                mentioned = sorted.mentioned()?;",
        it("overlays::page_in_two_wasteful_files_is_listed_once"),
    ),
    defence(
        "no overlay uses a base that is known to be damaged",
        "src/catalog/known_images.rs",
        "image.files().skip(1).any(|(file, _)| of_base(file))",
        "false",
        unit("catalog::known_images::tests::damaged_base_invalidates_its_overlays"),
    ),
    defence(
        "the base of an overlay was read back",
        "src/catalog/known_images.rs",
        "(is_proven || named == *image)",
        "true",
        it("overlays::unverified_image_is_no_base"),
    ),
    defence(
        "no overlay uses a base in a file that is to be emptied",
        "src/snapshot/overlays.rs",
        "!self.wasteful.contains(&file)",
        "true",
        it("overlays::overlay_is_not_based_on_mostly_unused_file"),
    ),
    defence(
        "an overlay contains the pieces of the previous overlay",
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
        "an overlay is read together with its base",
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
        unit("images::disk_pages::tests::impossible_snapshot_is_not_awaited"),
    ),
    check(
        "an unreadable page fails the snapshot but not the store",
        "src/snapshot/mod.rs",
        "if let Err(error @ Error::Damaged(_)) = gathered {\n            return Ok(WriteOutcome::Unreadable(error));\n        }",
        it("overlays::damage_to_an_overlay_and_to_its_base_is_found"),
    ),
    defence(
        "memory ranges of one call do not overlap",
        "src/device/bytes.rs",
        "pair[0].overlaps(&pair[1])",
        "false",
        it("device_reads::unreadable_source_or_target_is_refused"),
    ),
    refusal(
        "a page of a view has the length of its target memory",
        COPIER,
        "page_len != len",
        it("device_copies::invalid_copy_target_is_refused"),
    ),
    refusal(
        "a page of a view has only one target memory",
        COPIER,
        "pair[0].0 == pair[1].0",
        it("device_copies::invalid_copy_target_is_refused"),
    ),
    check(
        "bytes that wait for the applier count as pending disk bytes",
        "src/images/disk_pages/mod.rs",
        "*claimed += bytes;",
        unit("images::disk_pages::tests::claim_counts_until_released"),
    ),
    defence(
        "a draft is stale if a page moved to or from disk meanwhile",
        DRAFT,
        "!self.disk_ops(ops, Some(table))?.is_same(&draft.disk_ops)",
        "false",
        it("pages_on_disk::moves_writes_and_reads_run_concurrently"),
    ),
    check(
        "an open records that there are pages on disk",
        STORE_OPEN,
        "self.disk_pages.note(found.submitted.lens().map(|(_, place, _)| place));",
        it("pages_on_disk::a_store_holds_more_pages_than_memory"),
    ),
    check(
        "an open proves unproven images of pages on disk",
        LOAD,
        "prove(sealed, wanted)?;",
        it("pages_on_disk::open_verifies_unverified_images"),
    ),
    // The bus (I12).
    check(
        "long writes are checksummed on the device",
        PROVISIONING,
        "provision.sums = ArrivalSums::of(taken(), staging)?;",
        it("faults::bit_flips::long_write_rejects_bit_flips"),
    ),
    defence(
        "long writes are not reported before their checksums arrive",
        IN_FLIGHT,
        "unproven.map_or(u64::MAX, |list| list.pending.fence().value)",
        "u64::MAX",
        it("faults::bit_flips::long_write_rejects_bit_flips"),
    ),
    defence(
        "long writes of a replay are checksummed on the device",
        DELTAS,
        "self.crosses_bus",
        "false",
        it("faults::bit_flips::replay_of_long_writes_rejects_bit_flips"),
    ),
    defence(
        "a long write is checksummed before it is overwritten",
        "src/applier/commands.rs",
        "self.unsummed.any_in(target)",
        "false",
        it("faults::bit_flips::long_write_rejects_bit_flips"),
    ),
    defence(
        "bytes of a snapshot are checksummed on the device",
        READBACK,
        "device.crosses_bus()",
        "false",
        it("faults::bit_flips::snapshot_rejects_bit_flips"),
    ),
    defence(
        "images are checksummed on the device",
        IMAGE_LOADER,
        "if device.crosses_bus() { collected(parts().copied())? } else { Vec::new() }",
        "Vec::new()",
        it("faults::bit_flips::open_rejects_bit_flips"),
    ),
    defence(
        "all parts of a long image are needed to prove it",
        IMAGE_LOADER,
        "part.target.len < part.of.len",
        "false",
        it("faults::bit_flips::on_demand_load_rejects_bit_flips"),
    ),
    defence(
        "a payload from the device is checksummed on the host",
        DEVICE_PAYLOAD,
        "of_device.is_none_or(|sums| arrived.iter().copied().eq(sums_in(sums)))",
        "of_device.is_none_or(|sums| arrived.len() == sums_in(sums).count())",
        it("faults::bit_flips::log_rejects_bit_flips"),
    ),
    defence(
        "a page assembled on the host is checksummed on the device",
        STAGING,
        "returned.get(1).is_none_or(as_sent)",
        "returned.get(1).is_none_or(as_sent) || true",
        it("faults::bit_flips::open_rejects_bit_flips"),
    ),
    // Image files that are reused (I13).
    refusal(
        "a file with a second name is not overwritten",
        IMAGE_SPARES,
        "!file.has_one_name()?",
        it("image_spares::hard_linked_spare_is_not_reused"),
    ),
    refusal(
        "a spare image file with holes is not overwritten",
        IMAGE_SPARES,
        "!file.is_without_holes()?",
        it("image_spares::sparse_spare_is_not_reused"),
    ),
    defence(
        "an ancestor's file is not overwritten",
        IMAGE_SPARES,
        "header.store == self.store",
        "header.store == self.store || true",
        it("image_spares::file_shared_with_fork_is_not_reused"),
    ),
    defence(
        "spare and used image files take at most twice the named bytes",
        IMAGE_SPARES,
        "bytes + spare.len <= bytes_max",
        "bytes + spare.len <= bytes_max + (1 << 40)",
        it("image_spares::spares_use_at_most_image_space"),
    ),
    defence(
        "spare image files are removed to make space for the log",
        SEGMENT_FILE,
        "self.image_spares.retry_without_spares(|| self.build_once(number, len, opening, content))",
        "self.build_once(number, len, opening, content)",
        it("image_spares::full_disk_releases_spares"),
    ),
    check(
        "a reused file's new name is durable before its first chunk",
        IMAGE_SPARES,
        "self.disk.sync_folder(Folder::Pages).inspect_err(|_| self.forget(reused.keys()))?;",
        it("image_spares::spares_hold_no_chunk_with_future_number"),
    ),
    defence(
        "an overwritten image is not reported as damage",
        "src/follower/batch.rs",
        "self.source.is_gone(damage.file)",
        "false",
        it("image_spares::follower_of_overwritten_image_is_overtaken"),
    ),
    // The log.
    check("groups are synced", SYNC_GUARD, "range.window.sync(range.from, range.to - range.from)?;", COMMITS),
    defence(
        "a failed sync stops the store",
        SYNC_GUARD,
        "self.make_durable().map_err(|error| self.log.fail(error))",
        "self.make_durable()",
        it("faults::disk_errors::disk_error_stops_store_without_loss"),
    ),
    // A stale mark has no effect until bytes are damaged. The damage then looks like a torn tail.
    defence(
        "frames contain the durable mark (I4)",
        WRITER,
        "header.encode()",
        "FrameHeader { durable: Lsn(0), ..header }.encode()",
        it("durable_marks::every_frame_carries_the_newest_durable_batch"),
    ),
    defence(
        "the durable mark in batches advances (I4)",
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
        "two empty segments are prepared in advance (I8)",
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
        "spare segments with holes are not reused",
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
        "space for images is allocated before they are mapped",
        "src/disk/growing/parts.rs",
        "self.space.reach(end)?",
        "end",
        OF_IMAGE_WAYS,
    ),
    defence(
        "an image file is truncated only after it is unmapped",
        GROWING,
        "parts.unmap()",
        "()",
        OF_IMAGE_WAYS,
    ),
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
        "ENOSPC at the sync of preallocated images stops the store",
        IMAGES,
        "!self.growing.gets_space_at_sync()",
        it("faults::disk_full::enospc_at_image_sync_stops_store_unless_buffered"),
    ),
    defence(
        "images on a nearly full disk reserve only the space they need",
        GROWING,
        "self.file.reserve(made.end, needed)",
        "Err(error)",
        unit("disk::growing::tests::disk_is_full_exactly_when_bytes_do_not_fit"),
    ),
    defence(
        "a rewritten block of a long image keeps its other bytes",
        "src/disk/growing/blocks.rs",
        "self.file.read_at(block, &mut old)?;",
        "",
        unit("disk::growing::tests::partial_block_rewrite_keeps_other_bytes"),
    ),
    check(
        "overwritten bytes of a long page are kept until gathered",
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
        "a record is durable before any file is removed (I7)",
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
        "a recovering writer keeps the segments of a reader (I8)",
        "src/recovery/mod.rs",
        "readers_locked_out.is_none()",
        "false",
        it("earlier_states::recovering_writer_keeps_segments_locked_by_reader"),
    ),
    defence(
        "a reader checks that the files of its locked state exist",
        "src/history/state.rs",
        "first.all(|file| present.contains(&file.name()))",
        "true",
        it("earlier_states::segments_removed_before_lock_are_not_damage"),
    ),
    defence(
        "a history does not start at a manifest kept only as a link",
        "format/src/state/blame.rs",
        "reach.as_ref().is_none_or(|reach| reach.role(**id) != Role::Link)",
        "true",
        it("earlier_states::history_does_not_start_at_a_link"),
    ),
    refusal(
        "late verification after a restore removes no snapshot",
        "src/snapshot/verify.rs",
        "!self.unverified.is_retention_owed()",
        it("snapshots::retention::restore_removes_no_snapshot_despite_late_verification"),
    ),
    check(
        "a snapshot locked by a reader is kept (I8)",
        RETAIN,
        "held.insert(*id);",
        it("earlier_states::state_locked_by_reader_stays_until_released"),
    ),
    defence(
        "links of later snapshots are kept (I8)",
        RETAIN,
        "!links.contains(&id)",
        "true",
        it("crash::snapshots::snapshots_that_follow_each_other_survive"),
    ),
    defence(
        "images that a kept snapshot names are kept (I8)",
        RETAIN,
        "!named.contains(&number)",
        "true",
        RECYCLED,
    ),
    defence(
        "images that kept batches name are kept (I8)",
        RETAIN,
        "!catalog.files.is_for_batch(number, redo)",
        "true",
        it("bulk::files_stay_as_long_as_a_kept_frame_or_snapshot_names_them"),
    ),
    defence(
        "the floor is recorded before files below it are removed (I8)",
        RETAIN,
        "self.record(catalog, floor, |id| plan.snapshots.contains(id))",
        "self.record(catalog, catalog.floor, |id| plan.snapshots.contains(id))",
        it("bounds::states_below_floor_are_unreachable_except_named"),
    ),
    defence(
        "the file with the highest number is kept as its only record",
        RETAIN,
        "Some(number) == highest && number >= next_file",
        "Some(number) == highest && number < next_file",
        it("bounds::highest_numbered_file_stays_until_a_manifest_uses_it"),
    ),
    defence(
        "log that a kept snapshot needs is kept (I8)",
        RETAIN,
        "log.segments.range(..bound)",
        "log.segments.range(..bound + 1)",
        RECYCLED,
    ),
];
