//! Checkpoints and options that are refused, each with a message that says why.

use burn_paged_checkpoint::Checkpoint;
use burn_paged_llama::FAMILY;
use burn_paged_model::{LoadError, LoadOptions, load_model};
use serde_json::{Value, json};

use crate::common::device;
use crate::common::files::{self, Tensors};
use crate::common::tiny::Tiny;
use crate::loading::{load, load_as};

#[test]
fn all_missing_and_misshapen_tensors_are_named_at_once() {
    let tiny = Tiny::grouped();
    let mut tensors = tiny.weights();
    tensors.remove("model.layers.0.self_attn.k_proj.weight");
    tensors.remove("model.layers.2.mlp.down_proj.weight");
    tensors.remove("model.norm.weight");
    tensors
        .get_mut("model.layers.1.self_attn.v_proj.weight")
        .unwrap()
        .shape
        .reverse();
    let folder = files::write_with(&tiny.config(), &tensors);
    let LoadError::Weights {
        missing, misshapen, ..
    } = load(folder.path()).unwrap_err()
    else {
        panic!("another error than Weights");
    };
    let expected = [
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.2.mlp.down_proj.weight",
        "model.norm.weight",
    ];
    assert_eq!(missing, expected);
    assert_eq!(misshapen.len(), 1);
    assert_eq!(misshapen[0].name, "model.layers.1.self_attn.v_proj.weight");
    assert_eq!(
        (&misshapen[0].expected, &misshapen[0].found),
        (&vec![20, 44], &vec![44, 20])
    );
}

#[test]
fn a_configuration_that_lies_about_shapes_is_refused_with_the_tensors() {
    let tiny = Tiny::grouped();
    let tensors = tiny.weights();
    let lies = [
        (
            "hidden_size",
            45,
            "model.embed_tokens.weight (is [67, 44], expected [67, 45])",
        ),
        (
            "vocab_size",
            66,
            "lm_head.weight (is [67, 44], expected [66, 44])",
        ),
        (
            "intermediate_size",
            71,
            "model.layers.0.mlp.gate_proj.weight (is [70, 44], expected [71, 44])",
        ),
        (
            "num_key_value_heads",
            3,
            "model.layers.0.self_attn.k_proj.weight (is [20, 44], expected [30, 44])",
        ),
        (
            "head_dim",
            12,
            "model.layers.0.self_attn.q_proj.weight (is [60, 44], expected [72, 44])",
        ),
        (
            "num_hidden_layers",
            1000,
            "8973 tensors missing: model.layers.3.input_layernorm.weight",
        ),
    ];
    for (field, value, expected) in lies {
        let mut config = tiny.config();
        config[field] = json!(value);
        let folder = files::write_with(&config, &tensors);
        let error = load(folder.path()).unwrap_err().to_string();
        assert!(error.contains(expected), "{field}: {error}");
        assert!(
            error.len() < 4000,
            "{field}: a message of {} bytes",
            error.len()
        );
    }
}

fn refused_config(changes: Value) -> String {
    let tiny = Tiny::grouped().with(changes);
    let folder = files::write_with(
        &tiny.config(),
        &Tensors::from([(
            "model.embed_tokens.weight".to_owned(),
            tiny.weights()["model.embed_tokens.weight"].clone(),
        )]),
    );
    let error = load(folder.path()).unwrap_err();
    assert!(matches!(error, LoadError::Config { .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains(&folder.path().display().to_string()),
        "{text}"
    );
    text
}

#[test]
fn configurations_that_cannot_be_run_are_refused_with_the_field() {
    let cases = [
        (
            json!({"num_attention_heads": 33, "num_key_value_heads": 2}),
            "num_key_value_heads is 2",
        ),
        (
            json!({"num_attention_heads": 3, "num_key_value_heads": 2}),
            "num_key_value_heads is 2",
        ),
        (json!({"hidden_size": null}), "hidden_size cannot be read"),
        (json!({"hidden_size": -44}), "hidden_size cannot be read"),
        (
            json!({"rms_norm_eps": "small"}),
            "rms_norm_eps cannot be read",
        ),
        (json!({"head_dim": 9}), "head_dim is 9"),
        (json!({"hidden_act": "gelu"}), "hidden_act is \"gelu\""),
        (
            json!({"num_hidden_layers": u64::MAX}),
            "num_hidden_layers is 18446744073709551615",
        ),
        (
            json!({"max_position_embeddings": 1u64 << 50}),
            "load with max_positions of at most",
        ),
        (
            json!({"rope_scaling": {"rope_type": "abc", "factor": 2.0}}),
            "rope_scaling.rope_type is \"abc\"",
        ),
        (
            json!({"rope_scaling": {"type": "linear"}}),
            "rope_scaling.factor is missing",
        ),
        (
            json!({"quantization_config": {"quant_method": "awq"}}),
            "quantization_config asks for \"awq\"",
        ),
    ];
    for (changes, expected) in cases {
        let text = refused_config(changes.clone());
        assert!(text.contains(expected), "{changes}: {text}");
    }
}

#[test]
fn an_unknown_architecture_is_refused_with_the_list() {
    let tiny = Tiny::grouped().with(json!({"architectures": ["MambaForCausalLM"]}));
    let folder = files::write(&tiny);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let Err(error) = load_model(&[FAMILY], &checkpoint, &LoadOptions::new(device())) else {
        panic!("loaded");
    };
    let text = error.to_string();
    assert!(text.contains("MambaForCausalLM"), "{text}");
    assert!(
        text.contains("(supported: LlamaForCausalLM, MistralForCausalLM)"),
        "{text}"
    );
}

#[test]
fn more_positions_than_the_model_supports_are_refused() {
    let folder = files::write(&Tiny::grouped());
    let load = |max_positions| {
        load_as(
            folder.path(),
            &LoadOptions::new(device()).with_max_positions(max_positions),
        )
    };
    let error = load(257).unwrap_err().to_string();
    assert_eq!(error, "257 positions wanted, but the model supports 256");
    assert!(
        load(0)
            .unwrap_err()
            .to_string()
            .contains("max_positions is 0")
    );
    load(256).unwrap();
}
