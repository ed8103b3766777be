//! The layout of the four crates: folders have an order, and a file imports only from folders below its
//! own.
//!
//! The order of each crate is that of the table under `# Map` in its `lib.rs`, from top to bottom. These tests compare
//! the table with the sources:
//!
//! - Each folder, and each file next to `lib.rs`, is a row of the table, and the `mod` lines are in the same
//!   order.
//! - Each `crate::` or `super::` path refers to a file further down the table, or in the same folder.
//! - Within a folder there are no cycles of imports, except between a `mod.rs` and its own files.
//! - Only `lib.rs`, tests and `testing` select among the implementations of the traits `Device` and `Disk`.
//! - Only a few listed files may contain unsafe code, and the library never prints.
//! - Threads synchronize only through `base/sync`, so that a test's scheduler can control them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// The crates, identified by the folders of their sources.
const CRATES: &[&str] = &["src", "format/src", "archive/src", "tools/src"];

/// The only files that may contain unsafe code.
const UNSAFE_ROOMS: &[&str] = &[
    "src/device/cuda/",
    "src/nixl/",
    "src/disk/mapped.rs",
    "src/disk/direct.rs",
    "src/disk/record_locks.rs",
    "src/base/closed_on_fork.rs",
    "src/base/process.rs",
    "src/base/huge_pages.rs",
    "bench/src/allocators.rs",
];

/// Macros that print, and functions that return an output stream.
const PRINTERS: &[&str] = &["println!", "eprintln!", "print!", "eprint!", "dbg!", "stdout()", "stderr()"];

/// Names of thread synchronization that bypasses `base/sync`.
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

/// The files that may use such synchronization. Parallel work has one thread under a scheduler, and the host device
/// holds a lock while it copies.
const SYNC_ROOMS: &[&str] = &["src/base/sync/", "src/base/parallel.rs", "src/device/host/"];

/// The implementations of the traits `Device` and `Disk`, which only `lib.rs`, `testing` and files in the same folder
/// may import.
const BEHIND_THE_SEAMS: &[&str] = &[
    "src/device/cuda/",
    "src/device/host/",
    "src/device/multi/",
    "src/disk/buffered.rs",
    "src/disk/dir.rs",
    "src/disk/dir_file.rs",
    "src/disk/direct.rs",
    "src/disk/mapped.rs",
];

/// Sources, keyed by their path from the repository's root.
type Sources = BTreeMap<String, String>;

/// The sources of one crate.
struct Crate<'a> {
    /// The folder of the crate's sources.
    root: &'a str,
    sources: &'a Sources,
}

