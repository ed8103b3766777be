//! Progress bars, which are drawn on standard error if it is a terminal.

use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Whether bars are hidden even on a terminal.
static QUIET: AtomicBool = AtomicBool::new(false);

/// Hides all bars that are created after this call.
pub fn be_quiet() {
    QUIET.store(true, Ordering::Relaxed);
}

/// Returns true if bars and notes on standard error are hidden.
#[cfg(feature = "archive")]
pub fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// Creates a progress bar with the label `what` for an unknown number of objects.
#[cfg(feature = "archive")]
pub fn objects(what: &str) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg:28} {human_pos} objects {elapsed}")
        .expect("the template is a constant");
    bar(0, what).with_style(style)
}

/// Creates a progress bar with the label `what` that counts to `total`.
pub fn bar(total: u64, what: &str) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg:28} [{bar:32}] {human_pos}/{human_len} {elapsed}")
        .expect("the template is a constant")
        .progress_chars("=> ");
    let bar = ProgressBar::new(total).with_style(style).with_message(what.to_owned());
    if QUIET.load(Ordering::Relaxed) {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    bar
}

/// Creates a bar with the label `what` that counts to `total` bytes.
pub fn bytes(total: u64, what: &str) -> ProgressBar {
    let style =
        ProgressStyle::with_template("{msg:28} [{bar:32}] {binary_bytes}/{binary_total_bytes} {elapsed}")
            .expect("the template is a constant")
            .progress_chars("=> ");
    bar(total, what).with_style(style)
}
