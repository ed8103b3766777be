//! A simulation of NIXL without a network. It exports the functions of NIXL's C interface that `src/nixl` calls, with
//! the same signatures.
//!
//! All agents belong to one process, and a transfer copies bytes between two of them. The module `faults` makes calls
//! fail, keeps transfers in flight, and counts objects that were not freed.
//!
//! A call that violates the rules of the library aborts the process with a message.

#![allow(clippy::missing_safety_doc, reason = "the safety rules of NIXL apply to all functions")]

mod faults;
mod network;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use network::{List, Messages, Range};

/// The statuses of calls.
mod status {
    use std::ffi::c_int;

    pub const SUCCESS: c_int = 0;
    pub const IN_PROGRESS: c_int = 1;
    pub const INVALID_PARAM: c_int = -1;
    pub const BACKEND: c_int = -2;
    pub const INVALID_STATE: c_int = -3;
    pub const NOT_FOUND: c_int = -6;
}

/// An object of the library.
enum Object {
    Agent(Vec<u8>),
    Params,
    Backend,
    Arguments { message: Vec<u8>, is_enabled: bool },
    Registrations(List),
    Ranges(List),
    Request(Box<Request>),
    Messages(Messages, Vec<Vec<u8>>),
}

struct Request {
    agent: Vec<u8>,
    peer: Vec<u8>,
    from: List,
    to: List,
    message: Option<Vec<u8>>,
    is_write: bool,
    state: RequestState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestState {
    Created,
    /// The number of status calls for which the transfer stays in flight.
    InFlight(u64),
    Done,
    Failed,
    Released,
}

impl Request {
    /// Copies the bytes and delivers the notification. Returns the status of the request.
    fn complete(&mut self) -> c_int {
        let [local, remote] = if self.is_write { [&self.from, &self.to] } else { [&self.to, &self.from] };
        assert!(network::is_registered(&self.agent, local), "local memory was deregistered in flight");
        assert!(network::is_registered(&self.peer, remote), "a peer's memory was deregistered in flight");
        // SAFETY: the ranges are registered.
        let is_copied = unsafe { network::copy(&self.from, &self.to) };
        let is_delivered =
            self.message.as_ref().is_none_or(|message| network::deliver(&self.agent, &self.peer, message));
        self.state = if is_copied && is_delivered { RequestState::Done } else { RequestState::Failed };
        self.status()
    }

