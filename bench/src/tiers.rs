//! `remanent-bench tiers`: replays a trace over a cache of blocks whose fast place holds only part of them.
//!
//! `block_cache.rs` serves the requests, and this file measures them for each budget and policy. Each run creates a
//! new store and serves the same requests.

use std::collections::{BTreeMap, HashSet};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use clap::builder::RangedU64ValueParser;
use remanent::options::{Compression, ImageOptions, MemoryOptions, ScrubSchedule};
use remanent::stats::{MoveStats, TierStats};
use remanent::tiers::Tiers;
use remanent::{Ack, Options, Place};
use remanent_tools::shared::exit::Failure;
use remanent_tools::shared::size::Size;
use remanent_tools::shared::trace::{self, Trace};

use crate::block_cache::{Ahead, BlockCache, CacheTotals};
use crate::figures::{Figure, Findings, Group, Unit, rate};
use crate::latency::Latency;
use crate::policies::{Policy, share};
use crate::room::{BenchStop, Room};
use crate::tier_moves::Moves;
use crate::{Common, Measure, tier_ceilings};

const EXAMPLES: &str = "\
Each request of the trace names blocks. Existing blocks are moved to the fast place by one call, and some bytes of \
each are compared; missing blocks are created there in one batch. The fast place is the memory of the GPU, or of the \
host if there is no GPU. With a GPU, unused pages are demoted to pinned and then to ordinary host memory, each with \
twice the room of the tier above, and finally to the disk. A request for more than half of the blocks that the fast \
place holds is served in parts. Commits and moves wait for Applied, which survives a kill; snapshots are taken as by \
default.

Hits are the blocks found in the fast place, as a share of the blocks that were requested before; their ceiling is the \
same policy without a store. Bytes written to the disk are those that the kernel counted for the process. The ceiling \
of moves between places is the rate of the disk, the memory or the bus. In one more run with the middle budget of the \
list, the store is closed and opened after half of the requests, and the hits of up to 100 requests before and after \
are compared with those of a run without a restart. Finally, pages of 2 MiB and of 16 KiB are moved between the GPU, \
pinned memory and the disk without other load. One call moves all pages, and the time ends when the last page can be \
read at its new place. A move to the disk writes an image of each page. On an idle machine, the defaults take up to \
two minutes.

Examples:
  remanent-bench tiers /mnt/fast
  remanent-bench tiers /mnt/fast --requests 4000 --budgets 5,20 --rounds 2
  remanent-bench tiers /mnt/fast --prefetch 2 --service-ms 20
  remanent-bench tiers /mnt/fast --device cuda:0 --len 2MiB --requests 1000 --move-bytes 1GiB";

/// A cache of blocks that is larger than its fast place, over a real trace
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, mut_arg("rounds", |rounds| rounds.default_value("1")))]
pub struct TiersBench {
    #[command(flatten)]
    common: Common,
    /// Trace: one JSON object with `hash_ids` per line, plain or compressed with zstd [default: one hour of a
    /// chat service, included in the tool]
    #[arg(long, value_name = "FILE")]
    trace: Option<std::path::PathBuf>,
    /// Number of requests of the trace to use
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = RangedU64ValueParser::<usize>::new().range(2..))]
    requests: usize,
    /// Length of each block in bytes
    #[arg(long, value_name = "BYTES", default_value = "64KiB")]
    len: Size,
    /// Sizes of the fast place, as percentages of the distinct blocks, separated by commas
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,3,10,30,100")]
    budgets: Vec<u64>,
    /// Eviction policies of the fast place, separated by commas
    #[arg(long, value_enum, value_name = "POLICY", value_delimiter = ',', default_value = "lru,s3-fifo")]
    policies: Vec<Policy>,
    /// Also measure with the blocks of the next N requests prefetched
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = RangedU64ValueParser::<usize>::new().range(..=1000))]
    prefetch: usize,
    /// Also measure with as many requests prefetched as the store's read-ahead decides
    #[arg(long)]
    read_ahead: bool,
    /// Idle time after the blocks of a request are in place, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=10_000))]
    service_ms: u64,
    /// Total size in bytes of the pages to move while nothing else runs; 0 skips these moves
    #[arg(long, value_name = "BYTES", default_value = "64MiB")]
    move_bytes: Size,
    #[arg(skip)]
    requested: OnceLock<Requested>,
}

