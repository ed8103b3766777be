//! The library is built in floors: a file's first line says on which one it stands, and it imports only
//! from below. This reads the sources and holds them to it, so that the map in `src/lib.rs` stays true.
//!
//! - `crate::` and `super::` paths are followed to the file that they name. Files of one directory module
//!   may use each other.
//! - `error` is the lowest file of its floor: its neighbours may name it.
//! - Floor 3 holds what stands behind the seams. Only `lib.rs` and tests choose among it.
//! - Unsafe code has few rooms, and the library never prints.
//! - Threads meet by `sync`, so that a test's scheduler sees it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The only files that may hold unsafe code.
const UNSAFE_ROOMS: &[&str] = &[
    "src/device/cuda/",
    "src/disk/mapped.rs",
    "src/disk/direct.rs",
    "src/disk/readers.rs",
    "src/process.rs",
];

/// What prints, or hands out something to print to.
const PRINTERS: &[&str] = &["println!", "eprintln!", "print!", "eprint!", "dbg!", "stdout()", "stderr()"];

/// What threads meet by, past `src/sync`.
const PAST_SYNC: &[&str] = &[
    "parking_lot",
    "std::sync::Mutex",
    "std::sync::RwLock",
    "std::sync::Condvar",
    "sync::locks",
    "std::sync::mpsc",
    "std::thread::spawn",
    "std::thread::Builder",
    "std::thread::current",
];

/// The files that may: a crew has one member under a scheduler, and the host device holds a lock while it copies.
const SYNC_ROOMS: &[&str] = &["src/sync/", "src/crew.rs", "src/device/host.rs", "src/device/host/"];

/// The floor whose files only `lib.rs` may import.
const BEHIND_THE_SEAMS: u32 = 3;

const LIB: &str = "src/lib.rs";
/// The unit tests of a directory module have a file of their own, which no build but a test has.
const UNIT_TESTS: &str = "/tests.rs";
const ERROR: &str = "src/error.rs";

/// Sources by their path from the repository's root.
type Sources = BTreeMap<String, String>;

/// What is wrong with the imports of `src/`.
fn import_faults(sources: &Sources) -> Vec<String> {
    let mut faults = Vec::new();
    let mut floors = BTreeMap::new();
    for (file, text) in sources {
        match floor(text) {
            Some(floor) => _ = floors.insert(file.as_str(), floor),
            None => faults.push(format!("{file}: the first line does not begin with `//! Floor N. `")),
        }
    }
    for (file, text) in sources {
        let Some(&own) = floors.get(file.as_str()) else { continue };
        for path in paths(&code(text)) {
            let target = resolve(sources, file, &path);
            let Some(&floor) = floors.get(target.as_str()) else { continue };
            let inside = directory(file).is_some() && directory(file) == directory(&target);
            let fault = if *file == target || inside {
                continue;
            } else if floor > own {
                "upward"
            } else if floor == own && target != ERROR {
                "sideways"
            } else if floor == BEHIND_THE_SEAMS && file != LIB && !file.ends_with(UNIT_TESTS) {
                "past the seam"
            } else {
                continue;
            };
            let path = path.join("::");
            faults
                .push(format!("{file} (floor {own}) imports {fault}: {path} is in {target} (floor {floor})"));
        }
    }
    faults
}

/// The files that hold unsafe code outside its rooms.
fn unsafe_faults(sources: &Sources) -> Vec<String> {
    let in_room = |file: &str| UNSAFE_ROOMS.iter().any(|room| file.starts_with(room));
    let outside = sources.iter().filter(|(file, _)| !in_room(file));
    outside.filter(|(_, text)| has_word(&code(text), "unsafe")).map(|(file, _)| file.clone()).collect()
}

/// The files that print.
fn print_faults(sources: &Sources) -> Vec<String> {
    let prints = |text: &str| PRINTERS.iter().any(|printer| has_word(&code(text), printer));
    sources.iter().filter(|(_, text)| prints(text)).map(|(file, _)| file.clone()).collect()
}

/// The files whose threads meet where a scheduler does not see it.
fn sync_faults(sources: &Sources) -> Vec<String> {
    let in_room = |file: &str| SYNC_ROOMS.iter().any(|room| file.starts_with(room));
    let engine = sources.iter().filter(|(file, _)| !in_room(file) && !file.ends_with(UNIT_TESTS));
    let past = |text: &str| PAST_SYNC.iter().any(|word| has_word(&code(text), word));
    engine.filter(|(_, text)| past(text)).map(|(file, _)| file.clone()).collect()
}

fn floor(text: &str) -> Option<u32> {
    let (number, purpose) = text.strip_prefix("//! Floor ")?.split_once(". ")?;
    let purpose = purpose.lines().next()?;
    number.parse().ok().filter(|_| !purpose.is_empty())
}

