//! A cache trace, which is a file with one JSON object per line, plain or compressed with zstd.
//!
//! Only the field `hash_ids` of a request is used. It lists the cache blocks of the prompt in order. A trace is not
//! trusted. The length of lines is limited, and an error in a line is reported with the file and the line number.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::cli::exit::Failure;

/// Maximum length of a line in bytes. The longest line of the trace in `data/` has 2,053 bytes.
const LINE_LEN_MAX: u64 = 1 << 20;
/// Magic bytes at the start of a zstd frame.
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// The trace of one hour of a production chat service. `data/README.md` names the source.
const BUNDLED: &[u8] = include_bytes!("../../data/mooncake_conversation_trace.jsonl.zst");

/// Writes the trace that is part of this program to a folder, and returns the path of the file.
pub fn bundled(folder: &Path) -> Result<PathBuf, Failure> {
    let path = folder.join("trace.jsonl.zst");
    match std::fs::write(&path, BUNDLED) {
        Ok(()) => Ok(path),
        Err(error) => Err(Failure::Environment(format!("cannot write {}: {error}", path.display()))),
    }
}

/// A line of a trace. Other fields are ignored.
#[derive(Deserialize)]
struct TraceLine {
    hash_ids: Vec<u64>,
}

/// An iterator over the requests of a trace in order. Each item contains the hash ids of a request.
pub struct Trace {
    lines: TraceLines,
    left: u64,
}

/// An iterator over the lines of a trace file. Each line is parsed as a JSON value.
pub struct TraceLines {
    name: PathBuf,
    lines: Box<dyn BufRead>,
    number: u64,
}

/// Statistics of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Survey {
    /// Number of requests.
    pub requests: u64,
    /// Maximum number of distinct hash ids in a request.
    pub longest: usize,
}

impl TraceLines {
    /// Opens a trace file, and detects compression.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        let open = || -> io::Result<Box<dyn BufRead>> {
            let mut file = BufReader::new(File::open(path)?);
            if file.fill_buf()?.starts_with(&ZSTD_MAGIC) {
                Ok(Box::new(BufReader::new(zstd::Decoder::with_buffer(file)?)))
            } else {
                Ok(Box::new(file))
            }
        };
        let lines = open()
            .map_err(|error| Failure::Environment(format!("cannot read {}: {error}", path.display())))?;
        Ok(Self { name: path.to_owned(), lines, number: 0 })
    }

    /// Parses the next line. Returns `None` at the end of the file, and an error for an invalid line.
    pub fn next_value<Value: DeserializeOwned>(&mut self) -> Option<Result<Value, Failure>> {
        self.number += 1;
        let line = self.line().transpose()?;
        let value = line.and_then(|line| serde_json::from_slice(&line).map_err(|error| error.to_string()));
        Some(value.map_err(|reason| self.defect(&reason)))
    }

    /// Returns a failure that names the file and the number of the last line.
    pub fn defect(&self, reason: &str) -> Failure {
        Failure::Environment(format!("{}:{}: {reason}", self.name.display(), self.number))
    }

    /// Returns the next line without its newline, or `None` at the end of the file.
    fn line(&mut self) -> Result<Option<Vec<u8>>, String> {
        let mut line = Vec::new();
        let read = self.lines.as_mut().take(LINE_LEN_MAX + 1).read_until(b'\n', &mut line);
        match read.map_err(|error| error.to_string())? {
            0 => Ok(None),
            len if len as u64 > LINE_LEN_MAX => Err(format!("longer than {LINE_LEN_MAX} bytes")),
            _ => {
                if line.last() == Some(&b'\n') {
                    line.pop();
                }
                Ok(Some(line))
            }
        }
    }
}

impl Trace {
    /// Opens a trace file to read its first `limit` requests.
    pub fn open(path: &Path, limit: Option<u64>) -> Result<Self, Failure> {
        Ok(Self { lines: TraceLines::open(path)?, left: limit.unwrap_or(u64::MAX) })
    }

    /// Parses the first `limit` requests of a trace file, and returns their statistics. A caller can thus find an
    /// invalid line before it replays any request.
    pub fn survey(path: &Path, limit: Option<u64>) -> Result<Survey, Failure> {
        let mut survey = Survey { requests: 0, longest: 0 };
        for request in Self::open(path, limit)? {
            let different: HashSet<u64> = request?.into_iter().collect();
            survey.requests += 1;
            survey.longest = survey.longest.max(different.len());
        }
        Ok(survey)
    }
}

impl Iterator for Trace {
    type Item = Result<Vec<u64>, Failure>;

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        let line = self.lines.next_value::<TraceLine>()?;
        Some(line.map(|line| line.hash_ids).inspect_err(|_| self.left = 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(content: &[u8]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), content).unwrap();
        file
    }

    fn requests(content: &[u8], limit: Option<u64>) -> Vec<Result<Vec<u64>, Failure>> {
        Trace::open(file(content).path(), limit).unwrap().collect()
    }

    #[test]
    fn trace_order_is_independent_of_compression_and_last_newline() {
        let plain = b"{\"timestamp\": 0, \"hash_ids\": [0, 7]}\n{\"hash_ids\": []}\n{\"hash_ids\":[18446744073709551615]}";
        let expected = vec![Ok(vec![0, 7]), Ok(vec![]), Ok(vec![u64::MAX])];
        assert_eq!(requests(plain, None), expected);
        assert_eq!(requests(&zstd::encode_all(&plain[..], 1).unwrap(), None), expected);
        assert_eq!(requests(&[&plain[..], b"\n"].concat(), None), expected);
        assert_eq!(requests(plain, Some(2)), expected[..2]);
        assert_eq!(requests(b"", None), []);
    }

    #[test]
    fn bad_line_is_reported_and_ends_the_trace() {
        let long = [b"{\"hash_ids\": [", &b" ".repeat(1 << 20)[..], b"]}\n"].concat();
        for bad in [&b"{}\n"[..], b"\n", b"{\"hash_ids\": [-1]}\n", b"{\"hash_ids\": [1", b"\xff\n", &long] {
            let content = [b"{\"hash_ids\": [1]}\n", bad].concat();
            let requests = requests(&content, None);
            assert_eq!(requests[0], Ok(vec![1]));
            let Err(Failure::Environment(message)) = &requests[1] else { panic!("{:?}", requests[1]) };
            assert!(message.contains(":2: "), "{message}");
            assert_eq!(requests.len(), 2);
        }
    }

    #[test]
    fn truncated_compressed_trace_is_an_error() {
        let whole = zstd::encode_all(&b"{\"hash_ids\": [1]}\n".repeat(100)[..], 1).unwrap();
        let requests = requests(&whole[..whole.len() - 3], None);
        assert!(requests.last().unwrap().is_err());
    }

    #[test]
    fn bundled_trace_matches_its_readme() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/mooncake_conversation_trace.jsonl.zst");
        assert_eq!(Trace::survey(&path, None), Ok(Survey { requests: 12_031, longest: 247 }));
    }
}
