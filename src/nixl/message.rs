//! Messages between a page client and a page server. Agents exchange them as notifications.

use remanent_format::{Epoch, Lsn, PageId};

use super::metadata::other_message_version;
use super::wire::{Reader, Writer};
use crate::error::NixlError;

/// The first bytes of every message. No other notification starts with them.
pub(super) const MAGIC: [u8; 4] = *b"\0RMN";
const VERSION: u8 = 1;

/// The page that a client requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PageName {
    Id(PageId),
    Key(Vec<u8>),
}

/// The reason why a server sends no page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The page does not exist.
    Unknown,
    /// The page has this length in bytes, which exceeds the requested maximum.
    TooLong(u64),
    /// Reading the page failed.
    Failed(String),
}

/// A message between a client and a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// A client connects: its metadata, and the region to which the server writes.
    Hello { id: u64, metadata: Vec<u8>, target: Vec<u8> },
    /// The server has loaded the metadata of the client.
    Welcome { id: u64 },
    /// A client requests a page of up to `len` bytes, to be written at `offset` of its region.
    Fetch { id: u64, name: PageName, offset: u64, len: u64 },
    /// The server has written a page with this encoded description. The message arrives after the bytes.
    Page { id: u64, info: Vec<u8>, crc: u32 },
    /// The server does not send the requested page.
    Refused { id: u64, refusal: Refusal },
    /// A client requests the newest versions of pages.
    Ask { id: u64, pages: Vec<PageId> },
    /// The versions of the requested pages after batch `lsn`. A page that does not exist has epoch 0.
    Versions { id: u64, lsn: Lsn, epochs: Vec<Epoch> },
    /// A client disconnects.
    Goodbye { id: u64 },
    /// A client requests a part of the encoded newest state from `offset` on. Offset 0 requests a new state.
    State { id: u64, offset: u64 },
    /// A part of an encoded state of `len` bytes.
    StatePart { id: u64, len: u64, part: Vec<u8> },
}

impl Message {
    /// Returns the number that the client assigned to the request. The answer has the same number.
    pub fn id(&self) -> u64 {
        match self {
            Message::Hello { id, .. }
            | Message::Welcome { id }
            | Message::Fetch { id, .. }
            | Message::Page { id, .. }
            | Message::Refused { id, .. }
            | Message::Ask { id, .. }
            | Message::Versions { id, .. }
            | Message::Goodbye { id }
            | Message::State { id, .. }
            | Message::StatePart { id, .. } => *id,
        }
    }

    /// Returns true if `bytes` contain a message from a client to a server. Does not check the contents of the message.
    pub fn is_request(bytes: &[u8]) -> bool {
        bytes.starts_with(&MAGIC) && matches!(bytes.get(5), Some(0 | 2 | 5 | 7 | 8))
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let kind = |kind: u8, id: &u64| Writer::new(MAGIC, VERSION).u8(kind).u64(*id);
        let writer = match self {
            Message::Hello { id, metadata, target } => kind(0, id).bytes(metadata).bytes(target),
            Message::Welcome { id } => kind(1, id),
            Message::Fetch { id, name, offset, len } => {
                let writer = kind(2, id).u64(*offset).u64(*len);
                match name {
                    PageName::Id(page) => writer.u8(0).u64(page.0),
                    PageName::Key(key) => writer.u8(1).bytes(key),
                }
            }
            Message::Page { id, info, crc } => kind(3, id).bytes(info).u64((*crc).into()),
            Message::Refused { id, refusal } => match refusal {
                Refusal::Unknown => kind(4, id).u8(0),
                Refusal::TooLong(len) => kind(4, id).u8(1).u64(*len),
                Refusal::Failed(reason) => kind(4, id).u8(2).bytes(reason.as_bytes()),
            },
            Message::Ask { id, pages } => {
                pages.iter().fold(kind(5, id).u64(pages.len() as u64), |writer, page| writer.u64(page.0))
            }
            Message::Versions { id, lsn, epochs } => {
                let writer = kind(6, id).u64(lsn.0).u64(epochs.len() as u64);
                epochs.iter().fold(writer, |writer, epoch| writer.u64(epoch.0))
            }
            Message::Goodbye { id } => kind(7, id),
            Message::State { id, offset } => kind(8, id).u64(*offset),
            Message::StatePart { id, len, part } => kind(9, id).u64(*len).bytes(part),
        };
        writer.finish()
    }

