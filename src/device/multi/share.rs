//! Each device's share of a list, including its staging.
//!
//! A staging buffer belongs to one list at a time. If several devices need the same buffer, the first device gets it.
//! Every other device gets a copy of the bytes that it reads. The bytes that it writes are copied back when all devices
//! are done.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::split::staging_indices;
use crate::device::spans::staged_spans;
use crate::device::{Command, CommandList, Device, Fence, Lane, Pending, Staging, StagingSpan};
use crate::error::Result;

/// A list in flight on several devices.
pub(super) struct Shares {
    /// The parts of the list that were queued earlier, in order. They use copies of the staging buffers.
    early: Vec<Shares>,
    parts: Vec<Share>,
    /// The list's staging buffers that no device uses, by index.
    kept: Vec<Option<Staging>>,
}

/// The share of one device.
struct Share {
    part: usize,
    pending: Pending,
    /// The staging buffers of the share, in the order of the device's list.
    staging: Vec<StagingShare>,
}

/// A staging buffer that a device uses: the list's own buffer, or a copy.
struct StagingShare {
    /// The index of the staging buffer in the list.
    index: usize,
    /// For a copy, the spans to copy back.
    written: Option<Vec<StagingSpan>>,
}

type DeviceParts = [Arc<dyn Device>];

impl Shares {
    /// Submits each command to its device. Devices in `waiting_parts` get a command list even without commands. `early`
    /// contains the shares queued earlier for the same list.
    pub fn of(
        parts: &DeviceParts,
        lane: Lane,
        commands: Vec<(usize, Command)>,
        staging: Vec<Staging>,
        waiting_parts: &BTreeSet<usize>,
        early: Vec<Self>,
    ) -> Result<Self> {
        let mut kept: Vec<Option<Staging>> = staging.into_iter().map(Some).collect();
        // The bytes that other devices read are copied before the staging is passed to the first device.
        let lists = lists(parts.len(), commands, kept.len(), waiting_parts);
        let mut owners = vec![None; kept.len()];
        for list in &lists {
            list.used.iter().for_each(|index| _ = owners[*index].get_or_insert(list.part));
        }
        let is_owner = |part, index: usize| owners[index] == Some(part);
        let mut copies = Vec::new();
        for list in &lists {
            for index in list.used.iter().filter(|index| !is_owner(list.part, **index)) {
                let original = kept[*index].as_ref().expect("no device has it yet");
                copies.push(list.copy(parts, *index, original)?);
            }
        }
        let mut copies = copies.into_iter();
        Self::submit(parts, lane, lists, |part, index| {
            if is_owner(part, index) {
                (kept[index].take().expect("one owner"), false)
            } else {
                (copies.next().expect("one for each use by a device that does not own it"), true)
            }
        })
        .map(|shares| Self { early, parts: shares, kept })
    }

    /// Submits commands that use copies of the staging buffers. The buffers themselves stay with the caller.
    pub fn copies(
        parts: &DeviceParts,
        lane: Lane,
        commands: Vec<(usize, Command)>,
        staging: &[Staging],
    ) -> Result<Self> {
        let lists = lists(parts.len(), commands, staging.len(), &BTreeSet::new());
        let copy = |list: &List, index: &usize| list.copy(parts, *index, &staging[*index]);
        let copies = lists.iter().flat_map(|list| list.used.iter().map(move |index| copy(list, index)));
        let mut copies = copies.collect::<Result<Vec<_>>>()?.into_iter();
        let lent = |_, _| (copies.next().expect("one for each use"), true);
        Ok(Self { early: Vec::new(), parts: Self::submit(parts, lane, lists, lent)?, kept: Vec::new() })
    }

    /// Wraps a copy in flight on one device.
    pub fn copy(part: usize, pending: Pending) -> Self {
        let share = Share { part, pending, staging: Vec::new() };
        Self { early: Vec::new(), parts: vec![share], kept: Vec::new() }
    }

    fn submit(
        parts: &DeviceParts,
        lane: Lane,
        lists: Vec<List>,
        mut lend: impl FnMut(usize, usize) -> (Staging, bool),
    ) -> Result<Vec<Share>> {
        let mut shares = Vec::new();
        for mut list in lists {
            let (mut staging, mut lent) = (Vec::new(), Vec::new());
            for &index in &list.used {
                let (bytes, is_copy) = lend(list.part, index);
                let written = is_copy.then(|| list.spans(index).1);
                staging.push(bytes);
                lent.push(StagingShare { index, written });
            }
            for index in list.commands.iter_mut().flat_map(staging_indices) {
                *index = list.used.binary_search(index).expect("every staging that is named is used");
            }
            let pending = parts[list.part].submit(lane, CommandList { commands: list.commands, staging })?;
            shares.push(Share { part: list.part, pending, staging: lent });
        }
        Ok(shares)
    }

