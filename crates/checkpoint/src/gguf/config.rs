//! The Hugging Face style `config.json` that the metadata of a GGUF file amounts to.
//!
//! The model crates parse one kind of configuration. Keys that both formats have are translated;
//! where GGUF leaves a value to the tensors (tied embeddings, biases, the size of a head) the
//! tensors are asked. A key that not every architecture has is left out if it is absent: whether
//! the model needs it is the model's business.

use serde_json::{Map, Value, json};

use super::metadata::GgufMetadata;
use super::value::{GgufArray, GgufValue};
use crate::error::CheckpointError;
use crate::tensor::StoredTensor;

/// Architecture names: in GGUF, as `model_type`, as class.
const ARCHITECTURES: [(&str, &str, &str); 3] = [
    ("llama", "llama", "LlamaForCausalLM"),
    ("qwen2", "qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "qwen3", "Qwen3ForCausalLM"),
];

/// The keys of one architecture, `<architecture>.<name>`.
struct Keys<'a> {
    metadata: &'a GgufMetadata,
    architecture: &'a str,
}

/// The numbers of query and key heads, neither zero and the second a divisor of the first.
pub(super) fn head_counts(
    metadata: &GgufMetadata,
    architecture: &str,
) -> Result<(u64, u64), CheckpointError> {
    let keys = Keys {
        metadata,
        architecture,
    };
    let num_heads = keys.required("attention.head_count")?;
    let num_kv_heads = keys
        .integer("attention.head_count_kv")?
        .unwrap_or(num_heads);
    if num_heads == 0 || num_kv_heads == 0 || num_heads % num_kv_heads != 0 {
        return Err(metadata.error(
            &keys.key("attention.head_count_kv"),
            format!("is {num_kv_heads}, which does not divide {num_heads} query heads"),
        ));
    }
    Ok((num_heads, num_kv_heads))
}

/// Builds the configuration.
pub(super) fn synthesize(
    metadata: &GgufMetadata,
    tensors: &[StoredTensor],
) -> Result<Value, CheckpointError> {
    let architecture = metadata.architecture()?;
    let keys = Keys {
        metadata,
        architecture,
    };
    let mut config = Map::new();
    let (num_heads, num_kv_heads) = head_counts(metadata, architecture)?;
    insert_names(&keys, &mut config)?;
    config.insert(
        "hidden_size".into(),
        keys.required("embedding_length")?.into(),
    );
    if let Some(size) = keys.integer("feed_forward_length")? {
        config.insert("intermediate_size".into(), size.into());
    }
    config.insert(
        "num_hidden_layers".into(),
        keys.required("block_count")?.into(),
    );
    config.insert("num_attention_heads".into(), num_heads.into());
    config.insert("num_key_value_heads".into(), num_kv_heads.into());
    insert_head_dim(&keys, tensors, num_heads, &mut config)?;
    config.insert(
        "max_position_embeddings".into(),
        keys.required("context_length")?.into(),
    );
    config.insert("vocab_size".into(), vocab_size(&keys, tensors)?.into());
    if let Some(epsilon) = keys.float("attention.layer_norm_rms_epsilon")? {
        config.insert("rms_norm_eps".into(), epsilon.into());
    }
    config.insert(
        "rope_theta".into(),
        keys.float("rope.freq_base")?.unwrap_or(10_000.0).into(),
    );
    if let Some(scaling) = rope_scaling(&keys)? {
        config.insert("rope_scaling".into(), scaling);
    }
    insert_optional(&keys, &mut config)?;
    insert_from_tensors(tensors, &mut config);
    insert_token_ids(metadata, &mut config)?;
    Ok(Value::Object(config))
}

