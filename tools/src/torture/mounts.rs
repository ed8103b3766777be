//! A file system of our own on a loop device, and what its device holds at a moment.
//!
//! The device's file lies on an XFS, which can clone files: a clone is one moment of the device, taken while it is
//! written to. Both are mounted for as long as this lives, also when Ctrl-C ends the command.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::exit::Failure;

/// Holes in a file take no space: what is used is what is written.
const OUTER_LEN: u64 = 64 << 30;
const INNER_LEN: u64 = 4 << 30;

/// Something mounted.
struct Mount(PathBuf);

/// An ext4 whose moments can be kept. Fields in the order in which they must go.
pub struct Medium {
    inner: Mount,
    clones: u64,
    outer: Mount,
}

/// One moment of it.
pub struct Cut {
    image: PathBuf,
    at: PathBuf,
}

impl Medium {
    /// Makes one in a folder.
    pub fn new(folder: &Path) -> Result<Self, String> {
        let outer = make(&folder.join("outer"), OUTER_LEN, "mkfs.xfs", &["-q", "-f"])?;
        let outer = Mount::new(&outer, folder.join("clones"))?;
        let inner = make(&outer.0.join("image"), INNER_LEN, "mkfs.ext4", &["-q", "-F"])?;
        let inner = Mount::new(&inner, folder.join("disk"))?;
        Ok(Self { inner, clones: 0, outer })
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.inner.0
    }

    /// What the device holds at this moment.
    pub fn cut(&mut self) -> Result<Cut, Failure> {
        self.clones += 1;
        let image = self.outer.0.join(format!("clone-{}", self.clones));
        let clone = || {
            let target = OpenOptions::new().write(true).create_new(true).open(&image)?;
            rustix::fs::ioctl_ficlone(&target, File::open(self.outer.0.join("image"))?)?;
            Ok(())
        };
        clone().map_err(|error: std::io::Error| {
            Failure::Environment(format!("cannot clone into {}: {error}", image.display()))
        })?;
        Ok(Cut { at: image.with_extension("mounted"), image })
    }
}

impl Cut {
    /// Mounts it, for the time of a look.
    pub fn look<T>(self, look: impl FnOnce(&Path) -> T) -> Result<T, Failure> {
        let mount = Mount::new(&self.image, self.at).map_err(Failure::Environment)?;
        let seen = look(&mount.0);
        drop(mount);
        super::remove_file(&self.image)?;
        Ok(seen)
    }
}

impl Mount {
    fn new(image: &Path, at: PathBuf) -> Result<Self, String> {
        std::fs::create_dir_all(&at).map_err(|error| format!("cannot make {}: {error}", at.display()))?;
        run(Command::new("mount").args(["-o", "loop"]).arg(image).arg(&at))?;
        Ok(Self(at))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // What is busy still, such as under a replay that has just been killed, goes when it is not. Nobody is there
        // to be told of a failure; whoever removes the folder meets it.
        let _ = run(Command::new("umount").arg("--lazy").arg(&self.0));
    }
}

/// A file with a file system in it.
fn make(path: &Path, len: u64, program: &str, options: &[&str]) -> Result<PathBuf, String> {
    let made = File::create(path).and_then(|file| file.set_len(len));
    made.map_err(|error| format!("cannot make {}: {error}", path.display()))?;
    run(Command::new(program).args(options).arg(path))?;
    Ok(path.to_owned())
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
