//! The paths where the library may be installed.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use super::version::Version;
use crate::base::python_packages::package_folders;

/// The environment variable with the path of the library or of its folder.
const VARIABLE: &str = "REMANENT_NIXL";

/// The file name of the library.
const NAME: &str = "libnixl_capi.so";

/// The folders with the library that the wheels create in a folder of Python packages.
const IN_PACKAGES: [&str; 2] = [".nixl_cu12.mesonpy.libs", ".nixl_cu13.mesonpy.libs"];

/// The places to search.
pub(super) struct Places {
    /// The paths to load, in order.
    pub paths: Vec<OsString>,
    /// Folders that were searched and do not contain the library.
    pub without: Vec<PathBuf>,
}

/// Returns the places to search if the caller passes no path.
pub(super) fn candidates() -> Places {
    if let Some(path) = env::var_os(VARIABLE).filter(|path| !path.is_empty()) {
        return at(Path::new(&path));
    }
    let mut places = Places { paths: vec![NAME.into()], without: Vec::new() };
    for folder in package_folders().into_iter().filter(|folder| folder.is_dir()) {
        let found = in_packages(&folder);
        if found.is_empty() {
            places.without.push(folder);
        }
        places.paths.extend(found);
    }
    places
}

/// Returns the places to search if the caller passes the path of a library or folder.
pub(super) fn at(path: &Path) -> Places {
    if !path.is_dir() {
        return Places { paths: vec![real(path)], without: Vec::new() };
    }
    let file = path.join(NAME);
    let paths = if file.exists() { vec![real(&file)] } else { in_packages(path) };
    let without = if paths.is_empty() { vec![path.to_owned()] } else { Vec::new() };
    Places { paths, without }
}

/// Returns the libraries of the wheels in a folder of Python packages.
fn in_packages(folder: &Path) -> Vec<OsString> {
    let files = IN_PACKAGES.map(|wheel| folder.join(wheel).join(NAME));
    files.iter().filter(|file| file.exists()).map(|file| real(file)).collect()
}

/// Resolves symbolic links in `path`, because the library finds its dependencies only relative to its real folder.
fn real(path: &Path) -> OsString {
    fs::canonicalize(path).unwrap_or_else(|_| path.to_owned()).into_os_string()
}

/// Returns the version of the wheel that contains a library, or `None` if the library is not part of a wheel.
pub(super) fn version_of_wheel(library: &Path) -> Option<Version> {
    let folder = library.parent()?;
    let wheel = folder.file_name()?.to_str()?.strip_prefix('.')?.strip_suffix(".mesonpy.libs")?;
    let prefix = format!("{wheel}-");
    let entries = fs::read_dir(folder.parent()?).ok()?.flatten();
    entries
        .filter_map(|entry| {
            let name = entry.file_name();
            Version::parse(name.to_str()?.strip_prefix(&prefix)?.strip_suffix(".dist-info")?)
        })
        .max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_and_folders_can_be_specified() {
        let folder = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(folder.path()).unwrap();
        let places = at(&root);
        assert_eq!((places.paths, places.without), (vec![], vec![root.clone()]));
        assert_eq!(at(Path::new("/there/libnixl_capi.so")).paths, ["/there/libnixl_capi.so"]);

        let wheel = root.join(IN_PACKAGES[1]);
        fs::create_dir(&wheel).unwrap();
        let library = wheel.join(NAME);
        fs::write(&library, "").unwrap();
        assert_eq!(at(&root).paths, [library.as_os_str()]);
        assert_eq!(at(&wheel).paths, [library.as_os_str()]);
        let link = root.join("link.so");
        std::os::unix::fs::symlink(&library, &link).unwrap();
        assert_eq!(at(&link).paths, [library.as_os_str()]);
    }

    #[test]
    fn version_comes_from_the_wheel() {
        let root = tempfile::tempdir().unwrap();
        let library = root.path().join(IN_PACKAGES[0]).join(NAME);
        assert_eq!(version_of_wheel(&library), None);
        for name in ["nixl_cu12-1.5.1.dist-info", "nixl_cu13-1.6.0.dist-info", "nixl_cu12-x.dist-info"] {
            fs::create_dir(root.path().join(name)).unwrap();
        }
        assert_eq!(version_of_wheel(&library), Some(Version(1, 5, 1)));
        assert_eq!(version_of_wheel(Path::new("/opt/nixl/lib/libnixl_capi.so")), None);
    }
}
