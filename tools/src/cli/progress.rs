//! Progress on a terminal's standard error; nothing anywhere else.

use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Whether no bar is drawn, even on a terminal.
static QUIET: AtomicBool = AtomicBool::new(false);

/// From now on draws no bars.
pub fn be_quiet() {
    QUIET.store(true, Ordering::Relaxed);
}

/// A bar that counts to `total` of `what`. It draws only if standard error is a terminal.
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

/// A bar that counts to `total` bytes.
pub fn bytes(total: u64, what: &str) -> ProgressBar {
    let style =
        ProgressStyle::with_template("{msg:28} [{bar:32}] {binary_bytes}/{binary_total_bytes} {elapsed}")
            .expect("the template is a constant")
            .progress_chars("=> ");
    bar(total, what).with_style(style)
}
