//! What a checkpoint says of the model, and what of it can be run.

use burn_paged_model::ConfigError;
use serde::Deserialize;
use serde_json::Value;

/// Heads of up to this many elements; the attention ops are written for no more.
const MAX_HEAD_DIM: usize = 256;

/// Bounds far above any model of this family. A file that claims more is broken, and must not make tables or loops of that
/// size before its tensors are looked at.
const MAX_LAYERS: usize = 1024;
const MAX_SIZE: usize = 1 << 24;

/// Longest context that a rotary table is made for, in tokens: at 128 rotated elements the table takes 1 GiB.
const MAX_POSITIONS: usize = 1 << 21;

/// The fields of `config.json` that the model reads, under their published names.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[non_exhaustive]
pub struct LlamaConfig {
    /// Class names; Mistral differs in one default.
    #[serde(default)]
    pub architectures: Vec<String>,
    /// Elements of the residual stream.
    pub hidden_size: usize,
    /// Elements of the MLP's inner activation.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key/value heads; as many as query heads if absent.
    pub num_key_value_heads: Option<usize>,
    /// Elements per head; `hidden_size / num_attention_heads` if absent.
    pub head_dim: Option<usize>,
    /// Tokens of the vocabulary, rows of the embedding.
    pub vocab_size: usize,
    /// Longest context, in tokens, before rope scaling.
    pub max_position_embeddings: usize,
    /// Epsilon of the normalizations.
    pub rms_norm_eps: f64,
    /// Activation of the gate; `silu` is the only one.
    #[serde(default = "silu")]
    pub hidden_act: String,
    /// Whether the attention projections have a bias.
    #[serde(default)]
    pub attention_bias: bool,
    /// Whether the MLP projections have a bias.
    #[serde(default)]
    pub mlp_bias: bool,
    /// Whether the output layer is the embedding.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// Mistral only: a token sees itself and the `sliding_window - 1` tokens before it. `null` is no window.
    #[serde(default = "mistral_window")]
    pub sliding_window: Option<usize>,
    /// Kinds of attention per layer in newer files.
    pub layer_types: Option<Vec<String>>,
    /// Quantised weights that are no GGUF; not supported.
    pub quantization_config: Option<Value>,
}

fn silu() -> String {
    "silu".to_owned()
}

/// What Mistral's class takes if the field is absent; early files leave it out.
fn mistral_window() -> Option<usize> {
    Some(4096)
}

impl LlamaConfig {
    /// Elements per head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
            .unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    /// Number of key/value heads.
    pub fn num_kv_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    /// Tokens that a token sees, itself included; `None` for all before it.
    pub fn window(&self) -> Option<usize> {
        match self.is_mistral() {
            true => self.sliding_window,
            false => None,
        }
    }

    fn is_mistral(&self) -> bool {
        self.architectures
            .first()
            .is_some_and(|name| name == "MistralForCausalLM")
    }

