//! A driver without a required function causes an error that names the function, never a panic.
//!
//! Faulty drivers are compiled here, and placed first in the library path of a child process, because a process loads a
//! library only once.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command as Process;

use remanent::device::Device;
use remanent::device::cuda::CudaDevice;
use remanent::error::{Remedy, Unavailable};
use remanent::{DeviceChoice, Error, Options, Store};

use super::{ERRAND, assert_success, in_a_child};
use crate::gpu;
use crate::machine::skipped;

fn compiler() -> OsString {
    std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into())
}

/// Compiles a library that contains these entry points. Returns its path.
fn driver(directory: &Path, source: &str) -> PathBuf {
    let (file, library) = (directory.join("driver.rs"), directory.join("libcuda.so"));
    std::fs::write(&file, format!("#![allow(non_snake_case)]\n{source}")).unwrap();
    let mut compile = Process::new(compiler());
    compile.args(["--edition", "2024", "--crate-type", "cdylib", "-C", "panic=abort", "-o"]);
    let compiled = compile.arg(&library).arg(&file).output().expect("the compiler that built this test");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    library
}

/// Returns the source of an entry point that stores `written` through its first argument and returns `code`.
fn entry(name: &str, written: Option<i32>, code: u32) -> String {
    let write = written.map_or(String::new(), |value| format!("unsafe {{ *at = {value} }};"));
    format!(
        "#[unsafe(no_mangle)] pub extern \"C\" fn {name}(at: *mut i32) -> u32 {{ let _ = at; {write} {code} }}\n"
    )
}

/// Returns the source of every required entry point except the special ones. These entry points have no effect.
fn all_but(special: &[&str]) -> String {
    let source = include_str!("../../../src/device/cuda/driver.rs");
    let names = source.match_indices("= \"cu").map(|(at, _)| {
        let name = &source[at + 3..];
        &name[..name.find('"').unwrap()]
    });
    let names: Vec<&str> = names.filter(|name| !special.contains(name)).collect();
    assert!(names.len() > 20, "entry points found: {names:?}");
    names.into_iter().map(|name| entry(name, None, 999)).collect()
}

#[test]
fn unusable_driver_is_an_error() {
    if let Ok(reason) = std::env::var(ERRAND) {
        let requested = CudaDevice::open(0).expect_err("the driver cannot be used");
        assert!(requested.to_string().contains(&reason), "{requested}");
        assert_eq!(requested.remedy(), Remedy::ChangeCall);
        let store = Store::temporary().unwrap();
        assert!(store.recovered().device.contains(&reason), "{}", store.recovered().device);
        let refused = Options::new().device(DeviceChoice::Cuda(0)).open_temporary().unwrap_err();
        assert!(
            matches!(&refused, Error::Unavailable(Unavailable::Device { device, .. }) if device == "cuda:0"),
            "{refused}"
        );
        return;
    }
    // The suite may run on a machine that has no compiler and did not build the suite.
    if let Err(error) = Process::new(compiler()).arg("--version").output() {
        skipped("drivers that cannot be used", &format!("they take a compiler: {error}"));
        return;
    }
    let init = |code| entry("cuInit", None, code);
    let version = |number| entry("cuDriverGetVersion", Some(number), 0);
    let count = |number| entry("cuDeviceGetCount", Some(number), 0);
    let rest = all_but(&["cuInit", "cuDriverGetVersion", "cuDeviceGetCount"]);
    let rows = [
        ("the CUDA driver is too old: it has no cuDriverGetVersion", init(0)),
        (
            "the CUDA driver does not start: cuInit: no device (100)",
            init(100) + &version(12_040) + &count(0) + &rest,
        ),
        (
            "the CUDA driver does not start: cuInit: an error unknown here (4711)",
            init(4711) + &version(12_040) + &count(0) + &rest,
        ),
        (
            "the CUDA driver has version 11.8, but 12.4 is required",
            init(0) + &version(11_080) + &count(1) + &rest,
        ),
        ("the CUDA driver lists 0 GPUs", init(0) + &version(12_040) + &count(0) + &rest),
        ("cuDeviceGet: unknown (999)", init(0) + &version(12_040) + &count(1) + &rest),
    ];
    for (reason, source) in rows {
        let directory = tempfile::tempdir().unwrap();
        driver(directory.path(), &source);
        let test = "drivers::unusable_driver_is_an_error";
        assert_success(&in_a_child(test, reason, Some(directory.path())));
    }
}

#[test]
fn the_choice_of_a_device_is_kept_and_reported() {
    let device = |choice| {
        let store = Options::new().device(choice).open_temporary().unwrap();
        store.recovered().device.clone()
    };
    assert_eq!(device(DeviceChoice::Host), "host");
    let beyond = Options::new().device(DeviceChoice::Cuda(1000)).open_temporary().unwrap_err();
    assert!(
        matches!(&beyond, Error::Unavailable(Unavailable::Device { device, .. }) if device == "cuda:1000"),
        "{beyond}"
    );
    match gpu::device() {
        Some(gpu) => {
            assert!(gpu.label().starts_with("cuda:0 (") && CudaDevice::count().unwrap() > 0);
            assert_eq!(
                [device(DeviceChoice::Auto), device(DeviceChoice::Cuda(0))],
                [gpu.label(), gpu.label()]
            );
        }
        None => assert!(device(DeviceChoice::Auto).starts_with("host, no GPU: ")),
    }
}
