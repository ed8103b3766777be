//! The folders of Python packages, whose wheels contain libraries that are loaded at run time.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

/// Returns the folders of Python packages of the environment, the user and the system.
pub(crate) fn package_folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = Vec::new();
    let variable = |name| env::var_os(name).filter(|value| !value.is_empty());
    for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        folders.extend(variable(name).map(PathBuf::from).into_iter().flat_map(|root| python_folders(&root)));
    }
    folders.extend(variable("PYTHONPATH").iter().flat_map(env::split_paths));
    folders.extend(
        variable("HOME").into_iter().flat_map(|home| python_folders(&Path::new(&home).join(".local"))),
    );
    folders.extend(["/usr/local", "/usr"].into_iter().flat_map(|root| python_folders(Path::new(root))));
    folders
}

/// Returns the folders of packages of all Python versions below `root`, the newest version first.
fn python_folders(root: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(root.join("lib")).into_iter().flatten().flatten();
    let is_python =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3"));
    let mut versions: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(is_python).collect();
    let minor = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.strip_prefix("python3.").and_then(|minor| minor.parse::<u32>().ok())
    };
    versions.sort_by_key(|path| std::cmp::Reverse(minor(path)));
    versions
        .iter()
        .flat_map(|version| ["site-packages", "dist-packages"].map(|name| version.join(name)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wheel_of_newest_python_is_found_first() {
        let root = tempfile::tempdir().unwrap();
        for version in ["python3", "python3.9", "python3.12", "perl5"] {
            fs::create_dir_all(root.path().join("lib").join(version)).unwrap();
        }
        let found = python_folders(root.path());
        let expected = ["python3.12", "python3.9", "python3"];
        let expected = expected.iter().flat_map(|version| {
            ["site-packages", "dist-packages"].map(|name| root.path().join("lib").join(version).join(name))
        });
        assert_eq!(found, expected.collect::<Vec<_>>());
    }
}
