//! The latencies of all operations, with three significant digits.

use std::time::Duration;

use hdrhistogram::Histogram;

/// A histogram of the times of one kind of operation.
#[derive(Clone, Debug)]
pub struct Latency(Histogram<u64>);

impl Latency {
    /// Creates an empty histogram.
    pub fn new() -> Self {
        Self(Histogram::new_with_bounds(1, 1 << 40, 3).expect("one nanosecond to a quarter of an hour"))
    }

    /// Records one more operation.
    pub fn record(&mut self, time: Duration) {
        self.0.saturating_record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Adds the operations of another thread or round.
    pub fn add(&mut self, other: &Self) {
        self.0.add(&other.0).expect("both have the same bounds");
    }

    /// Returns the number of operations.
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// Returns a quantile of the times, in seconds. `quantile` is between 0 and 1.
    pub fn quantile(&self, quantile: f64) -> f64 {
        self.0.value_at_quantile(quantile) as f64 / 1e9
    }

    /// Returns the longest time in seconds.
    pub fn worst(&self) -> f64 {
        self.0.max() as f64 / 1e9
    }

    /// Returns points of the distribution: a time in seconds, and the share of operations that took longer.
    pub fn curve(&self) -> Vec<(f64, f64)> {
        let count = self.count() as f64;
        let mut within = 0;
        let points = self.0.iter_recorded().map(|step| {
            within += step.count_since_last_iteration();
            (step.value_iterated_to() as f64 / 1e9, 1.0 - within as f64 / count)
        });
        points.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_and_curve_match_times() {
        let mut latency = Latency::new();
        let mut other = Latency::new();
        for micros in 1..=500 {
            latency.record(Duration::from_micros(micros));
            other.record(Duration::from_micros(500 + micros));
        }
        latency.add(&other);
        assert_eq!(latency.count(), 1000);
        let near = |found: f64, expected: f64| assert!((found / expected - 1.0).abs() < 2e-3, "{found}");
        near(latency.quantile(0.5), 500e-6);
        near(latency.quantile(0.99), 990e-6);
        near(latency.worst(), 1000e-6);
        let curve = latency.curve();
        let (half, above) = curve[curve.partition_point(|(_, above)| *above > 0.5)];
        near(half, 500e-6);
        assert!((above - 0.5).abs() < 2e-3);
        assert_eq!(curve.last().map(|(_, above)| *above), Some(0.0));
        // A time beyond the histogram's range is recorded as its maximum.
        latency.record(Duration::MAX);
        assert!(latency.worst() > 1000.0);
    }
}
