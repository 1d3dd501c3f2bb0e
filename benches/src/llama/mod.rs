//! What the bench of a whole model is made of.
//!
//! - `cost.rs`: operations and bytes of a step, from the model's configuration
//! - `ceilings.rs`: what the device reaches when it does nothing else
//! - `bare.rs`: steps of a model without an engine; `engine.rs`: the same steps through one
//! - `rows.rs`: results as a table and as JSON

mod bare;
mod ceilings;
mod cost;
mod engine;
mod rows;

pub use bare::Bare;
pub use ceilings::Ceilings;
pub use cost::{Cost, Floor, ModelSizes};
pub use engine::{DecodePlan, EngineRun, decode, prefill};
pub use rows::{Kind, ModelReport, ModelRow};

use crate::kernel::ModelCase;

/// Token ids without meaning for sequence `sequence`, the same ones for every peer.
fn prompt(sequence: usize, len: usize, vocab_size: usize) -> impl Iterator<Item = u32> {
    (0..len).map(move |at| ((at * 7919 + sequence * 104_729 + 13) % vocab_size) as u32)
}

/// Seconds of a step, in windows.
#[derive(Debug, Clone, PartialEq)]
pub struct StepSeconds {
    /// Mean of the steps of each window.
    pub windows: Vec<f64>,
    /// Steps of a window.
    pub steps: usize,
}

impl StepSeconds {
    /// The figure that counts.
    pub fn median(&self) -> f64 {
        crate::median(&self.windows)
    }

    /// The fastest window and the slowest.
    pub fn range(&self) -> (f64, f64) {
        let windows = self.windows.iter().copied();
        (
            windows.clone().fold(f64::INFINITY, f64::min),
            windows.fold(0.0, f64::max),
        )
    }
}

/// Tokens that a batch has in all.
fn total(case: ModelCase) -> usize {
    case.batch * case.tokens
}
