//! The worker process, as seen by the test: it is started, receives commands, and is killed.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use super::text::Command;
use super::{ERRAND_DIRECTORY, TEST, worker};

/// A command that takes longer than this is considered hung. The time is long, because a machine may be busy.
const PATIENCE: Duration = Duration::from_secs(120);

/// The process that has the store open, with its pipes.
pub struct Worker {
    process: Child,
    input: ChildStdin,
    answers: Receiver<String>,
}

impl Worker {
    pub fn start(folder: &Path) -> Self {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "--nocapture", TEST]).env(ERRAND_DIRECTORY, folder.join("store"));
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        let (sender, answers) = mpsc::channel();
        // Answers are read in a separate thread, so that waiting for an answer can time out. The thread ends
        // with the process.
        std::thread::spawn(move || pass_on(output, &sender));
        Self { process, input, answers }
    }

    pub fn send_command(&mut self, command: &Command) {
        // If the process has ended, the missing answer shows this.
        let _ = writeln!(self.input, "{command}").and_then(|()| self.input.flush());
    }

    pub fn answer(&mut self) -> Result<String, String> {
        self.answers.recv_timeout(PATIENCE).map_err(|error| match error {
            mpsc::RecvTimeoutError::Timeout => format!("no answer in {PATIENCE:?}"),
            mpsc::RecvTimeoutError::Disconnected => format!("the worker ended: {:?}", self.process.wait()),
        })
    }

    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // After a kill, there is no process, which is not a failure.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn pass_on(output: ChildStdout, answers: &mpsc::Sender<String>) {
    for line in BufReader::new(output).lines().map_while(Result::ok) {
        let Some(answer) = line.strip_prefix(worker::ANSWER) else { continue };
        if answers.send(answer.to_owned()).is_err() {
            return;
        }
    }
}
