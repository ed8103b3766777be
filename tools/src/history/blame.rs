//! `remanent blame`: the batches that gave an element its value.

use std::path::PathBuf;
use std::sync::Arc;

use comfy_table::Table;
use remanent_format::frame::FrameKind;
use remanent_format::image::ImageRef;
use remanent_format::image::proven::ProvenImage;
use remanent_format::log::LogWalk;
use remanent_format::manifest::{Manifest, ManifestEntry};
use remanent_format::op::{Op, decode_payload};
use remanent_format::state::window::PageWindow;
use remanent_format::state::window::load_window;
use remanent_format::{Damage, Defect, FileName, Lsn, Metadata};

use crate::cli::exit::{Ending, Failure, Outcome};
use crate::cli::json;
use crate::cli::json::object;
use crate::cli::memory::MemoryLimit;
use crate::cli::output::Output;
use crate::cli::table::with_header;
use crate::read::states::{KeptStates, StateName, damaged};
use crate::read::store_dir::StoreDir;
use crate::weights::element::{Element, ElementName};

const EXAMPLES: &str = "\
KEY is a tensor's full name, a page's key, key:KEY, or page:N; INDEX has a number for each dimension, or is one number \
that counts all elements from 0. Only batches that changed the value are listed. The history goes back as far as \
the log is kept, and by the kept snapshots before that.

Examples:
  remanent blame store 'encoder.layer.0.output.dense.weight[12,7]'
  remanent blame store 'encoder.layer.0.output.dense.bias[7]' --json";

/// List the batches that changed one element, with its values
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Blame {
    /// The store's directory; it is only read
    dir: PathBuf,
    /// The element to look for
    #[arg(value_name = "KEY[INDEX]")]
    element: ElementName,
    /// The last state that is looked at: lsn:N, snapshot:N or name:S [default: the newest]
    #[arg(long)]
    at: Option<StateName>,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    memory: MemoryLimit,
}

/// How a value came to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// A batch changed it.
    Batch,
    /// A restore of an older state.
    Restore,
    /// It was so in a snapshot; the batches before are not kept any more.
    Snapshot,
}

/// A change of the element.
struct Event {
    lsn: Lsn,
    cause: Cause,
    before: Option<Vec<u8>>,
    after: Option<Vec<u8>>,
    note: Option<String>,
    /// The root after the batch, where it is known.
    root: Option<Arc<Metadata>>,
}

impl Blame {
    /// Runs `remanent blame`.
    pub fn run(&self, out: &mut Output) -> Outcome {
        let dir = StoreDir::open(&self.dir)?;
        let (element, events) = KeptStates::look(&dir, |past| {
            let until = past.lsn(self.at.as_ref())?;
            let table = past.table(until)?;
            let none =
                || Failure::Environment(format!("there is no tensor, key or page {:?}", self.element.page));
            let info = table.pages().find(|info| self.element.means(info)).ok_or_else(none)?;
            let element = self.element.find(&info).map_err(Failure::Environment)?;
            // However long the page is on its way, nothing but the element is needed.
            let needed = element.width as u64;
            if needed > self.memory.given() {
                let defect = Defect::Memory { needed };
                return Err(Failure::Environment(defect.to_string()));
            }
            let events = History { past, element: &element, until: table.lsn() }.events()?;
            Ok((element, events))
        })?;
        if self.json {
            for event in &events {
                out.line(event_json(&element, event))?;
            }
        } else {
            out.line(event_table(&element, &events).trim_fmt())?;
        }
        Ok(Ending::Fine)
    }
}

/// The history that is searched.
struct History<'h> {
    past: &'h KeptStates<'h>,
    element: &'h Element,
    until: Lsn,
}

/// The element on its way through the log.
struct Follower<'h> {
    history: &'h History<'h>,
    /// The element's bytes in its page; `None` while there is no page.
    window: Option<PageWindow>,
    /// The batch up to which the bytes have everything.
    window_lsn: Lsn,
    root: Arc<Metadata>,
    /// The batch from which on the root is known.
    root_lsn: Lsn,
    events: Vec<Event>,
}

