//! A Llama of two layers with arbitrary weights.

use burn::tensor::Device;
use burn_paged_checkpoint::Checkpoint;
use burn_paged_model::{CausalLm, LoadOptions, ModelDType, load_model};
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::json;

pub(crate) const VOCAB: usize = 101;
const HIDDEN: usize = 48;
const INNER: usize = 80;
const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 16;
const LAYERS: usize = 2;

/// The model on `device`, in f32: near ties of other dtypes would tell paths apart that round differently.
pub(crate) fn load(device: &Device) -> Box<dyn CausalLm> {
    let folder = tempfile::tempdir().unwrap();
    let config = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": false,
    });
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = (shapes().into_iter())
        .map(|(name, shape)| {
            let values = weights(&name, &shape);
            let bytes = values.into_iter().flat_map(f32::to_le_bytes).collect();
            (name, shape, bytes)
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap();
        (name, view)
    });
    let file = folder.path().join("model.safetensors");
    serialize_to_file(views, None, &file).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let options = LoadOptions::new(device.clone()).with_dtype(ModelDType::F32);
    load_model(&[burn_paged_llama::FAMILY], &checkpoint, &options).unwrap()
}

fn shapes() -> Vec<(String, Vec<usize>)> {
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![VOCAB, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
        ("lm_head.weight".to_owned(), vec![VOCAB, HIDDEN]),
    ];
    for layer in 0..LAYERS {
        let tensors: [(&str, &[usize]); 9] = [
            ("input_layernorm", &[HIDDEN]),
            ("self_attn.q_proj", &[HEADS * HEAD_DIM, HIDDEN]),
            ("self_attn.k_proj", &[KV_HEADS * HEAD_DIM, HIDDEN]),
            ("self_attn.v_proj", &[KV_HEADS * HEAD_DIM, HIDDEN]),
            ("self_attn.o_proj", &[HIDDEN, HEADS * HEAD_DIM]),
            ("post_attention_layernorm", &[HIDDEN]),
            ("mlp.gate_proj", &[INNER, HIDDEN]),
            ("mlp.up_proj", &[INNER, HIDDEN]),
            ("mlp.down_proj", &[HIDDEN, INNER]),
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