    /// Refuses what cannot be, and what this model does not do. Called before anything is allocated.
    ///
    /// # Errors
    /// [`ConfigError`] naming the field and its value.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.validate_sizes()?;
        self.validate_heads()?;
        if !(self.rms_norm_eps > 0.0 && self.rms_norm_eps < 1.0) {
            let reason = format!("is {}, between 0 and 1 is needed", self.rms_norm_eps);
            return Err(ConfigError::new("rms_norm_eps", reason));
        }
        if self.hidden_act != "silu" {
            let reason = format!("is {:?}, only \"silu\" is supported", self.hidden_act);
            return Err(ConfigError::new("hidden_act", reason));
        }
        if let Some(quantization) = &self.quantization_config {
            let method = quantization.get("quant_method").and_then(Value::as_str);
            let reason = format!(
                "asks for {:?}, which is not supported: use the unquantised model or a GGUF file",
                method.unwrap_or("quantised weights")
            );
            return Err(ConfigError::new("quantization_config", reason));
        }
        self.validate_window()
    }

    fn validate_sizes(&self) -> Result<(), ConfigError> {
        let sizes = [
            ("hidden_size", self.hidden_size, MAX_SIZE),
            ("intermediate_size", self.intermediate_size, MAX_SIZE),
            ("vocab_size", self.vocab_size, MAX_SIZE),
            ("num_hidden_layers", self.num_hidden_layers, MAX_LAYERS),
            (
                "max_position_embeddings",
                self.max_position_embeddings,
                usize::MAX,
            ),
        ];
        for (field, size, most) in sizes {
            if size == 0 || size > most {
                let reason = format!("is {size}, between 1 and {most} is needed");
                return Err(ConfigError::new(field, reason));
            }
        }
        Ok(())
    }

    fn validate_heads(&self) -> Result<(), ConfigError> {
        let (num_heads, num_kv_heads) = (self.num_attention_heads, self.num_kv_heads());
        if num_heads == 0 || num_heads > MAX_SIZE {
            let reason = format!("is {num_heads}, between 1 and {MAX_SIZE} is needed");
            return Err(ConfigError::new("num_attention_heads", reason));
        }
        if num_kv_heads == 0 || !num_heads.is_multiple_of(num_kv_heads) {
            let reason =
                format!("is {num_kv_heads}, which does not divide {num_heads} query heads");
            return Err(ConfigError::new("num_key_value_heads", reason));
        }
        if self.head_dim.is_none() && !self.hidden_size.is_multiple_of(num_heads) {
            let reason = format!("is {}, no multiple of {num_heads} heads", self.hidden_size);
            return Err(ConfigError::new("hidden_size", reason));
        }
        let head_dim = self.head_dim();
        if head_dim == 0 || head_dim > MAX_HEAD_DIM || !head_dim.is_multiple_of(2) {
            let reason =
                format!("is {head_dim}, an even number between 2 and {MAX_HEAD_DIM} is needed");
            return Err(ConfigError::new("head_dim", reason));
        }
        Ok(())
    }

    /// A window is honoured for Mistral, whose class defines it; elsewhere nobody says what it would mean.
    fn validate_window(&self) -> Result<(), ConfigError> {
        if self.is_mistral() && self.sliding_window == Some(0) {
            return Err(ConfigError::new(
                "sliding_window",
                "is 0: no token would see itself",
            ));
        }
        let supported = match self.window() {
            Some(_) => "sliding_attention",
            None => "full_attention",
        };
        let other = self
            .layer_types
            .iter()
            .flatten()
            .find(|kind| *kind != supported);
        if let Some(kind) = other {
            let reason = format!("has a layer of kind {kind:?}, all must be {supported:?}");
            return Err(ConfigError::new("layer_types", reason));
        }
        Ok(())
    }

    /// Refuses a context that no table can be made for.
    ///
    /// # Errors
    /// [`ConfigError`] with the number.
    pub(crate) fn validate_positions(max_positions: usize) -> Result<(), ConfigError> {
        match max_positions <= MAX_POSITIONS {
            true => Ok(()),
            false => Err(ConfigError::new(
                "max_position_embeddings",
                format!(
                    "gives {max_positions} positions: load with max_positions of at most {MAX_POSITIONS}"
                ),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use burn_paged_model::parse_config;
    use serde_json::{Map, json};

    use super::*;

    /// The fields that must be there, changed by `changes`; a null in `changes` stays a null.
    fn config(changes: Value) -> LlamaConfig {
        let mut object = json!({
            "architectures": ["LlamaForCausalLM"], "hidden_size": 48, "intermediate_size": 80,
            "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 32,
            "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        });
        let empty = Map::new();
        for (name, value) in changes.as_object().unwrap_or(&empty) {
            object[name] = value.clone();
        }
        parse_config(&object).unwrap()
    }

    fn refused(changes: Value) -> ConfigError {
        config(changes).validate().unwrap_err()
    }

    #[test]
    fn absent_fields_have_the_published_defaults() {
        let config = config(json!({}));
        config.validate().unwrap();
        assert_eq!((config.num_kv_heads(), config.head_dim()), (6, 8));
        assert!(!config.attention_bias && !config.mlp_bias && !config.tie_word_embeddings);
        assert_eq!(config.window(), None);
    }

    #[test]
    fn head_dim_may_differ_from_the_quotient() {
        let config = config(json!({"head_dim": 10, "num_key_value_heads": 3}));
        config.validate().unwrap();
        assert_eq!(config.head_dim(), 10);
    }

    #[test]
    fn absurd_numbers_are_refused_with_their_field() {
        let cases = [
            (json!({"hidden_size": 0}), "hidden_size"),
            (json!({"intermediate_size": 0}), "intermediate_size"),
            (json!({"vocab_size": 1u64 << 40}), "vocab_size"),
            (
                json!({"num_hidden_layers": 1_000_000_000_000u64}),
                "num_hidden_layers",
            ),
            (
                json!({"max_position_embeddings": 0}),
                "max_position_embeddings",
            ),
            (json!({"num_attention_heads": 0}), "num_attention_heads"),
            (json!({"num_key_value_heads": 0}), "num_key_value_heads"),
            (json!({"num_key_value_heads": 4}), "num_key_value_heads"),
            (json!({"num_attention_heads": 5}), "hidden_size"),
            (json!({"head_dim": 7}), "head_dim"),
            (json!({"head_dim": 0}), "head_dim"),
            (json!({"head_dim": 258}), "head_dim"),
            (json!({"rms_norm_eps": 0.0}), "rms_norm_eps"),
            (json!({"hidden_act": "gelu"}), "hidden_act"),
            (
                json!({"quantization_config": {"quant_method": "gptq"}}),
                "quantization_config",
            ),
            (
                json!({"layer_types": ["full_attention", "sliding_attention"]}),
                "layer_types",
            ),
        ];
        for (changes, field) in cases {
            assert_eq!(refused(changes.clone()).field, field, "{changes}");
        }
        assert!(
            refused(json!({"hidden_act": "gelu"}))
                .reason
                .contains("gelu")
        );
        assert!(LlamaConfig::validate_positions(1 << 30).is_err());
    }

    #[test]
    fn heads_that_do_not_group_are_refused() {
        let refused = refused(json!({"num_attention_heads": 3, "num_key_value_heads": 2}));
        assert_eq!(
            refused.to_string(),
            "num_key_value_heads is 2, which does not divide 3 query heads"
        );
        let many =
            json!({"hidden_size": 33 * 8, "num_attention_heads": 33, "num_key_value_heads": 2});
        assert!(config(many).validate().is_err());
    }

    #[test]
    fn the_window_is_mistrals() {
        let mistral = |window: Value| {
            config(json!({"architectures": ["MistralForCausalLM"], "sliding_window": window}))
        };
        assert_eq!(mistral(json!(5)).window(), Some(5));
        assert_eq!(mistral(json!(null)).window(), None);
        assert!(mistral(json!(0)).validate().is_err());
        let absent = config(json!({"architectures": ["MistralForCausalLM"]}));
        assert_eq!(absent.window(), Some(4096));
    }
}