/// The blocks of a trace.
struct Requested {
    /// For each request, every block once.
    all: Vec<Vec<u64>>,
    /// The number of requests that are used. `blocks` is the number of distinct blocks in these requests.
    seen: usize,
    blocks: HashSet<u64>,
    /// The number of distinct blocks of the whole trace.
    blocks_of_all: usize,
}

/// The minimum block length.
const LEN_MIN: u64 = 64;
/// The reciprocal of the part of a place's budget that is kept free.
const FREE_PART: u64 = 16;
/// The maximum number of requests measured before and after a restart.
const AROUND_RESTART: usize = 100;
impl Requested {
    fn read(path: &std::path::Path, seen: usize) -> Result<Self, Failure> {
        let mut all: Vec<Vec<u64>> = Vec::new();
        let (mut blocks, mut blocks_of_all) = (HashSet::<u64>::new(), HashSet::<u64>::new());
        for request in Trace::open(path, None)? {
            let mut known = HashSet::new();
            let mut request = request?;
            request.retain(|id| known.insert(*id));
            if all.len() < seen {
                blocks.extend(&request);
            }
            blocks_of_all.extend(&request);
            all.push(request);
        }
        if all.len() < seen {
            return Err(Failure::Environment(format!(
                "the trace has {} requests, fewer than the {seen} of --requests",
                all.len()
            )));
        }
        if blocks.is_empty() {
            return Err(Failure::Environment("the requests of the trace name no blocks".to_owned()));
        }
        Ok(Self { all, seen, blocks, blocks_of_all: blocks_of_all.len() })
    }

    /// Returns the requests that are used.
    fn seen(&self) -> &[Vec<u64>] {
        &self.all[..self.seen]
    }
}

/// Returns the number of blocks that a place holds.
fn part(blocks: usize, percent: u64) -> usize {
    (blocks as u128 * u128::from(percent) / 100).max(1) as usize
}

impl Measure for TiersBench {
    fn common(&self) -> &Common {
        &self.common
    }

    fn check(&self) -> Result<(), Failure> {
        let refuse = |text: String| Err(Failure::Environment(text));
        if self.len.0 < LEN_MIN || !self.len.0.is_multiple_of(8) || self.len.0 > 1 << 30 {
            return refuse(format!("--len must be a multiple of 8 between {LEN_MIN} and 1GiB"));
        }
        if !self.budgets.iter().all(|percent| (1..=100).contains(percent)) {
            return refuse("--budgets must be between 1 and 100".to_owned());
        }
        let repeats = |at: usize| self.policies[..at].contains(&self.policies[at]);
        let is_twice = |at: usize| self.budgets[..at].contains(&self.budgets[at]);
        if (0..self.policies.len()).any(repeats) || (0..self.budgets.len()).any(is_twice) {
            return refuse("--policies and --budgets must not contain a value twice".to_owned());
        }
        let requested = match &self.trace {
            Some(path) => Requested::read(path, self.requests)?,
            None => {
                let folder = tempfile::tempdir().map_err(|error| {
                    Failure::Environment(format!("cannot create a temporary directory: {error}"))
                })?;
                Requested::read(&trace::bundled(folder.path())?, self.requests)?
            }
        };
        let _again = self.requested.set(requested);
        Ok(())
    }

    fn bytes_needed(&self) -> u64 {
        // The log, images of demoted pages, and images of snapshots.
        let of_trace = self.working_set().saturating_mul(4).saturating_add(1 << 30);
        of_trace.max(Moves::bytes_needed(self.move_bytes.0))
    }

    fn steps(&self) -> u64 {
        let runs =
            self.budgets.len() * (1 + self.variants().len()) + self.policies.len() + self.moves().len();
        u64::from(self.common.rounds) * runs as u64
    }

