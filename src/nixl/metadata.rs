//! The metadata that a peer needs to reach an agent. The library's own metadata contains no version, so this encoding
//! adds the version.

use super::version::Version;
use super::wire::{Reader, Writer};
use crate::error::NixlError;

/// The magic number and the version of the encoding.
const MAGIC: [u8; 4] = *b"RMNm";
const VERSION: u8 = 1;

/// The metadata of an agent.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Metadata<'b> {
    /// Version of the agent's library, or `None` if it is unknown.
    pub library: Option<Version>,
    pub agent: String,
    /// Metadata that the library returned.
    pub blob: &'b [u8],
}

impl<'b> Metadata<'b> {
    pub fn to_bytes(&self) -> Vec<u8> {
        let Version(major, minor, patch) = self.library.unwrap_or(Version(0, 0, 0));
        let writer = Writer::new(MAGIC, VERSION).u16(major).u16(minor).u16(patch);
        writer.bytes(self.agent.as_bytes()).bytes(self.blob).finish()
    }

    /// Decodes metadata.
    ///
    /// # Errors
    /// `InvalidMetadata`, `OtherPeerVersion`.
    pub fn from_bytes(bytes: &'b [u8]) -> Result<Self, NixlError> {
        let (version, mut reader) = Reader::open(bytes, MAGIC)?;
        if version != VERSION {
            return Err(other_message_version("of the metadata", version, VERSION));
        }
        let library = Version(reader.u16()?, reader.u16()?, reader.u16()?);
        let library = (library != Version(0, 0, 0)).then_some(library);
        let (agent, blob) = (reader.text()?, reader.bytes()?);
        reader.finish()?;
        Ok(Self { library, agent, blob })
    }

    /// Checks that an agent with library version `own` can use the metadata. Different minor versions of the library
    /// are not always compatible, and do not always report that they are incompatible.
    ///
    /// # Errors
    /// `OtherPeerVersion`.
    pub fn check_version(&self, own: Option<Version>) -> Result<(), NixlError> {
        let (Some(found), Some(own)) = (self.library, own) else { return Ok(()) };
        if (found.0, found.1) == (own.0, own.1) {
            return Ok(());
        }
        let (found, own) = (format!("NIXL {found}"), format!("NIXL {own}"));
        Err(NixlError::OtherPeerVersion { peer: self.agent.clone(), found, own })
    }
}

/// Returns the error for a message of an unsupported version.
pub(super) fn other_message_version(peer: &str, found: u8, own: u8) -> NixlError {
    let version = |number: u8| format!("version {number} of the messages");
    NixlError::OtherPeerVersion { peer: peer.to_owned(), found: version(found), own: version(own) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_round_trip_and_versions_are_compared() {
        let of = |library| Metadata { library, agent: "a-1".to_owned(), blob: b"blob" };
        for library in [None, Some(Version(1, 5, 1))] {
            let bytes = of(library).to_bytes();
            assert_eq!(Metadata::from_bytes(&bytes), Ok(of(library)));
        }
        let own = Some(Version(1, 5, 1));
        for same in [None, Some(Version(1, 5, 0)), own] {
            assert_eq!(of(same).check_version(own), Ok(()));
            assert_eq!(of(same).check_version(None), Ok(()));
        }
        for other in [Version(1, 4, 1), Version(1, 6, 0), Version(2, 5, 1)] {
            let error = of(Some(other)).check_version(own).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!("peer a-1 uses NIXL {other}, but this agent uses NIXL 1.5.1")
            );
        }
        let newer = Writer::new(MAGIC, 2).finish();
        assert!(matches!(Metadata::from_bytes(&newer), Err(NixlError::OtherPeerVersion { .. })));
    }
}
