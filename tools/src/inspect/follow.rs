//! `remanent follow` prints the batches of a store, one per line, as they are logged.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

use remanent::Error;
use remanent::batch::Op;
use remanent::follow::{FollowFrom, FollowedBatch, Follower};

use crate::cli::exit::{Ending, Failure, Outcome};
use crate::cli::interrupt::Interrupt;
use crate::cli::json::object;
use crate::cli::output::Output;

const EXAMPLES: &str = "\
The command takes no lock and writes nothing, so the store may be open in another process. A batch is printed as soon \
as it is logged, so a power cut may still lose the batch. `durable` is the newest batch that was known to be durable \
at that time. A follower that continues from a position receives each batch once, even if the writer restarts. If the \
batches after the position are no longer kept, or a crash lost the batch at the position, the command prints where to \
start again and exits with 1.

Examples:
  remanent follow store                      all kept batches, then every new one
  remanent follow store --from snapshot      only batches after the newest snapshot
  remanent follow store --count 1 --json     one batch, with the position to continue from
  remanent follow store --from 3-0badcafe:17:5eedf00d --timeout 0
                                             batches logged since that position, without waiting";

/// Maximum time between two checks for Ctrl-C.
const SLICE: Duration = Duration::from_millis(100);

/// Print the batches of a store as they are logged
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Follow {
    /// Store directory, which is never modified
    dir: PathBuf,
    /// Position to start from: `beginning`, `snapshot` for the newest snapshot, or a position that `follow` printed
    #[arg(long, value_name = "FROM", default_value = "beginning")]
    from: From,
    /// Exit after N batches
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// Exit if no batch is logged for SECONDS seconds
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u64>,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

/// The position to start from, parsed from the command line.
#[derive(Clone, Copy)]
struct From(FollowFrom);

impl FromStr for From {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "beginning" => Ok(Self(FollowFrom::Beginning)),
            "snapshot" => Ok(Self(FollowFrom::Snapshot)),
            position => match position.parse() {
                Ok(position) => Ok(Self(FollowFrom::Position(position))),
                Err(error) => Err(format!("expected beginning, snapshot or a position: {error}")),
            },
        }
    }
}

impl Follow {
    pub fn run(&self, out: &mut Output) -> Outcome {
        let interrupt = Interrupt::listen()?;
        let mut follower = Follower::open(&self.dir, self.from.0).map_err(failure)?;
        let timeout = self.timeout.map(Duration::from_secs);
        let mut shown = 0;
        let mut since = Instant::now();
        while self.count.is_none_or(|count| shown < count) {
            if interrupt.is_noted() {
                return Ok(Ending::Interrupted);
            }
            let left = timeout.map(|timeout| timeout.saturating_sub(since.elapsed()));
            let slice = left.map_or(SLICE, |left| left.min(SLICE));
            if let Some(batch) = follower.next(slice).map_err(failure)? {
                self.show(&batch, out)?;
                shown += 1;
                since = Instant::now();
            } else if left.is_some_and(|left| left.is_zero()) {
                break;
            }
        }
        Ok(Ending::Fine)
    }

    /// Prints a batch and flushes the output, because another program may be waiting for the line.
    fn show(&self, batch: &FollowedBatch, out: &mut Output) -> Result<(), Failure> {
        if self.json {
            out.line(batch_json(batch))?;
        } else {
            out.line(batch_line(batch))?;
        }
        out.flush()
    }
}

/// Converts an error of the follower to a failure with the matching exit code.
fn failure(error: Error) -> Failure {
    match error {
        Error::Damaged(_) | Error::Overtaken { .. } | Error::Diverged { .. } => {
            Failure::Damage(error.to_string())
        }
        _ => Failure::Environment(error.to_string()),
    }
}

/// Counts operations by kind. Notes are not counted, because their text is printed.
fn kinds(operations: &[Op<'_>]) -> BTreeMap<&'static str, u64> {
    let mut kinds = BTreeMap::new();
    for op in operations.iter().filter(|op| !matches!(op, Op::Note { .. })) {
        *kinds.entry(op.kind()).or_default() += 1;
    }
    kinds
}

/// Returns the distinct pages that a batch changes, in ascending order.
fn pages(batch: &FollowedBatch, operations: &[Op<'_>]) -> Vec<u64> {
    let mut pages: Vec<u64> = match batch.restored() {
        Some(restored) => restored.pages().iter().map(|info| info.page.0).collect(),
        None => operations.iter().filter_map(Op::page).map(|page| page.0).collect(),
    };
    pages.sort_unstable();
    pages.dedup();
    pages
}

fn batch_json(batch: &FollowedBatch) -> serde_json::Value {
    let operations = batch.operations();
    object! {
        "lsn": batch.lsn().0,
        "position": batch.position().to_string(),
        "durable": batch.durable().0,
        "kinds": kinds(&operations),
        "pages": pages(batch, &operations),
        "restored": batch.restored().map(|restored| restored.of().0),
        "note": batch.note(),
    }
}

fn batch_line(batch: &FollowedBatch) -> String {
    let operations = batch.operations();
    let mut words: Vec<String> =
        kinds(&operations).into_iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    words.extend(batch.restored().map(|restored| format!("restore of lsn {}", restored.of())));
    words.extend(batch.note().map(|note| format!("note {note:?}")));
    format!("{:>10}  {}  {}", batch.lsn(), batch.position(), words.join(", "))
}