/// The text without comments and without its test modules, which may import what they like.
fn code(text: &str) -> String {
    let mut code = String::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let before_module = lines.peek().is_some_and(|next| next.starts_with("mod ") && next.ends_with('{'));
        if line == "#[cfg(test)]" && before_module {
            lines.by_ref().find(|line| *line == "}");
            continue;
        }
        code.push_str(line.split("//").next().unwrap_or_default());
        code.push('\n');
    }
    code
}

/// Where `word` stands on its own.
fn words<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word).map(|(at, _)| at).filter(move |&at| {
        let end = at + word.len();
        let open = word.ends_with(part) && text[end..].starts_with(part);
        !text[..at].ends_with(part) && !open
    })
}

fn has_word(text: &str, word: &str) -> bool {
    words(text, word).next().is_some()
}

/// Every path that starts with `crate::` or `super::`, with the groups in braces taken apart.
fn paths(code: &str) -> Vec<Vec<String>> {
    let mut paths = Vec::new();
    for start in ["crate::", "super::"] {
        for at in words(code, start) {
            if !code[..at].ends_with("::") {
                tree(&code[at..], &[], &mut paths);
            }
        }
    }
    paths
}

/// Reads one path or group, adds what it names, and returns what follows.
fn tree<'a>(mut text: &'a str, before: &[String], paths: &mut Vec<Vec<String>>) -> &'a str {
    let mut path = before.to_vec();
    loop {
        text = text.trim_start();
        if let Some(group) = text.strip_prefix('{') {
            text = group;
            loop {
                text = tree(text, &path, paths).trim_start();
                match text.strip_prefix(',') {
                    Some(rest) if !rest.trim_start().starts_with('}') => text = rest,
                    Some(rest) => return &rest.trim_start()[1..],
                    None => return text.strip_prefix('}').unwrap_or(text),
                }
            }
        }
        let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
        if end > 0 {
            path.push(text[..end].to_owned());
        }
        text = text[end..].trim_start_matches('*');
        let alias = text.trim_start().strip_prefix("as ").map(str::trim_start);
        if let Some(alias) = alias {
            text = alias.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_');
        }
        match text.strip_prefix("::") {
            Some(rest) => text = rest,
            None => {
                paths.push(path);
                return text;
            }
        }
    }
}

/// The file that a path of `file`'s leads to: the one of the longest module it names.
fn resolve(sources: &Sources, file: &str, path: &[String]) -> String {
    let mut module = module(file);
    let mut names = path.iter().map(String::as_str).peekable();
    if names.next_if_eq(&"crate").is_some() {
        module.clear();
    }
    while names.next_if_eq(&"super").is_some() {
        module.pop();
    }
    let mut found = file_of(sources, &module);
    for name in names {
        module.push(name.to_owned());
        match file_of(sources, &module) {
            Some(deeper) => found = Some(deeper),
            None => break,
        }
    }
    found.unwrap_or_else(|| LIB.to_owned())
}

fn module(file: &str) -> Vec<String> {
    let path = file.trim_start_matches("src/").trim_end_matches(".rs");
    let path = path.strip_suffix("/mod").unwrap_or(path);
    if path == "lib" { Vec::new() } else { path.split('/').map(str::to_owned).collect() }
}

fn file_of(sources: &Sources, module: &[String]) -> Option<String> {
    let path = module.join("/");
    let candidates = if module.is_empty() {
        [LIB.to_owned(), String::new()]
    } else {
        [format!("src/{path}.rs"), format!("src/{path}/mod.rs")]
    };
    candidates.into_iter().find(|file| sources.contains_key(file))
}

/// The directory module that a file belongs to, if any.
fn directory(file: &str) -> Option<&str> {
    file.trim_start_matches("src/").split_once('/').map(|(directory, _)| directory)
}

/// The sources below a folder of the repository.
pub fn read(folder: &str) -> Sources {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut sources = Sources::new();
    let mut folders = vec![root.join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("the folder is part of the repository") {
            let path = entry.expect("the folder can be read").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(root).expect("below the root").to_str().expect("a plain name");
                sources.insert(name.to_owned(), fs::read_to_string(&path).expect("a source is text"));
            }
        }
    }
    assert!(!sources.is_empty(), "no sources in {folder}");
    sources
}

