//! `remanent bisect` finds the first version at which a command fails, by binary search.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use remanent::StatePoint;
use remanent_format::Lsn;
use remanent_format::frame::FrameKind;
use remanent_format::log::LogWalk;
use remanent_format::op::{Op, decode_payload};
use remanent_format::state::bisection::{BisectVerdict, Bisection};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use crate::cli::exit::{Ending, Failure, Outcome};
use crate::cli::interrupt::Interrupt;
use crate::cli::json;
use crate::cli::json::object;
use crate::cli::memory::MemoryLimit;
use crate::cli::output::Output;
use crate::read::states::{KeptStates, damaged};
use crate::read::store_dir::StoreDir;
use crate::weights::export::ExportVersion;

const EXAMPLES: &str = "\
Exports each tested version to a temporary file and runs CMD in a shell. The path of the file replaces {} in CMD, or \
is appended as the last argument if CMD contains no {}. The output of CMD is printed to standard error. The exit code \
of CMD is the verdict: 0 means good, 125 skips the version, and any other code up to 127 means bad. A higher code or a \
signal stops the search.

Examples:
  remanent bisect store --good lsn:1 --bad lsn:40 --run ./has-no-nan.py
  remanent bisect store --good snapshot:1 --bad lsn:40 --run 'python eval.py --weights {} --at-least 0.8'";

/// Find the first version at which a command fails
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Bisect {
    /// Store directory, which is never modified
    dir: PathBuf,
    /// Good state: lsn:N, snapshot:N or the name of a snapshot
    #[arg(long)]
    good: StatePoint,
    /// Bad state, which must be later than the good state
    #[arg(long)]
    bad: StatePoint,
    /// Shell command that tests a version
    #[arg(long, value_name = "CMD")]
    run: String,
    /// Print the result as a JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    memory: MemoryLimit,
}

impl Bisect {
    pub fn run(&self, out: &mut Output) -> Outcome {
        let interrupt = Interrupt::listen()?;
        let dir = StoreDir::open(&self.dir)?;
        let bound = |at: &StatePoint| {
            KeptStates::with_retry(&dir, |past| {
                let until = past.lsn(Some(at))?;
                Ok(past.table(until)?.lsn())
            })
        };
        let (good, bad) = (bound(&self.good)?, bound(&self.bad)?);
        let mut search = Bisection::new(good, bad).ok_or_else(|| {
            Failure::Environment(format!(
                "the good state (lsn {good}) must be older than the bad state (lsn {bad})"
            ))
        })?;
        // The directory is removed when this function returns.
        let scratch = tempfile::tempdir()
            .map_err(|error| Failure::Environment(format!("cannot create a temporary directory: {error}")))?;
        let file = scratch.path().join("model.safetensors");
        while let Some(lsn) = search.next() {
            let version = KeptStates::with_retry(&dir, |past| {
                ExportVersion::take(past, Some(lsn), self.memory.given())
            })?;
            if interrupt.is_noted() || !version.write_file(&file, &interrupt)? {
                return Ok(Ending::Interrupted);
            }
            drop(version);
            let Some(verdict) = self.verdict(&file, &interrupt)? else { return Ok(Ending::Interrupted) };
            if !self.json {
                let word = match verdict {
                    BisectVerdict::Good => "good",
                    BisectVerdict::Bad => "bad",
                    BisectVerdict::Skip => "skipped",
                };
                out.line(format_args!("lsn {lsn}: {word}"))?;
                out.flush()?;
            }
            search.record(lsn, verdict);
        }
        if search.bad().0 - search.good().0 > 1 {
            return Err(Failure::Environment(format!(
                "the first bad version is one of lsn {} to {}, of which all but the last were skipped",
                search.good().next(),
                search.bad()
            )));
        }
        self.report(&dir, search.bad(), out)?;
        Ok(Ending::Fine)
    }

