//! A language model server whose key-value cache is larger than the GPU's memory and survives a kill.
//!
//! The requests come from a real chat service ([`trace`]). A block of the cache contains the keys and values
//! of 16 tokens in all layers, and is a page of the store. The GPU has room for a tenth of the blocks, pinned
//! host memory for two tenths, and the disk for all. The model works on its own tensors, which have another
//! layout. One command list loads the blocks of a prompt into the tensors, and new blocks are committed from
//! the tensors.
//!
//! In the middle of the trace the server is killed and restarted. It must then have the same hits in the same
//! tiers as a server that was not killed, and each block must contain the bytes that were computed.
//!
//! ```sh
//! cargo run --release --example kv_server
//! # A model of 32 layers with 8 heads of 128 elements, on a GPU.
//! cargo run --release --example kv_server -- cuda:0 full
//! ```
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example shows what it does")]

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use remanent::blocks::{BlockPages, BlockTensors};
use remanent::layout::{Arrangement, BlockLayout, BlockShape};
use remanent::options::MemoryOptions;
use remanent::tiers::Tiers;
use remanent::{DeviceChoice, Error, Key, Options, PageInfo, Place, Store};

type Anything<T> = Result<T, Box<dyn std::error::Error>>;

/// The place where the model works, which is also the fastest place for the cache's pages.
const GPU: Place = Place::Device(0);
/// Tokens per hash id of the trace. A block of this example contains fewer tokens, to save memory in tests,
/// but represents a whole id.
const TOKENS_OF_ID: u64 = 512;
/// Number of blocks per request and tier that are loaded individually, to measure the time to load one block.
const ALONE_MAX: usize = 8;

/// The part of the trace that is served, and the size of the model.
struct Service {
    device: DeviceChoice,
    shape: BlockShape,
    requests: Vec<Vec<u64>>,
    /// Number of distinct blocks in the requests.
    blocks: u64,
}

impl Service {
    /// Parses the command line: a device, and whether the model has a realistic size.
    fn new(device: &str, size: &str) -> Anything<Self> {
        let small = BlockShape { layers: 4, outer: 2, tokens: 16, inner: 2 * 16, width: 2 };
        let (shape, count) = match size {
            "small" => (small, 400),
            "full" => (BlockShape { layers: 32, inner: 8 * 128, ..small }, 300),
            other => return Err(format!("{other} is neither small nor full").into()),
        };
        let requests = trace(count)?;
        let blocks = requests.iter().flatten().collect::<HashSet<_>>().len() as u64;
        Ok(Self { device: device.parse()?, shape, requests, blocks })
    }

    /// Returns the layout of a page of the store, which is one block.
    fn layout(&self) -> Anything<BlockLayout> {
        Ok(BlockLayout::new(self.shape, 1, Arrangement::Contiguous, 512)?)
    }

    /// Returns the layout of the model's tensors, one per layer: `[num_blocks, 2, tokens, heads, dim]`, with
    /// room for the longest prompt.
    fn layout_of_model(&self) -> Anything<BlockLayout> {
        let blocks = self.requests.iter().map(Vec::len).max().unwrap_or(1) as u64;
        Ok(BlockLayout::new(self.shape, blocks, Arrangement::LayersApart { block_first: true }, 1)?)
    }

    fn options(&self) -> Anything<Options> {
        let layout = self.layout()?;
        let working_set = self.blocks * layout.block_len();
        let model = self.layout_of_model()?;
        // The store allocates the model's tensors, so they count toward the same memory budget as the cache.
        let tensors = model.region_count() as u64 * model.region_len();
        let memory = MemoryOptions::new()
            .budget(GPU, working_set / 10 + tensors)
            .budget(Place::Pinned, working_set / 5);
        Ok(Options::new()
            .device(self.device)
            .memory(memory)
            .tiers(Tiers::new([GPU, Place::Pinned, Place::Disk]))
            // The store rejects a server for a model of another shape.
            .layout_fingerprint(layout.fingerprint()))
    }
}

/// The hash ids of the blocks in each prompt, from requests to a chat service. Two equal ids represent equal
/// tokens after equal prefixes.
fn trace(count: usize) -> Anything<Vec<Vec<u64>>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tools/data/mooncake_conversation_trace.jsonl.zst");
    let lines = BufReader::new(zstd::Decoder::new(File::open(path)?)?).lines();
    let request = |line: std::io::Result<String>| -> Anything<Vec<u64>> {
        let line: serde_json::Value = serde_json::from_str(&line?)?;
        Ok(serde_json::from_value(line["hash_ids"].clone())?)
    };
    lines.take(count).map(request).collect()
}

