//! The configuration that is made from the metadata of a GGUF file.

use burn_paged_checkpoint::Checkpoint;
use serde_json::{Value, json};

use crate::assert_names;
use crate::write_gguf::GgufFile;

fn config_of(file: &GgufFile) -> Value {
    let (_folder, path) = file.write();
    Checkpoint::open(&path).unwrap().config().clone()
}

/// 4 heads of 2 over 2 key-value heads, tied.
fn llama() -> GgufFile {
    GgufFile::model("llama", 4, 2, 8)
        .tensor("token_embd.weight", &[5, 8], &[0.0; 40])
        .tensor("blk.0.attn_q.weight", &[8, 8], &[0.0; 64])
}

#[test]
fn a_plain_llama_has_all_fields() {
    let file = llama()
        .f32("llama.rope.freq_base", 100_000.0)
        .u32("llama.rope.dimension_count", 2)
        .u32("tokenizer.ggml.bos_token_id", 1)
        .u32("tokenizer.ggml.eos_token_id", 2)
        .strings("tokenizer.ggml.tokens", &["a", "b", "c"]);
    let expected = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 8,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "max_position_embeddings": 512,
        "vocab_size": 5,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": true,
        "attention_bias": false,
        "mlp_bias": false,
        "bos_token_id": 1,
        "eos_token_id": 2,
    });
    assert_eq!(config_of(&file), expected);
}

#[test]
fn tensors_tell_about_ties_and_biases() {
    let file = llama()
        .tensor("output.weight", &[5, 8], &[0.0; 40])
        .tensor("blk.0.attn_v.bias", &[4], &[0.0; 4])
        .tensor("blk.0.ffn_down.bias", &[8], &[0.0; 8]);
    let config = config_of(&file);
    assert_eq!(config["tie_word_embeddings"], false);
    assert_eq!(config["attention_bias"], true);
    assert_eq!(config["mlp_bias"], true);
}

#[test]
fn the_size_of_a_head_comes_from_the_best_witness() {
    let bare = || GgufFile::model("llama", 4, 2, 8).tensor("x", &[1], &[0.0]);
    assert_eq!(config_of(&bare())["head_dim"], 2);
    assert_eq!(config_of(&bare())["vocab_size"], 3);
    let rotary = bare().u32("llama.rope.dimension_count", 6);
    assert_eq!(config_of(&rotary)["head_dim"], 6);
    let wide = GgufFile::model("llama", 4, 2, 8)
        .tensor("blk.0.attn_q.weight", &[64, 8], &[0.0; 512])
        .u32("llama.rope.dimension_count", 4);
    let config = config_of(&wide);
    assert_eq!(
        (&config["head_dim"], &config["partial_rotary_factor"]),
        (&json!(16), &json!(0.25))
    );
    let stated = wide
        .u32("llama.attention.key_length", 4)
        .u32("llama.attention.value_length", 4);
    let config = config_of(&stated);
    assert_eq!(config["head_dim"], 4);
    assert!(config.get("partial_rotary_factor").is_none());
    let (_folder, path) = stated.u32("llama.attention.value_length", 6).write();
    assert_names(&crate::refusal(&path), &["4 for keys but 6 for values"]);
}