impl Crate<'_> {
    fn lib(&self) -> String {
        format!("{}/lib.rs", self.root)
    }

    /// Returns the folder of `file` directly below the root, or its name without the extension if it is in the root.
    fn top<'f>(&self, file: &'f str) -> Option<&'f str> {
        let path = file.strip_prefix(self.root)?.strip_prefix('/')?;
        let top = path.split('/').next().unwrap_or(path);
        let top = top.strip_suffix(".rs").unwrap_or(top);
        (!["lib", "main"].contains(&top)).then_some(top)
    }

    /// Returns the order of the folders from top to bottom, which is the first column of the table under `# Map`.
    fn order(&self) -> Vec<String> {
        let text = &self.sources[&self.lib()];
        let map = text.lines().skip_while(|line| *line != "//! # Map").skip(1);
        let rows = map.take_while(|line| !line.starts_with("//! # ")).filter_map(|line| {
            let cell = line.strip_prefix("//! | `")?;
            Some(cell.split_once('`')?.0.trim_end_matches('/').trim_end_matches(".rs").to_owned())
        });
        rows.collect()
    }

    /// Returns the differences between the table, the folders and the `mod` lines of `lib.rs`.
    fn map_faults(&self) -> Vec<String> {
        let order = self.order();
        let tops: BTreeSet<&str> = self.sources.keys().filter_map(|file| self.top(file)).collect();
        let named: BTreeSet<&str> = order.iter().map(String::as_str).collect();
        let mut faults = Vec::new();
        for missing in tops.difference(&named) {
            faults.push(format!("{}: {missing} is no row of the map", self.lib()));
        }
        for gone in named.difference(&tops) {
            faults.push(format!("{}: {gone} is a row of the map and not there", self.lib()));
        }
        if named.len() != order.len() {
            faults.push(format!("{}: a row of the map stands twice", self.lib()));
        }
        let code = code(&self.sources[&self.lib()]);
        let modules: Vec<&str> = code
            .lines()
            .filter_map(|line| line.trim_start_matches("pub ").strip_prefix("mod ")?.strip_suffix(';'))
            .collect();
        if modules != order {
            faults.push(format!("{}: the modules stand in another order than the map", self.lib()));
        }
        faults
    }

    /// Returns the files from which a file imports, each with the path in the import.
    fn imports(&self, file: &str) -> Vec<(String, String)> {
        let paths = paths(&code(&self.sources[file]));
        let target = |path: &Vec<String>| (self.resolve(file, path), path.join("::"));
        paths.iter().map(target).filter(|(target, _)| target != file).collect()
    }

    /// Returns the imports that violate the order.
    fn import_faults(&self) -> Vec<String> {
        let order = self.order();
        let rank = |file: &str| {
            self.top(file).map_or(Some(0), |top| order.iter().position(|name| name == top).map(|at| at + 1))
        };
        let mut faults = Vec::new();
        for file in self.sources.keys().filter(|file| !is_unit_test(file)) {
            for (target, path) in self.imports(file) {
                let inside = self.top(file).is_some() && self.top(file) == self.top(&target);
                let (Some(own), Some(other)) = (rank(file), rank(&target)) else { continue };
                let chooses = own == 0 || self.top(file) == Some("testing");
                let beside = Path::new(file).parent() == Path::new(&target).parent()
                    || BEHIND_THE_SEAMS.iter().any(|seam| file.starts_with(seam) && target.starts_with(seam));
                let fault = if !inside && other <= own && own != 0 {
                    "upward"
                } else if BEHIND_THE_SEAMS.iter().any(|seam| target.starts_with(seam)) && !chooses && !beside
                {
                    "past the seam"
                } else {
                    continue;
                };
                faults.push(format!("{file} imports {fault}: {path} is in {target}"));
            }
        }
        faults
    }

    /// Returns cycles of imports. Imports of a `mod.rs` from its own files are ignored.
    fn circles(&self) -> Vec<String> {
        let mut edges: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
        for file in self.sources.keys().filter(|file| !is_unit_test(file)) {
            let own = file.strip_suffix("mod.rs").filter(|folder| folder.ends_with('/'));
            let is_own = |target: &String| {
                target == &self.lib() || own.is_some_and(|folder| target.starts_with(folder))
            };
            let targets = self.imports(file).into_iter().map(|(target, _)| target);
            edges.insert(file, targets.filter(|target| !is_own(target)).collect());
        }
        // Repeatedly remove a file that imports none of the remaining files. The files that remain at the end are in a
        // cycle or import from one.
        loop {
            let left: BTreeSet<String> = edges.keys().map(|file| (*file).to_owned()).collect();
            let before = edges.len();
            edges.retain(|_, targets| targets.iter().any(|target| left.contains(target)));
            if edges.len() == before {
                return edges.into_keys().map(str::to_owned).collect();
            }
        }
    }

    /// Returns the file that a path in `file` refers to, which is the file of the innermost module in the path.
    fn resolve(&self, file: &str, path: &[String]) -> String {
        let mut module = self.module(file);
        let mut names = path.iter().map(String::as_str).peekable();
        if names.next_if_eq(&"crate").is_some() {
            module.clear();
        }
        while names.next_if_eq(&"super").is_some() {
            module.pop();
        }
        let mut found = self.file_of(&module);
        for name in names {
            module.push(name.to_owned());
            match self.file_of(&module) {
                Some(deeper) => found = Some(deeper),
                None => break,
            }
        }
        found.unwrap_or_else(|| self.lib())
    }

    fn module(&self, file: &str) -> Vec<String> {
        let path = file.trim_start_matches(self.root).trim_start_matches('/').trim_end_matches(".rs");
        let path = path.strip_suffix("/mod").unwrap_or(path);
        if path == "lib" { Vec::new() } else { path.split('/').map(str::to_owned).collect() }
    }

    fn file_of(&self, module: &[String]) -> Option<String> {
        let (root, path) = (self.root, module.join("/"));
        let candidates = if module.is_empty() {
            [self.lib(), String::new()]
        } else {
            [format!("{root}/{path}.rs"), format!("{root}/{path}/mod.rs")]
        };
        candidates.into_iter().find(|file| self.sources.contains_key(file))
    }
}

/// Returns true if a file contains the unit tests of a directory module, which exist only in test builds.
fn is_unit_test(file: &str) -> bool {
    file.ends_with("/tests.rs") || file.contains("/tests/") || file.ends_with("/main.rs")
}

