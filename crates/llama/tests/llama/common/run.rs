//! Steps of a loaded model over a paged cache whose unwritten slots hold NaN.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_paged::{
    AttentionMetadataBuilder, CacheDType, CacheGeometry, PagedKvCache, SequenceStep, SlotMapping,
    store_kv,
};
use burn_paged_model::{CausalLm, ModelInput};

use super::argmax;

/// A sequence: its tokens, how many of them are in the cache, and its blocks.
#[derive(Debug, Clone)]
pub(crate) struct Sequence {
    pub(crate) tokens: Vec<u32>,
    pub(crate) num_computed: usize,
    pub(crate) blocks: Vec<u32>,
}

impl Sequence {
    pub(crate) fn new(prompt: &[u32]) -> Self {
        Self {
            tokens: prompt.to_vec(),
            num_computed: 0,
            blocks: Vec::new(),
        }
    }
}

/// Which rows of a step are wanted.
#[derive(Clone, Copy)]
pub(crate) enum Rows {
    /// Every row.
    All,
    /// The last row of each sequence.
    Last,
    /// No row: a chunk in the middle of a prompt.
    None,
}

/// A model with its cache and the blocks that nobody has.
pub(crate) struct Runner<'a> {
    model: &'a dyn CausalLm,
    cache: PagedKvCache,
    free: Vec<u32>,
}

impl<'a> Runner<'a> {
    /// A cache with room for `num_tokens` in each of `num_seqs`, filled with NaN, and free blocks in mixed order.
    pub(crate) fn new(
        model: &'a dyn CausalLm,
        block_size: usize,
        num_seqs: usize,
        num_tokens: usize,
    ) -> Self {
        let dtype = model.spec().dtype.into();
        Self::with_cache_of(dtype, model, block_size, num_seqs, num_tokens)
    }

    /// The same with a cache of another dtype.
    pub(crate) fn with_cache_of(
        dtype: CacheDType,
        model: &'a dyn CausalLm,
        block_size: usize,
        num_seqs: usize,
        num_tokens: usize,
    ) -> Self {
        let spec = model.spec();
        let num_blocks = num_seqs * num_tokens.div_ceil(block_size) + 1;
        let geometry = CacheGeometry {
            num_blocks,
            block_size,
            num_kv_heads: spec.num_kv_heads,
            head_dim: spec.head_dim,
        };
        let mut cache = PagedKvCache::new(spec.num_layers, geometry, dtype, &spec.device).unwrap();
        let slots =
            SlotMapping::new((0..geometry.num_slots() as i32).collect(), &spec.device).unwrap();
        for layer in 0..spec.num_layers {
            let shape = [
                geometry.num_slots(),
                geometry.num_kv_heads,
                geometry.head_dim,
            ];
            let poison = || Tensor::full(shape, f32::NAN, (&spec.device, spec.dtype));
            store_kv(cache.layer_mut(layer), poison(), poison(), &slots);
        }
        // A stride that shares no factor with the count visits every block, never two neighbours in turn.
        let stride = (num_blocks / 2..)
            .find(|stride| gcd(*stride, num_blocks) == 1)
            .unwrap();
        let free = (0..num_blocks)
            .map(|at| (at * stride % num_blocks) as u32)
            .collect();
        Self { model, cache, free }
    }

    /// Computes `count` more tokens of each sequence in one step and gives the logits of the wanted rows.
    pub(crate) fn step(
        &mut self,
        sequences: &mut [(&mut Sequence, usize)],
        rows: Rows,
    ) -> Vec<Vec<f32>> {
        let geometry = self.cache.geometry();
        let (mut ids, mut positions, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
        for (sequence, count) in sequences.iter_mut() {
            let range = sequence.num_computed..sequence.num_computed + *count;
            while sequence.blocks.len() * geometry.block_size < range.end {
                sequence.blocks.push(
                    self.free
                        .pop()
                        .expect("the test made the cache large enough"),
                );
            }
            ids.extend(sequence.tokens[range.clone()].iter().map(|id| *id as i32));
            positions.extend(range.map(|position| position as i32));
            match rows {
                Rows::All => {
                    wanted.extend((0..*count).map(|row| (ids.len() - *count + row) as i32))
                }
                Rows::Last => wanted.push(ids.len() as i32 - 1),
                Rows::None => {}
            }
        }
        let mut builder = AttentionMetadataBuilder::new(geometry);
        for (sequence, count) in sequences.iter() {
            let (blocks, num_computed) = (&sequence.blocks[..], sequence.num_computed);
            builder.push(SequenceStep {
                blocks,
                num_computed,
                num_new: *count,
            });
        }
        let device = &self.model.spec().device;
        let input = ModelInput {
            token_ids: upload(ids, device),
            positions: upload(positions, device),
            attention: builder.build(device).unwrap(),
            logits_indices: upload(wanted, device),
        };
        drop(builder);
        for (sequence, count) in sequences.iter_mut() {
            sequence.num_computed += *count;
        }
        let logits = self.model.forward(&input, &mut self.cache);
        self.rows(logits)
    }

    /// Computes a sequence up to its end in chunks of the given sizes, the last one as often as needed; gives the logits of
    /// its last token.
    pub(crate) fn prefill(&mut self, sequence: &mut Sequence, chunks: &[usize]) -> Vec<f32> {
        let mut chunks = chunks
            .iter()
            .copied()
            .chain(std::iter::repeat(*chunks.last().unwrap()));
        let mut logits = Vec::new();
        while sequence.num_computed < sequence.tokens.len() {
            let left = sequence.tokens.len() - sequence.num_computed;
            let count = chunks.next().unwrap().min(left);
            logits = self.step(&mut [(sequence, count)], Rows::Last).remove(0);
        }
        logits
    }

    /// Prefills in chunks, then decodes greedily: the new tokens, and the logits that each was taken from.
    pub(crate) fn greedy(
        &mut self,
        sequence: &mut Sequence,
        chunks: &[usize],
        count: usize,
    ) -> (Vec<u32>, Vec<Vec<f32>>) {
        let mut all = vec![self.prefill(sequence, chunks)];
        let start = sequence.tokens.len();
        for _ in 1..count {
            sequence.tokens.push(argmax(all.last().unwrap()) as u32);
            all.push(self.step(&mut [(sequence, 1)], Rows::Last).remove(0));
        }
        sequence.tokens.push(argmax(all.last().unwrap()) as u32);
        (sequence.tokens[start..].to_vec(), all)
    }

    fn rows(&self, logits: Tensor<2>) -> Vec<Vec<f32>> {
        let [_, columns] = logits.dims();
        assert_eq!(columns, self.model.spec().vocab_size);
        let values = logits
            .cast(DType::F32)
            .into_data()
            .try_to_vec::<f32>()
            .unwrap();
        values.chunks(columns).map(<[f32]>::to_vec).collect()
    }
}

fn upload(values: Vec<i32>, device: &Device) -> Tensor<1, Int> {
    let shape = [values.len()];
    Tensor::from_data(TensorData::new(values, shape), (device, DType::I32))
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
