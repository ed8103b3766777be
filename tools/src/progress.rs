//! Progress on a terminal's standard error; nothing anywhere else.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar that counts to `total` of `what`. It draws only where standard error is a terminal.
pub fn bar(total: u64, what: &str) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg:28} [{bar:32}] {human_pos}/{human_len} {elapsed}")
        .expect("the template is a constant")
        .progress_chars("=> ");
    ProgressBar::new(total).with_style(style).with_message(what.to_owned())
}

/// A bar that counts to `total` bytes.
pub fn bytes(total: u64, what: &str) -> ProgressBar {
    let style =
        ProgressStyle::with_template("{msg:28} [{bar:32}] {binary_bytes}/{binary_total_bytes} {elapsed}")
            .expect("the template is a constant")
            .progress_chars("=> ");
    bar(total, what).with_style(style)
}
