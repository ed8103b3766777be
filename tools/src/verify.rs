//! `remanent verify`: reads everything that the store needs, and says of each defect what it costs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use remanent_format::image::{ImageFileHeader, ImageFileHeaderRaw, ImageRef};
use remanent_format::manifest::Manifest;
use remanent_format::rebuild::check_image;
use remanent_format::{Damage, Defect, FileName, Lsn, ReadAt, SnapshotId};

use crate::exit::{Ending, Failure, Outcome};
use crate::json::object;
use crate::log::{torn_json, torn_line};
use crate::memory::Memory;
use crate::output::Output;
use crate::store_dir::StoreDir;
use crate::view::View;

const EXAMPLES: &str = "\
Checked are STORE, both copies of every manifest, every image that a snapshot names, and the log from each \
snapshot to its end. A torn tail is what a crash leaves and no damage. Each finding says what it costs: \
nothing, time (recovery takes an older snapshot), or the store.

Examples:
  remanent verify store && echo sound
  remanent verify store --json";

/// Check every byte that the store needs
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Verify {
    /// The store's directory; it is only read
    dir: PathBuf,
    /// One JSON object a line: the findings, then a summary
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    memory: Memory,
}

/// A defect, and what it costs.
struct Finding {
    damage: Damage,
    cost: String,
}

/// A place from which recovery may start: a snapshot, or the log's beginning.
struct Start {
    name: String,
    /// What keeps recovery from starting here.
    blocked_by: Vec<Damage>,
    /// What keeps the store from going back to just this snapshot.
    beside: Vec<Damage>,
}

/// The images read so far, with what is wrong with them.
struct Images<'d> {
    dir: &'d StoreDir,
    read: BTreeMap<(u64, u64, u64, u32), Option<Defect>>,
    bytes: u64,
}

impl Verify {
    /// Checks.
    pub fn run(&self, out: &mut Output) -> Outcome {
        let dir = StoreDir::open(&self.dir)?;
        let view = View::take(&dir)?;
        let mut images = Images { dir: &dir, read: BTreeMap::new(), bytes: 0 };
        let starts = starts(&dir, &view, &mut images);
        let opens_from = starts.iter().position(|start| start.blocked_by.is_empty());
        let mut findings = findings(&dir, &view, &starts, opens_from, &images);
        if let Some(Err(damage)) =
            view.state.as_ref().map(|state| state.check_page_bytes(self.memory.limit()))
        {
            let cost =
                "nothing if there is memory for it elsewhere: `--memory-max` raises the limit".to_owned();
            findings.push(Finding { damage, cost });
        }
        for finding in &findings {
            self.report(finding, out)?;
        }
        let from = opens_from.map(|index| starts[index].name.as_str());
        self.summarize(&view, &images, findings.len(), from, dir.holder(), out)?;
        Ok(if findings.is_empty() { Ending::Fine } else { Ending::Difference })
    }

    fn report(&self, finding: &Finding, out: &mut Output) -> Result<(), Failure> {
        let Finding { damage, cost } = finding;
        if !self.json {
            return out.line(format_args!("{damage}\n    costs {cost}"));
        }
        out.line(object! {
            "kind": "finding",
            "file": damage.file.to_string(),
            "offset": damage.offset,
            "lsn": damage.lsn.map(|lsn| lsn.0),
            "defect": damage.defect.to_string(),
            "cost": cost,
        })
    }

