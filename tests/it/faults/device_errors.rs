//! Device errors at every call, one at a time.

use remanent::error::Remedy;
use remanent::options::{MemoryOptions, PageLoad};
use remanent::testing::faulty_device::{DeviceCall, DeviceFault, FaultyDevice};
use remanent::testing::late_device::LateDevice;

use super::*;

const CALLS: [DeviceCall; 6] = [
    DeviceCall::Allocate,
    DeviceCall::Release,
    DeviceCall::Staging,
    DeviceCall::Submit,
    DeviceCall::Wait,
    DeviceCall::After,
];

fn devices() -> [Arc<dyn Device>; 2] {
    let host = || Arc::new(HostDevice::new());
    [host(), Arc::new(LateDevice::seeded(host(), 7))]
}

/// Runs `case` with a failure of the first, the second, … call of each kind until there are no more calls, on
/// a device that executes early and on one that executes late. `case` returns true if the fault was hit.
fn at_every_call(
    calls: &[DeviceCall],
    case: impl Fn(Arc<dyn Device>, DeviceFault) -> bool + Send + Sync + Copy + 'static,
) {
    for &call in calls {
        for context_lost in [false, true] {
            for kind in 0..2 {
                for nth in 1.. {
                    let fault = DeviceFault { call: Some(call), nth, context_lost };
                    let struck = Arc::new(AtomicBool::new(false));
                    let (told, [early, late]) = (struck.clone(), devices());
                    let inner = if kind == 0 { early } else { late };
                    let name = format!("{fault:?} on {}", inner.label());
                    watched(&name, move || told.store(case(inner, fault), Ordering::SeqCst));
                    if !struck.load(Ordering::SeqCst) {
                        assert!(nth > 1, "there is no {call:?} at all");
                        break;
                    }
                }
            }
        }
    }
}

fn is_the_fault(error: &Error) -> bool {
    error.to_string().contains("failed as arranged")
}

#[test]
fn device_error_stops_store_and_log_is_complete() {
    at_every_call(&CALLS, |inner, fault| {
        let disk = SimDisk::new();
        let device = Arc::new(FaultyDevice::new(inner));
        let store = open(&disk, device.clone()).unwrap();
        let mut line = Line::begin(&store);
        device.arm(fault);
        let outcome = line.work(&store);
        if let Err(error) = outcome {
            assert!(is_the_fault(&error), "{error}");
            let cause = poisoned(&store);
            assert!(is_the_fault(&cause), "{cause}");
            let remedy = if fault.context_lost { Remedy::NewProcess } else { Remedy::Reopen };
            assert_eq!((error.remedy(), cause.remedy()), (remedy, remedy));
        }
        // All bytes that can still be read are correct. A lost list must not expose old bytes.
        let read = line.check_read(&store);
        assert!(read.as_ref().err().is_none_or(is_the_fault), "{read:?}");
        let struck = device.struck();
        drop(store);

        // The log does not need the device. All logged batches are synced, and a seal records this.
        for disk in [disk.after_power_cut(), disk] {
            let store = open_on_host(&disk).unwrap();
            assert_eq!(store.recovered().copied_batches, 0, "the log was not sealed");
            line.check(&store, line.logged);
        }
        struck
    });
}

/// Pages are loaded while the store is in use. Each read returns the right bytes or the error, and no thread
/// hangs.
#[test]
fn device_error_during_load_stops_store() {
    let calls = [DeviceCall::Staging, DeviceCall::Submit, DeviceCall::Wait];
    at_every_call(&calls, |inner, fault| {
        let disk = SimDisk::new();
        let store = open_on_host(&disk).unwrap();
        let mut line = Line::begin(&store);
        line.commits(&store, 4).unwrap();
        store.snapshot().unwrap();
        drop(store);

        let gauge = Gauge::new(inner);
        let device = Arc::new(FaultyDevice::new(gauge.clone()));
        device.arm(fault);
        let opened =
            open_with(&disk, device.clone(), small().memory(MemoryOptions::new().load(PageLoad::OnDemand)));
        let mut may_keep = fault.context_lost;
        match opened {
            Ok(store) => {
                assert!(store.recovered().unloaded_pages > 0);
                let loaded = store.wait_loaded();
                assert!(loaded.as_ref().err().is_none_or(is_the_fault), "{loaded:?}");
                let read = line.check_read(&store);
                assert!(read.as_ref().err().is_none_or(is_the_fault), "{read:?}");
                if let Err(error) = loaded {
                    assert!(is_the_fault(&poisoned(&store)), "{error}");
                    assert!(read.is_err(), "a page that is not loaded was read");
                }
                // After a fault in the last list, no later list shows when memory is free.
                may_keep |= !device.struck();
            }
            Err(error) => assert!(is_the_fault(&error), "{error}"),
        }
        assert!(gauge.live() == 0 || (device.struck() && may_keep), "{} allocations are left", gauge.live());
        line.check(&open_on_host(&disk).unwrap(), line.logged);
        device.struck()
    });
}

#[test]
fn device_error_during_open_changes_nothing() {
    let (DeviceCall::After, calls) = CALLS.split_last().unwrap() else { panic!("opening uses one lane") };
    at_every_call(calls, |inner, fault| {
        let disk = SimDisk::new();
        let store = open_on_host(&disk).unwrap();
        let mut line = Line::begin(&store);
        line.commits(&store, 4).unwrap();
        store.snapshot().unwrap();
        line.commits(&store, 4).unwrap();
        let mut batch = store.batch();
        batch.resize(line.second, 50);
        store.commit(batch).unwrap();
        line.logged += 1;
        line.steps.push(line.logged - 1);
        drop(store);

        let gauge = Gauge::new(inner);
        let device = Arc::new(FaultyDevice::new(gauge.clone()));
        device.arm(fault);
        let opened = open(&disk, device.clone());
        // If the device rejects calls, or work of unknown extent is running, memory is not freed.
        let may_keep = fault.context_lost
            || opened.is_ok()
            || matches!(fault.call, Some(DeviceCall::Release | DeviceCall::Wait));
        match opened {
            Ok(store) => {
                let read = line.check_read(&store);
                assert!(read.as_ref().err().is_none_or(is_the_fault), "{read:?}");
            }
            Err(error) => {
                assert!(is_the_fault(&error), "{error}");
                let remedy = if fault.context_lost { Remedy::NewProcess } else { Remedy::Reopen };
                assert_eq!(error.remedy(), remedy);
            }
        }
        assert!(gauge.live() == 0 || (device.struck() && may_keep), "{} allocations are left", gauge.live());
        line.check(&open_on_host(&disk).unwrap(), line.logged);
        device.struck()
    });
}