impl<'h> History<'h> {
    /// The changes, the oldest first.
    fn events(&'h self) -> Result<Vec<Event>, Failure> {
        let survey = &self.past.survey;
        let whole = survey.links.keys().filter_map(|snapshot| survey.snapshot(*snapshot).ok());
        let snapshots: Vec<Arc<Manifest>> = whole.filter(|manifest| manifest.end <= self.until).collect();
        // From as far back as the log is kept without a gap.
        let beginning = survey.log.beginning().map(|_| None);
        let starts = beginning.into_iter().chain(snapshots.iter().map(Some));
        let mut stopped_by = Defect::Missing.at_lsn(FileName::Segment(1), 0, Lsn(1));
        for start in starts {
            let mut follower = Follower::new(self);
            // Older snapshots tell of the time before.
            let older =
                |manifest: &&Arc<Manifest>| start.is_some_and(|start| manifest.snapshot <= start.snapshot);
            let attempt = snapshots
                .iter()
                .filter(older)
                .try_for_each(|manifest| follower.begin(manifest))
                .and_then(|()| follower.follow(start));
            match attempt {
                Ok(()) => return Ok(follower.events),
                Err(damage) => stopped_by = damage,
            }
        }
        Err(damaged(stopped_by))
    }

    /// The page as a manifest names it.
    fn named(&self, entry: &ManifestEntry) -> Result<PageWindow, Damage> {
        self.load(entry.image, entry.len)
    }

    /// The page as an image has it.
    fn load(&self, image: Option<ImageRef>, len: u64) -> Result<PageWindow, Damage> {
        let dir = self.past.dir();
        // Proven whole, piece by piece, before any byte of it counts (I9).
        let image = image.map(|image| ProvenImage::prove(dir, &image, len)).transpose()?;
        load_window(dir, len, image.as_ref(), self.element.range())
    }
}

impl<'h> Follower<'h> {
    fn new(history: &'h History<'h>) -> Self {
        Self {
            history,
            window: None,
            window_lsn: Lsn(0),
            root: Arc::default(),
            root_lsn: Lsn(0),
            events: Vec::new(),
        }
    }

    /// The element's bytes now.
    fn value(&self) -> Option<Vec<u8>> {
        let bytes = self.window.as_ref()?.bytes();
        // Fewer where the page ends before the element does.
        (bytes.len() == self.history.element.width).then(|| bytes.to_vec())
    }

    /// Notes an event if the value has changed.
    fn note(&mut self, lsn: Lsn, cause: Cause, before: Option<Vec<u8>>, note: Option<String>) {
        let after = self.value();
        if before != after {
            let root = (lsn >= self.root_lsn).then(|| self.root.clone());
            self.events.push(Event { lsn, cause, before, after, note, root });
        }
    }

    /// Takes up a snapshot's page.
    fn begin(&mut self, manifest: &Manifest) -> Result<(), Damage> {
        let before = self.value();
        let page = self.history.element.info.page;
        let entry = manifest.entries.iter().find(|entry| entry.page == page);
        self.window = entry.map(|entry| self.history.named(entry)).transpose()?;
        (self.root, self.root_lsn) = (manifest.root.clone(), manifest.end);
        self.window_lsn = entry.map_or(Lsn(0), |entry| entry.lsn);
        self.note(self.window_lsn, Cause::Snapshot, before, None);
        Ok(())
    }

    /// Follows the log from a snapshot, or from its beginning.
    fn follow(&mut self, start: Option<&Arc<Manifest>>) -> Result<(), Damage> {
        let (dir, survey) = (self.history.past.dir(), &self.history.past.survey);
        let missing = Defect::Missing.at_lsn(FileName::Segment(1), 0, Lsn(1));
        let from = match start {
            Some(manifest) => manifest.redo,
            None => survey.log.beginning().ok_or(missing)?,
        };
        let mut walk = LogWalk::new(dir, &survey.log, from, survey.mark())?;
        while walk.point().lsn < self.history.until {
            let Some(frame) = walk.next()? else { break };
            if frame.header.kind == FrameKind::Batch {
                let (lsn, file) = (frame.header.lsn, FileName::Segment(frame.header.segment));
                self.batch(lsn, frame.payload, file, frame.header.offset)?;
            }
        }
        Ok(())
    }

