//! The memory that an inspecting command may use.
//!
//! A page may be up to a TiB long while its zeros take no space on disk. Commands that assemble whole pages
//! therefore check lengths against this limit before they allocate. Commands that read pages window by window
//! need no limit, but observe one that is given.

use std::fs;

/// The limit on the memory of pages.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct MemoryLimit {
    /// Maximum total size of the pages read, in bytes
    #[arg(long, value_name = "BYTES")]
    memory_max: Option<u64>,
}

impl MemoryLimit {
    /// Returns the given limit in bytes, or no limit: for commands whose memory use does not depend on page
    /// lengths.
    pub fn given(self) -> u64 {
        self.memory_max.unwrap_or(u64::MAX)
    }

    /// Returns the limit in bytes: the given one, or else the available memory.
    pub fn limit(self) -> u64 {
        self.memory_max.unwrap_or_else(available)
    }
}

/// Returns the memory that programs can still use without swapping, as the kernel estimates it.
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
    fn kernel_version_line_is_parsed() {
        assert_eq!(parse("MemTotal: 9 kB\nMemAvailable:   24031 kB\nBuffers: 1 kB\n"), Some(24031 << 10));
        assert_eq!(parse("MemTotal: 9 kB\n"), None);
    }
}
