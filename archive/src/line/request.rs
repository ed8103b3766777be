//! Sends single requests to the bucket, with retries, and resolves creates of unknown outcome (rules 2 and 23).

use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesOrdered;
use remanent_format::StoreId;

use super::{Line, Nonces};
use crate::bucket::{Bucket, BucketError, Creation, FailureClass};
use crate::error::{Damage, Error, Result};
use crate::object::{Bound, DataRef, LineObject, Nonce, ObjectHeaderRaw, ObjectKey, Payload, decode_header};
use crate::rules::Rule;

/// Maximum number of objects that are read concurrently or not yet processed. Data objects then use up to 64 MiB of
/// memory.
pub(super) const READS_MAX: usize = 8;

/// The bytes of an object to create.
#[derive(Clone, Copy)]
pub(super) enum Body<'a> {
    Borrowed(&'a [u8]),
    Shared(&'a Arc<Vec<u8>>),
}

/// The known outcome of a create.
pub(super) enum Known {
    /// This process created the object.
    Ours,
    /// Another process created an object with this key. Contains the bytes of that object.
    Others(Vec<u8>),
}

/// The outcome of one attempt of a create.
pub(super) enum Attempt {
    Known(Known),
    /// The outcome is unknown, or nothing was written. The create must be repeated with the same bytes.
    Again(BucketError),
}

impl<B: Bucket, N: Nonces> Line<'_, B, N> {
    /// Creates an object, and determines whether this process or another one created it (rule 2).
    pub(super) async fn create(&self, key: ObjectKey, body: Body<'_>, nonce: Nonce) -> Result<Known> {
        let mut in_doubt = false;
        for attempt in 1.. {
            match self.try_create(key, body, nonce, &mut in_doubt).await? {
                Attempt::Known(known) => return Ok(known),
                Attempt::Again(failure) => self.pause_create(key, attempt, failure).await?,
            }
        }
        unreachable!("the loop ends only by a return");
    }

    /// Waits before a create is repeated. Returns [`Error::Unknown`] if no further attempt is permitted.
    pub(super) async fn pause_create(
        &self,
        key: ObjectKey,
        attempt: u32,
        failure: BucketError,
    ) -> Result<()> {
        if self.archive.bucket.pause(attempt, &failure).await {
            return Ok(());
        }
        Err(Error::Unknown { key, source: failure })
    }

    /// Sends one create. If the bucket reports that the object exists, reads it and compares its nonce (rule 2).
    pub(super) async fn try_create(
        &self,
        key: ObjectKey,
        body: Body<'_>,
        nonce: Nonce,
        in_doubt: &mut bool,
    ) -> Result<Attempt> {
        let created = match body {
            Body::Borrowed(bytes) => self.archive.bucket.create(key, bytes).await,
            Body::Shared(bytes) => self.archive.bucket.create_shared(key, bytes).await,
        };
        match created {
            Ok(Creation::Created) => return Ok(Attempt::Known(Known::Ours)),
            Ok(Creation::Exists) => {}
            Err(failure) => {
                *in_doubt = true;
                return Ok(Attempt::Again(failure));
            }
        }
        if !self.archive.rules.follow(Rule::Nonce) && *in_doubt {
            return Ok(Attempt::Known(Known::Ours));
        }
        // [nonce] If the bucket reports after a timeout that the object exists, the object may belong to this process
        // or to another one.
        let Some(found) = self.get(key).await? else {
            if !self.archive.rules.follow(Rule::Reread) {
                return Err(Error::Damaged { key, damage: Damage::Refused });
            }
            // [reread] The bucket reported a conflict (HTTP 409) as an existing object, and wrote nothing.
            let message = format!("{key} is reported to exist but cannot be read");
            return Ok(Attempt::Again(BucketError { class: FailureClass::InDoubt, message }));
        };
        let header = decode_header(&found).map_err(|defect| Error::invalid(key, defect))?;
        let known = if header.nonce == nonce { Known::Ours } else { Known::Others(found) };
        Ok(Attempt::Known(known))
    }

    /// Returns the bytes of an object, or `None` if it does not exist.
    pub(super) async fn get(&self, key: ObjectKey) -> Result<Option<Vec<u8>>> {
        for attempt in 1.. {
            match self.archive.bucket.get(key, None).await {
                Ok(found) => return Ok(found),
                Err(source) if self.archive.bucket.pause(attempt, &source).await => {}
                Err(source) => return Err(Error::Bucket { action: "get", key, source }),
            }
        }
        unreachable!("the loop ends only by a return");
    }

    /// Returns true if the object exists. Reads only its header.
    pub(super) async fn exists(&self, key: ObjectKey) -> Result<bool> {
        let header = 0..ObjectHeaderRaw::LEN as u64;
        for attempt in 1.. {
            match self.archive.bucket.get(key, Some(header.clone())).await {
                Ok(found) => return Ok(found.is_some()),
                Err(source) if self.archive.bucket.pause(attempt, &source).await => {}
                Err(source) => return Err(Error::Bucket { action: "get", key, source }),
            }
        }
        unreachable!("the loop ends only by a return");
    }

    /// Returns the object at a position of the line, or `None` if it does not exist.
    pub(super) async fn get_line(&self, position: u64) -> Result<Option<LineObject>> {
        let key = ObjectKey::Line(position);
        let Some(bytes) = self.get(key).await? else { return Ok(None) };
        let object = LineObject::decode(&bytes, position, self.view.store);
        object.map(Some).map_err(|defect| Error::invalid(key, defect))
    }

    /// Returns the object at a position. Returns an error if it does not exist.
    pub(super) async fn need_line(&mut self, position: u64) -> Result<LineObject> {
        match self.get_line(position).await? {
            Some(object) => Ok(object),
            None => Err(self.missing(ObjectKey::Line(position), position).await?),
        }
    }

    /// Returns the copy of a boundary, or `None` if it does not exist.
    pub(super) async fn get_bound(&self, number: u64) -> Result<Option<Bound>> {
        let key = ObjectKey::Bound(number);
        let Some(bytes) = self.get(key).await? else { return Ok(None) };
        self.decode_bound(number, &bytes).map(Some)
    }

    /// Checks the copy of a boundary.
    pub(super) fn decode_bound(&self, number: u64, bytes: &[u8]) -> Result<Bound> {
        let key = ObjectKey::Bound(number);
        let bound = Bound::decode(bytes, number, None).map_err(|defect| Error::invalid(key, defect))?;
        let found = bound.object.store;
        match self.view.store {
            // Two new stores created `line/1` concurrently. One of them stalled until boundaries had passed that
            // position.
            Some(expected) if expected != found => Err(Error::IdentityMismatch { found, expected }),
            _ => Ok(bound),
        }
    }

    /// Returns the payload of a data object that the line object at position `lister` lists.
    pub(super) async fn need_data(
        &mut self,
        entry: &DataRef,
        store: StoreId,
        lister: u64,
    ) -> Result<Payload> {
        match self.get_data(entry, store).await? {
            Some(payload) => Ok(payload),
            None => Err(self.missing(ObjectKey::Data(entry.key), lister).await?),
        }
    }

    /// Returns the payload of a data object, or `None` if the object does not exist.
    pub(super) async fn get_data(&self, entry: &DataRef, store: StoreId) -> Result<Option<Payload>> {
        let key = ObjectKey::Data(entry.key);
        let Some(bytes) = self.get(key).await? else { return Ok(None) };
        let payload = Payload::decode(bytes, entry, store);
        payload.map(Some).map_err(|defect| Error::invalid(key, defect))
    }

    /// Reads the data objects of `entries`, up to [`READS_MAX`] concurrently. The line object at position `lister`
    /// lists these entries. Calls `receive` with each entry and its payload, in the order of `entries`. `receive`
    /// returns the number of payloads that it still keeps in memory, which reduces the number of concurrent reads.
    pub(super) async fn need_each_data(
        &mut self,
        entries: &[DataRef],
        store: StoreId,
        lister: u64,
        mut receive: impl FnMut(&DataRef, Payload) -> Result<usize>,
    ) -> Result<()> {
        let missing = {
            let line = &*self;
            let read = |entry| async move { (entry, line.get_data(entry, store).await) };
            let mut left = entries.iter();
            let mut running = FuturesOrdered::new();
            let mut kept = 0;
            loop {
                while running.is_empty() || running.len() + kept < READS_MAX {
                    let Some(entry) = left.next() else { break };
                    running.push_back(read(entry));
                }
                match running.next().await {
                    Some((entry, payload)) => match payload? {
                        Some(payload) => kept = receive(entry, payload)?,
                        None => break entry.key,
                    },
                    None => return Ok(()),
                }
            }
        };
        Err(self.missing(ObjectKey::Data(missing), lister).await?)
    }

    /// Concurrently reads the line objects from `position` up to `end`, at most [`READS_MAX`] of them. Each result
    /// belongs to one position, so a caller that stops earlier ignores errors of later positions.
    pub(super) async fn read_ahead(&self, position: u64, end: u64) -> Vec<Result<Option<LineObject>>> {
        let positions = position..end.min(position + READS_MAX as u64);
        join_all(positions.map(|position| self.get_line(position))).await
    }

    /// Returns the error for a missing object: [`Error::Overtaken`] if a boundary has passed `position`, where the line
    /// contains or lists the object, and [`Error::Damaged`] otherwise (rule 23, [rcheck]).
    pub(super) async fn missing(&mut self, key: ObjectKey, position: u64) -> Result<Error> {
        self.unless_overtaken(Error::missing(key), position).await
    }

    /// Replaces damage with [`Error::Overtaken`] if a boundary has passed `lowest`, the lowest position that was read
    /// (rule 23, [rcheck]). In a hole, an object may be missing or may have been created again by a stalled writer.
    pub(super) async fn unless_overtaken(&mut self, error: Error, lowest: u64) -> Result<Error> {
        let is_damage = matches!(error, Error::Damaged { .. } | Error::Local(_));
        if is_damage && self.is_overtaken(lowest).await? {
            return Ok(Error::Overtaken { position: lowest });
        }
        Ok(error)
    }

    /// Returns true if objects at or above `position` may have been deleted, because the boundary before the newest one
    /// starts above it. Deletes lag one boundary behind (rule 19).
    pub(super) async fn is_overtaken(&mut self, position: u64) -> Result<bool> {
        if !self.archive.rules.follow(Rule::RCheck) {
            return Ok(false);
        }
        self.find_newer_boundary().await?;
        if self.view.start <= position {
            return Ok(false);
        }
        if !self.archive.rules.follow(Rule::Lag) {
            return Ok(true);
        }
        Ok(self.view.bound > 1 && self.start_of_bound(self.view.bound - 1).await? > position)
    }

    /// Deletes an object. Returns false if the bucket rejects the request or cannot be reached.
    pub(super) async fn delete(&self, key: ObjectKey) -> bool {
        for attempt in 1.. {
            match self.archive.bucket.delete(key).await {
                Ok(()) => return true,
                Err(failure) if self.archive.bucket.pause(attempt, &failure).await => {}
                Err(_) => return false,
            }
        }
        unreachable!("the loop ends only by a return");
    }
}
