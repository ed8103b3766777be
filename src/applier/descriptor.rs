//! Descriptions of page memory, for transports that register the memory.

use remanent_format::{Epoch, PageId, PageInfo, Place, StoreId};

use crate::device::{EngineDevice, MemoryId};
use crate::error::{Error, Result, Unavailable};

/// The kind of memory that contains a page's bytes, named as in transport libraries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryKind {
    /// The GPU's own memory.
    Device,
    /// Host memory that is registered with the GPU's driver, and therefore page-locked.
    Pinned,
    /// Ordinary host memory.
    Host,
    /// Memory that moves between the host and the GPU on page faults.
    Unified,
}

/// The location of a page's bytes in this process, for a transport that reads page memory directly, such as NIXL, UCX
/// or verbs.
///
/// The address is valid for the lifetime of the [`Lease`](crate::Lease) or [`Pin`](crate::Pin) that returned
/// this description. End the transport's registration before the lease or pin ends. Transports may only read,
/// because their writes would not be logged.
///
/// ```no_run
/// # fn register(address: u64, len: u64, gpu: Option<u32>) {}
/// # let store = remanent::Store::temporary()?;
/// # let page = remanent::PageId(1);
/// let lease = store.lease(page)?;
/// let memory = lease.descriptor()?;
/// register(memory.address, memory.len, memory.gpu);
/// // A peer is told which version of which page it reads.
/// println!("{}", memory.to_json());
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryDescriptor {
    /// The address of the first byte, for GPU kernels and for transports of this process.
    pub address: u64,
    /// The page's length in bytes.
    pub len: u64,
    /// The kind of memory.
    pub kind: MemoryKind,
    /// The CUDA ordinal, in this process, of the GPU that owns the memory or with which it is registered, or `None`
    /// without such a GPU.
    pub gpu: Option<u32>,
    /// The id of the store.
    pub store: StoreId,
    /// The id of the page.
    pub page: PageId,
    /// The epoch of the page: the leased version, or the version at the time when the page was pinned.
    pub epoch: Epoch,
}

impl MemoryDescriptor {
    /// Describes a page's memory.
    ///
    /// # Errors
    /// `Unavailable` if the memory has no permanent address, as on a host-only device.
    pub(crate) fn of(
        device: &EngineDevice,
        memory: MemoryId,
        store: StoreId,
        info: &PageInfo,
    ) -> Result<Self> {
        let kind = match info.place {
            Place::Device(_) => MemoryKind::Device,
            Place::Pinned => MemoryKind::Pinned,
            Place::Unified => MemoryKind::Unified,
            // A page on disk is neither leased nor pinned.
            _ => MemoryKind::Host,
        };
        let reason = match info.len {
            0 => "an empty page has no address",
            _ => "pages in memory of the host alone have no address that lasts: read them by `Store::read`",
        };
        let nowhere = Error::Unavailable(Unavailable::Place { place: info.place, reason });
        let addresses = device.abilities().addresses;
        let address = addresses.and_then(|addresses| addresses.address(memory)).ok_or(nowhere)?;
        let gpu = addresses.and_then(|addresses| addresses.gpu_of(memory));
        let (page, len, epoch) = (info.page, info.len, info.epoch);
        Ok(Self { address, len, kind, gpu, store, page, epoch })
    }

    /// Returns the description as a JSON object, for another process or language. Numbers are decimal, and the store's
    /// id is a string.
    #[must_use]
    pub fn to_json(&self) -> String {
        let Self { address, len, kind, gpu, store, page, epoch } = self;
        let gpu = gpu.map_or_else(|| "null".to_owned(), |gpu| gpu.to_string());
        format!(
            "{{\"version\":1,\"address\":{address},\"len\":{len},\"kind\":\"{kind}\",\"gpu\":{gpu},\
             \"store\":\"{store}\",\"page\":{page},\"epoch\":{epoch}}}"
        )
    }
}

impl std::fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            MemoryKind::Device => "device",
            MemoryKind::Pinned => "pinned",
            MemoryKind::Host => "host",
            MemoryKind::Unified => "unified",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptor_serializes_as_json() {
        let memory = MemoryDescriptor {
            address: 0x7f00_0000_1000,
            len: 4096,
            kind: MemoryKind::Pinned,
            gpu: Some(2),
            store: StoreId([0xab; 16]),
            page: PageId(7),
            epoch: Epoch(3),
        };
        let id = "ab".repeat(16);
        assert_eq!(
            memory.to_json(),
            format!(
                "{{\"version\":1,\"address\":139637976731648,\"len\":4096,\"kind\":\"pinned\",\"gpu\":2,\
                 \"store\":\"{id}\",\"page\":7,\"epoch\":3}}"
            )
        );
        let on_host = MemoryDescriptor { gpu: None, kind: MemoryKind::Host, ..memory };
        assert!(on_host.to_json().contains("\"kind\":\"host\",\"gpu\":null"));
    }
}
