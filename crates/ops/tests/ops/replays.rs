//! Steps whose values are on the device alone: words at a fixed place, metadata with bounds.

use std::thread::current;

use burn::tensor::{DType, Device, Int, Tensor};
use burn_paged::{
    AttentionMetadata, AttentionMetadataBuilder, AttentionOptions, CacheGeometry, ImplementedBy,
    LayerKv, NextBlocks, ReplayedStep, SAMPLING_WORDS, SamplingOptions, SequenceStep, StepWords,
    gather_kv, implemented_by, paged_attention_with_lse, queue_together, sample, sample_by_words,
    samples_on_device,
};

use crate::devices::{Random, devices, host};
use crate::refusals::refused;

const GEOMETRY: CacheGeometry = CacheGeometry {
    num_blocks: 11,
    block_size: 4,
    num_kv_heads: 2,
    head_dim: 16,
};
const NUM_HEADS: usize = 6;
/// Rows of the replayed step; two sequences fill them up to padding.
const NUM_ROWS: usize = 3;
/// Wider than any of the sequences.
const MAX_BLOCKS: usize = 7;

/// Where the parts of a step begin in its words.
const OFFSETS: usize = 0;
const LENS: usize = StepWords::ALIGNMENT;
const SLOTS: usize = 2 * StepWords::ALIGNMENT;
const TABLE: usize = 3 * StepWords::ALIGNMENT;

fn ints<const D: usize>(tensor: Tensor<D, Int>) -> Vec<i32> {
    tensor.into_data().iter::<i32>().collect()
}

fn metadata(words: &StepWords) -> AttentionMetadata {
    let decode = ReplayedStep {
        cu_seqlens_q: words.view(OFFSETS, [NUM_ROWS + 1]),
        seq_lens: words.view(LENS, [NUM_ROWS]),
        block_table: words.view(TABLE, [NUM_ROWS, MAX_BLOCKS]),
        slot_mapping: words.view(SLOTS, [NUM_ROWS]),
    };
    AttentionMetadata::for_replays(decode, GEOMETRY)
}

/// The words of a decode of sequences with these blocks and lengths.
fn step_words(sequences: &[(&[u32], usize)]) -> Vec<i32> {
    let mut words = vec![0; TABLE + NUM_ROWS * MAX_BLOCKS];
    for row in 0..=NUM_ROWS {
        words[OFFSETS + row] = row as i32;
    }
    words[SLOTS..][..NUM_ROWS].fill(-1);
    // Nobody may look past the blocks of a sequence.
    words[TABLE..].fill(1_000_000);
    for (row, (blocks, len)) in sequences.iter().enumerate() {
        words[LENS + row] = *len as i32;
        let last = len - 1;
        let slot = blocks[last / 4] as usize * 4 + last % 4;
        words[SLOTS + row] = slot as i32;
        for (at, block) in blocks.iter().enumerate() {
            words[TABLE + row * MAX_BLOCKS + at] = *block as i32;
        }
    }
    words
}

/// What the same step gives with its values on the host.
fn eager(
    q: &Tensor<3>,
    cache: &LayerKv,
    sequences: &[(&[u32], usize)],
    device: &Device,
) -> (Vec<f32>, Vec<f32>) {
    let mut builder = AttentionMetadataBuilder::new(GEOMETRY);
    for (blocks, len) in sequences {
        builder.push(SequenceStep {
            blocks,
            num_computed: len - 1,
            num_new: 1,
        });
    }
    let metadata = builder.build(device).unwrap();
    let q = q.clone().narrow(0, 0, sequences.len());
    let result = paged_attention_with_lse(q, cache, &metadata, AttentionOptions::causal());
    (host(&result.out), host(&result.lse))
}

#[track_caller]
fn assert_close(found: &[f32], expected: &[f32], what: &str) {
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            (found - expected).abs() <= 1e-5,
            "{what}: {found} at {at}, expected {expected}"
        );
    }
}

#[test]
fn words_are_written_in_place_and_views_read_them() {
    for (name, device) in devices() {
        let mut words = StepWords::new(300, &device);
        assert_eq!(words.len(), 384);
        assert_eq!(ints(words.view(256, [2, 3])), [0; 6], "{name}");
        words.write((0..300).collect());
        assert_eq!(ints(words.view(0, [4])), [0, 1, 2, 3], "{name}");
        assert_eq!(
            ints(words.view(128, [2, 3])),
            [128, 129, 130, 131, 132, 133],
            "{name}"
        );
        // A shorter write leaves the rest.
        words.write(vec![7; 130]);
        assert_eq!(ints(words.view(128, [4])), [7, 7, 130, 131], "{name}");
        assert_eq!(ints(words.view(256, [46]))[43..], [299, 0, 0], "{name}");
    }
}

