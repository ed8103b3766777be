//! Reads and durable writes of the files in a store directory.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::num::NonZero;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use remanent_format::{Defect, FileName, Folder, ReadAt};

use super::unfetched::UnfetchedParts;
use crate::local::FilePiece;
use crate::object::{Crc64, PART_LEN_MAX, Part, Role, crc64};

/// Maximum length of a read whose bytes are summed. They are still in the cache of the core then.
const CHECK_LEN: usize = 256 << 10;
/// Maximum length of extents that are written together. Longer extents are written without a copy.
const WRITE_LEN: usize = 256 << 10;
/// Maximum distance of extents that are written together.
const GAP_MAX: usize = 8 << 10;

/// The files of a store directory.
#[derive(Clone, Debug)]
pub(super) struct StoreFiles {
    root: PathBuf,
}

impl StoreFiles {
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    fn path(&self, file: FileName) -> PathBuf {
        self.root.join(file.folder().name()).join(file.name())
    }

    fn open(&self, file: FileName) -> io::Result<File> {
        File::open(self.path(file)).map_err(|error| named(file, &error))
    }

    /// Reads a whole file. Returns `None` if the file does not exist, and an error if it is longer than `len_max`
    /// bytes.
    pub fn read_whole(&self, file: FileName, len_max: u64) -> io::Result<Option<Vec<u8>>> {
        let Some(len) = ReadAt::len(self, file)? else { return Ok(None) };
        if len > len_max {
            let error = format!("{file} is {len} bytes long, but at most {len_max} bytes are permitted");
            return Err(io::Error::new(ErrorKind::InvalidData, error));
        }
        let mut bytes = vec![0; len as usize];
        self.read_at(file, 0, &mut bytes)?;
        Ok(Some(bytes))
    }

    /// Writes `bytes` at `offset` without syncing. Creates the file if it does not exist.
    pub fn write_at(&self, file: FileName, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let open = OpenOptions::new().write(true).create(true).truncate(false).open(self.path(file));
        open.and_then(|open| open.write_all_at(bytes, offset)).map_err(|error| named(file, &error))
    }

    /// Writes extents in the order of their offsets, without syncing. Short extents are written together, with zeros
    /// between them. Returns the total length of the extents in bytes.
    pub fn write_extents<'b>(
        &self,
        file: FileName,
        extents: impl Iterator<Item = (u64, &'b [u8])>,
    ) -> io::Result<u64> {
        let open = OpenOptions::new().write(true).create(true).truncate(false).open(self.path(file));
        let open = open.map_err(|error| named(file, &error))?;
        let write =
            |offset, bytes: &[u8]| open.write_all_at(bytes, offset).map_err(|error| named(file, &error));
        let (mut start, mut joined, mut len) = (0, Vec::new(), 0);
        for (offset, bytes) in extents {
            len += bytes.len() as u64;
            let gap = offset.saturating_sub(start + joined.len() as u64) as usize;
            if !joined.is_empty() && (gap > GAP_MAX || joined.len() + gap + bytes.len() > WRITE_LEN) {
                write(start, &joined)?;
                joined.clear();
            }
            if bytes.len() >= WRITE_LEN {
                write(offset, bytes)?;
                continue;
            }
            if joined.is_empty() {
                start = offset;
            }
            joined.resize((offset - start) as usize, 0);
            joined.extend_from_slice(bytes);
        }
        write(start, &joined)?;
        Ok(len)
    }

    /// Sets the length of a file.
    pub fn set_len(&self, file: FileName, len: u64) -> io::Result<()> {
        let open = OpenOptions::new().write(true).open(self.path(file));
        open.and_then(|open| open.set_len(len)).map_err(|error| named(file, &error))
    }

    /// Syncs a file.
    pub fn sync(&self, file: FileName) -> io::Result<()> {
        self.open(file)?.sync_all().map_err(|error| named(file, &error))
    }

    /// Syncs a file and drops its bytes from the page cache, so that the next read returns the bytes on the medium.
    pub fn sync_and_drop_cache(&self, file: FileName) -> io::Result<()> {
        let open = self.open(file)?;
        open.sync_all().map_err(|error| named(file, &error))?;
        let dropped = rustix::fs::fadvise(&open, 0, None, rustix::fs::Advice::DontNeed);
        dropped.map_err(|errno| named(file, &errno.into()))
    }