    fn measure(&self, room: &Room) -> Result<Findings, BenchStop> {
        let mut budgets: Vec<BudgetRuns> =
            self.budgets.iter().map(|percent| BudgetRuns::new(self, *percent)).collect();
        let mut restarts = Restarts::new(self);
        let mut moves = self.moves();
        for _ in 0..self.common.rounds {
            for runs in &mut budgets {
                runs.round(self, room)?;
            }
            restarts.round(self, room)?;
            for moves in &mut moves {
                moves.round(room)?;
            }
        }
        let straight = budgets.iter().find(|runs| runs.percent == restarts.percent);
        let straight: Vec<(Policy, Vec<f64>)> = straight.iter().flat_map(|runs| runs.straight()).collect();
        let mut groups = vec![self.alone()];
        groups.extend(budgets.into_iter().map(BudgetRuns::group));
        groups.push(restarts.group(straight));
        groups.extend(moves.into_iter().map(Moves::group));
        let requested = self.requested();
        let mut settings = room.settings(&self.common);
        settings.push(("rounds", self.common.rounds.to_string()));
        settings.push((
            "trace",
            self.trace
                .as_ref()
                .map_or_else(|| "one hour of a chat service".to_owned(), |path| path.display().to_string()),
        ));
        let asked: usize = requested.seen().iter().map(Vec::len).sum();
        settings
            .push(("requests", format!("{} of {}, for {asked} blocks", requested.seen, requested.all.len())));
        settings.push((
            "blocks",
            format!(
                "{} distinct ones of {}, {} in total",
                requested.blocks.len(),
                self.len,
                Unit::Bytes.show(self.working_set() as f64)
            ),
        ));
        settings.push(("tiers", places(room).iter().map(Place::to_string).collect::<Vec<_>>().join(", ")));
        settings.push(("service", format!("{} ms", self.service_ms)));
        let mut left_out = Vec::new();
        if bytes_written().is_none() {
            left_out.push("bytes written to the disk: the kernel does not count them".to_owned());
        }
        Ok(Findings { bench: "tiers", settings, groups, left_out })
    }
}

/// Returns the tiers of a device, the fastest first.
fn places(room: &Room) -> Vec<Place> {
    if room.is_gpu() {
        vec![room.place, Place::Pinned, Place::Host, Place::Disk]
    } else {
        vec![room.place, Place::Disk]
    }
}

impl TiersBench {
    fn requested(&self) -> &Requested {
        self.requested.get().expect("options are checked first")
    }

    /// Returns the moves without other load, by page length.
    fn moves(&self) -> Vec<Moves> {
        if self.move_bytes.0 == 0 { Vec::new() } else { Moves::all(self.move_bytes.0) }
    }

    /// Returns the total size in bytes of the distinct blocks.
    fn working_set(&self) -> u64 {
        self.requested().blocks.len() as u64 * self.len.0
    }

    /// Returns the policies, each with its kinds of prefetch.
    fn variants(&self) -> Vec<(Policy, Ahead)> {
        let mut ahead = vec![Ahead::NONE];
        ahead.extend((self.prefetch > 0).then_some(Ahead::Requests(self.prefetch)));
        ahead.extend(self.read_ahead.then_some(Ahead::Measured));
        self.policies.iter().flat_map(|policy| ahead.iter().map(|ahead| (*policy, *ahead))).collect()
    }

    /// Returns the hits of the policies without a store, over the whole trace. They are the same in each
    /// round.
    fn alone(&self) -> Group {
        let Requested { all, blocks_of_all, .. } = self.requested();
        let mut group =
            Group::new(format!("policies alone, all {} requests, {blocks_of_all} blocks", all.len()));
        for percent in &self.budgets {
            for policy in &self.policies {
                let name = format!("{}, hits with room for {percent} %", policy.name());
                let mut figure = Figure::new(name, Unit::Hits);
                let hits = policy.list_hit_share(part(*blocks_of_all, *percent), all);
                figure.rounds = vec![hits; self.common.rounds as usize];
                group.figures.push(figure);
            }
        }
        group
    }

    /// Opens a store whose fast place holds `held` blocks.
    fn open<'b>(
        &self,
        room: &'b Room,
        policy: Policy,
        held: usize,
        ahead: Ahead,
    ) -> Result<BlockCache<'b>, BenchStop> {
        let places = places(room);
        let bytes = (held as u64 * self.len.0 * FREE_PART).div_ceil(FREE_PART - 1);
        let mut memory = MemoryOptions::new();
        for (below, place) in places[..places.len() - 1].iter().enumerate() {
            memory = memory.budget(*place, bytes << below);
        }
        let tiers = policy.of(Tiers::new(places.clone()).free_part(FREE_PART as u32));
        let options = Options::new()
            .ack(Ack::Applied)
            .images(ImageOptions::new().compression(Compression::Off))
            .scrubs(ScrubSchedule::new().interval(None))
            .memory(memory)
            .tiers(tiers);
        Ok(BlockCache {
            store: room.open("store", options)?,
            room,
            fast: places[0],
            len: self.len.0,
            piece: (held / 2).max(1),
            ahead,
            service: Duration::from_millis(self.service_ms),
        })
    }
}

