//! Versions of the library.

use std::fmt;

/// A version: major, minor, patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version(pub u16, pub u16, pub u16);

impl Version {
    /// Parses a version such as `1.5.1`.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('.').map(|part| part.parse().ok());
        let version = Self(parts.next()??, parts.next()??, parts.next()??);
        parts.next().is_none().then_some(version)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_have_three_numbers() {
        assert_eq!(Version::parse("1.5.1"), Some(Version(1, 5, 1)));
        assert_eq!(Version(1, 5, 1).to_string(), "1.5.1");
        for text in ["", "1.5", "1.5.x", "1.5.1.dev2", "1.5.-1", "70000.1.1"] {
            assert_eq!(Version::parse(text), None, "{text}");
        }
    }
}
