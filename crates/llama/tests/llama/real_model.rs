//! SmolLM2-135M-Instruct against Hugging Face transformers in f32.

use std::sync::OnceLock;

use burn_paged_llama::Llama;
use burn_paged_model::ModelDType;

use crate::common::run::{Runner, Sequence};
use crate::common::smollm2::{
    self, Greedy, Prompt, Sample, fixture, greedy_in_one_batch, sampled_logits,
};
use crate::common::{argmax, device, gpu, largest};

/// Of the largest logit at a position; also how close two candidates may be for either to count as the greedy one. 2e-3 is
/// what the model promises; f32 on both sides came within 4e-6.
const TOLERANCE: f32 = 1e-4;
/// Between two paths of the same model: products of other sizes sum in another order.
const PATH_TOLERANCE: f32 = 1e-4;

/// The model in f32 on the device of the tests, loaded once for all of them.
fn model() -> &'static Llama {
    static MODEL: OnceLock<Llama> = OnceLock::new();
    MODEL.get_or_init(|| smollm2::load(device(), ModelDType::F32))
}

fn by_name(name: &str) -> Prompt {
    fixture()
        .prompts
        .into_iter()
        .find(|prompt| prompt.name == name)
        .expect("a prompt of the fixture")
}

/// Largest deviation from the sampled logits and from the mean, relative to the largest logit.
fn deviation(row: &[f32], sample: &Sample) -> f32 {
    let pairs = sample.ids.iter().zip(&sample.logits);
    let logits = pairs.map(|(id, expected)| (row[*id] - expected).abs());
    let mean = row.iter().map(|logit| f64::from(*logit)).sum::<f64>() / row.len() as f64;
    let others = [
        (mean - sample.mean).abs() as f32,
        (largest(row) - sample.largest).abs(),
    ];
    // A NaN anywhere must not get lost in a maximum.
    let worst = logits.chain(others).fold(0.0, |worst, value| {
        if value > worst || value.is_nan() {
            value
        } else {
            worst
        }
    });
    worst / sample.largest
}

#[test]
fn logits_of_five_prompts_agree_with_the_reference() {
    let fixture = fixture();
    assert_eq!(fixture.prompts.len(), 5);
    assert!(fixture.prompts.iter().any(|prompt| prompt.ids.len() > 1000));
    for prompt in &fixture.prompts {
        for (row, sample) in sampled_logits(model(), prompt).iter().zip(&prompt.samples) {
            let found = deviation(row, sample);
            let place = format!("{} at {}", prompt.name, sample.position);
            assert!(
                found <= TOLERANCE,
                "{place}: off by {found} of the largest logit"
            );
            let best = argmax(row);
            let behind = row[best] - row[sample.best];
            assert!(
                behind <= 2.0 * TOLERANCE * sample.largest,
                "{place}: {best} for {}",
                sample.best
            );
        }
    }
}

#[test]
fn the_longest_prompt_in_one_chunk_agrees_with_the_reference() {
    let prompt = by_name("long_ledger");
    let mut sequence = Sequence::new(&prompt.ids);
    let count = prompt.ids.len();
    let row = Runner::new(model(), 16, 1, count).prefill(&mut sequence, &[count]);
    let sample = prompt.samples.last().unwrap();
    assert_eq!(sample.position, count - 1);
    let found = deviation(&row, sample);
    assert!(found <= TOLERANCE, "off by {found} of the largest logit");
}

/// Greedy tokens are the reference's, or differ first where the reference's own two best are as close as the tolerance.
#[track_caller]
fn assert_greedy(found: &[u32], expected: &Greedy, name: &str) {
    assert_eq!(found.len(), expected.ids.len());
    if let Some(at) = (0..found.len()).find(|at| found[*at] != expected.ids[*at]) {
        let lead = expected.leads[at];
        assert!(
            lead <= TOLERANCE,
            "{name}: token {at} is {} and not {}, whose lead is {lead}",
            found[at],
            expected.ids[at]
        );
    }
}

fn assert_greedy_of_all_prompts(model: &Llama) {
    let prompts = fixture().prompts;
    let count = prompts[0].greedy.ids.len();
    assert_eq!((prompts.len(), count), (5, 64));
    let answers = greedy_in_one_batch(model, &prompts, count);
    for (found, prompt) in answers.iter().zip(&prompts) {
        assert_greedy(found, &prompt.greedy, &prompt.name);
    }
}

#[test]
fn greedy_tokens_of_five_prompts_in_one_batch_are_the_references() {
    assert_greedy_of_all_prompts(model());
}

#[test]
fn greedy_tokens_in_f32_on_a_gpu_are_the_references() {
    if let Some(device) = gpu() {
        assert_greedy_of_all_prompts(&smollm2::load(device, ModelDType::F32));
    }
}

#[test]
fn three_prompts_give_the_same_tokens_on_every_path() {
    const COUNT: usize = 12;
    for name in ["capital_of_france", "prose", "several_turns"] {
        let prompt = by_name(name);
        let len = prompt.ids.len();
        let answer = |block_size: usize, chunks: &[usize]| {
            let mut runner = Runner::new(model(), block_size, 1, len + COUNT);
            runner.greedy(&mut Sequence::new(&prompt.ids), chunks, COUNT)
        };
        let (tokens, logits) = answer(16, &[len]);
        assert_greedy(&tokens, &prompt.greedy.head(COUNT), name);
        let paths: [(usize, &[usize]); 5] = [
            (1, &[len]),
            (4, &[len]),
            (64, &[len]),
            (16, &[17, 5, 40]),
            (4, &[1]),
        ];
        for (block_size, chunks) in paths {
            let what = format!("{name}, blocks of {block_size}, chunks {chunks:?}");
            let found = answer(block_size, chunks);
            assert_eq!(found.0, tokens, "{what}");
            crate::common::assert_rows_close(&found.1, &logits, PATH_TOLERANCE, &what);
        }
    }
}

#[test]
fn a_shared_prefix_gives_the_same_tokens() {
    let prompt = by_name("several_turns");
    let count = 12;
    let mut runner = Runner::new(model(), 16, 2, prompt.ids.len() + count);
    let mut owner = Sequence::new(&prompt.ids);
    let (expected, _) = runner.greedy(&mut owner, &[prompt.ids.len()], count);
    let num_shared = (prompt.ids.len() - 1) / 16;
    let mut sharer = Sequence::new(&prompt.ids);
    sharer.num_computed = num_shared * 16;
    sharer.blocks = owner.blocks[..num_shared].to_vec();
    let (found, _) = runner.greedy(&mut sharer, &[200], count);
    assert_eq!(found, expected);
}

impl Greedy {
    fn head(&self, count: usize) -> Self {
        Self {
            ids: self.ids[..count].to_vec(),
            leads: self.leads[..count].to_vec(),
        }
    }
}
