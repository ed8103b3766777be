//! `remanent prune` removes the snapshots and the part of the log that no rule keeps, or lists them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use remanent::error::FileName;
use remanent::options::Create;
use remanent::snapshot::PruneReport;
use remanent::{Retention, SnapshotId, Store};
use serde_json::json;

use crate::cli::engine;
use crate::cli::engine::engine_failure;
use crate::cli::exit::{Ending, Failure, Outcome};
use crate::cli::interrupt;
use crate::cli::interrupt::Interrupt;
use crate::cli::json::object;
use crate::cli::output::Output;
use crate::read::partial_view::PartialView;
use crate::read::store_dir::StoreDir;

const EXAMPLES: &str = "\
A snapshot is kept, together with the log after it, if any rule keeps the snapshot. At least one rule is required, \
because a store does not record the rules of the application that writes it, such as snapshots_kept and log_kept. \
Named snapshots are kept until their names are released. If only --name is specified, only the snapshots with these \
names are removed. The newest snapshot is always kept. Without --yes, the store is not modified and may be open in \
another process.

Examples:
  remanent prune store --snapshots 2                   print what would be removed
  remanent prune store --snapshots 5 --age 7d --yes    keep five snapshots and all of the last week
  remanent prune store --log-bytes 1000000000          also keep this much log for restores
  remanent prune store --name before-tuning --yes      release a name and remove its snapshot";

const NO_RULE: &str = "no rule was specified, and the store does not record the rules of its application; specify \
what to keep with --snapshots, --age or --log-bytes, or a name to release with --name";

/// Remove old snapshots and log, or print what would be removed
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Prune {
    /// Store directory
    dir: PathBuf,
    /// Keep the N newest snapshots [default: 2, or all if only --name is given]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    snapshots: Option<u32>,
    /// Keep snapshots younger than AGE, for example 7d or 12h
    #[arg(long, value_name = "AGE", value_parser = parse_age)]
    age: Option<Duration>,
    /// Keep at least BYTES of the log
    #[arg(long, value_name = "BYTES")]
    log_bytes: Option<u64>,
    /// Release this snapshot name, and remove the snapshot unless another rule keeps it
    #[arg(long, value_name = "NAME")]
    name: Vec<String>,
    /// Delete. Without this flag, only print what would be deleted
    #[arg(long)]
    yes: bool,
    /// Print the result as a JSON object
    #[arg(long)]
    json: bool,
}

fn parse_age(text: &str) -> Result<Duration, String> {
    let wrong = || "expected a number with the unit s, m, h or d, for example 7d".to_owned();
    let unit = text.chars().next_back().ok_or_else(wrong)?;
    let seconds = match unit {
        's' => 1_u64,
        'm' => 60,
        'h' => 3600,
        'd' => 86400,
        _ => return Err(wrong()),
    };
    let number: u64 = text[..text.len() - 1].parse().map_err(|_| wrong())?;
    number.checked_mul(seconds).map(Duration::from_secs).ok_or_else(wrong)
}

impl Prune {
    pub fn run(&self, out: &mut Output) -> Outcome {
        if !self.is_ruled() && self.name.is_empty() {
            return Err(Failure::Environment(NO_RULE.to_owned()));
        }
        let rules = self.rules();
        // Snapshots whose names are released.
        let mut released = Vec::new();
        let pruned = if self.yes {
            let interrupt = Interrupt::listen()?;
            let store = engine::open(&self.dir, Create::Never)?;
            released =
                self.holders(store.snapshots().into_iter().filter_map(|info| Some((info.name?, info.id))))?;
            if interrupt.is_noted() {
                return Ok(Ending::Interrupted);
            }
            let pruned = store.prune(&rules).map_err(engine_failure)?;
            store.close().map_err(engine_failure)?;
            pruned
        } else {
            interrupt::end_at_once()?;
            if !self.name.is_empty() {
                let view = PartialView::take(&StoreDir::open(&self.dir)?)?;
                let manifests = view.snapshots().filter_map(|id| view.survey.snapshot(id).ok());
                released =
                    self.holders(manifests.filter_map(|found| Some((found.name.clone()?, found.snapshot))))?;
            }
            Store::would_prune_at(&self.dir, &rules).map_err(engine_failure)?
        };
        let is_gone = |id: &SnapshotId| pruned.snapshots.iter().any(|info| info.id == *id);
        released.retain(|id| !is_gone(id) && !pruned.held.contains(id));
        self.report(&pruned, &released, out)?;
        Ok(Ending::Fine)
    }