/// Numbers of blocks that were found in each tier, and of blocks that were computed.
#[derive(Clone, Default)]
struct Served {
    on_gpu: u64,
    pinned: u64,
    on_disk: u64,
    computed: u64,
    wrong: u64,
    /// Times to load single blocks from pinned memory into the model's tensors.
    pinned_nanos: Vec<u64>,
    /// Times to load single blocks from disk into the model's tensors.
    disk_nanos: Vec<u64>,
}

impl Served {
    fn found(&self) -> u64 {
        self.on_gpu + self.pinned + self.on_disk
    }

    fn of(all: &[Self]) -> Self {
        let mut sum = Self::default();
        for served in all {
            sum.on_gpu += served.on_gpu;
            sum.pinned += served.pinned;
            sum.on_disk += served.on_disk;
            sum.computed += served.computed;
            sum.wrong += served.wrong;
            sum.pinned_nanos.extend(&served.pinned_nanos);
            sum.disk_nanos.extend(&served.disk_nanos);
        }
        sum
    }

    fn line(&self) -> String {
        let counts = vec![self.on_gpu, self.pinned, self.on_disk, self.computed, self.wrong];
        let words = |numbers: &[u64]| numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(" ");
        [counts, self.pinned_nanos.clone(), self.disk_nanos.clone()].map(|part| words(&part)).join(",")
    }

    fn parse(line: &str) -> Anything<Self> {
        let numbers = |part: &str| part.split_whitespace().map(str::parse).collect::<Result<Vec<u64>, _>>();
        let parts = line.split(',').map(numbers).collect::<Result<Vec<_>, _>>()?;
        let [counts, pinned_nanos, disk_nanos] = &parts[..] else {
            return Err(format!("not a line of the server's: {line}").into());
        };
        let [on_gpu, pinned, on_disk, computed, wrong] = counts[..] else {
            return Err(format!("not a line of the server's: {line}").into());
        };
        let (pinned_nanos, disk_nanos) = (pinned_nanos.clone(), disk_nanos.clone());
        Ok(Self { on_gpu, pinned, on_disk, computed, wrong, pinned_nanos, disk_nanos })
    }
}

/// The server process.
struct Server {
    store: Store,
    layout: BlockLayout,
    model: BlockTensors,
}

