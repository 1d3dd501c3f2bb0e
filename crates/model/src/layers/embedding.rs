use burn::tensor::{Int, Tensor};
use burn_paged::embedding;

use super::Linear;
use crate::{LoadError, WeightLoader};

/// Token ids → rows of a table.
#[derive(Debug, Clone)]
pub struct Embedding {
    /// `[vocab_size, hidden_size]`.
    pub weight: Tensor<2>,
}

impl Embedding {
    /// Loads `{name}.weight`.
    ///
    /// # Errors
    /// As [`WeightLoader::tensor`].
    pub fn load(
        loader: &mut WeightLoader<'_>,
        name: &str,
        vocab_size: usize,
        hidden_size: usize,
    ) -> Result<Self, LoadError> {
        let weight = loader.tensor(&format!("{name}.weight"), [vocab_size, hidden_size])?;
        Ok(Self { weight })
    }

    /// `[num_tokens]` i32 → `[num_tokens, hidden_size]`.
    pub fn forward(&self, ids: &Tensor<1, Int>) -> Tensor<2> {
        embedding(&self.weight, ids)
    }

    /// The output layer of a model with tied embeddings: the same table, not a copy.
    pub fn as_linear(&self) -> Linear {
        Linear {
            weight: self.weight.clone(),
            bias: None,
        }
    }
}
