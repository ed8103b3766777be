//! Finds the run that contains the `redo` of a snapshot, if an earlier process appended it (rule 17).

use remanent_format::Lsn;

use super::{Line, Nonces};
use crate::bucket::Bucket;
use crate::error::{Error, Result};
use crate::object::{Content, Manifest};

impl<B: Bucket, N: Nonces> Line<'_, B, N> {
    /// Reads the line backwards until `runs` contains all runs above `redo`. Initially, it contains only the runs that
    /// this process has appended or found.
    pub(super) async fn load_runs(&mut self, redo: Lsn) -> Result<()> {
        if redo >= self.view.runs_above {
            return Ok(());
        }
        let mut runs = Vec::new();
        for position in (self.view.start..self.view.next).rev() {
            let object = self.need_line(position).await?;
            let before = match &object.content {
                Content::Run(run) => {
                    runs.push((position, run.after.lsn));
                    run.before.lsn
                }
                // The batches of the gap are in no run, so no run leads to a `redo` below its end.
                Content::Manifest(manifest) if manifest.follows_gap && redo < manifest.end.lsn => break,
                _ => continue,
            };
            if before <= redo {
                runs.reverse();
                self.view.runs = runs;
                self.view.runs_above = redo;
                return Ok(());
            }
        }
        Err(Error::StartNotKept { redo: redo.0 })
    }

    /// Returns the newest manifest of the line, or `None` if there is none.
    #[must_use]
    pub fn manifest(&self) -> Option<&Manifest> {
        self.view.manifest.as_ref().map(|(_, manifest)| manifest)
    }
}
