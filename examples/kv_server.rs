//! A server of a language model whose cache of keys and values is larger than the GPU's memory and survives
//! being killed.
//!
//! The requests are those of a real chat service ([`Trace`]). A block of the cache holds 16 tokens of all
//! layers and is a page of the store. The GPU has room for a tenth of the blocks, pinned host memory for two
//! tenths, the disk for all. In the middle the server is killed, and started again: it must hit what it would
//! have hit without that, and each block must hold the bytes that were computed.
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
use std::time::Instant;

use remanent::layout::{Arrangement, BlockLayout, BlockShape};
use remanent::{Budget, DeviceChoice, Error, Key, Options, PageInfo, Place, Store, Tiers};

type Anything<T> = Result<T, Box<dyn std::error::Error>>;

/// Where the model reads blocks.
const GPU: Place = Place::Device(0);

/// The part of the trace that is served, by a model of this size.
struct Service {
    device: DeviceChoice,
    shape: BlockShape,
    requests: Vec<Vec<u64>>,
    /// Different blocks that the requests name.
    blocks: u64,
}

impl Service {
    /// Takes the command's words: a device, and whether the model is one of real size.
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

    fn layout(&self) -> Anything<BlockLayout> {
        Ok(BlockLayout::new(self.shape, 1, Arrangement::Contiguous, 512)?)
    }

    fn options(&self) -> Anything<Options> {
        let layout = self.layout()?;
        let working_set = self.blocks * layout.block_len();
        let budget = Budget::default().with(GPU, working_set / 10).with(Place::Pinned, working_set / 5);
        Ok(Options::default()
            .device(self.device)
            .budget(budget)
            .tiers(Tiers::new([GPU, Place::Pinned, Place::Disk]))
            // A server whose model has another shape cannot open the store by mistake.
            .layout_fingerprint(layout.fingerprint()))
    }
}

/// The hash ids of requests to a chat service: the blocks of each prompt. Equal ids stand for equal tokens,
/// and for equal tokens before them.
fn trace(count: usize) -> Anything<Vec<Vec<u64>>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tools/data/mooncake_conversation_trace.jsonl.zst");
    let lines = BufReader::new(zstd::Decoder::new(File::open(path)?)?).lines();
    let request = |line: std::io::Result<String>| -> Anything<Vec<u64>> {
        let line: serde_json::Value = serde_json::from_str(&line?)?;
        Ok(serde_json::from_value(line["hash_ids"].clone())?)
    };
    lines.take(count).map(request).collect()
}

/// What became of one request: blocks that were found, by tier, and blocks that were computed.
#[derive(Clone, Copy, Default)]
struct Served {
    on_gpu: u64,
    pinned: u64,
    on_disk: u64,
    computed: u64,
    wrong: u64,
    /// Time until all blocks that were found were on the GPU.
    nanos: u64,
}

impl Served {
    fn found(&self) -> u64 {
        self.on_gpu + self.pinned + self.on_disk
    }

    fn line(&self) -> String {
        let Self { on_gpu, pinned, on_disk, computed, wrong, nanos } = self;
        format!("{on_gpu} {pinned} {on_disk} {computed} {wrong} {nanos}")
    }

    fn parse(line: &str) -> Anything<Self> {
        let numbers: Vec<u64> = line.split(' ').map(str::parse).collect::<Result<_, _>>()?;
        let [on_gpu, pinned, on_disk, computed, wrong, nanos] = numbers[..] else {
            return Err(format!("not a line of the server's: {line}").into());
        };
        Ok(Self { on_gpu, pinned, on_disk, computed, wrong, nanos })
    }
}

/// The server's process.
struct Server {
    store: Store,
    layout: BlockLayout,
}

impl Server {
    /// The blocks of a prompt that the cache has. A block is of use only if all before it are there, too.
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

    fn serve(&self, request: &[u64]) -> Anything<Served> {
        let begun = Instant::now();
        let found = self.find(request)?;
        let pages: Vec<_> = found.iter().map(|block| block.page).collect();
        self.store.ensure(&pages, GPU)?;
        let mut served = Served { nanos: begun.elapsed().as_nanos() as u64, ..Served::default() };
        for block in &found {
            match block.place {
                Place::Pinned => served.pinned += 1,
                Place::Disk => served.on_disk += 1,
                _ => served.on_gpu += 1,
            }
        }
        // The model would read the blocks where they are. Here they are compared with what was computed.
        for (id, page) in request.iter().zip(&pages) {
            served.wrong += u64::from(self.store.read_to_vec(*page)? != self.compute(*id));
        }
        // Blocks of one prompt come by one batch: after a crash all of them are there, or none.
        let mut batch = self.store.batch();
        let missing = request[pages.len()..].iter().collect::<HashSet<_>>();
        for id in &missing {
            batch.create_from(self.compute(**id), GPU).key(&key(**id)?);
        }
        self.store.commit(batch)?;
        served.computed = missing.len() as u64;
        Ok(served)
    }

    /// Keys and values of the tokens that an id stands for; a model's would differ from run to layer as well.
    fn compute(&self, id: u64) -> Vec<u8> {
        id.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes().repeat(self.layout.block_len() as usize / 8)
    }
}

