//! Progress bars for what comes before the first answer, on standard error and only where someone watches.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Bytes loaded out of all; silent where standard error is no terminal. Clones are the same bar.
#[derive(Clone)]
pub(crate) struct LoadingBar(ProgressBar);

impl LoadingBar {
    pub(crate) fn new() -> Self {
        Self(bar("loading {wide_bar} {bytes}/{total_bytes}"))
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

/// Graphs captured out of all; silent where standard error is no terminal.
pub(crate) struct CaptureBar(ProgressBar);

impl CaptureBar {
    pub(crate) fn new() -> Self {
        Self(bar("capturing {wide_bar} {pos}/{len}"))
    }

    /// Shows that `done` of `total` graphs are captured; the bar goes away when all are, and never comes for none.
    pub(crate) fn show(&self, done: usize, total: usize) {
        if done >= total {
            self.0.finish_and_clear();
            return;
        }
        self.0.set_length(total as u64);
        self.0.set_position(done as u64);
    }
}

fn bar(template: &str) -> ProgressBar {
    let target = if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let style = ProgressStyle::with_template(template);
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::with_draw_target(None, target).with_style(style)
}
