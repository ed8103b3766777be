//! Loading the library by its name, by an environment variable or by a path, and the errors of libraries that are not
//! supported.

use std::path::{Path, PathBuf};
use std::process::Command;

use remanent::Error;
use remanent::error::Remedy;
use remanent::nixl::{AgentOptions, Nixl, NixlError};

use crate::ground::{built, failure};

/// The functions that a supported library must have.
const FUNCTIONS: [&str; 35] = [
    "nixl_capi_create_configured_agent",
    "nixl_capi_destroy_agent",
    "nixl_capi_get_local_md",
    "nixl_capi_load_remote_md",
    "nixl_capi_invalidate_remote_md",
    "nixl_capi_create_params",
    "nixl_capi_params_add",
    "nixl_capi_destroy_params",
    "nixl_capi_create_backend",
    "nixl_capi_destroy_backend",
    "nixl_capi_create_opt_args",
    "nixl_capi_opt_args_set_notif_msg",
    "nixl_capi_opt_args_set_has_notif",
    "nixl_capi_destroy_opt_args",
    "nixl_capi_create_reg_dlist",
    "nixl_capi_reg_dlist_add_desc",
    "nixl_capi_destroy_reg_dlist",
    "nixl_capi_register_mem",
    "nixl_capi_deregister_mem",
    "nixl_capi_create_xfer_dlist",
    "nixl_capi_xfer_dlist_add_desc",
    "nixl_capi_destroy_xfer_dlist",
    "nixl_capi_create_xfer_req",
    "nixl_capi_post_xfer_req",
    "nixl_capi_get_xfer_status",
    "nixl_capi_release_xfer_req",
    "nixl_capi_destroy_xfer_req",
    "nixl_capi_gen_notif",
    "nixl_capi_create_notif_map",
    "nixl_capi_get_notifs",
    "nixl_capi_notif_map_size",
    "nixl_capi_notif_map_get_agent_at",
    "nixl_capi_notif_map_get_notifs_size",
    "nixl_capi_notif_map_get_notif",
    "nixl_capi_destroy_notif_map",
];

/// A function of the supported version, and a function that only later versions have.
const SINCE: &str = "nixl_capi_create_remote_dlist";
const AFTER: &str = "nixl_capi_mem_free";

/// Compiles a library with these functions. All of them return errors.
fn compile<'f>(folder: &Path, name: &str, functions: impl IntoIterator<Item = &'f str>) -> PathBuf {
    let source = folder.join("library.c");
    let text: String =
        functions.into_iter().map(|name| format!("int {name}(void) {{ return -2; }}\n")).collect();
    std::fs::write(&source, text).unwrap();
    let library = folder.join(name);
    let compiler = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
    assert!(compiler.expect("a C compiler").success());
    std::fs::canonicalize(library).unwrap()
}

fn refused(path: impl AsRef<Path>) -> NixlError {
    failure(Nixl::load_from(path))
}

fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

#[test]
fn missing_functions_are_reported_by_name() {
    let folder = tempfile::tempdir().unwrap();
    for missing in FUNCTIONS {
        let others = FUNCTIONS.into_iter().filter(|name| *name != missing).chain([SINCE]);
        let path = compile(folder.path(), &format!("without_{missing}.so"), others);
        assert_eq!(refused(&path), NixlError::MissingSymbol { library: text(&path), symbol: missing });
    }
    let complete = compile(folder.path(), "complete.so", FUNCTIONS.into_iter().chain([SINCE]));
    let nixl = Nixl::load_from(&complete).unwrap();
    assert_eq!((nixl.version(), nixl.path()), (None, &*text(&complete)));
    let error = nixl.agent(&AgentOptions::new("a")).unwrap_err().to_string();
    assert!(error.contains(": nixl_capi_create_configured_agent: the backend failed (-2); check"), "{error}");
}