/// -1 is a row that could not be sampled: no token for a step, but an id for the host.
#[test]
fn ids_are_fed_back_and_come_to_the_host() {
    for (name, device) in devices() {
        if implemented_by(&device) != ImplementedBy::Backend {
            continue;
        }
        let mut words = StepWords::new(384, &device);
        words.write((0..300).collect());
        let ids = [70_000, -1, 0, 7, 5];
        let on_device = || Tensor::<1, Int>::from_data(ids, (&device, DType::I32));
        let pending = words.feed_back(128, on_device(), None);
        words.write_from(256, vec![9; 3]);
        assert_eq!(pending.wait().unwrap()[..5], ids, "{name}");
        assert_eq!(
            ints(words.view(128, [6])),
            [70_000, 0, 0, 7, 5, 133],
            "{name}"
        );
        assert_eq!(ints(words.view(0, [128]))[126..], [126, 127], "{name}");
        assert_eq!(ints(words.view(256, [4])), [9, 9, 9, 259], "{name}");
        // Nobody has to wait.
        drop(words.feed_back(0, on_device(), None));
        assert_eq!(ints(words.view(0, [2])), [70_000, 0], "{name}");
    }
}

#[test]
fn what_is_queued_together_keeps_its_place_among_the_rest() {
    for (name, device) in devices() {
        let mut words = StepWords::new(128, &device);
        words.write(vec![1; 4]);
        let before = words.view(0, [4]).add_scalar(1);
        let (thread, within) = queue_together(&device, || {
            queue_together(&device, || words.write(vec![5; 3]));
            (current().id(), words.view(0, [4]).mul_scalar(2))
        });
        let goes_there = name != "flex" && !cfg!(feature = "fusion");
        assert_eq!(thread != current().id(), goes_there, "{name}");
        words.write(vec![7; 4]);
        assert_eq!(ints(before), [2; 4], "{name}");
        assert_eq!(ints(within), [10, 10, 10, 2], "{name}");
        assert_eq!(ints(words.view(0, [4])), [7; 4], "{name}");
        // A panic is the caller's, with its words, and the device goes on.
        refused(
            || queue_together(&device, || words.write_from(2, vec![0])),
            &["from word 2 on"],
        );
        assert_eq!(ints(words.view(0, [4])), [7; 4], "{name}");
    }
}

#[test]
fn wrong_words_and_views_are_refused() {
    for (_, device) in devices() {
        let mut words = StepWords::new(256, &device);
        refused(|| drop(words.view(1, [4])), &["from word 1 on"]);
        refused(|| drop(words.view(128, [129])), &["[129]", "256 words"]);
        refused(|| drop(words.view(0, [0])), &["[0]"]);
        refused(|| words.write(vec![0; 257]), &["257 values", "256 words"]);
        refused(
            || words.write_from(128, vec![0; 129]),
            &["129 values", "from word 128 on"],
        );
        refused(|| words.write_from(2, vec![0]), &["from word 2 on"]);
        let ids = Tensor::<1, Int>::zeros([129], (&device, DType::I32));
        refused(|| drop(words.feed_back(128, ids, None)), &["129 ids"]);
        if implemented_by(&device) != ImplementedBy::Backend {
            continue;
        }
        let mut words = StepWords::new(512, &device);
        let blocks = NextBlocks {
            positions: 128,
            slots: 256,
            table: 384,
            max_blocks: 42,
            block_size: 4,
        };
        let mut feed_back = |blocks| {
            let ids = Tensor::<1, Int>::zeros([3], (&device, DType::I32));
            drop(words.feed_back(0, ids, Some(blocks)));
        };
        feed_back(blocks);
        let max_blocks = 43;
        let wrong = [
            NextBlocks {
                max_blocks,
                ..blocks
            },
            NextBlocks { slots: 3, ..blocks },
            NextBlocks { slots: 0, ..blocks },
            NextBlocks {
                table: 256,
                ..blocks
            },
            NextBlocks {
                block_size: 0,
                ..blocks
            },
        ];
        for blocks in wrong {
            refused(|| feed_back(blocks), &["3 ids", "512 words"]);
        }
    }
}

