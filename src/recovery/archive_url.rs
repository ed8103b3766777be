//! The URL in the file ARCHIVE. Every build checks the URL, even a build without the feature `archive`.

use std::io::ErrorKind;

use remanent_format::FileName;

use crate::disk::Disk;
use crate::error::{ArchiveError, Error, Result};

/// Magic bytes at the start of ARCHIVE.
const MAGIC: &[u8] = b"RMNTARFI";
const HEADER_LEN: usize = 64;
/// Offset of the length of the URL.
const URL_LEN_AT: usize = 44;
/// Offset of the checksum of the header.
const HEADER_CRC_AT: usize = 60;
/// Maximum length of the URL in bytes.
const URL_LEN_MAX: u64 = 4096;

/// Returns an error if the store is archived while it is open. An open without this archive could commit batches that
/// the archive lacks, while another machine restores and continues the archive.
///
/// # Errors
/// [`Error::Archive`] with the URL of the archive. A damaged file ARCHIVE is not an error.
pub(crate) fn check_unarchived(disk: &dyn Disk) -> Result<()> {
    let file = match disk.open(FileName::Archive, false) {
        Ok(file) => file,
        Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let len = file.len()?;
    let mut header = [0; HEADER_LEN];
    if len < HEADER_LEN as u64 {
        return Ok(());
    }
    file.read_at(0, &mut header)?;
    let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|byte| header[at + byte]));
    let url_len = u64::from(word(URL_LEN_AT));
    let is_valid = header.starts_with(MAGIC)
        && word(HEADER_CRC_AT) == crc32fast::hash(&header[..HEADER_CRC_AT])
        && url_len <= URL_LEN_MAX.min(len - HEADER_LEN as u64);
    if !is_valid || url_len == 0 {
        return Ok(());
    }
    let mut url = vec![0; url_len as usize];
    file.read_at(len - url_len, &mut url)?;
    Err(ArchiveError::not_given(String::from_utf8_lossy(&url).into_owned()).into())
}