    /// Syncs the directory entries of a folder.
    pub fn sync_folder(&self, folder: Folder) -> io::Result<()> {
        File::open(self.root.join(folder.name()))?.sync_all()
    }

    /// Creates the folders of a store that do not exist.
    pub fn make_folders(&self) -> io::Result<()> {
        for folder in Folder::INNER {
            fs::create_dir_all(self.root.join(folder.name()))?;
        }
        self.sync_folder(Folder::Root)
    }

    /// Replaces a file atomically and durably: writes a temporary file, syncs it, renames it, and syncs the folder.
    pub fn publish(&self, file: FileName, bytes: &[u8]) -> io::Result<()> {
        let temporary = FileName::Temporary(file.folder(), 0);
        self.remove(temporary)?;
        self.write_at(temporary, 0, bytes)?;
        self.sync(temporary)?;
        fs::rename(self.path(temporary), self.path(file)).map_err(|error| named(file, &error))?;
        self.sync_folder(file.folder())
    }

    /// Removes a file. Succeeds if the file does not exist.
    pub fn remove(&self, file: FileName) -> io::Result<()> {
        match fs::remove_file(self.path(file)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(named(file, &error)),
            _ => Ok(()),
        }
    }

    /// Returns the names of the store files in the folders of the directory. Files in the root are not included.
    pub fn inner_files(&self) -> io::Result<Vec<FileName>> {
        let mut files = Vec::new();
        for folder in Folder::INNER {
            let names = self.list(folder)?;
            files.extend(names.iter().filter_map(|name| FileName::parse(folder, name)));
        }
        Ok(files)
    }

    /// Divides a file into pieces of the maximum length of a part, and returns the pieces in order.
    pub fn pieces_of(&self, role: Role, number: u64) -> io::Result<Vec<FilePiece>> {
        if role == Role::Images {
            self.check_fetched(number)?;
        }
        let file = file_of(role, number)?;
        let len = ReadAt::len(self, file)?.ok_or_else(|| named(file, &ErrorKind::NotFound.into()))?;
        let piece = |offset| FilePiece {
            role,
            file: number,
            offset,
            len: (PART_LEN_MAX as u64).min(len - offset) as usize,
        };
        Ok((0..len).step_by(PART_LEN_MAX).map(piece).collect())
    }

    /// Returns an error if the directory lacks parts of an image file after a restore on demand. The bytes of such a
    /// file must not be archived.
    fn check_fetched(&self, number: u64) -> io::Result<()> {
        let Some(bytes) = self.read_whole(FileName::Unfetched, UnfetchedParts::LEN_MAX)? else {
            return Ok(());
        };
        let at = |defect: Defect, file| invalid(defect.at(file, 0));
        let unfetched = UnfetchedParts::decode(&bytes).map_err(|defect| at(defect, FileName::Unfetched))?;
        if unfetched.files.contains_key(&number) {
            return Err(at(Defect::Unfetched, FileName::Pages(number)));
        }
        Ok(())
    }

    /// Divides links and image files into pieces.
    pub fn pieces_of_all(
        &self,
        links: impl IntoIterator<Item = u64>,
        images: impl IntoIterator<Item = u64>,
    ) -> io::Result<Vec<FilePiece>> {
        let links = links.into_iter().map(|link| (Role::Link, link));
        let files = links.chain(images.into_iter().map(|file| (Role::Images, file)));
        let mut pieces = Vec::new();
        for (role, file) in files {
            pieces.extend(self.pieces_of(role, file)?);
        }
        Ok(pieces)
    }

    /// Reads pieces of files, and returns them as parts with their checksums.
    pub fn parts_of(&self, pieces: &[FilePiece]) -> io::Result<Vec<Part>> {
        let mut bytes = Vec::new();
        let sum = |piece: &FilePiece| {
            bytes.resize(piece.len, 0);
            Ok(piece.part(self.read_piece(piece, &mut bytes)?))
        };
        pieces.iter().map(sum).collect()
    }