#[test]
fn rope_scaling_is_translated_or_passed_on_by_name() {
    let scaled = |kind: Option<&str>, factor: Option<f32>| {
        let mut file = llama();
        if let Some(kind) = kind {
            file = file.string("llama.rope.scaling.type", kind);
        }
        if let Some(factor) = factor {
            file = file.f32("llama.rope.scaling.factor", factor);
        }
        file
    };
    let scaling = |file: &GgufFile| config_of(file).get("rope_scaling").cloned();
    let linear = Some(json!({"rope_type": "linear", "factor": 2.5}));
    assert_eq!(scaling(&scaled(None, None)), None);
    assert_eq!(scaling(&scaled(Some("none"), Some(2.5))), None);
    assert_eq!(scaling(&scaled(Some("linear"), Some(2.5))), linear);
    assert_eq!(scaling(&scaled(None, Some(2.5))), linear);
    assert_eq!(
        scaling(&llama().f32("llama.rope.scale_linear", 2.5)),
        linear
    );
    assert_eq!(scaling(&scaled(Some("linear"), Some(1.0))), None);
    assert_eq!(
        scaling(&scaled(Some("abc"), None)),
        Some(json!({"rope_type": "abc"}))
    );
    let yarn = scaled(Some("yarn"), Some(4.0))
        .u32("llama.rope.scaling.original_context_length", 128)
        .f32("llama.rope.scaling.attn_factor", 1.0)
        .f32("llama.rope.scaling.yarn_beta_fast", 30.0)
        .f32("llama.rope.scaling.yarn_beta_slow", 2.0);
    let expected = json!({
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 30.0,
        "beta_slow": 2.0,
    });
    assert_eq!(scaling(&yarn), Some(expected));
    let magnitude = scaling(&yarn.f32("llama.rope.scaling.attn_factor", 0.5)).unwrap();
    let magnitude = magnitude["attention_factor"].as_f64().unwrap();
    assert!(
        (magnitude - 0.5 * 1.138_629_436).abs() < 1e-8,
        "{magnitude}"
    );
}

#[test]
fn several_end_tokens_become_a_list_without_repetition() {
    let file = llama()
        .u32("tokenizer.ggml.eos_token_id", 7)
        .u32("tokenizer.ggml.eot_token_id", 9)
        .u32("tokenizer.ggml.eom_token_id", 7);
    assert_eq!(config_of(&file)["eos_token_id"], json!([7, 9]));
    assert!(config_of(&llama()).get("eos_token_id").is_none());
    let (_folder, path) = llama()
        .string("tokenizer.ggml.eos_token_id", "</s>")
        .write();
    assert_names(
        &crate::refusal(&path),
        &["tokenizer.ggml.eos_token_id is a string"],
    );
}

#[test]
fn a_mixture_of_experts_is_not_called_llama() {
    let config = config_of(&llama().u32("llama.expert_count", 8));
    assert_eq!(config["model_type"], "mixtral");
    assert_eq!(config["num_local_experts"], 8);
}

#[test]
fn an_unknown_architecture_keeps_its_name_and_its_tensors() {
    let file = GgufFile::model("mystery", 4, 2, 8)
        .f32("mystery.final_logit_softcapping", 30.0)
        .u32("mystery.attention.sliding_window", 64)
        .tensor("blk.0.ffn_norm.weight", &[8], &[0.0; 8])
        .tensor("token_embd.weight", &[7, 8], &[0.0; 56])
        .tensor("output.weight", &[5, 8], &[0.0; 40]);
    let (_folder, path) = file.write();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let config = checkpoint.config();
    assert_eq!(config["model_type"], "mystery");
    assert_eq!(config["architectures"], json!(["mystery"]));
    assert_eq!(config["tie_word_embeddings"], false);
    assert_eq!(config["final_logit_softcapping"], 30.0);
    assert_eq!(config["sliding_window"], 64);
    assert_eq!(config["vocab_size"], 7);
    assert!(config.get("hidden_act").is_none());
    assert!(checkpoint.contains("blk.0.ffn_norm.weight"));
}

#[test]
fn values_per_layer_must_agree() {
    let per_layer = |counts: [u32; 2]| {
        let items = counts
            .iter()
            .flat_map(|count| count.to_le_bytes())
            .collect();
        llama().array("llama.attention.head_count_kv", 4, 2, items)
    };
    assert_eq!(config_of(&per_layer([2, 2]))["num_key_value_heads"], 2);
    let (_folder, path) = per_layer([2, 4]).write();
    assert_names(
        &crate::refusal(&path),
        &["llama.attention.head_count_kv differs between layers"],
    );
}

#[test]
fn missing_and_senseless_values_name_the_key() {
    for key in [
        "block_count",
        "context_length",
        "embedding_length",
        "attention.head_count",
    ] {
        let (_folder, path) = llama().without(&format!("llama.{key}")).write();
        assert_names(
            &crate::refusal(&path),
            &[&format!("llama.{key} is missing")],
        );
    }
    let (_folder, path) = llama().f32("llama.rope.freq_base", f32::NAN).write();
    assert_names(&crate::refusal(&path), &["llama.rope.freq_base is NaN"]);
}
