//! The loaded NCCL library: its functions, which are looked up together, and its version.

use std::ffi::{CStr, OsString, c_char, c_int, c_void};
use std::fmt;

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};

use super::codes;
use crate::device::cuda::driver::CUstream;
use crate::error::NcclError;

/// The oldest supported version.
const VERSION_MIN: Version = Version(2, 18, 0);

/// A pointer to an NCCL communicator.
pub(super) type RawCommunicator = *mut c_void;

/// The id of a communicator, `ncclUniqueId`, which the library takes by value.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(super) struct RawId(pub [u8; 128]);

/// The configuration with which a communicator is created: `ncclConfig_t` as of version 2.18. The library uses defaults
/// for the fields that later versions added.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    ctas_min: c_int,
    ctas_max: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// Returns the configuration of a communicator whose calls return before they have completed.
    pub fn non_blocking() -> Self {
        const MAGIC: u32 = 0xCAFE_BEEF;
        const UNDEFINED: c_int = c_int::MIN;
        let Version(major, minor, patch) = VERSION_MIN;
        Self {
            size: size_of::<Self>(),
            magic: MAGIC,
            version: 10_000 * major + 100 * minor + patch,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            ctas_min: UNDEFINED,
            ctas_max: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

/// An NCCL version: major, minor, patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version(pub u32, pub u32, pub u32);

impl Version {
    /// Converts a version number of the library. Up to version 2.8, the minor version had one digit less.
    fn of(number: u32) -> Self {
        let thousands = if number < 10_000 { 1000 } else { 10_000 };
        Self(number / thousands, number % thousands / 100, number % 100)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

/// A call that failed: the name of the function and the code that it returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub call: &'static str,
    pub code: u32,
}

macro_rules! functions {
    ($($name:ident = $symbol:literal ($($argument:ident: $type:ty),*);)*) => {
        /// The functions of the library. A value exists only if all of them were found.
        struct Functions {
            $($name: unsafe extern "C" fn($($type),*) -> u32,)*
            last_error: unsafe extern "C" fn(RawCommunicator) -> *const c_char,
        }

        impl Functions {
            fn look_up(handle: &Handle) -> Result<Self, &'static str> {
                Ok(Self {
                    $($name: symbol(handle, $symbol)?,)*
                    last_error: symbol(handle, "ncclGetLastError")?,
                })
            }
        }

        impl Library {
            $(
                #[doc = concat!("Calls `", $symbol, "`.")]
                ///
                /// # Safety
                /// The caller must follow the library's rules for this function.
                #[allow(clippy::too_many_arguments, reason = "as many as the library's")]
                pub unsafe fn $name(&self, $($argument: $type),*) -> Result<(), Fault> {
                    // SAFETY: the caller's promise; the pointer is the function of that signature.
                    match unsafe { (self.functions.$name)($($argument),*) } {
                        // The caller queries the result of a pending call later.
                        codes::SUCCESS | codes::IN_PROGRESS => Ok(()),
                        code => Err(Fault { call: $symbol, code }),
                    }
                }
            )*
        }
    };
}

functions! {
    get_version = "ncclGetVersion" (version: *mut c_int);
    get_unique_id = "ncclGetUniqueId" (id: *mut RawId);
    join = "ncclCommInitRankConfig" (
        communicator: *mut RawCommunicator, ranks: c_int, id: RawId, rank: c_int, config: *mut Config
    );
    finalize = "ncclCommFinalize" (communicator: RawCommunicator);
    destroy = "ncclCommDestroy" (communicator: RawCommunicator);
    abort = "ncclCommAbort" (communicator: RawCommunicator);
    asynchronous_error = "ncclCommGetAsyncError" (communicator: RawCommunicator, code: *mut u32);
    all_reduce = "ncclAllReduce" (
        source: *const c_void, target: *mut c_void, count: usize, element: c_int, reduction: c_int,
        communicator: RawCommunicator, stream: CUstream
    );
    all_gather = "ncclAllGather" (
        source: *const c_void, target: *mut c_void, count: usize, element: c_int,
        communicator: RawCommunicator, stream: CUstream
    );
    reduce_scatter = "ncclReduceScatter" (
        source: *const c_void, target: *mut c_void, count: usize, element: c_int, reduction: c_int,
        communicator: RawCommunicator, stream: CUstream
    );
    broadcast = "ncclBroadcast" (
        source: *const c_void, target: *mut c_void, count: usize, element: c_int, root: c_int,
        communicator: RawCommunicator, stream: CUstream
    );
}

/// Looks up a function of the library; `F` is its signature.
fn symbol<F: Copy>(handle: &Handle, name: &'static str) -> Result<F, &'static str> {
    // SAFETY: the callers name NCCL's functions with the signatures of its header, which it does not change within
    // major version 2.
    let found = unsafe { handle.get::<F>(name.as_bytes()) };
    found.map(|function| *function).map_err(|_| name)
}

/// The NCCL library.
pub(super) struct Library {
    path: String,
    version: Version,
    functions: Functions,
}

impl Library {
    /// Loads the library from the first path that can be loaded.
    ///
    /// # Errors
    /// `NotFound` if no path can be loaded; `MissingSymbol` or `TooOld` if the loaded library cannot be used.
    pub fn open_first(paths: &[OsString]) -> Result<Self, NcclError> {
        let mut tried = Vec::new();
        for path in paths {
            // SAFETY: loading NCCL runs its constructors, which require nothing from the process.
            match unsafe { Handle::open(Some(path), RTLD_NOW | RTLD_LOCAL) } {
                Ok(handle) => return Self::check(path.to_string_lossy().into_owned(), handle),
                Err(error) => tried.push((path.to_string_lossy().into_owned(), error.to_string())),
            }
        }
        Err(NcclError::NotFound { tried })
    }

    fn check(path: String, handle: Handle) -> Result<Self, NcclError> {
        let functions = Functions::look_up(&handle);
        // The library is never unloaded, because it may have started threads.
        std::mem::forget(handle);
        let functions =
            functions.map_err(|symbol| NcclError::MissingSymbol { library: path.clone(), symbol })?;
        let mut library = Self { path, version: VERSION_MIN, functions };
        let mut number: c_int = 0;
        // SAFETY: the pointer is to a live integer.
        unsafe { library.get_version(&mut number) }.map_err(|fault| library.failed(fault))?;
        library.version = Version::of(number.unsigned_abs());
        if library.version < VERSION_MIN {
            return Err(NcclError::TooOld {
                library: library.path,
                found: library.version.to_string(),
                needed: VERSION_MIN.to_string(),
            });
        }
        Ok(library)
    }

    /// Returns the path or name by which the library was loaded.
    pub fn path(&self) -> &str {
        &self.path
    }

    pub fn version(&self) -> Version {
        self.version
    }

    /// Creates the id of a new communicator.
    ///
    /// # Errors
    /// `Failed`.
    pub fn unique_id(&self) -> Result<RawId, NcclError> {
        let mut id = RawId([0; 128]);
        // SAFETY: the pointer is to a live id.
        unsafe { self.get_unique_id(&mut id) }.map_err(|fault| self.failed(fault))?;
        Ok(id)
    }

    /// Returns the error for a failed call that belongs to no communicator.
    fn failed(&self, fault: Fault) -> NcclError {
        self.failed_in((0, 1), fault)
    }

    /// Returns the error for a failed call of a rank.
    pub fn failed_in(&self, (rank, ranks): (u32, u32), Fault { call, code }: Fault) -> NcclError {
        // SAFETY: the argument may be null. The function returns null or a string that it never frees.
        let text = unsafe { (self.functions.last_error)(std::ptr::null_mut()) };
        let reason = if text.is_null() {
            String::new()
        } else {
            // SAFETY: the library returns strings that end with a zero byte.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
        };
        NcclError::Failed { rank, ranks, call, code, name: codes::name(code), reason }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_both_numberings() {
        assert_eq!(Version::of(22_803), Version(2, 28, 3));
        assert_eq!(Version::of(21_805), Version(2, 18, 5));
        assert_eq!(Version::of(2_708), Version(2, 7, 8));
        assert!(Version::of(2_708) < VERSION_MIN && Version::of(21_713) < VERSION_MIN);
        assert_eq!(Version(2, 28, 3).to_string(), "2.28.3");
    }
}
