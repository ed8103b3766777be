//! The program that this process is: commands that kill a store, or weigh an open, start it anew as a child.

use std::ffi::OsString;
use std::io;
use std::process::Command;
use std::sync::OnceLock;

static PROGRAM: OnceLock<Vec<OsString>> = OnceLock::new();

/// Says how the command is started where it is not this process's own executable: the program, then its
/// arguments before those of the command. The first call counts.
pub fn set(program: Vec<OsString>) {
    let _ = PROGRAM.set(program);
}

/// The command once more, as a process that is yet to be started.
pub fn again() -> io::Result<Command> {
    let Some([program, arguments @ ..]) = PROGRAM.get().map(Vec::as_slice) else {
        return Ok(Command::new(std::env::current_exe()?));
    };
    let mut command = Command::new(program);
    command.args(arguments);
    Ok(command)
}
