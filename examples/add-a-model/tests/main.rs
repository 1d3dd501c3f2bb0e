//! The tiny checkpoint against Hugging Face transformers, and against itself on every path.

use burn::tensor::Device;
use burn_paged_checkpoint::Checkpoint;
use burn_paged_engine::{CacheSize, Engine, EngineConfig, Request, SamplingParams};
use burn_paged_example_add_a_model::{FAMILY, tiny};
use burn_paged_model::{CausalLm, LoadError, LoadOptions, load_model};
use serde_json::{Value, json};

fn load(folder: &std::path::Path) -> Result<Box<dyn CausalLm>, LoadError> {
    let checkpoint = Checkpoint::open(folder)?;
    load_model(&[FAMILY], &checkpoint, &LoadOptions::new(Device::flex()))
}

fn engine(config: EngineConfig) -> Engine {
    let folder = tempfile::tempdir().unwrap();
    tiny::write(folder.path()).unwrap();
    Engine::new(load(folder.path()).unwrap(), config).unwrap()
}

fn config(block_size: usize) -> EngineConfig {
    EngineConfig {
        block_size,
        cache_size: CacheSize::Tokens(640),
        ..Default::default()
    }
}

fn fixture() -> Value {
    serde_json::from_str(include_str!("fixtures/qwen3_tiny.json")).unwrap()
}

fn tokens(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|token| token.as_u64().unwrap() as u32)
        .collect()
}

#[test]
fn logits_and_greedy_tokens_are_those_of_the_reference() {
    let fixture = fixture();
    let prompt = tokens(&fixture["prompt"]);
    let mut engine = engine(EngineConfig {
        max_logprobs: 37,
        ..config(4)
    });
    for (at, row) in fixture["logits"].as_array().unwrap().iter().enumerate() {
        let row: Vec<f64> = row
            .as_array()
            .unwrap()
            .iter()
            .map(|x| x.as_f64().unwrap())
            .collect();
        let log_sum = row.iter().map(|logit| logit.exp()).sum::<f64>().ln();
        let sampling = SamplingParams {
            logprobs: Some(37),
            ..Default::default()
        };
        let request = Request::new(&prompt[..=at])
            .with_max_tokens(1)
            .with_sampling(sampling);
        let completion = &engine.generate([request]).unwrap()[0];
        let found = &completion.logprobs[0].top;
        assert_eq!(found.len(), 37);
        for (token, logprob) in found {
            let expected = row[*token as usize] - log_sum;
            let difference = (f64::from(*logprob) - expected).abs();
            assert!(
                difference < 1e-4,
                "position {at}, token {token}: {logprob} and {expected}"
            );
        }
    }
    let greedy = tokens(&fixture["greedy"]);
    assert!(
        fixture["smallest_margin"].as_f64().unwrap() > 1e-2,
        "ties could fall either way"
    );
    let request = Request::new(prompt).with_max_tokens(greedy.len());
    assert_eq!(engine.generate([request]).unwrap()[0].token_ids, greedy);
}

#[test]
fn every_path_gives_the_same_tokens() {
    let fixture = fixture();
    let (prompt, greedy) = (tokens(&fixture["prompt"]), tokens(&fixture["greedy"]));
    let request = || Request::new(prompt.clone()).with_max_tokens(greedy.len());
    for block_size in [1, 3, 16] {
        for max_prefill_chunk in [Some(1), Some(4), None] {
            let mut engine = engine(EngineConfig {
                max_prefill_chunk,
                ..config(block_size)
            });
            let others = (1..6).map(|len| Request::new(vec![len; len as usize]).with_max_tokens(9));
            let batch = engine
                .generate(std::iter::once(request()).chain(others))
                .unwrap();
            assert_eq!(batch[0].token_ids, greedy, "in a batch");
            let cached = &engine.generate([request()]).unwrap()[0];
            assert_eq!(cached.token_ids, greedy, "on a cached prefix");
            let num_full = (prompt.len() - 1) / block_size * block_size;
            assert_eq!(cached.usage.cached_tokens, num_full);
        }
    }
}

#[test]
fn what_is_wrong_with_a_checkpoint_is_named() {
    let refused = |field: &str, value: Value| {
        let folder = tempfile::tempdir().unwrap();
        tiny::write(folder.path()).unwrap();
        let mut config = tiny::config();
        config[field] = value;
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        match load(folder.path()) {
            Ok(_) => panic!("{field} was accepted"),
            Err(error) => error.to_string(),
        }
    };
    let architecture = refused("architectures", json!(["GPT2LMHeadModel"]));
    assert!(architecture.contains("GPT2LMHeadModel") && architecture.contains("Qwen3ForCausalLM"));
    assert!(refused("num_key_value_heads", json!(4)).contains("num_key_value_heads"));
    assert!(refused("use_sliding_window", json!(true)).contains("use_sliding_window"));
    assert!(refused("hidden_act", json!("gelu")).contains("hidden_act"));
    // One layer more than there are weights for: every missing tensor is named.
    let missing = refused("num_hidden_layers", json!(3));
    assert!(
        missing.contains("model.layers.2.self_attn.q_norm.weight"),
        "{missing}"
    );
    // One kv head less: the fused projection's parts are misshapen.
    let misshapen = refused("num_key_value_heads", json!(3));
    assert!(
        misshapen.contains("model.layers.0.self_attn.k_proj.weight"),
        "{misshapen}"
    );
}

/// The pieces of Rust in the guide, and whether each stands in the source as it is, line breaks aside.
#[test]
fn the_guide_quotes_the_source() {
    let guide = include_str!("../../../docs/add-a-model.md");
    let squeeze = |text: &str| {
        let squeezed: String = text.split_whitespace().collect();
        // A broken line gets a comma before its closing bracket.
        squeezed
            .replace(",)", ")")
            .replace(",]", "]")
            .replace(",}", "}")
    };
    let sources = [
        include_str!("../src/qwen3.rs"),
        include_str!("../src/main.rs"),
    ]
    .map(squeeze);
    let blocks: Vec<&str> = guide
        .split("```rust")
        .skip(1)
        .filter_map(|rest| rest.split("```").next())
        .collect();
    assert!(
        blocks.len() > 8,
        "the guide has only {} blocks",
        blocks.len()
    );
    for block in blocks {
        // What a quote leaves out at its end has no bracket behind its last comma.
        let quote = squeeze(block.trim_end().trim_end_matches(','));
        assert!(
            sources.iter().any(|source| source.contains(&quote)),
            "not in the source:{block}"
        );
    }
}
