use burn::tensor::Tensor;
use burn_paged::{GATE_TURN, gated_linear, has_gated_linear, in_turns, silu_and_mul};

use super::Linear;
use crate::{LoadError, WeightLoader};

/// `y = silu(gate(x)) · up(x)`: two projections of one input and the gate, in one kernel where the device has it.
#[derive(Debug, Clone)]
pub struct GatedLinear {
    /// Both projections: `[2·out_features, in_features]`.
    projection: Linear,
    /// Whether the rows come in turns of gate and up ([`in_turns`]), and not the gate first.
    in_turns: bool,
}

impl GatedLinear {
    /// Loads `{prefix}{gate}` and `{prefix}{up}`, as [`Linear::load_stacked`] does.
    ///
    /// # Shapes
    /// - `shape`: rows and columns of each of the two
    ///
    /// # Errors
    /// As [`WeightLoader::tensor`].
    pub fn load(
        loader: &mut WeightLoader<'_>,
        prefix: &str,
        [gate, up]: [&str; 2],
        [out_features, in_features]: [usize; 2],
        has_bias: bool,
    ) -> Result<Self, LoadError> {
        let parts = [(gate, out_features), (up, out_features)];
        let stacked = Linear::load_stacked(loader, prefix, &parts, in_features, has_bias)?;
        Ok(Self::new(stacked))
    }

    /// From one projection, the rows of the gate first. Puts them in turns where the device gains by it; this copies the
    /// weights once.
    pub fn new(stacked: Linear) -> Self {
        let in_turns_pay = stacked.bias.is_none()
            && (stacked.weight.dims()[0] / 2).is_multiple_of(GATE_TURN)
            && has_gated_linear(&stacked.weight);
        if !in_turns_pay {
            return Self {
                projection: stacked,
                in_turns: false,
            };
        }
        Self {
            projection: Linear {
                weight: in_turns(stacked.weight),
                bias: None,
            },
            in_turns: true,
        }
    }

    /// `[num_tokens, in_features]` → `[num_tokens, out_features]`.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        match self.in_turns {
            true => gated_linear(x, &self.projection.weight),
            false => silu_and_mul(self.projection.forward(x)),
        }
    }
}
