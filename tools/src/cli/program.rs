//! The command line of this program: commands that kill a store or measure an open start it again as a child
//! process.

use std::ffi::OsString;
use std::io;
use std::process::Command;
use std::sync::OnceLock;

static PROGRAM: OnceLock<Vec<OsString>> = OnceLock::new();

/// Sets the command line that starts the command if it is not this process's own executable: the program,
/// then its leading arguments. Only the first call has an effect.
pub fn set(program: Vec<OsString>) {
    let _ = PROGRAM.set(program);
}

/// Returns the command, ready to be started as a child process.
pub fn again() -> io::Result<Command> {
    let Some([program, arguments @ ..]) = PROGRAM.get().map(Vec::as_slice) else {
        return Ok(Command::new(std::env::current_exe()?));
    };
    let mut command = Command::new(program);
    command.args(arguments);
    Ok(command)
}
