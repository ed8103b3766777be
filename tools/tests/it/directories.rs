//! Stores and files under all kinds of paths: relative ones, links, links to directories above, and existing
//! targets.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use crate::command::{Run, command, finished};
use crate::weights::{Weights, file, tensor};

/// Commands on the store at `{}`, next to the file `model.safetensors` that was imported into it.
const COMMANDS: [&str; 12] = [
    "info {}",
    "log {}",
    "pages {}",
    "snapshots {}",
    "verify {}",
    "dump {} w",
    "diff {} --from lsn:1",
    "blame {} w[0]",
    "import {} model.safetensors",
    "snapshot {}",
    "prune {} --snapshots 1",
    "export {} exported",
];

fn run_in(folder: &Path, line: &str, store: &str) -> Run {
    let arguments: Vec<&str> = line.split(' ').map(|word| if word == "{}" { store } else { word }).collect();
    let mut command = command(&arguments);
    command.current_dir(folder);
    finished(command)
}

#[test]
fn every_command_accepts_every_path_form() {
    let weights = Weights::new();
    weights.import(&file(&[tensor("w", "F32", "[2]", vec![1; 8])]), &[]);
    let store = weights.scratch.store();
    let folder = Path::new(&store).parent().unwrap();
    let absolute = store.clone();
    symlink(&store, folder.join("link")).unwrap();
    symlink(".", folder.join("above")).unwrap();
    for line in COMMANDS {
        for path in ["store", "./store/", "link", "above/store", "store/../store", &absolute] {
            let run = run_in(folder, line, path);
            // None of them finds a difference, so each must succeed.
            assert_eq!(run.code, 0, "{line} with {path}: {}{}", run.out, run.err);
        }
    }
    assert!(folder.join("link").is_symlink());
}

#[test]
fn export_keeps_links_and_permissions_of_its_target() {
    let weights = Weights::new();
    let bytes = file(&[tensor("w", "F32", "[2]", vec![1; 8])]);
    weights.import(&bytes, &[]);
    let store = weights.scratch.store();
    let folder = Path::new(&store).parent().unwrap();
    let (secret, link) = (folder.join("secret"), folder.join("link"));
    fs::write(&secret, "old").unwrap();
    fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
    symlink("secret", &link).unwrap();
    for target in ["secret", "link"] {
        assert_eq!(run_in(folder, &format!("export {{}} {target}"), "store").code, 0);
        assert_eq!(fs::read(&secret).unwrap(), bytes);
        assert_eq!(fs::metadata(&secret).unwrap().permissions().mode() & 0o777, 0o600, "{target}");
        assert!(link.is_symlink(), "the link became a file");
    }
    symlink("nowhere", folder.join("dangling")).unwrap();
    for target in ["/dev/null", "dangling", "."] {
        let run = run_in(folder, &format!("export {{}} {target}"), "store");
        assert_eq!(run.code, 2, "{target}: {}", run.err);
        assert!(run.err.contains(target), "{}", run.err);
    }
}
