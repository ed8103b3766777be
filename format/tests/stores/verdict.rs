//! Expected results of reading a store, and the store of four batches that most tests start from.

use remanent_format::state::rebuild::{RebuildOptions, RebuiltStore, rebuild};
use remanent_format::{Epoch, FileName, Lsn};

use crate::maker::{Maker, PAGE, content, root};

/// The expected result of reading a store.
#[derive(Debug)]
pub enum Verdict {
    /// The state at this Lsn. No torn tail is cut off.
    Clean(u64),
    /// The state at the first Lsn. The torn tail starts with the next batch, and the second Lsn is the last batch in
    /// the tail.
    Torn(u64, u64),
    /// An error whose damage contains this text.
    Refused(&'static str),
}
pub use Verdict::{Clean, Refused, Torn};

pub fn rebuilt(maker: &Maker) -> Result<RebuiltStore, String> {
    rebuild(&maker.files, &RebuildOptions::default()).map_err(|damage| damage.to_string())
}

pub fn check_state(why: &str, rebuilt: &RebuiltStore, lsn: u64) {
    assert_eq!(rebuilt.table.lsn(), Lsn(lsn), "{why}");
    let info = rebuilt.table.get(PAGE).unwrap_or_else(|| panic!("{why}: the page is gone"));
    assert_eq!((info.lsn, info.epoch), (Lsn(lsn), Epoch(lsn)), "{why}");
    assert_eq!(rebuilt.contents[&PAGE], content(lsn), "{why}");
    assert_eq!(rebuilt.table.root(), &root(lsn), "{why}");
}

pub fn check(why: &str, maker: &Maker, verdict: &Verdict) {
    let found = rebuilt(maker);
    match (verdict, &found) {
        (Refused(text), Err(damage)) => assert!(damage.contains(text), "{why}: {damage}, expected {text}"),
        (Clean(lsn) | Torn(lsn, _), Ok(rebuilt)) => {
            check_state(why, rebuilt, *lsn);
            let torn = rebuilt.end.as_ref().and_then(|end| end.torn.as_ref());
            let torn = torn.map(|torn| (torn.first.0, torn.last.0));
            let expected = if let Torn(lsn, last) = verdict { Some((lsn + 1, *last)) } else { None };
            assert_eq!(torn, expected, "{why}");
        }
        _ => panic!("{why}: {found:?}, expected {verdict:?}"),
    }
}

/// Creates a store of four batches, in four groups and two segments. A durable mark covers only the first two batches.
pub fn four() -> Maker {
    let mut maker = Maker::new();
    maker.batch().batch().sync();
    maker.batch().batch();
    maker
}

/// Recomputes the checksum of a frame's header.
pub fn resum(frame: &mut [u8]) {
    let crc = crc32fast::hash(&frame[..76]);
    frame[76..80].copy_from_slice(&crc.to_le_bytes());
}

pub fn segment(maker: &mut Maker, number: u64) -> &mut Vec<u8> {
    maker.files.0.get_mut(&FileName::Segment(number)).expect("a segment")
}
