//! System calls that fail or are interrupted: the first call of its kind, the second, … The failure is
//! reported as a typed error. Either the failure poisons the store, which then acknowledges no more batches,
//! or the store continues to work. All acknowledged batches exist when the store is reopened.

use std::sync::Mutex;

use super::calls::Sweep;
use super::scripts::{End, Part};
use super::*;
use crate::machine::strace::Fault;

const fn fault(calls: &'static str, fault: &'static str) -> Fault {
    Fault { calls, fault }
}

const EIO: &str = "error=EIO";
const ENOSPC: &str = "error=ENOSPC";
const EINTR: &str = "error=EINTR";

/// System calls, and the results that they are made to return. Failures of `mmap` are omitted, because the
/// allocator and the thread library depend on it.
const FAULTS: [Fault; 20] = [
    fault("pwrite64", EIO),
    fault("pread64", EIO),
    fault("fdatasync", EIO),
    fault("fsync", EIO),
    fault("msync", EIO),
    fault("/^rename", EIO),
    fault("/^unlink", EIO),
    fault("ftruncate", EIO),
    fault("fallocate", EIO),
    fault("openat", EIO),
    fault("mkdir", EIO),
    fault("pwrite64", ENOSPC),
    fault("/^rename", ENOSPC),
    fault("ftruncate", ENOSPC),
    fault("fallocate", ENOSPC),
    fault("openat", ENOSPC),
    fault("mkdir", ENOSPC),
    fault("pwrite64", EINTR),
    fault("pread64", EINTR),
    fault("fallocate", EINTR),
];

const SYNCS: [&str; 3] = ["fdatasync", "fsync", "msync"];

#[test]
fn failed_system_call_keeps_acknowledged_batches() {
    let Some(sweep) = Sweep::new("failing system calls", &FAULTS, Part::Failing) else { return };
    let ends = Mutex::new([[0; End::ALL.len()]; FAULTS.len()]);
    let total = sweep.run(effort("REMANENT_FAILED_CALLS"), |fault, ended, at| {
        let known = End::ALL.iter().position(|end| ended.code() == Some(*end as i32));
        let end = known.unwrap_or_else(|| panic!("the worker ended otherwise: {at}"));
        ends.lock().unwrap()[fault][end] += 1;
        let (end, Fault { calls, fault }) = (End::ALL[end], FAULTS[fault]);
        assert!(end == End::Unnoticed || fault != EINTR, "an interrupted call was given up: {at}");
        assert!(end != End::WentOn || !SYNCS.contains(&calls), "a store went on after a failed sync: {at}");
    });
    println!("{:<34}{}", "workers", End::ALL.map(|end| format!("{:>13}", format!("{end:?}"))).concat());
    for (Fault { calls, fault }, ends) in FAULTS.iter().zip(ends.into_inner().unwrap()) {
        println!("{:<34}{}", format!("{calls} {fault}"), ends.map(|count| format!("{count:>13}")).concat());
    }
    println!("{total} failing calls");
}
