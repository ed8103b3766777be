//! `remanent-bench nixl` measures how fast a process fetches pages from the store of another process.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use remanent::nixl::{
    Agent, AgentOptions, HostBuffer, Nixl, PageClient, PageServer, Peer, Region, RemoteRegion, Transfer,
};
use remanent::{DeviceChoice, Lease, PageId, Place, Store};
use remanent_tools::shared::engine::engine_failure;
use remanent_tools::shared::exit::{Ending, Failure, Outcome};
use remanent_tools::shared::output::Output;
use remanent_tools::shared::program;
use remanent_tools::shared::size::Size;

use crate::figures::{Figure, Findings, Group, Unit};
use crate::room::{self, BenchStop, Room, size};
use crate::{Common, Measure, transfer};

const EXAMPLES: &str = "\
Requires the NIXL library (pip install --no-deps nixl-cu12==1.5.1). Of two processes on this machine, one serves the \
pages of a store in host memory, and the other fetches and verifies them. The ceiling is a loop in which the serving \
process writes the same pages to the other process with the library, with as many writes in flight as the client has \
requests, but without request messages, checksums, or a registration for each fetch. UCX selects the transport; the environment variable UCX_TLS limits the choice.

Examples:
  remanent-bench nixl /dev/shm
  UCX_TLS=tcp,self remanent-bench nixl /dev/shm --page-len 64KiB";

/// Number of writes in flight in the loop, each to another part of its target. A page client has as many slots.
const IN_FLIGHT: u64 = 4;

/// Fetches of pages from the store of another process with NIXL
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct NixlBench {
    #[command(flatten)]
    common: Common,
    /// Total size of all pages in bytes
    #[arg(long, default_value = "128MiB")]
    bytes: Size,
    /// Length of each page in bytes
    #[arg(long, value_name = "BYTES", default_value = "2MiB")]
    page_len: Size,
}

impl Measure for NixlBench {
    fn common(&self) -> &Common {
        &self.common
    }

    fn check(&self) -> Result<(), Failure> {
        if self.page_len.0 == 0 || self.page_len.0 > self.bytes.0 {
            let len = self.page_len;
            return Err(Failure::Environment(format!(
                "--page-len {len} must be at least 1 and at most --bytes"
            )));
        }
        Ok(())
    }

    fn bytes_needed(&self) -> u64 {
        self.bytes.0.saturating_mul(2)
    }

    fn steps(&self) -> u64 {
        2 + u64::from(self.common.rounds)
    }

    fn measure(&self, room: &Room) -> Result<Findings, BenchStop> {
        let ceiling = "buffers written by the library";
        let mut written = Figure::new(ceiling, Unit::BytesPerSecond);
        let mut fetched = Figure::new("pages fetched and verified", Unit::BytesPerSecond).under(ceiling);

        room.step("connecting")?;
        let mut server = Server::start(self, room)?;
        let metadata = decoded(&server.line()?)?;
        let nixl = Nixl::load()?;
        let mut client = PageClient::connect(
            nixl.agent(&AgentOptions::new("client").polled())?,
            &metadata,
            self.page_len.0,
        )?;
        // The target of the loop has its own agent, because a client needs exclusive use of its agent.
        let raw = nixl.agent(&AgentOptions::new("raw"))?;
        let target = raw.register(HostBuffer::new((IN_FLIGHT * self.page_len.0) as usize)?)?;
        server.send(&format!("{} {}", encoded(&raw.metadata()?), encoded(&target.describe().to_bytes())))?;
        let pages: Vec<PageId> = (1..=self.pages()).map(PageId).collect();
        let bytes = (self.pages() * self.page_len.0) as f64;
        for round in 0..=self.common.rounds {
            room.step("fetching")?;
            server.send("write")?;
            let line = server.line()?;
            let took: f64 = line
                .parse()
                .map_err(|_| Failure::Environment(format!("not a duration in seconds: {line}")))?;
            let (started, mut count) = (Instant::now(), 0);
            client.fetch_many(&pages, |_, page| count += page.bytes.len())?;
            let fetch_took = started.elapsed().as_secs_f64();
            if count as f64 != bytes {
                return Err(Failure::Environment(format!("{count} of {bytes} bytes arrived")).into());
            }
            // The first round establishes the connections and is not counted.
            if round > 0 {
                written.push(bytes / took);
                fetched.push(bytes / fetch_took);
            }
        }
        drop(client);
        server.end()?;
        let title = format!("{} in pages of {}", size(self.bytes.0), size(self.page_len.0));
        let mut settings = room.settings(&self.common);
        settings.push(("rounds", self.common.rounds.to_string()));
        let tls = std::env::var("UCX_TLS").unwrap_or_else(|_| "all".to_owned());
        settings.push(("transports", tls));
        Ok(Findings {
            bench: "nixl",
            settings,
            groups: vec![Group { title, figures: vec![written, fetched] }],
            left_out: Vec::new(),
        })
    }
}

impl NixlBench {
    fn pages(&self) -> u64 {
        self.bytes.0 / self.page_len.0
    }
}

