//! The fuzz targets of the command, without the fuzzer: on every input in the repository, and on stores and
//! files that would make them fail if the command were wrong.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use remanent::error::{FileName, Folder};

use crate::archive::Files;
use crate::command::Scratch;
use crate::imports;
use crate::inspect::small_store;
use crate::inspections;
use crate::weights::noise;

fn fuzz() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz")
}

/// Returns every input in the repository below these folders of `fuzz/`.
fn inputs(folders: &[&str]) -> Vec<Vec<u8>> {
    let files = folders.iter().flat_map(|folder| fs::read_dir(fuzz().join(folder)).unwrap());
    files.map(|entry| fs::read(entry.unwrap().path()).unwrap()).collect()
}

#[test]
fn repository_inputs_pass_the_inspection_target() {
    let inputs = inputs(&["seeds/rebuild", "seeds/directory", "found"]);
    assert!(inputs.len() > 8, "only {} inputs were found", inputs.len());
    inputs.iter().for_each(|input| inspections::inspection(input));
}

#[test]
fn repository_inputs_pass_the_import_target() {
    let inputs = inputs(&["seeds/import", "found"]);
    assert!(inputs.len() > 3, "only {} inputs were found", inputs.len());
    inputs.iter().for_each(|input| imports::import(input));
}

/// Reads the files of a store in a directory.
fn files(dir: &str) -> Files {
    let folders = [Folder::Root].into_iter().chain(Folder::INNER);
    let files = folders.flat_map(|folder| {
        let entries = fs::read_dir(Path::new(dir).join(folder.name())).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_file());
        paths.map(move |path| (FileName::parse(folder, path.file_name().unwrap().to_str().unwrap()), path))
    });
    Files(files.filter_map(|(name, path)| Some((name?, fs::read(path).unwrap()))).collect::<BTreeMap<_, _>>())
}

#[test]
fn inspection_fuzz_target_rejects_only_damaged_stores() {
    let scratch = Scratch::new();
    small_store(&scratch).close().unwrap();
    let mut files = Files::from_archive(&files(&scratch.store()).to_archive());
    assert!(inspections::inspect(&files), "a sound store");
    let images = files.0.get_mut(&FileName::Pages(1)).unwrap();
    let last = images.iter().rposition(|byte| *byte != 0).unwrap();
    images[last] ^= 1;
    assert!(!inspections::inspect(&files), "an image is damaged");
}

#[test]
fn import_target_restores_every_version() {
    let mut changes = 0;
    for seed in 0..40 {
        let bytes = noise(seed, 400);
        imports::import(&bytes);
        changes += imports::versions(&bytes).windows(2).filter(|pair| pair[0] != pair[1]).count();
    }
    assert!(changes > 100, "only {changes} versions differ from the one before");
}