/// Returns the files outside of the list that contain unsafe code.
fn unsafe_faults(sources: &Sources) -> Vec<String> {
    let in_room = |file: &str| UNSAFE_ROOMS.iter().any(|room| file.starts_with(room));
    let outside = sources.iter().filter(|(file, _)| !in_room(file));
    outside.filter(|(_, text)| has_word(&code(text), "unsafe")).map(|(file, _)| file.clone()).collect()
}

/// Returns the files that print or return an output stream.
fn print_faults(sources: &Sources) -> Vec<String> {
    let prints = |text: &str| PRINTERS.iter().any(|printer| has_word(&code(text), printer));
    sources.iter().filter(|(_, text)| prints(text)).map(|(file, _)| file.clone()).collect()
}

/// Returns the files whose threads synchronize without a test's scheduler.
fn sync_faults(sources: &Sources) -> Vec<String> {
    let in_room = |file: &str| SYNC_ROOMS.iter().any(|room| file.starts_with(room));
    let engine = sources.iter().filter(|(file, _)| !in_room(file) && !is_unit_test(file));
    let past = |text: &str| PAST_SYNC.iter().any(|word| has_word(&code(text), word));
    engine.filter(|(_, text)| past(text)).map(|(file, _)| file.clone()).collect()
}

/// Returns the text without comments and without its test modules, which may import any file.
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

/// Returns the positions at which `word` occurs as a whole word.
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

/// Returns every path that starts with `crate::` or `super::`, with groups in braces expanded.
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

/// Parses one path or group and adds its paths to `paths`. Returns the rest of the text.
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

/// Reads the sources below a folder of the repository.
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
fn folders_import_only_from_below() {
    for root in CRATES {
        let sources = read(root);
        let house = Crate { root, sources: &sources };
        let faults = [house.map_faults(), house.import_faults(), house.circles()].concat();
        assert!(faults.is_empty(), "{}", faults.join("\n"));
    }
}

#[test]
fn unsafe_code_stays_in_listed_files() {
    for folder in ["src", "format/src", "archive/src", "tools/src", "bench/src"] {
        assert_eq!(unsafe_faults(&read(folder)), [""; 0]);
    }
}

#[test]
fn threads_communicate_only_through_sync() {
    assert_eq!(sync_faults(&read("src")), [""; 0]);
}

#[test]
fn the_library_never_prints() {
    for folder in ["src", "format/src", "archive/src"] {
        assert_eq!(print_faults(&read(folder)), [""; 0]);
    }
}

fn sources(files: &[(&str, &str)]) -> Sources {
    files.iter().map(|&(file, text)| (file.to_owned(), text.to_owned())).collect()
}

/// Returns a small crate: two folders above the `Disk` trait, and two files at the bottom.
fn house() -> Sources {
    let map = "//! # Map\n//!\n//! | folder | what |\n//! |---|---|\n//! | `store/` | a |\n//! | `memory/` | b |\n\
        //! | `disk/` | c |\n//! | `options.rs` | d |\n//! | `error.rs` | e |\n//! # Next\n//! | `no` | row |\n";
    let modules = "mod store;\nmod memory;\npub mod disk;\npub mod options;\npub mod error;\n";
    sources(&[
        ("src/lib.rs", &format!("{map}\n{modules}")),
        ("src/store/mod.rs", "mod open;\n"),
        ("src/store/open.rs", ""),
        ("src/memory/mod.rs", ""),
        ("src/disk/mod.rs", ""),
        ("src/disk/dir.rs", ""),
        ("src/disk/mapped.rs", ""),
        ("src/options.rs", ""),
        ("src/error.rs", ""),
    ])
}

