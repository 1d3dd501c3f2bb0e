//! A checkpoint of two layers with arbitrary weights, written in the published format.
//!
//! A weight is a hash of its tensor's name and of its index, so that the reference script of this example can make the
//! same ones.

use std::path::Path;

use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::{Value, json};

/// The configuration, as a `config.json`. No two sizes are equal, and the heads together are wider than the residual
/// stream.
pub fn config() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 24,
        "intermediate_size": 38,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "vocab_size": 37,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": false,
    })
}

/// Writes `config.json` and `model.safetensors` into `folder`.
///
/// # Errors
/// What the file system reports.
pub fn write(folder: &Path) -> Result<(), Box<dyn std::error::Error>> {
    std::fs::write(folder.join("config.json"), config().to_string())?;
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = (shapes().into_iter())
        .map(|(name, shape)| {
            let bytes = weights(&name, &shape)
                .into_iter()
                .flat_map(f32::to_le_bytes)
                .collect();
            (name, shape, bytes)
        })
        .collect();
    let views = (tensors.iter())
        .map(|(name, shape, bytes)| Ok((name, TensorView::new(Dtype::F32, shape.clone(), bytes)?)))
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
    Ok(serialize_to_file(
        views,
        None,
        &folder.join("model.safetensors"),
    )?)
}

/// Names and shapes of all tensors.
fn shapes() -> Vec<(String, Vec<usize>)> {
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![37, 24]),
        ("model.norm.weight".to_owned(), vec![24]),
        ("lm_head.weight".to_owned(), vec![37, 24]),
    ];
    for layer in 0..2 {
        let tensors: [(&str, &[usize]); 11] = [
            ("input_layernorm", &[24]),
            ("self_attn.q_proj", &[60, 24]),
            ("self_attn.k_proj", &[20, 24]),
            ("self_attn.v_proj", &[20, 24]),
            ("self_attn.q_norm", &[10]),
            ("self_attn.k_norm", &[10]),
            ("self_attn.o_proj", &[24, 60]),
            ("post_attention_layernorm", &[24]),
            ("mlp.gate_proj", &[38, 24]),
            ("mlp.up_proj", &[38, 24]),
            ("mlp.down_proj", &[24, 38]),
        ];
        let name = |name: &str| format!("model.layers.{layer}.{name}.weight");
        shapes.extend(tensors.map(|(tensor, shape)| (name(tensor), shape.to_vec())));
    }
    shapes
}

/// Between -1 and 1 over `sqrt(in_features) / 3` for a matrix, which peaks the attention; around 1 for a norm.
fn weights(name: &str, shape: &[usize]) -> Vec<f32> {
    // FNV-1a of the name.
    let seed = name.bytes().fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
    });
    let unit = |index: u64| {
        let mut bits = seed.wrapping_add(index.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (bits >> 40) as f32 / 8_388_608.0 - 1.0
    };
    let values = (0..shape.iter().product::<usize>() as u64).map(unit);
    match shape {
        [_, in_features] => {
            let scale = 3.0 / (*in_features as f32).sqrt();
            values.map(|value| value * scale).collect()
        }
        _ => values.map(|value| 1.0 + 0.5 * value).collect(),
    }
}
