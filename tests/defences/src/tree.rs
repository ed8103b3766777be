//! A copy of the repository in which every defence of the list has a switch.
//!
//! One build serves all defences. Each defence is wrapped in an `if`, and an environment variable selects at
//! run time which one is disabled. The original sources contain no switches.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Error, Result};
use std::path::{Path, PathBuf};

use crate::list::{Defence, all};

/// The environment variable that names the disabled defence.
pub const SWITCH: &str = "REMANENT_WITHOUT";

/// The version of the crate, and a different version for the copy. With equal versions, cargo would use
/// builds of one for the other, because both share a folder for their dependencies.
const VERSION: (&str, &str, &str) = ("Cargo.toml", "version = \"0.1.0\"", "version = \"0.1.0+switches\"");

/// The file that declares the switch. Both crates can import from this file.
const SWITCHBOARD: &str = "format/src/lib.rs";

/// Folders that no build needs, such as those left over from builds and runs. Hidden folders are not copied
/// either.
const NOT_COPIED: [&str; 4] = ["target", "corpus", "artifacts", "coverage"];

/// Updates the copy at `tree`. The modification time of an unchanged file is kept, so that little is rebuilt.
pub fn copy(root: &Path, tree: &Path) -> Result<()> {
    let mut there = BTreeSet::new();
    for file in files(root, Path::new(""))? {
        let bytes = with_switches(&file, fs::read(root.join(&file))?)?;
        let target = tree.join(&file);
        if fs::read(&target).ok().as_ref() != Some(&bytes) {
            fs::create_dir_all(target.parent().expect("a file lies in a folder"))?;
            fs::write(&target, bytes)?;
        }
        there.insert(file);
    }
    let of_old = files(tree, Path::new(""))?.into_iter().filter(|file| !there.contains(file));
    of_old.map(|file| tree.join(file)).try_for_each(fs::remove_file)
}

fn files(root: &Path, folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    if !root.is_dir() {
        return Ok(found);
    }
    for entry in fs::read_dir(root.join(folder))? {
        let entry = entry?;
        let name = entry.file_name();
        let is_left_out = NOT_COPIED.iter().any(|left_out| name == *left_out);
        if is_left_out || name.to_string_lossy().starts_with('.') {
            continue;
        }
        let path = folder.join(&name);
        if entry.file_type()?.is_dir() {
            found.extend(files(root, &path)?);
        } else {
            found.push(path);
        }
    }
    Ok(found)
}

fn with_switches(file: &Path, bytes: Vec<u8>) -> Result<Vec<u8>> {
    let of_file: Vec<&Defence> = all().filter(|defence| Path::new(defence.file) == file).collect();
    let is_switchboard = file == Path::new(SWITCHBOARD);
    let (manifest, version, other_version) = VERSION;
    let is_manifest = file == Path::new(manifest);
    if of_file.is_empty() && !is_switchboard && !is_manifest {
        return Ok(bytes);
    }
    let mut text = String::from_utf8(bytes).map_err(Error::other)?;
    if is_manifest {
        if text.matches(version).count() != 1 {
            return Err(Error::other(format!("{manifest}: {version} must occur once")));
        }
        text = text.replace(version, other_version);
    }
    for defence in of_file {
        let Defence { name, code, .. } = defence;
        if text.matches(code).count() != 1 {
            return Err(Error::other(format!("{name}: its code must occur once in {}", file.display())));
        }
        text = text.replace(code, &switched(defence));
    }
    if is_switchboard {
        text.push_str(&format!(
            "\n/// Whether the defence of this name is on.\n\
             pub fn is_on(defence: &str) -> bool {{\n    \
                 static OFF: std::sync::LazyLock<Option<String>> =\n        \
                     std::sync::LazyLock::new(|| std::env::var({SWITCH:?}).ok());\n    \
                 OFF.as_deref() != Some(defence)\n\
             }}\n"
        ));
    }
    Ok(text.into_bytes())
}

/// Returns the code of the defence, wrapped in its switch.
fn switched(defence: &Defence) -> String {
    let Defence { name, file, code, instead, .. } = defence;
    let krate = if file.starts_with("format/") { "crate" } else { "remanent_format" };
    let choice = format!("if {krate}::is_on({name:?}) {{ {code} }} else {{ {instead} }}");
    // A statement remains a statement. A condition is put in parentheses, so that it does not end inside the
    // surrounding `if`.
    if code.ends_with([';', '}']) { choice } else { format!("({choice})") }
}
