//! `remanent versions` lists the versions that can be loaded, oldest first.
//!
//! The state after each batch of the kept log is a version, and so is the state at the end of an earlier kept snapshot.
//! While a save of several batches is in progress, the root contains a mark. States with this mark are not versions.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use indicatif::HumanDuration;
use remanent_format::frame::FrameKind;
use remanent_format::manifest::Manifest;
use remanent_format::op::{Op, decode_payload};
use remanent_format::state::reach::{Reach, Role};
use remanent_format::value::{Metadata, Value};
use remanent_format::{FileName, Lsn};
use serde_json::json;

use crate::cli::exit::{Ending, Failure, Outcome};
use crate::cli::json::object;
use crate::cli::output::Output;
use crate::cli::table::with_header;
use crate::read::partial_view::PartialView;
use crate::read::scan::{Chain, Scan, ScannedFrame};
use crate::read::store_dir::StoreDir;
use crate::weights::points;

const EXAMPLES: &str = "\
Lists all versions that `remanent.torch.save_file`, `remanent.torch.Checkpointer` and `remanent import` have saved, \
and every other batch whose state can be read. For a run of several ranks, use the directory that contains `points` \
and `rank-0`. BYTES is the number of bytes that the version's batch wrote: its frame in the log, and the images that \
it names.

Examples:
  remanent versions weights
  remanent versions weights --json | jq .lsn
  remanent export weights then.safetensors --at lsn:7";

/// Root entry that marks the states between the batches of one save.
const SAVING: &str = "saving";
/// Root entry that contains the step of a run.
const STEP: &str = "step";
/// Root entry that contains the time at which a version was saved, in seconds since 1970. The entry is not part of the
/// saved state.
pub(crate) const SAVED_AT: &str = "saved at";
/// Prefix of the names that a run assigns to snapshots automatically.
const OWN_NAME: &str = "step ";

/// List the versions that can be loaded
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Versions {
    /// Directory of a store or of a run of several ranks, which is never modified
    dir: PathBuf,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

/// A version of the weights that can be loaded.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Version {
    /// The Lsn of the batch that completed the version. For a run of several ranks, the Lsn in the store of the first
    /// rank.
    pub lsn: u64,
    /// The step of the run, or `None` if the version does not belong to a run.
    pub step: Option<u64>,
    /// The name of the snapshot that contains the version, or `None` if no named snapshot contains it.
    pub name: Option<String>,
    /// The note that was saved with the version. `None` if there was no note, or if the batch is no longer in the log.
    pub note: Option<String>,
    /// The time at which the version was saved, in milliseconds since 1970. `None` if the time is not known.
    pub created_unix_ms: Option<u64>,
    /// The number of bytes that the version's batch wrote. `None` if the batch is no longer in the log.
    pub bytes: Option<u64>,
    /// The Lsn of the version in the store of each rank. Empty unless the run has several ranks.
    pub ranks: Vec<u64>,
}

impl Versions {
    pub fn run(&self, out: &mut Output) -> Outcome {
        let (found, damage) = find(&self.dir)?;
        if self.json {
            for version in &found {
                out.line(version.json())?;
            }
        } else if found.is_empty() {
            out.line("no versions")?;
        } else {
            out.line(table(&found))?;
        }
        out.flush()?;
        if damage.is_empty() { Ok(Ending::Fine) } else { Err(Failure::Damage(damage.join("\n"))) }
    }
}

/// Returns the versions in the directory of a store, or of a run of several ranks, oldest first.
///
/// # Errors
///
/// Returns [`Failure::Environment`] if there is no store, or [`Failure::Damage`] if a damaged file hides versions.
pub fn versions(dir: &Path) -> Result<Vec<Version>, Failure> {
    let (found, damage) = find(dir)?;
    if damage.is_empty() { Ok(found) } else { Err(Failure::Damage(damage.join("\n"))) }
}

fn find(path: &Path) -> Result<(Vec<Version>, Vec<String>), Failure> {
    let is_store = path.join(FileName::Store.name()).is_file();
    if let Some(folder) = points::folder(path).filter(|_| !is_store) {
        let (points, damage) = points::read(&folder)?;
        return Ok((points.into_iter().map(of_ranks).collect(), damage));
    }
    let dir = StoreDir::open(path)?;
    let view = PartialView::take(&dir)?;
    let found = of_store(&dir, &view)?;
    Ok((found, view.damage.iter().map(ToString::to_string).collect()))
}

fn of_ranks(point: points::Point) -> Version {
    let ranks: Vec<u64> = point.parts.iter().map(|(_, _, lsn)| *lsn).collect();
    Version {
        lsn: ranks.first().copied().unwrap_or_default(),
        step: Some(point.step),
        name: point.name,
        created_unix_ms: unix_ms(point.created),
        ranks,
        ..Version::default()
    }
}

