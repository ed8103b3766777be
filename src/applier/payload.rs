//! A batch's payload with its operations, decoded once.
//!
//! Operations lie in the payload and borrow its bytes. The two stay together on their way from the committer
//! to the lock holder that logs the batch, and on to the applier, so that none of them decodes the payload
//! again: a batch of 10,000 deltas would be decoded twice more, once under the submission lock.

use remanent_format::Defect;
use remanent_format::op::{OpAt, decode_payload};
use self_cell::self_cell;

use crate::memory::staging::StagingBuf;

type Operations<'a> = Vec<OpAt<'a>>;

self_cell! {
    /// A payload as the log has it, and the operations in it.
    pub(crate) struct BatchPayload {
        owner: StagingBuf,
        #[covariant]
        dependent: Operations,
    }
}

impl BatchPayload {
    /// Decodes a payload as recovery will: one that does not decode must not reach the log.
    ///
    /// # Errors
    /// As for [`decode_payload`].
    pub fn decode(payload: StagingBuf) -> Result<Self, Defect> {
        Self::try_new(payload, |payload| decode_payload(payload))
    }

    /// The operations, in their order.
    pub fn operations(&self) -> &[OpAt<'_>] {
        self.borrow_dependent()
    }

    /// The bytes that the log gets.
    pub fn bytes(&self) -> &[u8] {
        self.borrow_owner()
    }

    /// The payload's memory, for a list or to be given back.
    pub fn into_buf(self) -> StagingBuf {
        self.into_owner()
    }
}
