//! In which shapes decodes are captured, and how one lies in the words of a step.
//!
//! - `decode.rs`: shapes, where the parts of a step begin, and their views on the device
//! - `words.rs`: the values of a step

mod words;

use burn::tensor::{Int, Tensor};
use burn_paged::{AttentionMetadata, CacheGeometry, ReplayedDecode, SAMPLING_WORDS, StepWords};
use burn_paged_model::ModelInput;

use crate::{ConfigError, DecodeConfig, EngineLimits};

pub(crate) use words::DecodeWords;

/// Shortest context that is captured by default, in tokens.
const SHORTEST_CONTEXT: usize = 1024;

/// From a context to the next longer one. A table that is wider than its sequences costs words to upload and parts
/// of attention without keys; a graph more costs memory and the time of its capture.
const CONTEXT_STEP: usize = 4;

/// The sizes of a captured decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct DecodeShape {
    /// Sequences, padding included.
    pub(crate) num_rows: usize,
    /// Width of the block table.
    pub(crate) max_blocks: usize,
}

/// Where the parts of a decode begin in the words of a step.
///
/// The tokens are first, so that a step whose tokens the device has uploads what is behind them; the table is last, so that
/// a step uploads the rows that it has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DecodeLayout {
    pub(crate) token_ids: usize,
    pub(crate) positions: usize,
    pub(crate) slots: usize,
    pub(crate) seq_lens: usize,
    pub(crate) offsets: usize,
    pub(crate) options: usize,
    pub(crate) table: usize,
    /// Words of all parts.
    pub(crate) len: usize,
}

impl DecodeShape {
    pub(crate) fn layout(self) -> DecodeLayout {
        let Self {
            num_rows,
            max_blocks,
        } = self;
        let mut end = 0;
        let mut part = |len: usize| {
            let begin = end;
            end += len.next_multiple_of(StepWords::ALIGNMENT);
            begin
        };
        DecodeLayout {
            token_ids: part(num_rows),
            positions: part(num_rows),
            slots: part(num_rows),
            seq_lens: part(num_rows),
            offsets: part(num_rows + 1),
            options: part(num_rows * SAMPLING_WORDS),
            table: part(num_rows * max_blocks),
            len: end,
        }
    }

    /// The input of the model and the options of the sampler, as views of `words`.
    pub(crate) fn views(
        self,
        words: &StepWords,
        geometry: CacheGeometry,
    ) -> (ModelInput, Tensor<2, Int>) {
        let Self {
            num_rows,
            max_blocks,
        } = self;
        let layout = self.layout();
        let decode = ReplayedDecode {
            cu_seqlens_q: words.view(layout.offsets, [num_rows + 1]),
            seq_lens: words.view(layout.seq_lens, [num_rows]),
            block_table: words.view(layout.table, [num_rows, max_blocks]),
            slot_mapping: words.view(layout.slots, [num_rows]),
        };
        let input = ModelInput {
            token_ids: words.view(layout.token_ids, [num_rows]),
            positions: words.view(layout.positions, [num_rows]),
            attention: AttentionMetadata::for_replays(decode, geometry),
            // Row `i` begins at `i`, so that the first offsets number the rows.
            logits_indices: words.view(layout.offsets, [num_rows]),
        };
        (
            input,
            words.view(layout.options, [num_rows, SAMPLING_WORDS]),
        )
    }
}

/// The shapes that decodes are captured in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DecodeShapes {
    /// Ascending, at least one.
    batch_sizes: Vec<usize>,
    /// Widths of the block table, ascending, at least one.
    widths: Vec<usize>,
}

impl DecodeShapes {
    /// # Errors
    /// [`ConfigError`] if a list is empty or has a zero.
    pub(crate) fn new(config: &DecodeConfig, limits: &EngineLimits) -> Result<Self, ConfigError> {
        let longest = limits.max_model_len.min(limits.num_slots());
        let batch_sizes = sizes(
            "decode.batch_sizes",
            config.batch_sizes.as_deref(),
            limits.max_num_seqs,
            |size| if size < 8 { size * 2 } else { size + 8 },
            1,
        )?;
        let contexts = sizes(
            "decode.context_sizes",
            config.context_sizes.as_deref(),
            longest,
            |context| context.saturating_mul(CONTEXT_STEP),
            SHORTEST_CONTEXT,
        )?;
        let mut widths: Vec<usize> = (contexts.iter())
            .map(|context| context.div_ceil(limits.block_size))
            .collect();
        widths.dedup();
        Ok(Self {
            batch_sizes,
            widths,
        })
    }

    /// The smallest shape for so many sequences, of which none has more blocks.
    pub(crate) fn fitting(&self, num_rows: usize, max_blocks: usize) -> Option<DecodeShape> {
        let next = |sizes: &[usize], size: usize| {
            let at = sizes.partition_point(|candidate| *candidate < size);
            sizes.get(at).copied()
        };
        Some(DecodeShape {
            num_rows: next(&self.batch_sizes, num_rows)?,
            max_blocks: next(&self.widths, max_blocks)?,
        })
    }