/// Blocks of 4: the first token stays in its block, the second begins one, the third is padding, and the table has no entry
/// for the last.
#[test]
fn blocks_of_tokens_come_into_the_table() {
    for (name, device) in devices() {
        if implemented_by(&device) != ImplementedBy::Backend {
            continue;
        }
        let mut words = StepWords::new(640, &device);
        words.write((0..640).collect());
        words.write_from(128, vec![2, 8, 0, 12]);
        words.write_from(256, vec![9 * 4 + 2, 70 * 4, -1, 80]);
        let blocks = NextBlocks {
            positions: 128,
            slots: 256,
            table: 384,
            max_blocks: 3,
            block_size: 4,
        };
        let ids = Tensor::<1, Int>::from_data([5, 6, 7, 8], (&device, DType::I32));
        let pending = words.feed_back(0, ids, Some(blocks));
        assert_eq!(pending.wait().unwrap(), [5, 6, 7, 8], "{name}");
        assert_eq!(ints(words.view(0, [5])), [5, 6, 7, 8, 4], "{name}");
        let mut table: Vec<i32> = (384..397).collect();
        (table[0], table[5]) = (9, 70);
        assert_eq!(ints(words.view(384, [13])), table, "{name}");
        assert_eq!(ints(words.view(256, [3])), [38, 280, -1], "{name}");
    }
}

/// One set of words after another, through the same place: each gives what its own values on the host give, and padding
/// gives nothing.
#[test]
fn a_step_for_replays_equals_one_with_host_values() {
    let steps: [&[(&[u32], usize)]; 3] = [
        &[(&[3, 9], 6), (&[5, 0, 8, 2], 15)],
        &[(&[7, 1, 4], 9)],
        &[(&[10], 1), (&[6, 3], 8), (&[2, 8, 9, 1, 0], 17)],
    ];
    for (name, device) in devices() {
        if implemented_by(&device) != ImplementedBy::Backend {
            continue;
        }
        let mut random = Random::new(31);
        let mut tensor = |shape: [usize; 4]| random.tensor(shape, 2.0, DType::F32, &device);
        let cache = LayerKv::new(tensor(GEOMETRY.shape()), tensor(GEOMETRY.shape()));
        let q = tensor([NUM_ROWS, NUM_HEADS, GEOMETRY.head_dim, 1]);
        let q = q.reshape([NUM_ROWS, NUM_HEADS, GEOMETRY.head_dim]);
        let mut words = StepWords::new(TABLE + NUM_ROWS * MAX_BLOCKS, &device);
        for sequences in steps {
            words.write(step_words(sequences));
            let metadata = metadata(&words);
            assert!(metadata.is_for_replays());
            let options = AttentionOptions::causal();
            let found = paged_attention_with_lse(q.clone(), &cache, &metadata, options);
            let (out, lse) = eager(&q, &cache, sequences, &device);
            let (found_out, found_lse) = (host(&found.out), host(&found.lse));
            assert_close(&found_out, &out, name);
            assert_close(&found_lse, &lse, name);
            assert!(found_out[out.len()..].iter().all(|value| *value == 0.0));
            let padding = &found_lse[lse.len()..];
            assert!(padding.iter().all(|value| *value == f32::NEG_INFINITY));
        }
    }
}

