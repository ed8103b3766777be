//! Delays between the attempts of a request.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::time::Duration;

use super::options::RemoteOptions;
use crate::bucket::FailureClass;

/// Factor for the delay after a throttled request.
const THROTTLED_FACTOR: u32 = 8;
/// Maximum number of attempts for a failure class that is rarely temporary.
const LASTING_ATTEMPTS: u32 = 3;

/// Returns the maximum delay after failed attempt number `attempt`, starting at 1, or `None` if no further attempt is
/// made.
///
/// A denied request is repeated only if the credentials were read again after the attempt.
pub(super) fn delay(
    options: &RemoteOptions,
    attempt: u32,
    class: FailureClass,
    has_new_credentials: bool,
) -> Option<Duration> {
    let attempts = match class {
        FailureClass::InDoubt | FailureClass::Throttled | FailureClass::Unreachable => options.attempts,
        FailureClass::Denied | FailureClass::Expired => return has_new_credentials.then_some(Duration::ZERO),
        FailureClass::NotSupported => return None,
        FailureClass::ClockSkew | FailureClass::Full | FailureClass::Other => {
            options.attempts.min(LASTING_ATTEMPTS)
        }
    };
    if attempt >= attempts {
        return None;
    }
    let factor = if class == FailureClass::Throttled { THROTTLED_FACTOR } else { 1 };
    let doubled = 1u32.checked_shl(attempt - 1).unwrap_or(u32::MAX);
    Some(options.first_delay.saturating_mul(doubled).saturating_mul(factor).min(options.longest_delay))
}

/// Returns a random delay between half of `longest` and `longest`. Clients that failed at the same time thus retry at
/// different times.
pub(super) fn jitter(longest: Duration) -> Duration {
    let share = RandomState::new().hash_one(0) as u32;
    let half = longest / 2;
    half + half.mul_f64(f64::from(share) / f64::from(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delays(class: FailureClass) -> Vec<u64> {
        let options = RemoteOptions::default();
        let delays = (1..).map_while(|attempt| delay(&options, attempt, class, false));
        delays.map(|delay| delay.as_millis() as u64).collect()
    }

    #[test]
    fn delays_double_up_to_a_bound() {
        let expected = [100, 200, 400, 800, 1_600, 3_200, 6_400, 12_800, 20_000, 20_000, 20_000];
        assert_eq!(delays(FailureClass::InDoubt), expected);
        assert_eq!(delays(FailureClass::Unreachable), expected);
    }

    #[test]
    fn throttled_requests_wait_longer() {
        let expected = [800, 1_600, 3_200, 6_400, 12_800, 20_000, 20_000, 20_000, 20_000, 20_000, 20_000];
        assert_eq!(delays(FailureClass::Throttled), expected);
    }

    #[test]
    fn lasting_failures_end_soon() {
        assert_eq!(delays(FailureClass::Full), [100, 200]);
        assert!(delays(FailureClass::Denied).is_empty());
        assert!(delays(FailureClass::NotSupported).is_empty());
        let options = RemoteOptions::default();
        assert_eq!(delay(&options, 1, FailureClass::Expired, true), Some(Duration::ZERO));
    }

    #[test]
    fn delay_is_bounded_after_many_attempts() {
        let options = RemoteOptions::default().attempts(u32::MAX);
        assert_eq!(delay(&options, 4_000, FailureClass::InDoubt, false), Some(options.longest_delay));
    }

    #[test]
    fn jitter_keeps_half_of_the_delay() {
        let longest = Duration::from_secs(8);
        let drawn: Vec<Duration> = (0..64).map(|_| jitter(longest)).collect();
        assert!(drawn.iter().all(|delay| (longest / 2..=longest).contains(delay)), "{drawn:?}");
        assert!(drawn.iter().any(|delay| delay != &drawn[0]));
    }
}
