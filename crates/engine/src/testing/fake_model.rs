//! A model without weights that still depends on every block and slot.

use std::fmt;
use std::time::Duration;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_paged::{AttentionMetadata, LayerKv, PagedKvCache, store_kv};
use burn_paged_model::{CausalLm, ModelInput, ModelSpec};

/// The logits of a history of tokens, prompt included.
type Logits = Box<dyn Fn(&[u32]) -> Vec<f32>>;

/// Elements per head: the token and its position.
const HEAD_DIM: usize = 2;

/// A [`CausalLm`] that stores token ids as keys and reads the history of each row back through the block table.
///
/// The logits of a row are a given function of the tokens found there. A token stored in a wrong slot, a wrong block in
/// a table, or a prefix hit on somebody else's block therefore changes the answer; a key with a wrong position makes
/// the whole row NaN.
pub struct FakeModel {
    spec: ModelSpec,
    logits: Logits,
    step_delay: Duration,
}

impl fmt::Debug for FakeModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FakeModel")
            .field("spec", &self.spec)
            .finish_non_exhaustive()
    }
}

impl FakeModel {
    /// A model whose logits are `logits` of the whole history of a row.
    ///
    /// # Shapes
    /// - `logits` takes the tokens of a sequence up to the row and returns `[vocab_size]`
    pub fn new(
        vocab_size: usize,
        device: &Device,
        logits: impl Fn(&[u32]) -> Vec<f32> + 'static,
    ) -> Self {
        let spec = ModelSpec {
            architecture: "FakeModel".to_owned(),
            num_layers: 1,
            num_kv_heads: 1,
            head_dim: HEAD_DIM,
            vocab_size,
            max_positions: 4096,
            dtype: DType::F32,
            device: device.clone(),
        };
        Self {
            spec,
            logits: Box::new(logits),
            step_delay: Duration::ZERO,
        }
    }

    /// A model whose logits are [`hashed_logits`]: arbitrary, and different for every history.
    pub fn hashed(vocab_size: usize, device: &Device) -> Self {
        Self::new(vocab_size, device, move |history| {
            hashed_logits(history, vocab_size)
        })
    }

    /// A model that answers a prompt of `num_prompt_tokens` tokens with `script`, and repeats its last token from then
    /// on.
    pub fn scripted(
        vocab_size: usize,
        device: &Device,
        num_prompt_tokens: usize,
        script: Vec<u32>,
    ) -> Self {
        Self::new(vocab_size, device, move |history| {
            let at = history.len().saturating_sub(num_prompt_tokens);
            let token = script.get(at).or(script.last()).copied().unwrap_or(0);
            one_hot(token, vocab_size)
        })
    }

    /// With this many positions.
    pub fn with_max_positions(mut self, max_positions: usize) -> Self {
        self.spec.max_positions = max_positions;
        self
    }

    /// With steps that take at least this long.
    pub fn with_step_delay(self, step_delay: Duration) -> Self {
        Self { step_delay, ..self }
    }

    /// K and V of the step's tokens, `[num_tokens, 1, 2]`. Positions are stored plus one, so that a slot that nobody
    /// wrote, which is zero, is never right.
    fn keys(&self, token_ids: &[i64], positions: &[i64]) -> Tensor<3> {
        let pairs = token_ids.iter().zip(positions);
        let values: Vec<f32> = pairs
            .flat_map(|(token, position)| [*token as f32, (*position + 1) as f32])
            .collect();
        let data = TensorData::new(values, [token_ids.len(), 1, HEAD_DIM]);
        Tensor::from_data(data, (&self.spec.device, DType::F32))
    }

    /// Logits of a history as it was read from the cache; NaN if a position is wrong.
    fn row(&self, keys: &[f32]) -> Vec<f32> {
        let vocab_size = self.spec.vocab_size;
        let pairs = || keys.chunks(HEAD_DIM);
        if pairs()
            .enumerate()
            .any(|(position, pair)| pair[1] != (position + 1) as f32)
        {
            return vec![f32::NAN; vocab_size];
        }
        let history: Vec<u32> = pairs().map(|pair| pair[0] as u32).collect();
        let mut logits = (self.logits)(&history);
        logits.resize(vocab_size, f32::NEG_INFINITY);
        logits
    }
}

impl CausalLm for FakeModel {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn forward(&self, input: &ModelInput, cache: &mut PagedKvCache) -> Tensor<2> {
        std::thread::sleep(self.step_delay);
        let metadata = &input.attention;
        let keys = self.keys(&ints(&input.token_ids), &ints(&input.positions));
        store_kv(
            cache.layer_mut(0),
            keys.clone(),
            keys,
            metadata.slot_mapping(),
        );
        let history = History::read(cache.layer(0), metadata);
        let rows: Vec<f32> = ints(&input.logits_indices)
            .into_iter()
            .flat_map(|row| match history.of_row(row as usize) {
                Some(keys) => self.row(keys),
                None => vec![f32::NAN; self.spec.vocab_size],
            })
            .collect();
        let num_rows = rows.len() / self.spec.vocab_size.max(1);
        let data = TensorData::new(rows, [num_rows, self.spec.vocab_size]);
        Tensor::from_data(data, (&self.spec.device, DType::F32))
    }

    /// Everything here is read back.
    fn can_be_captured(&self) -> bool {
        false
    }
}

/// What the sequences of a step have in the cache, by the index tensors as the device has them.
struct History {
    /// Keys of all sequences, one after the other.
    k: Vec<f32>,
    v: Vec<f32>,
    /// Where each sequence begins among them, and where the last ends.
    cu_seqlens_k: Vec<usize>,
    cu_seqlens_q: Vec<usize>,
}

