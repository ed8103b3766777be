//! The limit on the memory that an inspecting command may use.
//!
//! A page can be up to a TiB long although its zeros use no space on disk. Commands that assemble all bytes of a page
//! therefore check lengths against this limit before they allocate memory. Commands that read pages in windows need no
//! limit, and apply one only if the user specifies it.

use std::fs;

/// The option that limits the memory for page bytes.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct MemoryLimit {
    /// Maximum total length of the pages that are read, in bytes
    #[arg(long, value_name = "BYTES")]
    memory_max: Option<u64>,
}

impl MemoryLimit {
    /// Returns the limit in bytes that the user specified, or `u64::MAX` if there is none. Used by commands whose
    /// memory use does not depend on page lengths.
    pub fn given(self) -> u64 {
        self.memory_max.unwrap_or(u64::MAX)
    }

    /// Returns the limit in bytes that the user specified, or by default the available memory of the machine.
    pub fn limit(self) -> u64 {
        self.memory_max.unwrap_or_else(available)
    }
}

/// Returns the number of bytes that programs can allocate without swapping, as reported by the kernel. Returns
/// `u64::MAX` if the kernel does not report the number.
pub fn available() -> u64 {
    fs::read_to_string("/proc/meminfo").ok().and_then(|text| parse(&text)).unwrap_or(u64::MAX)
}

fn parse(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_parsed_from_meminfo() {
        assert_eq!(parse("MemTotal: 9 kB\nMemAvailable:   24031 kB\nBuffers: 1 kB\n"), Some(24031 << 10));
        assert_eq!(parse("MemTotal: 9 kB\n"), None);
    }
}
