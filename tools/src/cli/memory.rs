//! How much memory an inspecting command may take. A page's length on disk may be anything up to a TiB while
//! its zeros take no space there, so where pages are put together no length is believed before it was held
//! against this. Commands that read pages window by window need no limit, and keep to one that is given.

use std::fs;

/// The memory that pages may take.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct MemoryLimit {
    /// Bytes that the pages looked at may take together
    #[arg(long, value_name = "BYTES")]
    memory_max: Option<u64>,
}

impl MemoryLimit {
    /// The limit that was given, in bytes: for a command that takes no more memory for longer pages.
    pub fn given(self) -> u64 {
        self.memory_max.unwrap_or(u64::MAX)
    }

    /// The limit in bytes; what is available, if none was given.
    pub fn limit(self) -> u64 {
        self.memory_max.unwrap_or_else(available)
    }
}

/// The memory that programs may still take without swapping, as the kernel estimates it.
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
