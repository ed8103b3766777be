//! `remanent archive push` archives a closed store.

use std::path::PathBuf;

use remanent_archive::directory::ArchivedDirectory;
use remanent_archive::line::{Pruned, Swept, Takeover, probe};
use remanent_archive::local::LocalStore;
use remanent_archive::mirror::{self, Pushed};
use remanent_format::{FileName, ReadAt, StoreId};

use super::watched_bucket::{WatchedBucket, local_failure};
use crate::cli::exit::{Ending, Failure, Outcome};
use crate::cli::json::object;
use crate::cli::output::Output;
use crate::cli::progress;
use crate::read::store_dir::StoreDir;
use crate::read::writer_lock;

const EXAMPLES: &str = "\
Uploads the batches, named snapshots and newest snapshot that the archive lacks, and then deletes objects that two \
newer snapshots replace. A named snapshot is kept until its name is given up. The store must be closed, because the \
command holds its lock. Run the command after each run, or from a timer between runs. The first push to an empty URL \
creates the archive. A URL can contain the archive of one store only. Take a snapshot first, so that a restore does \
not have to replay the whole log.

A directory may push only if it created the newest fence of the archive, and if its history contains the last archived \
batch. After a restore to another directory, the old directory is rejected and nothing is changed. If the directory \
that created the newest fence is lost and this one contains all archived batches, use --takeover. It waives the first \
condition, never the second.

Damaged snapshots are listed and skipped; the command then exits with 1.

Examples:
  remanent snapshot store && remanent archive push store s3://bucket/run-7
  mkdir -p /mnt/nas/run-7 && remanent archive push store file:///mnt/nas/run-7";

/// Archive a closed store: upload its new batches and snapshots
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Push {
    /// Store directory
    dir: PathBuf,
    /// URL of the archive
    url: String,
    /// Permit the push if the directory that created the newest fence is lost
    #[arg(long)]
    takeover: bool,
    /// Print the result as a JSON object
    #[arg(long)]
    json: bool,
}

impl Push {
    pub fn run(&self, out: &mut Output) -> Outcome {
        let bucket = WatchedBucket::open(&self.url)?;
        let dir = StoreDir::open(&self.dir)?;
        // Check before the lock is acquired, which creates files.
        let has_store = dir.len(FileName::Store).map_err(|error| local_failure(Some(&self.dir), &error))?;
        if has_store.is_none() {
            return Err(dir.no_store());
        }
        let lock = writer_lock::acquire(&self.dir)?;
        let mut directory = ArchivedDirectory::open(&self.dir, lock)
            .map_err(|error| local_failure(Some(&self.dir), &error))?;
        let store = directory.store();
        bucket.show_progress(progress::objects("uploading"));
        let takeover = if self.takeover { Takeover::Permitted } else { Takeover::Refused };
        let pushed = bucket.run(Some(&self.dir), async {
            probe(bucket.archive(), store).await?;
            mirror::push(bucket.archive(), &mut directory, takeover).await
        })?;
        self.report(store, &pushed, out)?;
        Ok(if pushed.damaged.is_empty() { Ending::Fine } else { Ending::Difference })
    }

    fn report(&self, store: StoreId, pushed: &Pushed, out: &mut Output) -> Result<(), Failure> {
        let (boundary, swept) = match pushed.pruned {
            Pruned::Boundary { number, swept, .. } => (Some(number), swept),
            Pruned::Nothing => (None, Swept::default()),
        };
        let lsn = pushed.archived.lsn;
        if self.json {
            return out.line(object! {
                "store": store.to_string(),
                "lsn": lsn.0,
                "term": pushed.term,
                "runs": pushed.runs,
                "snapshot": pushed.snapshot.map(|snapshot| snapshot.0),
                "named": pushed.named,
                "boundary": boundary,
                "line_objects": swept.line_objects,
                "data_objects": swept.data_objects,
                "refused": swept.refused,
                "damage": pushed.damaged.iter().map(ToString::to_string).collect::<Vec<_>>(),
            });
        }
        for damage in &pushed.damaged {
            out.line(format_args!("{damage}\n    cost: a snapshot was not archived"))?;
        }
        if pushed.term.is_none() {
            return out.line(format_args!("store {store}: archived up to lsn {lsn}; no new data"));
        }
        let snapshot = pushed.snapshot.map_or(String::new(), |snapshot| format!(", snapshot {snapshot}"));
        let named = match pushed.named {
            0 => String::new(),
            count => format!(", {count} named snapshots"),
        };
        out.line(format_args!(
            "store {store}: archived up to lsn {lsn}; {} runs{snapshot}{named}",
            pushed.runs
        ))?;
        report_swept(&swept, out)
    }
}

/// Prints what a prune deleted.
pub(super) fn report_swept(swept: &Swept, out: &mut Output) -> Result<(), Failure> {
    let Swept { line_objects, data_objects, refused } = swept;
    if line_objects + data_objects > 0 {
        out.line(format_args!("removed {line_objects} line objects and {data_objects} data objects"))?;
    }
    if *refused > 0 {
        out.line(format_args!(
            "note: the bucket refused to delete {refused} objects, for example because of an object lock; a later \
             prune tries again"
        ))?;
    }
    Ok(())
}
