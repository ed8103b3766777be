//! The command as a user runs it. All tests are in one binary and run the built program.

#[path = "../../../fuzz/src/archive.rs"]
mod archive;
#[cfg(feature = "archive")]
mod archives;
mod command;
mod damaged;
#[path = "../../../fuzz/src/fit.rs"]
mod fit;
mod directories;
mod follow;
mod fuzzed;
mod history;
#[path = "../../../fuzz/src/imports.rs"]
mod imports;
mod inspect;
#[path = "../../../fuzz/src/inspections.rs"]
mod inspections;
mod kept;
mod long_pages;
mod on_disk;
mod replay;
mod salvage;
#[cfg(feature = "archive")]
#[path = "../../../archive/tests/remote/server.rs"]
#[allow(dead_code, reason = "the archive's own tests use the rest")]
mod server;
mod torture;
mod truth;
mod usage;
mod verdicts;
mod versions;
mod weights;
