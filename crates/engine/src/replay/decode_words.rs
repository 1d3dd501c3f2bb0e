//! The words of a decode: host indices as they lie in the device's buffer.

use burn_paged::{CacheGeometry, MetadataError, SAMPLING_WORDS, SamplingOptions};
use burn_paged_kv_cache::BlockId;

use super::{StepLayout, StepShape, blocks_up_to, check_block};
use crate::RequestId;
use crate::scheduler::ScheduledBatch;
use crate::sequence::RunningSequence;

/// The words of a decode in the making: row `i` is the `i`-th sequence of a batch, the rows after the last are padding,
/// with no keys, no slot, and a token that nobody reads.
///
/// The block tables, nearly all of the words, are those that the sequences have, and can be written before the tokens are
/// known: while the device still computes these.
#[derive(Debug)]
pub(crate) struct DecodeWords {
    shape: StepShape,
    layout: StepLayout,
    words: Vec<i32>,
    rows: Vec<Row>,
}

/// A row of the table, as far as it is written.
#[derive(Debug)]
struct Row {
    id: RequestId,
    num_blocks: usize,
    largest: u32,
}

impl DecodeWords {
    /// The tables of a batch. `running` is what its indices refer to.
    pub(crate) fn new(
        shape: StepShape,
        batch: &ScheduledBatch,
        running: &[RunningSequence],
    ) -> Self {
        let layout = shape.layout();
        let num_rows = batch.sequences.len();
        let mut words = without_tables(shape);
        // Rows of the table past the last sequence keep what the device holds: no padding looks there.
        words.resize(layout.table + num_rows * shape.max_blocks, 0);
        let rows = batch.sequences.iter().map(|scheduled| Row {
            id: scheduled.id,
            num_blocks: 0,
            largest: 0,
        });
        let mut words = Self {
            shape,
            layout,
            words,
            rows: rows.collect(),
        };
        for (row, scheduled) in batch.sequences.iter().enumerate() {
            words.extend_table(row, running[scheduled.index].blocks.block_ids());
        }
        words
    }

    /// The words of a decode of nothing but padding.
    pub(crate) fn padding(shape: StepShape) -> Vec<i32> {
        Self::new(shape, &ScheduledBatch::default(), &[]).words
    }

    /// Whether these are tables of the sequences of `batch` in this shape, up to blocks that came since. The caller
    /// drops the words when a sequence leaves, so that the same id is the same sequence.
    pub(crate) fn are_for(&self, shape: StepShape, batch: &ScheduledBatch) -> bool {
        let ids = batch.sequences.iter().map(|scheduled| scheduled.id);
        self.shape == shape && ids.eq(self.rows.iter().map(|row| row.id))
    }

    /// Adds what changes with every step, and the blocks that came since the tables were written; `options` sample the
    /// rows.
    ///
    /// # Errors
    /// [`MetadataError`] if the sequences do not fit the cache; then scheduler and cache disagree.
    pub(crate) fn finish(
        mut self,
        batch: &ScheduledBatch,
        running: &[RunningSequence],
        options: impl Iterator<Item = SamplingOptions>,
        geometry: CacheGeometry,
    ) -> Result<Vec<i32>, MetadataError> {
        for (row, (scheduled, options)) in batch.sequences.iter().zip(options).enumerate() {
            let RunningSequence { sequence, blocks } = &running[scheduled.index];
            let (position, blocks) = (blocks.num_computed_tokens(), blocks.block_ids());
            self.extend_table(row, blocks);
            check_block(row, self.rows[row].largest, geometry)?;
            let block = last_block(row, position, blocks, geometry)?;
            // Tokens are below the vocabulary, which fits an i32.
            self.words[self.layout.token_ids + row] = sequence.tokens[position] as i32;
            let row = NewToken {
                row,
                position,
                block,
                options,
            };
            row.write(&mut self.words, &self.layout, geometry.block_size);
        }
        Ok(self.words)
    }

    /// Writes those of a row's blocks that are not in its table yet; blocks never change their places.
    fn extend_table(&mut self, row: usize, blocks: &[BlockId]) {
        let width = self.shape.max_blocks;
        let written = &mut self.rows[row];
        let table = &mut self.words[self.layout.table + row * width..][..width];
        for (entry, block) in table.iter_mut().zip(blocks).skip(written.num_blocks) {
            *entry = block.get() as i32;
            written.largest = written.largest.max(block.get());
        }
        written.num_blocks = blocks.len();
    }
}

