//! Imports and exports files of weights.
//!
//! The guarantees: any file is imported or rejected without a panic, without allocating more than its length
//! justifies, and without reporting the store as damaged. An imported file is exported byte for byte, for
//! each version, whichever versions precede and follow it. Importing a file twice does not create a second
//! version.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arbitrary::{Arbitrary, Unstructured};
use remanent::device::host::HostDevice;
use remanent::options::{LogOptions, Retention, ScrubSchedule, SnapshotSchedule};
use remanent::testing::sim_disk::SimDisk;
use remanent::{Options, Store};
use remanent_format::Lsn;
use remanent_tools::{self as tools, Ending, Failure};
use serde_json::{Deserializer, Value};

use crate::inspections::lay;

/// Maximum number of versions in a history, and of tensors in each. Larger numbers find nothing more.
const VERSIONS_MAX: usize = 5;
const TENSORS_MAX: usize = 8;
const ELEMENTS_MAX: usize = 1500;
/// Length in bytes of the header length at the start of a file.
const LEN_LEN: usize = 8;
/// Maximum number of tensor bytes that a generated file contains after its header.
const DATA_LEN_MAX: u64 = 1 << 16;

/// Names of tensors: names that are valid keys, names that are too long for a key, a name that resembles one
/// derived from another name, and the reserved name that no tensor's page has.
const NAMES: [&str; 10] = [
    "",
    "w",
    "~00000000",
    "safetensors header",
    "layer.0.weight",
    "gewicht \\u00e9 \\n\\\"",
    "model.layers.0.block_sparse_moe.experts.0.w1.weight.model.layers.0",
    "model.layers.0.block_sparse_moe.experts.0.w1.weight.model.layers.1",
    "ééééééééééééééééééééééééééééééééééé",
    "__metadata",
];
/// Kinds of elements, with their lengths in bytes.
const DTYPES: [(&str, usize); 8] =
    [("U8", 1), ("BOOL", 1), ("F8_E4M3", 1), ("BF16", 2), ("I16", 2), ("F32", 4), ("F64", 8), ("C64", 8)];

/// One tensor of a version.
#[derive(Arbitrary, Clone, Copy, Debug)]
struct Tensor {
    name: u8,
    dtype: u8,
    count: u16,
    /// The seed of the bytes. Versions with the same seed share most of their bytes.
    seed: u8,
    /// One byte in every `stride + 1` differs from the seeded bytes.
    stride: u8,
    /// The value of a differing byte.
    changed: u8,
}

impl Tensor {
    fn bytes(self) -> Vec<u8> {
        let width = DTYPES[usize::from(self.dtype) % DTYPES.len()].1;
        let len = usize::from(self.count) % ELEMENTS_MAX * width;
        let byte = |at: usize| match at % (usize::from(self.stride) + 1) {
            0 => self.changed,
            _ => self.seed.wrapping_mul(31).wrapping_add(at as u8),
        };
        (0..len).map(byte).collect()
    }
}

/// Tests a file exactly as the fuzzer generated it, the same file with corrected lengths, and a history of
/// versions derived from the input.
pub fn import(data: &[u8]) {
    let room = Room::new();
    room.any(data);
    if let Some(fitted) = fit(data) {
        room.any(&fitted);
    }
    room.history(&versions(data));
}

/// Corrects the header length, as far as the header is JSON, and extends the file to the length that its
/// tensors state. Returns `None` if the input contains no JSON.
fn fit(data: &[u8]) -> Option<Vec<u8>> {
    let json = data.get(LEN_LEN..)?;
    let mut values = Deserializer::from_slice(json).into_iter::<Value>();
    let header = values.next()?.ok()?;
    let spaces = json[values.byte_offset()..].iter().take_while(|byte| **byte == b' ').count();
    let (json, data) = json.split_at(values.byte_offset() + spaces);
    let ends = header.as_object()?.values().filter_map(|tensor| tensor.get("data_offsets")?.get(1)?.as_u64());
    let data_len = ends.filter(|end| *end <= DATA_LEN_MAX).max().unwrap_or_default();
    let mut data = data.to_vec();
    data.resize(usize::try_from(data_len).ok()?, 0);
    Some([&(json.len() as u64).to_le_bytes(), json, &data].concat())
}

/// Returns the history of weight files that the input encodes. Missing input bytes are zeros.
pub fn versions(data: &[u8]) -> Vec<Vec<u8>> {
    let mut raw = Unstructured::new(data);
    let mut version = || -> arbitrary::Result<Vec<u8>> {
        let (turn, count) = (raw.arbitrary()?, raw.int_in_range(0..=TENSORS_MAX)?);
        let tensors: Vec<Tensor> = (0..count).map(|_| raw.arbitrary()).collect::<Result<_, _>>()?;
        Ok(file(turn, &tensors))
    };
    (0..VERSIONS_MAX).map_while(|_| version().ok()).collect()
}