    fn summarize(
        &self,
        view: &View,
        images: &Images<'_>,
        findings: usize,
        opens_from: Option<&str>,
        holder: Option<u32>,
        out: &mut Output,
    ) -> Result<(), Failure> {
        let torn = view.end().and_then(|end| end.torn.as_ref());
        let batches = view.state.as_ref().map_or(0, |state| state.batches);
        if self.json {
            return out.line(object! {
                "kind": "summary",
                "findings": findings,
                "opens_from": opens_from,
                "lsn": view.lsn().0,
                "durable": view.durable().0,
                "pages": view.pages().count(),
                "images": images.read.len(),
                "image_bytes": images.bytes,
                "batches": batches,
                "torn_tail": torn_json(torn),
                "open_in_process": holder,
            });
        }
        if let Some(process) = holder {
            out.line(format_args!(
                "note: process {process} has the store open; what it writes meanwhile may look damaged"
            ))?;
        }
        if let Some(torn) = torn {
            out.line(format_args!("note: {}", torn_line(torn)))?;
        }
        let read = format!(
            "{} images ({} bytes) and {batches} batches read, lsn {}, durable up to {}",
            images.read.len(),
            images.bytes,
            view.lsn(),
            view.durable()
        );
        match (findings, opens_from) {
            (0, Some(from)) => out.line(format_args!("clean: {read}; recovery starts from {from}")),
            (_, Some(from)) => {
                out.line(format_args!("findings: {findings}; {read}; recovery starts from {from}"))
            }
            (_, None) => out.line(format_args!("findings: {findings}; {read}; the store cannot be opened")),
        }
    }
}

/// Every place to start from, the best first, with all that stands in its way.
fn starts(dir: &StoreDir, view: &View, images: &mut Images<'_>) -> Vec<Start> {
    let snapshots = view.survey.links.keys().rev().map(|snapshot| Some(*snapshot)).chain([None]);
    let check = |(candidate, snapshot): (Result<Option<Arc<Manifest>>, Damage>, Option<SnapshotId>)| {
        let mut start = Start { name: start_name(snapshot), blocked_by: Vec::new(), beside: Vec::new() };
        match candidate {
            Ok(base) => check_start(dir, view, base.as_ref(), images, &mut start),
            Err(damage) => start.blocked_by.push(damage),
        }
        start
    };
    let candidates = view.survey.candidates().zip(snapshots);
    candidates
        .filter(|(_, snapshot)| snapshot.is_none_or(|snapshot| is_kept(view, snapshot)))
        .map(check)
        .collect()
}

/// Whether a snapshot stands for itself. What the last seal does not list was given up: its manifest is there
/// for the snapshots that follow it, and the log behind it is gone. One that is newer than all listed waits for
/// its seal.
fn is_kept(view: &View, snapshot: SnapshotId) -> bool {
    let listed = || view.end().into_iter().flat_map(|end| &end.verified).map(|verified| verified.snapshot);
    listed().any(|listed| listed == snapshot) || listed().all(|listed| listed < snapshot)
}

fn start_name(snapshot: Option<SnapshotId>) -> String {
    snapshot.map_or("the log's beginning".to_owned(), |snapshot| format!("snapshot {snapshot}"))
}

fn check_start(
    dir: &StoreDir,
    view: &View,
    base: Option<&Arc<Manifest>>,
    images: &mut Images<'_>,
    start: &mut Start,
) {
    let mut needed = BTreeSet::new();
    match view.survey.resolve(dir, base, None) {
        Ok(resolution) => {
            for (_, of_page) in resolution.resolved.bases.iter() {
                needed.extend(of_page.image.map(|image| (image.file, image.offset)));
                start.blocked_by.extend(images.check(of_page.lsn, of_page.image, of_page.len));
            }
        }
        // A named snapshot stays without the log behind it: it is the way back to its own batch.
        Err(_) if base.is_some_and(|base| base.name.is_some() && base.redo.lsn == base.end) => {}
        Err(damage) => start.blocked_by.push(damage),
    }
    for entry in base.iter().flat_map(|manifest| &manifest.entries) {
        if entry.image.is_some_and(|image| !needed.contains(&(image.file, image.offset))) {
            start.beside.extend(images.check(entry.lsn, entry.image, entry.len));
        }
    }
}

