//! `remanent verify` reads everything that a store needs, and reports the consequences of each defect.

use std::path::PathBuf;

use remanent_format::image::{ImageFileHeader, ImageFileHeaderRaw};
use remanent_format::judge::{Gap, ImageProofs, Start, Verdict, judge};
use remanent_format::state::reach::Role;
use remanent_format::{Damage, Defect, FileName, Lsn, PageId, ReadAt, SnapshotId};

use crate::cli::exit::{Ending, Failure, Outcome};
use crate::cli::json::object;
use crate::cli::memory::MemoryLimit;
use crate::cli::output::Output;
use crate::inspect::log::{torn_json, torn_line};
use crate::read::partial_view::PartialView;
use crate::read::stable;
use crate::read::store_dir::StoreDir;

const EXAMPLES: &str = "\
Checks the file STORE, both copies of every manifest, and everything that a kept state needs: each snapshot that the \
log records as kept, the log from the oldest of these snapshots to its end, and all images and tables that these name. \
A torn tail, which a crash leaves, is not damage. Each finding states its cost: nothing, time (recovery uses an older \
snapshot), a snapshot or batch that is no longer available, a page on disk, or the store. While a process writes to \
the store, damage is read again before it is reported.

Examples:
  remanent verify store && echo clean
  remanent verify store --json";

/// Check every byte that a store needs
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Verify {
    /// Store directory, which is never modified
    dir: PathBuf,
    /// Print one JSON object per line, for each finding and for the summary
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    memory: MemoryLimit,
}

/// A defect, and its consequences as text.
struct VerifyFinding {
    damage: Damage,
    cost: String,
}

impl Verify {
    pub fn run(&self, out: &mut Output) -> Outcome {
        let dir = StoreDir::open(&self.dir)?;
        let mut images = ImageProofs::new(&dir);
        let VerifyReport { view, verdict, mut findings } = read_report(&dir, &mut images)?;
        if let Some(Err(damage)) =
            view.state.as_ref().map(|state| state.check_page_bytes(self.memory.limit()))
        {
            let cost = "nothing on a machine with enough memory; `--memory-max` raises the limit".to_owned();
            findings.push(VerifyFinding { damage, cost });
        }
        for finding in &findings {
            self.report(finding, out)?;
        }
        let opens_from = verdict.start().map(|start| start_name(start.snapshot));
        self.summarize(&view, &images, findings.len(), opens_from.as_deref(), dir.holder(), out)?;
        Ok(if findings.is_empty() { Ending::Fine } else { Ending::Difference })
    }

