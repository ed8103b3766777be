//! Lists the paths at which the NCCL library may be installed.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::base::python_packages::package_folders;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_or_file_can_be_named() {
        let folder = tempfile::tempdir().unwrap();
        let names = NAMES.map(|name| folder.path().join(name).into_os_string());
        assert_eq!(at(folder.path()), names);
        assert_eq!(at(Path::new("/there/libnccl.so.2.28")), ["/there/libnccl.so.2.28"]);
    }
}
