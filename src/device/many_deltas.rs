//! Lists of many deltas, which several threads examine and distribute among themselves.

use std::convert::Infallible;

use super::{Command, Piece};
use crate::base::parallel;

/// The number of deltas in a list above which several threads are faster than one: first with idle worker threads, then
/// with threads that must be started.
const MANY_DELTAS: [usize; 2] = [8 << 10, 128 << 10];
/// The maximum number of threads that work on many deltas.
pub(super) const THREADS_MAX: usize = 16;
/// The number of deltas that a thread distributes at a time.
const PARTITIONED_AT_ONCE: usize = 4096;
/// The number of shares per thread. A thread that finishes its share processes another one.
const SHARES_EACH: usize = 4;

/// Returns whether several threads process the deltas of these commands faster than one thread.
pub(super) fn has_many_deltas(commands: &[Command]) -> bool {
    let many = if parallel::has_crew() { MANY_DELTAS[0] } else { MANY_DELTAS[1] };
    commands.iter().map(|command| command.deltas().len()).sum::<usize>() >= many
}

/// Applies `classify` to commands and returns the results in command order. For many deltas, several threads
/// each process some of the commands.
pub(super) fn map_slices<T: Send>(commands: &[Command], classify: impl Fn(&[Command]) -> T + Sync) -> Vec<T> {
    if !has_many_deltas(commands) {
        return vec![classify(commands)];
    }
    let threads = parallel::threads(THREADS_MAX);
    let slices: Vec<&[Command]> = commands.chunks(commands.len().div_ceil(threads)).collect();
    let each = |(): &mut (), index: usize| Ok::<_, Infallible>(classify(slices[index]));
    let Ok(found) = parallel::map_indexed(threads, slices.len(), || (), each);
    found
}

/// Deltas divided into shares. All deltas of one allocation are in the same share, in list order.
pub(super) struct Partitioned<T> {
    /// For each slice of the list, the deltas of each share.
    slices: Vec<Vec<Vec<T>>>,
    count: usize,
}

/// The reason why one thread must process the deltas: they could not be divided into shares.
pub(super) struct NotPartitioned;

/// Distributes deltas into shares with several threads. `equip` creates the working state of each thread. For each
/// delta, `classify` returns the number of the allocation that the delta changes and the value to store in a share, or
/// `None` to skip the delta.
///
/// # Errors
/// The error from `classify`, or [`NotPartitioned`] if there is not enough memory.
pub(super) fn partition<'p, W, T: Send>(
    rows: impl Iterator<Item = &'p [Piece]>,
    equip: impl Fn() -> W + Sync,
    classify: impl Fn(&mut W, &'p Piece) -> Result<Option<(u64, T)>, NotPartitioned> + Sync,
) -> Result<Partitioned<T>, NotPartitioned> {
    let threads = parallel::threads(THREADS_MAX);
    let count = threads * SHARES_EACH;
    let slices: Vec<&[Piece]> = rows.flat_map(|row| row.chunks(PARTITIONED_AT_ONCE)).collect();
    let partition = |with: &mut W, index: usize| {
        let slice = slices[index];
        let mut shares: Vec<Vec<T>> = Vec::new();
        shares.try_reserve(count).map_err(|_| NotPartitioned)?;
        shares.resize_with(count, Vec::new);
        // Assumes that deltas are spread evenly over the shares.
        let even = 2 * slice.len() / count;
        shares.iter_mut().try_for_each(|share| share.try_reserve(even)).map_err(|_| NotPartitioned)?;
        for piece in slice {
            if let Some((memory, delta)) = classify(with, piece)? {
                // Numbers of allocations are evenly spaced, so multiply to spread them over the shares.
                let spread = memory.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
                let share = &mut shares[spread as usize % count];
                share.try_reserve(1).map_err(|_| NotPartitioned)?;
                share.push(delta);
            }
        }
        Ok(shares)
    };
    let slices = parallel::map_indexed(threads, slices.len(), equip, partition)?;
    Ok(Partitioned { slices, count })
}

impl<T> Partitioned<T> {
    /// Returns the number of shares.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the deltas of a share in list order, one slice after another.
    pub fn share(&self, index: usize) -> impl Iterator<Item = &[T]> + Clone {
        self.slices.iter().map(move |shares| shares[index].as_slice())
    }
}
