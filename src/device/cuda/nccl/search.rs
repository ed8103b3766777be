//! Lists the paths at which the NCCL library may be installed.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// The environment variable that contains the path of the library or of its folder.
const VARIABLE: &str = "REMANENT_NCCL";

/// The names of the library for the dynamic linker. Wheels and packages contain the first one, and development packages
/// also the second.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The folder of the library in a folder of Python packages, as `nvidia-nccl-cu12` and `nvidia-nccl-cu13` install it.
const IN_PACKAGES: &str = "nvidia/nccl/lib/libnccl.so.2";

/// Returns the paths to try, in order, if the process specifies no path.
pub(super) fn candidates() -> Vec<OsString> {
    if let Some(path) = env::var_os(VARIABLE).filter(|path| !path.is_empty()) {
        return at(Path::new(&path));
    }
    let mut candidates = NAMES.map(OsString::from).to_vec();
    let in_packages = package_folders().into_iter().map(|folder| folder.join(IN_PACKAGES));
    candidates.extend(in_packages.filter(|path| path.exists()).map(PathBuf::into_os_string));
    candidates
}

/// Returns the paths to try for a given path of the library or of its folder.
pub(super) fn at(path: &Path) -> Vec<OsString> {
    if path.is_dir() {
        return NAMES.map(|name| path.join(name).into_os_string()).to_vec();
    }
    vec![path.as_os_str().to_owned()]
}

/// Returns the folders of Python packages of the environment, the user and the system.
fn package_folders() -> Vec<PathBuf> {
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

    #[test]
    fn folder_or_file_can_be_named() {
        let folder = tempfile::tempdir().unwrap();
        let names = NAMES.map(|name| folder.path().join(name).into_os_string());
        assert_eq!(at(folder.path()), names);
        assert_eq!(at(Path::new("/there/libnccl.so.2.28")), ["/there/libnccl.so.2.28"]);
    }
}
