//! `remanent archive status` prints a summary of an archive, with few requests.

use remanent_archive::line::status;
use remanent_archive::object::KeptSnapshot;
use serde_json::json;

use super::watched_bucket::WatchedBucket;
use crate::cli::exit::{Ending, Failure, Outcome};
use crate::cli::json::object;
use crate::cli::output::Output;

const EXAMPLES: &str = "\
Sends a few dozen requests, regardless of the size of the archive, and changes nothing. To read every object, use \
`remanent archive verify`. Positions are printed in decimal. Object names contain them in hexadecimal: position 26 is \
line/000000000000001a.

  store      id of the archived store
  term       position of the newest fence, which the current writer or the last restore created
  line       first and last kept position
  archived   last archived batch
  boundary   number of the newest boundary, which permits deleting objects below the first kept position
  snapshot   newest archived snapshot; a restore replays the log after the first lsn
  named      a kept named snapshot, with its lsn and the size of its files, which snapshots may share
  restore    objects that a restore of the end reads

Examples:
  remanent archive status s3://bucket/run-7
  remanent archive status file:///mnt/nas/run-7 --json";

/// Show what an archive contains, with few requests
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Status {
    /// URL of the archive
    url: String,
    /// Print the result as a JSON object
    #[arg(long)]
    json: bool,
}

impl Status {
    pub fn run(&self, out: &mut Output) -> Outcome {
        let bucket = WatchedBucket::open(&self.url)?;
        let found = bucket.run(None, status(bucket.archive()))?;
        self.report(&found, out)?;
        Ok(Ending::Fine)
    }

    fn report(&self, found: &remanent_archive::line::Status, out: &mut Output) -> Result<(), Failure> {
        let archived = found.archived;
        if self.json {
            let manifest = found.manifest.as_ref().map(|newest| {
                json!({
                    "position": newest.position,
                    "snapshot": newest.manifest.snapshot.0,
                    "redo": newest.manifest.redo.lsn.0,
                    "end": newest.manifest.end.lsn.0,
                    "start": newest.manifest.start,
                    "follows_gap": newest.manifest.follows_gap,
                    "data_objects": newest.data_objects,
                    "data_bytes": newest.data_bytes,
                })
            });
            let named = found.named.iter().map(|kept| {
                json!({
                    "name": kept.name,
                    "snapshot": kept.snapshot.0,
                    "lsn": kept.batch.lsn.0,
                    "position": kept.position,
                    "bytes": kept.bytes,
                })
            });
            let named: Vec<_> = named.collect();
            return out.line(object! {
                "store": found.store.to_string(),
                "term": found.term,
                "start": found.start,
                "end": found.end,
                "lsn": archived.lsn.0,
                "incarnation": archived.incarnation.to_string(),
                "boundary": (found.boundary > 0).then_some(found.boundary),
                "manifest": manifest,
                "after_manifest": found.after_manifest(),
                "named": named,
                "line_objects": found.line_objects(),
            });
        }
        out.line(format_args!("store      {}", found.store))?;
        out.line(format_args!("term       {}", found.term))?;
        out.line(format_args!("line       {} to {}", found.start, found.end))?;
        out.line(format_args!("archived   {archived}"))?;
        match found.boundary {
            0 => out.line("boundary   none")?,
            number => out.line(format_args!("boundary   {number}"))?,
        }
        let mut reads = format!("{} line objects", found.line_objects());
        match &found.manifest {
            None => out.line("snapshot   none: a restore replays the whole log")?,
            Some(newest) => {
                let manifest = &newest.manifest;
                out.line(format_args!(
                    "snapshot   {}: lsn {} to {}, at position {}, {} objects after it",
                    manifest.snapshot,
                    manifest.redo.lsn,
                    manifest.end.lsn,
                    newest.position,
                    found.after_manifest()
                ))?;
                reads = format!(
                    "{} data objects ({} bytes) of the snapshot, {reads}",
                    newest.data_objects, newest.data_bytes
                );
            }
        }
        for kept in &found.named {
            let KeptSnapshot { name, snapshot, batch, bytes, .. } = kept;
            out.line(format_args!(
                "named      {name}: snapshot {snapshot}, lsn {}, {bytes} bytes",
                batch.lsn
            ))?;
        }
        if !found.named.is_empty() {
            reads = format!("{reads}, and the files of {} named snapshots", found.named.len());
        }
        out.line(format_args!("restore    {reads}"))
    }
}
