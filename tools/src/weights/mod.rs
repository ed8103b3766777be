//! Safetensors files in a store: their tensors, the names and keys of tensors, and the header of the file.
//!
//! A safetensors file contains the length of a JSON header in 8 bytes, the header, and the bytes of all tensors back to
//! back. In a store, each tensor is a page whose metadata contains `dtype` and `shape`. One more page contains the
//! unchanged header with its 8 bytes, so an export can restore the file byte for byte. The header has versions, like
//! every page.

pub(crate) mod dtype;
pub(crate) mod element;
pub(crate) mod export;
pub(crate) mod import;
mod points;
pub(crate) mod versions;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use remanent::batch::ByteSource;
use remanent_format::limits::KEY_LEN_MAX;
use remanent_format::{Key, Metadata, PageInfo, Value};
use safetensors::Dtype;

use crate::cli::exit::Failure;
use crate::cli::interrupt::Interrupt;

/// Key of the page that contains the header of the file. No tensor has this key.
pub const HEADER_KEY: &str = "safetensors header";

/// Maximum length of a header in bytes, which is the limit of the safetensors library.
const HEADER_LEN_MAX: u64 = 100_000_000;
/// Length in bytes of the field that contains the length of the header.
const LEN_LEN: u64 = 8;

/// Metadata entry that contains the dtype of a tensor.
const DTYPE: &str = "dtype";
/// Metadata entry that contains the shape of a tensor.
const SHAPE: &str = "shape";
/// Metadata entry that contains the full name of a tensor. If possible, the key of the page is the same name.
const NAME: &str = "name";

/// A tensor that the header of a file describes.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Full name of the tensor.
    pub name: String,
    /// Dtype of the elements.
    pub dtype: Dtype,
    /// Number of elements in each dimension.
    pub shape: Vec<u64>,
    /// Offset of the tensor in bytes from the start of the file.
    pub offset: u64,
    /// Length of the tensor in bytes.
    pub len: u64,
}

impl Tensor {
    /// Returns the metadata of the page that contains the tensor.
    pub fn metadata(&self) -> Metadata {
        let shape = self.shape.iter().map(|dimension| Value::U64(*dimension)).collect();
        Metadata::from([
            (NAME.to_owned(), Value::String(self.name.clone())),
            (DTYPE.to_owned(), Value::String(self.dtype.to_string())),
            (SHAPE.to_owned(), Value::List(shape)),
        ])
    }
}

/// The parsed header of a safetensors file.
#[derive(Clone, Debug)]
pub struct Header {
    /// Bytes of the header as in the file, starting with the 8 bytes of its length.
    pub bytes: Vec<u8>,
    /// Tensors, in the order of their bytes.
    pub tensors: Vec<Tensor>,
}

impl Header {
    /// Parses and checks a header. The tensors must cover all bytes after the header without gaps or overlaps, and the
    /// length of each tensor must match its shape and dtype.
    pub fn parse(bytes: Vec<u8>) -> Result<Self, String> {
        let json = bytes.get(LEN_LEN as usize..).ok_or("header is truncated")?;
        let metadata: safetensors::tensor::Metadata =
            serde_json::from_slice(json).map_err(|error| format!("header cannot be parsed: {error}"))?;
        let mut infos: Vec<_> = metadata.tensors().into_iter().collect();
        // Empty tensors have the same offset as a neighbor. Their order is arbitrary but must always be the same.
        infos.sort_by(|(left_name, left), (right_name, right)| {
            (left.data_offsets, left_name).cmp(&(right.data_offsets, right_name))
        });
        let tensor = |(name, info): (String, &safetensors::tensor::TensorInfo)| Tensor {
            name,
            dtype: info.dtype,
            shape: info.shape.iter().map(|dimension| *dimension as u64).collect(),
            offset: (bytes.len() + info.data_offsets.0) as u64,
            len: (info.data_offsets.1 - info.data_offsets.0) as u64,
        };
        Ok(Self { tensors: infos.into_iter().map(tensor).collect(), bytes })
    }

