//! Clients of the services, made from settings.

use std::str::FromStr;
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::local::LocalFileSystem;
use object_store::{ObjectStore, RetryConfig};
use url::Url;

use super::OpenError;
use super::address::{Address, Place};
use super::answer::ObservedConnector;
use super::options::Settings;

/// Retries of `object_store` for reads, listings and deletes.
const RETRIES: usize = 3;
const RETRY_TIMEOUT: Duration = Duration::from_secs(30);

/// The clients of a bucket. They share nothing, so that a client for creates has no retries.
///
/// There is no `Debug`: that of the clients prints credentials.
pub(super) struct Clients {
    /// Sends creates and puts once: a retried create reports an existing object for its own.
    pub writes: Box<dyn ObjectStore>,
    pub others: Box<dyn ObjectStore>,
}

impl Clients {
    pub fn connect(address: &Address, settings: &Settings) -> Result<Self, OpenError> {
        // TLS needs one provider of cryptography for the process. One that the application installed is kept.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let others =
            RetryConfig { max_retries: RETRIES, retry_timeout: RETRY_TIMEOUT, ..RetryConfig::default() };
        let writes = RetryConfig { max_retries: 0, ..RetryConfig::default() };
        Ok(Self { writes: connect(address, settings, writes)?, others: connect(address, settings, others)? })
    }
}

/// Builds a client from the environment, the settings and the URL.
macro_rules! build {
    ($builder:ty, $address:expr, $settings:expr, $retry:expr) => {{
        let mut builder = <$builder>::from_env();
        for (key, value) in $settings {
            check_endpoint(key, value, $address)?;
            builder = builder.with_config(parse_key(key, $address)?, value);
        }
        builder
            .with_url($address.url.as_str())
            .with_retry($retry)
            .with_http_connector(ObservedConnector::default())
    }};
}

fn connect(
    address: &Address,
    settings: &Settings,
    retry: RetryConfig,
) -> Result<Box<dyn ObjectStore>, OpenError> {
    let failed = |error| OpenError::Settings { url: address.display(), message: redact(&error, settings) };
    Ok(match &address.place {
        Place::Folder(root) => {
            if let Some((key, _)) = settings.first() {
                return Err(OpenError::Setting { key: key.clone(), url: address.display() });
            }
            Box::new(LocalFileSystem::new_with_prefix(root).map_err(failed)?.with_fsync(true))
        }
        Place::S3 => {
            let builder = build!(AmazonS3Builder, address, settings, retry);
            // Deletes one by one: an answer to many has a status for each in its body, and some servers lack it.
            let key = object_store::aws::AmazonS3ConfigKey::DisableBulkDelete;
            Box::new(builder.with_config(key, "true").build().map_err(failed)?)
        }
        Place::Gcs => {
            Box::new(build!(GoogleCloudStorageBuilder, address, settings, retry).build().map_err(failed)?)
        }
        Place::Azure => {
            Box::new(build!(MicrosoftAzureBuilder, address, settings, retry).build().map_err(failed)?)
        }
    })
}

/// Checks the setting of an endpoint, which `object_store` uses without a check.
fn check_endpoint(key: &str, value: &str, address: &Address) -> Result<(), OpenError> {
    let is_url =
        || Url::parse(value).is_ok_and(|url| ["http", "https"].contains(&url.scheme()) && url.has_host());
    if !key.to_ascii_lowercase().contains("endpoint") || is_url() {
        return Ok(());
    }
    let message = format!("the setting {key} is not an http or https URL");
    Err(OpenError::Settings { url: address.display(), message })
}

fn parse_key<K: FromStr>(key: &str, address: &Address) -> Result<K, OpenError> {
    let unknown = |_| OpenError::Setting { key: key.to_owned(), url: address.display() };
    key.to_ascii_lowercase().parse().map_err(unknown)
}

/// Returns the text of an error without the values of settings, and without quoted text, which may come from a file with
/// credentials.
fn redact(error: &object_store::Error, settings: &Settings) -> String {
    let mut text = error.to_string();
    for (_, value) in settings.iter().filter(|(_, value)| value.len() > 3) {
        text = text.replace(value, "…");
    }
    for quote in ['"', '`'] {
        let unquoted =
            text.split(quote).enumerate().map(|(index, part)| if index % 2 == 0 { part } else { "…" });
        text = unquoted.collect::<Vec<_>>().join(&quote.to_string());
    }
    text
}
