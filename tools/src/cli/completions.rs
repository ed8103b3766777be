//! `remanent completions` prints a completion script for a shell.

use clap_complete::Shell;

use crate::cli::exit::{Ending, Outcome};
use crate::cli::output::Output;

const EXAMPLES: &str = "\
Examples:
  remanent completions bash > ~/.local/share/bash-completion/completions/remanent
  remanent completions zsh > ~/.zfunc/_remanent
  remanent completions fish > ~/.config/fish/completions/remanent.fish";

/// Print a completion script for a shell
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Completions {
    /// Shell for which to print the script
    shell: Shell,
}

impl Completions {
    pub fn run(&self, mut command: clap::Command, out: &mut Output) -> Outcome {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut command, "remanent", &mut script);
        out.bytes(&script)?;
        Ok(Ending::Fine)
    }
}
