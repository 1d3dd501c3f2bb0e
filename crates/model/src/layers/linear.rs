use burn::tensor::Tensor;
use burn_paged::linear;

use crate::{LoadError, WeightLoader};

/// `y = x · weightᵀ + bias`.
#[derive(Debug, Clone)]
pub struct Linear {
    /// `[out_features, in_features]`.
    pub weight: Tensor<2>,
    /// `[out_features]`.
    pub bias: Option<Tensor<1>>,
}

impl Linear {
    /// Loads `{name}.weight` and, if the layer has one, `{name}.bias`.
    ///
    /// # Errors
    /// As [`WeightLoader::tensor`].
    pub fn load(
        loader: &mut WeightLoader<'_>,
        name: &str,
        [out_features, in_features]: [usize; 2],
        has_bias: bool,
    ) -> Result<Self, LoadError> {
        Self::load_stacked(loader, "", &[(name, out_features)], in_features, has_bias)
    }

    /// Loads several layers of one input as one: `{prefix}{name}.weight` of each part, in their order along the output.
    ///
    /// # Shapes
    /// - `parts`: name and output size of each
    ///
    /// # Errors
    /// As [`WeightLoader::tensor`].
    pub fn load_stacked(
        loader: &mut WeightLoader<'_>,
        prefix: &str,
        parts: &[(&str, usize)],
        in_features: usize,
        has_bias: bool,
    ) -> Result<Self, LoadError> {
        let out_features = parts.iter().map(|(_, rows)| rows).sum();
        let named = |kind: &str| -> Vec<(String, usize)> {
            parts
                .iter()
                .map(|(name, rows)| (format!("{prefix}{name}.{kind}"), *rows))
                .collect()
        };
        let weight = loader.stacked(&named("weight"), [out_features, in_features])?;
        let bias = has_bias
            .then(|| loader.stacked(&named("bias"), [out_features]))
            .transpose()?;
        Ok(Self { weight, bias })
    }

    /// `[num_tokens, in_features]` → `[num_tokens, out_features]`.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        linear(x, &self.weight, self.bias.as_ref())
    }
}