/// Returns the bytes that the kernel counted as written by this process, or `None` if it does not count.
fn bytes_written() -> Option<u64> {
    let counts = std::fs::read_to_string("/proc/self/io").ok()?;
    counts.lines().find_map(|line| line.strip_prefix("write_bytes: "))?.trim().parse().ok()
}

/// The runs with one budget.
struct BudgetRuns {
    percent: u64,
    held: usize,
    title: String,
    ceilings: Vec<Figure>,
    variants: Vec<Variant>,
}

/// The figures of one policy with one budget.
struct Variant {
    policy: Policy,
    ahead: Ahead,
    name: String,
    alone: Figure,
    hits: Figure,
    ready: Figure,
    ready_block: Figure,
    brought: Figure,
    making: Figure,
    all: Figure,
    written: Option<Figure>,
    /// Counts, in the order in which they are shown.
    counts: Vec<Figure>,
    /// Bytes and rates, by the places between which pages moved.
    moves: BTreeMap<(Place, Place), (Figure, Figure)>,
    /// Hit rate of each round directly after half of the requests. At this point, runs with a restart close
    /// and open the store.
    after_half: Vec<f64>,
}

impl BudgetRuns {
    fn new(bench: &TiersBench, percent: u64) -> Self {
        let held = part(bench.requested().blocks.len(), percent);
        let requests = bench.requested().seen();
        let variants = bench.variants().into_iter();
        let variants = variants
            .map(|(policy, ahead)| Variant::new(bench, policy, ahead, policy.list_hit_share(held, requests)));
        let title = format!(
            "room for {percent} %: {held} blocks, {}",
            Unit::Bytes.show(held as f64 * bench.len.0 as f64)
        );
        Self { percent, held, title, ceilings: Vec::new(), variants: variants.collect() }
    }

    fn round(&mut self, bench: &TiersBench, room: &Room) -> Result<(), BenchStop> {
        room.step(&self.title)?;
        for (name, rate) in tier_ceilings::rates(room, bench.working_set())? {
            match self.ceilings.iter_mut().find(|figure| figure.name == name) {
                Some(figure) => figure.push(rate),
                None => {
                    let mut figure = Figure::new(name, Unit::BytesPerSecond);
                    figure.push(rate);
                    self.ceilings.push(figure);
                }
            }
        }
        for variant in &mut self.variants {
            room.step(&format!("{} % by {}", self.percent, variant.name))?;
            variant.round(bench, room, self.held)?;
        }
        Ok(())
    }

    /// Returns the hit rates that each policy without prefetching had after the first half of the requests.
    fn straight(&self) -> impl Iterator<Item = (Policy, Vec<f64>)> {
        let variants = self.variants.iter().filter(|variant| variant.ahead == Ahead::NONE);
        variants.map(|variant| (variant.policy, variant.after_half.clone()))
    }

    fn group(self) -> Group {
        let mut figures = self.ceilings;
        figures.extend(self.variants.into_iter().flat_map(Variant::figures));
        Group { title: self.title, figures }
    }
}

impl Variant {
    fn new(bench: &TiersBench, policy: Policy, ahead: Ahead, alone: f64) -> Self {
        let name = match ahead {
            Ahead::NONE => policy.name().to_owned(),
            Ahead::Requests(ahead) => format!("{}, {ahead} ahead", policy.name()),
            Ahead::Measured => format!("{}, read ahead", policy.name()),
        };
        let timed = |what: &str, unit: Unit| {
            let mut figure = Figure::new(format!("{name}: {what}"), unit);
            figure.latency = Some(Latency::new());
            figure
        };
        let mut list = Figure::new(format!("{name}: hits of the policy alone"), Unit::Hits);
        list.rounds = vec![alone; bench.common.rounds as usize];
        let mut hits = Figure::new(format!("{name}: hits"), Unit::Hits);
        // With prefetch, there may be more hits than the policy alone produces.
        if alone > 0.0 && ahead == Ahead::NONE {
            hits = hits.under(&list.name);
        }
        let written = format!("{name}: written to the disk, relative to the blocks' bytes");
        Self {
            policy,
            ahead,
            alone: list,
            hits,
            ready: timed("existing blocks in place, requests", Unit::PerSecond("requests")),
            ready_block: timed("existing blocks in place, blocks", Unit::PerSecond("blocks")),
            brought: timed("requests that moved blocks", Unit::PerSecond("requests")),
            making: timed("new blocks", Unit::PerSecond("blocks")),
            all: Figure::new(format!("{name}: all blocks"), Unit::PerSecond("blocks")),
            written: bytes_written().map(|_| Figure::new(written, Unit::Share)),
            counts: Vec::new(),
            moves: BTreeMap::new(),
            after_half: Vec::new(),
            name,
        }
    }