/// The same for chunks of prompts and decodes in one step, with padding behind the tokens and behind the sequences.
#[test]
fn a_step_of_chunks_for_replays_equals_one_with_host_values() {
    const NUM_TOKENS: usize = 13;
    const OFFSETS: usize = 0;
    const LENS: usize = StepWords::ALIGNMENT;
    const TABLE: usize = 2 * StepWords::ALIGNMENT;
    const SLOTS: usize = 3 * StepWords::ALIGNMENT;
    let step = |blocks, num_computed, num_new| SequenceStep {
        blocks,
        num_computed,
        num_new,
    };
    let steps: [&[SequenceStep<'_>]; 4] = [
        &[step(&[3, 9], 0, 6), step(&[5, 0, 8, 2], 9, 6)],
        &[
            step(&[7, 1, 4], 8, 1),
            step(&[10], 0, 3),
            step(&[6, 2, 0, 8, 5], 9, 9),
        ],
        &[step(&[2, 4, 6, 8, 10, 1, 3], 14, 13)],
        &[],
    ];
    for (name, device) in devices() {
        if implemented_by(&device) != ImplementedBy::Backend {
            continue;
        }
        let mut random = Random::new(37);
        let mut tensor = |shape: [usize; 4]| random.tensor(shape, 2.0, DType::F32, &device);
        let cache = LayerKv::new(tensor(GEOMETRY.shape()), tensor(GEOMETRY.shape()));
        let q = tensor([NUM_TOKENS, NUM_HEADS, GEOMETRY.head_dim, 1]);
        let q = q.reshape([NUM_TOKENS, NUM_HEADS, GEOMETRY.head_dim]);
        let mut words = StepWords::new(4 * StepWords::ALIGNMENT, &device);
        for sequences in steps {
            // Nobody may look past the blocks of a sequence.
            let mut values = vec![1_000_000; SLOTS];
            values.resize(SLOTS + NUM_TOKENS, -1);
            let mut token = 0;
            for row in 0..=NUM_ROWS {
                values[OFFSETS + row] = token as i32;
                let Some(sequence) = sequences.get(row) else {
                    values[LENS + row] = 0;
                    continue;
                };
                let end = sequence.num_computed + sequence.num_new;
                values[LENS + row] = end as i32;
                for (at, block) in sequence.blocks.iter().enumerate() {
                    values[TABLE + row * MAX_BLOCKS + at] = *block as i32;
                }
                token += sequence.num_new;
            }
            words.write(values);
            let metadata = AttentionMetadata::for_replays(
                ReplayedStep {
                    cu_seqlens_q: words.view(OFFSETS, [NUM_ROWS + 1]),
                    seq_lens: words.view(LENS, [NUM_ROWS]),
                    block_table: words.view(TABLE, [NUM_ROWS, MAX_BLOCKS]),
                    slot_mapping: words.view(SLOTS, [NUM_TOKENS]),
                },
                GEOMETRY,
            );
            assert_eq!(metadata.num_tokens(), NUM_TOKENS);
            let options = AttentionOptions::causal();
            let found = paged_attention_with_lse(q.clone(), &cache, &metadata, options);
            let (found_out, found_lse) = (host(&found.out), host(&found.lse));
            let mut num_found = [0, 0];
            if token > 0 {
                let mut builder = AttentionMetadataBuilder::new(GEOMETRY);
                for step in sequences {
                    builder.push(*step);
                }
                let metadata = builder.build(&device).unwrap();
                let q = q.clone().narrow(0, 0, token);
                let expected = paged_attention_with_lse(q, &cache, &metadata, options);
                let (out, lse) = (host(&expected.out), host(&expected.lse));
                assert_close(&found_out, &out, name);
                assert_close(&found_lse, &lse, name);
                num_found = [out.len(), lse.len()];
            }
            assert!(found_out[num_found[0]..].iter().all(|value| *value == 0.0));
            let padding = &found_lse[num_found[1]..];
            assert!(padding.iter().all(|value| *value == f32::NEG_INFINITY));
        }
    }
}

#[test]
fn what_needs_lengths_on_the_host_refuses_metadata_for_replays() {
    for (_, device) in devices() {
        let zeros = || Tensor::zeros(GEOMETRY.shape(), (&device, DType::F32));
        let cache = LayerKv::new(zeros(), zeros());
        let mut words = StepWords::new(TABLE + NUM_ROWS * MAX_BLOCKS, &device);
        words.write(step_words(&[]));
        let metadata = metadata(&words);
        refused(
            || drop(gather_kv(&cache, &metadata)),
            &["gather_kv", "for replays"],
        );
        refused(|| _ = metadata.cu_seqlens_k(), &["for replays"]);
    }
}

#[test]
fn rows_are_sampled_by_words_as_by_options() {
    for (name, device) in devices() {
        assert!(samples_on_device(&device, 301), "{name}");
        let logits = Random::new(12).tensor([3, 301], 4.0, DType::F32, &device);
        let hot = SamplingOptions {
            temperature: 0.8,
            seed: 5,
            draw: 3,
            ..Default::default()
        };
        let options = [
            SamplingOptions::default(),
            hot,
            SamplingOptions { draw: 9, ..hot },
        ];
        let mut words = StepWords::new(3 * SAMPLING_WORDS, &device);
        let values = options.iter().flat_map(|options| options.to_words());
        words.write(values.collect());
        let by_words = sample_by_words(logits.clone(), &words.view(0, [3, SAMPLING_WORDS]));
        assert_eq!(
            ints(by_words),
            ints(sample(logits.clone(), &options)),
            "{name}"
        );
        refused(
            || drop(sample_by_words(logits, &words.view(0, [2, SAMPLING_WORDS]))),
            &["[2, 8]", "[3, 8]"],
        );
    }
}
