//! In which shapes steps are captured, and how one lies in the words of a step.
//!
//! - `replay.rs`: shapes, where the parts of a step begin, and their views on the device
//! - `decode_words.rs`: the values of a decode
//! - `prompt_words.rs`: the values of a step with prompt tokens

mod decode_words;
mod prompt_words;

use burn::tensor::{Int, Tensor};
use burn_paged::{
    AttentionMetadata, CacheGeometry, MetadataError, NextBlocks, ReplayedStep, SAMPLING_WORDS,
    StepWords,
};
use burn_paged_kv_cache::BlockId;
use burn_paged_model::ModelInput;

use crate::{ConfigError, EngineLimits, GraphConfig};

pub(crate) use decode_words::{DecodeWords, words_ahead};
pub(crate) use prompt_words::prompt_words;

/// Shortest context that is captured by default, in tokens.
const SHORTEST_CONTEXT: usize = 1024;

/// From a context to the next longer one. A table that is wider than its sequences costs words to upload and parts
/// of attention without keys; a graph more costs memory and the time of its capture.
const CONTEXT_STEP: usize = 4;

/// From a number of tokens of a step with prompts to the next one that is captured by default: the rows of a tile of the
/// products for many tokens, within which padding costs nothing.
const PROMPT_STEP: usize = 128;

/// Most tokens of a step with prompts that is captured by default. With more, the host launches while the device works, unless the
/// model is very small.
const MOST_PROMPT_TOKENS: usize = 512;

/// From a number of sequences of a step with prompts to the next larger one. Plans take those that are padding for real ones: too
/// many, and attention would be planned for sequences of few tokens.
const PROMPT_ROWS_STEP: usize = 2;

/// The sizes of a captured step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct StepShape {
    /// Tokens, padding included. In a decode there is one for each sequence, in other steps there are more.
    pub(crate) num_tokens: usize,
    /// Sequences, padding included.
    pub(crate) num_rows: usize,
    /// Width of the block table.
    pub(crate) max_blocks: usize,
}

/// Where the parts of a step begin in its words.
///
/// The tokens are first and the table is last: a step whose tokens and table the device has uploads what is between them, and
/// another one as many rows of the table as it has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepLayout {
    pub(crate) token_ids: usize,
    pub(crate) positions: usize,
    pub(crate) slots: usize,
    pub(crate) seq_lens: usize,
    pub(crate) offsets: usize,
    /// The last token of each sequence.
    pub(crate) last_tokens: usize,
    pub(crate) options: usize,
    pub(crate) table: usize,
    /// Words of all parts.
    pub(crate) len: usize,
}

impl StepShape {
    /// A decode of so many sequences.
    pub(crate) const fn decode(num_rows: usize, max_blocks: usize) -> Self {
        Self {
            num_tokens: num_rows,
            num_rows,
            max_blocks,
        }
    }

    pub(crate) fn is_decode(self) -> bool {
        self.num_tokens == self.num_rows
    }

    pub(crate) fn layout(self) -> StepLayout {
        let Self {
            num_tokens,
            num_rows,
            max_blocks,
        } = self;
        let mut end = 0;
        let mut part = |len: usize| {
            let begin = end;
            end += len.next_multiple_of(StepWords::ALIGNMENT);
            begin
        };
        let (token_ids, positions, slots) = (part(num_tokens), part(num_tokens), part(num_tokens));
        let (seq_lens, offsets) = (part(num_rows), part(num_rows + 1));
        StepLayout {
            token_ids,
            positions,
            slots,
            seq_lens,
            offsets,
            // Token `i` of a decode is the last of sequence `i`, so that the first offsets number them.
            last_tokens: match self.is_decode() {
                true => offsets,
                false => part(num_rows),
            },
            options: part(num_rows * SAMPLING_WORDS),
            table: part(num_rows * max_blocks),
            len: end,
        }
    }

    /// Where a decode has its tokens' positions and slots, and its table.
    pub(crate) fn next_blocks(self, geometry: CacheGeometry) -> NextBlocks {
        let layout = self.layout();
        NextBlocks {
            positions: layout.positions,
            slots: layout.slots,
            table: layout.table,
            max_blocks: self.max_blocks,
            block_size: geometry.block_size,
        }
    }