#[test]
fn wrong_import_is_detected_in_every_form() {
    let check = |file: &str, text: &str, expected: &[&str]| {
        let mut all = house();
        all.get_mut(file).expect("one of the files above").push_str(text);
        let found = Crate { root: "src", sources: &all }.import_faults();
        let found: Vec<_> =
            found.iter().map(|fault| fault.split(" is in ").next().unwrap_or(fault)).collect();
        let expected: Vec<_> = expected.iter().map(|fault| format!("{file} {fault}")).collect();
        assert_eq!(found, expected, "for {text}");
    };
    // Permitted imports.
    check("src/store/open.rs", "use crate::memory::Arena;\nuse crate::{disk::Disk, error};\n", &[]);
    check("src/store/open.rs", "use super::Store;\n", &[]);
    check("src/options.rs", "use crate::error::{Error, Result};\n", &[]);
    check("src/disk/dir.rs", "use super::mapped::Map;\nuse super::Disk;\nuse crate::error::Error;\n", &[]);
    check("src/lib.rs", "pub use crate::disk::dir::DirDisk;\n", &[]);
    check("src/memory/mod.rs", "// as in crate::store::Store\nuse other_crate::store::Store;\n", &[]);
    check("src/memory/mod.rs", "#[cfg(test)]\nmod tests {\n    use crate::store::Store;\n}\n", &[]);
    // Forbidden imports.
    let upward = "imports upward: crate::store::Store";
    check("src/memory/mod.rs", "use crate::store::Store;\n", &[upward]);
    check(
        "src/memory/mod.rs",
        "use crate::{error, store::{Store, Other}, options};\n",
        &[upward, "imports upward: crate::store::Other"],
    );
    check("src/memory/mod.rs", "fn f(store: &crate::store::Store) {}\n", &[upward]);
    check("src/memory/mod.rs", "use crate::Store;\n", &["imports upward: crate::Store"]);
    check("src/memory/mod.rs", "use super::store as shop;\n", &["imports upward: super::store"]);
    check("src/memory/mod.rs", "#[cfg(test)]\nuse crate::store::Store;\n", &[upward]);
    check("src/error.rs", "use crate::options::Ack;\n", &["imports upward: crate::options::Ack"]);
    check("src/disk/dir.rs", "use super::super::store;\n", &["imports upward: super::super::store"]);
    check(
        "src/store/mod.rs",
        "use crate::disk::dir::DirDisk;\n",
        &["imports past the seam: crate::disk::dir::DirDisk"],
    );
}

#[test]
fn inconsistent_module_map_is_detected() {
    let faults = |all: &Sources| Crate { root: "src", sources: all }.map_faults();
    assert_eq!(faults(&house()), [""; 0]);
    let mut all = house();
    all.insert("src/late.rs".to_owned(), String::new());
    assert_eq!(faults(&all).len(), 1, "a file that is no row");
    let mut all = house();
    all.remove("src/options.rs");
    assert_eq!(faults(&all).len(), 1, "a row that is no file");
    let mut all = house();
    let lib = all["src/lib.rs"].replace("mod store;\nmod memory;", "mod memory;\nmod store;");
    all.insert("src/lib.rs".to_owned(), lib);
    assert_eq!(faults(&all).len(), 1, "modules in another order");
}

#[test]
fn import_cycle_within_folder_is_detected() {
    let circles = |all: &Sources| Crate { root: "src", sources: all }.circles();
    let mut all = house();
    all.insert("src/store/mod.rs".to_owned(), "mod open;\nuse self::open::Open;\n".to_owned());
    all.insert("src/store/open.rs".to_owned(), "use super::Store;\n".to_owned());
    assert_eq!(circles(&all), [""; 0], "a folder and its own file");
    all.insert("src/store/open.rs".to_owned(), "use super::close::Close;\n".to_owned());
    all.insert("src/store/close.rs".to_owned(), "use super::open::Open;\n".to_owned());
    assert_eq!(circles(&all), ["src/store/close.rs", "src/store/open.rs"]);
}

#[test]
fn unsafe_code_printing_and_locks_past_sync_are_found() {
    let all = sources(&[
        ("src/disk/mapped.rs", "//! Rooms.\nunsafe fn map() {}\n"),
        ("src/device/cuda/api.rs", "//! Rooms.\nunsafe { call() }\n"),
        ("src/disk/dir.rs", "//! Not unsafe, only said. It does not println!(\"\").\n"),
        ("src/disk/quiet.rs", "//! Quiet.\nfn unsafe_name() { blueprint!() }\n"),
        ("src/arena.rs", "//! Both.\nfn f() { eprintln!(\"{}\", unsafe { g() }) }\n"),
    ]);
    assert_eq!(unsafe_faults(&all), ["src/arena.rs"]);
    assert_eq!(print_faults(&all), ["src/arena.rs"]);

    let all = sources(&[
        ("src/base/parallel.rs", "//! May.\nstd::thread::Builder::new()\n"),
        ("src/log.rs", "//! Not parking_lot, nor std::thread::spawn.\nstd::thread::panicking()\n"),
        ("src/commit.rs", "//! Past it.\nuse parking_lot::Mutex;\n"),
        ("src/history/view.rs", "//! Past it.\nlet lock = std::sync::Mutex::default();\n"),
    ]);
    assert_eq!(sync_faults(&all), ["src/commit.rs", "src/history/view.rs"]);
}