    /// Decodes a message from peer `peer`.
    ///
    /// # Errors
    /// `InvalidMetadata`, `OtherPeerVersion`.
    pub fn from_bytes(peer: &str, bytes: &[u8]) -> Result<Self, NixlError> {
        let (version, mut reader) = Reader::open(bytes, MAGIC)?;
        if version != VERSION {
            return Err(other_message_version(peer, version, VERSION));
        }
        let unknown = || NixlError::InvalidMetadata { reason: "the kind of message is unknown" };
        let (kind, id) = (reader.u8()?, reader.u64()?);
        let message = match kind {
            0 => Message::Hello { id, metadata: reader.bytes()?.to_vec(), target: reader.bytes()?.to_vec() },
            1 => Message::Welcome { id },
            2 => {
                let (offset, len) = (reader.u64()?, reader.u64()?);
                let name = match reader.u8()? {
                    0 => PageName::Id(PageId(reader.u64()?)),
                    1 => PageName::Key(reader.bytes()?.to_vec()),
                    _ => return Err(unknown()),
                };
                Message::Fetch { id, name, offset, len }
            }
            3 => {
                let info = reader.bytes()?.to_vec();
                let crc = u32::try_from(reader.u64()?).map_err(|_| unknown())?;
                Message::Page { id, info, crc }
            }
            4 => {
                let refusal = match reader.u8()? {
                    0 => Refusal::Unknown,
                    1 => Refusal::TooLong(reader.u64()?),
                    2 => Refusal::Failed(reader.text()?),
                    _ => return Err(unknown()),
                };
                Message::Refused { id, refusal }
            }
            5 => Message::Ask { id, pages: reader.u64s()?.into_iter().map(PageId).collect() },
            6 => {
                let lsn = Lsn(reader.u64()?);
                Message::Versions { id, lsn, epochs: reader.u64s()?.into_iter().map(Epoch).collect() }
            }
            7 => Message::Goodbye { id },
            8 => Message::State { id, offset: reader.u64()? },
            9 => Message::StatePart { id, len: reader.u64()?, part: reader.bytes()?.to_vec() },
            _ => return Err(unknown()),
        };
        reader.finish()?;
        Ok(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_message_round_trips() {
        let id = 7;
        let messages = [
            Message::Hello { id, metadata: vec![1, 2], target: vec![3] },
            Message::Welcome { id },
            Message::Fetch { id, name: PageName::Id(PageId(9)), offset: 4096, len: 2 },
            Message::Fetch { id, name: PageName::Key(b"key".to_vec()), offset: 0, len: u64::MAX },
            Message::Page { id, info: vec![4, 5], crc: u32::MAX },
            Message::Refused { id, refusal: Refusal::Unknown },
            Message::Refused { id, refusal: Refusal::TooLong(1 << 40) },
            Message::Refused { id, refusal: Refusal::Failed("damaged".to_owned()) },
            Message::Ask { id, pages: vec![PageId(1), PageId(2)] },
            Message::Versions { id, lsn: Lsn(8), epochs: vec![Epoch(0), Epoch(1)] },
            Message::Goodbye { id },
            Message::State { id, offset: 1 << 20 },
            Message::StatePart { id, len: 1 << 40, part: vec![6] },
        ];
        for message in messages {
            let bytes = message.to_bytes();
            assert_eq!(Message::from_bytes("a-1", &bytes), Ok(message.clone()));
            for len in 0..bytes.len() {
                assert!(Message::from_bytes("a-1", &bytes[..len]).is_err(), "{message:?} of {len} bytes");
            }
        }
        let unknown = Writer::new(MAGIC, VERSION).u8(10).u64(id).finish();
        assert!(Message::from_bytes("a-1", &unknown).is_err());
        let long = Writer::new(MAGIC, VERSION).u8(5).u64(id).u64(u64::MAX).finish();
        assert!(Message::from_bytes("a-1", &long).is_err());
        let newer = Writer::new(MAGIC, 2).finish();
        let error = Message::from_bytes("a-1", &newer).unwrap_err();
        assert!(error.to_string().starts_with("peer a-1 uses version 2 of the messages"), "{error}");
    }
}
