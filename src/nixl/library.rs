//! Loads the library, looks up the functions of its C interface, and determines its version.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};

use super::search::{Places, version_of_wheel};
use super::version::Version;
use crate::error::NixlError;

/// The supported version. The C interface is different in earlier and later versions.
const SUPPORTED: &str = "1.5";

/// A function that the supported version added. Earlier versions define a function with other arguments instead.
const SINCE_SUPPORTED: &str = "nixl_capi_create_remote_dlist";
/// A function that a later version added. The later versions have another layout of [`AgentConfig`].
const AFTER_SUPPORTED: &str = "nixl_capi_mem_free";

/// A handle to an object of the library.
pub(super) type Raw = *mut c_void;

/// The status of a call that succeeded.
const SUCCESS: c_int = 0;
/// The status of a transfer that is in flight.
const IN_FLIGHT: c_int = 1;

/// Returns a description of a status. The library reports most failures as failures of the backend.
fn meaning(status: c_int) -> &'static str {
    match status {
        -1 => "invalid parameter",
        -2 => "the backend failed",
        -3 => "invalid state",
        -4 => "an exception",
        -5 => "no telemetry",
        -6 => "not found",
        IN_FLIGHT => "in flight",
        _ => "an error unknown here",
    }
}

/// The result of a successful call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Done,
    InFlight,
}

/// A failed call: the name of the function, and the status that it returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub call: &'static str,
    pub status: c_int,
}

impl Fault {
    /// Converts the failure of a call for agent `agent` to an error.
    pub fn of_agent(self, agent: &str) -> NixlError {
        let Self { call, status } = self;
        NixlError::Failed { agent: agent.to_owned(), call, status, meaning: meaning(status) }
    }
}

/// The configuration of an agent: `nixl_capi_agent_config_t` of version 1.5.
#[repr(C)]
pub(super) struct AgentConfig {
    has_progress_thread: bool,
    has_listen_thread: bool,
    listen_port: c_int,
    thread_sync: c_uint,
    workers: c_uint,
    progress_delay_us: u64,
    listen_delay_us: u64,
    captures_telemetry: bool,
}

impl AgentConfig {
    /// Returns the configuration of an agent that any thread may use. The progress thread, if any, sleeps between
    /// rounds, because it would otherwise use a core even without transfers.
    pub fn shared(has_progress_thread: bool) -> Self {
        const STRICT: c_uint = 1;
        Self {
            has_progress_thread,
            has_listen_thread: false,
            listen_port: 0,
            thread_sync: STRICT,
            workers: 1,
            progress_delay_us: 1000,
            listen_delay_us: 0,
            captures_telemetry: false,
        }
    }
}

macro_rules! functions {
    ($($name:ident = $symbol:literal ($($argument:ident: $type:ty),*);)*) => {
        /// Pointers to the functions of the library. A value of this type exists only if all functions were found.
        struct Functions {
            $($name: unsafe extern "C" fn($($type),*) -> c_int,)*
        }

        impl Functions {
            fn look_up(handle: &Handle) -> Result<Self, &'static str> {
                Ok(Self { $($name: symbol(handle, $symbol)?,)* })
            }
        }

        impl Library {
            $(
                #[doc = concat!("Calls `", $symbol, "`.")]
                ///
                /// # Safety
                /// The caller must follow the library's rules for this function.
                #[allow(clippy::too_many_arguments, reason = "as many as the library's")]
                pub unsafe fn $name(&self, $($argument: $type),*) -> Result<Progress, Fault> {
                    // SAFETY: the caller guarantees this, and the pointer is the function of that signature.
                    match unsafe { (self.functions.$name)($($argument),*) } {
                        SUCCESS => Ok(Progress::Done),
                        IN_FLIGHT => Ok(Progress::InFlight),
                        status => Err(Fault { call: $symbol, status }),
                    }
                }
            )*
        }
    };
}