fn insert_names(keys: &Keys, config: &mut Map<String, Value>) -> Result<(), CheckpointError> {
    let architecture = keys.architecture;
    let num_experts = keys.integer("expert_count")?.unwrap_or(0);
    let known = ARCHITECTURES
        .iter()
        .find(|(gguf, _, _)| *gguf == architecture);
    let (model_type, class) = match known {
        // A mixture of experts goes by the same GGUF name, but it is another model.
        Some(_) if num_experts > 0 && architecture == "llama" => ("mixtral", "MixtralForCausalLM"),
        Some((_, model_type, class)) => (*model_type, *class),
        // The model crates refuse what they do not know, by this name.
        None => (architecture, architecture),
    };
    config.insert("architectures".into(), json!([class]));
    config.insert("model_type".into(), model_type.into());
    if known.is_some() {
        config.insert("hidden_act".into(), "silu".into());
    }
    if num_experts > 0 {
        config.insert("num_local_experts".into(), num_experts.into());
    }
    Ok(())
}

/// `head_dim`, and `partial_rotary_factor` if only a part of each head is rotated.
fn insert_head_dim(
    keys: &Keys,
    tensors: &[StoredTensor],
    num_heads: u64,
    config: &mut Map<String, Value>,
) -> Result<(), CheckpointError> {
    let rotary_dim = keys.integer("rope.dimension_count")?;
    let from_tensor = || {
        let query = find(tensors, "model.layers.0.self_attn.q_proj.weight")?;
        let rows = *query.info.shape.first()? as u64;
        rows.is_multiple_of(num_heads).then_some(rows / num_heads)
    };
    let head_dim = match keys
        .integer("attention.key_length")?
        .or_else(from_tensor)
        .or(rotary_dim)
    {
        Some(head_dim) => head_dim,
        None => keys.required("embedding_length")? / num_heads,
    };
    if let Some(value_dim) = keys.integer("attention.value_length")?
        && value_dim != head_dim
    {
        return Err(CheckpointError::unsupported(
            keys.metadata.path(),
            format!("heads of {head_dim} for keys but {value_dim} for values"),
        ));
    }
    config.insert("head_dim".into(), head_dim.into());
    if let Some(rotary_dim) = rotary_dim
        && rotary_dim != head_dim
    {
        let factor = rotary_dim as f64 / head_dim.max(1) as f64;
        config.insert("partial_rotary_factor".into(), factor.into());
    }
    Ok(())
}

/// The rows of the embedding, which may be more than there are tokens.
fn vocab_size(keys: &Keys, tensors: &[StoredTensor]) -> Result<u64, CheckpointError> {
    let embedding =
        find(tensors, "model.embed_tokens.weight").or_else(|| find(tensors, "token_embd.weight"));
    if let Some(rows) = embedding.and_then(|tensor| tensor.info.shape.first()) {
        return Ok(*rows as u64);
    }
    match keys.metadata.optional_strings("tokenizer.ggml.tokens")? {
        Some(tokens) => Ok(tokens.len() as u64),
        None => keys.required("vocab_size"),
    }
}

/// The `rope_scaling` object, `None` for unscaled positions. Kinds that GGUF has and this function
/// does not know keep their name, so that the model can refuse them.
fn rope_scaling(keys: &Keys) -> Result<Option<Value>, CheckpointError> {
    let kind = keys.string("rope.scaling.type")?;
    let factor = match keys.float("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        // The older form, which is always linear.
        None => keys.float("rope.scale_linear")?,
    };
    let kind = match (kind, factor) {
        (Some("none"), _) | (None, None) => return Ok(None),
        (None, Some(_)) => "linear",
        (Some(kind), _) => kind,
    };
    if kind == "linear" && factor.is_none_or(|factor| factor == 1.0) {
        return Ok(None);
    }
    let mut scaling = Map::new();
    scaling.insert("rope_type".into(), kind.into());
    if let Some(factor) = factor {
        scaling.insert("factor".into(), factor.into());
    }
    if let Some(original) = keys.integer("rope.scaling.original_context_length")? {
        scaling.insert("original_max_position_embeddings".into(), original.into());
    }
    if kind == "yarn" {
        // GGUF has a factor on top of the usual magnitude, Hugging Face the whole magnitude.
        if let (Some(attention), Some(factor)) = (keys.float("rope.scaling.attn_factor")?, factor)
            && attention != 1.0
        {
            let magnitude = attention * (1.0 + 0.1 * factor.max(1.0).ln());
            scaling.insert("attention_factor".into(), magnitude.into());
        }
        for beta in ["beta_fast", "beta_slow"] {
            if let Some(value) = keys.float(&format!("rope.scaling.yarn_{beta}"))? {
                scaling.insert(beta.into(), value.into());
            }
        }
    }
    Ok(Some(Value::Object(scaling)))
}

