//! Detects which ranks exist on this host. The library waits for a rank that never joins or that has ended, and does
//! not report which rank it is.
//!
//! Each rank binds a socket whose name contains the communicator's id and the rank's number. The name is in the
//! system's abstract namespace, so the system removes it when the process ends for any reason. After waiting too long,
//! a rank checks which of the names still exist. Ranks on other hosts, or in containers with another network, have no
//! name here and are never reported as ended.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use super::library::RawId;
use crate::base::closed_on_fork::ClosedOnFork;
use crate::error::NcclError;

/// The bound socket name of a rank, which exists as long as this value.
pub(super) struct Presence {
    id: u64,
    rank: u32,
    ranks: u32,
    /// The socket that has the name, or `None` if the system refused it. A forked child does not keep the name.
    _socket: Option<ClosedOnFork>,
    /// The other ranks that existed on this host when all ranks had joined.
    seen: Vec<u32>,
}

impl Presence {
    /// Binds the socket name of a rank.
    ///
    /// # Errors
    /// `RankTaken` if a rank with this number exists on this host.
    pub fn announce(id: &RawId, rank: u32, ranks: u32) -> Result<Self, NcclError> {
        let id = hash(&id.0);
        let bind = || {
            let socket = UnixDatagram::bind_addr(&address(id, rank)?)?;
            Ok(File::from(OwnedFd::from(socket)))
        };
        let socket = match ClosedOnFork::open(bind) {
            Ok(socket) => Some(socket),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                return Err(NcclError::RankTaken { rank });
            }
            Err(error) => {
                tracing::debug!(%error, rank, "other ranks cannot detect whether this rank exists");
                None
            }
        };
        Ok(Self { id, rank, ranks, _socket: socket, seen: Vec::new() })
    }

    /// Records which other ranks exist on this host. Must be called when all ranks have joined.
    pub fn record(&mut self) {
        self.seen = self.others().filter(|rank| self.exists(*rank)).collect();
    }

    /// Returns the other ranks that do not exist on this host.
    pub fn absent(&self) -> Vec<u32> {
        self.others().filter(|rank| !self.exists(*rank)).collect()
    }

    /// Returns the other ranks that existed on this host when all had joined, and no longer exist.
    pub fn ended(&self) -> Vec<u32> {
        self.seen.iter().copied().filter(|rank| !self.exists(*rank)).collect()
    }

    fn others(&self) -> impl Iterator<Item = u32> {
        let own = self.rank;
        (0..self.ranks).filter(move |rank| *rank != own)
    }

    /// Returns whether a rank has a name on this host.
    fn exists(&self, rank: u32) -> bool {
        let found =
            address(self.id, rank).and_then(|address| UnixDatagram::unbound()?.connect_addr(&address));
        found.is_ok()
    }
}

/// Returns the address of a rank's socket.
fn address(id: u64, rank: u32) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("remanent-nccl-{id:016x}-{rank}"))
}

/// Returns a hash of an id: FNV-1a. Ids contain random bytes, so hashes of different ids differ.
pub(super) fn hash(id: &[u8]) -> u64 {
    id.iter()
        .fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01B3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ended_rank_is_named() {
        let mut bytes = [7; 128];
        bytes[..4].copy_from_slice(&std::process::id().to_le_bytes());
        let id = RawId(bytes);
        let announce = |rank| Presence::announce(&id, rank, 3);
        let mut first = announce(0).unwrap();
        assert_eq!(first.absent(), [1, 2]);
        let second = announce(1).unwrap();
        assert!(matches!(announce(1), Err(NcclError::RankTaken { rank: 1 })));
        assert_eq!(first.absent(), [2]);
        first.record();
        assert_eq!(first.ended(), [0; 0], "rank 2 may be on another host");
        drop(second);
        assert_eq!(first.ended(), [1]);
    }
}
