//! Failures of NCCL, the library that moves bytes between the GPUs of several ranks.

use std::fmt;
use std::time::Duration;

use super::display::Attempts;

/// A failure of NCCL or of a communicator, for [`Error::Nccl`](super::Error::Nccl).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// The library was not found, or could not be loaded from any of the paths.
    #[error("could not load the NCCL library: {}", Attempts(tried))]
    NotFound {
        /// The names and paths that were tried, in order, each with the system's error.
        tried: Vec<(String, String)>,
    },
    /// The library lacks a function.
    #[error("{library} has no function {symbol}")]
    MissingSymbol {
        /// The path or name of the library.
        library: String,
        /// The name of the missing function.
        symbol: &'static str,
    },
    /// The library is older than the oldest supported version.
    #[error("{library} is NCCL {found}, but {needed} is required")]
    TooOld {
        /// The path or name of the library.
        library: String,
        /// The version of the library.
        found: String,
        /// The oldest supported version.
        needed: String,
    },
    /// A rank is not below the number of ranks, or the number of ranks is 0 or too large.
    #[error("rank {rank} of {ranks} does not exist")]
    NoSuchRank {
        /// The given rank.
        rank: u32,
        /// The given number of ranks.
        ranks: u32,
    },
    /// Another communicator on this host has already joined with the same id as the same rank.
    #[error("rank {rank} has joined already")]
    RankTaken {
        /// The rank.
        rank: u32,
    },
    /// A call of the library failed, or the library reported an error later.
    #[error("rank {rank} of {ranks}: {call}: {name} ({code}){}", Reason(reason))]
    Failed {
        /// The rank of the communicator.
        rank: u32,
        /// The number of ranks.
        ranks: u32,
        /// The name of the function.
        call: &'static str,
        /// The library's error code.
        code: u32,
        /// The meaning of the code.
        name: &'static str,
        /// The library's description of its last error; empty if it gave none.
        reason: String,
    },
    /// Not all ranks joined within the time limit.
    #[error(
        "rank {rank} of {ranks} waited {} s for other ranks to join{}",
        waited.as_secs_f32(),
        Ranks("; no process on this host joined as", absent)
    )]
    JoinTimedOut {
        /// The rank of the communicator.
        rank: u32,
        /// The number of ranks.
        ranks: u32,
        /// The time limit.
        waited: Duration,
        /// The ranks for which no process on this host has joined, including all ranks on other hosts.
        absent: Vec<u32>,
    },
    /// A collective operation was not complete within the time limit. A rank has ended, hangs, or made another call.
    #[error(
        "rank {rank} of {ranks}: {call} was not complete after {} s{}",
        waited.as_secs_f32(),
        Ranks("; ended:", ended)
    )]
    TimedOut {
        /// The rank of the communicator.
        rank: u32,
        /// The number of ranks.
        ranks: u32,
        /// The call that did not complete.
        call: &'static str,
        /// The time limit.
        waited: Duration,
        /// The ranks on this host that joined and whose processes no longer exist. Ranks on other hosts are never
        /// listed.
        ended: Vec<u32>,
    },
    /// The communicator was aborted, by a caller or because an earlier call failed.
    #[error("the communicator of rank {rank} of {ranks} was aborted")]
    Aborted {
        /// The rank of the communicator.
        rank: u32,
        /// The number of ranks.
        ranks: u32,
    },
    /// The ranks called an operation with stores whose pages cannot be compared or exchanged.
    #[error("rank {rank}: {reason}")]
    Unlike {
        /// The rank whose store differs.
        rank: u32,
        /// The difference.
        reason: String,
    },
}

/// Displays the reason of a failure, if the library reported a reason.
struct Reason<'a>(&'a str);

impl fmt::Display for Reason<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, ": {}", self.0) }
    }
}

/// Displays a list of ranks after some text, or nothing if the list is empty.
struct Ranks<'a>(&'static str, &'a [u32]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(text, ranks) = self;
        if ranks.is_empty() {
            return Ok(());
        }
        let ranks: Vec<String> = ranks.iter().map(u32::to_string).collect();
        write!(f, "{text} rank {}", ranks.join(", "))
    }
}