    fn batch(&mut self, lsn: Lsn, payload: &[u8], file: FileName, offset: u64) -> Result<(), Damage> {
        let at = |defect: Defect| defect.at_lsn(file, offset, lsn);
        let ops = decode_payload(payload).map_err(at)?;
        let before = self.value();
        let (mut note, mut cause) = (None, Cause::Batch);
        for op in ops.iter().map(|at| &at.op) {
            match op {
                Op::Note { text } => note = Some((*text).to_owned()),
                // The root of a snapshot is its state's at the end.
                Op::SetRoot { name, value } if lsn > self.root_lsn => {
                    Arc::make_mut(&mut self.root).insert(name.clone(), value.clone());
                }
                Op::RemoveRoot { name } if lsn > self.root_lsn => {
                    Arc::make_mut(&mut self.root).remove(*name);
                }
                Op::Restore { table, table_crc, .. } => {
                    let dir = self.history.past.dir();
                    let table = self.history.past.survey.read_table(dir, *table, *table_crc)?;
                    let page = self.history.element.info.page;
                    let entry = table.entries.iter().find(|entry| entry.page == page);
                    self.window = entry.map(|entry| self.history.named(entry)).transpose()?;
                    (self.root, self.window_lsn, cause) = (table.root.clone(), lsn, Cause::Restore);
                }
                op if op.page() == Some(self.history.element.info.page) && lsn > self.window_lsn => {
                    self.apply(op)?;
                }
                _ => {}
            }
        }
        self.note(lsn, cause, before, note);
        Ok(())
    }

    fn apply(&mut self, op: &Op<'_>) -> Result<(), Damage> {
        match op {
            Op::Create { .. } => self.window = Some(self.history.load(None, 0)?),
            Op::Image { len, image, .. } => self.window = Some(self.history.load(Some(*image), *len)?),
            Op::Delete { .. } => self.window = None,
            _ => {}
        }
        if let Some(window) = &mut self.window {
            let len = window.page_len();
            let is_within =
                |(start, count): (u64, u64)| start.checked_add(count).is_some_and(|end| end <= len);
            // The way to this state was resolved before, so the operation fits the page; but the files may be
            // others by now.
            if op.range().is_none_or(is_within) {
                window.apply(op);
            }
        }
        Ok(())
    }
}

fn event_json(element: &Element, event: &Event) -> serde_json::Value {
    let value = |bytes: &Option<Vec<u8>>| bytes.as_ref().map(|bytes| element.json(bytes));
    object! {
        "lsn": event.lsn.0,
        "cause": match event.cause {
            Cause::Batch => "batch",
            Cause::Restore => "restore",
            Cause::Snapshot => "snapshot",
        },
        "before": value(&event.before),
        "after": value(&event.after),
        "root": event.root.as_ref().map(|root| json::metadata(root)),
        "note": event.note,
    }
}

fn event_table(element: &Element, events: &[Event]) -> Table {
    let mut table = with_header(["LSN", "BEFORE", "AFTER", "ROOT", "NOTE"], 0..3);
    for event in events {
        let value =
            |bytes: &Option<Vec<u8>>| bytes.as_ref().map_or("none".to_owned(), |bytes| element.text(bytes));
        let root = event.root.iter().flat_map(|root| root.iter());
        let root: Vec<String> = root.map(|(name, value)| format!("{name}={}", json::value(value))).collect();
        let note = match event.cause {
            Cause::Batch => event.note.clone().unwrap_or_default(),
            Cause::Restore => "(an older state was restored)".to_owned(),
            Cause::Snapshot => "(so in a snapshot; the log before is not kept)".to_owned(),
        };
        table.add_row([
            event.lsn.to_string(),
            value(&event.before),
            value(&event.after),
            root.join(" "),
            note.escape_debug().to_string(),
        ]);
    }
    table
}
