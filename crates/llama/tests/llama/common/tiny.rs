//! Small models with random weights. Sizes are uneven on purpose: no two of them are equal, and heads are not
//! `hidden_size / num_heads` wide.

use std::collections::BTreeMap;

use serde_json::{Value, json};

/// A tensor of a checkpoint in row-major order.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct HostTensor {
    pub(crate) shape: Vec<usize>,
    pub(crate) values: Vec<f32>,
}

/// Sizes and switches of a tiny model.
#[derive(Debug, Clone)]
pub(crate) struct Tiny {
    pub(crate) hidden_size: usize,
    pub(crate) intermediate_size: usize,
    pub(crate) num_layers: usize,
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) vocab_size: usize,
    pub(crate) max_position_embeddings: usize,
    pub(crate) attention_bias: bool,
    pub(crate) mlp_bias: bool,
    pub(crate) tied: bool,
    /// Size of queries and keys. Large ones make a softmax with a few heavy keys, which shows a wrong one, and which
    /// blows rounding up.
    pub(crate) sharpness: f32,
    /// Merged into `config.json`.
    pub(crate) extra: Value,
}

pub(crate) const EPSILON: f64 = 1e-5;
pub(crate) const THETA: f64 = 10_000.0;

impl Tiny {
    /// Grouped heads, separate output layer.
    pub(crate) fn grouped() -> Self {
        Self {
            hidden_size: 44,
            intermediate_size: 70,
            num_layers: 3,
            num_heads: 6,
            num_kv_heads: 2,
            head_dim: 10,
            vocab_size: 67,
            max_position_embeddings: 256,
            attention_bias: false,
            mlp_bias: false,
            tied: false,
            sharpness: 3.0,
            extra: json!({}),
        }
    }

    /// Grouped heads, tied embeddings.
    pub(crate) fn tied() -> Self {
        Self {
            tied: true,
            num_heads: 4,
            num_kv_heads: 4,
            num_layers: 2,
            ..Self::grouped()
        }
    }

    /// One key/value head, and a bias wherever there can be one.
    pub(crate) fn biased() -> Self {
        let (attention_bias, mlp_bias) = (true, true);
        Self {
            attention_bias,
            mlp_bias,
            num_heads: 5,
            num_kv_heads: 1,
            head_dim: 14,
            ..Self::grouped()
        }
    }

    /// With more fields in `config.json`.
    pub(crate) fn with(self, extra: Value) -> Self {
        Self { extra, ..self }
    }

    pub(crate) fn config(&self) -> Value {
        let mut config = json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": EPSILON,
            "rope_theta": THETA,
            "hidden_act": "silu",
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "tie_word_embeddings": self.tied,
        });
        for (name, value) in self.extra.as_object().expect("extra is an object") {
            config[name] = value.clone();
        }
        config
    }

    /// Random weights under their Hugging Face names; the same ones for the same sizes.
    pub(crate) fn weights(&self) -> BTreeMap<String, HostTensor> {
        let mut weights = Weights {
            random: Random(17),
            tensors: BTreeMap::new(),
        };
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let (q_rows, kv_rows) = (
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        );
        weights.matrix("model.embed_tokens", [self.vocab_size, hidden], 1.0);
        for layer in 0..self.num_layers {
            let layer = format!("model.layers.{layer}");
            weights.norm(&format!("{layer}.input_layernorm"), hidden);
            weights.norm(&format!("{layer}.post_attention_layernorm"), hidden);
            let attention = [
                ("q_proj", [q_rows, hidden], self.sharpness),
                ("k_proj", [kv_rows, hidden], self.sharpness),
                ("v_proj", [kv_rows, hidden], 1.5),
                ("o_proj", [hidden, q_rows], 1.5),
            ];
            for (name, shape, gain) in attention {
                weights.linear(
                    &format!("{layer}.self_attn.{name}"),
                    shape,
                    gain,
                    self.attention_bias,
                );
            }
            let mlp = [
                ("gate_proj", [inner, hidden], 2.0),
                ("up_proj", [inner, hidden], 1.5),
                ("down_proj", [hidden, inner], 1.5),
            ];
            for (name, shape, gain) in mlp {
                weights.linear(&format!("{layer}.mlp.{name}"), shape, gain, self.mlp_bias);
            }
        }
        weights.norm("model.norm", hidden);
        if !self.tied {
            weights.matrix("lm_head", [self.vocab_size, hidden], 2.0);
        }
        weights.tensors
    }
}

/// Token ids of a prompt: random, all in the vocabulary.
pub(crate) fn prompt(len: usize, seed: u64) -> Vec<u32> {
    let vocab_size = Tiny::grouped().vocab_size as u64;
    let mut random = Random(seed);
    (0..len)
        .map(|_| (random.next() % vocab_size) as u32)
        .collect()
}

struct Weights {
    random: Random,
    tensors: BTreeMap<String, HostTensor>,
}

impl Weights {
    fn add(&mut self, name: String, shape: &[usize], mut value: impl FnMut(&mut Random) -> f32) {
        let len = shape.iter().product();
        let values = (0..len).map(|_| value(&mut self.random)).collect();
        self.tensors.insert(
            name,
            HostTensor {
                shape: shape.to_vec(),
                values,
            },
        );
    }

    fn matrix(&mut self, name: &str, shape: [usize; 2], gain: f32) {
        let scale = gain / (shape[1] as f32).sqrt();
        self.add(format!("{name}.weight"), &shape, |random| {
            random.signed() * scale
        });
    }

    fn linear(&mut self, name: &str, shape: [usize; 2], gain: f32, has_bias: bool) {
        self.matrix(name, shape, gain);
        if has_bias {
            self.add(format!("{name}.bias"), &shape[..1], |random| {
                random.signed() * 0.5
            });
        }
    }

    fn norm(&mut self, name: &str, len: usize) {
        self.add(format!("{name}.weight"), &[len], |random| {
            1.0 + random.signed() * 0.4
        });
    }
}

/// Splitmix64: enough for weights, and the same everywhere.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Uniform in (-1.7, 1.7): variance 1.
    fn signed(&mut self) -> f32 {
        let unit = (self.next() >> 40) as f32 / (1u64 << 24) as f32;
        (2.0 * unit - 1.0) * 3f32.sqrt()
    }
}