    /// Fills `out` with the bytes of a piece, and returns their CRC-64.
    pub fn read_piece(&self, piece: &FilePiece, out: &mut [u8]) -> io::Result<u64> {
        let file = file_of(piece.role, piece.file)?;
        let open = self.open(file)?;
        // The next pieces are read from the medium while this one is summed and sent.
        let (next, len) = (piece.offset + piece.len as u64, 2 * PART_LEN_MAX as u64);
        let advised = rustix::fs::fadvise(&open, next, NonZero::new(len), rustix::fs::Advice::WillNeed);
        advised.map_err(|errno| named(file, &errno.into()))?;
        let (mut digest, mut offset) = (Crc64::new(), piece.offset);
        for bytes in out.chunks_mut(CHECK_LEN) {
            open.read_exact_at(bytes, offset).map_err(|error| named(file, &error))?;
            digest.write(bytes);
            offset += bytes.len() as u64;
        }
        Ok(digest.sum())
    }

    /// Verifies the checksum of a part, reading a few bytes at a time. Returns an error if the checksum does not match.
    pub fn check_part(&self, part: &Part) -> io::Result<()> {
        let file = file_of(part.role, part.file)?;
        let open = self.open(file)?;
        let (mut digest, mut offset, end) = (Crc64::new(), part.offset, part.offset + part.len);
        let mut bytes = vec![0; CHECK_LEN.min(part.len as usize)];
        while offset < end {
            let piece = &mut bytes[..(end - offset).min(CHECK_LEN as u64) as usize];
            open.read_exact_at(piece, offset).map_err(|error| named(file, &error))?;
            digest.write(piece);
            offset += piece.len() as u64;
        }
        if digest.sum() == part.crc { Ok(()) } else { Err(changed(file, part.offset)) }
    }

    /// Returns the bytes of a part. Returns an error if its checksum does not match.
    pub fn read_part(&self, part: &Part) -> io::Result<Vec<u8>> {
        let file = file_of(part.role, part.file)?;
        let mut bytes = vec![0; part.len.min(PART_LEN_MAX as u64) as usize];
        self.read_at(file, part.offset, &mut bytes)?;
        if crc64(&bytes) == part.crc && bytes.len() as u64 == part.len {
            return Ok(bytes);
        }
        Err(changed(file, part.offset))
    }
}

/// Returns the error for a part whose checksum does not match.
fn changed(file: FileName, offset: u64) -> io::Error {
    let error = format!("{file} has changed at offset {offset} since its checksum was computed");
    io::Error::new(ErrorKind::InvalidData, error)
}

/// Returns the name of the file to which a part belongs.
pub(super) fn file_of(role: Role, number: u64) -> io::Result<FileName> {
    match role {
        Role::Images => Ok(FileName::Pages(number)),
        Role::Table => Ok(FileName::Table(number)),
        Role::Link => Ok(FileName::Manifest(number)),
        Role::Frames => Err(io::Error::new(ErrorKind::InvalidInput, "frames are not parts of one file")),
    }
}

/// Adds the file name to the message of an error.
fn named(file: FileName, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{file}: {error}"))
}

/// Converts damage to an I/O error.
pub(super) fn invalid(damage: impl std::fmt::Display) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, damage.to_string())
}

impl ReadAt for StoreFiles {
    fn list(&self, folder: Folder) -> io::Result<Vec<String>> {
        match fs::read_dir(self.root.join(folder.name())) {
            // Store file names are valid UTF-8. Other names do not match any of them after the conversion.
            Ok(entries) => {
                entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    fn len(&self, file: FileName) -> io::Result<Option<u64>> {
        match fs::metadata(self.path(file)) {
            Ok(metadata) if metadata.is_file() => Ok(Some(metadata.len())),
            Ok(_) => Err(io::Error::new(ErrorKind::InvalidData, format!("{file} is not a regular file"))),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(named(file, &error)),
        }
    }

    fn read_at(&self, file: FileName, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.open(file)?.read_exact_at(out, offset).map_err(|error| named(file, &error))
    }
}
