//! The size of slow suites: a sample of each, or all of it with `REMANENT_TEST_SIZE=full`.

const SIZE: &str = "REMANENT_TEST_SIZE";

/// Returns whether slow suites run at full size.
pub fn is_full() -> bool {
    match std::env::var_os(SIZE) {
        None => false,
        Some(size) => {
            assert_eq!(size, "full", "{SIZE} has only one value");
            true
        }
    }
}

/// Returns `full` at full size, and `sample` otherwise.
pub fn sized<T>(sample: T, full: T) -> T {
    if is_full() { full } else { sample }
}
