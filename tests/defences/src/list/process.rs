//! Defences against the environment of a store: forked children, and temporary shortages of resources.

use super::{Defence, Test, check, defence, it, unit};

const PROCESS: &str = "src/base/process.rs";
const FORKS: Test = it("fork::a_thousand_children_change_nothing_during_durable_commits");
const ENTRIES: Test = it("fork::forked_child_calls_fail_and_drops_free_nothing");

const FORKED: &str = "src/base/closed_on_fork.rs";
const LOCK: &str = "src/disk/lock.rs";
const CLAIM: &str = "src/disk/claim.rs";
const WRITERS: Test = it("superseded::file_systems::superseded_writer_changes_no_file");

pub const LIST: &[Defence] = &[
    defence(
        "the lock belongs to the open file, not only to the process",
        LOCK,
        "record_locks::try_lock(file, Owner::OpenFile, Mode::Exclusive, OF_OPEN_FILE)",
        "Ok(true)",
        it("fork::locks::reading_own_directory_keeps_the_lock"),
    ),
    check(
        "a forked child closes the files of its parent's locks",
        FORKED,
        "unsafe { libc::close(descriptor) };",
        it("fork::locks::children_of_killed_owner_keep_no_lock"),
    ),
    defence(
        "a file that is opened during a fork is opened again",
        FORKED,
        "STARTED.load(Ordering::SeqCst) == forks",
        "true",
        unit("base::closed_on_fork::tests::open_overlapping_fork_is_retried"),
    ),
    defence("a writer detects another description in LOCK", CLAIM, "found == self.text", "true", WRITERS),
    defence("a writer detects another lock file", CLAIM, "named != self.id", "false", WRITERS),
    check(
        "a writer checks for another writer before it acknowledges",
        "src/log/sync_guard.rs",
        "self.log.pool.check_writer()?;",
        it("superseded::a_sync_that_another_writer_overlaps_is_not_acknowledged"),
    ),
    defence("calls in a forked child are refused", PROCESS, "self.is_current()", "true", FORKS),
    defence("a drop in a forked child frees nothing", PROCESS, "self.is_own()", "true", ENTRIES),
    defence(
        "a shortage is not reported as damage",
        "format/src/defect.rs",
        "SHORTAGES.contains(&errno)",
        "errno == 0",
        it("faults::shortages::a_shortage_during_an_open_fails_that_open"),
    ),
    defence(
        "a shortage while a segment is created fails one commit only",
        "src/log/writer.rs",
        "error.is_passing()",
        "matches!(error, Error::DiskFull { .. })",
        it("faults::shortages::shortage_fails_one_call_only"),
    ),
];