/// The words of a decode right behind one of the same sequences, as the device lacks them: those between the tokens, which the
/// device samples, and the tables, which it completes with the blocks of the new slots. `options` sample the rows.
///
/// # Errors
/// [`MetadataError`] if the sequences do not fit the cache; then scheduler and cache disagree.
pub(crate) fn words_ahead(
    shape: StepShape,
    batch: &ScheduledBatch,
    running: &[RunningSequence],
    options: impl Iterator<Item = SamplingOptions>,
    geometry: CacheGeometry,
) -> Result<Vec<i32>, MetadataError> {
    let layout = shape.layout();
    let mut words = without_tables(shape);
    for (row, (scheduled, options)) in batch.sequences.iter().zip(options).enumerate() {
        let blocks = &running[scheduled.index].blocks;
        let position = blocks.num_computed_tokens();
        let block = last_block(row, position, blocks.block_ids(), geometry)?;
        check_block(row, block.get(), geometry)?;
        let row = NewToken {
            row,
            position,
            block,
            options,
        };
        row.write(&mut words, &layout, geometry.block_size);
    }
    words.drain(..layout.positions);
    Ok(words)
}

/// The words of a decode of nothing but padding, up to the tables.
fn without_tables(shape: StepShape) -> Vec<i32> {
    let layout = shape.layout();
    let mut words = vec![0; layout.table];
    words[layout.slots..][..shape.num_rows].fill(-1);
    let offsets = &mut words[layout.offsets..][..=shape.num_rows];
    for (at, offset) in offsets.iter_mut().enumerate() {
        *offset = at as i32;
    }
    words
}

/// The block of the token at `position`, the last of a sequence.
fn last_block(
    row: usize,
    position: usize,
    blocks: &[BlockId],
    geometry: CacheGeometry,
) -> Result<BlockId, MetadataError> {
    let blocks = blocks_up_to(row, position + 1, blocks, geometry)?;
    Ok(blocks[position / geometry.block_size])
}

/// What changes of a row with every step, besides its token.
struct NewToken {
    row: usize,
    position: usize,
    block: BlockId,
    options: SamplingOptions,
}

