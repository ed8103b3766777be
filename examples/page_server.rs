//! A page that one process serves and another one fetches, by NIXL.
//!
//! ```sh
//! pip install --no-deps nixl-cu12==1.5.1
//! cargo run --example page_server --features nixl
//! ```
//!
//! The program starts itself once more as the client. In a cluster, the client runs on another host and receives the
//! metadata of the server over the network. Without NIXL the example prints a message and succeeds.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example shows what it does")]

#[cfg(feature = "nixl")]
fn main() -> remanent::Result<()> {
    match std::env::args().nth(1) {
        Some(metadata) => pages::fetch(&metadata),
        None => pages::serve(),
    }
}

#[cfg(not(feature = "nixl"))]
fn main() {
    eprintln!("SKIPPED: this build is without the feature `nixl`");
}

#[cfg(feature = "nixl")]
mod pages {
    use std::process::Command;
    use std::time::Duration;

    use remanent::nixl::{AgentOptions, Nixl, PageClient, PageServer};
    use remanent::{DeviceChoice, Key, Options, Place, Result};

    const LEN: usize = 1 << 20;

    pub fn serve() -> Result<()> {
        let nixl = match Nixl::load() {
            Ok(nixl) => nixl,
            Err(error) => {
                eprintln!("SKIPPED: {error}");
                return Ok(());
            }
        };
        let store = Options::new().device(DeviceChoice::Host).open_temporary()?;
        store.put(Key::new("weights")?, vec![7; LEN], Place::Host)?;

        let agent = nixl.agent(&AgentOptions::new("server").polled())?;
        let metadata: String = agent.metadata()?.iter().map(|byte| format!("{byte:02x}")).collect();
        let program = std::env::current_exe().expect("the path of this program");
        // UCX reads its variables when it is loaded, so they are set before the process starts.
        let client = Command::new(program)
            .arg(metadata)
            .env("UCX_DEBUG_SIGNO", "0")
            .env("UCX_MEM_EVENTS", "n")
            .spawn();
        let mut client = client.expect("a process for the client");
        let mut server = PageServer::new(agent, &store);
        let mut sent = Ok(0);
        while client.try_wait().expect("the status of the client").is_none()
            && let Ok(before) = sent
        {
            sent = server.serve(Duration::from_millis(10)).map(|more| before + more);
        }
        let ended = client.wait().expect("the status of the client");
        let sent = sent?;
        assert!(ended.success() && sent == 1);
        println!("sent {sent} page");
        Ok(())
    }

    pub fn fetch(metadata: &str) -> Result<()> {
        let byte = |at| u8::from_str_radix(&metadata[at..at + 2], 16).expect("two digits");
        let metadata: Vec<u8> = (0..metadata.len()).step_by(2).map(byte).collect();
        let agent = Nixl::load()?.agent(&AgentOptions::new("client").polled())?;
        let mut client = PageClient::connect(agent, &metadata, LEN as u64)?;
        let weights = client.fetch_key("weights")?.expect("the page of the server");
        assert_eq!(weights.bytes, vec![7; LEN]);
        println!("fetched {} bytes at epoch {}", weights.bytes.len(), weights.epoch);
        Ok(())
    }
}
