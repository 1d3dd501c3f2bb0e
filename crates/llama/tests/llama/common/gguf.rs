//! GGUF files as the llama converter writes them: reversed dimensions, and Q and K rows in adjacent pairs.

use std::path::Path;

use super::files::Tensors;
use super::tiny::{EPSILON, HostTensor, THETA, Tiny};

const ALIGNMENT: usize = 32;
const TYPE_U32: u32 = 4;
const TYPE_F32: u32 = 6;
const TYPE_STRING: u32 = 8;
const TENSOR_F32: u32 = 0;

/// Writes the model as one GGUF file of version 3 with f32 tensors; `more` are tensors that only GGUF has.
pub(crate) fn write(path: &Path, tiny: &Tiny, tensors: &Tensors, more: &Tensors) {
    let mut named: Vec<(String, HostTensor)> = Vec::new();
    for (name, tensor) in tensors {
        named.push((gguf_name(name), in_file_order(name, tensor, tiny)));
    }
    named.extend(
        more.iter()
            .map(|(name, tensor)| (name.clone(), tensor.clone())),
    );

    let metadata = metadata(tiny);
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend((named.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    metadata.iter().for_each(|entry| out.extend(entry));
    let mut offset = 0;
    for (name, tensor) in &named {
        out.extend(string(name));
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        for dimension in tensor.shape.iter().rev() {
            out.extend((*dimension as u64).to_le_bytes());
        }
        out.extend(TENSOR_F32.to_le_bytes());
        out.extend((offset as u64).to_le_bytes());
        offset += (4 * tensor.values.len()).next_multiple_of(ALIGNMENT);
    }
    out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
    for (_, tensor) in &named {
        out.extend(tensor.values.iter().flat_map(|value| value.to_le_bytes()));
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
    }
    std::fs::write(path, out).expect("the file can be written");
}

fn metadata(tiny: &Tiny) -> Vec<Vec<u8>> {
    let number = |key: &str, value: usize| {
        let value = (value as u32).to_le_bytes();
        [string(key), TYPE_U32.to_le_bytes().to_vec(), value.to_vec()].concat()
    };
    let float = |key: &str, value: f64| {
        let value = (value as f32).to_le_bytes();
        [string(key), TYPE_F32.to_le_bytes().to_vec(), value.to_vec()].concat()
    };
    let text = |key: &str, value: &str| {
        [
            string(key),
            TYPE_STRING.to_le_bytes().to_vec(),
            string(value),
        ]
        .concat()
    };
    vec![
        text("general.architecture", "llama"),
        number("llama.block_count", tiny.num_layers),
        number("llama.context_length", tiny.max_position_embeddings),
        number("llama.embedding_length", tiny.hidden_size),
        number("llama.feed_forward_length", tiny.intermediate_size),
        number("llama.attention.head_count", tiny.num_heads),
        number("llama.attention.head_count_kv", tiny.num_kv_heads),
        number("llama.attention.key_length", tiny.head_dim),
        number("llama.rope.dimension_count", tiny.head_dim),
        float("llama.rope.freq_base", THETA),
        float("llama.attention.layer_norm_rms_epsilon", EPSILON),
    ]
}

fn string(text: &str) -> Vec<u8> {
    [
        (text.len() as u64).to_le_bytes().to_vec(),
        text.as_bytes().to_vec(),
    ]
    .concat()
}

fn gguf_name(name: &str) -> String {
    let renames = [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers.", "blk."),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    ];
    renames
        .iter()
        .fold(name.to_owned(), |name, (theirs, gguf)| {
            name.replace(theirs, gguf)
        })
}

/// Puts the rows of each Q and K head into pairs: first half and second half take turns.
fn in_file_order(name: &str, tensor: &HostTensor, tiny: &Tiny) -> HostTensor {
    if !name.contains("q_proj") && !name.contains("k_proj") {
        return tensor.clone();
    }
    let (rows, half) = (tensor.shape[0], tiny.head_dim / 2);
    let width = tensor.values.len() / rows;
    let values = (0..rows).flat_map(|row| {
        let (head, at) = (row / tiny.head_dim, row % tiny.head_dim);
        let source = head * tiny.head_dim + at % 2 * half + at / 2;
        tensor.values[source * width..(source + 1) * width]
            .iter()
            .copied()
    });
    HostTensor {
        shape: tensor.shape.clone(),
        values: values.collect(),
    }
}

#[test]
fn rows_of_a_head_take_turns() {
    let tiny = Tiny {
        head_dim: 8,
        ..Tiny::grouped()
    };
    let rows = HostTensor {
        shape: vec![16],
        values: (0..16).map(|row| row as f32).collect(),
    };
    let stored = in_file_order("k_proj.bias", &rows, &tiny).values;
    let expected = [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15];
    assert_eq!(stored, expected.map(|row: u8| f32::from(row)));
}
