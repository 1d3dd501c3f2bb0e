//! Ctrl-C: stops an answer, not the program.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the answer under way shall stop.
#[derive(Debug, Clone, Default)]
pub(crate) struct Interrupt {
    requested: Arc<AtomicBool>,
    answering: Arc<AtomicBool>,
}

impl Interrupt {
    /// From now on Ctrl-C stops the answer. With `exit_when_idle` it ends the program while there is none: the line
    /// editor of a terminal sees the key itself, a pipe does not.
    pub(crate) fn install(exit_when_idle: bool) -> Result<Self, ctrlc::Error> {
        let interrupt = Self::default();
        let seen = interrupt.clone();
        ctrlc::set_handler(move || {
            if seen.answering.load(Ordering::SeqCst) {
                seen.requested.store(true, Ordering::SeqCst);
            } else if exit_when_idle {
                // As a shell reports a program that SIGINT ended.
                std::process::exit(130);
            }
        })?;
        Ok(interrupt)
    }

    /// An answer begins; an older request is forgotten.
    pub(crate) fn begin(&self) {
        self.requested.store(false, Ordering::SeqCst);
        self.answering.store(true, Ordering::SeqCst);
    }

    /// The answer is over.
    pub(crate) fn end(&self) {
        self.answering.store(false, Ordering::SeqCst);
    }

    /// Whether the answer shall stop.
    pub(crate) fn requested(&self) -> bool {
        self.requested.load(Ordering::SeqCst)
    }
}
