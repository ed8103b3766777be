//! Parses the URL of an archive.

use std::path::PathBuf;

use object_store::ObjectStoreScheme;
use object_store::path::Path;
use url::Url;

use super::OpenError;

/// The kind of a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Folder(PathBuf),
    S3,
    Gcs,
    Azure,
}

/// A checked URL without credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub url: Url,
    pub place: Place,
    /// The path of the archive in the bucket. The path is empty for a local folder.
    pub prefix: Path,
}

impl Address {
    /// Parses the URL of an archive. Rejects URLs that contain credentials or could name the same archive as another
    /// URL.
    ///
    /// The path is checked before [`Url::parse`], because that function resolves `..`. Some servers collapse `//` or
    /// resolve `.`, so that two different URLs could name the same archive.
    pub fn parse(text: &str) -> Result<Self, OpenError> {
        let refuse = |reason| OpenError::Address { url: display(text), reason };
        if text.contains(['?', '#']) {
            return Err(refuse("it has a query or a fragment; pass credentials as settings"));
        }
        if text.bytes().any(|byte| byte <= b' ' || byte == b'\\' || byte >= 0x7f) {
            return Err(refuse(
                "it contains a space, a control character, a backslash or a character beyond ASCII",
            ));
        }
        let Some((_, rest)) = text.split_once("://") else { return Err(refuse("it has no scheme")) };
        let path = rest.split_once('/').map_or("", |(_, path)| path);
        check_names(path).map_err(refuse)?;
        let url = Url::parse(text).map_err(|_| refuse("it is not a valid URL"))?;
        if url.password().is_some() {
            return Err(refuse("it contains a password; pass credentials as settings"));
        }
        let (scheme, prefix) =
            ObjectStoreScheme::parse(&url).map_err(|_| refuse("its scheme is not supported"))?;
        let place = match scheme {
            ObjectStoreScheme::Local => {
                let folder = url.to_file_path().map_err(|()| refuse("it does not name a local folder"))?;
                return Ok(Self { url, place: Place::Folder(folder), prefix: Path::default() });
            }
            ObjectStoreScheme::AmazonS3 => Place::S3,
            ObjectStoreScheme::GoogleCloudStorage => Place::Gcs,
            ObjectStoreScheme::MicrosoftAzure => Place::Azure,
            ObjectStoreScheme::Http => {
                return Err(refuse(
                    "the service is unknown; use s3://, gs:// or az:// with the setting `endpoint`",
                ));
            }
            _ => return Err(refuse("its scheme is not supported")),
        };
        if place != Place::Azure && !url.username().is_empty() {
            return Err(refuse("it contains a user name; pass credentials as settings"));
        }
        Ok(Self { url, place, prefix })
    }

    /// Returns the URL without the user name.
    pub fn display(&self) -> String {
        display(self.url.as_str())
    }
}

/// Checks the names in a path. Rejects empty names, `.` and `..`, and percent-encodings of these and of slashes.
fn check_names(path: &str) -> Result<(), &'static str> {
    let path = path.strip_suffix('/').unwrap_or(path);
    if path.is_empty() {
        return Ok(());
    }
    let lower = path.to_ascii_lowercase();
    if ["%2e", "%2f", "%5c", "%00"].iter().any(|code| lower.contains(code)) {
        return Err("it contains a percent-encoded dot, slash, backslash or zero");
    }
    for name in path.split('/') {
        match name {
            "" => return Err("it contains `//`"),
            "." | ".." => return Err("it contains `.` or `..` as a name"),
            _ => {}
        }
    }
    Ok(())
}

/// Returns a URL without user name, password, query and fragment. Also works for invalid URLs.
fn display(text: &str) -> String {
    let text = text.split(['?', '#']).next().unwrap_or("");
    let Some((scheme, rest)) = text.split_once("://") else { return "the URL".to_owned() };
    let (host, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
    let host = host.rsplit('@').next().unwrap_or(host);
    format!("{scheme}://{host}{path}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemes_select_the_service() {
        let place = |url| Address::parse(url).map(|address| (address.place, address.prefix.to_string()));
        let expected = |place, prefix: &str| (place, prefix.to_owned());
        assert_eq!(place("s3://bucket/a/b").unwrap(), expected(Place::S3, "a/b"));
        assert_eq!(place("s3://bucket").unwrap(), expected(Place::S3, ""));
        assert_eq!(place("gs://bucket/a/").unwrap(), expected(Place::Gcs, "a"));
        assert_eq!(place("az://container/a").unwrap(), expected(Place::Azure, "a"));
        assert_eq!(place("abfss://c@account.dfs.core.windows.net/a").unwrap(), expected(Place::Azure, "a"));
        assert_eq!(place("https://s3.eu-west-1.amazonaws.com/bucket/a").unwrap(), expected(Place::S3, "a"));
        assert_eq!(place("https://account.blob.core.windows.net/c/a").unwrap(), expected(Place::Azure, "a"));
        assert_eq!(place("file:///srv/a").unwrap(), expected(Place::Folder("/srv/a".into()), ""));
    }

    #[test]
    fn ambiguous_urls_are_refused() {
        let refused = [
            ("s3://bucket/a/../b", "`..`"),
            ("s3://bucket/./b", "`..`"),
            ("s3://bucket//b", "`//`"),
            ("s3://bucket/b//", "`//`"),
            ("s3://bucket/a/%2E%2e/b", "percent-encoded"),
            ("s3://bucket/a%2fb", "percent-encoded"),
            ("file:///srv/../etc", "`..`"),
            ("file:////srv", "`//`"),
            ("file://host/srv", "scheme"),
            ("s3://bucket/a\\b", "backslash"),
            ("s3://bucket/a b", "space"),
            ("http://127.0.0.1:9000/bucket", "endpoint"),
            ("memory:///a", "scheme"),
            ("/srv/archive", "scheme"),
            ("s3://", "scheme"),
        ];
        for (url, reason) in refused {
            let error = Address::parse(url).expect_err(url).to_string();
            assert!(error.contains(reason), "{url}: {error}");
        }
    }

    #[test]
    fn refused_urls_show_no_credential() {
        let urls =
            ["s3://hunter2:hunter2@bucket/a", "az://c/a?sig=hunter2", "s3://hunter2@bucket/a", "s3:hunter2"];
        for url in urls {
            let error = Address::parse(url).expect_err(url);
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
        }
    }
}
