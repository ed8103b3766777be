//! Transfers pages between two processes with the real library, over shared memory and over TCP. The tests are skipped
//! if the library is not installed. The environment variable `REMANENT_NIXL` contains its path.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use remanent::nixl::{
    Agent, AgentOptions, HostBuffer, Nixl, NixlError, Notification, PageClient, PageServer, PeerReplica,
    RemoteRegion,
};
use remanent::{DeviceChoice, Key, Place};

use crate::ground::{failure, page, pattern, store};

/// The time limit of each step.
const PATIENCE: Duration = Duration::from_secs(60);
const PAGES: u64 = 8;
const PAGE_LEN: u64 = 2 << 20;

/// Runs the test `name` in a new process.
fn start(name: &str, folder: &Path, tls: &str) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", name, "--nocapture"]).env("REAL_FOLDER", folder).env("UCX_TLS", tls);
    child.env("UCX_NET_DEVICES", "lo").env("UCX_DEBUG_SIGNO", "0").env("UCX_MEM_EVENTS", "n");
    // With its InfiniBand modules, UCX can crash when the process ends: `findings/nixl-ucx-crashes-at-exit.sh`.
    child.env("UCX_MODULES", "^ib");
    child.env("NIXL_LOG_LEVEL", "FATAL").env("UCX_LOG_LEVEL", "fatal");
    child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits for a child, and asserts that it succeeded.
fn succeed(child: Child) {
    let output = child.wait_with_output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
}

/// Returns true if the library is installed.
fn is_installed() -> bool {
    Nixl::load().inspect_err(|error| eprintln!("SKIPPED: {error}")).is_ok()
}

/// In a child process, returns the folder through which the processes exchange files.
fn folder() -> Option<PathBuf> {
    std::env::var_os("REAL_FOLDER").map(PathBuf::from)
}

/// Waits until `ready` returns a value, and returns the value.
#[expect(clippy::disallowed_methods, reason = "another process changes what is waited for")]
fn wait<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = ready() {
            return found;
        }
        assert!(started.elapsed() < PATIENCE, "{what} did not come");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Writes a file for the other process.
fn publish(folder: &Path, name: &str, bytes: &[u8]) {
    let written = folder.join(format!("{name}.new"));
    std::fs::write(&written, bytes).unwrap();
    std::fs::rename(written, folder.join(name)).unwrap();
}

fn published(folder: &Path, name: &str) -> Vec<u8> {
    wait(name, || std::fs::read(folder.join(name)).ok())
}

fn agent(name: &str) -> Agent {
    Nixl::load().unwrap().agent(&AgentOptions::new(name).timeout(PATIENCE)).unwrap()
}

/// Returns an agent without a progress thread, for a page server or a page client.
fn polled(name: &str, timeout: Duration) -> Agent {
    Nixl::load().unwrap().agent(&AgentOptions::new(name).timeout(timeout).polled()).unwrap()
}

fn received(agent: &Agent) -> Notification {
    wait("a notification", || agent.notifications().unwrap().pop())
}

#[test]
fn two_processes_transfer_pages_both_ways() {
    if folder().is_some() || !is_installed() {
        return;
    }
    for tls in ["shm,tcp,self,cuda", "tcp,self,cuda"] {
        let folder = tempfile::tempdir().unwrap();
        let owner = start("real::child_owns_pages", folder.path(), tls);
        let reader = start("real::child_receives_pages", folder.path(), tls);
        succeed(reader);
        succeed(owner);
    }
}

