//! Creates the clients of object stores from settings.

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

/// The number of times that `object_store` repeats a failed read, listing or delete.
const RETRIES: usize = 3;
const RETRY_TIMEOUT: Duration = Duration::from_secs(30);

/// The clients of a bucket. The client for creates is separate, because it must not retry.
///
/// This type does not implement `Debug`, because the clients' `Debug` output contains credentials.
pub(super) struct Clients {
    /// Sends creates and puts without retries: a retried create may report its own object as an existing one.
    pub writes: Box<dyn ObjectStore>,
    pub others: Box<dyn ObjectStore>,
}

impl Clients {
    pub fn connect(address: &Address, settings: &Settings) -> Result<Self, OpenError> {
        // TLS needs one cryptography provider per process. This call has no effect if the application has installed a
        // provider.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let others =
            RetryConfig { max_retries: RETRIES, retry_timeout: RETRY_TIMEOUT, ..RetryConfig::default() };
        let writes = RetryConfig { max_retries: 0, ..RetryConfig::default() };
        Ok(Self { writes: connect(address, settings, writes)?, others: connect(address, settings, others)? })
    }
}

/// Creates a client from the environment variables, the settings and the URL.
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
            // Objects are deleted one by one. The response to a bulk delete contains a separate status for each object,
            // and some servers do not support bulk deletes.
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

/// Checks that an endpoint setting is an HTTP URL, because `object_store` does not check it.
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

/// Returns the message of an error without the values of settings. Quoted text is removed as well, because it may come
/// from a credential file.
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
