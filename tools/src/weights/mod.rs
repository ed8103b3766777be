//! The safetensors files of a store: tensors, their names and keys, and the file's header.
//!
//! A safetensors file consists of 8 bytes with the length of a JSON header, the header, and the tensors'
//! bytes back to back. In a store each tensor is a page, with `dtype` and `shape` in its metadata. One more
//! page holds the header with its 8 bytes, unchanged. The file can therefore be restored byte for byte,
//! whatever order, spaces or metadata its header has, and headers have versions as any other page.

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

/// The key of the page that holds the file's header. No tensor gets this key, whatever its name.
pub const HEADER_KEY: &str = "safetensors header";

/// The maximum length of a header, in bytes: the limit of the safetensors library.
const HEADER_LEN_MAX: u64 = 100_000_000;
/// The length of the header's length field.
const LEN_LEN: u64 = 8;

/// The metadata entry of a tensor's dtype.
const DTYPE: &str = "dtype";
/// The metadata entry of a tensor's shape.
const SHAPE: &str = "shape";
/// The metadata entry of a tensor's full name, which is also the page's key if it can be one.
const NAME: &str = "name";

/// One tensor of a file.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// The full name.
    pub name: String,
    /// The dtype of the elements.
    pub dtype: Dtype,
    /// The tensor's shape.
    pub shape: Vec<u64>,
    /// The offset of its bytes from the file's start.
    pub offset: u64,
    /// The number of its bytes.
    pub len: u64,
}

impl Tensor {
    /// Returns the metadata of the tensor's page.
    pub fn metadata(&self) -> Metadata {
        let shape = self.shape.iter().map(|dimension| Value::U64(*dimension)).collect();
        Metadata::from([
            (NAME.to_owned(), Value::String(self.name.clone())),
            (DTYPE.to_owned(), Value::String(self.dtype.to_string())),
            (SHAPE.to_owned(), Value::List(shape)),
        ])
    }
}

/// The header of a file, parsed.
#[derive(Clone, Debug)]
pub struct Header {
    /// The header as it is in the file, preceded by its length.
    pub bytes: Vec<u8>,
    /// The tensors, in the order of their bytes.
    pub tensors: Vec<Tensor>,
}

impl Header {
    /// Parses and checks a header: the tensors cover the bytes after the header without gaps or overlaps, and
    /// each has the length that shape and dtype give.
    pub fn parse(bytes: Vec<u8>) -> Result<Self, String> {
        let json = bytes.get(LEN_LEN as usize..).ok_or("header is truncated")?;
        let metadata: safetensors::tensor::Metadata =
            serde_json::from_slice(json).map_err(|error| format!("header cannot be parsed: {error}"))?;
        let mut infos: Vec<_> = metadata.tensors().into_iter().collect();
        // Empty tensors share an offset with a neighbor; any order among them is valid, as long as it is
        // always the same.
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

    /// Returns the length of the whole file.
    pub fn file_len(&self) -> u64 {
        self.tensors.last().map_or(self.bytes.len() as u64, |tensor| tensor.offset + tensor.len)
    }
}

/// A safetensors file, open for reading.
pub struct WeightsFile {
    /// The header, parsed and checked.
    pub header: Header,
    file: Arc<File>,
    path: PathBuf,
}

impl WeightsFile {
    /// Opens a file and reads its header.
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
        // No length is trusted before it was compared with the file's length and the limit.
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

    /// Reads bytes at an offset from the file's start.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), Failure> {
        self.file.read_exact_at(out, offset).map_err(|error| self.cannot_read(&error))
    }

    /// Returns the failure of a read of the file.
    pub fn cannot_read(&self, error: &io::Error) -> Failure {
        Failure::Environment(format!("{}: cannot read: {error}", self.path.display()))
    }

    /// Returns a source of a tensor's bytes, which is read when a batch is committed. After Ctrl-C its reads
    /// fail.
    pub fn source(&self, tensor: &Tensor, interrupt: &Interrupt) -> Arc<dyn ByteSource> {
        let (file, interrupt) = (self.file.clone(), interrupt.clone());
        Arc::new(TensorSource { file, start: tensor.offset, interrupt })
    }
}

/// The bytes of one tensor in its file.
#[derive(Debug)]
struct TensorSource {
    file: Arc<File>,
    /// The offset of the tensor from the file's start.
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

/// Returns the key of a tensor's page: the name if it can be a key, else its beginning and a checksum.
/// `taken` returns whether another page has a key.
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
        let key = Key::new(format!("{}{ending}", &name[..start])).expect("it was cut to a key's length");
        if !taken(&key) {
            return key;
        }
        tries += 1;
    }
}

/// Returns the full name of the tensor in a page; `None` if the page holds none.
pub fn name_of(info: &PageInfo) -> Option<&str> {
    match info.metadata.get(NAME) {
        Some(Value::String(name)) => Some(name),
        _ => None,
    }
}

/// Returns the dtype of a page's elements, if its metadata states one.
pub fn dtype_of(info: &PageInfo) -> Option<Dtype> {
    match info.metadata.get(DTYPE) {
        Some(Value::String(name)) => dtype::parse(name),
        _ => None,
    }
}

/// Returns the name and the dtype of the tensor in a page, if no safetensors file can hold it.
pub fn foreign_dtype(info: &PageInfo) -> Option<(&str, &str)> {
    match (name_of(info), info.metadata.get(DTYPE)) {
        (Some(name), Some(Value::String(dtype))) if dtype::parse(dtype).is_none() => Some((name, dtype)),
        _ => None,
    }
}

/// Returns the shape of a page, if its metadata states one.
pub fn shape_of(info: &PageInfo) -> Option<Vec<u64>> {
    let Some(Value::List(dimensions)) = info.metadata.get(SHAPE) else { return None };
    let number = |dimension: &Value| match dimension {
        Value::U64(number) => Some(*number),
        _ => None,
    };
    dimensions.iter().map(number).collect()
}

/// Returns whether a page holds the file's header.
pub fn is_header(info: &PageInfo) -> bool {
    info.key.as_ref().is_some_and(|key| key.as_bytes() == HEADER_KEY.as_bytes())
}

/// Returns the name of a page for people: its tensor's full name, else its key, else its number.
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
