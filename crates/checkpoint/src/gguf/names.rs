//! The names that GGUF and Hugging Face files give to the same tensors of llama-like models.

/// The architectures whose GGUF tensors have the roles that these tables say. In others the same
/// name may mean something else (`ffn_norm` is not always the norm after attention), so their names
/// are left alone.
const LLAMA_LIKE: [&str; 3] = ["llama", "qwen2", "qwen3"];

const GLOBAL: [(&str, &str); 3] = [
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
];

const PER_LAYER: [(&str, &str); 11] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// The Hugging Face name of a GGUF tensor; names that are in no table stay as they are.
pub(super) fn hugging_face_name(architecture: &str, name: &str) -> String {
    translate(architecture, name).unwrap_or_else(|| name.to_owned())
}

fn translate(architecture: &str, name: &str) -> Option<String> {
    if !LLAMA_LIKE.contains(&architecture) {
        return None;
    }
    let (role, suffix) = name.rsplit_once('.')?;
    if !matches!(suffix, "weight" | "bias") {
        return None;
    }
    match role.strip_prefix("blk.") {
        None => look_up(&GLOBAL, role).map(|role| format!("{role}.{suffix}")),
        Some(rest) => {
            let (layer, role) = rest.split_once('.')?;
            // Only the plain spelling of a number, so that two stored names cannot become one.
            let number: usize = layer.parse().ok()?;
            if number.to_string() != layer {
                return None;
            }
            look_up(&PER_LAYER, role).map(|role| format!("model.layers.{layer}.{role}.{suffix}"))
        }
    }
}

fn look_up(table: &[(&str, &'static str)], role: &str) -> Option<&'static str> {
    table
        .iter()
        .find(|(gguf, _)| *gguf == role)
        .map(|(_, hugging_face)| *hugging_face)
}

/// The projections whose rows a llama file stores in another order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RotaryProjection {
    Query,
    Key,
}

/// Whether a GGUF tensor is the weight or bias of the query or key projection.
pub(super) fn rotary_projection(name: &str) -> Option<RotaryProjection> {
    let (role, suffix) = name
        .strip_prefix("blk.")?
        .split_once('.')?
        .1
        .split_once('.')?;
    match (role, suffix) {
        ("attn_q", "weight" | "bias") => Some(RotaryProjection::Query),
        ("attn_k", "weight" | "bias") => Some(RotaryProjection::Key),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tensor_of_a_llama_has_its_hugging_face_name() {
        let cases = [
            ("token_embd.weight", "model.embed_tokens.weight"),
            ("output_norm.weight", "model.norm.weight"),
            ("output.weight", "lm_head.weight"),
            (
                "blk.0.attn_norm.weight",
                "model.layers.0.input_layernorm.weight",
            ),
            (
                "blk.12.attn_q.weight",
                "model.layers.12.self_attn.q_proj.weight",
            ),
            (
                "blk.12.attn_q.bias",
                "model.layers.12.self_attn.q_proj.bias",
            ),
            (
                "blk.3.attn_k.weight",
                "model.layers.3.self_attn.k_proj.weight",
            ),
            ("blk.3.attn_v.bias", "model.layers.3.self_attn.v_proj.bias"),
            (
                "blk.3.attn_output.weight",
                "model.layers.3.self_attn.o_proj.weight",
            ),
            (
                "blk.3.attn_q_norm.weight",
                "model.layers.3.self_attn.q_norm.weight",
            ),
            (
                "blk.3.attn_k_norm.weight",
                "model.layers.3.self_attn.k_norm.weight",
            ),
            (
                "blk.3.ffn_norm.weight",
                "model.layers.3.post_attention_layernorm.weight",
            ),
            (
                "blk.3.ffn_gate.weight",
                "model.layers.3.mlp.gate_proj.weight",
            ),
            ("blk.3.ffn_up.weight", "model.layers.3.mlp.up_proj.weight"),
            ("blk.3.ffn_down.bias", "model.layers.3.mlp.down_proj.bias"),
        ];
        for (gguf, hugging_face) in cases {
            assert_eq!(hugging_face_name("llama", gguf), hugging_face);
            assert_eq!(hugging_face_name("qwen2", gguf), hugging_face);
        }
    }

    #[test]
    fn unknown_names_and_other_architectures_are_left_alone() {
        for name in [
            "rope_freqs.weight",
            "blk.0.ffn_gate_inp.weight",
            "blk.00.attn_q.weight",
            "output",
        ] {
            assert_eq!(hugging_face_name("llama", name), name);
        }
        assert_eq!(
            hugging_face_name("gemma2", "blk.0.ffn_norm.weight"),
            "blk.0.ffn_norm.weight"
        );
    }

    #[test]
    fn only_query_and_key_projections_are_rotary() {
        assert_eq!(
            rotary_projection("blk.7.attn_q.weight"),
            Some(RotaryProjection::Query)
        );
        assert_eq!(
            rotary_projection("blk.7.attn_k.bias"),
            Some(RotaryProjection::Key)
        );
        for name in [
            "blk.7.attn_v.weight",
            "blk.7.attn_q_norm.weight",
            "attn_q.weight",
        ] {
            assert_eq!(rotary_projection(name), None);
        }
    }
}
