//! `remanent log` lists the frames of the log.

use std::collections::BTreeMap;
use std::path::PathBuf;

use remanent_format::frame::{FrameHeader, FrameKind};
use remanent_format::log::{LogEnd, TornTail};
use remanent_format::op::{Op, decode_payload};
use remanent_format::{Damage, Defect, FileName, PageId};
use serde_json::{Map, json};

use crate::cli::exit::{Ending, Failure, Outcome};
use crate::cli::json::object;
use crate::cli::output::Output;
use crate::read::partial_view::PartialView;
use crate::read::scan::{Chain, Scan, ScannedFrame};
use crate::read::store_dir::StoreDir;

const EXAMPLES: &str = "\
A frame is a committed batch, or a seal at the end of a busy period. CHAIN is the relation of a frame to the previous \
frame: it `follows` that frame, is the `first` kept frame, was `left behind` by a later open, or its chain is \
`broken`. TORN marks frames that the next open for writing removes. DURABLE is the newest batch that was known to \
survive a power cut when the frame was written.

Examples:
  remanent log store --from 100 --to 120    list 21 batches
  remanent log store --page 17              list every batch that changed page 17
  remanent log store | tail -n 1            show how the log ends";

/// List the frames of a store's log
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Log {
    /// Store directory, which is never modified
    dir: PathBuf,
    /// List only frames of this batch and later ones
    #[arg(long, value_name = "LSN")]
    from: Option<u64>,
    /// List only frames of this batch and earlier ones
    #[arg(long, value_name = "LSN")]
    to: Option<u64>,
    /// List only batches that change this page
    #[arg(long, value_name = "PAGE")]
    page: Option<u64>,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

/// The decoded payload of a frame.
struct FrameContent {
    /// Number of operations of each kind.
    kinds: BTreeMap<&'static str, u64>,
    /// Distinct pages that the frame changes, in ascending order.
    pages: Vec<PageId>,
    note: Option<String>,
}

impl Log {
    pub fn run(&self, out: &mut Output) -> Outcome {
        let dir = StoreDir::open(&self.dir)?;
        let view = PartialView::take(&dir)?;
        let end = view.end();
        let torn = end.and_then(|end| end.torn.as_ref());
        if !self.json {
            out.line(format_args!(
                "{:>10} {:>5} {:>25} {:>10} {:>10}  {:<10} {}",
                "LSN", "INC", "AT", "BYTES", "DURABLE", "CHAIN", "CONTENT"
            ))?;
        }
        for frame in Scan::new(&dir, view.survey.store.store, &view.survey.log) {
            let lsn = frame.header.lsn.0;
            if self.from.is_some_and(|from| lsn < from) || self.to.is_some_and(|to| lsn > to) {
                continue;
            }
            let content = content(&frame);
            let about =
                |page: u64| content.as_ref().is_ok_and(|content| content.pages.contains(&PageId(page)));
            if self.page.is_some_and(|page| !about(page)) {
                continue;
            }
            let torn = torn.is_some_and(|torn| is_torn(torn, &frame.header));
            if self.json {
                out.line(frame_json(&frame, &content, torn))?;
            } else {
                out.line(frame_line(&frame, &content, torn))?;
            }
        }
        self.report_end(&view, end, out)?;
        Ok(if view.damage.is_empty() { Ending::Fine } else { Ending::Difference })
    }

    /// Prints damage and the end of the log. The JSON output contains an object for the end only if there is a torn
    /// tail.
    fn report_end(&self, view: &PartialView, end: Option<&LogEnd>, out: &mut Output) -> Result<(), Failure> {
        for damage in &view.damage {
            match self.json {
                true => out.line(damage_json(damage))?,
                false => out.line(format_args!("DAMAGE: {damage}"))?,
            }
        }
        match end {
            Some(LogEnd { torn: Some(torn), .. }) if self.json => {
                out.line(object! { "kind": "torn_tail", "torn_tail": torn_json(Some(torn)) })
            }
            Some(end) if !self.json => out.line(end_line(end)),
            _ => Ok(()),
        }
    }
}

fn content(frame: &ScannedFrame) -> Result<FrameContent, Defect> {
    let payload = frame.payload.as_ref().map_err(Clone::clone)?;
    let mut content = FrameContent { kinds: BTreeMap::new(), pages: Vec::new(), note: None };
    if frame.header.kind == FrameKind::Seal {
        return Ok(content);
    }
    for op in decode_payload(payload)?.iter().map(|at| &at.op) {
        if let Op::Note { text } = op {
            content.note = Some((*text).to_owned());
        }
        *content.kinds.entry(op.kind()).or_default() += 1;
        content.pages.extend(op.page());
    }
    content.pages.sort_unstable();
    content.pages.dedup();
    Ok(content)
}

/// Returns true if a frame is in the torn tail.
fn is_torn(torn: &TornTail, header: &FrameHeader) -> bool {
    (header.segment, header.offset) >= (torn.segment, torn.offset)
}

fn kind(header: &FrameHeader) -> &'static str {
    match header.kind {
        FrameKind::Batch => "batch",
        FrameKind::Seal => "seal",
    }
}

