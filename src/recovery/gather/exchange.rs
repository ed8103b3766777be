//! Runs the rounds of an exchange. The ranks first agree on a plan. Each round then sends a part of each rank's stream
//! to all other ranks.

use remanent_format::{PageTable, Place};

use super::link::{Header, LANE, Link, RoundMemory};
use super::plan::{GatherPlan, RoundRange};
use crate::base::allocation::{make_room, push};
use crate::base::sync::{Instant, mpsc};
use crate::device::sums::{sum_each, sums_in, sums_len};
use crate::device::{Command, CommandList, Span, StagingSpan};
use crate::error::{Error, Result};
use crate::options::GatherMode;
use crate::recovery::page_memory::PageMemories;

/// The maximum length in bytes of the memory for a round.
const ROUND_MEMORY_MAX: u64 = 1 << 30;
/// The minimum length in bytes of a rank's part of a round. If a rank has memory only for shorter parts, the ranks
/// exchange nothing.
const ROUND_LEN_MIN: u64 = 1 << 20;
/// The number of rounds, if memory permits. The last round runs when all pages are loaded, so it must be short.
const ROUNDS: u64 = 8;

/// The length in bytes of the status block before a rank's part of a round. Each byte is 1 if the part is valid, and 0
/// otherwise.
const STATUS_LEN: u64 = 256;

/// The minimum total length in bytes of pages that are exchanged with [`GatherMode::IfFaster`]. Loading fewer bytes
/// takes less time than measuring the link.
const BYTES_MIN: u64 = 64 << 20;
/// The maximum number of bytes per rank with which the link is measured. With far fewer bytes, the measurement would
/// show the latency of NVLink instead of its throughput.
const PROBE_LEN: u64 = 128 << 20;
/// The number of measurements of the link. The highest measured rate is used.
const PROBES: u32 = 3;
/// The rate in bytes per second that an exchange must reach with [`GatherMode::IfFaster`]. A bus between host and GPU
/// is slower: 64 GB/s with 16 lanes of PCIe 5.
const RATE_MIN: f64 = 100e9;

/// The result of an exchange.
pub(super) struct Exchanged {
    /// For each page of the plan, whether the page arrived from another rank with the correct checksum.
    pub arrived: Vec<bool>,
    /// The reason why the exchange ended before all pages were exchanged, or `None` if it completed.
    pub stopped: Option<String>,
}

/// An exchange of pages with the other ranks.
pub(super) struct Exchange<'a> {
    pub link: &'a Link<'a>,
    pub plan: &'a GatherPlan,
    /// The receiver of the offset in this rank's stream up to which pages are loaded. The sender closes the channel
    /// after the last page or after a failure.
    pub loaded: mpsc::Receiver<u64>,
}

