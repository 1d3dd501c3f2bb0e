//! The words of a step with prompt tokens, decodes beside them included.

use burn_paged::{CacheGeometry, MetadataError, SAMPLING_WORDS, SamplingOptions};

use super::{StepShape, blocks_up_to, check_block};
use crate::scheduler::ScheduledBatch;
use crate::sequence::RunningSequence;

/// The words of a step: sequence `i` is the `i`-th of the batch, its tokens lie behind those of the ones before it. Sequences
/// after the last are padding, with no tokens and no keys; tokens after the last are padding, with no slot.
///
/// `running` is what the indices of the batch refer to, `options` sample the sequences that sample, in their order. What is sampled
/// of the others is for nobody.
///
/// # Errors
/// [`MetadataError`] if the sequences do not fit the cache; then scheduler and cache disagree.
pub(crate) fn prompt_words(
    shape: StepShape,
    batch: &ScheduledBatch,
    running: &[RunningSequence],
    mut options: impl Iterator<Item = SamplingOptions>,
    geometry: CacheGeometry,
) -> Result<Vec<i32>, MetadataError> {
    let layout = shape.layout();
    let block_size = geometry.block_size;
    let num_seqs = batch.sequences.len();
    let mut words = vec![0; layout.table + num_seqs * shape.max_blocks];
    words[layout.slots..][..shape.num_tokens].fill(-1);
    let mut token = 0;
    for (row, scheduled) in batch.sequences.iter().enumerate() {
        let RunningSequence { sequence, blocks } = &running[scheduled.index];
        let (begin, num_new) = (blocks.num_computed_tokens(), scheduled.num_tokens);
        let end = begin + num_new;
        // Blocks that a prompt has for later chunks are not looked at yet.
        let blocks = blocks_up_to(row, end, blocks.block_ids(), geometry)?;
        debug_assert!(blocks.len() <= shape.max_blocks, "{blocks:?} in {shape:?}");
        let table = &mut words[layout.table + row * shape.max_blocks..][..shape.max_blocks];
        for (entry, block) in table.iter_mut().zip(blocks) {
            check_block(row, block.get(), geometry)?;
            *entry = block.get() as i32;
        }
        // Tokens are below the vocabulary, positions and slots below those of the cache, all of which fit an i32.
        for (at, position) in (begin..end).enumerate() {
            let block = blocks[position / block_size].index();
            words[layout.token_ids + token + at] = sequence.tokens[position] as i32;
            words[layout.positions + token + at] = position as i32;
            words[layout.slots + token + at] = (block * block_size + position % block_size) as i32;
        }
        token += num_new;
        words[layout.seq_lens + row] = end as i32;
        words[layout.offsets + row + 1] = token as i32;
        words[layout.last_tokens + row] = token as i32 - 1;
        if scheduled.samples
            && let Some(options) = options.next()
        {
            words[layout.options + row * SAMPLING_WORDS..][..SAMPLING_WORDS]
                .copy_from_slice(&options.to_words());
        }
    }
    words[layout.offsets..][num_seqs + 1..=shape.num_rows].fill(token as i32);
    Ok(words)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::{Device, Int, Tensor};
    use burn_paged::StepWords;
    use burn_paged_kv_cache::CacheKey;

    use super::*;
    use crate::RequestId;
    use crate::scheduler::Scheduler;
    use crate::sequence::Sequence;

    const GEOMETRY: CacheGeometry = CacheGeometry {
        num_blocks: 16,
        block_size: 4,
        num_kv_heads: 1,
        head_dim: 2,
    };

    const SHAPE: StepShape = StepShape {
        num_tokens: 14,
        num_rows: 4,
        max_blocks: 3,
    };

    fn ints<const D: usize>(tensor: &Tensor<D, Int>) -> Vec<i64> {
        tensor.clone().into_data().iter::<i64>().collect()
    }

    /// One sequence that decodes its sixth token, one whose prompt of 3 is whole, and one of whose 20 tokens there is a chunk.
    fn scheduler() -> Scheduler {
        let mut scheduler = Scheduler::small(12);
        let add = |scheduler: &mut Scheduler, id, prompt| {
            scheduler.add(Sequence::new(
                RequestId::new(id),
                prompt,
                CacheKey::default(),
            ));
        };
        add(&mut scheduler, 0, vec![20, 21, 22, 23, 24]);
        let batch = scheduler.schedule();
        scheduler.mark_computed(&batch);
        scheduler.push_token(0, 25);
        add(&mut scheduler, 1, vec![30, 31, 32]);
        add(&mut scheduler, 2, (40..60).collect());
        scheduler
    }

    fn hot(seed: u64) -> SamplingOptions {
        SamplingOptions {
            temperature: 0.5,
            seed,
            ..Default::default()
        }
    }

    #[test]
    fn chunks_and_decodes_lie_one_behind_the_other() {
        let mut scheduler = scheduler();
        let batch = scheduler.schedule();
        let samples: Vec<bool> = batch.sequences.iter().map(|found| found.samples).collect();
        assert_eq!(samples, [true, true, false]);
        let options = [hot(1), hot(2)];
        let words = prompt_words(
            SHAPE,
            &batch,
            scheduler.running(),
            options.into_iter(),
            GEOMETRY,
        );
        let mut device_words = StepWords::new(SHAPE.layout().len, &Device::flex());
        // What a step before may have left.
        device_words.write(vec![77; SHAPE.layout().len]);
        device_words.write(words.unwrap());
        let (input, sampling) = SHAPE.views(&device_words, GEOMETRY);
        let chunk = 12 - 1 - 3;
        assert_eq!(
            ints(&input.token_ids),
            [25, 30, 31, 32, 40, 41, 42, 43, 44, 45, 46, 47, 0, 0]
        );
        assert_eq!(
            ints(&input.positions),
            [5, 0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 0, 0]
        );
        let attention = &input.attention;
        assert_eq!(ints(attention.cu_seqlens_q().tensor()), [0, 1, 4, 12, 12]);
        assert_eq!(ints(attention.seq_lens().tensor()), [6, 3, chunk, 0]);
        assert_eq!(ints(&input.logits_indices), [0, 3, 11, 0]);
        let table = ints(attention.block_table().tensor());
        let rows: Vec<Vec<i64>> = (scheduler.running().iter())
            .map(|running| {
                let blocks = running.blocks.block_ids().iter();
                blocks.map(|block| i64::from(block.get())).collect()
            })
            .collect();
        for (row, blocks) in rows.iter().enumerate() {
            let needed = [2, 1, 2][row];
            assert_eq!(table[row * 3..][..needed], blocks[..needed], "row {row}");
        }
        let slot = |row: usize, position: usize| rows[row][position / 4] * 4 + position as i64 % 4;
        let mut slots = vec![slot(0, 5)];
        slots.extend((0..3).map(|position| slot(1, position)));
        slots.extend((0..8).map(|position| slot(2, position)));
        slots.extend([-1, -1]);
        assert_eq!(ints(attention.slot_mapping().tensor()), slots);
        // What the host sees is a matter of the shape alone.
        assert_eq!(attention.num_tokens(), 14);
        assert_eq!(attention.seq_lens().host(), [12; 4]);
        assert_eq!(attention.slot_mapping().host(), [-1; 14]);
        let sampling = ints(&sampling);
        let expected: Vec<i64> = options
            .iter()
            .flat_map(|options| options.to_words().map(i64::from))
            .collect();
        assert_eq!(sampling[..2 * SAMPLING_WORDS], expected);
        assert_eq!(sampling[2 * SAMPLING_WORDS..], [0; 2 * SAMPLING_WORDS]);
    }

    #[test]
    fn a_step_of_padding_has_no_tokens() {
        let batch = ScheduledBatch::default();
        let words = prompt_words(SHAPE, &batch, &[], std::iter::empty(), GEOMETRY).unwrap();
        let layout = SHAPE.layout();
        assert_eq!(words.len(), layout.table);
        assert_eq!(words[layout.offsets..][..5], [0; 5]);
        assert_eq!(words[layout.seq_lens..][..4], [0; 4]);
        assert_eq!(words[layout.slots..][..14], [-1; 14]);
    }

    #[test]
    fn a_sequence_that_does_not_fit_the_cache_is_an_error() {
        let mut scheduler = scheduler();
        let batch = scheduler.schedule();
        let words = |geometry| {
            let options = [hot(1), hot(2)].into_iter();
            prompt_words(SHAPE, &batch, scheduler.running(), options, geometry)
        };
        let few = CacheGeometry {
            num_blocks: 2,
            ..GEOMETRY
        };
        assert!(matches!(
            words(few),
            Err(MetadataError::BlockOutOfRange { .. })
        ));
        let short = CacheGeometry {
            block_size: 1,
            ..GEOMETRY
        };
        assert!(matches!(
            words(short),
            Err(MetadataError::TooFewBlocks { .. })
        ));
    }
}