/// Returns a file that contains these tensors. Of several tensors with one name, only the first is used. The
/// header lists them in another order, with trailing spaces.
fn file(turn: u8, tensors: &[Tensor]) -> Vec<u8> {
    let (mut names, mut data, mut entries) = (Vec::new(), Vec::new(), Vec::new());
    for tensor in tensors {
        let name = NAMES[usize::from(tensor.name) % NAMES.len()];
        if names.contains(&name) {
            continue;
        }
        names.push(name);
        let (dtype, width) = DTYPES[usize::from(tensor.dtype) % DTYPES.len()];
        let start = data.len();
        data.extend_from_slice(&tensor.bytes());
        let count = (data.len() - start) / width;
        let end = data.len();
        entries.push(format!(
            r#""{name}":{{"dtype":"{dtype}","shape":[1,{count}],"data_offsets":[{start},{end}]}}"#
        ));
    }
    if turn % 2 == 1 {
        entries.push(format!(r#""__metadata__":{{"format":"pt","turn":"{turn}"}}"#));
    }
    let turned = usize::from(turn).checked_rem(entries.len()).unwrap_or_default();
    entries.rotate_left(turned);
    let header = format!("{{{}}}{}", entries.join(","), " ".repeat(usize::from(turn % 8)));
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}

/// The folder that contains the files while they are imported and exported.
struct Room(tempfile::TempDir);

impl Room {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary directory can be made"))
    }

    fn put(&self, bytes: &[u8]) -> PathBuf {
        let path = self.0.path().join("file.safetensors");
        fs::write(&path, bytes).expect("a file can be written");
        path
    }

    /// Tests a file that may not contain weights.
    fn any(&self, bytes: &[u8]) {
        let (disk, store) = open();
        match tools::import(&store, &self.put(bytes)) {
            Ok(is_new) => assert!(is_new, "an empty store holds no version"),
            Err(Failure::Environment(_)) => {
                assert_eq!(store.lsn(), Lsn(0), "a file that is refused leaves nothing");
                return;
            }
            Err(other) => panic!("an empty store is blamed for a file: {other:?}"),
        }
        self.export(&disk, store, &[(Lsn(1), bytes.to_vec())]);
    }

    /// Tests files of weights, one version after the other.
    fn history(&self, versions: &[Vec<u8>]) {
        let (disk, store) = open();
        let mut held: Vec<(Lsn, Vec<u8>)> = Vec::new();
        for version in versions {
            let path = self.put(version);
            let is_new =
                tools::import(&store, &path).unwrap_or_else(|why| panic!("a sound file is refused: {why:?}"));
            let before = held.last().map(|(_, bytes)| bytes);
            assert_eq!(is_new, before != Some(version), "a version is made where something changed");
            assert_eq!(tools::import(&store, &path), Ok(false), "imported twice");
            if is_new {
                held.push((store.lsn(), version.clone()));
            }
        }
        self.export(&disk, store, &held);
    }

    /// Closes a store, and exports each version from the remaining disk.
    fn export(&self, disk: &SimDisk, store: Store, versions: &[(Lsn, Vec<u8>)]) {
        store.close().unwrap_or_else(|error| panic!("a store of weights does not close: {error}"));
        let dir = self.0.path().join("store");
        lay(disk, &dir);
        let target = self.0.path().join("exported");
        let name = |path: &Path| path.to_str().expect("a temporary name is UTF-8").to_owned();
        for (lsn, bytes) in versions {
            let at = format!("lsn:{lsn}");
            let outcome = tools::run(&["export", &name(&dir), &name(&target), "--at", &at], &mut Vec::new());
            assert_eq!(outcome, Ok(Ending::Fine), "lsn {lsn} is not exported");
            let exported = fs::read(&target).expect("an exported file is there");
            assert!(exported == *bytes, "lsn {lsn} is exported with other bytes");
        }
        fs::remove_dir_all(&dir).expect("a directory of ours can be removed");
    }
}

/// Creates an empty store on a simulated disk that keeps everything, as the command's disk does.
fn open() -> (SimDisk, Store) {
    let disk = SimDisk::new();
    let options = Options::new()
        .log(LogOptions::new().segment_len(16 << 10))
        .retention(Retention::new().snapshots_kept(usize::MAX).log_kept(u64::MAX));
    let options = options.snapshots(SnapshotSchedule::never()).scrubs(ScrubSchedule::new().interval(None));
    let store = Store::open_on(Arc::new(disk.clone()), Arc::new(HostDevice::new()), options);
    (disk, store.expect("an empty disk takes a store"))
}
