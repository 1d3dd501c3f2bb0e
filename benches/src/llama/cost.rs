//! What a step of a decoder costs at least.

use serde_json::Value;

use super::Ceilings;
use crate::kernel::{Bound, ModelCase};

/// Work of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Operations: two for each weight and row, and both products of attention over every visible pair.
    pub flops: f64,
    /// Bytes of all weights but the embedding table, which is only looked into.
    pub weight_bytes: f64,
    /// Bytes of K and V that are read; 0 for a prompt, whose keys are its own.
    pub kv_bytes: f64,
}

/// The least time of a step, and what sets it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Floor {
    /// Seconds.
    pub seconds: f64,
    /// The ceiling that is hit first.
    pub bound: Bound,
}

impl Cost {
    /// Bytes read.
    pub fn bytes(&self) -> f64 {
        self.weight_bytes + self.kv_bytes
    }

    /// What the ceilings allow.
    pub fn floor(&self, ceilings: &Ceilings) -> Floor {
        let bytes = self.bytes() / ceilings.copy_bytes_per_s;
        let operations = self.flops / ceilings.matmul_flop_per_s;
        match operations > bytes {
            true => Floor {
                seconds: operations,
                bound: Bound::Operations,
            },
            false => Floor {
                seconds: bytes,
                bound: Bound::Bytes,
            },
        }
    }
}

/// The sizes of a decoder that costs follow from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModelSizes {
    /// Weights that every row is multiplied with, without the output layer.
    linear: f64,
    /// Weights of the output layer.
    head: f64,
    /// Weights of the normalizations.
    norms: f64,
    /// Elements of K and V per token over all layers.
    kv: f64,
    /// Operations per visible pair of query and key over all layers: two products.
    pair_flops: f64,
}

impl ModelSizes {
    /// The sizes in a `config.json` of the Llama family.
    ///
    /// # Errors
    /// If it lacks one.
    pub fn of(config: &Value) -> Result<Self, String> {
        let number = |key: &str| config.get(key).and_then(Value::as_f64);
        let need = |key: &str| number(key).ok_or_else(|| format!("config.json lacks {key}"));
        let (hidden, inner) = (need("hidden_size")?, need("intermediate_size")?);
        let (layers, heads) = (need("num_hidden_layers")?, need("num_attention_heads")?);
        let kv_heads = number("num_key_value_heads").unwrap_or(heads);
        let head_dim = number("head_dim").unwrap_or(hidden / heads);
        let attention = hidden * head_dim * (2.0 * heads + 2.0 * kv_heads);
        Ok(Self {
            linear: layers * (attention + 3.0 * hidden * inner),
            head: hidden * need("vocab_size")?,
            norms: hidden * (1.0 + 2.0 * layers),
            kv: layers * 2.0 * kv_heads * head_dim,
            pair_flops: layers * 4.0 * heads * head_dim,
        })
    }

    /// A step over whole prompts, of which the last rows get logits.
    pub fn prefill(&self, case: ModelCase, bytes_per_element: f64) -> Cost {
        let (batch, tokens) = (case.batch as f64, case.tokens as f64);
        let pairs = batch * tokens * (tokens + 1.0) / 2.0;
        Cost {
            flops: 2.0 * (self.linear * batch * tokens + self.head * batch)
                + self.pair_flops * pairs,
            weight_bytes: self.weight_bytes(bytes_per_element),
            kv_bytes: 0.0,
        }
    }

    /// A step over one row of each sequence, which attends to `context` tokens, itself included.
    pub fn decode(&self, batch: usize, context: f64, bytes_per_element: f64) -> Cost {
        let keys = batch as f64 * context;
        Cost {
            flops: 2.0 * (self.linear + self.head) * batch as f64 + self.pair_flops * keys,
            weight_bytes: self.weight_bytes(bytes_per_element),
            kv_bytes: bytes_per_element * self.kv * keys,
        }
    }

    fn weight_bytes(&self, bytes_per_element: f64) -> f64 {
        bytes_per_element * (self.linear + self.head + self.norms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::{Shapes, Sizes};

    /// Figures of the peers' script for the same model.
    #[test]
    fn costs_of_an_8b_model_are_those_of_the_peers() {
        let shapes = Shapes::new(Sizes::Full).unwrap();
        let sizes = ModelSizes::of(&shapes.models[0].config()).unwrap();
        let decode = sizes.decode(8, 1024.0, 2.0);
        assert_eq!(decode.weight_bytes, 15_009_849_344.0);
        assert_eq!(decode.kv_bytes, 8.0 * 1024.0 * 131_072.0);
        let linear = 6_979_321_856.0;
        let head = 525_336_576.0;
        let pairs = 4.0 * 128.0 * 32.0 * 32.0 * 8.0 * 1024.0;
        assert_eq!(decode.flops, 2.0 * 8.0 * (linear + head) + pairs);

        let case = ModelCase {
            batch: 1,
            tokens: 2048,
        };
        let prefill = sizes.prefill(case, 2.0);
        let pairs = 4.0 * 128.0 * 32.0 * 32.0 * 2048.0 * 2049.0 / 2.0;
        assert_eq!(prefill.flops, 2.0 * (2048.0 * linear + head) + pairs);
        assert_eq!(prefill.bytes(), decode.weight_bytes);
    }

    #[test]
    fn the_slower_ceiling_sets_the_floor() {
        let ceilings = Ceilings {
            copy_bytes_per_s: 10.0,
            matmul_flop_per_s: 100.0,
        };
        let cost = |flops, kv_bytes| Cost {
            flops,
            weight_bytes: 5.0,
            kv_bytes,
        };
        let floor = cost(50.0, 5.0).floor(&ceilings);
        assert_eq!((floor.seconds, floor.bound), (1.0, Bound::Bytes));
        let floor = cost(200.0, 5.0).floor(&ceilings);
        assert_eq!((floor.seconds, floor.bound), (2.0, Bound::Operations));
    }
}