/// The process of the server. Dropping this value kills it.
struct Server {
    child: Child,
    commands: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Drop for Server {
    fn drop(&mut self) {
        // These calls fail if the process has already ended.
        let _is_over = self.child.kill();
        let _is_over = self.child.wait();
    }
}

impl Server {
    fn start(bench: &NixlBench, room: &Room) -> Result<Self, BenchStop> {
        let mut command = program::again()?;
        command.arg("page-server").arg(room.path("store"));
        command.args(["--pages", &bench.pages().to_string(), "--page-len", &bench.page_len.0.to_string()]);
        // The variables of this process take precedence, because the user may have set them.
        for (name, value) in [("UCX_DEBUG_SIGNO", "0"), ("UCX_MEM_EVENTS", "n")] {
            if std::env::var_os(name).is_none() {
                command.env(name, value);
            }
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let commands = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().expect("piped"));
        Ok(Self { child, commands, answers })
    }

    fn send(&mut self, command: &str) -> Result<(), BenchStop> {
        let commands = self.commands.as_mut().expect("closed only at the end");
        Ok(writeln!(commands, "{command}").and_then(|()| commands.flush())?)
    }

    fn line(&mut self) -> Result<String, BenchStop> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        if line.is_empty() {
            return Err(Failure::Environment("the server has ended; its error is above".to_owned()).into());
        }
        Ok(line.trim_end().to_owned())
    }

    /// Stops the process and waits until it has ended.
    fn end(mut self) -> Result<(), BenchStop> {
        self.commands = None;
        let status = self.child.wait()?;
        if status.success() {
            return Ok(());
        }
        Err(Failure::Environment(format!("the server ended with {status}; its error is above")).into())
    }
}

/// Run the server of `remanent-bench nixl`, which executes commands from standard input
#[derive(clap::Args)]
pub struct PageServerWorker {
    dir: PathBuf,
    #[arg(long)]
    pages: u64,
    #[arg(long)]
    page_len: u64,
}

impl PageServerWorker {
    /// Serves pages until standard input ends.
    pub fn run(&self, out: &mut Output) -> Outcome {
        let (device, _) = room::open_device(DeviceChoice::Host)?;
        let store = room::options().open_with(&self.dir, device).map_err(engine_failure)?;
        let bytes = transfer::random(self.page_len as usize).to_vec();
        for _ in 0..self.pages {
            let mut batch = store.batch();
            batch.create_from(bytes.clone(), Place::Host);
            store.commit(batch).map_err(engine_failure)?;
        }
        let nixl = Nixl::load().map_err(engine_failure)?;
        let agent = nixl.agent(&AgentOptions::new("server").polled()).map_err(engine_failure)?;
        out.line(format_args!("{}", encoded(&agent.metadata().map_err(engine_failure)?)))?;
        out.flush()?;
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let serving = scope.spawn(|| {
                let mut server = PageServer::new(agent, &store);
                while !is_over.load(Ordering::Relaxed) {
                    server.serve(Duration::from_millis(10))?;
                }
                Ok::<(), remanent::Error>(())
            });
            let written = self.write(&nixl, &store, out);
            is_over.store(true, Ordering::Relaxed);
            serving.join().expect("the server does not panic").map_err(engine_failure)?;
            written
        })?;
        store.close().map_err(engine_failure)?;
        Ok(Ending::Fine)
    }

    /// Writes all pages to the region in the first command, once for each further command.
    fn write(&self, nixl: &Nixl, store: &Store, out: &mut Output) -> Result<(), Failure> {
        let mut commands = std::io::stdin().lines();
        let mut next =
            || commands.next().transpose().map_err(|error| Failure::Environment(error.to_string()));
        let Some(target) = next()? else { return Ok(()) };
        let (metadata, region) = target.split_once(' ').unwrap_or_default();
        let agent = nixl.agent(&AgentOptions::new("writer")).map_err(engine_failure)?;
        let peer = agent.load_peer(&decoded(metadata)?).map_err(engine_failure)?;
        let target = RemoteRegion::from_bytes(&decoded(region)?).map_err(engine_failure)?;
        let register = |page| agent.register(store.lease(PageId(page))?);
        let pages: Vec<Region<Lease<'_>>> =
            (1..=self.pages).map(register).collect::<remanent::Result<_>>().map_err(engine_failure)?;
        while next()?.is_some() {
            let started = Instant::now();
            self.write_all(&agent, &peer, &pages, &target).map_err(engine_failure)?;
            out.line(format_args!("{}", started.elapsed().as_secs_f64()))?;
            out.flush()?;
        }
        Ok(())
    }

    fn write_all(
        &self,
        agent: &Agent,
        peer: &Peer,
        pages: &[Region<Lease<'_>>],
        target: &RemoteRegion,
    ) -> remanent::Result<()> {
        let mut in_flight: VecDeque<Transfer<'_>> = VecDeque::new();
        for (page, slot) in pages.iter().zip((0..IN_FLIGHT).cycle()) {
            if in_flight.len() as u64 == IN_FLIGHT
                && let Some(oldest) = in_flight.pop_front()
            {
                oldest.wait()?;
            }
            let to = target.range(slot * self.page_len, self.page_len)?;
            in_flight.push_back(agent.write(peer, &[(page.range(0, self.page_len)?, to)], None)?);
        }
        in_flight.into_iter().try_for_each(Transfer::wait)
    }
}

fn encoded(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn decoded(text: &str) -> Result<Vec<u8>, Failure> {
    let digits = |at: usize| text.get(at..at + 2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
    let bytes: Option<Vec<u8>> = (0..text.len()).step_by(2).map(digits).collect();
    bytes.ok_or_else(|| Failure::Environment(format!("not a hexadecimal string: {text}")))
}
