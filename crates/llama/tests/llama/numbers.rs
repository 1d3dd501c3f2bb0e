//! Logits against the dense model in f64.

use burn_paged::CacheDType;
use burn_paged_model::{CausalLm, RopeConfig};
use serde_json::json;

use crate::common::files;
use crate::common::oracle::Oracle;
use crate::common::run::{Rows, Runner, Sequence};
use crate::common::tiny::{Tiny, prompt};
use crate::common::{argmax, assert_rows_close};
use crate::loading::load;

/// f32 sums of up to 70 terms in three layers, against f64.
const TOLERANCE: f32 = 5e-5;

fn all_logits(model: &dyn CausalLm, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut sequence = Sequence::new(tokens);
    let count = tokens.len();
    Runner::new(model, 16, 1, count).step(&mut [(&mut sequence, count)], Rows::All)
}

#[test]
fn logits_of_every_token_equal_the_dense_model() {
    for tiny in [Tiny::grouped(), Tiny::tied(), Tiny::biased()] {
        let model = load(files::write(&tiny).path()).unwrap();
        let oracle = Oracle::new(&tiny, &tiny.weights());
        for len in [1, 37] {
            let tokens = prompt(len, 3);
            let found = all_logits(&model, &tokens);
            assert_rows_close(
                &found,
                &oracle.logits(&tokens),
                TOLERANCE,
                &format!("{tiny:?}"),
            );
        }
    }
}

#[test]
fn greedy_tokens_equal_the_dense_model() {
    for tiny in [Tiny::grouped(), Tiny::tied()] {
        let model = load(files::write(&tiny).path()).unwrap();
        let oracle = Oracle::new(&tiny, &tiny.weights());
        let tokens = prompt(11, 8);
        let mut sequence = Sequence::new(&tokens);
        let (found, _) = Runner::new(&model, 4, 1, 48).greedy(&mut sequence, &[5], 32);
        assert_eq!(found, oracle.greedy(&tokens, 32), "{tiny:?}");
    }
}

/// These models are made to attend sharply, so that keys that are off by up to one part in 16 move their logits far. What must
/// hold: logits come from the codes, whichever step wrote them, and from nothing else.
#[test]
fn a_cache_of_e4m3_gives_the_same_logits_in_any_chunks() {
    let tiny = Tiny::grouped();
    let model = load(files::write(&tiny).path()).unwrap();
    let tokens = prompt(37, 3);
    let dtype = CacheDType::E4m3(model.spec().dtype);
    let in_chunks = |chunks: &[usize]| {
        let mut runner = Runner::with_cache_of(dtype, &model, 16, 1, tokens.len());
        runner.prefill(&mut Sequence::new(&tokens), chunks)
    };
    let whole = in_chunks(&[tokens.len()]);
    for chunks in [&[1][..], &[16], &[5, 11, 3]] {
        let what = format!("chunks of {chunks:?}");
        assert_rows_close(
            &[in_chunks(chunks)],
            std::slice::from_ref(&whole),
            TOLERANCE,
            &what,
        );
    }
    let exact = all_logits(&model, &tokens).pop().unwrap();
    let furthest = whole.iter().zip(&exact).map(|(a, b)| (a - b).abs());
    assert!(furthest.fold(0.0, f32::max) > 1e-3, "codes were not used");
}

#[test]
fn the_tiny_models_attend_far_back() {
    // A model whose logits do not depend on distant tokens would pass every test of paths.
    let tiny = Tiny::grouped();
    let oracle = Oracle::new(&tiny, &tiny.weights());
    let tokens = prompt(37, 3);
    let mut changed = tokens.clone();
    changed[2] = (changed[2] + 1) % tiny.vocab_size as u32;
    let (a, b) = (oracle.logits(&tokens), oracle.logits(&changed));
    let last = tokens.len() - 1;
    let moved = a[last]
        .iter()
        .zip(&b[last])
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max);
    assert!(
        moved > 100.0 * TOLERANCE * a[last][argmax(&a[last])].abs(),
        "moved by {moved}"
    );
}

#[test]
fn rope_scaling_reaches_the_attention() {
    let kinds = [
        json!({"rope_scaling": {"type": "linear", "factor": 3.0}}),
        json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}),
        json!({"rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}),
        json!({"partial_rotary_factor": 0.6}),
    ];
    let plain = Oracle::new(&Tiny::grouped(), &Tiny::grouped().weights());
    let tokens = prompt(37, 3);
    for kind in kinds {
        let tiny = Tiny::grouped().with(kind.clone());
        let model = load(files::write(&tiny).path()).unwrap();
        let rope = RopeConfig::from_config(&tiny.config(), tiny.max_position_embeddings).unwrap();
        assert_eq!(model.spec().max_positions, rope.max_positions());
        let frequencies = rope
            .frequencies(tiny.head_dim, rope.max_positions())
            .unwrap();
        let mut oracle = Oracle::new(&tiny, &tiny.weights());
        oracle.inv_freq = frequencies.inv_freq;
        oracle.attention_factor = frequencies.attention_factor;
        let expected = oracle.logits(&tokens);
        assert_ne!(
            expected,
            plain.logits(&tokens),
            "{kind} changes nothing at this length"
        );
        assert_rows_close(
            &all_logits(&model, &tokens),
            &expected,
            TOLERANCE,
            &kind.to_string(),
        );
    }
}

#[test]
fn mistral_looks_back_through_its_window() {
    let tiny =
        Tiny::grouped().with(json!({"architectures": ["MistralForCausalLM"], "sliding_window": 7}));
    let model = load(files::write(&tiny).path()).unwrap();
    let tokens = prompt(37, 3);
    let mut oracle = Oracle::new(&tiny, &tiny.weights());
    assert_ne!(oracle.logits(&tokens)[36], all_logits(&model, &tokens)[36]);
    oracle.window = Some(7);
    assert_rows_close(
        &all_logits(&model, &tokens),
        &oracle.logits(&tokens),
        TOLERANCE,
        "prompt",
    );

    // The same through the cache: a decode sees the last seven keys of its blocks.
    let mut sequence = Sequence::new(&tokens);
    let last = Runner::new(&model, 4, 1, 40).prefill(&mut sequence, &[20, 1]);
    assert_rows_close(&[last], &oracle.logits(&tokens)[36..], TOLERANCE, "decode");
}

#[test]
fn a_step_without_wanted_rows_gives_no_logits() {
    let model = load(files::write(&Tiny::grouped()).path()).unwrap();
    let tokens = prompt(9, 4);
    let mut whole = Sequence::new(&tokens);
    let mut runner = Runner::new(&model, 4, 2, 9);
    let expected = runner.prefill(&mut whole, &[9]);
    let mut chunked = Sequence::new(&tokens);
    let nothing = runner.step(&mut [(&mut chunked, 6)], Rows::None);
    assert_eq!(nothing, Vec::<Vec<f32>>::new());
    let last = runner.prefill(&mut chunked, &[3]);
    assert_rows_close(
        &[last],
        &[expected],
        TOLERANCE,
        "after a chunk without logits",
    );
}