/// Returns the versions of one store. The end of each kept snapshot is a version, and so is the state after each batch
/// of the kept log.
fn of_store(dir: &StoreDir, view: &PartialView) -> Result<Vec<Version>, Failure> {
    let Some(end) = view.end() else { return Ok(Vec::new()) };
    let reach = Reach::of(&view.survey, &end.verified);
    let mut found: BTreeMap<Lsn, Version> = BTreeMap::new();
    let mut root = Metadata::new();
    let opens_at = reach.opens_at();
    for manifest in view.survey.readable().filter(|link| reach.role(link.snapshot) != Role::Link) {
        if Some(manifest.end) == opens_at {
            root = (*manifest.root).clone();
        }
        if !manifest.root.contains_key(SAVING) {
            let version = of_snapshot(manifest);
            found
                .entry(manifest.end)
                .and_modify(|other| other.name = version.name.clone().or(other.name.take()));
            found.entry(manifest.end).or_insert(version);
        }
    }
    let newest = view.lsn();
    let mut roots: BTreeMap<Lsn, Metadata> = opens_at.map(|lsn| (lsn, root.clone())).into_iter().collect();
    for frame in Scan::new(dir, view.survey.store.store, &view.survey.log) {
        let lsn = frame.header.lsn;
        let is_batch = frame.header.kind == FrameKind::Batch && lsn <= newest;
        if !is_batch || !matches!(frame.chain, Chain::First | Chain::Follows) {
            continue;
        }
        let Some(batch) = Batch::of(&frame) else { continue };
        if opens_at.is_some_and(|opens_at| lsn > opens_at) {
            batch.apply(&mut root, &roots);
            roots.insert(lsn, root.clone());
            if root.contains_key(SAVING) {
                continue;
            }
            found.entry(lsn).or_insert_with(|| Version {
                lsn: lsn.0,
                step: step(&root),
                ..Version::default()
            });
        }
        if let Some(version) = found.get_mut(&lsn) {
            version.note = batch.note;
            version.bytes = Some(batch.bytes);
            version.created_unix_ms = batch.saved_at.or(version.created_unix_ms);
        }
    }
    Ok(found.into_values().filter(|version| version.lsn > 0).collect())
}

fn of_snapshot(manifest: &Manifest) -> Version {
    let step = step(&manifest.root);
    let name = manifest.name.clone();
    Version {
        lsn: manifest.end.0,
        step,
        name: name.filter(|name| step.is_none() || !name.starts_with(OWN_NAME)),
        created_unix_ms: saved_at(&manifest.root).or(Some(manifest.created_unix_ms)),
        ..Version::default()
    }
}

/// The parts of a batch that describe the version after the batch.
struct Batch {
    note: Option<String>,
    bytes: u64,
    saved_at: Option<u64>,
    /// Root entries that the batch sets, or removes if the value is `None`.
    root: Vec<(String, Option<Value>)>,
    /// Lsn of the state that the batch restores, or `None` if the batch is not a restore.
    restored: Option<Lsn>,
}

impl Batch {
    /// Decodes the batch in a frame. Returns `None` if the payload is invalid.
    fn of(frame: &ScannedFrame) -> Option<Self> {
        let payload = frame.payload.as_ref().ok()?;
        let mut batch = Self {
            note: None,
            bytes: frame.header.frame_len(),
            saved_at: None,
            root: Vec::new(),
            restored: None,
        };
        for at in decode_payload(payload).ok()? {
            match at.op {
                Op::Note { text } => batch.note = Some(text.to_owned()),
                Op::Image { image, .. } => {
                    let stored = image.files().map(|(_, stored_len)| stored_len);
                    batch.bytes = stored.fold(batch.bytes, u64::saturating_add);
                }
                Op::SetRoot { name, value } => {
                    if name == SAVED_AT {
                        batch.saved_at = milliseconds(&value);
                    }
                    batch.root.push((name, Some(value)));
                }
                Op::RemoveRoot { name } => batch.root.push((name.to_owned(), None)),
                Op::Restore { restored, .. } => batch.restored = Some(restored),
                _ => {}
            }
        }
        Some(batch)
    }

    /// Applies the changes of the batch to `root`. `roots` contains the roots of earlier states, for a batch that
    /// restores one.
    fn apply(&self, root: &mut Metadata, roots: &BTreeMap<Lsn, Metadata>) {
        if let Some(restored) = self.restored {
            *root = roots.get(&restored).cloned().unwrap_or_default();
        }
        for (name, value) in &self.root {
            match value {
                Some(value) => root.insert(name.clone(), value.clone()),
                None => root.remove(name),
            };
        }
    }
}

fn step(root: &Metadata) -> Option<u64> {
    match root.get(STEP) {
        Some(Value::U64(step)) => Some(*step),
        Some(Value::I64(step)) => u64::try_from(*step).ok(),
        _ => None,
    }
}

fn saved_at(root: &Metadata) -> Option<u64> {
    root.get(SAVED_AT).and_then(milliseconds)
}

fn milliseconds(value: &Value) -> Option<u64> {
    if let Value::F64(seconds) = value { unix_ms(*seconds) } else { None }
}

/// Converts seconds since 1970 to milliseconds. Returns `None` if the value is not a valid time.
fn unix_ms(seconds: f64) -> Option<u64> {
    Duration::try_from_secs_f64(seconds).ok().and_then(|time| u64::try_from(time.as_millis()).ok())
}

impl Version {
    fn json(&self) -> serde_json::Value {
        object! {
            "lsn": self.lsn,
            "step": self.step,
            "name": self.name,
            "note": self.note,
            "created_unix_ms": self.created_unix_ms,
            "bytes": self.bytes,
            "ranks": if self.ranks.is_empty() { serde_json::Value::Null } else { json!(self.ranks) },
        }
    }
}

fn table(versions: &[Version]) -> String {
    let mut table = with_header(["LSN", "STEP", "BYTES", "RANKS", "SAVED", "NAME", "NOTE"], 0..4);
    let text = |value: Option<u64>| value.map(|value| value.to_string()).unwrap_or_default();
    let shown = |text: &Option<String>| text.as_deref().unwrap_or_default().escape_debug().to_string();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    for version in versions {
        let age = |ms| format!("{} ago", HumanDuration(now.saturating_sub(Duration::from_millis(ms))));
        let ranks = Some(version.ranks.len() as u64).filter(|count| *count > 0);
        table.add_row([
            version.lsn.to_string(),
            text(version.step),
            text(version.bytes),
            text(ranks),
            version.created_unix_ms.map(age).unwrap_or_default(),
            shown(&version.name),
            shown(&version.note),
        ]);
    }
    table.trim_fmt()
}