    /// Returns the snapshots whose names the user releases. Returns an error for a name that no snapshot has, because a
    /// misspelled name would otherwise keep the snapshot silently.
    fn holders(&self, named: impl Iterator<Item = (String, SnapshotId)>) -> Result<Vec<SnapshotId>, Failure> {
        let named: BTreeMap<String, SnapshotId> = named.collect();
        let none = |name: &String| Failure::Environment(format!("there is no snapshot named {name:?}"));
        let holder = |name: &String| named.get(name).copied().ok_or_else(|| none(name));
        self.name.iter().map(holder).collect()
    }

    fn is_ruled(&self) -> bool {
        self.snapshots.is_some() || self.age.is_some() || self.log_bytes.is_some()
    }

    fn is_of_names_alone(&self) -> bool {
        !self.is_ruled() && !self.name.is_empty()
    }

    fn rules(&self) -> Retention {
        let rules = self.name.iter().fold(Retention::default(), |rules, name| rules.give_up(name));
        if self.is_of_names_alone() {
            return rules.names_only(true);
        }
        rules
            .snapshots_kept(self.snapshots.map_or(2, |count| count as usize))
            .snapshots_kept_for(self.age.unwrap_or_default())
            .log_kept(self.log_bytes.unwrap_or_default())
    }

    /// Prints the result. `kept` contains the snapshots that remain because of other rules although their names are
    /// released.
    fn report(&self, pruned: &PruneReport, kept: &[SnapshotId], out: &mut Output) -> Result<(), Failure> {
        if self.json {
            let file = |(file, bytes): &(FileName, u64)| json!({ "file": file.to_string(), "bytes": bytes });
            return out.line(object! {
                "removed": self.yes,
                "snapshots": pruned.snapshots.iter().map(|info| info.id.0).collect::<Vec<_>>(),
                "held": pruned.held.iter().map(|id| id.0).collect::<Vec<_>>(),
                "kept": kept.iter().map(|id| id.0).collect::<Vec<_>>(),
                "files": pruned.files.iter().map(file).collect::<Vec<_>>(),
                "bytes": pruned.bytes(),
            });
        }
        for info in &pruned.snapshots {
            let name = info.name.as_ref().map_or(String::new(), |name| format!(", {name:?}"));
            out.line(format_args!("snapshot {}: lsn {}{name}", info.id, info.end))?;
        }
        for id in &pruned.held {
            out.line(format_args!("snapshot {id} is kept: a reader uses it"))?;
        }
        for id in kept {
            let why = match self.is_of_names_alone() {
                true => "it is the newest snapshot",
                false => "another rule keeps it",
            };
            out.line(format_args!("snapshot {id} is kept: {why}"))?;
        }
        for (file, bytes) in &pruned.files {
            out.line(format_args!("{file}  {bytes}"))?;
        }
        let (files, bytes) = (pruned.files.len(), pruned.bytes());
        match self.yes {
            true => out.line(format_args!("removed {files} files of {bytes} bytes")),
            false => out
                .line(format_args!("would remove {files} files of {bytes} bytes; use --yes to remove them")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn age_parses_number_and_unit() {
        for (text, seconds) in [("0s", 0), ("90s", 90), ("2m", 120), ("3h", 10800), ("7d", 604_800)] {
            assert_eq!(parse_age(text), Ok(Duration::from_secs(seconds)));
        }
        for text in ["", "7", "d", "-1d", "1.5h", "1w", "5é", "18446744073709551615d"] {
            assert!(parse_age(text).is_err(), "{text}");
        }
    }
}
