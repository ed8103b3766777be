//! A queue that makes only small allocations, regardless of its length. Batches are queued after they are logged, and a
//! failed allocation can no longer be handled then.

use std::collections::{LinkedList, VecDeque};

/// The maximum size in bytes of a queue's piece.
const PIECE_BYTES: usize = 32 << 10;

/// A first-in, first-out queue, stored in pieces of limited size. No piece is empty unless it is the only piece.
pub(crate) struct Queue<T> {
    pieces: LinkedList<VecDeque<T>>,
    len: usize,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { pieces: LinkedList::new(), len: 0 }
    }
}

impl<T> Queue<T> {
    /// The maximum number of items in a queue's piece.
    const PIECE_LEN: usize = PIECE_BYTES / size_of::<T>();

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn front(&self) -> Option<&T> {
        self.pieces.front()?.front()
    }

    pub fn push_back(&mut self, item: T) {
        match self.pieces.back_mut().filter(|last| last.len() < Self::PIECE_LEN) {
            Some(last) => last.push_back(item),
            None => self.pieces.push_back(VecDeque::from([item])),
        }
        self.len += 1;
    }

    pub fn pop_front(&mut self) -> Option<T> {
        let first = self.pieces.front_mut()?;
        let item = first.pop_front();
        // The last piece is kept even if it is empty, because most queues are short and would allocate it again.
        if first.is_empty() && self.pieces.len() > 1 {
            self.pieces.pop_front();
        }
        self.len -= usize::from(item.is_some());
        item
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_is_fifo() {
        let (mut queue, mut expected) = (Queue::default(), VecDeque::new());
        let mut next = 0;
        for (pushed, popped) in [(1, 1), (1, 2), (9000, 10), (4096, 12_014), (1, 1), (8192, 4096), (0, 5200)]
        {
            for _ in 0..pushed {
                queue.push_back(next);
                expected.push_back(next);
                next += 1;
            }
            for _ in 0..popped {
                assert_eq!(queue.front(), expected.front());
                assert_eq!(queue.pop_front(), expected.pop_front());
                assert_eq!(queue.len(), expected.len());
            }
        }
        assert_eq!((queue.len(), queue.pop_front()), (0, None));
    }
}
