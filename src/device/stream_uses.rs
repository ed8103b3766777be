//! Uses of one allocation by callers' streams: the ended uses whose work may still be in flight, and a fence that
//! passes after this work.
//!
//! A use ends with its guard, but the work then queued in the stream may still run. Later uses run after it: another
//! stream waits for its event, the store waits for it, and the memory's next owner waits for a fence of
//! [`Lane::Callers`](super::Lane::Callers), which blocks no thread.

use std::ops::Range;

use super::{DeviceStreams, Fence, StreamEvent};
use crate::base::allocation::push;
use crate::base::sync::Mutex;
use crate::error::Result;

/// The kind of access that work on a stream makes to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The work only reads.
    Read,
    /// The work writes, and may read.
    Write,
}

impl Access {
    /// Returns whether work with this kind of access must not run concurrently with work of the `other` kind.
    pub(super) fn excludes(self, other: Self) -> bool {
        self == Access::Write || other == Access::Write
    }
}

/// The uses of one allocation by callers' streams, shared by threads.
#[derive(Default)]
pub(crate) struct StreamUses(Mutex<EndedUses>);

#[derive(Default)]
struct EndedUses {
    /// Ended uses whose work was still in flight at the last check.
    uses: Vec<EndedUse>,
    last: LastUse,
}

struct EndedUse {
    range: Range<u64>,
    access: Access,
    point: StreamEvent,
}

/// The point at which all ended uses of an allocation are done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum LastUse {
    /// No use has ended yet.
    #[default]
    None,
    /// The uses are done when this fence has passed.
    At(Fence),
    /// The end of a use could not be recorded, so it is unknown when the uses are done.
    Unknown,
}

impl StreamUses {
    /// Records a use that ended at this point of its stream, and a fence that passes after that point.
    ///
    /// # Errors
    /// `OutOfMemory`; a device error. The memory is then never freed.
    pub fn end(
        &self,
        streams: &dyn DeviceStreams,
        range: Range<u64>,
        access: Access,
        point: StreamEvent,
        fence: Fence,
    ) -> Result<()> {
        let mut ended = self.0.lock();
        let noted = drop_passed(streams, &mut ended.uses)
            .and_then(|()| push(&mut ended.uses, EndedUse { range, access, point }));
        ended.last = match (ended.last, &noted) {
            (LastUse::Unknown, _) | (_, Err(_)) => LastUse::Unknown,
            (LastUse::At(other), Ok(())) if other.value > fence.value => LastUse::At(other),
            (LastUse::At(_) | LastUse::None, Ok(())) => LastUse::At(fence),
        };
        noted
    }

    /// Records a use whose end could not be recorded in its stream.
    pub fn mark_unknown(&self) {
        self.0.lock().last = LastUse::Unknown;
    }

    /// Returns when all ended uses are done.
    pub fn last(&self) -> LastUse {
        self.0.lock().last
    }

    /// Returns the points that must pass before work with this kind of access may use the range.
    ///
    /// # Errors
    /// A device error.
    pub fn before(
        &self,
        streams: &dyn DeviceStreams,
        range: &Range<u64>,
        access: Access,
    ) -> Result<Vec<StreamEvent>> {
        let mut ended = self.0.lock();
        drop_passed(streams, &mut ended.uses)?;
        let in_the_way = |ended: &&EndedUse| {
            access.excludes(ended.access) && ended.range.start < range.end && range.start < ended.range.end
        };
        Ok(ended.uses.iter().filter(in_the_way).map(|ended| ended.point.clone()).collect())
    }
}

/// Removes uses that are done, because memory in use for a long time accumulates many.
fn drop_passed(streams: &dyn DeviceStreams, uses: &mut Vec<EndedUse>) -> Result<()> {
    let mut checked = Ok(());
    uses.retain(|ended| {
        let has_passed = streams.has_passed(&ended.point);
        match has_passed {
            Ok(has_passed) => !has_passed,
            Err(error) => {
                checked = Err(error);
                true
            }
        }
    });
    checked
}