#[test]
fn child_owns_pages() {
    let Some(folder) = folder() else { return };
    let agent = agent("owner");
    let store = store(DeviceChoice::Host);
    let lease = |seed| page(&store, &pattern(PAGE_LEN as usize, seed), Place::Host);
    let leases = (0..PAGES).map(|seed| store.lease(lease(seed)).unwrap());
    let pages: Vec<_> = leases.map(|lease| agent.register(lease).unwrap()).collect();
    publish(&folder, "owner", &agent.metadata().unwrap());
    publish(&folder, "page", &pages[0].describe().to_bytes());
    let reader = agent.load_peer(&published(&folder, "reader")).unwrap();
    let target = RemoteRegion::from_bytes(&published(&folder, "target")).unwrap();
    let place = |at: usize| target.range(at as u64 * PAGE_LEN, PAGE_LEN).unwrap();
    let ranges: Vec<_> =
        pages.iter().enumerate().map(|(at, page)| (page.range(0, PAGE_LEN).unwrap(), place(at))).collect();
    agent.write(&reader, &ranges, Some(b"written")).unwrap().wait().unwrap();
    let ended = received(&agent);
    assert_eq!((&*ended.peer, &*ended.bytes), (reader.name(), &b"read"[..]));
}

#[test]
fn child_receives_pages() {
    let Some(folder) = folder() else { return };
    let agent = agent("reader");
    let buffer = HostBuffer::new((PAGES * PAGE_LEN) as usize).unwrap();
    let target = agent.register(buffer.clone()).unwrap();
    let owner = agent.load_peer(&published(&folder, "owner")).unwrap();
    publish(&folder, "target", &target.describe().to_bytes());
    publish(&folder, "reader", &agent.metadata().unwrap());
    let written = received(&agent);
    assert_eq!((&*written.peer, &*written.bytes), (owner.name(), &b"written"[..]));
    let mut bytes = vec![0; PAGE_LEN as usize];
    for at in 0..PAGES {
        buffer.read(at * PAGE_LEN, &mut bytes).unwrap();
        assert!(bytes == pattern(PAGE_LEN as usize, at), "page {at} differs");
    }
    // Transfers the first page again, with a read.
    buffer.write(0, &vec![0; PAGE_LEN as usize]).unwrap();
    let page = RemoteRegion::from_bytes(&published(&folder, "page")).unwrap();
    let range = [(target.range(0, PAGE_LEN).unwrap(), page.range(0, PAGE_LEN).unwrap())];
    agent.read(&owner, &range, None).unwrap().wait().unwrap();
    buffer.read(0, &mut bytes).unwrap();
    assert!(bytes == pattern(PAGE_LEN as usize, 0), "the page that was read differs");
    agent.notify(&owner, b"read").unwrap();
    // The owner receives the message only when its agent polls for it.
    drop(agent);
}

#[test]
fn two_processes_exchange_verified_pages() {
    if folder().is_some() || !is_installed() {
        return;
    }
    for tls in ["shm,tcp,self,cuda", "tcp,self,cuda"] {
        let folder = tempfile::tempdir().unwrap();
        let server = start("real::child_serves_pages", folder.path(), tls);
        let client = start("real::child_fetches_pages", folder.path(), tls);
        succeed(client);
        publish(folder.path(), "end", b"");
        succeed(server);
    }
}

/// Number of small pages of the store that is replicated, and their length.
const SMALL_PAGES: u64 = 3000;
const SMALL_LEN: u64 = 64;

#[test]
fn two_processes_replicate_changing_store() {
    if folder().is_some() || !is_installed() {
        return;
    }
    for tls in ["shm,tcp,self,cuda", "tcp,self,cuda"] {
        let folder = tempfile::tempdir().unwrap();
        let server = start("real::child_serves_changing_store", folder.path(), tls);
        let client = start("real::child_replicates_store", folder.path(), tls);
        succeed(client);
        publish(folder.path(), "end", b"");
        succeed(server);
    }
}