fn chain(chain: &Chain) -> &'static str {
    match chain {
        Chain::Follows => "follows",
        Chain::First => "first",
        Chain::Broken(_) => "broken",
        Chain::LeftBehind { .. } => "left behind",
    }
}

/// Returns the defect of a frame, or `None` if the frame is valid.
fn defect<'f>(frame: &'f ScannedFrame, content: &'f Result<FrameContent, Defect>) -> Option<&'f Defect> {
    match &frame.chain {
        Chain::Broken(defect) => Some(defect),
        _ => content.as_ref().err(),
    }
}

fn frame_json(frame: &ScannedFrame, content: &Result<FrameContent, Defect>, torn: bool) -> serde_json::Value {
    let header = &frame.header;
    let kinds = content.as_ref().map_or_else(
        |_| Map::new(),
        |content| content.kinds.iter().map(|(kind, count)| ((*kind).to_owned(), (*count).into())).collect(),
    );
    let pages: Vec<u64> = content.iter().flat_map(|content| &content.pages).map(|page| page.0).collect();
    object! {
        "lsn": header.lsn.0,
        "kind": kind(header),
        "kinds": kinds,
        "pages": pages,
        "bytes": header.frame_len(),
        "incarnation": header.incarnation.number,
        "incarnation_random": header.incarnation.random,
        "segment": header.segment,
        "offset": header.offset,
        "durable": header.durable.0,
        "chain": chain(&frame.chain),
        "torn": torn,
        "defect": defect(frame, content).map(ToString::to_string),
        "note": content.as_ref().ok().and_then(|content| content.note.clone()),
    }
}

fn frame_line(frame: &ScannedFrame, content: &Result<FrameContent, Defect>, torn: bool) -> String {
    let header = &frame.header;
    let mut words = Vec::new();
    if torn {
        words.push("TORN".to_owned());
    }
    if header.kind == FrameKind::Seal {
        words.push("seal".to_owned());
    }
    if let Ok(content) = content {
        // The text of a note is printed below, so notes are not counted here.
        let kinds = content.kinds.iter().filter(|(kind, _)| **kind != "note");
        words.extend(kinds.map(|(kind, count)| format!("{count} {kind}")));
        words.extend(content.note.iter().map(|note| format!("note {note:?}")));
    }
    if let Some(defect) = defect(frame, content) {
        words.push(format!("({defect})"));
    }
    format!(
        "{:>10} {:>5} {:>25} {:>10} {:>10}  {:<10} {}",
        header.lsn,
        header.incarnation.number,
        format!("{:x}.log+{}", header.segment, header.offset),
        header.frame_len(),
        header.durable,
        chain(&frame.chain),
        words.join(", ")
    )
}

/// Returns the location of the torn tail as JSON, or null if there is no torn tail.
pub fn torn_json(torn: Option<&TornTail>) -> serde_json::Value {
    torn.map_or(serde_json::Value::Null, |torn| {
        json!({
            "file": FileName::Segment(torn.segment).to_string(),
            "offset": torn.offset,
            "lsn_first": torn.first.0,
            "lsn_last": torn.last.0,
            "defect": torn.defect.to_string(),
        })
    })
}

/// Returns a line of text that describes the torn tail.
pub fn torn_line(torn: &TornTail) -> String {
    let batches = match (torn.first, torn.last) {
        (first, last) if first == last => format!("lsn {first}"),
        (first, last) => format!("lsn {first} to {last}"),
    };
    format!(
        "torn tail at {} offset {} ({batches}), never acknowledged as durable: {}",
        FileName::Segment(torn.segment),
        torn.offset,
        torn.defect
    )
}

fn end_line(end: &LogEnd) -> String {
    let torn = end.torn.as_ref().map(|torn| format!("; {}", torn_line(torn))).unwrap_or_default();
    format!("The log ends with lsn {}, durable up to lsn {}{torn}.", end.accepted.lsn, end.proven.lsn)
}

pub fn damage_json(damage: &Damage) -> serde_json::Value {
    object! {
        "kind": "damage",
        "file": damage.file.to_string(),
        "offset": damage.offset,
        "lsn": damage.lsn.map(|lsn| lsn.0),
        "defect": damage.defect.to_string(),
    }
}
