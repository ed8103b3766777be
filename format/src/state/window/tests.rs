//! Compares windows of pages with the same bytes of whole pages.

use super::{PageWindow, load_window};
use crate::defect::Defect;
use crate::ids::{PageId, Place, Width};
use crate::image::proven::ProvenImage;
use crate::image::{Codec, ImageRef};
use crate::names::{FileName, Folder, ReadAt};
use crate::op::{Indices, Op, PayloadWriter, decode_payload, gap_coded};
use crate::state::apply::apply;
use crate::state::trail::reach;
use crate::value::Metadata;

const PAGE: PageId = PageId(1);
/// Maximum length of a page in these tests, in bytes.
const PAGE_LEN_MAX: u64 = 200;

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }

    fn bytes(&mut self, len: u64) -> Vec<u8> {
        (0..len).map(|_| self.below(256) as u8).collect()
    }
}

/// Appends a random operation that is valid for a page of `len` bytes. Returns the new length of the page.
fn draw(random: &mut Random, ops: &mut PayloadWriter, len: u64) -> u64 {
    let width = Width::from_bytes(1 << random.below(5)).unwrap();
    let element = width.bytes() as u64;
    let offset = random.below(len + 1);
    let room = len - offset;
    let written = random.below(room + 1);
    let bytes = random.bytes(written);
    let count = room / element;
    let elements = random.bytes(count * element);
    match random.below(8) {
        0 => ops.push(&Op::Write { page: PAGE, offset, bytes: &bytes }),
        1 => {
            let mut mask = random.bytes(count.div_ceil(8));
            if let Some(last) = mask.last_mut().filter(|_| !count.is_multiple_of(8)) {
                *last &= (1 << (count % 8)) - 1;
            }
            ops.push(&Op::Masked { page: PAGE, offset, width, mask: &mask, bytes: &elements })
        }
        kind @ 2..=3 => {
            let drawn: Vec<u32> = (0..count as u32).filter(|_| random.below(3) > 0).collect();
            let plain: Vec<u8> = drawn.iter().flat_map(|index| index.to_le_bytes()).collect();
            let gaps = gap_coded(&drawn).unwrap();
            let indices =
                if kind == 2 { Indices::plain(&plain) } else { Indices::gaps(&gaps, drawn.len()).unwrap() };
            let values = &elements[..drawn.len() * width.bytes()];
            ops.push(&Op::Scatter { page: PAGE, width, base: offset, indices, values })
        }
        4 => {
            let pattern = random.bytes(element);
            ops.push(&Op::Fill { page: PAGE, offset, len: count * element, pattern: &pattern })
        }
        5..=6 => {
            let len = random.below(PAGE_LEN_MAX + 1);
            ops.push(&Op::Resize { page: PAGE, len }).unwrap();
            return len;
        }
        _ => {
            let len = random.below(PAGE_LEN_MAX + 1);
            let (place, key, metadata) = (Place::Host, None, Metadata::new());
            ops.push(&Op::Delete { page: PAGE }).unwrap();
            ops.push(&Op::Create { page: PAGE, len, place, key, metadata }).unwrap();
            return len;
        }
    }
    .unwrap();
    len
}

/// Returns true if an element of the operation extends across byte `end`.
fn straddles(op: &Op<'_>, end: u64) -> bool {
    let lies_across = |start: u64, len: u64| start < end && end < start + len;
    match op {
        Op::Write { offset, bytes, .. } => lies_across(*offset, bytes.len() as u64),
        Op::Masked { offset, width, mask, bytes, .. } => {
            let element = width.bytes() as u64;
            let is_set = |index: u64| mask[index as usize / 8] >> (index % 8) & 1 == 1;
            (0..bytes.len() as u64 / element)
                .any(|index| is_set(index) && lies_across(offset + index * element, element))
        }
        Op::Scatter { width, base, indices, .. } => {
            let element = width.bytes() as u64;
            indices.iter().any(|index| lies_across(base + u64::from(index) * element, element))
        }
        Op::Fill { offset, len, pattern, .. } => {
            lies_across(*offset, *len) && !(end - offset).is_multiple_of(pattern.len() as u64)
        }
        _ => false,
    }
}