/// Serves a store in which each batch writes its number to every 100th page and to the root.
#[test]
fn child_serves_changing_store() {
    let Some(folder) = folder() else { return };
    let store = store(DeviceChoice::Host);
    let mut batch = store.batch();
    for number in 0..SMALL_PAGES {
        let page = batch.create(SMALL_LEN, Place::Host).key(format!("small {number}")).page();
        batch.set_metadata(page, "number", number);
    }
    batch.create_from(pattern(PAGE_LEN as usize, 1), Place::Disk).key("large");
    batch.set_root("number", 0u64);
    let pages = store.commit(batch).unwrap().pages;
    let agent = agent("server");
    publish(&folder, "server", &agent.metadata().unwrap());
    let mut server = PageServer::new(agent, &store);
    let (mut number, mut changed) = (0u64, Instant::now());
    while !folder.join("end").exists() {
        let sent = server.serve(Duration::from_millis(10)).unwrap();
        // The pages change while the client fetches them, but not so often that it never has them all.
        if sent > 0 && changed.elapsed() > Duration::from_secs(1) && !folder.join("still").exists() {
            number += 1;
            let mut batch = store.batch();
            for page in pages.iter().step_by(100) {
                batch.write(*page, 0, &number.to_le_bytes());
            }
            batch.set_root("number", number);
            store.commit(batch).unwrap();
            changed = Instant::now();
        }
    }
}

#[test]
fn child_replicates_store() {
    let Some(folder) = folder() else { return };
    let mut client = PageClient::connect(agent("client"), &published(&folder, "server"), PAGE_LEN).unwrap();
    let started = Instant::now();
    let mut replica = wait("a replica", || match client.replica() {
        Ok(replica) => Some(replica),
        Err(error) => {
            assert!(error.to_string().contains("changed while they were fetched"), "{error}");
            None
        }
    });
    eprintln!("{} pages in {:?}", replica.pages().len(), started.elapsed());
    let check = |replica: &PeerReplica| {
        let number = replica.root()["number"].as_u64().unwrap();
        let pages: Vec<_> = replica.pages().collect();
        assert_eq!(pages.len() as u64, SMALL_PAGES + 1);
        for (at, info) in pages.iter().enumerate() {
            let bytes = replica.bytes(info.page).unwrap();
            if at % 100 == 0 && (at as u64) < SMALL_PAGES {
                assert_eq!(bytes[..8], number.to_le_bytes(), "page {at}");
                assert_eq!(info.metadata["number"].as_u64(), Some(at as u64));
            }
        }
        let large = replica.page_by_key("large").unwrap();
        // The first bytes of the last page contain the number, because the page is one of every 100.
        assert!(replica.bytes(large.page).unwrap()[8..] == pattern(PAGE_LEN as usize, 1)[8..]);
        number
    };
    let first = check(&replica);
    wait("a change", || {
        let started = Instant::now();
        match replica.refresh(&mut client) {
            Ok(fetched) => eprintln!("{fetched} pages in {:?}", started.elapsed()),
            Err(error) => {
                assert!(error.to_string().contains("changed while they were fetched"), "{error}");
            }
        }
        // Any page that is sent lets the server change the pages.
        client.fetch_key("small 1").unwrap();
        (check(&replica) > first + 2).then_some(())
    });
    publish(&folder, "still", b"");
    // The server may be committing its last batch.
    wait("the last state", || (replica.refresh(&mut client).unwrap() == 0).then_some(()));
    check(&replica);
}

#[test]
fn killed_server_is_reported_to_client() {
    if folder().is_some() || !is_installed() {
        return;
    }
    for tls in ["shm,tcp,self,cuda", "tcp,self,cuda"] {
        let folder = tempfile::tempdir().unwrap();
        let mut server = start("real::child_serves_pages", folder.path(), tls);
        let client = start("real::child_loses_its_server", folder.path(), tls);
        published(folder.path(), "fetched");
        server.kill().unwrap();
        server.wait().unwrap();
        publish(folder.path(), "killed", b"");
        succeed(client);
    }
}

#[test]
fn child_serves_pages() {
    let Some(folder) = folder() else { return };
    let store = store(DeviceChoice::Host);
    for seed in 0..PAGES {
        let key = format!("page {seed}");
        store.put(Key::new(&key).unwrap(), pattern(PAGE_LEN as usize, seed), Place::Host).unwrap();
    }
    let agent = polled("server", PATIENCE);
    publish(&folder, "server", &agent.metadata().unwrap());
    let mut server = PageServer::new(agent, &store);
    while !folder.join("end").exists() {
        server.serve(Duration::from_millis(10)).unwrap();
    }
}

