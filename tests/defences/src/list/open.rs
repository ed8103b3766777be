//! Defences of an open store: pages that are not loaded yet, pages in use by callers, scrubs, and a full
//! disk.

use super::{Defence, Test, check, defence, it, refusal};

const LEASES: &str = "src/applier/lease_table.rs";
const PLAN: &str = "src/snapshot/plan.rs";
const RETAIN: &str = "src/snapshot/retain.rs";
const SORTING: &str = "src/recovery/page_sources.rs";
const PASS: &str = "src/snapshot/scrub/pass.rs";
const SCRUB: &str = "src/snapshot/scrub/mod.rs";
const SEGMENT_FILE: &str = "src/log/segments/file.rs";
const RESERVE: &str = "src/log/segments/reserve.rs";

const PIN: Test = it("pins::moving_pinned_page_is_refused");
const SCRUBS: Test = it("crash::scrubs::repairing_scrub_survives_crash");
const ROWS: Test = it("scrub::damage_is_reported_and_repaired_row_by_row");

pub const LIST: &[Defence] = &[
    // Files that readers use while the store is open.
    defence(
        "log after a named snapshot is kept for its reader (I8)",
        PLAN,
        "(is_cut && log.reaches(kept))",
        "(is_cut && !is_cut)",
        it("snapshots::retention::the_log_after_a_named_snapshot_stays_while_a_reader_holds_it"),
    ),
    defence(
        "files that a link needs are kept for its reader (I8)",
        RETAIN,
        "self.links_without_snapshot()?",
        "Vec::<SnapshotId>::new()",
        it("snapshots::retention::files_read_through_link_stay_until_reader_ends"),
    ),
    // Reports about a store that is only read.
    refusal(
        "a dry run omits files that a writer is writing",
        "src/store/history.rs",
        "*number >= from",
        it("bounds::dry_run_lists_removals_without_work_in_progress"),
    ),
    refusal(
        "a dry run omits snapshots that a reader holds",
        "src/snapshot/retain.rs",
        "!is_free(*id)?",
        it("snapshots::retention::held_snapshot_is_not_removed"),
    ),
    refusal(
        "the lock's holder queries the lock without opening its file",
        "src/disk/lock.rs",
        "registry.contains(&id)",
        Test { binary: "remanent", name: "disk::lock::tests::querying_lock_does_not_acquire_it" },
    ),
    defence(
        "a writer resolves names in the directory that it locked",
        "src/disk/dir.rs",
        "work(Directory::Open(&open))",
        "work(Directory::Path(&self.root))",
        it("moved_directories::store_continues_in_moved_directory"),
    ),
    refusal(
        "a follower detects that another store replaced its store",
        "src/follower/log_follower.rs",
        "open.is_none() && segment::is_foreign(&*self.disk, store, number)?",
        it("moved_directories::follower_detects_replaced_store"),
    ),
    // Pages that an open leaves on disk. The files that could replace them are kept until all pages are
    // loaded.
    defence(
        "only pages with proven images stay unloaded (I7)",
        SORTING,
        "may_be_unloaded && is_proven && is_unchanged()",
        "may_be_unloaded && is_unchanged()",
        it("on_demand::unrecorded_snapshot_is_verified_at_open"),
    ),
    defence(
        "only pages without later changes stay unloaded",
        SORTING,
        "table.get(page).is_some_and(|info| info.lsn == base.lsn)",
        "table.get(page).is_some()",
        it("on_demand::store_is_usable_before_pages_are_loaded"),
    ),
    refusal(
        "no file is removed while a page is unloaded",
        "src/snapshot/retain.rs",
        "self.engine.applier.unloaded().is_any()",
        it("on_demand::store_is_usable_before_pages_are_loaded"),
    ),
    defence(
        "no file is removed after a page could not be loaded",
        "src/recovery/lazy_load.rs",
        "self.engine.poison.set(error.clone())",
        "error.clone()",
        it("on_demand::damage_names_page_and_recurs_on_eager_open"),
    ),
    check(
        "no batch is logged for an unloaded page",
        "src/write/commit/mod.rs",
        "self.engine.applier.unloaded().wait(ops.iter().filter_map(|at| at.op.page()))?;",
        it("on_demand::an_access_to_an_unloaded_page_waits_for_it"),
    ),
    // Opens with less memory than the pages need.
    refusal(
        "an open demotes no more changed bytes than may be pending",
        "src/recovery/lowered_pages.rs",
        "waiting > pending_max(budget.limit(Place::Disk))",
        it("tiers::less_memory::open_limits_demoted_changed_bytes"),
    ),
    check(
        "a snapshot includes the pages that an open demoted",
        "src/recovery/mod.rs",
        "changed.extend(&pages);",
        it("tiers::less_memory::open_with_less_memory_demotes_pages"),
    ),
    // Pages in use by callers. Callers read only the bytes of the page.
    check(
        "a leased page is not pinned",
        LEASES,
        "if !self.leased([page]).is_empty() {\n            return Err(Error::Leased { page });\n        }",
        it("pins::leased_page_cannot_be_pinned"),
    ),
    refusal("a pinned page is not leased", LEASES, "state.pins.contains_key(&page)", PIN),
    check(
        "a pinned page is not moved",
        "src/write/commit/draft.rs",
        "self.engine\n            .leases\n            .check_unpinned(ops.iter().filter_map(|at| page_moved_away(&at.op, location_of)))?;",
        PIN,
    ),
    defence(
        "no restore while a page is pinned",
        LEASES,
        "state.pages.iter().find_map(open).or_else(|| state.pins.keys().next().copied())",
        "state.pages.iter().find_map(open)",
        PIN,
    ),
    // Scrubs: no kept state depends on a damaged file.
    check(
        "a damaged image is written again",
        PASS,
        "catalog.known.mark_damaged(*page, image, (damaged_file, damage.offset));",
        SCRUBS,
    ),
    check("a damaged snapshot does not count as kept", SCRUB, "kept.is_sound = false;", SCRUBS),
    refusal(
        "a snapshot that names a damaged image counts as damaged",
        SCRUB,
        "images.contains(&(image.file, image.offset))",
        SCRUBS,
    ),
    refusal(
        "a snapshot before a damaged batch counts as damaged",
        SCRUB,
        "batches.iter().any(|lsn| kept.redo.lsn < *lsn)",
        ROWS,
    ),
    check("recovery starts after a damaged batch", PASS, "self.found.batches.push(lost);", SCRUBS),
    check(
        "recovery starts after a batch with a damaged image",
        PASS,
        "self.found.batches.extend(*batch);",
        ROWS,
    ),
    check("no snapshot follows a damaged link", SCRUB, "catalog.known.unlink();", ROWS),
    // On a full disk, only the batch that does not fit fails, and calls that free space still work.
    defence(
        "the reserve is for calls that free space",
        RESERVE,
        "purpose != SpacePurpose::User",
        "true",
        it("faults::disk_full::full_disk_refuses_commits_until_space_returns"),
    ),
    defence(
        "no frame uses space that the next open needs",
        RESERVE,
        "self.count.load(Ordering::Acquire) + empty >= purpose.leaves()",
        "true",
        it("full_file_systems::store_reopens_after_any_work_on_full_disk"),
    ),
    defence(
        "the manifest of a thin snapshot needs no new file",
        "src/catalog/publish.rs",
        "spare(temporary, len)?",
        "without_spare(temporary, len)?",
        it("full_file_systems::store_survives_simulated_disk_with_random_free_space"),
    ),
    defence(
        "a thin snapshot's manifest uses the spare reserved for it",
        RESERVE,
        "SPARES_FOR_OPENS - 1",
        "SPARES_FOR_OPENS",
        it("full_file_systems::store_survives_simulated_disk_with_random_free_space"),
    ),
    defence(
        "a rename without space fails the call but not the store",
        SEGMENT_FILE,
        "if error.is_no_space() { Error::disk_full(target, FOLDER_BLOCK) } else { error }",
        "error",
        it("full_file_systems::store_survives_simulated_disk_with_random_free_space"),
    ),
    defence(
        "an unfinished segment is removed",
        SEGMENT_FILE,
        "write(made).inspect_err(remove)",
        "write(made)",
        it("faults::disk_full::open_failed_by_full_disk_succeeds_once_space_returns"),
    ),
    defence(
        "a thin snapshot repeats the previous tombstones",
        "src/snapshot/thin_snapshot.rs",
        "self.tombstones_after(redo.lsn, previous, newest_end)?",
        "Vec::new()",
        it("concurrent::long::thin_snapshot_repeats_previous_tombstones"),
    ),
    defence(
        "space of deleted pages is freed although no image fits",
        "src/snapshot/thin_snapshot.rs",
        "self.engine.log.pool.with_surplus(|| self.write_thin(catalog))?;",
        "",
        it("faults::disk_full::deleted_pages_free_space_when_no_image_fits"),
    ),
    defence(
        "the snapshot that the next one follows is kept",
        PLAN,
        "newest.contains(&Some(kept.info.id))",
        "false",
        it("snapshots::retention::the_newest_snapshot_stays_until_there_is_a_newer_one"),
    ),
    defence(
        "a thin snapshot replaces the previous snapshot",
        PLAN,
        "starts.retain(|kept| !replaced.contains(&kept.info.id));",
        "",
        Test { binary: "remanent", name: "snapshot::plan::tests::guarantees_hold_over_random_lives" },
    ),
    check(
        "a restore proves every image that its table names",
        "src/history/restore.rs",
        "prove(&source, wanted(pages, &images))?;",
        it("snapshots::damage::restore_from_damaged_image_is_refused"),
    ),
    defence(
        "a restore through a damaged table is refused",
        "format/src/state/follow.rs",
        "let table = self.survey.read_table(self.source, *table, *table_crc)?;\n            \
         self.resolver.restore(lsn, table).map_err(at)?;",
        "match self.survey.read_table(self.source, *table, *table_crc) {\n                \
         Ok(table) => self.resolver.restore(lsn, table).map_err(at)?,\n                \
         Err(_) => self.resolver.batch(lsn, &[]).map_err(at)?,\n            }",
        it("snapshots::rotten::restore_from_damaged_table_is_refused"),
    ),
    defence(
        "a restore that finds damage does not stop the store",
        "src/history/restore.rs",
        "!error.is_passing() && !matches!(error, Error::Damaged(_))",
        "!error.is_passing()",
        it("snapshots::rotten::restore_from_damaged_image_is_refused"),
    ),
    refusal(
        "files of an unfinished restore are removed",
        "src/history/restore.rs",
        "present.contains(&file.name())",
        it("faults::disk_full::a_restore_on_a_full_disk_fails_cleanly_and_succeeds_later"),
    ),
    // Threads that end: no caller waits for such a thread, or treats its incomplete work as complete.
    check(
        "a sync that panicked has failed",
        "src/log/sync_guard.rs",
        "if std::thread::panicking() {\n            \
         self.log.fail(Error::panicked(\"a thread that syncs the log\"));\n        }",
        it("faults::waiters::a_panic_of_the_syncing_thread_reaches_every_waiter"),
    ),
];
