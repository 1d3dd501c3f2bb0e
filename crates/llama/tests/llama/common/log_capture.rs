//! Collects what the libraries log, so that tests can look for a warning.

use std::sync::{Mutex, Once, PoisonError};

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());
static START: Once = Once::new();

struct Capture;

impl log::Log for Capture {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let line = format!("{}: {}", record.level(), record.args());
        LINES
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(line);
    }

    fn flush(&self) {}
}

/// Runs `action` and gives the warnings that name `path`; other tests may log at the same time.
pub(crate) fn warnings_about(path: &std::path::Path, action: impl FnOnce()) -> Vec<String> {
    warnings_with(&path.display().to_string(), action)
}

/// Runs `action` and gives the warnings that have `text` in them.
pub(crate) fn warnings_with(text: &str, action: impl FnOnce()) -> Vec<String> {
    START.call_once(|| {
        log::set_logger(&Capture).expect("no other logger in this binary");
        log::set_max_level(log::LevelFilter::Warn);
    });
    action();
    let lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    lines
        .iter()
        .filter(|line| line.contains(text))
        .cloned()
        .collect()
}