#[test]
fn window_contains_the_same_bytes_as_the_page() {
    let kinds = ["write", "masked", "scatter", "fill"];
    let mut across = [0; 4];
    let mut grown_again = 0;
    for seed in 0..2000 / crate::CASES_STEP as u64 {
        let mut random = Random(seed);
        let base_len = random.below(PAGE_LEN_MAX + 1);
        let base = random.bytes(base_len);
        let mut writer = PayloadWriter::default();
        let mut lens = vec![base_len];
        for _ in 0..1 + random.below(12) {
            lens.push(draw(&mut random, &mut writer, *lens.last().unwrap()));
        }
        let final_len = *lens.last().unwrap();
        grown_again += usize::from(lens.iter().min() < Some(&final_len));
        let payload = writer.finish();
        let mut whole = base.clone();
        let from = random.below(final_len + 1);
        let within = from..from + random.below(final_len - from + 1);
        let of_base = base[(from as usize).min(base.len())..].to_vec();
        let mut window = PageWindow::new(of_base, base_len, within.clone()).unwrap();
        let mut head = PageWindow::new(base, base_len, 0..final_len).unwrap();
        let memory = head.bytes.as_ptr();
        for at in decode_payload(&payload).unwrap() {
            if let Some(kind) = kinds.iter().position(|kind| *kind == at.op.kind()) {
                across[kind] += usize::from(straddles(&at.op, final_len));
            }
            let (before, reach) = (whole.clone(), reach(&at.op));
            apply(&at.op, &mut whole);
            head.apply(&at.op);
            window.apply(&at.op);
            let differs = |at: &usize| before.get(*at) != whole.get(*at) && !reach.contains(&(*at as u64));
            let outside = (0..before.len().max(whole.len())).find(differs);
            assert_eq!(outside, None, "seed {seed}: {:?} reaches further than {reach:?}", at.op);
            // Compare after every operation, not only at the end.
            let kept = whole.len().min(final_len as usize);
            assert_eq!(head.bytes(), &whole[..kept], "seed {seed}: {:?}", at.op);
            assert_eq!(head.page_len(), whole.len() as u64, "seed {seed}: {:?}", at.op);
        }
        assert_eq!(head.bytes.as_ptr(), memory, "seed {seed}: it asked for more memory");
        let within = within.start as usize..within.end as usize;
        assert_eq!(window.into_bytes(), whole[within.clone()], "seed {seed}: {within:?}");
        assert_eq!(head.into_bytes(), whole, "seed {seed}");
    }
    let enough = 400 / crate::CASES_STEP;
    assert!(across.iter().all(|count| *count * 8 > enough), "{kinds:?} lay across the end {across:?} times");
    assert!(grown_again > enough, "{grown_again} pages were shorter on their way");
}

#[test]
fn page_needs_memory_for_final_length_only() {
    let mut head = PageWindow::new(vec![1; 1000], 1000, 0..10).unwrap();
    assert!(head.bytes.capacity() < 100, "{} bytes", head.bytes.capacity());
    for len in [1 << 40, 5, 1 << 40, 10] {
        head.apply(&Op::Resize { page: PAGE, len });
    }
    assert!(head.bytes.capacity() < 100, "{} bytes", head.bytes.capacity());
    assert_eq!(head.into_bytes(), [1, 1, 1, 1, 1, 0, 0, 0, 0, 0]);
    let too_much = PageWindow::new(Vec::new(), 0, 0..u64::MAX).unwrap_err();
    assert_eq!(too_much, Defect::Memory { needed: u64::MAX });
}

#[test]
#[should_panic(expected = "bytes 4..+2 of a page of 5 bytes")]
fn window_beyond_final_page_panics() {
    let mut head = PageWindow::new(vec![0; 5], 5, 0..3).unwrap();
    head.apply(&Op::Write { page: PAGE, offset: 4, bytes: &[1; 2] });
}

/// An image file that contains one payload, at the lowest possible offset.
struct OnePayload(Vec<u8>);

impl ReadAt for OnePayload {
    fn list(&self, _folder: Folder) -> std::io::Result<Vec<String>> {
        Ok(Vec::new())
    }

    fn len(&self, _file: FileName) -> std::io::Result<Option<u64>> {
        Ok(Some(IMAGE_AT + self.0.len() as u64))
    }

    fn read_at(&self, _file: FileName, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
        let start = (offset - IMAGE_AT) as usize;
        out.copy_from_slice(&self.0[start..start + out.len()]);
        Ok(())
    }
}

const IMAGE_AT: u64 = 4096;

/// The window may start after the end of the image, if the page was extended later.
#[test]
fn window_contains_image_bytes_and_nothing_past_its_end() {
    let content = [1, 2, 3, 4, 5];
    let (len, crc) = (content.len() as u64, crc32fast::hash(&content));
    let codec = Codec::Raw;
    let image = ImageRef { file: 1, offset: IMAGE_AT, stored_len: len, stored_crc: crc, raw_crc: crc, codec };
    let source = OnePayload(content.to_vec());
    let proven = ProvenImage::prove(&source, &image, len).unwrap();
    for (window, expected) in [(0..5, &content[..]), (3..9, &[4, 5]), (5..9, &[]), (6..9, &[])] {
        let mut found = load_window(&source, len, Some(&proven), window.clone()).unwrap();
        assert_eq!(found.bytes(), expected, "{window:?}");
        found.apply(&Op::Resize { page: PAGE, len: 9 });
        let zeros = vec![0; (window.end - window.start) as usize - expected.len()];
        assert_eq!(found.into_bytes(), [expected, &zeros].concat(), "{window:?}, grown");
    }
}
