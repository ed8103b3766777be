//! Archives of named files, which represent stores to the fuzzer. Every input is a valid archive.

use std::collections::BTreeMap;
use std::io;

use remanent_format::{FileName, Folder, ReadAt};

/// The files of a store, in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Files(pub BTreeMap<FileName, Vec<u8>>);

/// Maximum length of a file in an archive. Files of stores are mostly zeros, so an archive of a few hundred
/// bytes can represent a whole store.
const FILE_LEN_MAX: usize = 1 << 18;
/// Maximum total length of all files in an archive.
const FILES_LEN_MAX: usize = 1 << 21;

const FILE_STORE: u8 = 0;
const FILE_SEGMENT: u8 = 1;
const FILE_PAGES: u8 = 2;
const FILE_TABLE: u8 = 3;
const FILE_MANIFEST: u8 = 4;
const PIECE: u8 = 5;

impl Files {
    /// Reads an archive of 6-byte records. A record contains a kind and a number in 1 byte each, and *a* and
    /// *b* in 2 bytes each. A file record names a file by kind and number; the file has 4096 *a* + *b* zero
    /// bytes. A piece record is followed by *b* bytes, which belong at offset 16 *a* of the preceding file. A
    /// record that does not fit is ignored, so every input is an archive.
    pub fn from_archive(mut data: &[u8]) -> Self {
        let mut files = BTreeMap::new();
        let mut current = FileName::Store;
        let mut bytes_left = FILES_LEN_MAX;
        while let Some((record, rest)) = data.split_first_chunk::<6>() {
            data = rest;
            let number = u64::from(record[1]);
            let a = usize::from(u16::from_le_bytes([record[2], record[3]]));
            let b = usize::from(u16::from_le_bytes([record[4], record[5]]));
            if record[0] >= PIECE {
                let (piece, rest) = data.split_at(b.min(data.len()));
                data = rest;
                if let Some(file) =
                    files.get_mut(&current).and_then(|file: &mut Vec<u8>| file.get_mut(16 * a..))
                {
                    let len = piece.len().min(file.len());
                    file[..len].copy_from_slice(&piece[..len]);
                }
                continue;
            }
            current = match record[0] {
                FILE_STORE => FileName::Store,
                FILE_SEGMENT => FileName::Segment(number),
                FILE_PAGES => FileName::Pages(number),
                FILE_TABLE => FileName::Table(number),
                _ => FileName::Manifest(number),
            };
            let len = (4096 * a + b).min(FILE_LEN_MAX).min(bytes_left);
            bytes_left -= len;
            files.insert(current, vec![0; len]);
        }
        Self(files)
    }

    /// Writes an archive, for seeds. Numbers must fit into a byte, and files into [`FILE_LEN_MAX`].
    pub fn to_archive(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let mut record = |kind: u8, number: u64, a: usize, b: usize, piece: &[u8]| {
            out.extend_from_slice(&[kind, u8::try_from(number).expect("a small number")]);
            out.extend_from_slice(&u16::try_from(a).expect("a short file").to_le_bytes());
            out.extend_from_slice(&u16::try_from(b).expect("a short piece").to_le_bytes());
            out.extend_from_slice(piece);
        };
        for (name, bytes) in &self.0 {
            let (kind, number) = match *name {
                FileName::Store => (FILE_STORE, 0),
                FileName::Segment(number) => (FILE_SEGMENT, number),
                FileName::Pages(number) => (FILE_PAGES, number),
                FileName::Table(number) => (FILE_TABLE, number),
                FileName::Manifest(number) => (FILE_MANIFEST, number),
                FileName::Lock
                | FileName::Readers
                | FileName::Archive
                | FileName::Unfetched
                | FileName::Spare(_)
                | FileName::ImageSpare(_)
                | FileName::Temporary(..) => continue,
            };
            record(kind, number, bytes.len() / 4096, bytes.len() % 4096, &[]);
            let is_zero = |line: &[u8]| line.iter().all(|&byte| byte == 0);
            let mut at = 0;
            while at < bytes.len() {
                // A piece ends before four lines of zeros, or when it has the maximum length.
                let lines = bytes[at..].chunks(16);
                let zeros = lines.clone().take_while(|line| is_zero(line)).count();
                if zeros > 0 {
                    at += 16 * zeros;
                    continue;
                }
                let count = (0..lines.len().min(4000))
                    .find(|&index| lines.clone().skip(index).take(4).all(is_zero))
                    .unwrap_or(lines.len().min(4000));
                let end = bytes.len().min(at + 16 * count);
                record(PIECE, 0, at / 16, end - at, &bytes[at..end]);
                at = end.next_multiple_of(16);
            }
        }
        out
    }
}

impl ReadAt for Files {
    fn list(&self, folder: Folder) -> io::Result<Vec<String>> {
        Ok(self.0.keys().filter(|name| name.folder() == folder).map(|name| name.name()).collect())
    }

    fn len(&self, file: FileName) -> io::Result<Option<u64>> {
        Ok(self.0.get(&file).map(|bytes| bytes.len() as u64))
    }

    fn read_at(&self, file: FileName, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let bytes = self.0.get(&file).ok_or(io::ErrorKind::NotFound)?;
        let range = usize::try_from(offset).ok().and_then(|offset| bytes.get(offset..)?.get(..out.len()));
        out.copy_from_slice(range.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}