#[test]
fn unsupported_version_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let older = compile(folder.path(), "older.so", FUNCTIONS);
    let newer = compile(folder.path(), "newer.so", FUNCTIONS.into_iter().chain([SINCE, AFTER]));
    for (path, found) in [(&older, "older than 1.5"), (&newer, "newer than 1.5")] {
        let expected =
            NixlError::OtherVersion { library: text(path), found: found.to_owned(), supported: "1.5" };
        assert_eq!(refused(path), expected);
    }
    // The name of a folder next to the wheel contains its version.
    let wheel = folder.path().join(".nixl_cu12.mesonpy.libs");
    std::fs::create_dir(&wheel).unwrap();
    let library = compile(&wheel, "libnixl_capi.so", FUNCTIONS.into_iter().chain([SINCE]));
    let info = folder.path().join("nixl_cu12-1.6.0.dist-info");
    std::fs::create_dir(&info).unwrap();
    let error = Error::from(refused(folder.path()));
    assert!(error.to_string().contains("is NIXL 1.6.0, but 1.5 is required; install NIXL"), "{error}");
    assert_eq!(error.remedy(), Remedy::Permit);
    std::fs::rename(info, folder.path().join("nixl_cu12-1.5.7.dist-info")).unwrap();
    let nixl = Nixl::load_from(folder.path()).unwrap();
    assert_eq!((nixl.version(), nixl.path()), (Some((1, 5, 7)), &*text(&library)));
}

#[test]
fn error_lists_every_path_that_was_tried() {
    let folder = tempfile::tempdir().unwrap();
    let tried = vec![(text(folder.path()), "no wheel of NIXL".to_owned())];
    assert_eq!(refused(folder.path()), NixlError::NotFound { tried });
    let no_library = folder.path().join("text");
    std::fs::write(&no_library, "no library").unwrap();
    let message = Error::from(refused(&no_library)).to_string();
    let parts = [&*text(&no_library), "pip install --no-deps nixl-cu12", "REMANENT_NIXL"];
    assert!(parts.iter().all(|part| message.contains(part)), "{message}");
}

/// Loads the library in a process with these environment variables.
fn load_in_child(variables: &[(&str, &Path)]) -> String {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "loading::child_prints_what_it_loads", "--nocapture"]).env("LOADING_CHILD", "1");
    child.env_remove("REMANENT_NIXL").envs(variables.iter().copied());
    String::from_utf8_lossy(&child.output().unwrap().stdout).into_owned()
}

#[test]
fn child_prints_what_it_loads() {
    if std::env::var_os("LOADING_CHILD").is_some() {
        match Nixl::load() {
            Ok(nixl) => println!("loaded {} {:?}", nixl.path(), nixl.version()),
            Err(error) => println!("failed {error}"),
        }
    }
}

#[test]
fn library_is_found_by_variable_linker_and_wheel() {
    let fake = std::fs::canonicalize(built("libfake_nixl.so")).unwrap();
    let output = load_in_child(&[("REMANENT_NIXL", &fake)]);
    assert!(output.contains(&format!("loaded {} None", fake.display())), "{output}");
    let output = load_in_child(&[("REMANENT_NIXL", Path::new("/nowhere/libnixl_capi.so"))]);
    assert!(
        output.contains("failed could not load the NIXL library: /nowhere/libnixl_capi.so ("),
        "{output}"
    );

    let folder = tempfile::tempdir().unwrap();
    let by_name = compile(folder.path(), "libnixl_capi.so", FUNCTIONS.into_iter().chain([SINCE]));
    let output = load_in_child(&[("LD_LIBRARY_PATH", folder.path())]);
    assert!(output.contains(&format!("loaded {} None", by_name.display())), "{output}");

    // If the dynamic linker finds no library, the wheel in the environment is loaded. A library that is installed on
    // this machine comes first.
    let environment = tempfile::tempdir().unwrap();
    let packages = environment.path().join("lib/python3.11/site-packages");
    let output = load_in_child(&[("VIRTUAL_ENV", environment.path())]);
    let is_missing = output.contains("failed could not load the NIXL library: libnixl_capi.so (");
    assert!(is_missing || output.contains("loaded "), "{output}");
    let wheel = packages.join(".nixl_cu13.mesonpy.libs");
    std::fs::create_dir_all(&wheel).unwrap();
    std::fs::create_dir(packages.join("nixl_cu13-1.5.1.dist-info")).unwrap();
    let library = compile(&wheel, "libnixl_capi.so", FUNCTIONS.into_iter().chain([SINCE]));
    let output = load_in_child(&[("VIRTUAL_ENV", environment.path())]);
    let is_wheel = output.contains(&format!("loaded {} Some((1, 5, 1))", library.display()));
    assert!(is_wheel || !is_missing, "{output}");
}
