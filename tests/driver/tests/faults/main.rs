//! Every call of the driver fails once: each fault is a typed error or of no consequence, never a panic, a hang
//! or a leak, and what was acknowledged before it is there afterwards.
//!
//! The driver is loaded before the store looks for one, so the store finds it.

mod driver;
mod work;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use remanent::device::host::HostDevice;
use remanent::{Error, Remedy};

use self::driver::Driver;
use self::work::Work;

/// Codes of calls that were refused, and of a fault that takes the context.
const INVALID_VALUE: u32 = 1;
const OUT_OF_MEMORY: u32 = 2;
const LAUNCH_FAILED: u32 = 719;

/// The limit only turns a hang into a failure.
const HANG: Duration = Duration::from_secs(120);

/// Lives through a fault; whether it struck.
fn live_through(driver: &'static Driver, gpu: u32, nth: u64, code: u32) -> bool {
    let (done, finished) = channel();
    let label = format!("call {nth} fails with {code}");
    let living = std::thread::spawn(move || {
        let mut work = Work::new();
        driver.arm(nth, code);
        let lived = catch_unwind(AssertUnwindSafe(|| work.live(gpu)));
        let struck = driver.disarm();
        done.send((struck, lived, work)).expect("somebody waits, or the test has failed");
    });
    let (struck, lived, work) = match finished.recv_timeout(HANG) {
        Ok(lived) => lived,
        Err(RecvTimeoutError::Timeout) => panic!("{label}: a hang"),
        Err(RecvTimeoutError::Disconnected) => panic!("{label}: the thread ended early"),
    };
    living.join().expect("it caught its panics");
    let result = lived.unwrap_or_else(|_| panic!("{label}: a panic, told above"));
    if let Err(error) = &result {
        assert!(struck, "{label}: an error without a fault: {error}");
        // A device that never was opened is another one's to find.
        let is_new_process = error.remedy() == Remedy::NewProcess;
        let never_opened = matches!(error, Error::DeviceUnavailable { .. });
        assert!(never_opened || is_new_process == (code == LAUNCH_FAILED), "{label}: {error}");
    }
    // What was acknowledged is on the disk whatever became of the GPU.
    let host = work.open(Arc::new(HostDevice::new()));
    host.and_then(|store| work.check(&store)).unwrap_or_else(|error| panic!("{label}: {error}"));
    struck
}

#[test]
fn a_refused_call_is_an_error_or_nothing_and_leaks_nothing() {
    let (driver, _turn) = Driver::get();
    // One GPU loads machine code, the other text.
    for (code, gpu) in [(INVALID_VALUE, 0), (OUT_OF_MEMORY, 1)] {
        assert!(!live_through(driver, gpu, u64::MAX, code));
        assert_eq!(driver.alive(gpu), 0, "a store that was closed leaves nothing");
        let (mut nth, mut left) = (1, 0);
        while live_through(driver, gpu, nth, code) {
            // What the driver refuses to take back stays, and nothing else: one thing a fault.
            let now = driver.alive(gpu);
            assert!(now <= left + 1, "call {nth} fails with {code}: {now} things are alive, {left} before");
            (nth, left) = (nth + 1, now);
        }
        println!("{nth} calls failed with {code}, {left} of them took something back");
        assert!(nth > 100 && left < nth / 4, "{nth} calls, {left} things left");
    }
}

#[test]
fn a_fault_asks_for_a_new_process_and_loses_nothing() {
    let (driver, _turn) = Driver::get();
    // A GPU for each: a context that is lost stays lost.
    driver.set_devices(1 << 20);
    let mut nth = 1;
    while live_through(driver, 1 + nth as u32, nth, LAUNCH_FAILED) {
        driver.forget(1 + nth as u32);
        nth += 1;
    }
    driver.set_devices(2);
    println!("{nth} calls failed with {LAUNCH_FAILED}");
    assert!(nth > 100, "{nth} calls");
}