impl NewToken {
    fn write(&self, words: &mut [i32], layout: &StepLayout, block_size: usize) {
        // Positions and slots are below those of the cache, which fit an i32.
        let slot = self.block.index() * block_size + self.position % block_size;
        words[layout.positions + self.row] = self.position as i32;
        words[layout.slots + self.row] = slot as i32;
        words[layout.seq_lens + self.row] = self.position as i32 + 1;
        words[layout.options + self.row * SAMPLING_WORDS..][..SAMPLING_WORDS]
            .copy_from_slice(&self.options.to_words());
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::{DType, Device, Int, Tensor};
    use burn_paged::StepWords;
    use burn_paged_kv_cache::CacheKey;

    use super::*;
    use crate::scheduler::Scheduler;
    use crate::sequence::Sequence;

    const GEOMETRY: CacheGeometry = CacheGeometry {
        num_blocks: 16,
        block_size: 4,
        num_kv_heads: 1,
        head_dim: 2,
    };

    const SHAPE: StepShape = StepShape::decode(3, 5);

    fn ints(tensor: &Tensor<1, Int>) -> Vec<i64> {
        tensor.clone().into_data().iter::<i64>().collect()
    }

    /// Two sequences whose prompts of `len` tokens are computed and whose next token is sampled.
    fn scheduler(len: u32) -> Scheduler {
        let mut scheduler = Scheduler::small(16);
        for id in 0..2 {
            let prompt = (0..len).map(|at| id * 10 + at + 20).collect();
            let id = RequestId::new(u64::from(id));
            scheduler.add(Sequence::new(id, prompt, CacheKey::default()));
        }
        step(&mut scheduler, [24, 34]);
        scheduler
    }

    /// Runs a step in which the sequences sample `tokens`.
    fn step(scheduler: &mut Scheduler, tokens: [u32; 2]) {
        let batch = scheduler.schedule();
        scheduler.mark_computed(&batch);
        for (index, token) in tokens.into_iter().enumerate() {
            scheduler.push_token(index, token);
        }
    }

    fn options() -> [SamplingOptions; 2] {
        let sampled = SamplingOptions {
            temperature: 0.5,
            seed: 7,
            ..Default::default()
        };
        [SamplingOptions::default(), sampled]
    }

    /// The words of a decode whose tables are written now.
    fn at_once(scheduler: &Scheduler, batch: &ScheduledBatch) -> Vec<i32> {
        let running = scheduler.running();
        let words = DecodeWords::new(SHAPE, batch, running);
        words
            .finish(batch, running, options().into_iter(), GEOMETRY)
            .unwrap()
    }

    #[test]
    fn rows_are_the_sequences_and_the_rest_is_padding() {
        let mut scheduler = scheduler(4);
        let batch = scheduler.schedule();
        let mut words = StepWords::new(SHAPE.layout().len, &Device::flex());
        words.write(vec![77; words.len()]);
        words.write(at_once(&scheduler, &batch));

        let (input, sampling) = SHAPE.views(&words, GEOMETRY);
        assert_eq!(ints(&input.token_ids), [24, 34, 0]);
        assert_eq!(ints(&input.positions), [4, 4, 0]);
        assert_eq!(ints(&input.logits_indices), [0, 1, 2]);
        let attention = &input.attention;
        assert_eq!(ints(attention.cu_seqlens_q().tensor()), [0, 1, 2, 3]);
        assert_eq!(ints(attention.seq_lens().tensor()), [5, 5, 0]);
        let slots = ints(attention.slot_mapping().tensor());
        let table = ints(&attention.block_table().tensor().clone().flatten(0, 1));
        for (row, running) in scheduler.running().iter().enumerate() {
            let blocks = running.blocks.block_ids();
            assert_eq!(slots[row], i64::from(blocks[1].get()) * 4);
            for (at, block) in blocks.iter().enumerate() {
                assert_eq!(table[row * 5 + at], i64::from(block.get()));
            }
        }
        assert_eq!(slots[2], -1);
        let sampling = ints(&sampling.flatten(0, 1));
        let expected: Vec<i64> = (options().iter())
            .flat_map(|options| options.to_words().map(i64::from))
            .collect();
        assert_eq!(sampling[..16], expected);
        // What the host sees in place of the values are bounds.
        assert_eq!(attention.seq_lens().host(), [20; 3]);
        assert!(attention.is_for_replays() && !attention.is_prefix_free());
    }

    /// Blocks of 4: the first and the last time, a new block comes after the tables are written.
    #[test]
    fn tables_that_were_written_ahead_are_completed() {
        let mut scheduler = scheduler(7);
        for tokens in [[40, 50], [41, 51], [42, 52]] {
            let batch = scheduler.schedule();
            scheduler.mark_computed(&batch);
            let ahead = DecodeWords::new(SHAPE, &batch, scheduler.running());
            for (index, token) in tokens.into_iter().enumerate() {
                scheduler.push_token(index, token);
            }
            let batch = scheduler.schedule();
            assert!(ahead.are_for(SHAPE, &batch));
            let running = scheduler.running();
            let words = ahead.finish(&batch, running, options().into_iter(), GEOMETRY);
            assert_eq!(words.unwrap(), at_once(&scheduler, &batch));
            scheduler.mark_computed(&batch);
            scheduler.push_token(0, 60);
            scheduler.push_token(1, 70);
        }
    }

    /// Blocks of 4: the second time, the next token needs a new block.
    #[test]
    fn a_decode_ahead_leaves_the_device_with_the_words_of_one_after_it() {
        let mut scheduler = scheduler(6);
        let device = Device::flex();
        let layout = SHAPE.layout();
        let mut words = StepWords::new(layout.len, &device);
        let batch = scheduler.schedule();
        words.write(at_once(&scheduler, &batch));
        for tokens in [[40, 50], [41, 51], [42, 52]] {
            let batch = scheduler.schedule_again();
            scheduler.mark_computed(&batch);
            assert!(scheduler.reserve_again(&batch));
            let running = scheduler.running();
            let ahead = words_ahead(SHAPE, &batch, running, options().into_iter(), GEOMETRY);
            let ahead = ahead.unwrap();
            assert_eq!(ahead.len(), layout.table - layout.positions);
            words.write_from(layout.positions, ahead);
            let ids = tokens.map(|token| token as i32);
            let ids = Tensor::<1, Int>::from_data([ids[0], ids[1], 0], (&device, DType::I32));
            let blocks = SHAPE.next_blocks(GEOMETRY);
            drop(words.feed_back(layout.token_ids, ids, Some(blocks)));
            for (index, token) in tokens.into_iter().enumerate() {
                scheduler.push_token(index, token);
            }
            let expected = at_once(&scheduler, &scheduler.schedule_again());
            let found = ints(&words.view(0, [expected.len()]));
            let expected: Vec<i64> = expected.into_iter().map(i64::from).collect();
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn other_sequences_or_shapes_need_other_tables() {
        let mut scheduler = scheduler(4);
        let batch = scheduler.schedule();
        let words = DecodeWords::new(SHAPE, &batch, scheduler.running());
        assert!(words.are_for(SHAPE, &batch));
        let wider = StepShape {
            max_blocks: 6,
            ..SHAPE
        };
        assert!(!words.are_for(wider, &batch));
        scheduler.mark_computed(&batch);
        scheduler.push_token(0, 1);
        scheduler.push_token(1, 2);
        scheduler.remove(RequestId::new(0));
        assert!(!words.are_for(SHAPE, &scheduler.schedule()));
    }

    #[test]
    fn a_sequence_that_does_not_fit_the_cache_is_an_error() {
        let mut scheduler = scheduler(4);
        let batch = scheduler.schedule();
        let words = DecodeWords::new(SHAPE, &batch, scheduler.running());
        let small = CacheGeometry {
            num_blocks: 2,
            ..GEOMETRY
        };
        let words = words.finish(&batch, scheduler.running(), options().into_iter(), small);
        assert!(matches!(words, Err(MetadataError::BlockOutOfRange { .. })));
        let ahead = words_ahead(
            SHAPE,
            &batch,
            scheduler.running(),
            options().into_iter(),
            small,
        );
        assert!(matches!(ahead, Err(MetadataError::BlockOutOfRange { .. })));
    }
}