    /// Every shape, the largest first: memory that it leaves serves those after it.
    pub(crate) fn all(&self) -> impl Iterator<Item = DecodeShape> + '_ {
        let widths = self.widths.iter().rev();
        widths.flat_map(|max_blocks| {
            let batch_sizes = self.batch_sizes.iter().rev();
            batch_sizes.map(|num_rows| DecodeShape {
                num_rows: *num_rows,
                max_blocks: *max_blocks,
            })
        })
    }

    /// Words that hold a step of any shape.
    pub(crate) fn num_words(&self) -> usize {
        self.all()
            .map(|shape| shape.layout().len)
            .max()
            .unwrap_or(0)
    }

    pub(crate) fn batch_sizes(&self) -> &[usize] {
        &self.batch_sizes
    }

    pub(crate) fn widths(&self) -> &[usize] {
        &self.widths
    }
}

/// The given sizes in ascending order, or those from `first` on by `next`; none above `most`.
fn sizes(
    field: &'static str,
    given: Option<&[usize]>,
    most: usize,
    next: impl Fn(usize) -> usize,
    first: usize,
) -> Result<Vec<usize>, ConfigError> {
    let mut sizes: Vec<usize> = match given {
        Some([]) => return Err(ConfigError::NoSizes { field }),
        Some(given) if given.contains(&0) => return Err(ConfigError::Zero { field }),
        Some(given) => given.iter().map(|size| (*size).min(most)).collect(),
        None => {
            let below = std::iter::successors(Some(first), |size| Some(next(*size)));
            let below = below.take_while(|size| *size < most);
            below.chain([most]).collect()
        }
    };
    sizes.sort_unstable();
    sizes.dedup();
    Ok(sizes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(max_num_seqs: usize, max_model_len: usize) -> EngineLimits {
        EngineLimits {
            block_size: 16,
            num_blocks: 1000,
            max_num_seqs,
            max_num_batched_tokens: 2048,
            max_prefill_chunk: 2048,
            max_model_len,
            max_logprobs: 0,
            vocab_size: 100,
        }
    }

    fn shapes(config: &DecodeConfig) -> DecodeShapes {
        DecodeShapes::new(config, &limits(36, 5000)).unwrap()
    }

    #[test]
    fn default_sizes_end_with_the_largest_step() {
        let shapes = shapes(&DecodeConfig::default());
        assert_eq!(shapes.batch_sizes, [1, 2, 4, 8, 16, 24, 32, 36]);
        assert_eq!(shapes.widths, [64, 256, 313]);
        let one = DecodeShapes::new(&DecodeConfig::default(), &limits(1, 30)).unwrap();
        assert_eq!((one.batch_sizes, one.widths), (vec![1], vec![2]));
        // The pool holds 16,000 tokens, less than the context.
        let long = DecodeShapes::new(&DecodeConfig::default(), &limits(1, 1 << 20)).unwrap();
        assert_eq!(long.widths, [64, 256, 1000]);
    }

    #[test]
    fn a_step_takes_the_next_larger_shape() {
        let config = DecodeConfig {
            batch_sizes: Some(vec![9, 2, 9]),
            context_sizes: Some(vec![320, 64, 1 << 30]),
            ..Default::default()
        };
        let shapes = shapes(&config);
        let fitting = |num_rows, max_blocks| {
            let shape = shapes.fitting(num_rows, max_blocks);
            shape.map(|shape| (shape.num_rows, shape.max_blocks))
        };
        assert_eq!(fitting(1, 1), Some((2, 4)));
        assert_eq!(fitting(2, 4), Some((2, 4)));
        assert_eq!(fitting(3, 5), Some((9, 20)));
        assert_eq!(fitting(9, 313), Some((9, 313)));
        assert_eq!(fitting(10, 1), None);
        assert_eq!(fitting(1, 314), None);
        assert_eq!(shapes.all().count(), 6);
    }

    #[test]
    fn parts_are_aligned_and_do_not_overlap() {
        for (num_rows, max_blocks) in [(1, 1), (2, 64), (128, 1), (129, 7)] {
            let shape = DecodeShape {
                num_rows,
                max_blocks,
            };
            let layout = shape.layout();
            let parts = [
                (layout.token_ids, num_rows),
                (layout.positions, num_rows),
                (layout.slots, num_rows),
                (layout.seq_lens, num_rows),
                (layout.offsets, num_rows + 1),
                (layout.options, num_rows * SAMPLING_WORDS),
                (layout.table, num_rows * max_blocks),
                (layout.len, 0),
            ];
            for pair in parts.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{layout:?}");
                assert!(pair[1].0.is_multiple_of(StepWords::ALIGNMENT));
            }
        }
    }

    #[test]
    fn wrong_sizes_name_their_field() {
        let refused = |config| {
            let error = DecodeShapes::new(&config, &limits(4, 64)).unwrap_err();
            error.field()
        };
        let batch_sizes = |sizes: &[usize]| DecodeConfig {
            batch_sizes: Some(sizes.to_vec()),
            ..Default::default()
        };
        assert_eq!(refused(batch_sizes(&[])), "decode.batch_sizes");
        assert_eq!(refused(batch_sizes(&[1, 0])), "decode.batch_sizes");
        let config = DecodeConfig {
            context_sizes: Some(vec![0]),
            ..Default::default()
        };
        assert_eq!(refused(config), "decode.context_sizes");
    }
}
