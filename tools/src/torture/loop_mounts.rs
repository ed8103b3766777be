//! File systems in files, which are mounted on loop devices. The tests of the engine also use this file.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Creates a file that contains a new file system. The file is sparse, so only written bytes use space on disk.
pub fn make(path: &Path, len: u64, program: &str, options: &[&str]) -> Result<PathBuf, String> {
    let made = File::create(path).and_then(|file| file.set_len(len));
    made.map_err(|error| format!("cannot create {}: {error}", path.display()))?;
    run(Command::new(program).args(options).arg(path))?;
    Ok(path.to_owned())
}

/// Mounts `what` on the folder `at`. Creates the folder if it does not exist.
pub fn mount(what: &Path, at: &Path, arguments: &[&str]) -> Result<(), String> {
    std::fs::create_dir_all(at).map_err(|error| format!("cannot create {}: {error}", at.display()))?;
    run(Command::new("mount").args(arguments).arg(what).arg(at))
}

/// Unmounts a file system. If a process still uses the file system, the system unmounts it when the process ends.
pub fn unmount(at: &Path) -> Result<(), String> {
    run(Command::new("umount").arg("--lazy").arg(at))
}

/// Clones a file, even while a process writes to it. The clone is a point-in-time copy. Both files must be on the same
/// file system, which must support clones.
pub fn clone(source: &Path, target: &Path) -> io::Result<()> {
    let target = OpenOptions::new().write(true).create_new(true).open(target)?;
    Ok(rustix::fs::ioctl_ficlone(&target, File::open(source)?)?)
}

/// Runs a program and waits for its exit. Returns its error output if it fails.
fn run(command: &mut Command) -> Result<(), String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim_end()))
}
