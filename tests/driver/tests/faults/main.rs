//! Makes every driver call fail once. Each fault must cause a typed error or have no effect. It must never
//! cause a panic, a hang or a leak, and all acknowledged batches must still exist afterwards.
//!
//! The driver library is loaded before the store searches for a driver, so the store uses it.

mod driver;
#[path = "../../../it/size.rs"]
mod size;
mod work;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use remanent::device::Device;
use remanent::device::cuda::CudaDevice;
use remanent::device::host::HostDevice;
use remanent::error::{Remedy, Unavailable};
use remanent::options::{Compression, ImageIo, ImageOptions, Retention, SnapshotSchedule};
use remanent::{Error, Options, Place, Result, SnapshotId, StatePoint};

use self::driver::{CallerStream, Driver};
use self::size::sized;
use self::work::Work;

/// Error codes of rejected calls, and of faults that destroy the context.
const INVALID_VALUE: u32 = 1;
const OUT_OF_MEMORY: u32 = 2;
const ILLEGAL_ADDRESS: u32 = 700;
const LAUNCH_FAILED: u32 = 719;
/// The first GPU that no other test uses.
const SPARE_GPU: u32 = 1 << 16;

/// Timeout of a test, so that a hang does not block the run.
const HANG: Duration = Duration::from_secs(120);

/// The distance between the calls that fail: 1 with `REMANENT_DRIVER_CALLS=every`, otherwise 8, which saves
/// minutes, or 24 in a sample. Each of the three codes starts at a different call, so that together they
/// cover three times as many calls.
fn stride() -> u64 {
    if std::env::var("REMANENT_DRIVER_CALLS").is_ok_and(|calls| calls == "every") { 1 } else { sized(24, 8) }
}

/// Returns the number of the first call that fails with `code`, for a distance of `stride`.
fn first(code: u32, stride: u64) -> u64 {
    let part = match code {
        INVALID_VALUE => 0,
        OUT_OF_MEMORY => 1,
        _ => 2,
    };
    1 + part * stride / 3
}

/// The workload of a store on one GPU or several, with or without kernels.
#[derive(Clone, Copy, PartialEq)]
enum Life<'g> {
    Plain(&'g [u32]),
    WithKernels(u32),
}

