//! Models without files.

use std::sync::{Mutex, PoisonError};

use burn_paged_llama::{FAMILY, Llama};
use burn_paged_model::{LoadError, LoadOptions, RandomWeights, load_model, load_with};
use serde_json::json;

use crate::common::tiny::Tiny;
use crate::common::{device, largest, log_capture};
use crate::loading::logits;

fn load(random: &RandomWeights) -> Result<Llama, LoadError> {
    let _alone = alone();
    load_with(random, &LoadOptions::new(device()), Llama::load)
}

/// Held while a model draws its weights: the generator of a device belongs to the process.
fn alone() -> impl Drop {
    static DRAWING: Mutex<()> = Mutex::new(());
    DRAWING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn drawn(seed: u64, std: f64) -> Vec<Vec<f32>> {
    let random = RandomWeights::new(Tiny::biased().config(), seed).with_std(std);
    logits(&load(&random).unwrap())
}

#[test]
fn a_configuration_alone_makes_a_model_of_its_sizes() {
    let random = RandomWeights::new(Tiny::grouped().config(), 1);
    let drawing = alone();
    let model = load_model(&[FAMILY], &random, &LoadOptions::new(device())).unwrap();
    drop(drawing);
    let spec = model.spec();
    assert_eq!(spec.architecture, "LlamaForCausalLM");
    assert_eq!(
        (spec.num_layers, spec.num_kv_heads, spec.vocab_size),
        (3, 2, 67)
    );
    let rows = logits(model.as_ref());
    assert!(rows.iter().all(|row| row.len() == 67 && largest(row) > 0.0));
    assert!(rows.iter().flatten().all(|logit| logit.is_finite()));
}

#[test]
fn weights_follow_from_seed_and_deviation() {
    let first = drawn(1, 0.1);
    assert_eq!(drawn(1, 0.1), first);
    assert_ne!(drawn(2, 0.1), first);
    assert_ne!(drawn(1, 0.2), first);
}

#[test]
fn random_weights_are_never_silent() {
    let load_seed = || {
        let random = RandomWeights::new(Tiny::tied().config(), 90_210);
        drop(load(&random).unwrap());
    };
    let warnings = log_capture::warnings_with("seed 90210", load_seed);
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("weights are random"), "{warnings:?}");
}

#[test]
fn a_configuration_that_cannot_run_is_refused_as_that_of_a_file_is() {
    let config = Tiny::tied().with(json!({"hidden_act": "gelu"})).config();
    let error = load(&RandomWeights::new(config, 1)).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("(random weights)") && text.contains("hidden_act"),
        "{text}"
    );
}
