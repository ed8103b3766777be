//! The library is found by its name, a variable or a path, and a library that cannot be used is refused with its reason.

use std::path::{Path, PathBuf};
use std::process::Command;

use remanent::Error;
use remanent::error::Remedy;
use remanent::nccl::{Nccl, NcclError};

use crate::ground::built;

/// The functions that a library must have.
const FUNCTIONS: [&str; 12] = [
    "ncclGetVersion",
    "ncclGetUniqueId",
    "ncclGetLastError",
    "ncclCommInitRankConfig",
    "ncclCommFinalize",
    "ncclCommDestroy",
    "ncclCommAbort",
    "ncclCommGetAsyncError",
    "ncclAllReduce",
    "ncclAllGather",
    "ncclReduceScatter",
    "ncclBroadcast",
];

/// Compiles a library with these functions, which all do nothing, and a version.
fn compile(folder: &Path, name: &str, functions: &[&str], version: u32) -> PathBuf {
    let source = folder.join("library.c");
    let mut text = String::new();
    for function in functions {
        text += &match *function {
            "ncclGetVersion" => {
                format!("int ncclGetVersion(int *version) {{ *version = {version}; return 0; }}\n")
            }
            "ncclGetLastError" => "const char *ncclGetLastError(void *none) { return 0; }\n".to_owned(),
            other => format!("int {other}(void) {{ return 3; }}\n"),
        };
    }
    std::fs::write(&source, text).unwrap();
    let library = folder.join(name);
    let compiler = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
    assert!(compiler.expect("a C compiler").success());
    library
}

fn refused(path: impl AsRef<Path>) -> NcclError {
    match Nccl::load_from(path) {
        Err(Error::Nccl(error)) => *error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn missing_functions_are_named() {
    let folder = tempfile::tempdir().unwrap();
    for missing in FUNCTIONS {
        let others: Vec<&str> = FUNCTIONS.into_iter().filter(|name| *name != missing).collect();
        let path = compile(folder.path(), &format!("without_{missing}.so"), &others, 22_803);
        let expected =
            NcclError::MissingSymbol { library: path.to_str().unwrap().to_owned(), symbol: missing };
        assert_eq!(refused(&path), expected);
    }
    let complete = compile(folder.path(), "complete.so", &FUNCTIONS, 22_803);
    let nccl = Nccl::load_from(&complete).unwrap();
    assert_eq!((nccl.version(), nccl.path()), ((2, 28, 3), complete.to_str().unwrap()));
    // A call that fails without a text.
    let Err(Error::Nccl(error)) = nccl.unique_id() else { panic!("it returns 3") };
    assert_eq!(error.to_string(), "rank 0 of 1: ncclGetUniqueId: internal error (3)");
}

#[test]
fn old_version_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    for (number, name) in [(2_708, "2.7.8"), (21_704, "2.17.4")] {
        let path = compile(folder.path(), &format!("{number}.so"), &FUNCTIONS, number);
        let error = Error::from(refused(&path));
        assert!(
            error.to_string().contains(&format!("is NCCL {name}, but 2.18.0 is required; install")),
            "{error}"
        );
        assert_eq!(error.remedy(), Remedy::Permit);
    }
    let oldest = compile(folder.path(), "oldest.so", &FUNCTIONS, 21_800);
    assert_eq!(Nccl::load_from(oldest).unwrap().version(), (2, 18, 0));
}

#[test]
fn error_lists_every_path_that_was_tried() {
    let folder = tempfile::tempdir().unwrap();
    let NcclError::NotFound { tried } = refused(folder.path()) else { panic!("an empty folder") };
    let names: Vec<_> = tried.iter().map(|(path, _)| path.rsplit('/').next().unwrap()).collect();
    assert_eq!(names, ["libnccl.so.2", "libnccl.so"]);
    let no_library = folder.path().join("text");
    std::fs::write(&no_library, "no library").unwrap();
    let error = Error::from(refused(&no_library));
    let text = error.to_string();
    assert!(
        text.contains(no_library.to_str().unwrap()) && text.contains("pip install nvidia-nccl-cu12"),
        "{text}"
    );
    // A folder with the library.
    compile(folder.path(), "libnccl.so.2", &FUNCTIONS, 22_803);
    assert!(Nccl::load_from(folder.path()).unwrap().path().ends_with("/libnccl.so.2"));
}

/// Loads the library in a process with other variables.
fn load_in_child(variables: &[(&str, &Path)]) -> String {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "loading::child_prints_what_it_loads", "--nocapture"]).env("LOADING_CHILD", "1");
    child.env_remove("REMANENT_NCCL").envs(variables.iter().copied());
    String::from_utf8_lossy(&child.output().unwrap().stdout).into_owned()
}

#[test]
fn child_prints_what_it_loads() {
    if std::env::var_os("LOADING_CHILD").is_some() {
        match Nccl::load() {
            Ok(nccl) => println!("loaded {} {:?}", nccl.path(), nccl.version()),
            Err(error) => println!("failed {error}"),
        }
    }
}

#[test]
fn library_is_found_by_variable_linker_and_wheel() {
    let fake = built("libfake_nccl.so");
    let output = load_in_child(&[("REMANENT_NCCL", &fake)]);
    assert!(output.contains(&format!("loaded {} (2, 28, 3)", fake.display())), "{output}");
    let output = load_in_child(&[("REMANENT_NCCL", Path::new("/nowhere/libnccl.so.2"))]);
    assert!(output.contains("failed could not load the NCCL library: /nowhere/libnccl.so.2 ("), "{output}");

    let folder = tempfile::tempdir().unwrap();
    compile(folder.path(), "libnccl.so.2", &FUNCTIONS, 22_001);
    let output = load_in_child(&[("LD_LIBRARY_PATH", folder.path())]);
    assert!(output.contains("loaded libnccl.so.2 (2, 20, 1)"), "{output}");

    // Without an entry of the linker, the wheel in the environment is loaded. A library of the machine comes first.
    let environment = tempfile::tempdir().unwrap();
    let wheel = environment.path().join("lib/python3.11/site-packages/nvidia/nccl/lib");
    std::fs::create_dir_all(&wheel).unwrap();
    compile(&wheel, "libnccl.so.2", &FUNCTIONS, 22_102);
    let output = load_in_child(&[("VIRTUAL_ENV", environment.path())]);
    let is_wheel = output.contains(&format!("loaded {} (2, 21, 2)", wheel.join("libnccl.so.2").display()));
    assert!(is_wheel || output.contains("loaded libnccl.so"), "{output}");
}