impl Server {
    /// Returns the blocks of a prompt that the cache contains. A block is useful only if all blocks before it
    /// are present.
    fn find(&self, request: &[u64]) -> Anything<Vec<PageInfo>> {
        let mut found = Vec::new();
        for id in request {
            match self.store.page_by_key(&key(*id)?) {
                Ok(page) => found.push(page),
                Err(Error::UnknownKey { .. }) => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(found)
    }

    /// Loads blocks to the GPU and, with one command list, into the model's tensors. Each block is copied to
    /// the slot paired with it. On return, all blocks are loaded.
    fn load(&self, blocks: &[(PageInfo, u64)]) -> Anything<()> {
        let pages: Vec<_> = blocks.iter().map(|(block, _)| block.page).collect();
        self.store.ensure(&pages, GPU)?;
        let pages = pages.into_iter().map(|page| BlockPages::new(&self.store, self.layout, vec![page]));
        let pages = pages.collect::<Result<Vec<_>, _>>()?;
        let loads: Vec<_> =
            pages.iter().zip(blocks).map(|(page, (_, slot))| (page.block(0), *slot)).collect();
        self.model.load(&self.store, &loads)?;
        Ok(())
    }

    fn serve(&self, request: &[u64]) -> Anything<Served> {
        let mut served = Served::default();
        let found = self.find(request)?;
        let mut loads: Vec<_> = found.iter().cloned().zip(0..).collect();
        for block in &found {
            match block.place {
                Place::Pinned => served.pinned += 1,
                Place::Disk => served.on_disk += 1,
                _ => served.on_gpu += 1,
            }
        }
        // Load some blocks of the slower tiers individually, to measure the time.
        for (place, nanos) in
            [(Place::Pinned, &mut served.pinned_nanos), (Place::Disk, &mut served.disk_nanos)]
        {
            for _ in 0..ALONE_MAX {
                let Some(first) = loads.iter().position(|(block, _)| block.place == place) else { break };
                let begun = Instant::now();
                self.load(&[loads.remove(first)])?;
                nanos.push(begun.elapsed().as_nanos() as u64);
            }
        }
        self.load(&loads)?;
        // A model would read the blocks in its tensors. This example compares them with the expected bytes
        // instead.
        for (id, slot) in request[..found.len()].iter().zip(0..) {
            served.wrong += u64::from(self.in_slot(slot)? != self.compute(*id));
        }
        // The blocks of a prompt are committed in one batch, so that after a crash either all of them exist
        // or none.
        let mut batch = self.store.batch();
        let mut known = HashSet::new();
        let mut new = Vec::new();
        for (id, slot) in request.iter().zip(0..).skip(found.len()).filter(|(id, _)| known.insert(**id)) {
            self.put_in_slot(slot, &self.compute(*id))?;
            new.push((slot, 0, [batch.create(self.layout.region_len(), GPU).key(&key(*id)?).page()]));
        }
        let new_pages: Vec<_> = new.iter().map(|(slot, block, pages)| (*slot, *block, &pages[..])).collect();
        self.model.write_new(&mut batch, &self.layout, &new_pages)?;
        self.store.commit(batch)?;
        served.computed = new.len() as u64;
        Ok(served)
    }

    /// Returns the keys and values of the tokens of an id. Each word is unique.
    fn compute(&self, id: u64) -> Vec<u8> {
        let words = 0..self.layout.block_len() / 8;
        let word = |word: u64| (id << 32 | word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        words.flat_map(|at| word(at).to_le_bytes()).collect()
    }

    /// Writes a block to a slot of the tensors, as the model's computation would.
    fn put_in_slot(&self, slot: u64, mut bytes: &[u8]) -> Anything<()> {
        for extent in self.model.layout().extents(slot)? {
            let (run, rest) = bytes.split_at(extent.len as usize);
            self.model.tensors()[extent.region].write(extent.offset, run)?;
            bytes = rest;
        }
        Ok(())
    }

    fn in_slot(&self, slot: u64) -> Anything<Vec<u8>> {
        let mut bytes = vec![0; self.layout.block_len() as usize];
        let mut at = 0;
        for extent in self.model.layout().extents(slot)? {
            let end = at + extent.len as usize;
            self.model.tensors()[extent.region].read(extent.offset, &mut bytes[at..end])?;
            at = end;
        }
        Ok(bytes)
    }
}

fn key(id: u64) -> Anything<Key> {
    Ok(Key::new(format!("block/{id:016x}"))?)
}

/// Serves requests from `first` on, and prints a line for each.
fn serve(service: &Service, directory: &Path, first: usize) -> Anything<()> {
    let store = service.options()?.open(directory)?;
    let layout = service.layout_of_model()?;
    let tensors = (0..layout.region_count()).map(|_| store.device_bytes(layout.region_len(), GPU));
    let model = BlockTensors::new(layout, tensors.collect::<Result<_, _>>()?)?;
    let server = Server { store, layout: service.layout()?, model };
    println!("open");
    for request in &service.requests[first..] {
        println!("{}", server.serve(request)?.line());
    }
    Ok(())
}

/// A server process and the lines that it prints.
struct Process {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Process {
    /// Starts a server and waits until it has opened the store.
    fn start(words: &[String; 2], directory: &Path, first: usize) -> Anything<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(words).arg(directory).arg(first.to_string()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let out = child.stdout.take().expect("it is piped");
        let mut lines = BufReader::new(out).lines();
        match lines.next().transpose()? {
            Some(line) if line == "open" => Ok(Self { child, lines }),
            other => Err(format!("the server did not open its store: {other:?}").into()),
        }
    }

    /// Returns the bytes that the process has written to the disk, as counted by the kernel.
    fn written(&self) -> Anything<u64> {
        let counts = std::fs::read_to_string(format!("/proc/{}/io", self.child.id()))?;
        let line = counts.lines().find_map(|line| line.strip_prefix("write_bytes: "));
        Ok(line.ok_or("the kernel does not count bytes")?.parse()?)
    }
}

/// Results and costs of serving all requests.
struct Run {
    served: Vec<Served>,
    /// Number of requests that were served before the kill, or all if the server was not killed.
    killed: usize,
    /// Bytes written to the disk.
    written: u64,
    /// Time from the start of the second process until the store was open.
    opened: Duration,
}

impl Run {
    /// Serves all requests. If `is_killed` is true, the server is killed during a request in the middle, and
    /// a new server handles the rest.
    fn new(words: &[String; 2], service: &Service, directory: &Path, is_killed: bool) -> Anything<Self> {
        let count = service.requests.len();
        let mut run = Self { served: Vec::new(), killed: count, written: 0, opened: Duration::ZERO };
        let mut process = Process::start(words, directory, 0)?;
        if is_killed {
            run.take(&mut process, count / 2)?;
            // SIGKILL flushes nothing and runs no destructor.
            process.child.kill()?;
            for line in process.lines {
                run.served.push(Served::parse(&line?)?);
            }
            process.child.wait()?;
            run.killed = run.served.len();
            let begun = Instant::now();
            process = Process::start(words, directory, run.killed)?;
            run.opened = begun.elapsed();
        }
        run.take(&mut process, count)?;
        process.child.wait()?;
        Ok(run)
    }

    /// Reads the output of a server for up to `count` requests. Counts the bytes that the server wrote before
    /// the last of them.
    fn take(&mut self, process: &mut Process, count: usize) -> Anything<()> {
        let mut written = 0;
        while self.served.len() < count {
            written = process.written().unwrap_or(written);
            let line = process.lines.next().ok_or("the server ended early")??;
            self.served.push(Served::parse(&line)?);
        }
        self.written += written;
        Ok(())
    }
}

fn main() -> Anything<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let word = |at: usize, default: &str| words.get(at).cloned().unwrap_or_else(|| default.to_owned());
    let words_of_service = [word(0, "host"), word(1, "small")];
    let service = Service::new(&words_of_service[0], &words_of_service[1])?;
    if let [_, _, directory, first] = &words[..] {
        return serve(&service, Path::new(directory), first.parse()?);
    }

    let directory = tempfile::tempdir()?;
    let killed = Run::new(&words_of_service, &service, &directory.path().join("killed"), true)?;
    let straight = Run::new(&words_of_service, &service, &directory.path().join("straight"), false)?;
    show(&service, &killed, &straight)?;
    check(&service, &killed, &straight);
    Ok(())
}

/// Prints the hits by tier before and after the kill, and the hits of a server that was not killed.
fn show(service: &Service, run: &Run, straight: &Run) -> Anything<()> {
    println!("requests              blocks  on the GPU  pinned  on disk  computed");
    let Run { served, killed, .. } = run;
    let window = served.len() / 8;
    let (before, after) = (killed - window..*killed, *killed..killed + window);
    let all: [(&str, &Run, Range<usize>); 6] = [
        ("all before", run, 0..*killed),
        ("  not killed", straight, 0..*killed),
        ("all after", run, *killed..served.len()),
        ("  not killed", straight, *killed..served.len()),
        ("just before", run, before),
        ("just after", run, after.clone()),
    ];
    let row = |(name, run, range): (&str, &Run, Range<usize>)| {
        let sum = Served::of(&run.served[range]);
        let blocks = sum.found() + sum.computed;
        let part = |count: u64| 100.0 * count as f64 / blocks as f64;
        let parts = [sum.on_gpu, sum.pinned, sum.on_disk, sum.computed].map(part);
        let [on_gpu, pinned, on_disk, computed] = parts;
        println!("{name:20}{blocks:8}{on_gpu:10.1} %{pinned:6.1} %{on_disk:7.1} %{computed:8.1} %");
    };
    all.into_iter().for_each(row);
    row(("  not killed", straight, after));

    let sum = Served::of(served);
    let tokens = sum.found() * TOKENS_OF_ID;
    println!("{} wrong blocks of {}", sum.wrong, sum.found());
    println!(
        "{tokens} tokens not computed again: {} blocks, each for {TOKENS_OF_ID} of the trace",
        sum.found()
    );
    for (tier, mut nanos) in [("pinned memory", sum.pinned_nanos), ("disk", sum.disk_nanos)] {
        nanos.sort_unstable();
        let Some(last) = nanos.len().checked_sub(1) else { continue };
        let micros = |percent: usize| nanos[last * percent / 100] as f64 / 1000.0;
        let count = nanos.len();
        println!(
            "a block from {tier} into the model's tensors: p50 {:.0} us, p99 {:.0} us, of {count}",
            micros(50),
            micros(99)
        );
    }
    println!("{} ms from the start of the process until the store was open again", run.opened.as_millis());
    let bytes = sum.computed * service.layout()?.block_len();
    println!(
        "write amplification {:.2}: bytes written to the disk a byte of blocks",
        run.written as f64 / bytes as f64
    );
    Ok(())
}

/// Checks that each request finds all blocks of earlier requests, whichever process served them, and that
/// after the kill as many blocks are in memory as without it.
fn check(service: &Service, run: &Run, straight: &Run) {
    for Run { served, killed, .. } in [run, straight] {
        let mut computed: HashSet<u64> = HashSet::new();
        for (number, (request, served)) in service.requests.iter().zip(served).enumerate() {
            let expected = request.iter().take_while(|id| computed.contains(*id)).count() as u64;
            // The last block of the killed process may have been stored but not reported.
            let may_differ = number == *killed && served.found() > expected;
            assert!(
                served.found() == expected || may_differ,
                "request {number}: {expected} blocks were there"
            );
            assert_eq!(served.wrong, 0, "request {number}");
            computed.extend(request);
        }
    }
    let after = run.killed..run.killed + run.served.len() / 8;
    let in_memory = |run: &Run| {
        let sum = Served::of(&run.served[after.clone()]);
        sum.on_gpu + sum.pinned
    };
    let (found, expected) = (in_memory(run), in_memory(straight));
    assert!(10 * found >= 8 * expected, "{found} hits in memory after the kill, and {expected} without it");
}