/// Keys that change what a model computes and have the same meaning in both formats.
fn insert_optional(keys: &Keys, config: &mut Map<String, Value>) -> Result<(), CheckpointError> {
    if let Some(window) = keys.integer("attention.sliding_window")?
        && window > 0
    {
        config.insert("sliding_window".into(), window.into());
    }
    for softcapping in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(cap) = keys.float(softcapping)? {
            config.insert(softcapping.into(), cap.into());
        }
    }
    Ok(())
}

/// What only the presence of tensors tells.
fn insert_from_tensors(tensors: &[StoredTensor], config: &mut Map<String, Value>) {
    let any_ends_with = |ends: &[&str]| {
        tensors
            .iter()
            .any(|t| ends.iter().any(|end| t.name.ends_with(end)))
    };
    let tied =
        find(tensors, "lm_head.weight").is_none() && find(tensors, "output.weight").is_none();
    config.insert("tie_word_embeddings".into(), tied.into());
    let attention = ["q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"];
    config.insert("attention_bias".into(), any_ends_with(&attention).into());
    let mlp = ["gate_proj.bias", "up_proj.bias", "down_proj.bias"];
    config.insert("mlp_bias".into(), any_ends_with(&mlp).into());
}

/// The tokens that begin and end a text; several end tokens become a list.
fn insert_token_ids(
    metadata: &GgufMetadata,
    config: &mut Map<String, Value>,
) -> Result<(), CheckpointError> {
    if let Some(bos) = metadata.optional_u32("tokenizer.ggml.bos_token_id")? {
        config.insert("bos_token_id".into(), bos.into());
    }
    let mut ends = Vec::new();
    for name in ["eos", "eot", "eom"] {
        if let Some(id) = metadata.optional_u32(&format!("tokenizer.ggml.{name}_token_id"))?
            && !ends.contains(&id)
        {
            ends.push(id);
        }
    }
    match ends.as_slice() {
        [] => {}
        [end] => drop(config.insert("eos_token_id".into(), (*end).into())),
        several => drop(config.insert("eos_token_id".into(), several.into())),
    }
    Ok(())
}

fn find<'a>(tensors: &'a [StoredTensor], name: &str) -> Option<&'a StoredTensor> {
    tensors.iter().find(|tensor| tensor.name == name)
}

impl<'a> Keys<'a> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn required(&self, name: &str) -> Result<u64, CheckpointError> {
        self.integer(name)?
            .ok_or_else(|| self.metadata.error(&self.key(name), "is missing"))
    }

    /// An integer, or an array with one value per layer if all are equal.
    fn integer(&self, name: &str) -> Result<Option<u64>, CheckpointError> {
        let key = self.key(name);
        let Some(GgufValue::Array(GgufArray::Signed(_) | GgufArray::Unsigned(_))) =
            self.metadata.get(&key)
        else {
            return self.metadata.optional_u64(&key);
        };
        let per_layer = self.metadata.optional_integers(&key)?.unwrap_or_default();
        match per_layer.first() {
            Some(&first) if first >= 0 && per_layer.iter().all(|&value| value == first) => {
                Ok(Some(first.unsigned_abs()))
            }
            _ => Err(CheckpointError::unsupported(
                self.metadata.path(),
                format!("{key} differs between layers"),
            )),
        }
    }

    /// A float as the decimal number that it was made from: 1e-5 and not 0.00000999999974737875.
    fn float(&self, name: &str) -> Result<Option<f64>, CheckpointError> {
        let key = self.key(name);
        let Some(value) = self.metadata.optional_f32(&key)? else {
            return Ok(None);
        };
        if !value.is_finite() {
            return Err(self.metadata.error(&key, format!("is {value}")));
        }
        Ok(Some(
            value
                .to_string()
                .parse()
                .unwrap_or_else(|_| f64::from(value)),
        ))
    }

    fn string(&self, name: &str) -> Result<Option<&'a str>, CheckpointError> {
        self.metadata.optional_string(&self.key(name))
    }
}
