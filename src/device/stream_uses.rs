//! Uses of one memory by streams of the caller's: those that have ended and may be under way, and the fence
//! after all of them.
//!
//! A use ends when its guard does, and the work that is in the stream by then may go on. Whatever comes next
//! is ordered after it: another stream by its event, the store by waiting for it, and the memory's next owner
//! by a fence of [`Lane::Callers`](super::Lane::Callers), for which no thread waits.

use std::ops::Range;

use super::{Device, Fence, StreamEvent};
use crate::base::allocation::push;
use crate::base::sync::Mutex;
use crate::error::Result;

/// What work on a stream does with memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The work only reads.
    Read,
    /// The work writes, and may read.
    Write,
}

impl Access {
    /// Whether work of this kind may not run beside work of the other.
    pub(super) fn excludes(self, other: Self) -> bool {
        self == Access::Write || other == Access::Write
    }
}

/// The uses of one memory. Shared by threads.
#[derive(Default)]
pub(crate) struct StreamUses(Mutex<EndedUses>);

#[derive(Default)]
struct EndedUses {
    /// Uses that had not passed when they were last looked at.
    uses: Vec<EndedUse>,
    last: LastUse,
}

struct EndedUse {
    range: Range<u64>,
    access: Access,
    point: StreamEvent,
}

/// When all uses that have ended are done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum LastUse {
    /// There was none.
    #[default]
    None,
    /// With this fence.
    At(Fence),
    /// It is not known: the end of one could not be recorded.
    Unknown,
}

impl StreamUses {
    /// Notes a use that has ended at this point of its stream, and the fence after it.
    ///
    /// # Errors
    /// `OutOfMemory`; a device error. The memory is not given back then.
    pub fn end(
        &self,
        device: &dyn Device,
        range: Range<u64>,
        access: Access,
        point: StreamEvent,
        fence: Fence,
    ) -> Result<()> {
        let mut ended = self.0.lock();
        let noted = drop_passed(device, &mut ended.uses)
            .and_then(|()| push(&mut ended.uses, EndedUse { range, access, point }));
        ended.last = match (ended.last, &noted) {
            (LastUse::Unknown, _) | (_, Err(_)) => LastUse::Unknown,
            (LastUse::At(other), Ok(())) if other.value > fence.value => LastUse::At(other),
            (LastUse::At(_) | LastUse::None, Ok(())) => LastUse::At(fence),
        };
        noted
    }

    /// Notes a use of which it is not known when it is done.
    pub fn lose(&self) {
        self.0.lock().last = LastUse::Unknown;
    }

    /// When all uses that have ended are done.
    pub fn last(&self) -> LastUse {
        self.0.lock().last
    }

    /// The points after which work of this kind may use the range.
    ///
    /// # Errors
    /// A device error.
    pub fn before(
        &self,
        device: &dyn Device,
        range: &Range<u64>,
        access: Access,
    ) -> Result<Vec<StreamEvent>> {
        let mut ended = self.0.lock();
        drop_passed(device, &mut ended.uses)?;
        let in_the_way = |ended: &&EndedUse| {
            access.excludes(ended.access) && ended.range.start < range.end && range.start < ended.range.end
        };
        Ok(ended.uses.iter().filter(in_the_way).map(|ended| ended.point.clone()).collect())
    }
}

/// Forgets uses that are done: a memory that is used for long has many.
fn drop_passed(device: &dyn Device, uses: &mut Vec<EndedUse>) -> Result<()> {
    let mut looked = Ok(());
    uses.retain(|ended| {
        let has_passed = device.has_passed(&ended.point);
        match has_passed {
            Ok(has_passed) => !has_passed,
            Err(error) => {
                looked = Err(error);
                true
            }
        }
    });
    looked
}
