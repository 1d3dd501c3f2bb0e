use burn::tensor::Tensor;
use burn_paged::{add_rms_norm, rms_norm};

use crate::{LoadError, WeightLoader};

/// Root mean square normalization over the last axis.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    /// `[hidden_size]`.
    pub weight: Tensor<1>,
    /// Added to the mean of the squares.
    pub epsilon: f64,
}

impl RmsNorm {
    /// Loads `{name}.weight`.
    ///
    /// # Errors
    /// As [`WeightLoader::tensor`].
    pub fn load(
        loader: &mut WeightLoader<'_>,
        name: &str,
        hidden_size: usize,
        epsilon: f64,
    ) -> Result<Self, LoadError> {
        Ok(Self {
            weight: loader.tensor(&format!("{name}.weight"), [hidden_size])?,
            epsilon,
        })
    }

    /// Normalizes rows: `[rows, hidden_size]`, the same shape back.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        rms_norm(x, self.weight.clone(), self.epsilon)
    }

    /// Adds `x` to the residual stream, if there is one yet, and normalizes the sum: `(normalized, new residual)`.
    pub fn forward_residual(
        &self,
        x: Tensor<2>,
        residual: Option<Tensor<2>>,
    ) -> (Tensor<2>, Tensor<2>) {
        match residual {
            Some(residual) => add_rms_norm(x, residual, self.weight.clone(), self.epsilon),
            None => (self.forward(x.clone()), x),
        }
    }
}
