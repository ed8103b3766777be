//! The driver's error codes, classified by the state that the failed call leaves.
//!
//! - "Not ready" is not an error.
//! - "Out of memory" affects allocations. The allocation frees idle memory and retries.
//! - A rejected call did nothing: the device is unchanged.
//! - Every other code, including unknown codes, means that the process's context is lost. Every later call fails in the
//!   same way, including the calls of the caller's own code, and only a new process helps.
//!
//! The names of codes are in a table in this file, because asking the driver for them requires a driver.

use std::fmt;

use crate::error::Error;

/// An error code, and the name of the call that returned it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Code {
    call: &'static str,
    number: u32,
}

const INVALID_VALUE: u32 = 1;
const OUT_OF_MEMORY: u32 = 2;
const INVALID_HANDLE: u32 = 400;
const PEER_ALREADY: u32 = 704;
const NOT_READY: u32 = 600;

/// The codes of rejected calls, which had no effect, with the names of the codes.
const REFUSED: &[(u32, &str)] = &[
    (INVALID_VALUE, "invalid value"),
    (OUT_OF_MEMORY, "out of memory"),
    (3, "not initialized"),
    (34, "the library is a stub, not a driver"),
    (46, "device unavailable"),
    (100, "no device"),
    (101, "invalid device"),
    (200, "invalid kernel image"),
    (201, "invalid context"),
    (209, "no kernel image for this GPU"),
    (216, "context already in use"),
    (217, "no access between these GPUs"),
    (218, "invalid PTX"),
    (221, "the PTX compiler was not found"),
    (222, "unsupported PTX version"),
    (304, "the operating system refused"),
    (INVALID_HANDLE, "invalid handle"),
    (500, "not found"),
    (NOT_READY, "not ready"),
    (701, "launch out of resources"),
    (PEER_ALREADY, "access between these GPUs is there already"),
    (705, "access between these GPUs is not there"),
    (711, "access between more GPUs than can be"),
    (712, "memory is registered already"),
    (713, "memory is not registered"),
    (800, "not permitted"),
    (801, "not supported"),
    (802, "system not ready"),
    (803, "driver and kernel module do not match"),
    (900, "the stream is being captured"),
    (901, "the capture was invalidated"),
    (905, "the capture is of another sequence"),
    (906, "a capture would depend on the default stream"),
    (907, "the event was recorded in a capture"),
    (908, "the capture belongs to another thread"),
];

/// The names of some codes after which the context is lost.
const LOST: &[(u32, &str)] = &[
    (4, "deinitialized"),
    (214, "uncorrectable memory error"),
    (220, "uncorrectable link error"),
    (700, "illegal address"),
    (702, "launch timeout"),
    (709, "context is destroyed"),
    (710, "assertion failed"),
    (714, "hardware stack error"),
    (715, "illegal instruction"),
    (716, "misaligned address"),
    (717, "invalid address space"),
    (718, "invalid program counter"),
    (719, "launch failed"),
    (999, "unknown"),
];

impl Code {
    /// Converts the number that a call returned into a result.
    pub fn check(call: &'static str, number: u32) -> Result<(), Self> {
        if number == 0 { Ok(()) } else { Err(Self { call, number }) }
    }

    /// Returns whether work is still in progress, which is not an error.
    pub fn is_not_ready(self) -> bool {
        self.number == NOT_READY
    }

    /// Returns whether the driver rejected an argument.
    pub fn is_invalid_value(self) -> bool {
        self.number == INVALID_VALUE
    }

    /// Returns whether an allocation failed for lack of memory.
    pub fn is_out_of_memory(self) -> bool {
        self.number == OUT_OF_MEMORY
    }

    /// Returns whether the call failed because one GPU's access to another GPU's memory is already enabled.
    pub fn is_peer_already(self) -> bool {
        self.number == PEER_ALREADY
    }

    /// Returns whether the call failed because a graph is being captured from a stream.
    pub fn is_of_capture(self) -> bool {
        (900..=908).contains(&self.number)
    }

    /// Returns whether the call failed because a handle does not belong to the current context.
    pub fn is_foreign_handle(self) -> bool {
        self.number == INVALID_HANDLE
    }

    /// Returns whether the process's context is lost.
    pub fn context_lost(self) -> bool {
        !REFUSED.iter().any(|(number, _)| *number == self.number)
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = REFUSED.iter().chain(LOST).find(|(number, _)| *number == self.number);
        let name = name.map_or("an error unknown here", |(_, name)| name);
        write!(f, "{}: {name} ({})", self.call, self.number)
    }
}

impl From<Code> for Error {
    fn from(code: Code) -> Self {
        Error::Device { reason: code.to_string(), context_lost: code.context_lost() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Remedy;

    #[test]
    fn codes_state_if_context_is_usable() {
        let remedy = |number| Error::from(Code::check("cuCall", number).unwrap_err()).remedy();
        assert_eq!(Code::check("cuCall", 0), Ok(()));
        for refused in [1, 2, 222, 701, 900] {
            assert_eq!(remedy(refused), Remedy::Reopen, "{refused}");
        }
        // A fault, and a number in no table: the worst case is assumed.
        for lost in [700, 719, 999, 12_345] {
            assert_eq!(remedy(lost), Remedy::NewProcess, "{lost}");
        }
        assert!(Code::check("cuStreamQuery", 600).unwrap_err().is_not_ready());
    }

    #[test]
    fn driver_error_shows_call_and_code() {
        let shown = |number| Code::check("cuLaunchKernel", number).unwrap_err().to_string();
        assert_eq!(shown(700), "cuLaunchKernel: illegal address (700)");
        assert_eq!(shown(12_345), "cuLaunchKernel: an error unknown here (12345)");
    }
}
