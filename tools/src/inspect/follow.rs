//! `remanent follow`: the batches of a store, one a line, as they are logged.

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
Nothing is locked and nothing is written; the store may be open in another process, or in none. A batch is \
shown once it is logged, so a power cut may still take it: `durable` is the newest one that was known to \
survive when it was logged. A follower that goes on from a position gets each batch once, also across restarts of \
the writer. If the log went on without the follower, or a crash took the batch at its position, the command \
ends with code 1 and says where to start.

Examples:
  remanent follow store                      every batch from now on, after those that are kept
  remanent follow store --from snapshot      those after the newest snapshot
  remanent follow store --count 1 --json     the next one, with the position to go on from
  remanent follow store --from 3-0badcafe:17:5eedf00d --timeout 0
                                             what was logged since, and no waiting";

/// Ctrl-C is noticed at least so often.
const SLICE: Duration = Duration::from_millis(100);

/// Show batches as they are logged
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Follow {
    /// The store's directory; it is only read
    dir: PathBuf,
    /// The position to begin at: `beginning`, `snapshot`, or a position that was shown before
    #[arg(long, value_name = "FROM", default_value = "beginning")]
    from: From,
    /// End after this number of batches
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// End when no batch came for so long
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u64>,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

/// The position to begin at, as the user wrote it.
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
                Err(error) => Err(format!("neither beginning nor snapshot: {error}")),
            },
        }
    }
}

impl Follow {
    /// Runs `remanent follow`.
    pub fn run(&self, out: &mut Output) -> Outcome {
        let interrupt = Interrupt::listen()?;
        let mut follower = Follower::open(&self.dir, self.from.0).map_err(failure)?;
        let timeout = self.timeout.map(Duration::from_secs);
        let mut shown = 0;
        let mut since = Instant::now();
        while self.count.is_none_or(|count| shown < count) {
            if interrupt.noted() {
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

    /// Shows a batch at once: a reader may wait for it.
    fn show(&self, batch: &FollowedBatch, out: &mut Output) -> Result<(), Failure> {
        if self.json {
            out.line(batch_json(batch))?;
        } else {
            out.line(batch_line(batch))?;
        }
        out.flush()
    }
}

/// The failure that ends a following.
fn failure(error: Error) -> Failure {
    match error {
        Error::Damaged(_) | Error::Overtaken { .. } | Error::Diverged { .. } => {
            Failure::Damage(error.to_string())
        }
        _ => Failure::Environment(error.to_string()),
    }
}

/// Number of operations by kind; the note is shown itself.
fn kinds(operations: &[Op<'_>]) -> BTreeMap<&'static str, u64> {
    let mut kinds = BTreeMap::new();
    for op in operations.iter().filter(|op| !matches!(op, Op::Note { .. })) {
        *kinds.entry(op.kind()).or_default() += 1;
    }
    kinds
}

/// The pages concerned, each once, ascending.
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
    words.extend(batch.restored().map(|restored| format!("the state of lsn {}", restored.of())));
    words.extend(batch.note().map(|note| format!("note {note:?}")));
    format!("{:>10}  {}  {}", batch.lsn(), batch.position(), words.join(", "))
}
