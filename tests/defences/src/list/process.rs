//! Defences against the process around a store: forked children, and shortages that pass.

use super::{Defence, Test, defence, it};

const PROCESS: &str = "src/base/process.rs";
const FORKS: Test = it("fork::a_thousand_children_change_nothing_during_durable_commits");
const ENTRIES: Test = it("fork::every_call_in_a_child_is_refused_and_dropping_frees_nothing_of_the_parents");

pub const LIST: &[Defence] = &[
    defence("a forked child is refused", PROCESS, "self.is_current()", "true", FORKS),
    defence("a forked child drops nothing", PROCESS, "self.is_own()", "true", ENTRIES),
    defence(
        "what could not be looked at is not damaged",
        "format/src/defect.rs",
        "SHORTAGES.contains(&errno)",
        "errno == 0",
        it("faults::shortages::a_shortage_during_an_open_fails_that_open"),
    ),
    defence(
        "a segment that cannot be made for a shortage fails a commit alone",
        "src/log/writer.rs",
        "error.is_passing()",
        "matches!(error, Error::DiskFull { .. })",
        it("faults::shortages::a_shortage_fails_one_call_and_the_store_goes_on"),
    ),
];