fn key(id: u64) -> Anything<Key> {
    Ok(Key::new(format!("block/{id:016x}"))?)
}

/// Serves requests from the first that is asked for, and prints a line for each.
fn serve(service: &Service, directory: &Path, first: usize) -> Anything<()> {
    let store = Store::open(directory, service.options()?)?;
    let server = Server { store, layout: service.layout()? };
    println!("open");
    for request in &service.requests[first..] {
        println!("{}", server.serve(request)?.line());
    }
    Ok(())
}

/// A server's process, and the lines that it prints.
struct Process {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Process {
    /// Starts a server, and waits until it has opened the store.
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

    /// Bytes that the process had written to the disk, as the kernel counts them.
    fn written(&self) -> Anything<u64> {
        let counts = std::fs::read_to_string(format!("/proc/{}/io", self.child.id()))?;
        let line = counts.lines().find_map(|line| line.strip_prefix("write_bytes: "));
        Ok(line.ok_or("the kernel does not count bytes")?.parse()?)
    }
}

/// Serves half of the requests, kills the server in the middle of one, and serves the others with a new one.
fn main() -> Anything<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let word = |at: usize, default: &str| words.get(at).cloned().unwrap_or_else(|| default.to_owned());
    let words_of_service = [word(0, "host"), word(1, "small")];
    let service = Service::new(&words_of_service[0], &words_of_service[1])?;
    if let [_, _, directory, first] = &words[..] {
        return serve(&service, Path::new(directory), first.parse()?);
    }

    let directory = tempfile::tempdir()?;
    let path = directory.path().join("cache");
    let mut served = Vec::new();
    let mut written = 0;

    let mut process = Process::start(&words_of_service, &path, 0)?;
    while served.len() < service.requests.len() / 2 {
        let line = process.lines.next().ok_or("the server ended early")??;
        served.push(Served::parse(&line)?);
    }
    written += process.written()?;
    // SIGKILL: nothing is flushed, and no destructor runs.
    process.child.kill()?;
    for line in process.lines {
        served.push(Served::parse(&line?)?);
    }
    process.child.wait()?;
    let killed = served.len();

    let begun = Instant::now();
    let mut process = Process::start(&words_of_service, &path, killed)?;
    let opened = begun.elapsed();
    while served.len() < service.requests.len() {
        let line = process.lines.next().ok_or("the server ended early")??;
        served.push(Served::parse(&line)?);
        if served.len() + 1 == service.requests.len() {
            written += process.written()?;
        }
    }
    process.child.wait()?;

    show(&service, &served, killed);
    let computed: u64 = served.iter().map(|served| served.computed).sum();
    let bytes = computed * service.layout()?.block_len();
    println!("{} ms from the start of the process until the store was open again", opened.as_millis());
    println!("{:.2} bytes written to the disk for each byte of a block", written as f64 / bytes as f64);
    check(&service, &served, killed);
    Ok(())
}

/// Prints the hits by tier before and after the server was killed.
fn show(service: &Service, served: &[Served], killed: usize) {
    println!("requests    blocks  on the GPU  pinned  on disk  computed  p50 us  p99 us");
    let window = served.len() / 8;
    let all: [(&str, Range<usize>); 4] = [
        ("before", 0..killed),
        ("after", killed..served.len()),
        ("just before", killed - window..killed),
        ("just after", killed..killed + window),
    ];
    for (name, range) in all {
        let served = &served[range];
        let sum = |count: fn(&Served) -> u64| served.iter().map(count).sum::<u64>();
        let blocks = sum(Served::found) + sum(|served| served.computed);
        let part = |count: u64| 100.0 * count as f64 / blocks as f64;
        let mut nanos: Vec<u64> = served.iter().map(|served| served.nanos).collect();
        nanos.sort_unstable();
        println!(
            "{name:11}{blocks:7}{:10.1} %{:6.1} %{:7.1} %{:8.1} %{:8}{:8}",
            part(sum(|served| served.on_gpu)),
            part(sum(|served| served.pinned)),
            part(sum(|served| served.on_disk)),
            part(sum(|served| served.computed)),
            nanos[nanos.len() / 2] / 1000,
            nanos[nanos.len() * 99 / 100] / 1000,
        );
    }
    let found: u64 = served.iter().map(Served::found).sum();
    println!("{} tokens were not computed again", found * u64::from(service.shape.tokens));
}

/// Each request found all the blocks of the requests before it, whichever process served those.
fn check(service: &Service, served: &[Served], killed: usize) {
    let mut computed: HashSet<u64> = HashSet::new();
    for (number, (request, served)) in service.requests.iter().zip(served).enumerate() {
        let expected = request.iter().take_while(|id| computed.contains(*id)).count() as u64;
        // The last one of the process that was killed may have been kept, but not told.
        let may_differ = number == killed && served.found() > expected;
        assert!(served.found() == expected || may_differ, "request {number}: {expected} blocks were there");
        assert_eq!(served.wrong, 0, "request {number}");
        computed.extend(request);
    }
}
