//! Settings of a bucket and its credentials.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Keys and values of settings.
pub type Settings = Vec<(String, String)>;

/// The settings of a bucket.
///
/// Settings have the names of `object_store`: `endpoint`, `region`, `access_key_id`, `allow_http`, `timeout` and so on. The
/// variables `AWS_…`, `GOOGLE_…` and `AZURE_…` of the environment come first; a setting replaces the variable.
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
    /// Adds a setting.
    #[must_use]
    pub fn setting(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.settings.push((key.into(), value.into()));
        self
    }

    /// Adds a source of settings, such as a file with credentials. It is called at open, and again after the bucket has
    /// denied a request.
    #[must_use]
    pub fn settings_from(mut self, source: impl Fn() -> Settings + Send + Sync + 'static) -> Self {
        self.source = Some(Arc::new(source));
        self
    }

    /// Sets the number of attempts of a request that fails for a passing reason. The default is 12, which is about one
    /// minute and a half.
    #[must_use]
    pub fn attempts(mut self, attempts: u32) -> Self {
        self.attempts = attempts.max(1);
        self
    }

    /// Sets the first and the longest delay between attempts. The default is 100 ms and 20 s.
    #[must_use]
    pub fn delays(mut self, first: Duration, longest: Duration) -> Self {
        (self.first_delay, self.longest_delay) = (first, longest);
        self
    }

    /// Returns the settings as they are now.
    pub(super) fn read(&self) -> Settings {
        let mut settings = self.settings.clone();
        settings.extend(self.source.iter().flat_map(|source| source()));
        settings
    }
}

impl fmt::Debug for RemoteOptions {
    /// Formats the keys of the settings. The values may be credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys: Vec<&str> = self.settings.iter().map(|(key, _)| key.as_str()).collect();
        f.debug_struct("RemoteOptions")
            .field("settings", &keys)
            .field("attempts", &self.attempts)
            .finish_non_exhaustive()
    }
}
