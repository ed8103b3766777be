//! Reads a range of the line and the data objects that it lists, in order and in advance.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::ops::Range;
use std::task::{Context, Poll};

use futures_util::StreamExt;
use futures_util::future::LocalBoxFuture;
use futures_util::stream::FuturesOrdered;
use remanent_format::StoreId;

use super::request::READS_MAX;
use super::{Line, Nonces};
use crate::bucket::Bucket;
use crate::error::Result;
use crate::object::{DataRef, LineObject, Payload};

/// Reads of line objects, and of the data objects for which `is_fetched` returns true. Up to [`READS_MAX`] objects of
/// each kind are read in advance. A failed read is only reported when the caller reaches the object.
pub(super) struct LineAhead<'l, 'a, B, N, F> {
    line: &'l Line<'a, B, N>,
    /// The positions that were not requested yet.
    positions: Range<u64>,
    is_fetched: F,
    objects: FuturesOrdered<LocalBoxFuture<'l, Result<Option<LineObject>>>>,
    /// Objects that were received and not returned yet.
    received: VecDeque<Result<Option<LineObject>>>,
    /// Data objects that were not requested yet.
    wanted: VecDeque<DataRef>,
    data: FuturesOrdered<LocalBoxFuture<'l, Result<Option<Payload>>>>,
    /// Payloads that were received and not returned yet.
    payloads: VecDeque<Result<Option<Payload>>>,
    /// Number of payloads that the caller keeps in memory.
    kept: usize,
}

impl<'l, 'a, B, N, F> LineAhead<'l, 'a, B, N, F>
where
    B: Bucket,
    N: Nonces,
    F: Fn(&LineObject, &DataRef) -> bool,
{
    pub fn new(line: &'l Line<'a, B, N>, positions: Range<u64>, is_fetched: F) -> Self {
        Self {
            line,
            positions,
            is_fetched,
            objects: FuturesOrdered::new(),
            received: VecDeque::new(),
            wanted: VecDeque::new(),
            data: FuturesOrdered::new(),
            payloads: VecDeque::new(),
            kept: 0,
        }
    }

    /// Sets the number of payloads that the caller keeps in memory. Fewer are then read in advance.
    pub fn set_kept(&mut self, kept: usize) {
        self.kept = kept;
    }

    /// Returns the next line object, `Ok(None)` if it does not exist, or `None` at the end of the range.
    pub async fn next_object(&mut self) -> Option<Result<Option<LineObject>>> {
        poll_fn(|context| {
            self.advance(context);
            match self.received.pop_front() {
                Some(object) => Poll::Ready(Some(object)),
                None if self.objects.is_empty() => Poll::Ready(None),
                None => Poll::Pending,
            }
        })
        .await
    }

    /// Returns the payload of the next data object, or `None` if it does not exist. The caller calls this once for each
    /// fetched entry of each object, in order.
    pub async fn next_data(&mut self) -> Result<Option<Payload>> {
        poll_fn(|context| {
            self.advance(context);
            match self.payloads.pop_front() {
                Some(payload) => Poll::Ready(payload),
                None if self.data.is_empty() => Poll::Ready(Ok(None)),
                None => Poll::Pending,
            }
        })
        .await
    }

    /// Sends further requests, and receives objects.
    fn advance(&mut self, context: &mut Context<'_>) {
        let line = self.line;
        loop {
            while self.objects.len() + self.received.len() < READS_MAX
                && let Some(position) = self.positions.next()
            {
                self.objects.push_back(Box::pin(line.get_line(position)));
            }
            let Poll::Ready(Some(object)) = self.objects.poll_next_unpin(context) else { break };
            if let Ok(Some(object)) = &object {
                self.wanted.extend(object.data.iter().filter(|entry| (self.is_fetched)(object, entry)));
            }
            self.received.push_back(object);
        }
        loop {
            while self.has_room()
                && let Some(entry) = self.wanted.pop_front()
            {
                self.data.push_back(Box::pin(async move {
                    let store = line.view.store.unwrap_or(StoreId([0; 16]));
                    line.get_data(&entry, store).await
                }));
            }
            let Poll::Ready(Some(payload)) = self.data.poll_next_unpin(context) else { break };
            self.payloads.push_back(payload);
        }
    }

    /// Returns true if another data object may be read. One is always read.
    fn has_room(&self) -> bool {
        let in_memory = self.data.len() + self.payloads.len();
        in_memory == 0 || in_memory + self.kept < READS_MAX
    }
}