    fn status(&self) -> c_int {
        match self.state {
            RequestState::Done => status::SUCCESS,
            RequestState::InFlight(_) => status::IN_PROGRESS,
            _ => status::BACKEND,
        }
    }
}

/// Runs `work`, which returns the status of the call, unless the call must fail.
fn call(name: &str, work: impl FnOnce() -> c_int) -> c_int {
    faults::injected_fault(name).map_or_else(|status| status, |()| work())
}

/// Returns a handle to a new object in `handle`.
unsafe fn create(object: Object, handle: *mut *mut c_void) -> c_int {
    faults::object_created();
    // SAFETY: the caller follows the rules of NIXL.
    unsafe { *handle = Box::into_raw(Box::new(object)).cast() };
    status::SUCCESS
}

/// Frees an object.
unsafe fn free(handle: *mut c_void) -> c_int {
    assert!(!handle.is_null(), "no object");
    faults::object_freed();
    // SAFETY: handles come from `create`, and this one is not used again.
    drop(unsafe { Box::from_raw(handle.cast::<Object>()) });
    status::SUCCESS
}

/// Returns the object of a handle.
unsafe fn object<'o>(handle: *mut c_void) -> &'o mut Object {
    assert!(!handle.is_null(), "no object");
    // SAFETY: the handle is that of a live object, which no other thread uses now.
    unsafe { &mut *handle.cast::<Object>() }
}

unsafe fn agent<'o>(handle: *mut c_void) -> &'o [u8] {
    // SAFETY: the caller of this function guarantees the same conditions.
    match unsafe { object(handle) } {
        Object::Agent(name) => name,
        _ => panic!("no agent"),
    }
}

unsafe fn list<'o>(handle: *mut c_void) -> &'o mut List {
    // SAFETY: the caller of this function guarantees the same conditions.
    match unsafe { object(handle) } {
        Object::Registrations(list) | Object::Ranges(list) => list,
        _ => panic!("no list"),
    }
}

unsafe fn request<'o>(handle: *mut c_void) -> &'o mut Request {
    // SAFETY: the caller of this function guarantees the same conditions.
    match unsafe { object(handle) } {
        Object::Request(request) => request,
        _ => panic!("no request"),
    }
}

unsafe fn text<'t>(text: *const c_char) -> &'t [u8] {
    // SAFETY: the caller follows the rules of NIXL.
    unsafe { CStr::from_ptr(text) }.to_bytes()
}

unsafe fn bytes<'b>(data: *const c_void, len: usize) -> &'b [u8] {
    // SAFETY: the caller follows the rules of NIXL.
    if len == 0 { &[] } else { unsafe { std::slice::from_raw_parts(data.cast(), len) } }
}

/// Returns a copy of bytes in an allocation that the caller frees.
fn allocated(bytes: &[u8]) -> *mut c_void {
    // SAFETY: any length may be requested.
    let copy = unsafe { libc::malloc(bytes.len().max(1)) };
    assert!(!copy.is_null(), "no memory");
    // SAFETY: the allocation has this length.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), copy.cast(), bytes.len()) };
    copy
}

/// The configuration of an agent.
#[repr(C)]
pub struct Config {
    has_progress_thread: bool,
    has_listen_thread: bool,
    listen_port: c_int,
    thread_sync: c_uint,
    workers: c_uint,
    progress_delay_us: u64,
    listen_delay_us: u64,
    captures_telemetry: bool,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_create_configured_agent(
    name: *const c_char,
    config: *const Config,
    handle: *mut *mut c_void,
) -> c_int {
    call("nixl_capi_create_configured_agent", || {
        // SAFETY: the caller follows the rules of NIXL.
        let config = unsafe { &*config };
        let is_expected = !config.has_listen_thread
            && config.listen_port == 0
            && config.thread_sync == 1
            && config.workers == 1
            && config.progress_delay_us == 1000
            && config.listen_delay_us == 0
            && !config.captures_telemetry;
        // SAFETY: as above.
        let name = unsafe { text(name) }.to_vec();
        if !is_expected || name.is_empty() || !network::add(&name) {
            return status::INVALID_PARAM;
        }
        network::with(&name, |agent| agent.has_progress_thread = config.has_progress_thread);
        // SAFETY: as above.
        unsafe { create(Object::Agent(name), handle) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_destroy_agent(handle: *mut c_void) -> c_int {
    call("nixl_capi_destroy_agent", || {
        // SAFETY: the caller follows the rules of NIXL.
        network::remove(unsafe { agent(handle) });
        // SAFETY: as above.
        unsafe { free(handle) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_get_local_md(
    handle: *mut c_void,
    data: *mut *mut c_void,
    len: *mut usize,
) -> c_int {
    call("nixl_capi_get_local_md", || {
        // SAFETY: the caller follows the rules of NIXL.
        let metadata = network::metadata(unsafe { agent(handle) });
        // SAFETY: as above.
        unsafe { *data = allocated(&metadata) };
        // SAFETY: as above.
        unsafe { *len = metadata.len() };
        status::SUCCESS
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_load_remote_md(
    handle: *mut c_void,
    data: *const c_void,
    len: usize,
    name: *mut *mut c_char,
) -> c_int {
    call("nixl_capi_load_remote_md", || {
        // SAFETY: the caller follows the rules of NIXL.
        let own = unsafe { agent(handle) };
        // SAFETY: as above.
        let Some((peer, registered)) = network::parse(unsafe { bytes(data, len) }) else {
            return status::BACKEND;
        };
        if peer == own {
            return status::INVALID_PARAM;
        }
        // Newer metadata add memory, and remove none.
        network::with(own, |agent| agent.peers.entry(peer.clone()).or_default().extend(registered));
        let mut text = peer;
        text.push(0);
        // SAFETY: as above.
        unsafe { *name = allocated(&text).cast() };
        status::SUCCESS
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_invalidate_remote_md(handle: *mut c_void, name: *const c_char) -> c_int {
    call("nixl_capi_invalidate_remote_md", || {
        // SAFETY: the caller follows the rules of NIXL.
        let (own, peer) = unsafe { (agent(handle), text(name)) };
        let is_known = network::with(own, |agent| agent.peers.remove(peer).is_some());
        if is_known { status::SUCCESS } else { status::NOT_FOUND }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_create_params(params: *mut *mut c_void) -> c_int {
    // SAFETY: the caller follows the rules of NIXL.
    call("nixl_capi_create_params", || unsafe { create(Object::Params, params) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_params_add(
    params: *mut c_void,
    key: *const c_char,
    value: *const c_char,
) -> c_int {
    call("nixl_capi_params_add", || {
        // SAFETY: the caller follows the rules of NIXL.
        assert!(matches!(unsafe { object(params) }, Object::Params), "no parameters");
        assert!(!key.is_null() && !value.is_null());
        status::SUCCESS
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_destroy_params(params: *mut c_void) -> c_int {
    // SAFETY: the caller follows the rules of NIXL.
    call("nixl_capi_destroy_params", || unsafe { free(params) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_create_backend(
    handle: *mut c_void,
    plugin: *const c_char,
    params: *mut c_void,
    backend: *mut *mut c_void,
) -> c_int {
    call("nixl_capi_create_backend", || {
        if params.is_null() {
            return status::INVALID_PARAM;
        }
        // SAFETY: the caller follows the rules of NIXL.
        let plugin = String::from_utf8_lossy(unsafe { text(plugin) }).into_owned();
        // SAFETY: as above.
        let is_new = network::with(unsafe { agent(handle) }, |agent| {
            let is_new = ["UCX", "POSIX"].contains(&&*plugin) && !agent.backends.contains(&plugin);
            agent.backends.push(plugin);
            is_new
        });
        if !is_new {
            return status::BACKEND;
        }
        // SAFETY: as above.
        unsafe { create(Object::Backend, backend) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_destroy_backend(backend: *mut c_void) -> c_int {
    // SAFETY: the caller follows the rules of NIXL.
    call("nixl_capi_destroy_backend", || unsafe { free(backend) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_create_opt_args(arguments: *mut *mut c_void) -> c_int {
    let new = Object::Arguments { message: Vec::new(), is_enabled: false };
    // SAFETY: the caller follows the rules of NIXL.
    call("nixl_capi_create_opt_args", || unsafe { create(new, arguments) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_opt_args_set_notif_msg(
    arguments: *mut c_void,
    data: *const c_void,
    len: usize,
) -> c_int {
    call("nixl_capi_opt_args_set_notif_msg", || {
        // SAFETY: the caller follows the rules of NIXL.
        let Object::Arguments { message, .. } = (unsafe { object(arguments) }) else {
            panic!("no arguments")
        };
        // SAFETY: as above.
        *message = unsafe { bytes(data, len) }.to_vec();
        status::SUCCESS
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_opt_args_set_has_notif(arguments: *mut c_void, enabled: bool) -> c_int {
    call("nixl_capi_opt_args_set_has_notif", || {
        // SAFETY: the caller follows the rules of NIXL.
        let Object::Arguments { is_enabled, .. } = (unsafe { object(arguments) }) else {
            panic!("no arguments")
        };
        *is_enabled = enabled;
        status::SUCCESS
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_destroy_opt_args(arguments: *mut c_void) -> c_int {
    // SAFETY: the caller follows the rules of NIXL.
    call("nixl_capi_destroy_opt_args", || unsafe { free(arguments) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_create_reg_dlist(kind: c_int, list: *mut *mut c_void) -> c_int {
    let new = Object::Registrations(List { kind, ranges: Vec::new() });
    // SAFETY: the caller follows the rules of NIXL.
    call("nixl_capi_create_reg_dlist", || unsafe { create(new, list) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_reg_dlist_add_desc(
    handle: *mut c_void,
    address: usize,
    len: usize,
    device: u64,
    _metadata: *const c_void,
    _metadata_len: usize,
) -> c_int {
    call("nixl_capi_reg_dlist_add_desc", || {
        // SAFETY: the caller follows the rules of NIXL.
        unsafe { list(handle) }.ranges.push(Range { address, len, device });
        status::SUCCESS
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_destroy_reg_dlist(list: *mut c_void) -> c_int {
    // SAFETY: the caller follows the rules of NIXL.
    call("nixl_capi_destroy_reg_dlist", || unsafe { free(list) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_register_mem(
    handle: *mut c_void,
    registrations: *mut c_void,
    _arguments: *mut c_void,
) -> c_int {
    call("nixl_capi_register_mem", || {
        // SAFETY: the caller follows the rules of NIXL.
        let List { kind, ranges } = unsafe { list(registrations) };
        // SAFETY: as above.
        network::with(unsafe { agent(handle) }, |agent| {
            let plugin = if *kind == network::FILE { "POSIX" } else { "UCX" };
            let is_served = agent.backends.iter().any(|backend| backend == plugin || *kind == 0);
            if !is_served {
                return status::BACKEND;
            }
            agent.registered.extend(ranges.iter().map(|range| (*kind, *range)));
            status::SUCCESS
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_deregister_mem(
    handle: *mut c_void,
    registrations: *mut c_void,
    _arguments: *mut c_void,
) -> c_int {
    call("nixl_capi_deregister_mem", || {
        // SAFETY: the caller follows the rules of NIXL.
        let List { kind, ranges } = unsafe { list(registrations) };
        // SAFETY: as above.
        network::with(unsafe { agent(handle) }, |agent| {
            for range in ranges {
                let at = agent.registered.iter().position(|registered| *registered == (*kind, *range));
                agent.registered.remove(at.expect("registered memory"));
            }
        });
        status::SUCCESS
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_create_xfer_dlist(kind: c_int, list: *mut *mut c_void) -> c_int {
    let new = Object::Ranges(List { kind, ranges: Vec::new() });
    // SAFETY: the caller follows the rules of NIXL.
    call("nixl_capi_create_xfer_dlist", || unsafe { create(new, list) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_xfer_dlist_add_desc(
    handle: *mut c_void,
    address: usize,
    len: usize,
    device: u64,
) -> c_int {
    call("nixl_capi_xfer_dlist_add_desc", || {
        // SAFETY: the caller follows the rules of NIXL.
        unsafe { list(handle) }.ranges.push(Range { address, len, device });
        status::SUCCESS
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_destroy_xfer_dlist(list: *mut c_void) -> c_int {
    // SAFETY: the caller follows the rules of NIXL.
    call("nixl_capi_destroy_xfer_dlist", || unsafe { free(list) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_create_xfer_req(
    handle: *mut c_void,
    operation: c_int,
    local: *mut c_void,
    remote: *mut c_void,
    peer: *const c_char,
    request: *mut *mut c_void,
    arguments: *mut c_void,
) -> c_int {
    call("nixl_capi_create_xfer_req", || {
        // SAFETY: the caller follows the rules of NIXL.
        let (own, peer) = unsafe { (agent(handle), text(peer)) };
        // SAFETY: as above.
        let (local, remote) = unsafe { (list(local).clone(), list(remote).clone()) };
        let is_known = network::with(own, |agent| {
            let of_peer = if peer == own { Some(&agent.registered) } else { agent.peers.get(peer) };
            network::covers(&agent.registered, &local)
                && of_peer.is_some_and(|registered| network::covers(registered, &remote))
        });
        let lens = |list: &List| list.ranges.iter().map(|range| range.len).collect::<Vec<_>>();
        if !is_known || local.ranges.is_empty() || lens(&local) != lens(&remote) {
            return status::BACKEND;
        }
        let mut notification = None;
        if !arguments.is_null() {
            // SAFETY: as above.
            let Object::Arguments { message, is_enabled } = (unsafe { object(arguments) }) else { panic!() };
            notification = is_enabled.then(|| message.clone());
        }
        let (from, to) = if operation == 1 { (local, remote) } else { (remote, local) };
        let new = Request {
            agent: own.to_vec(),
            peer: peer.to_vec(),
            from,
            to,
            message: notification,
            is_write: operation == 1,
            state: RequestState::Created,
        };
        // SAFETY: as above.
        unsafe { create(Object::Request(Box::new(new)), request) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_post_xfer_req(
    _agent: *mut c_void,
    handle: *mut c_void,
    _arguments: *mut c_void,
) -> c_int {
    call("nixl_capi_post_xfer_req", || {
        // SAFETY: the caller follows the rules of NIXL.
        let request = unsafe { request(handle) };
        assert_eq!(request.state, RequestState::Created, "a request is posted twice");
        match faults::delay() {
            0 => request.complete(),
            calls => {
                request.state = RequestState::InFlight(calls);
                status::IN_PROGRESS
            }
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_get_xfer_status(_agent: *mut c_void, handle: *mut c_void) -> c_int {
    call("nixl_capi_get_xfer_status", || {
        // SAFETY: the caller follows the rules of NIXL.
        let request = unsafe { request(handle) };
        match &mut request.state {
            RequestState::InFlight(u64::MAX) => status::IN_PROGRESS,
            RequestState::InFlight(1) => request.complete(),
            RequestState::InFlight(calls) => {
                *calls -= 1;
                status::IN_PROGRESS
            }
            _ => request.status(),
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_release_xfer_req(_agent: *mut c_void, handle: *mut c_void) -> c_int {
    call("nixl_capi_release_xfer_req", || {
        // SAFETY: the caller follows the rules of NIXL.
        let request = unsafe { request(handle) };
        assert_ne!(request.state, RequestState::Released, "a request is released twice");
        request.state = RequestState::Released;
        status::SUCCESS
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_destroy_xfer_req(handle: *mut c_void) -> c_int {
    call("nixl_capi_destroy_xfer_req", || {
        // SAFETY: the caller follows the rules of NIXL.
        if unsafe { request(handle) }.state != RequestState::Released {
            return status::INVALID_STATE;
        }
        // SAFETY: as above.
        unsafe { free(handle) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_gen_notif(
    handle: *mut c_void,
    peer: *const c_char,
    data: *const c_void,
    len: usize,
    _arguments: *mut c_void,
) -> c_int {
    call("nixl_capi_gen_notif", || {
        // SAFETY: the caller follows the rules of NIXL.
        let (own, peer) = unsafe { (agent(handle), text(peer)) };
        let is_known = network::with(own, |agent| agent.peers.contains_key(peer));
        if !is_known {
            return status::NOT_FOUND;
        }
        // SAFETY: as above.
        let is_delivered = network::deliver(own, peer, unsafe { bytes(data, len) });
        if is_delivered { status::SUCCESS } else { status::BACKEND }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_create_notif_map(map: *mut *mut c_void) -> c_int {
    let new = Object::Messages(Messages::new(), Vec::new());
    // SAFETY: the caller follows the rules of NIXL.
    call("nixl_capi_create_notif_map", || unsafe { create(new, map) })
}

unsafe fn messages<'o>(map: *mut c_void) -> (&'o mut Messages, &'o mut Vec<Vec<u8>>) {
    // SAFETY: the caller of this function guarantees the same conditions.
    match unsafe { object(map) } {
        Object::Messages(messages, names) => (messages, names),
        _ => panic!("no messages"),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_get_notifs(
    handle: *mut c_void,
    map: *mut c_void,
    _arguments: *mut c_void,
) -> c_int {
    call("nixl_capi_get_notifs", || {
        // SAFETY: the caller follows the rules of NIXL.
        let (received, names) = unsafe { messages(map) };
        // SAFETY: as above.
        *received = network::with(unsafe { agent(handle) }, |agent| std::mem::take(&mut agent.received));
        *names = received.keys().map(|name| [name, &[0][..]].concat()).collect();
        status::SUCCESS
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_notif_map_size(map: *mut c_void, count: *mut usize) -> c_int {
    call("nixl_capi_notif_map_size", || {
        // SAFETY: the caller follows the rules of NIXL.
        let found = unsafe { messages(map) }.0.len();
        // SAFETY: as above.
        unsafe { *count = found };
        status::SUCCESS
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_notif_map_get_agent_at(
    map: *mut c_void,
    index: usize,
    name: *mut *const c_char,
) -> c_int {
    call("nixl_capi_notif_map_get_agent_at", || {
        // SAFETY: the caller follows the rules of NIXL.
        let found = unsafe { messages(map) }.1[index].as_ptr();
        // SAFETY: as above.
        unsafe { *name = found.cast() };
        status::SUCCESS
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_notif_map_get_notifs_size(
    map: *mut c_void,
    name: *const c_char,
    count: *mut usize,
) -> c_int {
    call("nixl_capi_notif_map_get_notifs_size", || {
        // SAFETY: the caller follows the rules of NIXL.
        let found = unsafe { messages(map).0[text(name)].len() };
        // SAFETY: as above.
        unsafe { *count = found };
        status::SUCCESS
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_notif_map_get_notif(
    map: *mut c_void,
    name: *const c_char,
    index: usize,
    data: *mut *const c_void,
    len: *mut usize,
) -> c_int {
    call("nixl_capi_notif_map_get_notif", || {
        // SAFETY: the caller follows the rules of NIXL.
        let message: &[u8] = unsafe { &messages(map).0[text(name)][index] };
        // SAFETY: as above.
        unsafe { *data = message.as_ptr().cast() };
        // SAFETY: as above.
        unsafe { *len = message.len() };
        status::SUCCESS
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nixl_capi_destroy_notif_map(map: *mut c_void) -> c_int {
    // SAFETY: the caller follows the rules of NIXL.
    call("nixl_capi_destroy_notif_map", || unsafe { free(map) })
}

/// A function that exists only since the supported version. Nothing calls it.
#[unsafe(no_mangle)]
pub extern "C" fn nixl_capi_create_remote_dlist() -> c_int {
    status::BACKEND
}