#[test]
fn child_fetches_pages() {
    let Some(folder) = folder() else { return };
    let mut client =
        PageClient::connect(polled("client", PATIENCE), &published(&folder, "server"), PAGE_LEN).unwrap();
    let mut pages = Vec::new();
    for seed in 0..PAGES {
        let page = client.fetch_key(format!("page {seed}")).unwrap().unwrap();
        assert!(page.bytes == pattern(PAGE_LEN as usize, seed), "page {seed} differs");
        pages.push(page.page);
    }
    let (_, fetched) = client.fetch_state(&pages).unwrap();
    for (seed, page) in fetched.iter().enumerate() {
        assert_eq!(page.page, pages[seed]);
        assert!(page.bytes == pattern(PAGE_LEN as usize, seed as u64), "page {seed} differs");
    }
    assert_eq!(client.fetch_key("nameless").unwrap(), None);
}

#[test]
fn child_loses_its_server() {
    let Some(folder) = folder() else { return };
    let agent = polled("client", Duration::from_secs(10));
    let mut client = PageClient::connect(agent, &published(&folder, "server"), PAGE_LEN).unwrap();
    let page = client.fetch_key("page 0").unwrap().unwrap().page;
    publish(&folder, "fetched", b"");
    published(&folder, "killed");
    let error = failure(client.fetch(page));
    assert!(matches!(error, NixlError::TimedOut { .. } | NixlError::Failed { .. }), "{error}");
    assert!(matches!(failure(client.fetch(page)), NixlError::Lost { .. }));
}

#[test]
fn page_is_transferred_between_gpus_of_two_processes() {
    if folder().is_some() {
        return;
    }
    if std::env::var_os("REMANENT_ON_GPUS").is_none() {
        eprintln!("SKIPPED: a GPU is needed, and REMANENT_ON_GPUS=1");
        return;
    }
    assert!(is_installed());
    let folder = tempfile::tempdir().unwrap();
    let tls = "cuda_ipc,cuda_copy,shm,tcp,self";
    let owner = start("real::child_owns_gpu_page", folder.path(), tls);
    let reader = start("real::child_receives_gpu_page", folder.path(), tls);
    succeed(reader);
    succeed(owner);
}

#[test]
fn child_owns_gpu_page() {
    let Some(folder) = folder() else { return };
    let store = store(DeviceChoice::Cuda(0));
    let page = page(&store, &pattern(PAGE_LEN as usize, 1), Place::Device(0));
    let agent = agent("owner");
    let page = agent.register(store.lease(page).unwrap()).unwrap();
    publish(&folder, "owner", &agent.metadata().unwrap());
    let reader = agent.load_peer(&published(&folder, "reader")).unwrap();
    let target = RemoteRegion::from_bytes(&published(&folder, "target")).unwrap();
    let range = [(page.range(0, PAGE_LEN).unwrap(), target.range(0, PAGE_LEN).unwrap())];
    agent.write(&reader, &range, Some(b"written")).unwrap().wait().unwrap();
    assert_eq!(&*received(&agent).bytes, b"read");
}

#[test]
fn child_receives_gpu_page() {
    let Some(folder) = folder() else { return };
    // Uses a second GPU if there is one.
    let gpu = remanent::device::cuda::CudaDevice::count().unwrap() - 1;
    let store = store(DeviceChoice::Cuda(gpu.min(1)));
    let memory = store.device_bytes(PAGE_LEN, Place::Device(0)).unwrap();
    let agent = agent("reader");
    let target = agent.register(memory.clone()).unwrap();
    let owner = agent.load_peer(&published(&folder, "owner")).unwrap();
    publish(&folder, "target", &target.describe().to_bytes());
    publish(&folder, "reader", &agent.metadata().unwrap());
    assert_eq!(&*received(&agent).bytes, b"written");
    let mut bytes = vec![0; PAGE_LEN as usize];
    memory.read(0, &mut bytes).unwrap();
    assert!(bytes == pattern(PAGE_LEN as usize, 1), "the page differs");
    agent.notify(&owner, b"read").unwrap();
}
