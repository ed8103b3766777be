//! `remanent blame` lists the batches that changed an element.

use std::path::PathBuf;

use comfy_table::Table;
use remanent::StatePoint;
use remanent_format::Defect;
use remanent_format::state::blame::{ChangeCause, ValueChange, changes_of};

use crate::cli::exit::{Ending, Failure, Outcome};
use crate::cli::json;
use crate::cli::json::object;
use crate::cli::memory::MemoryLimit;
use crate::cli::output::Output;
use crate::cli::table::with_header;
use crate::read::states::{KeptStates, damaged};
use crate::read::store_dir::StoreDir;
use crate::weights::element::{Element, ElementName};

const EXAMPLES: &str = "\
KEY is the number of a page, its key, or the full name of its tensor. key:KEY and page:N are unambiguous. INDEX is one \
index per dimension, or one index into all elements, counted from 0. Only batches that changed the value are listed. \
For the time before the kept log, the values in kept snapshots are listed.

Examples:
  remanent blame store 'encoder.layer.0.output.dense.weight[12,7]'
  remanent blame store 'encoder.layer.0.output.dense.bias[7]' --json";

/// List the batches that changed an element, with its old and new values
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Blame {
    /// Store directory, which is never modified
    dir: PathBuf,
    /// Element whose changes are listed
    #[arg(value_name = "KEY[INDEX]")]
    element: ElementName,
    /// Ignore changes after this state: lsn:N, snapshot:N or the name of a snapshot [default: newest]
    #[arg(long)]
    at: Option<StatePoint>,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    memory: MemoryLimit,
}

impl Blame {
    pub fn run(&self, out: &mut Output) -> Outcome {
        let dir = StoreDir::open(&self.dir)?;
        let (element, changes) = KeptStates::with_retry(&dir, |past| {
            let until = past.lsn(self.at.as_ref())?;
            let table = past.table(until)?;
            let info = self.element.page.find(table.pages()).map_err(Failure::Environment)?;
            let element = self.element.find(&info).map_err(Failure::Environment)?;
            // Only the element is held in memory, regardless of the lengths of its page at earlier states.
            let needed = element.width as u64;
            if needed > self.memory.given() {
                let defect = Defect::Memory { needed };
                return Err(Failure::Environment(defect.to_string()));
            }
            let (page, range) = (element.info.page, element.range());
            let changes = changes_of(past.dir(), &past.survey, page, range, table.lsn()).map_err(damaged)?;
            Ok((element, changes))
        })?;
        if self.json {
            for change in &changes {
                out.line(change_json(&element, change))?;
            }
        } else {
            out.line(change_table(&element, &changes).trim_fmt())?;
        }
        Ok(Ending::Fine)
    }
}

fn change_json(element: &Element, change: &ValueChange) -> serde_json::Value {
    let value = |bytes: &Option<Vec<u8>>| bytes.as_ref().map(|bytes| element.json(bytes));
    object! {
        "lsn": change.lsn.0,
        "cause": match change.cause {
            ChangeCause::Batch => "batch",
            ChangeCause::Restore => "restore",
            ChangeCause::Snapshot => "snapshot",
        },
        "before": value(&change.before),
        "after": value(&change.after),
        "root": change.root.as_ref().map(|root| json::metadata(root)),
        "note": change.note,
    }
}

fn change_table(element: &Element, changes: &[ValueChange]) -> Table {
    let mut table = with_header(["LSN", "BEFORE", "AFTER", "ROOT", "NOTE"], 0..3);
    for change in changes {
        let value =
            |bytes: &Option<Vec<u8>>| bytes.as_ref().map_or("none".to_owned(), |bytes| element.text(bytes));
        let root = change.root.iter().flat_map(|root| root.iter());
        let root: Vec<String> = root.map(|(name, value)| format!("{name}={}", json::value(value))).collect();
        let note = match change.cause {
            ChangeCause::Batch => change.note.clone().unwrap_or_default(),
            ChangeCause::Restore => "(restored from an earlier state)".to_owned(),
            ChangeCause::Snapshot => "(value in a snapshot; the log before it is not kept)".to_owned(),
        };
        table.add_row([
            change.lsn.to_string(),
            value(&change.before),
            value(&change.after),
            root.join(" "),
            note.escape_debug().to_string(),
        ]);
    }
    table
}
