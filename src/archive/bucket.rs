//! Buckets of archives.

use remanent_archive::remote::{RemoteBucket, RemoteOptions};

use super::failures::error_of_open;
use crate::error::Result;
use crate::options::ArchiveOptions;

/// Maximum number of attempts of one request. After the last attempt, the uploader starts another round later.
const ATTEMPTS: u32 = 4;

/// Opens the bucket of an archive. Sends no request.
///
/// # Errors
/// [`Error::Archive`](crate::Error::Archive) if the URL or a setting is invalid.
pub(super) fn open_bucket(options: &ArchiveOptions) -> Result<RemoteBucket> {
    let settings = RemoteOptions::default().attempts(ATTEMPTS);
    let settings =
        options.settings.iter().fold(settings, |settings, (key, value)| settings.setting(key, value));
    RemoteBucket::open(&options.url, settings).map_err(|failure| error_of_open(&failure))
}