    fn round(&mut self, bench: &TiersBench, room: &Room, held: usize) -> Result<(), BenchStop> {
        let requested = bench.requested();
        let cache = bench.open(room, self.policy, held, self.ahead)?;
        let before = bytes_written();
        let mut played = CacheTotals::new();
        cache.play(requested.seen(), &mut played)?;
        let stats = cache.store.stats();
        let after = bytes_written();
        cache.check_all(requested.blocks.iter().copied())?;
        let known = played.known();
        self.after_half.push(hits(after_restart(&played, bench.requests / 2)));
        self.hits.push(share(played.found.get(&cache.fast).copied().unwrap_or(0), known));
        for (figure, of, took, latency) in [
            (&mut self.ready, played.ready.count(), played.ready_took, &played.ready),
            (&mut self.ready_block, known, played.ready_took, &played.ready_block),
            (&mut self.brought, played.brought.count(), played.brought_took, &played.brought),
            (&mut self.making, played.made, played.making_took, &played.making),
        ] {
            figure.push(rate(of, took));
            if let Some(all) = &mut figure.latency {
                all.add(latency);
            }
        }
        self.all.push(rate(known + played.made, played.took));
        if let (Some(figure), Some(before), Some(after)) = (&mut self.written, before, after) {
            figure.push((after - before) as f64 / (played.made * bench.len.0) as f64);
        }
        let tier = stats.tiers.iter().find(|tier| tier.place == cache.fast);
        let of = |count: fn(&TierStats) -> u64| tier.map_or(0, count);
        let blocks = Unit::Count("blocks");
        let mut numbers = vec![
            ("requested again".to_owned(), blocks, known as f64),
            ("new".to_owned(), blocks, played.made as f64),
        ];
        for place in places(room) {
            let found = played.found.get(&place).copied().unwrap_or(0);
            numbers.push((format!("found in {place}"), blocks, found as f64));
        }
        for (name, unit, count) in [
            ("hits by the store's count", blocks, of(|tier| tier.hits)),
            ("misses by the store's count", blocks, of(|tier| tier.misses)),
            ("evictions", blocks, of(|tier| tier.evictions)),
            ("waits for room", Unit::Count("waits"), of(|tier| tier.waits)),
            ("snapshots", Unit::Count("snapshots"), stats.snapshots.taken),
        ] {
            numbers.push((name.to_owned(), unit, count as f64));
        }
        let waited = tier.map_or(Duration::ZERO, |tier| tier.waited);
        numbers.push(("time waited for room".to_owned(), Unit::Seconds, waited.as_secs_f64()));
        if self.ahead != Ahead::NONE {
            let refused = played.refused_ahead as f64;
            numbers.push(("prefetches without room".to_owned(), Unit::Count("calls"), refused));
        }
        self.count(numbers);
        self.moved(&stats.moves);
        cache.store.close()?;
        Ok(std::fs::remove_dir_all(room.path("store"))?)
    }

    /// Adds the counts of a round, which have the same names each time.
    fn count(&mut self, numbers: Vec<(String, Unit, f64)>) {
        if self.counts.is_empty() {
            let figure =
                |(what, unit, _): &(String, Unit, f64)| Figure::new(format!("{}: {what}", self.name), *unit);
            self.counts = numbers.iter().map(figure).collect();
        }
        self.counts.iter_mut().zip(numbers).for_each(|(figure, (.., number))| figure.push(number));
    }

    /// Adds the moves of a round. Places between which nothing moved in earlier rounds get zeros for them.
    fn moved(&mut self, moves: &[MoveStats]) {
        let rounds = self.hits.rounds.len();
        for pair in moves {
            let name = format!("{}: {} to {}", self.name, pair.from, pair.to);
            let figures = self.moves.entry((pair.from, pair.to)).or_insert_with(|| {
                let mut moved = Figure::new(format!("{name}, moved"), Unit::Bytes);
                let mut rate =
                    Figure::new(name, Unit::BytesPerSecond).under(tier_ceilings::of(pair.from, pair.to));
                moved.rounds = vec![0.0; rounds - 1];
                rate.rounds = vec![0.0; rounds - 1];
                (moved, rate)
            });
            figures.0.push(pair.bytes as f64);
            figures.1.push(rate(pair.bytes, pair.took));
        }
        for (moved, rate) in self.moves.values_mut() {
            moved.rounds.resize(rounds, 0.0);
            rate.rounds.resize(rounds, 0.0);
        }
    }

