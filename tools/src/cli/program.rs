//! The command line that starts this program. Some commands start the program again as a child process, to kill a store
//! or to measure an open.

use std::ffi::OsString;
use std::io;
use std::process::Command;
use std::sync::OnceLock;

static PROGRAM: OnceLock<Vec<OsString>> = OnceLock::new();

/// Sets the command line that starts this program. Needed only if the executable of this process is another program,
/// such as a Python interpreter. Later calls have no effect.
pub fn set(program: Vec<OsString>) {
    let _ = PROGRAM.set(program);
}

/// Returns a command that starts this program as a child process.
pub fn again() -> io::Result<Command> {
    let Some([program, arguments @ ..]) = PROGRAM.get().map(Vec::as_slice) else {
        return Ok(Command::new(std::env::current_exe()?));
    };
    let mut command = Command::new(program);
    command.args(arguments);
    Ok(command)
}