    /// Returns the length of the file in bytes.
    pub fn file_len(&self) -> u64 {
        self.tensors.last().map_or(self.bytes.len() as u64, |tensor| tensor.offset + tensor.len)
    }
}

/// A safetensors file that is open for reading, with its checked header.
pub struct WeightsFile {
    /// Parsed and checked header of the file.
    pub header: Header,
    file: Arc<File>,
    path: PathBuf,
}

impl WeightsFile {
    /// Opens a file, and reads and checks its header.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        let refuse = |reason: String| Failure::Environment(format!("{}: {reason}", path.display()));
        let cannot = |error: std::io::Error| refuse(format!("cannot read: {error}"));
        let file = File::open(path).map_err(cannot)?;
        let metadata = file.metadata().map_err(cannot)?;
        if !metadata.is_file() {
            return Err(refuse("not a regular file".to_owned()));
        }
        let file_len = metadata.len();
        let mut len = [0; LEN_LEN as usize];
        if file_len < LEN_LEN {
            return Err(refuse(format!("not a safetensors file: only {file_len} bytes long")));
        }
        file.read_exact_at(&mut len, 0).map_err(cannot)?;
        let header_len = u64::from_le_bytes(len);
        // Compare the length with the file and the limit before memory is allocated.
        if header_len > HEADER_LEN_MAX || header_len > file_len - LEN_LEN {
            return Err(refuse(format!(
                "not a safetensors file: header of {header_len} bytes in a file of {file_len} bytes"
            )));
        }
        let mut bytes = vec![0; (LEN_LEN + header_len) as usize];
        file.read_exact_at(&mut bytes, 0).map_err(cannot)?;
        let header = Header::parse(bytes).map_err(&refuse)?;
        if header.file_len() != file_len {
            return Err(refuse(format!(
                "header describes a file of {} bytes, but the file has {file_len} bytes",
                header.file_len()
            )));
        }
        Ok(Self { header, file: Arc::new(file), path: path.to_owned() })
    }

    /// Reads bytes at an offset from the start of the file.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), Failure> {
        self.file.read_exact_at(out, offset).map_err(|error| self.cannot_read(&error))
    }

    /// Returns the failure for a read error of the file.
    pub fn cannot_read(&self, error: &io::Error) -> Failure {
        Failure::Environment(format!("{}: cannot read: {error}", self.path.display()))
    }

    /// Returns a source that reads the tensor's bytes from the file when a batch is committed. A read fails if Ctrl-C
    /// was pressed.
    pub fn source(&self, tensor: &Tensor, interrupt: &Interrupt) -> Arc<dyn ByteSource> {
        let (file, interrupt) = (self.file.clone(), interrupt.clone());
        Arc::new(TensorSource { file, start: tensor.offset, interrupt })
    }
}

/// Reads the bytes of one tensor from its file while a batch is committed.
#[derive(Debug)]
struct TensorSource {
    file: Arc<File>,
    /// Offset of the tensor from the start of the file.
    start: u64,
    interrupt: Interrupt,
}

impl ByteSource for TensorSource {
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        if self.interrupt.is_noted() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        self.file.read_exact_at(bytes, self.start + offset)
    }
}

/// Returns the key of the page for a tensor. The key is the name of the tensor if possible, otherwise the start of the
/// name and a checksum. `taken` must return true for a key that belongs to another page.
pub fn key_of(name: &str, taken: impl Fn(&Key) -> bool) -> Key {
    if name != HEADER_KEY
        && let Ok(key) = Key::new(name)
        && !taken(&key)
    {
        return key;
    }
    let checksum = crc32fast::hash(name.as_bytes());
    let mut tries = 0_u64;
    loop {
        let ending = if tries == 0 { format!("~{checksum:08x}") } else { format!("~{checksum:08x}.{tries}") };
        let fits = |start: &usize| start + ending.len() <= KEY_LEN_MAX;
        let end_of = |(start, letter): (usize, char)| start + letter.len_utf8();
        let start = name.char_indices().map(end_of).take_while(fits).last().unwrap_or(0);
        let key = Key::new(format!("{}{ending}", &name[..start]))
            .expect("the text was shortened to the length of a key");
        if !taken(&key) {
            return key;
        }
        tries += 1;
    }
}

