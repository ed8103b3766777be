//! Runs the inspecting commands on generated store directories.
//!
//! The guarantees: every command ends with one of its exit codes and within its memory limit, whatever the
//! directory contains, and leaves the directory unchanged. If `verify` reports no damage, the pure rebuild
//! produces a state, and the other commands show that state.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use remanent_format::state::rebuild::{RebuildOptions, RebuiltStore, rebuild};
use remanent_format::{FileName, Folder, PageInfo, ReadAt};
use remanent_tools::{Ending, Failure, run};

use crate::archive::Files;

/// The memory limit for pages, as passed to `--memory-max`.
const MEMORY_MAX: &str = "65536";
/// Maximum number of pages of one store that are dumped and blamed.
const PAGES_MAX: usize = 3;

/// The commands with their options. The directory is inserted after the command's name.
const COMMANDS: [&[&str]; 13] = [
    &["info"],
    &["info", "--json"],
    &["snapshots"],
    &["snapshots", "--json"],
    &["log"],
    &["log", "--json", "--from", "2", "--page", "1"],
    &["pages", "--memory-max", MEMORY_MAX],
    &["diff", "--from", "lsn:1", "--memory-max", MEMORY_MAX],
    &["diff", "--from", "snapshot:1", "--to", "snapshot:2", "--json", "--memory-max", MEMORY_MAX],
    &["blame", "page:1[0]", "--memory-max", MEMORY_MAX],
    &["verify", "--json", "--memory-max", MEMORY_MAX],
    &["salvage", "--memory-max", MEMORY_MAX],
    &["salvage", "--json", "--memory-max", MEMORY_MAX],
];

/// Tests a store directory given as an archive of its files: unchanged, and with corrected checksums.
pub fn inspection(data: &[u8]) {
    let files = Files::from_archive(data);
    let mut fitted = files.clone();
    fitted.fit();
    if fitted != files {
        inspect(&fitted);
    }
    inspect(&files);
}

/// Runs every command on the files. Returns true if `verify` reported no problem.
pub fn inspect(files: &Files) -> bool {
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    lay(files, dir.path());
    let before = files_of(dir.path());
    for arguments in COMMANDS {
        ended(arguments, dir.path());
    }
    let options =
        RebuildOptions { page_bytes_max: MEMORY_MAX.parse().expect("a number"), ..RebuildOptions::default() };
    let rebuilt = rebuild(files, &options).ok();
    let (is_sound, _) = ended(&["verify", "--memory-max", MEMORY_MAX], dir.path());
    assert!(!is_sound || rebuilt.is_some(), "`verify` finds nothing in what cannot be rebuilt");
    // If the newest snapshot was skipped, `pages` still shows its state, and reports it.
    if let Some(rebuilt) = rebuilt.filter(|rebuilt| rebuilt.skipped.is_empty()) {
        shows(&rebuilt, dir.path(), is_sound);
    }
    assert!(files_of(dir.path()) == before, "an inspecting command changed what it inspects");
    is_sound
}

/// Checks that each page is shown as in the rebuilt state.
fn shows(rebuilt: &RebuiltStore, dir: &Path, is_sound: bool) {
    let (listed, lines) = ended(&["pages", "--json", "--memory-max", MEMORY_MAX], dir);
    assert!(listed || !is_sound, "`verify` finds nothing, but `pages` does");
    let lines = String::from_utf8(lines).expect("JSON is UTF-8");
    let shown = |line: &str| -> serde_json::Value { serde_json::from_str(line).expect("a line is JSON") };
    let shown = lines.lines().map(shown).map(|line| (line["page"].as_u64(), line["crc32"].as_u64()));
    let crc32 = |info: &PageInfo| u64::from(crc32fast::hash(&rebuilt.contents[&info.page]));
    let pages = || rebuilt.table.pages();
    assert!(shown.eq(pages().map(|info| (Some(info.page.0), Some(crc32(&info))))), "`pages` shows others");
    for info in pages().take(PAGES_MAX) {
        let (dumped, bytes) =
            ended(&["dump", &info.page.to_string(), "-o", "-", "--memory-max", MEMORY_MAX], dir);
        assert!(dumped || !is_sound, "`verify` finds nothing, but `dump` does");
        assert!(bytes == rebuilt.contents[&info.page], "`dump` shows other bytes of {}", info.page);
        let last = info.len.saturating_sub(1);
        ended(&["blame", &format!("page:{}[{last}]", info.page), "--json", "--memory-max", MEMORY_MAX], dir);
    }
}

/// Runs a command, which may report any outcome except a lock or a Ctrl-C. Returns its output, and true if it
/// reported no problem.
fn ended(arguments: &[&str], dir: &Path) -> (bool, Vec<u8>) {
    let dir = dir.to_str().expect("a temporary directory's name is UTF-8");
    let mut out = Vec::new();
    let outcome = run(&[&arguments[..1], &[dir], &arguments[1..]].concat(), &mut out);
    let may_be = match &outcome {
        Ok(Ending::Fine | Ending::Difference) | Err(Failure::Damage(_)) => true,
        // The store, page or state may not exist. A usage error, however, would mean that nothing was tested.
        Err(Failure::Environment(why)) => !why.contains("Usage:"),
        Ok(Ending::Interrupted) | Err(Failure::ClosedPipe | Failure::Locked(_)) => false,
    };
    assert!(may_be, "{arguments:?}: {outcome:?}");
    (outcome == Ok(Ending::Fine), out)
}

/// Writes a store's files to a directory.
pub fn lay(store: &impl ReadAt, dir: &Path) {
    for folder in [Folder::Root].into_iter().chain(Folder::INNER) {
        let path = dir.join(folder.name());
        fs::create_dir_all(&path).expect("a folder can be made");
        for name in store.list(folder).expect("a store in memory is listed") {
            let Some(file) = FileName::parse(folder, &name) else { continue };
            let len = store.len(file).expect("its files have a length").unwrap_or_default();
            let mut bytes = vec![0; usize::try_from(len).expect("they lie in memory")];
            store.read_at(file, 0, &mut bytes).expect("they are read");
            fs::write(path.join(name), bytes).expect("a file can be written");
        }
    }
}

/// Returns every file below a directory.
fn files_of(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir).expect("a directory is listed") {
        let path = entry.expect("an entry has a name").path();
        if path.is_dir() {
            found.append(&mut files_of(&path));
        } else {
            found.insert(path.clone(), fs::read(&path).expect("a file is read"));
        }
    }
    found
}
