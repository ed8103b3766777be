//! Gives the library the name by which a driver is looked for: once it is loaded, a caller that asks for that
//! name gets it, wherever it lies.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
    println!("cargo::rerun-if-changed=build.rs");
}
