//! Compiles the kernels, and the simulator that runs them.

use std::path::Path;
use std::process::Command;
use std::{env, fs};

/// Misaligned accesses and shifts out of range abort the process, because they would also be wrong on a GPU.
const FLAGS: &[&str] = &[
    "-std=c++17",
    "-O1",
    "-g",
    "-fPIC",
    "-fno-strict-aliasing",
    "-fsanitize=alignment,shift,bounds",
    "-fsanitize-undefined-trap-on-error",
    "-Wall",
    "-Werror",
    "-Wno-unknown-pragmas",
];

fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(status.success(), "{command:?}: {status}");
}

fn main() {
    let kernels = Path::new("../../kernels");
    let out = env::var("OUT_DIR").expect("cargo names a folder");
    let out = Path::new(&out);
    let compiler = env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let mut objects = Vec::new();
    let mut sources: Vec<_> = fs::read_dir(kernels)
        .expect("the kernels are there")
        .map(|entry| entry.expect("the folder can be read").path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "cu"))
        .collect();
    sources.push("machine.cpp".into());
    sources.sort();
    for source in sources {
        let object = out.join(source.file_name().expect("a file has a name")).with_extension("o");
        let mut command = Command::new(&compiler);
        command.args(FLAGS).args(["-I", "../../kernels", "-include", "machine.h", "-x", "c++", "-c"]);
        run(command.arg(&source).arg("-o").arg(&object));
        objects.push(object);
    }
    let library = out.join("libkernels.a");
    // `ar` would keep the old members of an existing archive.
    let _ = fs::remove_file(&library);
    run(Command::new("ar").arg("crs").arg(&library).args(&objects));
    println!("cargo::rustc-link-search=native={}", out.display());
    println!("cargo::rustc-link-lib=static=kernels");
    println!("cargo::rustc-link-lib=dylib=stdc++");
    for input in ["../../kernels", "machine.cpp", "machine.h", "build.rs"] {
        println!("cargo::rerun-if-changed={input}");
    }
}
