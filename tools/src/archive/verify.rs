//! `remanent archive verify` reads every object that a restore needs.

use remanent_archive::line::{Audited, Line, audit, status};

use super::watched_bucket::WatchedBucket;
use crate::cli::exit::{Ending, Failure, Outcome};
use crate::cli::json::object;
use crate::cli::output::Output;
use crate::cli::progress;

const EXAMPLES: &str = "\
Reads every object that a restore of the end needs, checks all checksums, and lists each missing or damaged object. \
Most of the bytes are in data objects, which contain the files of the snapshot. With --sample, only a random share of \
them is read: a tenth per day finds most damage within weeks. Changes nothing, and may run while another process \
pushes. The loss of the last objects cannot be detected in the archive itself: compare the printed lsn with the one \
that the application reported.

If an object is missing, check whether a lifecycle rule deleted it, whether the URL names a replica of the bucket, and \
whether the object is in an archive tier. If the bucket has versioning, it may still contain the object. If the store \
still exists, push it to a new URL. `remanent restore --from` rejects a damaged archive.

Examples:
  remanent archive verify s3://bucket/run-7
  remanent archive verify s3://bucket/run-7 --sample 0.1 --json";

/// Check every object that a restore needs
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Verify {
    /// URL of the archive
    url: String,
    /// Read only this random share of the data objects, above 0 and at most 1
    #[arg(long, value_name = "FRACTION", default_value = "1", value_parser = parse_share)]
    sample: f64,
    /// Print one JSON object per line, for each finding and for the summary
    #[arg(long)]
    json: bool,
}

fn parse_share(text: &str) -> Result<f64, String> {
    let share = text.parse::<f64>().ok().filter(|share| *share > 0.0 && *share <= 1.0);
    share.ok_or_else(|| "expected a number above 0 and at most 1, for example 0.1".to_owned())
}

impl Verify {
    pub fn run(&self, out: &mut Output) -> Outcome {
        let bucket = WatchedBucket::open(&self.url)?;
        let (audited, unknown) = bucket.run(None, async {
            // Computes the total for the progress bar. If the archive is too damaged, the audit reports that.
            if let Ok(found) = status(bucket.archive()).await {
                let data = found.manifest.as_ref().map_or(0, |newest| newest.data_objects);
                let total = found.line_objects() + (data as f64 * self.sample) as u64;
                bucket.show_progress(progress::bar(total, "reading objects"));
            }
            let audited = audit(bucket.archive(), self.sample).await?;
            Ok((audited, Line::new(bucket.archive()).unknown_names().await?))
        })?;
        self.report(&audited, &unknown, out)?;
        Ok(if audited.damaged.is_empty() { Ending::Fine } else { Ending::Difference })
    }

    fn report(&self, audited: &Audited, unknown: &[String], out: &mut Output) -> Result<(), Failure> {
        let Audited { damaged, objects, bytes, left_out, archived, .. } = audited;
        for found in damaged {
            if self.json {
                out.line(object! {
                    "kind": "finding",
                    "object": found.key.to_string(),
                    "defect": found.damage.to_string(),
                })?;
            } else {
                out.line(found)?;
            }
        }
        if self.json {
            return out.line(object! {
                "kind": "summary",
                "findings": damaged.len(),
                "objects": objects,
                "bytes": bytes,
                "left_out": left_out,
                "lsn": archived.lsn.0,
                "unknown_names": unknown,
            });
        }
        for name in unknown {
            out.line(format_args!("note: {name} is not an archive object and is ignored"))?;
        }
        let outcome = match damaged.len() {
            0 => "clean:".to_owned(),
            count => format!("findings: {count};"),
        };
        let left_out = match left_out {
            0 => String::new(),
            count => format!(", {count} data objects skipped"),
        };
        out.line(format_args!(
            "{outcome} {objects} objects ({bytes} bytes) read{left_out}, lsn {}",
            archived.lsn
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sample_must_be_above_zero_and_at_most_one() {
        assert_eq!(parse_share("0.25"), Ok(0.25));
        assert_eq!(parse_share("1"), Ok(1.0));
        for text in ["", "0", "-0.5", "1.01", "nan", "inf", "10%"] {
            assert!(parse_share(text).is_err(), "{text}");
        }
    }
}