    fn report(&self, dir: &StoreDir, first_bad: Lsn, out: &mut Output) -> Result<(), Failure> {
        let (root, note) = KeptStates::with_retry(dir, |past| {
            let root = json::metadata(past.table(Some(first_bad))?.root());
            Ok((root, note_of(past, first_bad)?))
        })?;
        if self.json {
            return out.line(object! { "first_bad": first_bad.0, "root": root, "note": note });
        }
        out.line(format_args!("the first bad version is lsn {first_bad}"))?;
        for (name, value) in root.as_object().into_iter().flatten() {
            out.line(format_args!("root  {name} = {value}"))?;
        }
        note.map_or(Ok(()), |note| out.line(format_args!("note  {}", note.escape_debug())))
    }

    /// Runs the user's command on a file and returns its verdict. Returns `None` if Ctrl-C was pressed.
    fn verdict(&self, file: &Path, interrupt: &Interrupt) -> Result<Option<BisectVerdict>, Failure> {
        let cannot = |error: io::Error| Failure::Environment(format!("cannot run {:?}: {error}", self.run));
        // The path is passed as an argument of the shell, so its characters need no quoting.
        let script = if self.run.contains("{}") {
            self.run.replace("{}", "\"$1\"")
        } else {
            format!("{} \"$1\"", self.run)
        };
        // Standard output is reserved for the result of the search.
        let stdout = io::stderr().as_fd().try_clone_to_owned().map_err(cannot)?;
        let mut child = Command::new("sh")
            .args(["-c", &script, "sh"])
            .arg(file)
            .stdin(Stdio::null())
            .stdout(Stdio::from(stdout))
            // The child gets a process group, so that Ctrl-C can end all processes that it started.
            .process_group(0)
            .spawn()
            .map_err(cannot)?;
        let Some(status) = wait(&mut child, interrupt).map_err(cannot)? else { return Ok(None) };
        match status.code() {
            Some(0) => Ok(Some(BisectVerdict::Good)),
            Some(125) => Ok(Some(BisectVerdict::Skip)),
            Some(1..=127) => Ok(Some(BisectVerdict::Bad)),
            Some(code) => Err(Failure::Environment(format!("{:?} exited with code {code}", self.run))),
            None => {
                let signal = status.signal().unwrap_or_default();
                Err(Failure::Environment(format!("{:?} was killed by signal {signal}", self.run)))
            }
        }
    }
}

/// Waits for a child to exit. If Ctrl-C is pressed, kills the child's process group and returns `None`.
fn wait(child: &mut Child, interrupt: &Interrupt) -> io::Result<Option<ExitStatus>> {
    let group = Pid::from_child(child);
    let ended = pidfd_open(group, PidfdFlags::empty())?;
    interrupt.wait_with(ended.as_fd())?;
    if interrupt.is_noted() {
        // The child has not been waited for, so its process id cannot have been reused.
        kill_process_group(group, Signal::KILL)?;
    }
    let status = child.wait()?;
    Ok((!interrupt.is_noted()).then_some(status))
}

/// Returns the note of a batch, or `None` if the batch has no note or is no longer in the log.
fn note_of(past: &KeptStates<'_>, lsn: Lsn) -> Result<Option<String>, Failure> {
    let survey = &past.survey;
    let bases =
        survey.readable().rev().filter(|manifest| manifest.redo.lsn < lsn).map(|manifest| manifest.redo);
    let Some(from) = bases.chain(survey.log.beginning()).next() else { return Ok(None) };
    let mut walk = LogWalk::new(past.dir(), &survey.log, from, survey.mark()).map_err(damaged)?;
    while let Some(frame) = walk.next().map_err(damaged)? {
        if frame.header.lsn == lsn && frame.header.kind == FrameKind::Batch {
            let ops = decode_payload(frame.payload).map_err(|defect| Failure::Damage(defect.to_string()))?;
            return Ok(ops.iter().find_map(|at| match &at.op {
                Op::Note { text } => Some((*text).to_owned()),
                _ => None,
            }));
        }
    }
    Ok(None)
}