#[test]
fn files_import_only_from_lower_floors() {
    let faults = import_faults(&read("src"));
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn unsafe_code_stays_in_its_rooms() {
    for folder in ["src", "format/src", "tools/src"] {
        assert_eq!(unsafe_faults(&read(folder)), [""; 0]);
    }
}

#[test]
fn threads_meet_by_sync() {
    assert_eq!(sync_faults(&read("src")), [""; 0]);
}

#[test]
fn the_library_never_prints() {
    for folder in ["src", "format/src"] {
        assert_eq!(print_faults(&read(folder)), [""; 0]);
    }
}

fn sources(files: &[(&str, &str)]) -> Sources {
    files.iter().map(|&(file, text)| (file.to_owned(), text.to_owned())).collect()
}

#[test]
fn a_wrong_import_is_found_however_it_is_written() {
    let check = |file: &str, text: &str, expected: &[&str]| {
        let mut all = sources(&[
            (LIB, "//! Floor 8. All.\n"),
            (ERROR, "//! Floor 1. Errors.\n"),
            ("src/options.rs", "//! Floor 1. Options.\n"),
            ("src/disk/mod.rs", "//! Floor 2. Seam.\n"),
            ("src/disk/dir.rs", "//! Floor 3. Directory.\n"),
            ("src/disk/sim.rs", "//! Floor 3. Simulation.\n"),
            ("src/device/mod.rs", "//! Floor 2. Seam.\n"),
            ("src/device/host.rs", "//! Floor 3. Host.\n"),
            ("src/arena.rs", "//! Floor 4. Memory.\n"),
            ("src/store.rs", "//! Floor 7. Store.\n"),
        ]);
        all.get_mut(file).expect("one of the files above").push_str(text);
        let found = import_faults(&all);
        let found: Vec<_> =
            found.iter().map(|fault| fault.split(" is in ").next().unwrap_or(fault)).collect();
        let expected: Vec<_> = expected.iter().map(|fault| format!("{file} {fault}")).collect();
        assert_eq!(found, expected, "for {text}");
    };
    // What is allowed.
    check("src/store.rs", "use crate::arena::Arena;\nuse crate::{disk::Disk, error};\n", &[]);
    check("src/options.rs", "use crate::error::{Error, Result};\n", &[]);
    check("src/disk/dir.rs", "use super::sim::Sim;\nuse super::Disk;\nuse crate::error::Error;\n", &[]);
    check("src/lib.rs", "pub use crate::disk::dir::DirDisk;\n", &[]);
    check("src/arena.rs", "// as in crate::store::Store\nuse other_crate::store::Store;\n", &[]);
    check("src/arena.rs", "#[cfg(test)]\nmod tests {\n    use crate::store::Store;\n}\n", &[]);
    // What is not.
    let upward = "(floor 4) imports upward: crate::store::Store";
    check("src/arena.rs", "use crate::store::Store;\n", &[upward]);
    check(
        "src/arena.rs",
        "use crate::{error, store::{Store, Other}, options};\n",
        &[upward, "(floor 4) imports upward: crate::store::Other"],
    );
    check("src/arena.rs", "fn f(store: &crate::store::Store) {}\n", &[upward]);
    check("src/arena.rs", "use crate::Store;\n", &["(floor 4) imports upward: crate::Store"]);
    check("src/arena.rs", "use super::store as shop;\n", &["(floor 4) imports upward: super::store"]);
    check("src/arena.rs", "#[cfg(test)]\nuse crate::store::Store;\n", &[upward]);
    check("src/error.rs", "use crate::options::Ack;\n", &["(floor 1) imports sideways: crate::options::Ack"]);
    check(
        "src/disk/dir.rs",
        "use crate::device::host::X;\n",
        &["(floor 3) imports sideways: crate::device::host::X"],
    );
    check(
        "src/disk/dir.rs",
        "use super::super::store;\n",
        &["(floor 3) imports upward: super::super::store"],
    );
    check(
        "src/store.rs",
        "use crate::disk::dir::DirDisk;\n",
        &["(floor 7) imports past the seam: crate::disk::dir::DirDisk"],
    );
}

#[test]
fn a_file_without_its_floor_is_found() {
    for text in
        ["", "//! Errors.\n", "//! Floor one. Errors.\n", "//! Floor 1.\n", "\n//! Floor 1. Errors.\n"]
    {
        assert_eq!(import_faults(&sources(&[(ERROR, text)])).len(), 1, "for {text:?}");
    }
}

#[test]
fn unsafe_code_printing_and_locks_past_sync_are_found() {
    let all = sources(&[
        ("src/disk/mapped.rs", "//! Floor 3. Rooms.\nunsafe fn map() {}\n"),
        ("src/device/cuda/api.rs", "//! Floor 3. Rooms.\nunsafe { call() }\n"),
        ("src/disk/dir.rs", "//! Floor 3. Not unsafe, only said. It does not println!(\"\").\n"),
        ("src/disk/sim.rs", "//! Floor 3. Quiet.\nfn unsafe_name() { blueprint!() }\n"),
        ("src/arena.rs", "//! Floor 4. Both.\nfn f() { eprintln!(\"{}\", unsafe { g() }) }\n"),
    ]);
    assert_eq!(unsafe_faults(&all), ["src/arena.rs"]);
    assert_eq!(print_faults(&all), ["src/arena.rs"]);

    let all = sources(&[
        ("src/crew.rs", "//! Floor 1. May.\nstd::thread::Builder::new()\n"),
        ("src/log.rs", "//! Floor 5. Not parking_lot, nor std::thread::spawn.\nstd::thread::panicking()\n"),
        ("src/commit.rs", "//! Floor 6. Past it.\nuse parking_lot::Mutex;\n"),
        ("src/reader.rs", "//! Floor 6. Past it.\nlet lock = std::sync::Mutex::default();\n"),
    ]);
    assert_eq!(sync_faults(&all), ["src/commit.rs", "src/reader.rs"]);
}