    /// The input of the model and the options of the sampler, as views of `words`.
    pub(crate) fn views(
        self,
        words: &StepWords,
        geometry: CacheGeometry,
    ) -> (ModelInput, Tensor<2, Int>) {
        let Self {
            num_tokens,
            num_rows,
            max_blocks,
        } = self;
        let layout = self.layout();
        let step = ReplayedStep {
            cu_seqlens_q: words.view(layout.offsets, [num_rows + 1]),
            seq_lens: words.view(layout.seq_lens, [num_rows]),
            block_table: words.view(layout.table, [num_rows, max_blocks]),
            slot_mapping: words.view(layout.slots, [num_tokens]),
        };
        let input = ModelInput {
            token_ids: words.view(layout.token_ids, [num_tokens]),
            positions: words.view(layout.positions, [num_tokens]),
            attention: AttentionMetadata::for_replays(step, geometry),
            logits_indices: words.view(layout.last_tokens, [num_rows]),
        };
        (
            input,
            words.view(layout.options, [num_rows, SAMPLING_WORDS]),
        )
    }
}

/// Those of the blocks of a sequence that hold its first `num_tokens` tokens.
///
/// # Errors
/// [`MetadataError::TooFewBlocks`] if there are not as many; then scheduler and cache disagree.
fn blocks_up_to(
    sequence: usize,
    num_tokens: usize,
    blocks: &[BlockId],
    geometry: CacheGeometry,
) -> Result<&[BlockId], MetadataError> {
    let block_size = geometry.block_size;
    let needed = num_tokens.div_ceil(block_size);
    blocks.get(..needed).ok_or(MetadataError::TooFewBlocks {
        sequence,
        num_tokens,
        needed,
        found: blocks.len(),
        block_size,
    })
}

/// # Errors
/// [`MetadataError::BlockOutOfRange`] if the cache does not have the block; then scheduler and cache disagree.
fn check_block(sequence: usize, block: u32, geometry: CacheGeometry) -> Result<(), MetadataError> {
    let num_blocks = geometry.num_blocks;
    match (block as usize) < num_blocks {
        true => Ok(()),
        false => Err(MetadataError::BlockOutOfRange {
            sequence,
            block: i64::from(block),
            num_blocks,
        }),
    }
}

/// The shapes that steps are captured in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StepShapes {
    /// Sequences of a decode, ascending, at least one.
    batch_sizes: Vec<usize>,
    /// Widths of the block table, ascending, at least one.
    widths: Vec<usize>,
    /// Tokens of a step with prompts, ascending; none where these are not captured.
    prompt_sizes: Vec<usize>,
    /// Sequences of a step with prompts, ascending, at least one.
    prompt_rows: Vec<usize>,
}

impl StepShapes {
    /// # Errors
    /// [`ConfigError`] if a list has a zero, or one of decodes is empty.
    pub(crate) fn new(config: &GraphConfig, limits: &EngineLimits) -> Result<Self, ConfigError> {
        let longest = limits.max_model_len.min(limits.num_slots());
        let batch_sizes = sizes(
            "graphs.batch_sizes",
            config.batch_sizes.as_deref(),
            limits.max_num_seqs,
            |size| if size < 8 { size * 2 } else { size + 8 },
            1,
        )?;
        let contexts = sizes(
            "graphs.context_sizes",
            config.context_sizes.as_deref(),
            longest,
            |context| context.saturating_mul(CONTEXT_STEP),
            SHORTEST_CONTEXT,
        )?;
        let mut widths: Vec<usize> = (contexts.iter())
            .map(|context| context.div_ceil(limits.block_size))
            .collect();
        widths.dedup();
        let prompt_sizes = match config.prompt_sizes.as_deref() {
            Some([]) => Vec::new(),
            given => sizes(
                "graphs.prompt_sizes",
                given,
                match given {
                    Some(_) => limits.max_num_batched_tokens,
                    None => limits.max_num_batched_tokens.min(MOST_PROMPT_TOKENS),
                },
                |tokens| tokens + PROMPT_STEP,
                PROMPT_STEP,
            )?,
        };
        let prompt_rows = sizes(
            "max_num_seqs",
            None,
            limits.max_num_seqs,
            |rows| rows.saturating_mul(PROMPT_ROWS_STEP),
            1,
        )?;
        Ok(Self {
            batch_sizes,
            widths,
            prompt_sizes,
            prompt_rows,
        })
    }

    /// The smallest shape for a decode of so many sequences, of which none has more blocks.
    pub(crate) fn decode(&self, num_rows: usize, max_blocks: usize) -> Option<StepShape> {
        let num_rows = next(&self.batch_sizes, num_rows)?;
        Some(StepShape::decode(num_rows, next(&self.widths, max_blocks)?))
    }