impl History {
    fn read(cache: &LayerKv, metadata: &AttentionMetadata) -> Self {
        let (table, block_size) = (metadata.block_table(), metadata.block_size());
        let blocks = ints(&table.tensor().clone().flatten(0, 1));
        let mut cu_seqlens_k = vec![0];
        let mut slots = Vec::new();
        for (sequence, len) in ints(metadata.seq_lens().tensor()).iter().enumerate() {
            let blocks = &blocks[sequence * table.max_blocks()..];
            let slot = |position: usize| {
                blocks[position / block_size] as i32 * block_size as i32
                    + (position % block_size) as i32
            };
            slots.extend((0..*len as usize).map(slot));
            cu_seqlens_k.push(slots.len());
        }
        let num_slots = cache.geometry().num_slots();
        let data = TensorData::new(slots.clone(), [slots.len()]);
        let device = cache.k().device();
        let slots = Tensor::<1, Int>::from_data(data, (&device, DType::I32));
        let keys = |cache: &Tensor<4>| {
            let rows = cache.clone().reshape([num_slots, HEAD_DIM]);
            let rows = rows.select(0, slots.clone());
            rows.into_data().iter::<f32>().collect()
        };
        Self {
            k: keys(cache.k()),
            v: keys(cache.v()),
            cu_seqlens_k,
            cu_seqlens_q: ints(metadata.cu_seqlens_q().tensor())
                .into_iter()
                .map(|offset| offset as usize)
                .collect(),
        }
    }

    /// The keys that a row sees, in order; `None` if it sees none, or if keys and values differ.
    fn of_row(&self, row: usize) -> Option<&[f32]> {
        let sequence = self.cu_seqlens_q.partition_point(|begin| *begin <= row) - 1;
        let num_after = self.cu_seqlens_q[sequence + 1] - 1 - row;
        let begin = self.cu_seqlens_k[sequence];
        let end = self.cu_seqlens_k[sequence + 1].checked_sub(num_after)?;
        let keys = begin * HEAD_DIM..end * HEAD_DIM;
        let (k, v) = (self.k.get(keys.clone())?, self.v.get(keys)?);
        (!k.is_empty() && k == v).then_some(k)
    }
}

/// Logits between -4 and 4 that depend on every token of `history` and on its length.
///
/// # Shapes
/// - returns: `[vocab_size]`
pub fn hashed_logits(history: &[u32], vocab_size: usize) -> Vec<f32> {
    let state = history.iter().fold(history.len() as u64, |state, token| {
        mix(state ^ u64::from(*token).wrapping_add(0x9E37_79B9_7F4A_7C15))
    });
    // 16 bits of hash per logit: exact in f32.
    let logit = |token: u64| (mix(state ^ token.wrapping_mul(0xD6E8_FEB8_6659_FD93)) >> 48) as f32;
    (0..vocab_size as u64)
        .map(|token| logit(token) / 8192.0 - 4.0)
        .collect()
}

fn one_hot(token: u32, vocab_size: usize) -> Vec<f32> {
    (0..vocab_size as u32)
        .map(|other| if other == token { 8.0 } else { 0.0 })
        .collect()
}

/// A bijective mix of 64 bits.
///
/// # Source
/// The finalizer of SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}

fn ints(tensor: &Tensor<1, Int>) -> Vec<i64> {
    tensor.clone().into_data().iter::<i64>().collect()
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn_paged::{AttentionMetadataBuilder, CacheGeometry, SequenceStep};

    use super::*;

    fn tensor(values: &[i32], device: &Device) -> Tensor<1, Int> {
        Tensor::from_data(
            TensorData::new(values.to_vec(), [values.len()]),
            (device, DType::I32),
        )
    }

    /// Logits of a decode at position 2 of a sequence in block 1, after two tokens were stored into `block`.
    fn logits_after_storing_into(block: u32) -> Vec<f32> {
        let device = Device::flex();
        let model = FakeModel::hashed(7, &device);
        let geometry = CacheGeometry {
            num_blocks: 3,
            block_size: 4,
            num_kv_heads: 1,
            head_dim: 2,
        };
        let mut cache = PagedKvCache::new(1, geometry, DType::F32, &device).unwrap();
        let mut run = |block: u32, tokens: &[i32], positions: &[i32], logits_indices: &[i32]| {
            let blocks = [block];
            let mut builder = AttentionMetadataBuilder::new(geometry);
            let (num_computed, num_new) = (positions[0] as usize, tokens.len());
            builder.push(SequenceStep {
                blocks: &blocks,
                num_computed,
                num_new,
            });
            let input = ModelInput {
                token_ids: tensor(tokens, &device),
                positions: tensor(positions, &device),
                attention: builder.build(&device).unwrap(),
                logits_indices: tensor(logits_indices, &device),
            };
            model
                .forward(&input, &mut cache)
                .into_data()
                .iter::<f32>()
                .collect::<Vec<f32>>()
        };
        assert!(run(block, &[5, 6], &[0, 1], &[]).is_empty());
        run(1, &[3], &[2], &[0])
    }

    #[test]
    fn the_logits_are_those_of_the_history_in_the_blocks() {
        assert_eq!(logits_after_storing_into(1), hashed_logits(&[5, 6, 3], 7));
        assert!(
            logits_after_storing_into(2)
                .iter()
                .all(|logit| logit.is_nan())
        );
    }

    #[test]
    fn hashed_logits_differ_for_every_history_and_stay_in_range() {
        let histories: [&[u32]; 5] = [&[], &[0], &[0, 0], &[1, 0], &[0, 1]];
        let rows = histories.map(|history| hashed_logits(history, 9));
        for (at, row) in rows.iter().enumerate() {
            assert!(row.iter().all(|logit| (-4.0..4.0).contains(logit)));
            assert!(rows[..at].iter().all(|other| other != row));
        }
    }
}
