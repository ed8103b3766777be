//! Defences of recovery: the stores that an open rejects, the bytes that it verifies with direct reads, and
//! the bytes that it copies or leaves unchanged.

use super::{Defence, Test, check, defence, it, refusal, stores, unit};

const RECOVERY: &str = "src/recovery/mod.rs";
const VERIFIED: &str = "src/recovery/verified_snapshots.rs";
const CREATE: &str = "src/recovery/create.rs";
const CATALOG: &str = "src/recovery/catalog.rs";
const LOAD: &str = "src/recovery/load.rs";
const SOURCE: &str = "src/disk/source.rs";
const OPENING: &str = "src/recovery/opening.rs";
const WALK: &str = "format/src/log/walk.rs";
const TABLE: &str = "format/src/state/table/mod.rs";
const SUMMED_UP: Test = Test {
    binary: "remanent_format",
    name: "state::table::tests::combined_batches_equal_individual_application",
};
const SYNCS: Test = it("crash::syncs::each_sync_of_creations_and_openings_matters");
const KILLED: Test = it("crash::commits::logged_commits_survive_a_kill");

pub const LIST: &[Defence] = &[
    defence(
        "a missing kept snapshot is reported",
        RECOVERY,
        "Record(&end.verified).lost(survey)",
        "Vec::<remanent_format::Damage>::new()",
        it("recovery::snapshots::missing_manifest_of_a_kept_snapshot_is_reported"),
    ),
    defence(
        "a walk starts inside its segment",
        WALK,
        "(SEGMENT_HEADER_BLOCK..=file_len).contains(&offset)",
        "true",
        stores("limits::walk_start_outside_its_segment_is_refused"),
    ),
    defence(
        "marks beyond the end advance the proven end",
        WALK,
        "self.mark = mark;",
        "",
        stores("limits::mark_beyond_the_end_advances_the_proven_end"),
    ),
    // Incarnations that are omitted from the line.
    defence(
        "an incarnation with batches stays on the line",
        RECOVERY,
        "end.accepted.lsn == began.lsn",
        "true",
        it("recovery::opens::opens_without_commits_leave_disk_unchanged"),
    ),
    defence(
        "an incarnation in which a replay begins stays on the line",
        RECOVERY,
        "begins_replay()",
        "false",
        it("recovery::opens::incarnation_of_replay_start_is_kept"),
    ),
    defence(
        "an unreadable manifest may point into any incarnation",
        RECOVERY,
        "survey.links.values().all(Result::is_ok)",
        "true",
        it("recovery::opens::an_unreadable_manifest_keeps_every_incarnation"),
    ),
    // Directories that contain no store, or another store than the caller expects.
    defence(
        "a foreign directory is refused",
        CREATE,
        "names.iter().find(|name| !ours(name))",
        "None::<&String>",
        it("recovery::foreign_directory_is_refused"),
    ),
    refusal(
        "another identity is refused",
        RECOVERY,
        "self.options.identity.as_ref().is_some_and(|identity| *identity != record.identity)",
        it("recovery::other_identity_is_refused"),
    ),
    refusal(
        "another layout fingerprint is refused",
        RECOVERY,
        "record.layout_fingerprint != Some(expected)",
        it("recovery::other_identity_is_refused"),
    ),
    refusal(
        "a store of a newer version is not opened for writing",
        RECOVERY,
        "!store.is_writable()",
        it("recovery::damaged_store_file_is_refused"),
    ),
    refusal(
        "a missing log does not count as a new store",
        RECOVERY,
        "survey.log.newest().is_none()",
        it("recovery::missing_log_is_refused"),
    ),
    refusal(
        "images and manifests without STORE are refused",
        CREATE,
        "!claimed",
        it("recovery::missing_store_file_is_refused"),
    ),
    refusal(
        "a batch without STORE is refused",
        CREATE,
        "holds_batch(&source, file)?",
        it("recovery::missing_store_file_is_refused"),
    ),
    // Recovery trusts the medium, not the page cache (I6).
    check("names are synced before they are used (I6)", RECOVERY, "self.disk.sync_folder(folder)?;", SYNCS),
    defence(
        "the name of STORE is synced before it is used (I6)",
        RECOVERY,
        "self.disk.sync_folder(Folder::Root)",
        "Ok(())",
        SYNCS,
    ),
    defence(
        "durable images are read past the cache (I6)",
        LOAD,
        "DiskSource::bypassing_cache(recovery.disk.clone())",
        "DiskSource::new(recovery.disk.clone())",
        it("durable_marks::unsynced_batch_image_is_detected_at_next_open"),
    ),
    defence(
        "durable frames are read past the cache (I6)",
        LOAD,
        "source.bypassing_cache_once()",
        "DiskSource::new(self.recovery.disk.clone())",
        it("durable_marks::unsynced_write_is_detected_at_next_open"),
    ),
    defence(
        "bytes after an uncached one are read past the cache (I6)",
        SOURCE,
        "ranges.partition_point(|uncached| uncached.end < range.end)",
        "0",
        it("durable_marks::unsynced_write_is_detected_at_next_open"),
    ),
    // Without these defences, recovery would trust the page cache for the tail: the predecessor would end
    // where the reading ended, and no batch would be copied.
    defence(
        "the unproven tail is copied (I6)",
        WALK,
        "Ok(LogEnd {
            accepted: self.accepted,
            proven: self.proven,
            torn,
            verified: self.verified.clone(),
            harmless,
        })",
        "Ok(LogEnd {
            accepted: self.accepted,
            proven: self.accepted,
            torn,
            verified: self.verified.clone(),
            harmless,
        })",
        KILLED,
    ),
    // A new incarnation (I5).
    check(
        "temporary files are removed (I5)",
        RECOVERY,
        "self.remove_temporaries()?;",
        it("recovery::temporary_files_are_removed"),
    ),
    defence(
        "the predecessor ends at its last proven batch (I5)",
        OPENING,
        "(end.proven, end.accepted)",
        "(end.accepted, end.accepted)",
        KILLED,
    ),
    defence(
        "the opening segment contains the copied tail (I5)",
        OPENING,
        "opening_frames(store, number, &opening, &before.tail, &verified)",
        "opening_frames(store, number, &opening, &[], &verified)",
        KILLED,
    ),
    // Snapshots (I7).
    refusal(
        "an unrecorded manifest is published again (I7)",
        VERIFIED,
        "used.is_some_and(|used| used.snapshot == link.snapshot)",
        it("recovery::snapshots::unrecorded_manifest_is_published_again"),
    ),
    refusal(
        "a manifest with one bad copy is published again",
        VERIFIED,
        "health(link.snapshot).is_some_and(|health| !health.is_whole())",
        it("recovery::snapshots::one_bad_manifest_copy_costs_nothing"),
    ),
    // Files that must be kept, and the memory budget.
    refusal(
        "images that batches may name are kept (I8)",
        CATALOG,
        "may_be_for_a_batch(source, number, survey)",
        it("recovery::images_of_batches_stay"),
    ),
    defence(
        "images that anything names are kept (I8)",
        CATALOG,
        "named.contains(&number)",
        "false",
        it("recovery::unnamed_images_are_removed"),
    ),
    defence(
        "batches that write past a page's end are not summarized",
        TABLE,
        "change.end <= entry.len()",
        "true",
        SUMMED_UP,
    ),
    defence(
        "batches that the table includes are not applied again",
        TABLE,
        "entry.lsn < changes.first",
        "true",
        SUMMED_UP,
    ),
    defence(
        "an epoch stays within its limit in a summary of batches",
        TABLE,
        "epoch <= NUMBER_MAX",
        "true",
        Test {
            binary: "remanent_format",
            name: "state::table::tests::epoch_overflow_in_batch_summary_is_refused",
        },
    ),
    defence(
        "a batch that does more than change bytes is not summarized",
        "format/src/op/reader.rs",
        "are_all = false",
        "()",
        Test {
            binary: "remanent_format",
            name: "state::table::tests::only_byte_changing_batches_are_combined",
        },
    ),
    defence(
        "pieces in the same kind of memory are ordered",
        "src/device/cuda/areas.rs",
        "self.kinds & area.kind() == 0",
        "true",
        unit("device::cuda::plan::tests::no_result_depends_on_which_part_runs_first"),
    ),
    defence(
        "commands after a copy within a page wait for the copy",
        "src/device/cuda/plan.rs",
        "piece.sources.contains(&Some(piece.target))",
        "false",
        unit("device::cuda::plan::tests::no_result_depends_on_which_part_runs_first"),
    ),
];