functions! {
    create_agent = "nixl_capi_create_configured_agent" (
        name: *const c_char, config: *const AgentConfig, agent: *mut Raw
    );
    destroy_agent = "nixl_capi_destroy_agent" (agent: Raw);
    local_metadata = "nixl_capi_get_local_md" (agent: Raw, data: *mut Raw, len: *mut usize);
    load_remote_metadata = "nixl_capi_load_remote_md" (
        agent: Raw, data: *const c_void, len: usize, name: *mut *mut c_char
    );
    invalidate_remote_metadata = "nixl_capi_invalidate_remote_md" (agent: Raw, name: *const c_char);
    create_params = "nixl_capi_create_params" (params: *mut Raw);
    add_param = "nixl_capi_params_add" (params: Raw, key: *const c_char, value: *const c_char);
    destroy_params = "nixl_capi_destroy_params" (params: Raw);
    create_backend = "nixl_capi_create_backend" (
        agent: Raw, plugin: *const c_char, params: Raw, backend: *mut Raw
    );
    destroy_backend = "nixl_capi_destroy_backend" (backend: Raw);
    create_arguments = "nixl_capi_create_opt_args" (arguments: *mut Raw);
    set_notification = "nixl_capi_opt_args_set_notif_msg" (arguments: Raw, data: *const c_void, len: usize);
    enable_notification = "nixl_capi_opt_args_set_has_notif" (arguments: Raw, is_enabled: bool);
    destroy_arguments = "nixl_capi_destroy_opt_args" (arguments: Raw);
    create_registrations = "nixl_capi_create_reg_dlist" (kind: c_int, list: *mut Raw);
    add_registration = "nixl_capi_reg_dlist_add_desc" (
        list: Raw, address: usize, len: usize, device: u64, metadata: *const c_void, metadata_len: usize
    );
    destroy_registrations = "nixl_capi_destroy_reg_dlist" (list: Raw);
    register = "nixl_capi_register_mem" (agent: Raw, list: Raw, arguments: Raw);
    deregister = "nixl_capi_deregister_mem" (agent: Raw, list: Raw, arguments: Raw);
    create_ranges = "nixl_capi_create_xfer_dlist" (kind: c_int, list: *mut Raw);
    add_range = "nixl_capi_xfer_dlist_add_desc" (list: Raw, address: usize, len: usize, device: u64);
    destroy_ranges = "nixl_capi_destroy_xfer_dlist" (list: Raw);
    create_request = "nixl_capi_create_xfer_req" (
        agent: Raw, operation: c_int, local: Raw, remote: Raw, peer: *const c_char, request: *mut Raw, arguments: Raw
    );
    post_request = "nixl_capi_post_xfer_req" (agent: Raw, request: Raw, arguments: Raw);
    request_status = "nixl_capi_get_xfer_status" (agent: Raw, request: Raw);
    release_request = "nixl_capi_release_xfer_req" (agent: Raw, request: Raw);
    destroy_request = "nixl_capi_destroy_xfer_req" (request: Raw);
    notify = "nixl_capi_gen_notif" (
        agent: Raw, peer: *const c_char, data: *const c_void, len: usize, arguments: Raw
    );
    create_notifications = "nixl_capi_create_notif_map" (map: *mut Raw);
    take_notifications = "nixl_capi_get_notifs" (agent: Raw, map: Raw, arguments: Raw);
    count_senders = "nixl_capi_notif_map_size" (map: Raw, count: *mut usize);
    sender_at = "nixl_capi_notif_map_get_agent_at" (map: Raw, index: usize, name: *mut *const c_char);
    count_notifications = "nixl_capi_notif_map_get_notifs_size" (
        map: Raw, name: *const c_char, count: *mut usize
    );
    notification_at = "nixl_capi_notif_map_get_notif" (
        map: Raw, name: *const c_char, index: usize, data: *mut *const c_void, len: *mut usize
    );
    destroy_notifications = "nixl_capi_destroy_notif_map" (map: Raw);
}