    fn report(&self, finding: &VerifyFinding, out: &mut Output) -> Result<(), Failure> {
        let VerifyFinding { damage, cost } = finding;
        if !self.json {
            return out.line(format_args!("{damage}\n    cost: {cost}"));
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
        view: &PartialView,
        images: &ImageProofs<'_>,
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
                "images": images.count(),
                "image_bytes": images.bytes(),
                "batches": batches,
                "torn_tail": torn_json(torn),
                "open_in_process": holder,
            });
        }
        if let Some(process) = holder {
            out.line(format_args!(
                "note: process {process} has the store open, and files that it is writing may appear damaged"
            ))?;
        }
        if let Some(torn) = torn {
            out.line(format_args!("note: {}", torn_line(torn)))?;
        }
        let read = format!(
            "{} images ({} bytes) and {batches} batches read, lsn {}, durable up to {}",
            images.count(),
            images.bytes(),
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

/// The result of a verification: the readable parts of the store, and all findings.
struct VerifyReport {
    view: PartialView,
    verdict: Verdict,
    findings: Vec<VerifyFinding>,
}

/// Verifies a store. If a finding may be due to a concurrent writer, the verification is repeated.
fn read_report(dir: &StoreDir, images: &mut ImageProofs<'_>) -> Result<VerifyReport, Failure> {
    let read_once = |before: Option<&[Damage]>| {
        images.forget_damaged();
        read_once(dir, images, before)
    };
    let damage = |report: &VerifyReport| report.findings.iter().map(|found| found.damage.clone()).collect();
    stable::read_until_stable(dir, read_once, damage).map(|(report, _)| report)
}

/// Verifies a store once. If `before` is `Some`, damage that it does not contain is ignored.
fn read_once(
    dir: &StoreDir,
    images: &mut ImageProofs<'_>,
    before: Option<&[Damage]>,
) -> Result<VerifyReport, Failure> {
    let view = PartialView::take_once(dir)?;
    let mut verdict = judge(&view.survey, dir, images);
    if let Some(before) = before {
        let is_lasting = |damage: &Damage| before.contains(damage);
        for start in &mut verdict.starts {
            start.blocked_by.retain(is_lasting);
            start.lost_by.retain(is_lasting);
            start.damaged_pages.retain(|(_, damage)| is_lasting(damage));
            start.gaps.retain(|gap| is_lasting(&gap.damage));
        }
        verdict.lost.retain(is_lasting);
        verdict.lost_beginning = verdict.lost_beginning.filter(is_lasting);
        let is_open = |start: &Start| start.blocked_by.is_empty();
        verdict.opens_from = verdict.opens_from.or_else(|| verdict.starts.iter().position(is_open));
    }
    // A store without its identity cannot be opened.
    let identity = view.damage.iter().find(|damage| damage.file == FileName::Store).cloned();
    if identity.is_some() {
        verdict.opens_from = None;
    }
    let mut findings = findings(dir, &view, &verdict, identity, images);
    if let Some(before) = before {
        findings.retain(|finding| before.contains(&finding.damage));
    }
    Ok(VerifyReport { view, verdict, findings })
}

fn start_name(snapshot: Option<SnapshotId>) -> String {
    snapshot.map_or("the log's beginning".to_owned(), |snapshot| format!("snapshot {snapshot}"))
}

/// Returns all findings.
fn findings(
    dir: &StoreDir,
    view: &PartialView,
    verdict: &Verdict,
    identity: Option<Damage>,
    images: &ImageProofs<'_>,
) -> Vec<VerifyFinding> {
    let mut findings = Findings::default();
    if let Some(damage) = identity {
        findings.add(damage, "the store: it cannot be opened without its identity");
    }
    findings.add_damage_to_starts(verdict);
    findings.add_lost_states(verdict);
    if verdict.starts.is_empty() {
        let damage = Defect::Missing.at_lsn(FileName::Segment(1), 0, Lsn(1));
        findings.add(damage, "the store: there is no snapshot, and the beginning of the log is missing");
    }
    findings.add_harmless_damage(dir, view, images);
    findings.0
}

/// A list of findings. Each location is listed once, with its first and most severe consequence.
#[derive(Default)]
struct Findings(Vec<VerifyFinding>);

impl Findings {
    /// Adds a finding, unless the location of the damage is already listed.
    fn add(&mut self, damage: Damage, cost: impl Into<String>) {
        if self.0.iter().all(|known| (known.damage.file, known.damage.offset) != (damage.file, damage.offset))
        {
            self.0.push(VerifyFinding { damage, cost: cost.into() });
        }
    }

    /// Adds the damage that prevents recovery from starting at a candidate, and the pages that recovery leaves damaged.
    fn add_damage_to_starts(&mut self, verdict: &Verdict) {
        for (index, start) in verdict.starts.iter().enumerate() {
            let cost = match verdict.opens_from {
                Some(opens) => {
                    let instead = start_name(verdict.starts[opens].snapshot);
                    format!("time, but no data: recovery starts from {instead} instead")
                }
                None => "the store: it cannot be opened".to_owned(),
            };
            // A link alone is not a start. Its damage is reported only if the store cannot be opened.
            if start.role != Role::Link || verdict.state.is_none() {
                for damage in &start.blocked_by {
                    self.add(damage.clone(), &cost);
                }
            }
            if Some(index) == verdict.opens_from {
                for (damage, pages) in by_image(&start.damaged_pages) {
                    let cost = format!("{pages}: reads fail until the page is replaced or deleted");
                    self.add(damage.clone(), cost);
                }
            }
        }
    }

    /// Adds the damage that makes earlier states and kept snapshots unavailable.
    fn add_lost_states(&mut self, verdict: &Verdict) {
        for start in &verdict.starts {
            for damage in &start.lost_by {
                let cost = format!("{} is no longer available", start_name(start.snapshot));
                self.add(damage.clone(), cost);
            }
            for Gap { first, last, damage } in &start.gaps {
                let states = match first == last {
                    true => format!("the state after lsn {first} is"),
                    false => format!("the states after lsn {first} to lsn {last} are"),
                };
                self.add(damage.clone(), format!("{states} no longer available"));
            }
        }
        for damage in &verdict.lost {
            self.add(damage.clone(), "a kept snapshot is no longer available");
        }
        if let Some(damage) = &verdict.lost_beginning {
            self.add(damage.clone(), "the log's beginning is no longer available");
        }
    }

    /// Adds the damage that affects no state.
    fn add_harmless_damage(&mut self, dir: &StoreDir, view: &PartialView, images: &ImageProofs<'_>) {
        for damage in second_copies(dir, view) {
            self.add(damage, "nothing: the manifest's other copy is intact");
        }
        for damage in view.survey.links.values().filter_map(|link| link.as_ref().err()) {
            self.add(damage.clone(), "nothing: no kept snapshot needs it");
        }
        for damage in view.end().iter().flat_map(|end| &end.harmless) {
            self.add(damage.clone(), "nothing: the segment is empty");
        }
        for damage in images.files().filter_map(|file| image_file_damage(dir, view, file)) {
            self.add(damage, "nothing: the snapshots record the offsets of its images");
        }
        for (number, segment) in view.survey.log.segments() {
            if let Err(defect) = &segment.header {
                let damage = defect.clone().at(FileName::Segment(*number), 0);
                self.add(damage, "nothing: no snapshot needs it");
            }
        }
    }
}

/// Groups damage by image. Each item contains the damage and the list of affected pages as text.
fn by_image(damaged: &[(PageId, Damage)]) -> Vec<(&Damage, String)> {
    let mut found: Vec<(&Damage, String)> = Vec::new();
    for (page, damage) in damaged {
        match found.iter_mut().find(|(known, _)| (known.file, known.offset) == (damage.file, damage.offset)) {
            Some((_, pages)) => pages.push_str(&format!(", page {page}")),
            None => found.push((damage, format!("page {page}"))),
        }
    }
    found
}

/// Returns the damage of manifest copies. If both copies of a manifest are invalid, the manifest is not listed.
fn second_copies(dir: &StoreDir, view: &PartialView) -> Vec<Damage> {
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

/// Returns the damage to the header of an image file, or `None` if the header is valid or the file does not exist.
fn image_file_damage(dir: &StoreDir, view: &PartialView, number: u64) -> Option<Damage> {
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
