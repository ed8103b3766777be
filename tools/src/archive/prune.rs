//! `remanent archive prune` deletes the objects that the newest snapshot of an archive replaces, or counts them.

use remanent_archive::Error;
use remanent_archive::line::{Line, PrunePlan, Pruned, Swept};
use remanent_archive::object::ObjectKey;

use super::push::report_swept;
use super::watched_bucket::WatchedBucket;
use crate::cli::exit::{Ending, Failure, Outcome};
use crate::cli::json::object;
use crate::cli::output::Output;
use crate::cli::progress;

const EXAMPLES: &str = "\
Each push also prunes. Use this command if the last push was interrupted. It may run while another process pushes. It \
reads back every part of the newest archived snapshot, appends a boundary for it, and deletes the objects that the \
previous boundary released. Deletes lag one boundary behind, so that they do not affect running restores. Without \
--yes, nothing is changed, and the snapshot is not read back.

Examples:
  remanent archive prune s3://bucket/run-7           print what would be deleted
  remanent archive prune s3://bucket/run-7 --yes";

/// Maximum number of attempts to prune. An attempt fails if another process appends concurrently.
const ATTEMPTS: u32 = 16;

/// Delete objects that the newest archived snapshot replaces, or print what would be deleted
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Prune {
    /// URL of the archive
    url: String,
    /// Delete. Without this flag, only print what would be deleted
    #[arg(long)]
    yes: bool,
    /// Print the result as a JSON object
    #[arg(long)]
    json: bool,
}

impl Prune {
    pub fn run(&self, out: &mut Output) -> Outcome {
        let bucket = WatchedBucket::open(&self.url)?;
        if self.yes {
            bucket.show_progress(progress::objects("reading the snapshot"));
            let pruned = bucket.run(None, prune(&bucket))?;
            let (boundary, swept) = match pruned {
                Pruned::Boundary { number, start, swept } => (Some((number, start)), swept),
                Pruned::Nothing => (None, Swept::default()),
            };
            self.report(boundary, &swept, out)?;
        } else {
            let plan = bucket.run(None, async {
                let mut line = Line::new(bucket.archive());
                line.find().await?;
                line.store().ok_or(Error::Empty)?;
                line.would_prune().await
            })?;
            let boundary = plan.as_ref().map(|plan| (plan.number, plan.start));
            self.report(boundary, &counts(plan.as_ref()), out)?;
        }
        Ok(Ending::Fine)
    }

    fn report(&self, boundary: Option<(u64, u64)>, swept: &Swept, out: &mut Output) -> Result<(), Failure> {
        let Swept { line_objects, data_objects, refused } = swept;
        if self.json {
            return out.line(object! {
                "removed": self.yes,
                "boundary": boundary.map(|(number, _)| number),
                "start": boundary.map(|(_, start)| start),
                "line_objects": line_objects,
                "data_objects": data_objects,
                "refused": refused,
            });
        }
        let Some((number, start)) = boundary else {
            return out.line(
                "nothing to prune: there is no snapshot, or the newest snapshot already has a boundary",
            );
        };
        if self.yes {
            out.line(format_args!(
                "appended boundary {number}, which keeps the line from position {start} on"
            ))?;
            return report_swept(swept, out);
        }
        out.line(format_args!(
            "would append boundary {number}, which keeps the line from position {start} on, and delete {line_objects} \
             line objects and {data_objects} data objects; use --yes to delete them"
        ))
    }
}

/// Counts the objects that a prune would delete.
fn counts(plan: Option<&PrunePlan>) -> Swept {
    let deletes = plan.map_or(&[][..], |plan| &plan.deletes);
    let line_objects = deletes.iter().filter(|key| matches!(key, ObjectKey::Line(_))).count();
    Swept {
        line_objects: line_objects as u64,
        data_objects: (deletes.len() - line_objects) as u64,
        refused: 0,
    }
}

/// Reads back the newest manifest and prunes. If another process appends concurrently, tries again without reading the
/// same manifest again.
async fn prune(bucket: &WatchedBucket) -> remanent_archive::Result<Pruned> {
    let mut known = None;
    for attempt in 1.. {
        let mut line = Line::new(bucket.archive());
        line.find().await?;
        line.store().ok_or(Error::Empty)?;
        let verified = match known.filter(|(position, _)| line.newest_manifest() == Some(*position)) {
            Some((_, verified)) => verified,
            None => match line.verify_manifest().await? {
                Some(verified) => verified,
                None => return Ok(Pruned::Nothing),
            },
        };
        known = line.newest_manifest().map(|position| (position, verified));
        match line.prune(verified).await {
            Err(Error::Busy { .. } | Error::Overtaken { .. }) if attempt < ATTEMPTS => {}
            result => return result,
        }
    }
    unreachable!("the loop ends only by a return");
}
