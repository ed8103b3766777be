//! File systems in files, mounted on loop devices. The engine's tests use this file too.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Creates a file that holds a file system. The file is sparse, so it uses only the bytes written.
pub fn make(path: &Path, len: u64, program: &str, options: &[&str]) -> Result<PathBuf, String> {
    let made = File::create(path).and_then(|file| file.set_len(len));
    made.map_err(|error| format!("cannot make {}: {error}", path.display()))?;
    run(Command::new(program).args(options).arg(path))?;
    Ok(path.to_owned())
}

/// Mounts `what` on the folder `at`, which is created if necessary.
pub fn mount(what: &Path, at: &Path, arguments: &[&str]) -> Result<(), String> {
    std::fs::create_dir_all(at).map_err(|error| format!("cannot make {}: {error}", at.display()))?;
    run(Command::new("mount").args(arguments).arg(what).arg(at))
}

/// Unmounts a file system. If it is busy, for example with a process that was just killed, it is unmounted as
/// soon as it is idle.
pub fn unmount(at: &Path) -> Result<(), String> {
    run(Command::new("umount").arg("--lazy").arg(at))
}

/// Clones a file as it is at this moment, while it may be written to. Both files must be on a file system
/// that supports clones.
pub fn clone(source: &Path, target: &Path) -> io::Result<()> {
    let target = OpenOptions::new().write(true).create_new(true).open(target)?;
    Ok(rustix::fs::ioctl_ficlone(&target, File::open(source)?)?)
}

/// Runs a program to its end.
fn run(command: &mut Command) -> Result<(), String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim_end()))
}
