//! The kill test. It kills replays at random times, with each method of writing the log.

use remanent::error::Invalid;
use remanent::options::{LogIo, LogOptions};
use remanent::{Error, Options};

use super::{TortureContext, TortureTable};
use crate::cli::engine::engine_failure;
use crate::cli::exit::Failure;
use crate::replay::kill_run::KillRunStop;

/// Number of kills before the test creates a new store.
const KILLS_A_COURSE: u64 = 20;
/// The methods of writing the log that are tested.
const WAYS: [LogIo; 3] = [LogIo::Mapped, LogIo::Buffered, LogIo::Direct];

impl TortureContext<'_> {
    pub(super) fn kills(&mut self, report: &mut TortureTable) -> Result<(), KillRunStop> {
        report.columns = &["killed", "requests", "right"];
        let mut ways = Vec::new();
        for way in WAYS {
            match self.refusal(way)? {
                None => ways.push(way),
                Some(reason) => report.skipped.push(format!("kills with a {way} log: {reason}")),
            }
        }
        let count = ways.len() as u64;
        for (index, way) in ways.into_iter().enumerate() {
            let kills = (self.requested.kills + count - 1 - index as u64) / count;
            let row = self.kill(way, kills)?;
            report.rows.push((format!("log written {way}"), row));
        }
        Ok(())
    }

    /// Returns the reason why a store in the tested directory cannot use this method, or `None` if it can.
    fn refusal(&self, way: LogIo) -> Result<Option<String>, Failure> {
        let folder = self.folder.join(format!("asks-{way}"));
        let refusal = match Options::new().log(LogOptions::new().io(way)).open(&folder) {
            Ok(store) => store.close().map(|()| None).map_err(engine_failure)?,
            Err(Error::Invalid(Invalid::Option { reason, .. })) => Some(reason.to_string()),
            Err(error) => return Err(engine_failure(error)),
        };
        super::remove(&folder)?;
        Ok(refusal)
    }

    /// Kills replays `kills` times, with a new store after every [`KILLS_A_COURSE`] kills. The last replay of each
    /// store runs to its end.
    fn kill(&mut self, way: LogIo, kills: u64) -> Result<Vec<u64>, KillRunStop> {
        let (mut killed, mut requests) = (0, 0);
        for number in 0_u64.. {
            if killed >= kills {
                break;
            }
            let mut course = self.course(&format!("killed-{way}-{number}"), Some(way), false)?;
            let wanted = (kills - killed).min(KILLS_A_COURSE);
            for kill in 1..=wanted {
                // The replay may end before it is killed.
                if course.run_and_kill(kill, wanted)?.is_none() {
                    break;
                }
                killed += 1;
                self.bar.inc(1);
            }
            course.run_to_end()?;
            requests += course.totals().replayed;
            super::remove(&course.params.store)?;
        }
        // Each kill was compared with the simulation, and a difference would have caused an error.
        Ok(vec![killed, requests, killed])
    }
}