/// Runs a workload during which the `nth` call fails with `code`. Returns true if the workload reached that
/// call.
fn live_through(driver: &'static Driver, life: Life<'_>, nth: u64, code: u32) -> bool {
    let (done, finished) = channel();
    let label = format!("call {nth} fails with {code}");
    let (gpus, mut work) = match life {
        Life::Plain(gpus) => (gpus.to_vec(), Work::new()),
        Life::WithKernels(gpu) => (vec![gpu], Work::with_kernels(driver.stream(gpu))),
    };
    let living = std::thread::spawn(move || {
        let arm = || driver.arm(nth, code);
        let lived = catch_unwind(AssertUnwindSafe(|| work.live(&gpus, arm)));
        let struck = driver.disarm();
        done.send((struck, lived, work)).expect("the test waits, or has failed");
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
        // If the device was never opened, another test may still be able to open it.
        let is_new_process = error.remedy() == Remedy::NewProcess;
        let never_opened = matches!(error, Error::Unavailable(Unavailable::Device { .. }));
        assert!(never_opened || is_new_process == (code == LAUNCH_FAILED), "{label}: {error}");
    }
    // All acknowledged batches are on disk, regardless of the state of the GPU.
    let host = work.open(Arc::new(HostDevice::new()));
    host.and_then(|store| work.check(&store)).unwrap_or_else(|error| panic!("{label}: {error}"));
    if !(struck && code == LAUNCH_FAILED) {
        work.into_stream().into_iter().for_each(CallerStream::destroy);
    }
    struck
}

#[test]
fn failed_call_without_kernels_is_error_or_harmless() {
    let (driver, _turn) = Driver::get();
    // One GPU loads machine code, and the other loads PTX.
    for (code, gpu) in [(INVALID_VALUE, 0), (OUT_OF_MEMORY, 1)] {
        refuse_calls(driver, Life::Plain(&[gpu]), (gpu, code), stride());
    }
}

#[test]
fn failed_call_with_kernels_is_error_or_harmless() {
    let (driver, _turn) = Driver::get();
    driver.set_devices(1 << 20);
    let gpu = SPARE_GPU + 2000;
    // Only one in seven or eleven calls fails, because most calls only poll whether the GPU has completed its
    // work, and one workload takes a tenth of a second.
    for (code, gpu, one_of) in [(INVALID_VALUE, gpu, 7), (OUT_OF_MEMORY, gpu + 1, 11)] {
        refuse_calls(driver, Life::WithKernels(gpu), (gpu, code), one_of * stride());
    }
    driver.set_devices(2);
}

/// Makes every `stride`-th call of a workload fail, with one run per call.
fn refuse_calls(driver: &'static Driver, life: Life<'_>, (gpu, code): (u32, u32), stride: u64) {
    assert!(!live_through(driver, life, u64::MAX, code));
    assert_eq!(driver.alive(gpu), 0, "a store that was closed leaves nothing");
    let (mut nth, mut left) = (first(code, stride), 0);
    while live_through(driver, life, nth, code) {
        // Each fault may leak only the resource whose release the driver rejected.
        let now = driver.alive(gpu);
        let may_stay = u64::from(driver.struck_giving_back());
        assert!(
            now <= left + may_stay,
            "call {nth} fails with {code}: {now} things are alive, {left} before"
        );
        (nth, left) = (nth + stride, now);
    }
    println!("{nth} calls on {gpu} failed with {code}; {left} of them left something");
    assert!(nth > 100, "{nth} calls");
}

#[test]
fn device_fault_requires_new_process_without_loss() {
    let (driver, _turn) = Driver::get();
    // Each case needs another GPU, because a lost context cannot be recovered.
    driver.set_devices(1 << 20);
    let mut nth = first(LAUNCH_FAILED, stride());
    while live_through(driver, Life::Plain(&[1 + nth as u32]), nth, LAUNCH_FAILED) {
        driver.forget(1 + nth as u32);
        nth += stride();
    }
    println!("{nth} calls failed with {LAUNCH_FAILED}");
    assert!(nth > 100, "{nth} calls");
    // With kernels: at most one in 13 calls fails.
    let (base, stride) = (SPARE_GPU / 2, 13 * stride());
    let mut nth = first(LAUNCH_FAILED, stride);
    while live_through(driver, Life::WithKernels(base + nth as u32), nth, LAUNCH_FAILED) {
        driver.forget(base + nth as u32);
        nth += stride;
    }
    println!("{nth} calls among kernels failed with {LAUNCH_FAILED}");
    assert!(nth > 100, "{nth} calls");
    driver.set_devices(2);
}

#[test]
fn store_opens_on_another_gpu_or_host_after_fault() {
    let (driver, _turn) = Driver::get();
    driver.set_devices(1 << 20);
    for round in 0..8 {
        let (lost, other) = (SPARE_GPU + 2 * round, SPARE_GPU + 2 * round + 1);
        let mut work = Work::new();
        let store = work.open(Arc::new(CudaDevice::open(lost).unwrap())).unwrap();
        work.begin(&store).unwrap();
        for _ in 0..round {
            work.step(&store).unwrap();
        }
        // A kernel of another program accesses an illegal address while the store's kernels run.
        driver.lose(lost, ILLEGAL_ADDRESS);
        let noticed = (0..1000).find_map(|_| work.step(&store).err()).expect("a fault is noticed");
        assert_eq!(noticed.remedy(), Remedy::NewProcess, "{noticed}");
        let mut batch = store.batch();
        batch.set_root("after", true);
        let refusals: [Result<()>; 3] = [
            store.commit(batch).map(drop),
            store.snapshot().map(drop),
            store.restore(StatePoint::Snapshot(SnapshotId(1))).map(drop),
        ];
        for refused in refusals {
            let Err(Error::Poisoned(cause)) = refused else { panic!("not poisoned: {refused:?}") };
            assert_eq!(cause.remedy(), Remedy::NewProcess, "{cause}");
            assert!(cause.to_string().contains("illegal address (700)"), "{cause}");
        }
        let again = CudaDevice::open(lost).map(drop);
        assert_eq!(again.expect_err("its context is gone").remedy(), Remedy::NewProcess);
        drop(store);
        driver.forget(lost);

        // The same process, which has lost that GPU, can still open the store on other devices.
        let devices: [(&str, Arc<dyn Device>); 3] = [
            ("the host", Arc::new(HostDevice::new())),
            ("another GPU", Arc::new(CudaDevice::open(other).unwrap())),
            ("the host again", Arc::new(HostDevice::new())),
        ];
        let mut before = None;
        for (name, device) in devices {
            let store = work.open(device).unwrap();
            assert_eq!(store.recovered().copied_batches, 0, "{name}: the log was not sealed");
            work.check(&store).unwrap();
            let state = work.state(&store).unwrap();
            assert_eq!(before.get_or_insert_with(|| state.clone()), &state, "round {round} on {name}");
        }
        let store = work.open(Arc::new(CudaDevice::open(other).unwrap())).unwrap();
        work.step(&store).unwrap();
        work.check(&store).unwrap();
    }
    driver.set_devices(2);
}

#[test]
fn copies_between_gpus_use_the_available_path() {
    let (driver, _turn) = Driver::get();
    driver.set_devices(1 << 20);
    let first = SPARE_GPU + 1000;
    // Neighboring GPUs have peer access. Between other GPUs, bytes are copied through the host.
    for (gpus, is_way) in [([first, first + 1], true), ([first + 1, first + 2], false)] {
        let before = driver.peer_copies();
        assert!(!live_through(driver, Life::Plain(&gpus), u64::MAX, INVALID_VALUE));
        assert_eq!(driver.peer_copies() > before, is_way, "between {gpus:?}");
        assert_eq!(gpus.map(|gpu| driver.alive(gpu)), [0; 2]);
    }
    // In the first case, the driver is asked for peer access before the first fault. In the other cases,
    // faults also occur during that query, with both answers.
    for (gpus, from) in [([first, first + 1], 1), ([first + 4, first + 5], 40), ([first + 7, first + 8], 40)]
    {
        let mut nth = from;
        while live_through(driver, Life::Plain(&gpus), nth, INVALID_VALUE) {
            nth += 3 * stride();
        }
        println!("{nth} calls on {gpus:?} failed with {INVALID_VALUE}");
        assert!(nth > 200, "{nth} calls");
    }
    driver.set_devices(2);
}

/// Snapshots succeed and no device resource leaks, whether or not the driver accepts registrations of files.
#[test]
fn files_use_staging_if_driver_refuses_registration() {
    let (driver, _turn) = Driver::get();
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else {
        eprintln!("SKIPPED: no files in memory");
        return;
    };
    for code in [INVALID_VALUE, OUT_OF_MEMORY, 0] {
        driver.refuse_registrations(code);
        let before = driver.alive(0);
        let device: Arc<dyn Device> = Arc::new(CudaDevice::open(0).unwrap());
        let options = Options::new()
            .images(ImageOptions::new().io(ImageIo::Mapped).compression(Compression::Off).chunk_len(4096));
        let options = options
            .retention(Retention::new().snapshots_kept(1))
            .snapshots(SnapshotSchedule::new().log_bytes(None));
        let store = options.clone().open_with(folder.path().join(code.to_string()), device).unwrap();
        let mut batch = store.batch();
        let page = batch.create(100_000, Place::Device(0)).page();
        batch.fill(page, 0, 100_000, &[1]);
        let page = store.commit(batch).unwrap().pages[0];
        for round in 2..7 {
            let mut batch = store.batch();
            batch.fill(page, 0, 100_000, &[round]);
            store.commit(batch).unwrap();
            store.snapshot().unwrap();
        }
        assert_eq!(store.stats().snapshots.bytes_in_place > 0, code == 0, "{code}");
        store.close().unwrap();
        assert_eq!(driver.alive(0), before, "{code}: something is left");
        let host: Arc<dyn Device> = Arc::new(HostDevice::new());
        let store = options.open_with(folder.path().join(code.to_string()), host).unwrap();
        assert_eq!(store.read_to_vec(page).unwrap(), vec![6; 100_000]);
    }
}
