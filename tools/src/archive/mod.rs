//! `remanent archive` copies closed stores to an object store, and checks and prunes these copies. `restore.rs`
//! implements `remanent restore --from`.
//!
//! Every command may be interrupted or killed at any time and run again, because each step by which the crate
//! `remanent-archive` changes an archive or a directory is crash-safe.

mod prune;
mod push;
pub mod restore;
mod status;
mod verify;
mod watched_bucket;

use crate::cli::exit::Outcome;
use crate::cli::output::Output;

const EXAMPLES: &str = "\
An archive is a copy of one store in a bucket of an object store or in a local folder. \"archive push\" uploads new \
data, and \"restore --from\" restores the store on any machine. URL is one of

  s3://BUCKET/PATH            S3 or a compatible server
  gs://BUCKET/PATH            Google Cloud Storage
  az://CONTAINER/PATH         Azure Blob Storage
  file:///FOLDER              an existing local folder

Credentials and settings are read from the environment variables of the service: AWS_ACCESS_KEY_ID, \
AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT, GOOGLE_SERVICE_ACCOUNT, AZURE_STORAGE_ACCOUNT_NAME and so on. A \
URL with a password or a query is rejected. A server without TLS also needs AWS_ALLOW_HTTP=true. The credentials must \
permit get, put, list and delete.

Each command can be interrupted at any time and run again.

Examples:
  remanent archive push store s3://bucket/run-7       archive the store after each run
  remanent archive status s3://bucket/run-7           show what the archive contains
  remanent archive verify s3://bucket/run-7           check the archive
  remanent restore --from s3://bucket/run-7 store     restore it on another machine";

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