/// Looks up a function of the library. `F` is the type of its pointer.
fn symbol<F: Copy>(handle: &Handle, name: &'static str) -> Result<F, &'static str> {
    // SAFETY: the callers name functions of NIXL's C interface with the signatures of version 1.5.
    let found = unsafe { handle.get::<F>(name.as_bytes()) };
    found.map(|function| *function).map_err(|_| name)
}

/// The loaded library.
pub(super) struct Library {
    path: String,
    version: Option<Version>,
    functions: Functions,
}

impl Library {
    /// Loads the first library in `places` that can be loaded.
    ///
    /// # Errors
    /// `NotFound` if no library can be loaded; `MissingSymbol` or `OtherVersion` if the loaded library is not
    /// supported.
    pub fn open_first(places: &Places) -> Result<Self, NixlError> {
        let mut tried = Vec::new();
        for path in &places.paths {
            // SAFETY: loading NIXL runs its constructors, which require nothing from the process.
            match unsafe { Handle::open(Some(path), RTLD_NOW | RTLD_LOCAL) } {
                Ok(handle) => return Self::check(&path.to_string_lossy(), handle),
                Err(error) => tried.push((path.to_string_lossy().into_owned(), error.to_string())),
            }
        }
        let without = places.without.iter().map(|folder| folder.display().to_string());
        tried.extend(without.map(|folder| (folder, "no wheel of NIXL".to_owned())));
        Err(NixlError::NotFound { tried })
    }

    fn check(name: &str, handle: Handle) -> Result<Self, NixlError> {
        let functions = Functions::look_up(&handle);
        let exists = |name| symbol::<*const c_void>(&handle, name).is_ok();
        let (is_older, is_newer) = (!exists(SINCE_SUPPORTED), exists(AFTER_SUPPORTED));
        // The library is never unloaded, because its threads may be running.
        std::mem::forget(handle);
        let library = functions.as_ref().ok().and_then(path_of).unwrap_or_else(|| name.to_owned());
        let version = version_of_wheel(Path::new(&library));
        let is_other = version.is_some_and(|Version(major, minor, _)| (major, minor) != (1, 5));
        let found = match version {
            Some(version) => version.to_string(),
            None if is_older => format!("older than {SUPPORTED}"),
            None => format!("newer than {SUPPORTED}"),
        };
        match functions {
            // A library other than NIXL has none of the functions. An old version of NIXL has some of them.
            Err(symbol) => Err(NixlError::MissingSymbol { library, symbol }),
            Ok(_) if is_other || is_older || is_newer => {
                Err(NixlError::OtherVersion { library, found, supported: SUPPORTED })
            }
            Ok(functions) => Ok(Self { path: library, version, functions }),
        }
    }

    /// Returns the path of the library file.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the version of the wheel that contains the library, or `None` if it is not part of a wheel.
    pub fn version(&self) -> Option<Version> {
        self.version
    }
}

/// Returns the path of the file that contains the functions, without symbolic links.
fn path_of(functions: &Functions) -> Option<String> {
    let address = functions.create_agent as *const c_void;
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the pointers point to a function and to a live structure.
    if unsafe { libc::dladdr(address, info.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: all of the structure's fields may be zero.
    let info = unsafe { info.assume_init() };
    if info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the linker's name of a loaded library ends with a zero byte and lives as long as the library.
    let path = unsafe { CStr::from_ptr(info.dli_fname) }.to_string_lossy().into_owned();
    let real = std::fs::canonicalize(&path).ok();
    Some(real.map_or(path, |real| real.to_string_lossy().into_owned()))
}

/// A handle to an object of the library. Dropping the handle frees the object.
pub(super) struct Owned {
    library: &'static Library,
    raw: Raw,
    free: unsafe fn(&Library, Raw) -> Result<Progress, Fault>,
}

impl Owned {
    /// Creates an object by calling `create`. `free` is the function that frees the object on drop.
    pub fn create(
        library: &'static Library,
        create: impl FnOnce(*mut Raw) -> Result<Progress, Fault>,
        free: unsafe fn(&Library, Raw) -> Result<Progress, Fault>,
    ) -> Result<Self, Fault> {
        let mut raw: Raw = std::ptr::null_mut();
        create(&mut raw)?;
        Ok(Self { library, raw, free })
    }

    pub fn raw(&self) -> Raw {
        self.raw
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: the object was created together with the function that frees it, and is not used again.
        if let Err(Fault { call, status }) = unsafe { (self.free)(self.library, self.raw) } {
            tracing::debug!(call, status, "cannot free an object of NIXL");
        }
    }
}
