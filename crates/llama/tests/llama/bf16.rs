//! SmolLM2-135M-Instruct in bf16 against Hugging Face transformers in f32: within twice the error that transformers has in
//! bf16. That error is in a fixture made by `tools/reference/make_bf16_error_fixture.py`.

use burn_paged_model::ModelDType;
use serde::Deserialize;

use crate::common::smollm2::{self, Fixture, Prompt, fixture, sampled_logits};
use crate::common::{device, gpu};

#[derive(Deserialize)]
struct Bounds {
    model_sha256: String,
    prompts: Vec<PromptErrors>,
}

/// What transformers errs by in bf16.
#[derive(Deserialize)]
struct PromptErrors {
    name: String,
    errors: Vec<Error>,
}

/// Of the sampled logits of one position, relative to the largest logit.
#[derive(Debug, Clone, Copy, Deserialize)]
struct Error {
    position: usize,
    max: f64,
    rms: f64,
}

fn bounds(fixture: &Fixture) -> Bounds {
    let bounds: Bounds =
        serde_json::from_str(include_str!("../fixtures/smollm2_bf16_error.json")).unwrap();
    assert_eq!(bounds.model_sha256, fixture.model_sha256);
    bounds
}

fn errors(prompt: &Prompt, rows: &[Vec<f32>]) -> Vec<Error> {
    let of_position = |(sample, row): (&smollm2::Sample, &Vec<f32>)| {
        let pairs = sample.ids.iter().zip(&sample.logits);
        let off: Vec<f64> = pairs
            .map(|(id, logit)| f64::from((row[*id] - logit) / sample.largest))
            .collect();
        Error {
            position: sample.position,
            // A NaN must not get lost in a maximum.
            max: off.iter().fold(0.0, |most: f64, off| {
                if off.abs() > most || off.is_nan() {
                    off.abs()
                } else {
                    most
                }
            }),
            rms: (off.iter().map(|off| off * off).sum::<f64>() / off.len() as f64).sqrt(),
        }
    };
    prompt.samples.iter().zip(rows).map(of_position).collect()
}

/// The largest error of a prompt, and the root mean square over its positions.
///
/// Errors of single positions are chance: the same rounding lands elsewhere in another order of summation.
fn summary(errors: &[Error]) -> (f64, f64) {
    let max = errors.iter().map(|error| error.max);
    let squares = errors.iter().map(|error| error.rms * error.rms);
    let rms = (squares.sum::<f64>() / errors.len() as f64).sqrt();
    (
        max.fold(0.0, |a, b| if b > a || b.is_nan() { b } else { a }),
        rms,
    )
}

fn assert_within_the_references_error(model: &burn_paged_llama::Llama, prompts: &[&str]) {
    let fixture = fixture();
    let bounds = bounds(&fixture);
    for (prompt, bound) in fixture.prompts.iter().zip(&bounds.prompts) {
        assert_eq!(prompt.name, bound.name);
        if !prompts.contains(&prompt.name.as_str()) {
            continue;
        }
        let found = errors(prompt, &sampled_logits(model, prompt));
        let positions = |errors: &[Error]| -> Vec<usize> {
            errors.iter().map(|error| error.position).collect()
        };
        assert_eq!(positions(&found), positions(&bound.errors));
        let ((max, rms), (max_bound, rms_bound)) = (summary(&found), summary(&bound.errors));
        println!(
            "{}: max {max:.1e} (the reference has {max_bound:.1e}), rms {rms:.1e} ({rms_bound:.1e})",
            prompt.name
        );
        // Written so that a NaN fails.
        let is_within = max <= 2.0 * max_bound && rms <= 2.0 * rms_bound;
        assert!(is_within, "{}: {found:?}", prompt.name);
        // A model that quietly computes in f32 would pass any bound.
        assert!(rms > 1e-4, "{}: this is no bf16", prompt.name);
    }
}

#[test]
fn bf16_on_flex_errs_as_the_reference_does() {
    let model = smollm2::load(device(), ModelDType::BF16);
    assert_within_the_references_error(&model, &["capital_of_france", "prose", "code"]);
}

#[test]
fn bf16_on_a_gpu_errs_as_the_reference_does() {
    if let Some(device) = gpu() {
        let model = smollm2::load(device, ModelDType::BF16);
        let all = [
            "capital_of_france",
            "prose",
            "code",
            "several_turns",
            "long_ledger",
        ];
        assert_within_the_references_error(&model, &all);
    }
}