impl Exchange<'_> {
    /// Exchanges all pages, or as many as possible, and returns which pages have arrived.
    ///
    /// # Errors
    /// `Error::Nccl`, or a device error.
    pub fn run(self, table: &PageTable, memories: &PageMemories<'_>) -> Result<Exchanged> {
        let mut arrived = Vec::new();
        make_room(&mut arrived, self.plan.images().len())?;
        arrived.resize(self.plan.images().len(), false);
        let rounds = match self.rounds(table, memories) {
            Ok(rounds) => rounds,
            Err(error) => {
                // This open fails. The header notifies the other ranks now, so that they do not wait for their time
                // limit.
                self.link.headers(Header::default())?;
                return Err(error);
            }
        };
        let own = Header {
            takes_part: rounds.is_some(),
            is_always: self.link.source.mode == GatherMode::Always,
            round_len: rounds.as_ref().map_or(0, |rounds| rounds.len),
            bytes: self.plan.bytes(),
            fingerprint: self.plan.fingerprint()?,
        };
        let headers = self.link.headers(own)?;
        let stopped = match (decide(&headers), rounds) {
            (Err(reason), _) => Some(reason),
            (Ok(_), None) => Some("this rank has no memory for the exchange".to_owned()),
            (Ok(len), Some(rounds)) => {
                self.exchange(Rounds { len, ..rounds }, own, memories, &mut arrived)?
            }
        };
        Ok(Exchanged { arrived, stopped })
    }

    /// Allocates the memory for a round. Returns `None` if too little memory is available.
    fn rounds(&self, table: &PageTable, memories: &PageMemories<'_>) -> Result<Option<Rounds<'_>>> {
        // Waits until the last page's memory is allocated, so that the rounds use only memory that the pages leave
        // free.
        let last = table.lens().filter(|(_, place, _)| *place != Place::Disk).last();
        if let Some((page, ..)) = last {
            memories.of(page)?;
        }
        let ranks = self.link.ranks();
        let wanted = (self.plan.stream_len() / ROUNDS).min(ROUND_MEMORY_MAX / ranks).max(ROUND_LEN_MIN);
        let mut len = wanted.next_multiple_of(STATUS_LEN);
        while len >= ROUND_LEN_MIN {
            match self.link.allocate(ranks * (STATUS_LEN + len)) {
                Ok(memory) => return Ok(Some(Rounds { memory, len })),
                Err(Error::OutOfMemory { .. } | Error::OverBudget { .. }) => {
                    len = (len / 2).next_multiple_of(STATUS_LEN);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Runs the rounds. If the exchange ends early, returns the reason.
    fn exchange(
        &self,
        rounds: Rounds<'_>,
        own: Header,
        memories: &PageMemories<'_>,
        arrived: &mut [bool],
    ) -> Result<Option<String>> {
        if !own.is_always {
            let rate = self.measure(&rounds, own)?;
            if rate < RATE_MIN {
                let rate = rate / 1e9;
                return Ok(Some(format!(
                    "the link between the ranks has only {rate:.1} GB/s, no more than a bus to the host"
                )));
            }
        }
        let mut loaded_to = 0;
        for round in 0..self.plan.rounds(rounds.len) {
            let is_loaded = self.send(&rounds, round, memories, &mut loaded_to)?;
            self.link.gather(&rounds.memory, STATUS_LEN + rounds.len)?;
            let failed = self.receive(&rounds, round, memories, arrived)?;
            if let Some(rank) = failed {
                return Ok(Some(format!("rank {rank} did not load its share")));
            }
            assert!(is_loaded, "the own part is invalid too");
        }
        Ok(None)
    }

    /// Measures the link, and returns the lowest receive rate of all ranks in bytes per second.
    fn measure(&self, rounds: &Rounds<'_>, own: Header) -> Result<f64> {
        let len = PROBE_LEN.min(rounds.len);
        // The first exchange of a given length also sets up the connections, so it is not measured.
        self.link.gather(&rounds.memory, len)?;
        let mut rate = 0.0_f64;
        for _ in 0..PROBES {
            let started = Instant::now();
            self.link.gather(&rounds.memory, len)?;
            rate = rate.max(((self.link.ranks() - 1) * len) as f64 / started.elapsed().as_secs_f64());
        }
        // All ranks must make the same decision.
        let rates = self.link.headers(Header { round_len: rate as u64, ..own })?;
        Ok(rates.iter().map(|header| header.round_len).min().unwrap_or(0) as f64)
    }

    /// Waits until this rank's pages for a round are loaded, and copies them into this rank's part of the round. If
    /// they cannot be loaded, marks the part as invalid and returns `false`.
    fn send(
        &self,
        rounds: &Rounds<'_>,
        round: u64,
        memories: &PageMemories<'_>,
        loaded_to: &mut u64,
    ) -> Result<bool> {
        let ranges = self.plan.ranges(self.link.source.exchange.rank(), round, rounds.len)?;
        let needed = ranges.last().map_or(0, |range| self.plan.end_of(range.page));
        let mut is_loaded = true;
        while *loaded_to < needed && is_loaded {
            match self.loaded.recv() {
                Ok(offset) => *loaded_to = offset,
                Err(_closed) => is_loaded = false,
            }
        }
        let part = rounds.part(self.link.rank());
        let mut commands = Vec::new();
        if is_loaded && !ranges.is_empty() {
            let mut sources = Vec::new();
            make_room(&mut sources, ranges.len())?;
            for range in &ranges {
                sources.push((self.span(memories, range)?, range.at));
            }
            commands.push(Command::Gather { sources, target: rounds.payload(self.link.rank()) });
        }
        self.link.run(CommandList { commands, staging: Vec::new() })?;
        let status = [u8::from(is_loaded); STATUS_LEN as usize];
        self.link.staging.upload(LANE, Span { len: STATUS_LEN, ..part }, &status)?;
        Ok(is_loaded)
    }

    /// Copies the parts of other ranks to their pages, and records the pages that are complete and have the correct
    /// checksum. Returns a rank whose part is invalid, or `None` if all parts are valid.
    fn receive(
        &self,
        rounds: &Rounds<'_>,
        round: u64,
        memories: &PageMemories<'_>,
        arrived: &mut [bool],
    ) -> Result<Option<u64>> {
        let (mut commands, mut complete, mut sums) = (Vec::new(), Vec::new(), Vec::new());
        let ranks = self.link.ranks();
        let statuses = self.link.staging.take(STATUS_LEN as usize * ranks as usize)?;
        for rank in 0..ranks {
            let target = StagingSpan {
                index: 0,
                offset: STATUS_LEN as usize * rank as usize,
                len: STATUS_LEN as usize,
            };
            push(
                &mut commands,
                Command::Download { source: Span { len: STATUS_LEN, ..rounds.part(rank) }, target },
            )?;
            if rank == self.link.rank() {
                continue;
            }
            let mut targets = Vec::new();
            for range in self.plan.ranges(rank as u32, round, rounds.len)? {
                push(&mut targets, (range.at, self.span(memories, &range)?))?;
                if range.is_last {
                    push(&mut complete, range.page)?;
                    push(&mut sums, memories.of(self.plan.images()[range.page].page)?)?;
                }
            }
            if !targets.is_empty() {
                push(&mut commands, Command::Scatter { source: rounds.payload(rank), targets })?;
            }
        }
        let mut staging = vec![statuses.into_staging()];
        if !sums.is_empty() {
            push(&mut staging, self.link.staging.take(sums_len(sums.len()))?.into_staging())?;
            push(&mut commands, sum_each(sums, 1))?;
        }
        let returned = self.link.run(CommandList { commands, staging })?;
        let invalid = (0..ranks).find(|rank| returned[0][STATUS_LEN as usize * *rank as usize] != 1);
        if invalid.is_none() {
            let sums = returned.get(1).into_iter().flat_map(|sums| sums_in(sums));
            for (page, sum) in complete.into_iter().zip(sums) {
                let image = &self.plan.images()[page];
                arrived[page] = sum == image.image.raw_crc;
                if !arrived[page] {
                    tracing::warn!(page = %image.page, "a page arrived with a wrong checksum, and is loaded instead");
                }
            }
        }
        self.link.staging.put_all(returned);
        Ok(invalid)
    }

    /// Returns the memory that contains a range of a page.
    fn span(&self, memories: &PageMemories<'_>, range: &RoundRange) -> Result<Span> {
        let page = memories.of(self.plan.images()[range.page].page)?;
        Ok(Span { offset: page.offset + range.offset, len: range.len, ..page })
    }
}

/// The memory of a round. For each rank, it contains a status block and a part of the rank's stream.
struct Rounds<'a> {
    memory: RoundMemory<'a>,
    /// The length in bytes of a rank's part of the stream.
    len: u64,
}

impl Rounds<'_> {
    /// Returns the memory for a rank's status block and its part of the stream.
    fn part(&self, rank: u64) -> Span {
        self.memory.part(rank * (STATUS_LEN + self.len), STATUS_LEN + self.len)
    }

    /// Returns the memory for a rank's part of the stream, without the status block.
    fn payload(&self, rank: u64) -> Span {
        let part = self.part(rank);
        Span { offset: part.offset + STATUS_LEN, len: self.len, ..part }
    }
}

/// Returns the length of a round, or the reason why the ranks exchange nothing. All ranks get the same result.
fn decide(headers: &[Header]) -> Result<u64, String> {
    let first = headers[0];
    for (rank, header) in headers.iter().enumerate() {
        if !header.takes_part {
            return Err(format!("rank {rank} does not participate"));
        }
        if (header.bytes, header.fingerprint) != (first.bytes, first.fingerprint) {
            return Err(format!("the pages of rank {rank} differ from those of rank 0"));
        }
        if header.is_always != first.is_always {
            return Err(format!("the mode of rank {rank} differs from that of rank 0"));
        }
    }
    if !first.is_always && first.bytes < BYTES_MIN {
        return Err(format!("the pages have only {} bytes", first.bytes));
    }
    Ok(headers.iter().map(|header| header.round_len).min().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_exchange_only_the_same_pages() {
        let header = Header {
            takes_part: true,
            is_always: false,
            round_len: 1 << 20,
            bytes: BYTES_MIN,
            fingerprint: [1; 16],
        };
        let shorter = Header { round_len: 1000, ..header };
        assert_eq!(decide(&[header, shorter, header]), Ok(1000));
        let others = [
            (Header { takes_part: false, ..header }, "rank 1 does not participate"),
            (Header { fingerprint: [2; 16], ..header }, "the pages of rank 1 differ from those of rank 0"),
            (Header { bytes: BYTES_MIN + 1, ..header }, "the pages of rank 1 differ from those of rank 0"),
            (Header { is_always: true, ..header }, "the mode of rank 1 differs from that of rank 0"),
        ];
        for (other, reason) in others {
            assert_eq!(decide(&[header, other]), Err(reason.to_owned()));
        }
        let few = Header { bytes: BYTES_MIN - 1, ..header };
        assert_eq!(decide(&[few, few]), Err(format!("the pages have only {} bytes", BYTES_MIN - 1)));
        let always = Header { is_always: true, bytes: 0, ..header };
        assert_eq!(decide(&[always, always]), Ok(1 << 20));
    }
}
