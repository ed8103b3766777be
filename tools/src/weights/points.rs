//! The versions of a run of several ranks. A version is a small JSON file in the folder `points`. It names one snapshot
//! in the store of each rank. The first line of the file contains a checksum of the remaining lines.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use blake2::digest::consts::U16;
use blake2::{Blake2b, Digest};
use serde::Deserialize;

use crate::cli::exit::Failure;

/// Maximum length in bytes of the file of a version. The file of a run of 100,000 ranks is far shorter.
const POINT_LEN_MAX: u64 = 64 << 20;

/// A version of a run of several ranks.
#[derive(Deserialize)]
pub struct Point {
    /// The step of the run.
    pub step: u64,
    /// The name that the caller assigned to the version, if any.
    pub name: Option<String>,
    /// The time at which the version was saved, in seconds since 1970.
    pub created: f64,
    /// For each rank: the identity of its store, the name of the snapshot, and the Lsn of the last batch in the
    /// snapshot.
    pub parts: Vec<(String, String, u64)>,
}

/// Returns the folder of versions, or `None` if the directory does not belong to a run of several ranks.
pub fn folder(run: &Path) -> Option<PathBuf> {
    let folder = run.join("points");
    folder.is_dir().then_some(folder)
}

/// Reads all versions of a run, oldest first. Returns the versions, and one message for each damaged file.
pub fn read(folder: &Path) -> Result<(Vec<Point>, Vec<String>), Failure> {
    let cannot = |error| Failure::Environment(format!("cannot read {}: {error}", folder.display()));
    let mut numbered: Vec<(u64, PathBuf)> = Vec::new();
    for entry in fs::read_dir(folder).map_err(cannot)? {
        let path = entry.map_err(cannot)?.path();
        let number = path.file_stem().and_then(|stem| stem.to_str()?.parse().ok());
        let is_point = path.extension().is_some_and(|extension| extension == "point");
        numbered.extend(number.filter(|_| is_point).map(|number| (number, path)));
    }
    numbered.sort_unstable();
    let (mut points, mut damage) = (Vec::new(), Vec::new());
    for (_, path) in numbered {
        let point = match fs::metadata(&path) {
            Ok(found) if found.len() > POINT_LEN_MAX => {
                Err(format!("{} bytes is longer than the limit of 64 MiB", found.len()))
            }
            Ok(_) => fs::read(&path).map_err(|error| error.to_string()).and_then(|bytes| parse(&bytes)),
            // The run has removed the version after the folder was listed.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => Err(error.to_string()),
        };
        match point {
            Ok(point) => points.push(point),
            Err(reason) => damage.push(format!("{}: {reason}", path.display())),
        }
    }
    Ok((points, damage))
}

fn parse(bytes: &[u8]) -> Result<Point, String> {
    let end = bytes.iter().position(|byte| *byte == b'\n').ok_or("first line is not terminated")?;
    let (first, body) = (&bytes[..end], &bytes[end + 1..]);
    let sum: String = Blake2b::<U16>::digest(body).iter().map(|byte| format!("{byte:02x}")).collect();
    let expected = format!("{{\"remanent version\": 1, \"blake2b\": \"{sum}\"}}");
    if first != expected.as_bytes() {
        return Err(
            "checksum does not match, or the file was written by a newer version of the program".to_owned()
        );
    }
    serde_json::from_slice(body).map_err(|error| format!("cannot be parsed: {error}"))
}