impl Images<'_> {
    /// What is wrong with the image of a page of length `len`.
    fn check(&mut self, lsn: Lsn, image: Option<ImageRef>, len: u64) -> Option<Damage> {
        let image = image?;
        let name = (image.file, image.offset, image.stored_len, image.stored_crc);
        let defect = match self.read.get(&name) {
            Some(known) => known.clone(),
            None => {
                self.bytes = self.bytes.saturating_add(image.stored_len);
                let defect = check_image(self.dir, &image, len).err().map(|damage| damage.defect);
                self.read.insert(name, defect.clone());
                defect
            }
        };
        defect.map(|defect| defect.at_lsn(FileName::Pages(image.file), image.offset, lsn))
    }

    /// The image files that were read.
    fn files(&self) -> BTreeSet<u64> {
        self.read.keys().map(|(file, ..)| *file).collect()
    }
}

/// All findings, each place once, with the gravest of its costs.
fn findings(
    dir: &StoreDir,
    view: &View,
    starts: &[Start],
    opens_from: Option<usize>,
    images: &Images<'_>,
) -> Vec<Finding> {
    let mut findings: Vec<Finding> = Vec::new();
    let mut find = |damage: Damage, cost: String| {
        if findings
            .iter()
            .all(|known| (known.damage.file, known.damage.offset) != (damage.file, damage.offset))
        {
            findings.push(Finding { damage, cost });
        }
    };
    for damage in view.damage.iter().filter(|damage| damage.file == FileName::Store) {
        find(damage.clone(), "the store: nothing opens without its identity".to_owned());
    }
    for (index, start) in starts.iter().enumerate() {
        let cost = match opens_from {
            None => "the store: it cannot be opened".to_owned(),
            Some(opens) if index < opens => {
                format!("time, not data: recovery starts from {} instead", starts[opens].name)
            }
            Some(_) => format!("nothing now: {} could not stand in for a newer one", start.name),
        };
        for damage in &start.blocked_by {
            find(damage.clone(), cost.clone());
        }
        for damage in &start.beside {
            find(damage.clone(), format!("the way back to {}", start.name));
        }
    }
    if starts.is_empty() {
        let damage = Defect::Missing.at_lsn(FileName::Segment(1), 0, Lsn(1));
        find(damage, "the store: there is neither a snapshot nor the log's beginning".to_owned());
    }
    for damage in second_copies(dir, view) {
        find(damage, "nothing: the manifest's other copy is whole".to_owned());
    }
    for damage in view.end().iter().flat_map(|end| &end.harmless) {
        find(damage.clone(), "nothing: the segment is empty".to_owned());
    }
    for damage in images.files().into_iter().filter_map(|file| image_file_damage(dir, view, file)) {
        find(damage, "nothing: the snapshots say where the images lie".to_owned());
    }
    for (number, segment) in view.survey.log.segments() {
        if let Err(defect) = &segment.header {
            find(
                defect.clone().at(FileName::Segment(*number), 0),
                "nothing: no snapshot needs it".to_owned(),
            );
        }
    }
    findings
}

/// Damaged copies of manifests of which the other copy is whole.
fn second_copies(dir: &StoreDir, view: &View) -> Vec<Damage> {
    let mut found = Vec::new();
    for (snapshot, read) in &view.survey.links {
        let Ok((_, health)) = read else { continue };
        let file = FileName::Manifest(snapshot.0);
        let second_at = dir.len(file).ok().flatten().unwrap_or(0) / 2;
        for (defect, offset) in health.defects.iter().zip([0, second_at]) {
            found.extend(defect.clone().map(|defect| defect.at(file, offset)));
        }
    }
    found
}

/// What is wrong with the header of an image file, if it is there.
fn image_file_damage(dir: &StoreDir, view: &View, number: u64) -> Option<Damage> {
    let file = FileName::Pages(number);
    let mut bytes = [0; ImageFileHeaderRaw::LEN];
    dir.read_at(file, 0, &mut bytes).ok()?;
    let defect = match ImageFileHeader::decode(&bytes) {
        Err(defect) => defect,
        Ok(header) if !view.survey.store.shares_images_of(header.store) => Defect::Foreign,
        Ok(header) if header.file != number => {
            Defect::Mismatch { what: "image file's number", found: header.file, expected: number }
        }
        Ok(_) => return None,
    };
    Some(defect.at(file, 0))
}
