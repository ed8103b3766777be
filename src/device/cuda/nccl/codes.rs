//! The library's result codes and their meanings.

/// The call succeeded.
pub(super) const SUCCESS: u32 = 0;
/// The call continues in the background. Its result is the communicator's asynchronous error.
pub(super) const IN_PROGRESS: u32 = 7;

/// Returns the meaning of a code.
pub(super) fn name(code: u32) -> &'static str {
    match code {
        1 => "a CUDA call failed",
        2 => "a system call failed",
        3 => "internal error",
        4 => "invalid argument",
        5 => "invalid use",
        6 => "a remote rank or the network failed",
        IN_PROGRESS => "in progress",
        _ => "an error unknown here",
    }
}
