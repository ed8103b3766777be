//! Floor 5. Publishing small files: STORE, manifests, tables. Temp, sync, rename, sync the folder; the
//! rename is the moment from which a crash finds the file, whole.

use std::sync::Arc;

use remanent_format::manifest::Manifest;
use remanent_format::{Defect, FileName};

use crate::disk::{AlignedBuf, Disk};
use crate::error::{Error, Result};

/// Bytes that are read back at once: memory that is new for all of a long manifest took longer than reading it.
const READ_LEN: usize = 4 << 20;

/// Writes `bytes` under a temporary name, durably, then gives them the name `file`, durably. No space is a
/// clean failure: nothing changed.
pub(crate) fn publish(disk: &Arc<dyn Disk>, file: FileName, number: u64, bytes: &[u8]) -> Result<()> {
    let temporary = FileName::Temporary(file.folder(), number);
    let write = || {
        let open = disk.create(temporary)?;
        open.write_at(0, bytes)?;
        open.sync()
    };
    if let Err(error) = write() {
        if let Err(error) = disk.remove(temporary) {
            tracing::warn!(%error, "cannot remove an unfinished file; the next open will");
        }
        return Err(if error.is_no_space() {
            Error::DiskFull { file, needed: bytes.len() as u64 }
        } else {
            error
        });
    }
    disk.rename(temporary, file)?;
    disk.sync_folder(file.folder())
}

/// Reads a published manifest or table back past the cache; returns the checksum of its header.
pub(crate) fn check_published(disk: &Arc<dyn Disk>, file: FileName, written: &[u8]) -> Result<u32> {
    let open = disk.open(file, false)?;
    let mut area = AlignedBuf::new(written.len().min(READ_LEN));
    let mut is_same = true;
    for (piece, at) in written.chunks(READ_LEN).zip((0..).step_by(READ_LEN)) {
        let found = &mut area[..piece.len()];
        open.read_past_cache(at, found)?;
        is_same &= found == piece;
    }
    if is_same {
        return Manifest::header_crc(written).map_err(|defect| defect.at(file, 0).into());
    }
    let mut found = vec![0; written.len()];
    open.read_past_cache(0, &mut found)?;
    let (_, health) = Manifest::decode(&found).map_err(|defect| Error::from(defect.at(file, 0)))?;
    let differs = Defect::Field { what: "manifest that differs from the one written", found: 0 };
    Err(health.defects.into_iter().flatten().next().unwrap_or(differs).at(file, 0).into())
}