    /// The smallest shape for a step of so many tokens of so many sequences, of which none has more blocks.
    pub(crate) fn prompts(
        &self,
        num_tokens: usize,
        num_rows: usize,
        max_blocks: usize,
    ) -> Option<StepShape> {
        let num_rows = next(&self.prompt_rows, num_rows)?;
        Some(StepShape {
            // With as many tokens as sequences it would be a decode.
            num_tokens: next(&self.prompt_sizes, num_tokens.max(num_rows + 1))?,
            num_rows,
            max_blocks: next(&self.widths, max_blocks)?,
        })
    }

    /// Every shape of a decode, the largest first: memory that it leaves serves those after it.
    pub(crate) fn decodes(&self) -> impl Iterator<Item = StepShape> + '_ {
        let widths = self.widths.iter().rev();
        widths.flat_map(|max_blocks| {
            let batch_sizes = self.batch_sizes.iter().rev();
            batch_sizes.map(|num_rows| StepShape::decode(*num_rows, *max_blocks))
        })
    }

    /// Words that hold a step of any shape.
    pub(crate) fn num_words(&self) -> usize {
        let last = |sizes: &[usize]| sizes.last().copied();
        let widest = last(&self.widths).unwrap_or(0);
        let decode = last(&self.batch_sizes).map(|num_rows| StepShape::decode(num_rows, widest));
        let prompts = last(&self.prompt_sizes).and_then(|num_tokens| {
            let mut rows = self.prompt_rows.iter().rev();
            let num_rows = *rows.find(|num_rows| **num_rows < num_tokens)?;
            Some(StepShape {
                num_tokens,
                num_rows,
                max_blocks: widest,
            })
        });
        let words = [decode, prompts].map(|shape| shape.map_or(0, |shape| shape.layout().len));
        words[0].max(words[1])
    }

    pub(crate) fn batch_sizes(&self) -> &[usize] {
        &self.batch_sizes
    }

    pub(crate) fn widths(&self) -> &[usize] {
        &self.widths
    }

    pub(crate) fn prompt_sizes(&self) -> &[usize] {
        &self.prompt_sizes
    }
}

