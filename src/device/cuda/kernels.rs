//! The kernels' entry points, loaded once per process and GPU because loading takes milliseconds.

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};

use super::abi::{KERNELS, Kernel};
use super::context::Context;
use super::driver::CUfunction;
use super::modules::{MODULES, Module};
use crate::base::sync::Mutex;
use crate::error::Result;

/// The entry points of all kernels in one context.
pub(super) struct Functions {
    functions: Vec<(&'static str, Function)>,
}

struct Function(CUfunction);

// SAFETY: the handle is an opaque id, which the driver accepts on any thread.
unsafe impl Send for Function {}
// SAFETY: the same.
unsafe impl Sync for Function {}

impl Functions {
    /// Returns the kernels of a context. They stay loaded as long as the context exists.
    ///
    /// # Errors
    /// A device error if the driver rejects both the machine code and the PTX of a module.
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
                    // SAFETY: the context is current; the image is complete, one of the embedded modules, and
                    // followed by a zero byte, which terminates text.
                    unsafe { entered.load_module(&mut module, image.as_ptr().cast::<c_void>()) }
                        .map_err(|code| context.fault(code))?;
                    modules.insert(kernel.module, module);
                    module
                }
            };
            let name = CString::new(kernel.name).expect("kernels' names hold no zero byte");
            let mut function = std::ptr::null_mut();
            // SAFETY: the context is current, the module was loaded above and stays loaded, the name ends in
            // zero.
            unsafe { entered.function(&mut function, module, name.as_ptr()) }
                .map_err(|code| context.fault(code))?;
            functions.push((kernel.name, Function(function)));
        }
        Ok(Self { functions })
    }

    /// Returns a kernel's entry point.
    pub fn get(&self, kernel: Kernel) -> CUfunction {
        let found = self.functions.iter().find(|(name, _)| *name == kernel.name);
        found.expect("every kernel was loaded").1.0
    }
}

/// Returns the machine code or PTX of a module for a GPU. `capability` is the GPU's compute capability times ten.
fn image(module: usize, capability: u32) -> Vec<u8> {
    // Machine code runs on GPUs with the same major number and at least the same minor number.
    let machine_code_serves = (90..100).contains(&capability);
    let Module { ptx, cubin_sm_90, .. } = MODULES[module];
    [if machine_code_serves { cubin_sm_90 } else { ptx.as_bytes() }, b"\0"].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compiled_code_is_used_only_for_its_capability() {
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
