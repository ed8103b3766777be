//! Damage to logs and images beyond 4 GiB.

use remanent_format::judge::{ImageProofs, judge};
use remanent_format::state::rebuild::{RebuildOptions, rebuild};
use remanent_format::state::survey::Survey;
use remanent_format::{FileName, Place};

use crate::far_store::{FAR, FarStore, SparseFiles, far_store};
use crate::maker::{PAGE, PAGE_LEN, content};

#[test]
fn damage_beyond_four_gibibytes_has_its_offset() {
    let FarStore { files, frames } = far_store(PAGE_LEN as u64, Place::Host);
    assert!(frames.iter().all(|at| *at > u64::from(u32::MAX)));
    let found = |files: &SparseFiles| {
        let verdict = judge(&Survey::read(files).unwrap(), files, &mut ImageProofs::new(files));
        let rebuilt = rebuild(files, &RebuildOptions::default());
        assert_eq!(verdict.opens_from.is_some(), rebuilt.is_ok());
        rebuilt.map(|rebuilt| (rebuilt.table.lsn().0, rebuilt.contents[&PAGE].clone()))
    };
    assert_eq!(found(&files).unwrap(), (3, content(3)));
    let flipped = |file: FileName, piece: u64, at: usize| {
        let mut files = files.clone();
        files.0.get_mut(&file).unwrap().pieces.get_mut(&piece).unwrap()[at] ^= 1;
        files
    };
    let place =
        |files: &SparseFiles| found(files).map_err(|damage| (damage.file, damage.offset)).unwrap_err();
    let (log, pages) = (FileName::Segment(1), FileName::Pages(1));
    assert_eq!(place(&flipped(log, frames[0], 90)), (log, frames[0]), "a batch under a mark");
    assert_eq!(found(&flipped(log, frames[1], 90)).unwrap().0, 2, "a torn tail");
    assert_eq!(place(&flipped(pages, FAR, 3)), (pages, FAR), "an image");
    // Truncate the file to its length modulo 2^32.
    for (file, at) in [(log, 0), (pages, FAR)] {
        let mut cut = files.clone();
        let file_of = cut.0.get_mut(&file).unwrap();
        file_of.len &= u64::from(u32::MAX);
        file_of.pieces.retain(|piece, _| *piece <= 4096);
        assert_eq!(place(&cut), (file, at), "{file} cut");
    }
}