    /// Returns each fence to wait for, with the index of its device. The fences of one device rise.
    pub fn fences(&self) -> impl Iterator<Item = (usize, Fence)> {
        let early = self.early.iter().flat_map(|shares| &shares.parts);
        early.chain(&self.parts).map(|share| (share.part, share.pending.fence()))
    }

    /// Waits for all devices and returns the list's staging.
    pub fn finish(mut self, parts: &DeviceParts) -> Result<Vec<Staging>> {
        let mut kept = std::mem::take(&mut self.kept);
        let early = std::mem::take(&mut self.early);
        let mut copies = Vec::new();
        self.return_all(parts, |lent, staging| match lent.written {
            Some(written) => copies.push((lent.index, written, staging)),
            None => kept[lent.index] = Some(staging),
        })?;
        let mut staging: Vec<Staging> =
            kept.into_iter().map(|staging| staging.expect("all are back")).collect();
        for (index, written, copy) in copies {
            copy_spans(&copy, &mut staging[index], &written);
        }
        // The earlier lists are finished last, but no later list has written to the same bytes: such a list would have
        // been queued only after the earlier lists had ended.
        early.into_iter().try_for_each(|shares| shares.finish_into(parts, &mut staging))?;
        Ok(staging)
    }

    /// Waits for all devices and copies the bytes that they wrote into the caller's staging.
    pub fn finish_into(self, parts: &DeviceParts, staging: &mut [Staging]) -> Result<()> {
        self.return_all(parts, |lent, copy| {
            let written = lent.written.expect("copies alone were lent");
            copy_spans(&copy, &mut staging[lent.index], &written);
        })
    }

    fn return_all(self, parts: &DeviceParts, mut take: impl FnMut(StagingShare, Staging)) -> Result<()> {
        for share in self.parts {
            let returned = share.pending.finish(&*parts[share.part])?;
            share.staging.into_iter().zip(returned).for_each(|(lent, staging)| take(lent, staging));
        }
        Ok(())
    }
}

/// The commands of one device.
struct List {
    part: usize,
    commands: Vec<Command>,
    /// The indices of the staging buffers that the commands use, in ascending order.
    used: Vec<usize>,
}

impl List {
    /// Returns the ranges of one staging buffer that the commands read, and the ranges that they write.
    fn spans(&self, index: usize) -> (Vec<StagingSpan>, Vec<StagingSpan>) {
        let (mut read, mut written) = staged_spans(&self.commands);
        read.retain(|span| span.index == index);
        written.retain(|span| span.index == index);
        (read, written)
    }

    fn copy(&self, parts: &DeviceParts, index: usize, original: &Staging) -> Result<Staging> {
        let mut copy = parts[0].staging(original.len())?;
        copy_spans(original, &mut copy, &self.spans(index).0);
        Ok(copy)
    }
}

/// Groups commands by part. A part without commands gets a list if it is in `waiting_parts`.
fn lists(
    part_count: usize,
    commands: Vec<(usize, Command)>,
    staging_count: usize,
    waiting_parts: &BTreeSet<usize>,
) -> Vec<List> {
    let mut lists: Vec<List> =
        (0..part_count).map(|part| List { part, commands: Vec::new(), used: Vec::new() }).collect();
    for (part, mut command) in commands {
        let list = &mut lists[part];
        list.used.extend(staging_indices(&mut command).into_iter().map(|index| *index));
        list.commands.push(command);
    }
    for list in &mut lists {
        list.used.sort_unstable();
        list.used.dedup();
        assert!(list.used.last().is_none_or(|index| *index < staging_count), "staging that the list has not");
    }
    lists.retain(|list| !list.commands.is_empty() || waiting_parts.contains(&list.part));
    lists
}

fn copy_spans(source: &Staging, target: &mut Staging, spans: &[StagingSpan]) {
    for span in spans {
        target[span.offset..][..span.len].copy_from_slice(&source[span.offset..][..span.len]);
    }
}
