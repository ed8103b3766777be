//! The compiled kernels match their sources, and the host's tables match those of the kernels.
//!
//! `kernels/build.py --check` recompiles the kernels, which needs the pinned compiler. These tests need no
//! compiler, so they detect on every machine that a build was forgotten after a change.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use remanent::device::DIGEST_KEY_LEN;
use remanent::device::cuda::abi::{self, KERNELS};
use remanent::device::cuda::modules::MODULES;

/// The newest PTX version that drivers of CUDA 12.4 accept.
const PTX_VERSION_MAX: (u32, u32) = (8, 4);

fn read(path: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels").join(path);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the words of those lines of the build record that begin with `kind`, without that word.
fn recorded(record: &str, kind: &str) -> Vec<Vec<String>> {
    let lines = record.lines().map(|line| line.split(' ').map(str::to_owned).collect::<Vec<_>>());
    lines.filter(|words| words[0] == kind).map(|words| words[1..].to_vec()).collect()
}

fn record() -> String {
    String::from_utf8(read("compiled/record.txt")).unwrap()
}

/// Returns the names and checksums in those lines of the build record that have this kind.
fn checksums(record: &str, kind: &str) -> BTreeMap<String, String> {
    recorded(record, kind).into_iter().map(|words| (words[0].clone(), words[2].clone())).collect()
}

#[test]
fn compiled_kernels_match_sources() {
    let sources = checksums(&record(), "source");
    let mut expected: Vec<String> = MODULES.iter().map(|module| format!("{}.cu", module.name)).collect();
    expected.push("common.cuh".to_owned());
    expected.sort();
    assert_eq!(sources.keys().cloned().collect::<Vec<_>>(), expected);
    for (path, crc) in sources {
        let found = format!("{:08x}", crc32fast::hash(&read(&path)));
        assert_eq!(found, crc, "kernels/{path} changed since kernels/build.py last ran");
    }
}

#[test]
fn embedded_kernels_match_record() {
    let outputs = checksums(&record(), "output");
    assert_eq!(outputs.len(), 2 * MODULES.len());
    for module in MODULES {
        let embedded = [
            (format!("{}.compute_80.ptx", module.name), module.ptx.as_bytes()),
            (format!("{}.sm_90.cubin", module.name), module.cubin_sm_90),
        ];
        for (path, bytes) in embedded {
            assert_eq!(format!("{:08x}", crc32fast::hash(bytes)), outputs[&path], "{path}");
        }
    }
}

#[test]
fn ptx_is_old_enough_for_the_oldest_driver_and_gpu() {
    for module in MODULES {
        let word_after = |directive: &str| {
            let line = module.ptx.lines().find_map(|line| line.strip_prefix(directive)).unwrap();
            line.trim().to_owned()
        };
        let version = word_after(".version ");
        let (major, minor) = version.split_once('.').unwrap();
        let version = (major.parse::<u32>().unwrap(), minor.parse::<u32>().unwrap());
        assert!(version <= PTX_VERSION_MAX, "{}: PTX {version:?}", module.name);
        assert_eq!(word_after(".target "), "sm_80", "{}", module.name);
    }
}

#[test]
fn every_kernel_exists_and_does_not_spill() {
    let costs = recorded(&record(), "kernel");
    let mut names: Vec<&str> = costs.iter().map(|words| words[0].as_str()).collect();
    let mut expected: Vec<&str> = KERNELS.iter().map(|kernel| kernel.name).collect();
    names.sort_unstable();
    expected.sort_unstable();
    assert_eq!(names, expected);
    for words in &costs {
        assert_eq!(words[3..], ["stack", "0", "spill_stores", "0", "spill_loads", "0"], "{}", words[0]);
    }
    for kernel in KERNELS {
        let module = MODULES[kernel.module];
        let entry = format!(".entry {}(", kernel.name);
        assert!(module.ptx.contains(&entry), "{} is not in {}", kernel.name, module.name);
        // The launch attributes in the kernel's source must equal the attributes that the host uses to launch
        // the kernel.
        let from_entry = &module.ptx[module.ptx.find(&entry).unwrap()..];
        let threads = from_entry.lines().find_map(|line| line.strip_prefix(".maxntid ")).unwrap();
        assert_eq!(threads, format!("{}, 1, 1", kernel.threads), "{}", kernel.name);
    }
}

#[test]
fn host_and_kernels_agree_on_constants() {
    let header = String::from_utf8(read("common.cuh")).unwrap();
    let mut declared: BTreeMap<&str, &str> = header
        .lines()
        .filter_map(|line| {
            line.strip_prefix("constexpr ")?.strip_suffix(';')?.split_once(' ')?.1.split_once(" = ")
        })
        .collect();
    let expected = [
        ("PIECE_DENSE", abi::PIECE_DENSE.to_string()),
        ("PIECE_MASKED", abi::PIECE_MASKED.to_string()),
        ("PIECE_SPARSE", abi::PIECE_SPARSE.to_string()),
        ("PIECE_FILL", abi::PIECE_FILL.to_string()),
        ("PIECE_PICK", abi::PIECE_PICK.to_string()),
        ("MASK_STEPS", abi::MASK_STEPS.to_string()),
        ("CRC_FIRST", abi::CRC_FIRST.to_string()),
        ("CRC_LAST", abi::CRC_LAST.to_string()),
        ("CRC_CHUNK_LEN", format!("{} << 10", abi::CRC_CHUNK_LEN >> 10)),
        ("DIGEST_CHUNK_LEN", format!("{} << 10", abi::DIGEST_CHUNK_LEN >> 10)),
        ("DIGEST_KEY_LEN", DIGEST_KEY_LEN.to_string()),
        ("OUT_OF_BOUNDS", abi::OUT_OF_BOUNDS.to_string()),
        ("TWICE", abi::TWICE.to_string()),
    ];
    for (name, value) in &expected {
        assert_eq!(declared.get(name), Some(&value.as_str()), "{name}");
    }
    // Only the kernels use this constant.
    declared.remove("FULL_WARP");
    assert_eq!(declared.len(), expected.len(), "{declared:?}");
}
