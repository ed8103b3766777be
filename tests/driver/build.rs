//! Sets the library's name for the dynamic linker to that of a driver. Once a test has loaded the library by its path, a
//! search for the driver finds it.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
    println!("cargo::rerun-if-changed=build.rs");
}
