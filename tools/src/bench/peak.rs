//! How much host memory this process has in use, and had at most.

use std::io;

/// Bytes of host memory that the process has in use.
pub fn resident_bytes() -> io::Result<u64> {
    status_bytes("VmRSS:")
}

/// The most that the process had in use since [`forget`].
pub fn peak_bytes() -> io::Result<u64> {
    status_bytes("VmHWM:")
}

/// Lets the peak begin anew.
pub fn forget() -> io::Result<()> {
    std::fs::write("/proc/self/clear_refs", "5")
}

fn status_bytes(what: &str) -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix(what));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| io::Error::other(format!("the system does not tell {what}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_holds_what_was_given_back_until_it_is_forgotten() {
        const LEN: usize = 256 << 20;
        forget().unwrap();
        let before = peak_bytes().unwrap();
        drop(std::hint::black_box(vec![1_u8; LEN]));
        assert!(peak_bytes().unwrap() >= before + LEN as u64 / 2);
        forget().unwrap();
        assert!(peak_bytes().unwrap() < before + LEN as u64 / 2);
    }
}
