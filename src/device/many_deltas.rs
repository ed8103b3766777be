//! Lists of many deltas: several threads look at them, and deal them out among themselves.

use std::convert::Infallible;

use super::{Command, Piece};
use crate::base::parallel;

/// Deltas of a list that several threads look at sooner than one does: where a crew waits for work, and where
/// threads are started for it.
const MANY_DELTAS: [usize; 2] = [8 << 10, 128 << 10];
/// Threads that work on many deltas.
pub(super) const THREADS_MAX: usize = 16;
/// Deltas that a thread deals out into shares at once.
const DEALT_AT_ONCE: usize = 4096;
/// Shares of deltas for each of the threads: one that has done its share takes another.
const SHARES_EACH: usize = 4;

/// Whether several threads look at the deltas of these commands sooner than one does.
pub(super) fn has_many_deltas(commands: &[Command]) -> bool {
    let many = if parallel::has_crew() { MANY_DELTAS[0] } else { MANY_DELTAS[1] };
    commands.iter().map(|command| command.deltas().len()).sum::<usize>() >= many
}

/// Looks at commands, where they have many deltas by several threads, each at some of the commands. Returns
/// what they found, in the order of the commands.
pub(super) fn look_at<T: Send>(commands: &[Command], look: impl Fn(&[Command]) -> T + Sync) -> Vec<T> {
    if !has_many_deltas(commands) {
        return vec![look(commands)];
    }
    let threads = parallel::threads(THREADS_MAX);
    let slices: Vec<&[Command]> = commands.chunks(commands.len().div_ceil(threads)).collect();
    let each = |(): &mut (), index: usize| Ok::<_, Infallible>(look(slices[index]));
    let Ok(found) = parallel::map_indexed(threads, slices.len(), || (), each);
    found
}

/// Deltas in shares: all of one memory are in the same one, in the order of the list.
pub(super) struct Dealt<T> {
    /// What each slice of the list has for each share.
    slices: Vec<Vec<Vec<T>>>,
    count: usize,
}

/// Deltas that are not dealt out: one thread is to work on them.
pub(super) struct Undealt;

/// Deals deltas out by several threads, each with equipment of its own. `look` makes of a delta what goes
/// into a share, with the number of the memory that it changes; or leaves it out.
///
/// # Errors
/// What `look` says; if there is no memory.
pub(super) fn deal<'p, W, T: Send>(
    rows: impl Iterator<Item = &'p [Piece]>,
    equip: impl Fn() -> W + Sync,
    look: impl Fn(&mut W, &'p Piece) -> Result<Option<(u64, T)>, Undealt> + Sync,
) -> Result<Dealt<T>, Undealt> {
    let threads = parallel::threads(THREADS_MAX);
    let count = threads * SHARES_EACH;
    let slices: Vec<&[Piece]> = rows.flat_map(|row| row.chunks(DEALT_AT_ONCE)).collect();
    let deal = |with: &mut W, index: usize| {
        let slice = slices[index];
        let mut shares: Vec<Vec<T>> = Vec::new();
        shares.try_reserve(count).map_err(|_| Undealt)?;
        shares.resize_with(count, Vec::new);
        // Most deltas are spread evenly.
        let even = 2 * slice.len() / count;
        shares.iter_mut().try_for_each(|share| share.try_reserve(even)).map_err(|_| Undealt)?;
        for piece in slice {
            if let Some((memory, delta)) = look(with, piece)? {
                // Numbers of memories lie side by side, at multiples of one distance.
                let spread = memory.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
                let share = &mut shares[spread as usize % count];
                share.try_reserve(1).map_err(|_| Undealt)?;
                share.push(delta);
            }
        }
        Ok(shares)
    };
    let slices = parallel::map_indexed(threads, slices.len(), equip, deal)?;
    Ok(Dealt { slices, count })
}

impl<T> Dealt<T> {
    /// How many shares there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The deltas of one share, some after the other.
    pub fn share(&self, index: usize) -> impl Iterator<Item = &[T]> + Clone {
        self.slices.iter().map(move |shares| shares[index].as_slice())
    }
}
