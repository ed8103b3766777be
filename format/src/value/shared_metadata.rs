//! Copy-on-write metadata of pages. Empty metadata, which most pages have, is not allocated.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use super::Metadata;

static EMPTY: Metadata = Metadata::new();

/// Metadata that several states of a page share. Dereferences to [`Metadata`].
///
/// ```
/// use remanent_format::{Metadata, SharedMetadata, Value};
/// let mut shared = SharedMetadata::default();
/// let before = shared.clone();
/// shared.make_mut().insert("step".to_owned(), Value::U64(7));
/// assert_eq!(shared.get("step"), Some(&Value::U64(7)));
/// assert!(before.is_empty() && !before.is_same(&shared));
/// ```
#[derive(Clone, Default)]
pub struct SharedMetadata(Option<Arc<Metadata>>);

impl SharedMetadata {
    /// Returns the metadata for modification. If other values share the metadata, it is copied first.
    pub fn make_mut(&mut self) -> &mut Metadata {
        Arc::make_mut(self.0.get_or_insert_default())
    }

    /// Returns true if both values share one allocation, or if both are empty. The contents are not compared.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Some(this), Some(other)) => Arc::ptr_eq(this, other),
            (this, other) => this.is_none() && other.is_none(),
        }
    }
}

impl From<Metadata> for SharedMetadata {
    fn from(metadata: Metadata) -> Self {
        Self((!metadata.is_empty()).then(|| Arc::new(metadata)))
    }
}

impl Deref for SharedMetadata {
    type Target = Metadata;

    fn deref(&self) -> &Metadata {
        self.0.as_deref().unwrap_or(&EMPTY)
    }
}

impl PartialEq for SharedMetadata {
    fn eq(&self, other: &Self) -> bool {
        self.is_same(other) || **self == **other
    }
}

impl Eq for SharedMetadata {}

impl fmt::Debug for SharedMetadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