    fn figures(self) -> Vec<Figure> {
        let mut figures =
            vec![self.alone, self.hits, self.ready, self.ready_block, self.brought, self.making, self.all];
        figures.extend(self.written);
        figures.extend(self.counts);
        figures.extend(self.moves.into_values().flat_map(|(moved, rate)| [moved, rate]));
        // If no block is requested twice, some figures have no timed operation.
        figures.retain(|figure| figure.latency.as_ref().is_none_or(|latency| latency.count() > 0));
        figures
    }
}

/// A store that is closed and opened after half of the requests.
struct Restarts {
    percent: u64,
    policies: Vec<PolicyRestart>,
    title: String,
    /// The number of requests measured before and after the restart.
    around: usize,
}

/// The restarts with one policy.
struct PolicyRestart {
    policy: Policy,
    before: Vec<f64>,
    after: Vec<f64>,
    close: Vec<f64>,
    open: Vec<f64>,
}

impl Restarts {
    fn new(bench: &TiersBench) -> Self {
        let percent = bench.budgets[bench.budgets.len() / 2];
        let of = |policy: &Policy| PolicyRestart {
            policy: *policy,
            before: Vec::new(),
            after: Vec::new(),
            close: Vec::new(),
            open: Vec::new(),
        };
        Self {
            percent,
            policies: bench.policies.iter().map(of).collect(),
            title: format!("a restart after half of the requests, room for {percent} %"),
            around: AROUND_RESTART.min(bench.requests / 2),
        }
    }

    fn round(&mut self, bench: &TiersBench, room: &Room) -> Result<(), BenchStop> {
        let held = part(bench.requested().blocks.len(), self.percent);
        let (first, second) = bench.requested().seen().split_at(bench.requests / 2);
        for PolicyRestart { policy, before, after, close, open } in &mut self.policies {
            room.step(&format!("restart, {}", policy.name()))?;
            let mut played = CacheTotals::new();
            let cache = bench.open(room, *policy, held, Ahead::NONE)?;
            cache.play(first, &mut played)?;
            before.push(hits(&played.of_each[first.len().saturating_sub(AROUND_RESTART)..]));
            let started = Instant::now();
            cache.store.close()?;
            close.push(started.elapsed().as_secs_f64());
            let started = Instant::now();
            let cache = bench.open(room, *policy, held, Ahead::NONE)?;
            open.push(started.elapsed().as_secs_f64());
            cache.play(second, &mut played)?;
            after.push(hits(after_restart(&played, first.len())));
            cache.check_all(bench.requested().blocks.iter().copied())?;
            cache.store.close()?;
            std::fs::remove_dir_all(room.path("store"))?;
        }
        Ok(())
    }

    /// Returns the figures, with the hits of runs without a restart.
    fn group(self, straight: Vec<(Policy, Vec<f64>)>) -> Group {
        let mut group = Group::new(self.title);
        for PolicyRestart { policy, before, after, close, open } in self.policies {
            let name = |what: &str| format!("{}: {what}", policy.name());
            let hits = |when: &str| name(&format!("hits of {} requests {when}", self.around));
            let without = straight.iter().find(|(other, _)| *other == policy).map(|(_, hits)| hits.clone());
            let without = without.unwrap_or_default();
            let is_compared = without.iter().all(|hits| *hits > 0.0);
            for (name, unit, rounds) in [
                (hits("before"), Unit::Hits, before),
                (hits("after"), Unit::Hits, after),
                (hits("after, without a restart"), Unit::Hits, without),
                (name("close"), Unit::Seconds, close),
                (name("open"), Unit::Seconds, open),
            ] {
                let mut figure = Figure::new(name, unit);
                figure.rounds = rounds;
                if is_compared && figure.name == hits("after") {
                    figure = figure.under(hits("after, without a restart"));
                }
                group.figures.push(figure);
            }
        }
        group
    }
}

/// Returns the requests right after a restart.
fn after_restart(played: &CacheTotals, at: usize) -> &[(u64, u64)] {
    let after = &played.of_each[at..];
    &after[..after.len().min(AROUND_RESTART)]
}

/// Returns the share of the requested blocks that were found in the fast place.
fn hits(of_each: &[(u64, u64)]) -> f64 {
    share(of_each.iter().map(|(fast, _)| fast).sum(), of_each.iter().map(|(_, known)| known).sum())
}