/// Returns the full name of the tensor in a page, or `None` if the page contains no tensor.
pub fn name_of(info: &PageInfo) -> Option<&str> {
    match info.metadata.get(NAME) {
        Some(Value::String(name)) => Some(name),
        _ => None,
    }
}

/// Returns the dtype in the metadata of a page, or `None` if the metadata contains no valid dtype.
pub fn dtype_of(info: &PageInfo) -> Option<Dtype> {
    match info.metadata.get(DTYPE) {
        Some(Value::String(name)) => dtype::parse(name),
        _ => None,
    }
}

/// Returns the name and the dtype of a page's tensor if the safetensors format does not support the dtype.
pub fn foreign_dtype(info: &PageInfo) -> Option<(&str, &str)> {
    match (name_of(info), info.metadata.get(DTYPE)) {
        (Some(name), Some(Value::String(dtype))) if dtype::parse(dtype).is_none() => Some((name, dtype)),
        _ => None,
    }
}

/// Returns the shape in the metadata of a page, or `None` if the metadata contains no valid shape.
pub fn shape_of(info: &PageInfo) -> Option<Vec<u64>> {
    let Some(Value::List(dimensions)) = info.metadata.get(SHAPE) else { return None };
    let number = |dimension: &Value| match dimension {
        Value::U64(number) => Some(*number),
        _ => None,
    };
    dimensions.iter().map(number).collect()
}

/// Returns true if a page contains the header of the file.
pub fn is_header(info: &PageInfo) -> bool {
    info.key.as_ref().is_some_and(|key| key.as_bytes() == HEADER_KEY.as_bytes())
}

/// Returns the name of a page for messages: the full name of its tensor, otherwise its key, otherwise its id.
pub fn label(info: &PageInfo) -> String {
    match (name_of(info), &info.key) {
        (Some(name), _) => name.escape_debug().to_string(),
        (None, Some(key)) => key.to_string(),
        (None, None) => format!("page {}", info.page),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_name_is_its_own_key() {
        let free = |_: &Key| false;
        assert_eq!(key_of("layer.0.weight", free).as_bytes(), b"layer.0.weight");
        let fits = "x".repeat(64);
        assert_eq!(key_of(&fits, free).as_bytes(), fits.as_bytes());
        for name in ["", HEADER_KEY, &"x".repeat(65), &"é".repeat(40)] {
            let key = key_of(name, free);
            let ending = format!("~{:08x}", crc32fast::hash(name.as_bytes()));
            assert!(key.as_str().unwrap().ends_with(&ending), "{key}");
            assert!(key.as_bytes().len() <= KEY_LEN_MAX);
        }
    }

    #[test]
    fn taken_key_is_not_used_again() {
        let mut keys: Vec<Key> = Vec::new();
        for _ in 0..12 {
            let key = key_of("w", |key| keys.contains(key));
            keys.push(key);
        }
        assert_eq!(keys[0].as_bytes(), b"w");
        assert!(keys[11].as_str().unwrap().ends_with(".10"), "{}", keys[11]);
    }

    #[test]
    fn inconsistent_header_is_refused() {
        let parse =
            |json: &str| Header::parse([&(json.len() as u64).to_le_bytes(), json.as_bytes()].concat());
        let good = r#"{"b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}} "#;
        let header = parse(good).unwrap();
        assert_eq!(header.tensors.iter().map(|tensor| &tensor.name[..]).collect::<Vec<_>>(), ["b", "a"]);
        assert_eq!(header.file_len(), good.len() as u64 + 10);
        for bad in [
            "",
            "{",
            "[]",
            r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#,
            r#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,2]}}"#,
            r#"{"a":{"dtype":"U9","shape":[2],"data_offsets":[0,2]}}"#,
            r#"{"a":{"dtype":"F4","shape":[1],"data_offsets":[0,1]}}"#,
            r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#,
            r#"{"a":{"dtype":"U64","shape":[4294967296,4294967296,4],"data_offsets":[0,0]}}"#,
            r#"{"a":{"dtype":"U8","shape":[],"data_offsets":[18446744073709551615,0]}}"#,
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
