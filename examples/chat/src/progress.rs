//! A progress bar for loading, on standard error and only where someone watches.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Bytes loaded out of all; silent where standard error is no terminal. Clones are the same bar.
#[derive(Clone)]
pub(crate) struct LoadingBar(ProgressBar);

impl LoadingBar {
    pub(crate) fn new() -> Self {
        let target = if std::io::stderr().is_terminal() {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let style = ProgressStyle::with_template("loading {wide_bar} {bytes}/{total_bytes}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        Self(ProgressBar::with_draw_target(None, target).with_style(style))
    }

    /// Shows that `done` of `total` bytes are loaded; the bar goes away when all are.
    pub(crate) fn show(&self, done: u64, total: u64) {
        self.0.set_length(total);
        self.0.set_position(done);
        if done >= total {
            self.0.finish_and_clear();
        }
    }
}
