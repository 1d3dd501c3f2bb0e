//! Steps of a model without an engine: what is left when nothing is scheduled, built or read back.

use std::ops::Range;
use std::time::Instant;

use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_paged::{AttentionMetadataBuilder, CacheGeometry, PagedKvCache, SequenceStep, greedy};
use burn_paged_model::{CausalLm, ModelInput};

use super::{StepSeconds, prompt};
use crate::kernel::{ModelCase, shuffled};

/// Tokens of a step that only fills the cache, at most, unless one sequence alone has more.
const FILL_TOKENS: usize = 8192;

/// Steps before the first window.
const WARM_UP: usize = 2;

/// A batch of sequences in a cache of its own, whose blocks lie in no order.
pub struct Bare<'a> {
    model: &'a dyn CausalLm,
    cache: PagedKvCache,
    blocks: Vec<Vec<u32>>,
    case: ModelCase,
}

impl<'a> Bare<'a> {
    /// A cache for `case`.
    ///
    /// # Errors
    /// If there cannot be one of this size.
    pub fn new(model: &'a dyn CausalLm, case: ModelCase, page: usize) -> Result<Self, String> {
        let spec = model.spec();
        let per_sequence = case.tokens.div_ceil(page);
        let geometry = CacheGeometry {
            num_blocks: case.batch * per_sequence,
            block_size: page,
            num_kv_heads: spec.num_kv_heads,
            head_dim: spec.head_dim,
        };
        let cache = PagedKvCache::new(spec.num_layers, geometry, spec.dtype, &spec.device)
            .map_err(|error| error.to_string())?;
        let order = shuffled(geometry.num_blocks, 7);
        let blocks = order.chunks(per_sequence);
        let blocks = blocks.map(|row| row.iter().map(|&block| block as u32).collect());
        Ok(Self {
            model,
            cache,
            blocks: blocks.collect(),
            case,
        })
    }

    /// Seconds of a step that takes all prompts and gives each its first token.
    ///
    /// # Errors
    /// If the device fails, or gives no token.
    pub fn prefill(mut self, runs: usize) -> Result<StepSeconds, String> {
        let input = self.input(0..self.case.batch, 0..self.case.tokens, true)?;
        let mut windows = Vec::with_capacity(runs);
        for run in 0..=runs {
            let begin = Instant::now();
            let ids = greedy(self.model.forward(&input, &mut self.cache));
            self.settle(ids)?;
            if run > 0 {
                windows.push(begin.elapsed().as_secs_f64());
            }
        }
        Ok(StepSeconds { windows, steps: 1 })
    }

    /// Seconds of a step in which each sequence decodes its last token, over and over: the next step takes the ids that
    /// this one gave, without the host seeing them.
    ///
    /// # Errors
    /// If the device fails, or gives no token.
    pub fn decode(mut self, runs: usize, steps: usize) -> Result<StepSeconds, String> {
        let last = self.case.tokens - 1;
        self.fill(last)?;
        let mut input = self.input(0..self.case.batch, last..last + 1, true)?;
        self.decode_steps(&mut input, WARM_UP)?;
        let mut windows = Vec::with_capacity(runs);
        for _ in 0..runs {
            let begin = Instant::now();
            self.decode_steps(&mut input, steps)?;
            windows.push(begin.elapsed().as_secs_f64() / steps as f64);
        }
        Ok(StepSeconds { windows, steps })
    }

    fn decode_steps(&mut self, input: &mut ModelInput, steps: usize) -> Result<(), String> {
        for _ in 0..steps {
            input.token_ids = greedy(self.model.forward(input, &mut self.cache));
        }
        self.settle(input.token_ids.clone())
    }

    /// Computes the first `tokens` of every sequence, a few sequences at a time.
    fn fill(&mut self, tokens: usize) -> Result<(), String> {
        let at_once = (FILL_TOKENS / tokens.max(1)).max(1);
        for first in (0..self.case.batch).step_by(at_once) {
            let sequences = first..self.case.batch.min(first + at_once);
            let input = self.input(sequences, 0..tokens, false)?;
            drop(self.model.forward(&input, &mut self.cache));
        }
        Ok(())
    }

    /// A step in which `sequences` compute their tokens `new`.
    fn input(
        &self,
        sequences: Range<usize>,
        new: Range<usize>,
        wants_logits: bool,
    ) -> Result<ModelInput, String> {
        let spec = self.model.spec();
        let mut builder = AttentionMetadataBuilder::new(self.cache.geometry());
        let (mut ids, mut positions, mut last_rows) = (Vec::new(), Vec::new(), Vec::new());
        for sequence in sequences {
            builder.push(SequenceStep {
                blocks: &self.blocks[sequence],
                num_computed: new.start,
                num_new: new.len(),
            });
            let tokens = prompt(sequence, new.end, spec.vocab_size).skip(new.start);
            ids.extend(tokens.map(|token| token as i32));
            positions.extend(new.clone().map(|position| position as i32));
            if wants_logits {
                last_rows.push(ids.len() as i32 - 1);
            }
        }
        let upload = |values: Vec<i32>| -> Tensor<1, Int> {
            let len = values.len();
            Tensor::from_data(TensorData::new(values, [len]), (&spec.device, DType::I32))
        };
        Ok(ModelInput {
            attention: builder
                .build(&spec.device)
                .map_err(|error| error.to_string())?,
            token_ids: upload(ids),
            positions: upload(positions),
            logits_indices: upload(last_rows),
        })
    }

    /// Waits for the tokens and looks at them: a launch that failed shows when its results are read.
    fn settle(&self, ids: Tensor<1, Int>) -> Result<(), String> {
        let data = ids.try_into_data().map_err(|error| format!("{error:?}"))?;
        let vocab_size = self.model.spec().vocab_size as i64;
        match data
            .iter::<i64>()
            .find(|token| !(0..vocab_size).contains(token))
        {
            Some(token) => Err(format!("a row gave {token}, which is no token")),
            None => Ok(()),
        }
    }
}
