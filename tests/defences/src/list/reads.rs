//! Defences of lock-free lookups and reads: they return whole, logged batches, and bytes of one version. See
//! `src/versions`.

use super::{Defence, Test, defence, it, refusal, unit};

const VERSIONS: &str = "src/versions/mod.rs";
const STAYS: Test = unit("versions::tests::page_memory_is_stable_under_writes");
const VIEWS: Test = unit("versions::tests::files_needed_by_view_stay_and_others_are_truncated");

pub const LIST: &[Defence] = &[
    defence(
        "states that a reader needs are not overwritten",
        VERSIONS,
        "newest_lsn <= *floor",
        "true",
        STAYS,
    ),
    defence(
        "a version has the place that its batch set",
        "src/versions/chain.rs",
        "self.places[which].load(Ordering::Acquire)",
        "self.places[self.newest().0].load(Ordering::Acquire)",
        unit("versions::tests::moved_page_is_visible_at_each_place_in_turn"),
    ),
    defence(
        "a batch is visible only once it is logged (I1)",
        VERSIONS,
        "installed.min(logged)",
        "installed",
        STAYS,
    ),
    defence(
        "versions that a view needs are kept",
        VERSIONS,
        "views.keys().next().map_or(visible, |oldest| visible.min(*oldest))",
        "visible",
        VIEWS,
    ),
    refusal(
        "returned bytes are of one version of the page",
        "src/store/bytes.rs",
        "!versions.is_at(info.page, info.lsn)",
        it("reads::bytes_and_page_info_are_from_one_batch"),
    ),
    refusal(
        "a copy reads earlier changes of the same batch",
        "src/write/batch/copies.rs",
        "changed.contains(&source)",
        it("copies::copy_reads_bytes_at_its_point_in_batch"),
    ),
    refusal(
        "copied bytes are those at the batch's position in the log",
        "src/write/commit/draft.rs",
        "draft.staged.iter().any(|(page, lsn)| lsn_of(*page) != Some(*lsn))",
        it("copies::concurrent_copy_reads_source_at_its_log_position"),
    ),
    defence(
        "pages are compared as of one batch",
        "src/store/compare.rs",
        "self.read_as_of(info, offset, piece)?;",
        "self.read(info.page, offset, piece)?;",
        it("compares::pages_are_compared_as_of_one_batch"),
    ),
    defence(
        "an incomplete last element is also compared",
        "src/store/compare.rs",
        "len > whole",
        "false",
        it("compares::comparison_matches_naive_loop"),
    ),
    defence(
        "memory for reads of many ranges is bounded",
        "src/applier/reads.rs",
        "*bytes <= READ_BYTES_MAX",
        "true",
        it("many_reads::memory_of_concurrent_reads_is_limited"),
    ),
    defence(
        "a restore is reported to change streams",
        "src/history/restore.rs",
        "self.engine.applier.changes().publish(Err(point.lsn));",
        "",
        it("change_streams::gap_is_reported_at_its_position"),
    ),
];
