//! The files that a killed process left in its directory.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The content of a file. Trailing zeros are only counted, because log files are preallocated.
struct Content {
    path: PathBuf,
    /// The bytes up to the last one that is not zero.
    written: Vec<u8>,
    len: u64,
}

/// The length of a line in bytes. Only bytes in lines that are not all zero are damaged. All other lines are
/// padding or were never written, and damaging them would be harmless.
const LINE: usize = 64;

impl Content {
    /// Returns the offsets of the bytes that may be damaged.
    fn places(&self) -> Vec<usize> {
        let is_used = |at: &usize| {
            let line = at / LINE * LINE;
            self.written[line..self.written.len().min(line + LINE)].iter().any(|byte| *byte != 0)
        };
        (0..self.written.len()).filter(is_used).collect()
    }
}

/// The files in the directory of a killed process, and the file to damage.
pub struct Leftovers {
    folders: Vec<PathBuf>,
    files: Vec<Content>,
    /// Index of the file with the most written bytes.
    target: usize,
    /// Offsets of the bytes in the target file that may be damaged.
    places: Vec<usize>,
}

impl Leftovers {
    /// Reads all files of a directory.
    ///
    /// # Errors
    /// Those of the system's calls.
    pub fn read(directory: &Path) -> io::Result<Self> {
        let (mut folders, mut files) = (Vec::new(), Vec::new());
        let mut to_read = vec![directory.to_path_buf()];
        while let Some(folder) = to_read.pop() {
            for entry in fs::read_dir(&folder)? {
                let path = entry?.path();
                let relative = path.strip_prefix(directory).expect("it lies below").to_path_buf();
                if path.is_dir() {
                    folders.push(relative);
                    to_read.push(path);
                } else {
                    let mut written = fs::read(&path)?;
                    let len = written.len() as u64;
                    written.truncate(written.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1));
                    files.push(Content { path: relative, written, len });
                }
            }
        }
        files.sort_by(|one, other| one.path.cmp(&other.path));
        let target = (0..files.len()).max_by_key(|index| files[*index].places().len()).expect("a file");
        let places = files[target].places();
        Ok(Self { folders, files, target, places })
    }

    /// Returns the path of the file to damage.
    pub fn target(&self) -> &Path {
        &self.files[self.target].path
    }

    /// Returns the number of bytes in the target file that may be damaged.
    pub fn places(&self) -> u64 {
        self.places.len() as u64
    }

    /// Writes all files to an empty directory. If `flipped_bit` is a number, flips this bit of the damageable
    /// bytes in the target file.
    ///
    /// # Errors
    /// Those of the system's calls.
    pub fn copy_to(&self, directory: &Path, flipped_bit: Option<u64>) -> io::Result<()> {
        self.folders.iter().try_for_each(|folder| fs::create_dir_all(directory.join(folder)))?;
        for (index, content) in self.files.iter().enumerate() {
            let mut bytes = content.written.clone();
            if let Some(bit) = flipped_bit.filter(|_| index == self.target) {
                bytes[self.places[(bit / 8) as usize]] ^= 1 << (bit % 8);
            }
            let file = File::create(directory.join(&content.path))?;
            file.write_all_at(&bytes, 0)?;
            file.set_len(content.len)?;
        }
        Ok(())
    }
}