/// The smallest of ascending `sizes` that is not below `size`.
fn next(sizes: &[usize], size: usize) -> Option<usize> {
    let at = sizes.partition_point(|candidate| *candidate < size);
    sizes.get(at).copied()
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

    fn shapes(config: &GraphConfig) -> StepShapes {
        StepShapes::new(config, &limits(36, 5000)).unwrap()
    }

    #[test]
    fn default_sizes_end_with_the_largest_step() {
        let shapes = shapes(&GraphConfig::default());
        assert_eq!(shapes.batch_sizes, [1, 2, 4, 8, 16, 24, 32, 36]);
        assert_eq!(shapes.widths, [64, 256, 313]);
        assert_eq!(shapes.prompt_sizes, [128, 256, 384, 512]);
        assert_eq!(shapes.prompt_rows, [1, 2, 4, 8, 16, 32, 36]);
        let one = StepShapes::new(&GraphConfig::default(), &limits(1, 30)).unwrap();
        assert_eq!((one.batch_sizes, one.widths), (vec![1], vec![2]));
        assert_eq!(one.prompt_rows, [1]);
        // The pool holds 16,000 tokens, less than the context.
        let long = StepShapes::new(&GraphConfig::default(), &limits(1, 1 << 20)).unwrap();
        assert_eq!(long.widths, [64, 256, 1000]);
        let small = EngineLimits {
            max_num_batched_tokens: 200,
            ..limits(1, 30)
        };
        let small = StepShapes::new(&GraphConfig::default(), &small).unwrap();
        assert_eq!(small.prompt_sizes, [128, 200]);
    }

    #[test]
    fn a_step_takes_the_next_larger_shape() {
        let config = GraphConfig {
            batch_sizes: Some(vec![9, 2, 9]),
            context_sizes: Some(vec![320, 64, 1 << 30]),
            prompt_sizes: Some(vec![40, 7, 3, 1 << 30]),
            ..Default::default()
        };
        let shapes = shapes(&config);
        let decode = |num_rows, max_blocks| {
            let shape = shapes.decode(num_rows, max_blocks);
            shape.map(|shape| (shape.num_tokens, shape.num_rows, shape.max_blocks))
        };
        assert_eq!(decode(1, 1), Some((2, 2, 4)));
        assert_eq!(decode(2, 4), Some((2, 2, 4)));
        assert_eq!(decode(3, 5), Some((9, 9, 20)));
        assert_eq!(decode(9, 313), Some((9, 9, 313)));
        assert_eq!(decode(10, 1), None);
        assert_eq!(decode(1, 314), None);
        assert_eq!(shapes.decodes().count(), 6);
        let prompts = |num_tokens, num_rows, max_blocks| {
            let shape = shapes.prompts(num_tokens, num_rows, max_blocks);
            shape.map(|shape| (shape.num_tokens, shape.num_rows, shape.max_blocks))
        };
        assert_eq!(prompts(2, 1, 1), Some((3, 1, 4)));
        assert_eq!(prompts(4, 2, 5), Some((7, 2, 20)));
        assert_eq!(prompts(6, 5, 5), Some((40, 8, 20)), "more tokens than rows");
        assert_eq!(prompts(2048, 36, 313), Some((2048, 36, 313)));
        assert_eq!(prompts(2049, 1, 1), None);
        assert_eq!(prompts(2048, 37, 1), None);
        assert_eq!(prompts(2048, 1, 314), None);
        let none = GraphConfig {
            prompt_sizes: Some(Vec::new()),
            ..config
        };
        let none = StepShapes::new(&none, &limits(36, 5000)).unwrap();
        assert_eq!(none.prompts(3, 1, 1), None);
    }

    #[test]
    fn parts_are_aligned_and_do_not_overlap() {
        for (num_tokens, num_rows, max_blocks) in [
            (1, 1, 1),
            (2, 2, 64),
            (128, 128, 1),
            (129, 129, 7),
            (129, 1, 3),
            (1000, 129, 1),
        ] {
            let shape = StepShape {
                num_tokens,
                num_rows,
                max_blocks,
            };
            let layout = shape.layout();
            let mut parts = vec![
                (layout.token_ids, num_tokens),
                (layout.positions, num_tokens),
                (layout.slots, num_tokens),
                (layout.seq_lens, num_rows),
                (layout.offsets, num_rows + 1),
                (layout.last_tokens, num_rows),
                (layout.options, num_rows * SAMPLING_WORDS),
                (layout.table, num_rows * max_blocks),
                (layout.len, 0),
            ];
            if num_tokens == num_rows {
                assert_eq!(parts.remove(5).0, layout.offsets);
            }
            for pair in parts.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{layout:?}");
                assert!(pair[1].0.is_multiple_of(StepWords::ALIGNMENT));
            }
        }
    }

    #[test]
    fn the_words_hold_every_shape() {
        for (max_num_seqs, context, prompt_sizes) in [
            (36, 5000, None),
            (36, 5000, Some(vec![2000])),
            (300, 5000, Some(vec![])),
            // As many tokens as seats: no step with prompts fills both.
            (2, 40, Some(vec![2])),
            (4, 40, Some(vec![4])),
        ] {
            let config = GraphConfig {
                prompt_sizes,
                ..Default::default()
            };
            let limits = limits(max_num_seqs, context);
            let shapes = StepShapes::new(&config, &limits).unwrap();
            let mut prompts = Vec::new();
            for num_tokens in [2, 4, 100, 512, 2000] {
                for num_rows in [1, 2, 36, 300] {
                    let max_blocks = context.div_ceil(limits.block_size);
                    prompts.extend(shapes.prompts(num_tokens, num_rows, max_blocks));
                }
            }
            let largest = (shapes.decodes().chain(prompts))
                .map(|shape| shape.layout().len)
                .max();
            assert_eq!(largest, Some(shapes.num_words()));
        }
    }

    #[test]
    fn wrong_sizes_name_their_field() {
        let refused = |config| {
            let error = StepShapes::new(&config, &limits(4, 64)).unwrap_err();
            error.field()
        };
        let batch_sizes = |sizes: &[usize]| GraphConfig {
            batch_sizes: Some(sizes.to_vec()),
            ..Default::default()
        };
        assert_eq!(refused(batch_sizes(&[])), "graphs.batch_sizes");
        assert_eq!(refused(batch_sizes(&[1, 0])), "graphs.batch_sizes");
        let config = GraphConfig {
            context_sizes: Some(vec![0]),
            ..Default::default()
        };
        assert_eq!(refused(config), "graphs.context_sizes");
        let config = GraphConfig {
            prompt_sizes: Some(vec![128, 0]),
            ..Default::default()
        };
        assert_eq!(refused(config), "graphs.prompt_sizes");
    }
}
