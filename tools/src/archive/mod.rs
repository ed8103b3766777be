//! `remanent archive` copies closed stores to an object store, and checks and prunes these copies. `restore.rs` is
//! `remanent restore --from`.
//!
//! Every command may be interrupted or killed at any moment and run again: the crate `remanent-archive` changes an archive
//! and a directory only in steps that a crash may end.

mod prune;
mod push;
pub mod restore;
mod status;
mod verify;
mod watched_bucket;

use crate::cli::exit::Outcome;
use crate::cli::output::Output;

const EXAMPLES: &str = "\
An archive is a copy of one store in a bucket of an object store, or in a folder: \"archive push\" adds what is new, and \
\"restore --from\" makes a store from it on any machine. URL is one of

  s3://BUCKET/PATH            S3, or a server with its protocol
  gs://BUCKET/PATH            Google Cloud Storage
  az://CONTAINER/PATH         Azure Blob Storage
  file:///FOLDER              an existing local folder

Credentials and settings come from the environment, in the variables of the service: AWS_ACCESS_KEY_ID, \
AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT, GOOGLE_SERVICE_ACCOUNT, AZURE_STORAGE_ACCOUNT_NAME and so on. A URL \
with a password or a query is refused. A server without TLS also needs AWS_ALLOW_HTTP=true. The credential needs get, put, \
list and delete.

Each command may be interrupted at any time and run again.

Examples:
  remanent archive push store s3://bucket/run-7       after each run, when the store is closed
  remanent archive status s3://bucket/run-7           what the archive contains
  remanent archive verify s3://bucket/run-7           read all of it
  remanent restore --from s3://bucket/run-7 store     on another machine";

/// Copy a store to an object store, and check and prune the copy
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Archive {
    #[command(subcommand)]
    command: ArchiveCommand,
}

#[derive(clap::Subcommand)]
enum ArchiveCommand {
    Push(push::Push),
    Status(status::Status),
    Verify(verify::Verify),
    Prune(prune::Prune),
}

impl Archive {
    pub fn run(&self, out: &mut Output) -> Outcome {
        match &self.command {
            ArchiveCommand::Push(command) => command.run(out),
            ArchiveCommand::Status(command) => command.run(out),
            ArchiveCommand::Verify(command) => command.run(out),
            ArchiveCommand::Prune(command) => command.run(out),
        }
    }
}
