//! Replays a cache trace on stores of blocks, on one thread. Each block of a request is read if it exists,
//! and otherwise written.
//!
//! ```text
//! cargo run --release --features rocksdb --manifest-path bench/peers/Cargo.toml --target-dir target/peers \
//!     -- blocks DIR TRACE.jsonl.zst [REQUESTS PERCENT KIB [ROUNDS]]
//! ```
//!
//! The blocks are those of `remanent-bench tiers`: each distinct id of a request, in the order of the
//! requests, with `KIB` KiB per block. A cache holds `PERCENT` percent of the distinct blocks. In all stores,
//! a written block survives the death of the process and no sync is awaited: `Ack::Applied`, RocksDB's log
//! without `sync`, LMDB with `MDB_NOSYNC`. LMDB maps its file, so its cache is the page cache, which this
//! program does not limit. Files of all stores may be in the page cache. Each read compares the whole block,
//! which is not included in the time.

use std::collections::HashSet;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use crate::commits::median;
use crate::peers::{BLOCK_STORES, Blocks};

/// The options of a comparison.
pub struct Asked {
    pub requests: usize,
    pub percent: u64,
    pub kib: u64,
    pub rounds: usize,
}

/// Remanent keeps one part in this number of its budget free. The budgets of all other stores are reduced by
/// the same amount.
const FREE_PART: u64 = 16;

/// Returns the distinct ids of the first `requests` requests of a trace. A file that ends with `.zst` is
/// decompressed by the program `zstd`.
fn read(trace: &Path, requests: usize) -> Vec<Vec<u64>> {
    let text = if trace.extension().is_some_and(|ending| ending == "zst") {
        let mut zstd = Command::new("zstd");
        let output = zstd.args(["-dc", "--"]).arg(trace).stderr(Stdio::inherit()).output();
        let output = output.expect("zstd is there");
        assert!(output.status.success(), "zstd does not read {}", trace.display());
        String::from_utf8(output.stdout).expect("a trace is text")
    } else {
        std::fs::read_to_string(trace).expect("a trace that can be read")
    };
    let line = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).expect("a line is an object");
        let ids = line["hash_ids"].as_array().expect("`hash_ids` are a list");
        let mut known = HashSet::new();
        let ids = ids.iter().map(|id| id.as_u64().expect("an id is a number"));
        ids.filter(|id| known.insert(*id)).collect()
    };
    text.lines().take(requests).map(line).collect()
}

/// Returns the incompressible bytes of a block.
fn bytes(block: u64, len: usize) -> Vec<u8> {
    let mut state = block.wrapping_mul(0xd134_2543_de82_ef95) | 1;
    let mut word = || {
        // xorshift64*
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes()
    };
    (0..len.div_ceil(8)).flat_map(|_| word()).take(len).collect()
}

/// The results of a replay on one store.
struct Played {
    gets: Vec<Duration>,
    puts: Vec<Duration>,
    hits: Option<u64>,
}

fn play(name: &str, store: &mut dyn Blocks, requests: &[Vec<u64>], len: usize) -> Played {
    let (mut gets, mut puts, mut known) = (Vec::new(), Vec::new(), HashSet::new());
    for block in requests.iter().flatten() {
        let expected = bytes(*block, len);
        let started = Instant::now();
        if known.insert(*block) {
            store.put(*block, &expected).unwrap_or_else(|error| panic!("{name} does not put: {error}"));
            puts.push(started.elapsed());
        } else {
            let found = store.get(*block).unwrap_or_else(|error| panic!("{name} does not get: {error}"));
            gets.push(started.elapsed());
            assert!(found == expected, "{name} gives other bytes for block {block}");
        }
    }
    gets.sort_unstable();
    puts.sort_unstable();
    Played { gets, puts, hits: store.hits() }
}

/// Measures all stores in turn and prints a table.
pub fn compare(directory: &Path, trace: &Path, asked: &Asked) -> ExitCode {
    let requests = read(trace, asked.requests);
    let different: HashSet<u64> = requests.iter().flatten().copied().collect();
    let count = requests.iter().map(Vec::len).sum::<usize>();
    let len = asked.kib * 1024;
    let held = (different.len() as u64 * asked.percent / 100).max(1);
    let cache = (held * len * FREE_PART).div_ceil(FREE_PART - 1);
    println!(
        "{} requests, {count} blocks, {} different ones of {} KiB; caches of {} MiB; {} rounds\n",
        requests.len(),
        different.len(),
        asked.kib,
        cache >> 20,
        asked.rounds
    );
    let mut runs: Vec<Vec<Played>> = BLOCK_STORES.iter().map(|_| Vec::new()).collect();
    for _ in 0..asked.rounds {
        for ((name, open), runs) in BLOCK_STORES.iter().zip(&mut runs) {
            let directory = tempfile::tempdir_in(directory).expect("a directory for a store");
            let opened = open(directory.path(), cache, different.len() as u64 * len);
            let mut store = opened.unwrap_or_else(|error| panic!("{name} does not open: {error}"));
            runs.push(play(name, &mut *store, &requests, len as usize));
        }
    }
    println!("| | blocks/s | get p50 | p99 | put p50 | p99 | hits of gets |\n|---|---|---|---|---|---|---|");
    for ((name, _), runs) in BLOCK_STORES.iter().zip(&runs) {
        let of = |value: &dyn Fn(&Played) -> f64| median(runs.iter().map(value).collect());
        let rate = of(&|run| {
            let took: Duration = run.gets.iter().chain(&run.puts).sum();
            count as f64 / took.as_secs_f64()
        });
        let time = |times: for<'r> fn(&'r Played) -> &'r [Duration], percent: usize| {
            let of = |times: &[Duration]| {
                times.get(times.len() * percent / 100).map_or(0.0, Duration::as_secs_f64)
            };
            format!("{:.0} us", median(runs.iter().map(|run| of(times(run))).collect()) * 1e6)
        };
        let [g50, g99] = [50, 99].map(|percent| time(|run| &run.gets, percent));
        let [p50, p99] = [50, 99].map(|percent| time(|run| &run.puts, percent));
        let share = |run: &Played| run.hits.map(|hits| hits as f64 / run.gets.len().max(1) as f64);
        let hits = runs.iter().map(share).collect::<Option<Vec<f64>>>().map(median);
        let hits = hits.map_or_else(|| "it cannot tell".to_owned(), |hits| format!("{:.1} %", 100.0 * hits));
        println!("| {name} | {rate:.0} | {g50} | {g99} | {p50} | {p99} | {hits} |");
    }
    ExitCode::SUCCESS
}
