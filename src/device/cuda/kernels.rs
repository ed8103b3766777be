//! The kernels' entry points: loaded once a process and GPU, for loading takes milliseconds.

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};

use super::abi::{KERNELS, Kernel};
use super::context::Context;
use super::driver::CUfunction;
use super::modules::{MODULES, Module};
use crate::base::sync::Mutex;
use crate::error::Result;

/// Every kernel's entry point in one context.
pub(super) struct Functions {
    functions: Vec<(&'static str, Function)>,
}

struct Function(CUfunction);

// SAFETY: the handle is a name, and the driver takes it on any thread.
unsafe impl Send for Function {}
// SAFETY: the same.
unsafe impl Sync for Function {}

impl Functions {
    /// The kernels in a context. They stay as long as it does.
    ///
    /// # Errors
    /// A device error: the driver takes none of the forms in which the kernels are embedded.
    pub fn of(context: &'static Context) -> Result<&'static Self> {
        static LOADED: Mutex<BTreeMap<u32, &'static Functions>> = Mutex::new(BTreeMap::new());
        let mut loaded = LOADED.lock();
        if let Some(functions) = loaded.get(&context.ordinal) {
            return Ok(functions);
        }
        let functions: &'static Self = Box::leak(Box::new(Self::load(context)?));
        loaded.insert(context.ordinal, functions);
        Ok(functions)
    }

    fn load(context: &'static Context) -> Result<Self> {
        let entered = context.enter()?;
        let mut modules = BTreeMap::new();
        let mut functions = Vec::new();
        for kernel in KERNELS {
            let module = match modules.get(&kernel.module) {
                Some(module) => *module,
                None => {
                    let image = image(kernel.module, context.capability);
                    let mut module = std::ptr::null_mut();
                    // SAFETY: the context is current; the image is one of ours, whole, and a zero byte
                    // follows it, where text ends.
                    unsafe { entered.load_module(&mut module, image.as_ptr().cast::<c_void>()) }
                        .map_err(|code| context.fault(code))?;
                    modules.insert(kernel.module, module);
                    module
                }
            };
            let name = CString::new(kernel.name).expect("kernels' names hold no zero byte");
            let mut function = std::ptr::null_mut();
            // SAFETY: the context is current, the module was loaded above and stays, the name ends in zero.
            unsafe { entered.function(&mut function, module, name.as_ptr()) }
                .map_err(|code| context.fault(code))?;
            functions.push((kernel.name, Function(function)));
        }
        Ok(Self { functions })
    }

    /// A kernel's entry point.
    pub fn get(&self, kernel: Kernel) -> CUfunction {
        let found = self.functions.iter().find(|(name, _)| *name == kernel.name);
        found.expect("every kernel was loaded").1.0
    }
}

/// A module for a GPU of this compute capability, times ten, as the driver takes it.
fn image(module: usize, capability: u32) -> Vec<u8> {
    // Machine code serves its own major number, from its minor number on.
    let machine_code_serves = (90..100).contains(&capability);
    let Module { ptx, cubin_sm_90, .. } = MODULES[module];
    [if machine_code_serves { cubin_sm_90 } else { ptx.as_bytes() }, b"\0"].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_code_is_for_its_own_capability_alone() {
        for module in 0..MODULES.len() {
            assert!(image(module, 90).starts_with(b"\x7fELF"), "{module}");
            for capability in [80, 89, 100, 120] {
                let text = image(module, capability);
                let zero = text.iter().position(|byte| *byte == 0);
                assert_eq!(zero, Some(text.len() - 1), "{module} for {capability}");
            }
        }
    }
}
