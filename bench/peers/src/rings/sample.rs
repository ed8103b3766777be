//! The counts of one measurement of one method.

use std::io;
use std::time::{Duration, Instant};

/// The number of transfers and their cost.
#[derive(Debug, Default)]
pub struct Sample {
    pub bytes: u64,
    pub transfers: u64,
    pub took: Duration,
    /// CPU time used on all processors.
    pub cpu: Duration,
    /// The duration of each transfer, if transfers are made one after the other.
    pub times: Vec<Duration>,
}

impl Sample {
    /// Runs `work`, and adds its duration and CPU time.
    pub fn during(&mut self, work: impl FnOnce(&mut Self) -> io::Result<()>) -> io::Result<()> {
        let (cpu, started) = (cpu_time()?, Instant::now());
        work(self)?;
        self.took += started.elapsed();
        self.cpu += cpu_time()?.saturating_sub(cpu);
        Ok(())
    }

    /// Adds `transfers` transfers of `len` bytes each.
    pub fn add(&mut self, transfers: u64, len: usize) {
        self.transfers += transfers;
        self.bytes += transfers * len as u64;
    }

    pub fn megabytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.took.as_secs_f64() / 1e6
    }

    pub fn cpu_us_each(&self) -> f64 {
        self.cpu.as_secs_f64() * 1e6 / self.transfers as f64
    }

    /// Returns the duration in microseconds that a share `quantile` of the transfers did not exceed.
    pub fn quantile_us(&mut self, quantile: f64) -> Option<f64> {
        self.times.sort_unstable();
        let last = self.times.len().checked_sub(1)?;
        Some(self.times[(last as f64 * quantile).round() as usize].as_secs_f64() * 1e6)
    }
}

/// Returns the CPU time of the whole machine, in steps of 10 ms. The machine should be idle otherwise. The
/// time of the process would not include the work of kernel workers.
fn cpu_time() -> io::Result<Duration> {
    let stat = std::fs::read_to_string("/proc/stat")?;
    let busy = busy_ticks(&stat).ok_or_else(|| io::Error::other("/proc/stat says nothing of processors"))?;
    Ok(Duration::from_millis(10 * busy))
}

/// Returns the number of ticks during which a processor was neither idle nor waiting for I/O.
fn busy_ticks(stat: &str) -> Option<u64> {
    let ticks: Vec<u64> =
        stat.lines().next()?.split_whitespace().skip(1).map_while(|field| field.parse().ok()).collect();
    let [user, nice, system, _idle, _iowait, irq, softirq, ..] = ticks[..] else { return None };
    Some(user + nice + system + irq + softirq)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_is_not_busy() {
        assert_eq!(busy_ticks("cpu  1 20 300 4000 50000 600000 7000000 8 9 0\ncpu0 5 5\n"), Some(7_600_321));
        assert_eq!(busy_ticks("cpu  1 20\n"), None);
    }

    #[test]
    fn quantiles_are_measured_times() {
        let times = (1..=101).rev().map(Duration::from_micros).collect();
        let mut sample = Sample { times, ..Sample::default() };
        assert_eq!(
            [0.0, 0.5, 0.99, 1.0].map(|of| sample.quantile_us(of)),
            [1.0, 51.0, 100.0, 101.0].map(Some)
        );
        assert_eq!(Sample::default().quantile_us(0.5), None);
    }
}
