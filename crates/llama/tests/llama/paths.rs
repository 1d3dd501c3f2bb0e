//! The same tokens and the same logits, whatever the path: chunks, batches, block sizes, shared prefixes.

use burn_paged_model::CausalLm;

use crate::common::files;
use crate::common::oracle::Oracle;
use crate::common::run::{Rows, Runner, Sequence};
use crate::common::tiny::{Tiny, prompt};
use crate::common::{argmax, assert_rows_close};
use crate::loading::load;

/// Products of other sizes sum in another order.
const TOLERANCE: f32 = 2e-5;
const COUNT: usize = 12;

/// From the dense model in f64, as in `numbers.rs`.
const EXACT_TOLERANCE: f32 = 5e-5;

/// Whether sums are cut as where [`TOLERANCE`] was taken: with narrower vectors one path of 67 tokens is 2.4e-5 from another.
fn has_wide_vectors() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx512f");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// The answer of the dense model.
fn exact(oracle: &Oracle, tokens: &[u32]) -> Answer {
    let answer = oracle.greedy(tokens, COUNT);
    let all = [tokens, &answer[..COUNT - 1]].concat();
    let logits = oracle.logits(&all).split_off(tokens.len() - 1);
    (answer, logits)
}

/// Tokens, and the logits that each was taken from.
type Answer = (Vec<u32>, Vec<Vec<f32>>);

fn alone(model: &dyn CausalLm, block_size: usize, tokens: &[u32], chunks: &[usize]) -> Answer {
    let mut runner = Runner::new(model, block_size, 1, tokens.len() + COUNT);
    runner.greedy(&mut Sequence::new(tokens), chunks, COUNT)
}

#[track_caller]
fn assert_same(found: &Answer, expected: &Answer, what: &str) {
    assert_eq!(found.0, expected.0, "{what}: tokens");
    assert_rows_close(&found.1, &expected.1, TOLERANCE, what);
}

fn models() -> Vec<Tiny> {
    vec![Tiny::grouped(), Tiny::tied(), Tiny::biased()]
}

#[test]
fn one_chunk_many_chunks_and_token_by_token_agree_for_every_block_size() {
    for tiny in models() {
        let model = load(files::write(&tiny).path()).unwrap();
        let oracle = Oracle::new(&tiny, &tiny.weights());
        for len in [1, 16, 67] {
            let tokens = prompt(len, 21);
            let expected = alone(&model, 16, &tokens, &[len]);
            let exact = exact(&oracle, &tokens);
            for block_size in [1, 4, 16, 64] {
                for chunks in [&[len][..], &[7, 1, 16, 13], &[1]] {
                    let found = alone(&model, block_size, &tokens, chunks);
                    let what = format!("{len} tokens, blocks of {block_size}, chunks {chunks:?}");
                    assert_eq!(found.0, exact.0, "{what}: tokens");
                    assert_rows_close(&found.1, &exact.1, EXACT_TOLERANCE, &what);
                    if len < 67 || has_wide_vectors() {
                        assert_same(&found, &expected, &what);
                    }
                }
            }
        }
    }
}

/// Lengths of a batch: one token, block borders and both sides of them, long.
const LENS: [usize; 8] = [1, 3, 4, 5, 16, 17, 40, 71];

/// All sequences of a batch, decoded together to `COUNT` tokens each. Prompts come in chunks of up to `chunk` tokens, so that
/// short ones decode while long ones are still being read.
fn batched(
    model: &dyn CausalLm,
    block_size: usize,
    prompts: &[Vec<u32>],
    chunk: usize,
) -> Vec<Answer> {
    let longest = prompts.iter().map(Vec::len).max().unwrap();
    let mut runner = Runner::new(model, block_size, prompts.len(), longest + COUNT);
    let mut sequences: Vec<Sequence> = prompts.iter().map(|tokens| Sequence::new(tokens)).collect();
    let mut answers = vec![Answer::default(); prompts.len()];
    while answers.iter().any(|(tokens, _)| tokens.len() < COUNT) {
        let mut rows = Vec::new();
        let mut step = Vec::new();
        for (at, sequence) in sequences.iter_mut().enumerate() {
            let left = sequence.tokens.len() - sequence.num_computed;
            if answers[at].0.len() < COUNT {
                rows.push((at, left <= chunk));
                step.push((sequence, left.min(chunk)));
            }
        }
        let logits = runner.step(&mut step, Rows::Last);
        for ((at, is_complete), logits) in rows.into_iter().zip(logits) {
            if is_complete {
                let token = argmax(&logits) as u32;
                sequences[at].tokens.push(token);
                answers[at].0.push(token);
                answers[at].1.push(logits);
            }
        }
    }
    answers
}

#[test]
fn alone_and_in_a_batch_of_eight_agree() {
    for tiny in models() {
        let model = load(files::write(&tiny).path()).unwrap();
        let prompts: Vec<Vec<u32>> = LENS
            .iter()
            .enumerate()
            .map(|(at, len)| prompt(*len, 30 + at as u64))
            .collect();
        for block_size in [1, 4, 16, 64] {
            for chunk in [100, 9] {
                let found = batched(&model, block_size, &prompts, chunk);
                for (tokens, found) in prompts.iter().zip(&found) {
                    let expected = alone(&model, 16, tokens, &[tokens.len()]);
                    let what = format!(
                        "{} tokens, blocks of {block_size}, chunk {chunk}",
                        tokens.len()
                    );
                    assert_same(found, &expected, &what);
                }
            }
        }
    }
}

#[test]
fn a_shared_prefix_gives_what_an_own_one_gives() {
    for tiny in models() {
        let model = load(files::write(&tiny).path()).unwrap();
        for block_size in [1, 4, 16] {
            let first = prompt(50, 40);
            let shared_len = 35 / block_size * block_size;
            // The same beginning, another end.
            let mut second = first[..shared_len].to_vec();
            second.extend(prompt(9, 41));
            let mut runner = Runner::new(&model, block_size, 3, first.len() + COUNT);
            let mut owner = Sequence::new(&first);
            runner.prefill(&mut owner, &[first.len()]);
            let mut sharer = Sequence::new(&second);
            sharer.num_computed = shared_len;
            sharer.blocks = owner.blocks[..shared_len / block_size].to_vec();
            let found = runner.greedy(&mut sharer, &[4], COUNT);
            let expected = alone(&model, 16, &second, &[second.len()]);
            assert_same(
                &found,
                &expected,
                &format!("sharer, blocks of {block_size}"),
            );

            // The owner's part of the cache is untouched by the sharer.
            owner.tokens.push(7);
            let mut longer = first.clone();
            longer.push(7);
            let found = runner.greedy(&mut owner, &[1], COUNT);
            let expected = alone(&model, 16, &longer, &[longer.len()]);
            assert_same(&found, &expected, &format!("owner, blocks of {block_size}"));
        }
    }
}

#[test]
fn recomputing_a_preempted_sequence_gives_the_same() {
    let model = load(files::write(&Tiny::grouped()).path()).unwrap();
    let tokens = prompt(23, 50);
    let expected = alone(&model, 4, &tokens, &[23]);
    let mut runner = Runner::new(&model, 4, 2, tokens.len() + COUNT);
    let mut sequence = Sequence::new(&tokens);
    let (before, _) = runner.greedy(&mut sequence, &[23], 5);
    // Preempted: the blocks are gone, prompt and generated tokens are computed again as one prompt.
    let mut resumed = Sequence::new(&sequence.tokens);
    let (after, _) = runner.greedy(&mut resumed, &[10], COUNT - 5);
    assert_eq!([before, after].concat(), expected.0);
}
