//! A device whose n-th call fails, to see that every error is handled.
//!
//! The failed call does nothing else. A fault that takes the context with it makes every later call fail too,
//! as a GPU's does; any other fault strikes once.

use std::sync::Arc;

use remanent_format::Place;

use crate::base::sync::Mutex;
use crate::device::{
    CallerMemory, CommandList, Device, Fence, Lane, MemoryId, MemoryStats, PageBytes, Pending, RawStream,
    Staging,
};
use crate::error::{Error, Result};

/// A device that passes everything on to another one until its fault strikes.
pub struct FaultyDevice {
    inner: Arc<dyn Device>,
    state: Mutex<FaultState>,
}

/// A call that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceCall {
    /// A call of [`Device::allocate`].
    Allocate,
    /// A call of [`Device::release`].
    Release,
    /// A call of [`Device::staging`].
    Staging,
    /// A call of [`Device::submit`].
    Submit,
    /// A call of [`Device::wait`].
    Wait,
    /// A call of [`Device::after`].
    After,
    /// A call of [`Device::wait_external`].
    WaitExternal,
    /// A call of [`Device::signal_external`].
    SignalExternal,
    /// A call of [`Device::adopt`].
    Adopt,
    /// A call of [`Device::wait_stream`].
    WaitStream,
}

/// The call that fails, and how it fails.
#[derive(Clone, Copy, Debug)]
pub struct DeviceFault {
    /// The calls that count; `None` counts all of them.
    pub call: Option<DeviceCall>,
    /// The number of the failing call among them, from 1, counted from the moment the fault is armed.
    pub nth: u64,
    /// Whether the process's device context goes with it.
    pub context_lost: bool,
}

#[derive(Default)]
struct FaultState {
    armed: Option<DeviceFault>,
    counted: u64,
    lost: Option<Error>,
}

impl FaultyDevice {
    /// A device that does not fail until [`arm`](Self::arm) is called.
    #[must_use]
    pub fn new(inner: Arc<dyn Device>) -> Self {
        Self { inner, state: Mutex::default() }
    }

    /// Sets the fault, in place of an earlier one that has not struck.
    pub fn arm(&self, fault: DeviceFault) {
        let mut state = self.state.lock();
        state.armed = Some(fault);
        state.counted = 0;
    }

    /// Whether the fault that was set last has struck.
    #[must_use]
    pub fn struck(&self) -> bool {
        self.state.lock().armed.is_none()
    }

    /// Counts a call and fails it if its turn has come.
    fn enter(&self, call: DeviceCall) -> Result<()> {
        let mut state = self.state.lock();
        if let Some(error) = &state.lost {
            return Err(error.clone());
        }
        let Some(fault) = state.armed.filter(|fault| fault.call.is_none_or(|counted| counted == call)) else {
            return Ok(());
        };
        state.counted += 1;
        if state.counted < fault.nth {
            return Ok(());
        }
        state.armed = None;
        let error = Error::Device {
            reason: format!("{call:?} failed as arranged"),
            context_lost: fault.context_lost,
        };
        if fault.context_lost {
            state.lost = Some(error.clone());
        }
        Err(error)
    }
}

impl Device for FaultyDevice {
    fn label(&self) -> String {
        format!("faulty {}", self.inner.label())
    }

    fn allocate(&self, place: Place, len: u64) -> Result<MemoryId> {
        self.enter(DeviceCall::Allocate)?;
        self.inner.allocate(place, len)
    }

    fn allocate_at_once(&self, place: Place, len: u64) -> Result<MemoryId> {
        self.enter(DeviceCall::Allocate)?;
        self.inner.allocate_at_once(place, len)
    }

    fn allocates_zeros(&self, place: Place, len: u64) -> bool {
        self.inner.allocates_zeros(place, len)
    }

    fn release(&self, memory: MemoryId) -> Result<()> {
        self.enter(DeviceCall::Release)?;
        self.inner.release(memory)
    }

    fn staging(&self, len: usize) -> Result<Staging> {
        self.enter(DeviceCall::Staging)?;
        self.inner.staging(len)
    }

    fn submit(&self, lane: Lane, list: CommandList) -> Result<Pending> {
        self.enter(DeviceCall::Submit)?;
        self.inner.submit(lane, list)
    }

    fn reached(&self, lane: Lane) -> u64 {
        self.inner.reached(lane)
    }

    fn wait(&self, fence: Fence) -> Result<()> {
        self.enter(DeviceCall::Wait)?;
        self.inner.wait(fence)
    }

    fn after(&self, lane: Lane, fence: Fence) -> Result<()> {
        self.enter(DeviceCall::After)?;
        self.inner.after(lane, fence)
    }

    fn wait_external(&self, lane: Lane, stream: RawStream) -> Result<()> {
        self.enter(DeviceCall::WaitExternal)?;
        self.inner.wait_external(lane, stream)
    }

    fn signal_external(&self, stream: RawStream, fence: Fence) -> Result<()> {
        self.enter(DeviceCall::SignalExternal)?;
        self.inner.signal_external(stream, fence)
    }

    fn wait_stream(&self, stream: RawStream) -> Result<()> {
        self.enter(DeviceCall::WaitStream)?;
        self.inner.wait_stream(stream)
    }

    fn address(&self, memory: MemoryId) -> Option<u64> {
        self.inner.address(memory)
    }

    fn bytes(&self, memory: MemoryId) -> Option<PageBytes> {
        self.inner.bytes(memory)
    }

    fn trim(&self) -> Result<u64> {
        self.inner.trim()
    }

    fn memory_stats(&self) -> Vec<(Place, MemoryStats)> {
        self.inner.memory_stats()
    }

    fn adopt(&self, memory: &CallerMemory) -> Result<(MemoryId, Place)> {
        self.enter(DeviceCall::Adopt)?;
        self.inner.adopt(memory)
    }
}

impl std::fmt::Debug for FaultyDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FaultyDevice").field("device", &self.label()).finish_non_exhaustive()
    }
}
