//! Annotated bytes: the text next to a golden file.

use std::fmt::Write;

use remanent_format::layout::{Field, LayoutTable};

/// Bytes that are annotated from first to last.
pub struct Annotate<'a> {
    bytes: &'a [u8],
    at: usize,
    text: String,
}

impl<'a> Annotate<'a> {
    pub fn new(title: &str, bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0, text: format!("{title}\n{} bytes\n", bytes.len()) }
    }

    /// Adds a heading.
    pub fn head(&mut self, text: &str) -> &mut Self {
        writeln!(self.text, "\n{text}").unwrap();
        self
    }

    /// Annotates the next `len` bytes in lines of eight. Long runs of zeros are described, not shown.
    pub fn part(&mut self, len: usize, comment: &str) -> &mut Self {
        let part = &self.bytes[self.at..self.at + len];
        if len > 32 && part.iter().all(|&byte| byte == 0) {
            writeln!(self.text, "{:06x}  {:23}  {comment}", self.at, format!("00 x {len}")).unwrap();
        } else {
            for (index, line) in part.chunks(8).enumerate() {
                let comment = if index == 0 { comment } else { "" };
                let line = format!("{:06x}  {:23}  {comment}", self.at + 8 * index, hex(line));
                writeln!(self.text, "{}", line.trim_end()).unwrap();
            }
        }
        self.at += len;
        self
    }

    /// Annotates zeros up to a multiple of `align`.
    pub fn pad(&mut self, align: usize, comment: &str) -> &mut Self {
        let len = self.at.next_multiple_of(align) - self.at;
        if len > 0 { self.part(len, comment) } else { self }
    }

    /// Annotates the fields of a structure, with numbers in decimal.
    pub fn layout(&mut self, table: &LayoutTable) -> &mut Self {
        self.head(&format!("{}, {} bytes", table.name, table.len));
        for field in table.fields {
            let comment = match field.size {
                1 | 2 | 4 | 8 if !["magic", "incarnation"].contains(&field.name) && !is_hash(field.name) => {
                    format!("{} = {}", field.name, self.peek(field.size))
                }
                _ => field.name.to_owned(),
            };
            self.part(field.size, &comment);
        }
        self
    }

    /// Returns the number in the next `size` bytes.
    pub fn peek(&self, size: usize) -> u64 {
        let mut raw = [0; 8];
        raw[..size].copy_from_slice(&self.bytes[self.at..self.at + size]);
        u64::get(&raw)
    }

    /// Annotates an envelope that contains a map.
    pub fn metadata(&mut self) -> &mut Self {
        self.envelope("metadata");
        self.map("  ")
    }

    /// Annotates an envelope that contains one named value.
    pub fn entry(&mut self) -> &mut Self {
        self.envelope("entry");
        self.named("  ")
    }

    fn envelope(&mut self, what: &str) {
        self.head(&format!("Envelope of {what}"));
        let len = self.peek(4);
        self.part(4, &format!("len = {len}")).part(4, "crc");
    }

    fn map(&mut self, indent: &str) -> &mut Self {
        let count = self.peek(8);
        self.part(8, &format!("{indent}map of {count}"));
        (0..count).fold(self, |this, _| this.named(indent))
    }

    fn named(&mut self, indent: &str) -> &mut Self {
        self.text(&format!("{indent}name, "));
        self.value(indent)
    }

    fn value(&mut self, indent: &str) -> &mut Self {
        let kind = self.peek(4);
        let names = ["null", "bool", "i64", "u64", "f64", "string", "bytes", "list", "map"];
        self.part(4, &format!("{indent}kind {kind}: {}", names[kind as usize]));
        let deeper = format!("{indent}  ");
        match kind {
            0 => self,
            1 => self.part(1, &format!("{deeper}{}", self.peek(1) == 1)),
            2 => self.part(8, &format!("{deeper}{}", self.peek(8) as i64)),
            3 => self.part(8, &format!("{deeper}{}", self.peek(8))),
            4 => self.part(8, &format!("{deeper}{:?}", f64::from_bits(self.peek(8)))),
            5 | 6 => self.text(&deeper),
            7 => {
                let count = self.peek(8);
                self.part(8, &format!("{deeper}list of {count}"));
                (0..count).fold(self, |this, _| this.value(&deeper))
            }
            _ => self.map(&deeper),
        }
    }

    /// Annotates a length in 8 bytes, then that number of bytes.
    fn text(&mut self, comment: &str) -> &mut Self {
        let len = self.peek(8) as usize;
        self.part(8, &format!("{comment}length {len}"));
        let text = String::from_utf8_lossy(&self.bytes[self.at..self.at + len]).into_owned();
        let text = if text.contains(char::is_control) { String::new() } else { format!("{text:?}") };
        let indent = &comment[..comment.len() - comment.trim_start().len()];
        if len > 0 { self.part(len, &format!("{indent}{text}")) } else { self }
    }

    /// Returns the text, after checking that every byte is annotated.
    pub fn finish(&mut self) -> String {
        assert_eq!(self.at, self.bytes.len(), "bytes without a comment");
        std::mem::take(&mut self.text)
    }
}

/// Returns true if a number is a checksum or a chain hash, whose decimal form is not informative.
fn is_hash(name: &str) -> bool {
    name.contains("crc") || name.contains("chain")
}

/// Describes the differences between a valid file and a damaged one.
pub fn difference(title: &str, sound: &[u8], damaged: &[u8]) -> String {
    let mut text = format!("{title}\n");
    if sound.len() != damaged.len() {
        writeln!(text, "{} bytes instead of {}", damaged.len(), sound.len()).unwrap();
    }
    let common = sound.len().min(damaged.len());
    let mut at = 0;
    while at < common {
        let len = (at..common.min(at + 8)).take_while(|&index| sound[index] != damaged[index]).count();
        if len > 0 {
            let (before, after) = (hex(&sound[at..at + len]), hex(&damaged[at..at + len]));
            writeln!(text, "{at:06x}  {before} -> {after}").unwrap();
        }
        at += len.max(1);
    }
    for (index, line) in damaged[common..].chunks(8).enumerate() {
        writeln!(text, "{:06x}  added {}", common + 8 * index, hex(line)).unwrap();
    }
    text
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" ")
}
