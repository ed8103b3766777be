//! The settings of a bucket, including credentials.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Keys and values of settings.
pub type Settings = Vec<(String, String)>;

/// The settings of a bucket.
///
/// Settings have the names that `object_store` uses: `endpoint`, `region`, `access_key_id`, `allow_http`, `timeout` and
/// so on. The environment variables `AWS_…`, `GOOGLE_…` and `AZURE_…` provide defaults, which a setting overrides.
///
/// ```
/// use remanent_archive::remote::RemoteOptions;
/// let options = RemoteOptions::default()
///     .setting("endpoint", "http://127.0.0.1:8333")
///     .setting("allow_http", "true")
///     .setting("access_key_id", "test")
///     .setting("secret_access_key", "secret");
/// assert!(!format!("{options:?}").contains("\"secret\""));
/// ```
#[derive(Clone)]
pub struct RemoteOptions {
    settings: Settings,
    source: Option<Arc<dyn Fn() -> Settings + Send + Sync>>,
    pub(super) attempts: u32,
    pub(super) first_delay: Duration,
    pub(super) longest_delay: Duration,
}

impl Default for RemoteOptions {
    fn default() -> Self {
        Self {
            settings: Vec::new(),
            source: None,
            attempts: 12,
            first_delay: Duration::from_millis(100),
            longest_delay: Duration::from_secs(20),
        }
    }
}

impl RemoteOptions {
    /// Adds a setting. A later setting with the same key replaces it.
    #[must_use]
    pub fn setting(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.settings.push((key.into(), value.into()));
        self
    }

    /// Adds a source of settings, for example a credential file. It is called when the bucket is opened, and again
    /// after the bucket has denied a request.
    #[must_use]
    pub fn settings_from(mut self, source: impl Fn() -> Settings + Send + Sync + 'static) -> Self {
        self.source = Some(Arc::new(source));
        self
    }

    /// Sets the maximum number of attempts for a request that fails for a temporary reason. The default is 12. All 12
    /// attempts take about 90 seconds.
    #[must_use]
    pub fn attempts(mut self, attempts: u32) -> Self {
        self.attempts = attempts.max(1);
        self
    }

    /// Sets the first and the maximum delay between attempts. The defaults are 100 ms and 20 s.
    #[must_use]
    pub fn delays(mut self, first: Duration, longest: Duration) -> Self {
        (self.first_delay, self.longest_delay) = (first, longest);
        self
    }

    /// Returns the current settings.
    pub(super) fn read(&self) -> Settings {
        let mut settings = self.settings.clone();
        settings.extend(self.source.iter().flat_map(|source| source()));
        settings
    }
}

impl fmt::Debug for RemoteOptions {
    /// Formats only the keys of the settings, because their values may be credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys: Vec<&str> = self.settings.iter().map(|(key, _)| key.as_str()).collect();
        f.debug_struct("RemoteOptions")
            .field("settings", &keys)
            .field("attempts", &self.attempts)
            .finish_non_exhaustive()
    }
}
