//! A scheduled batch as the model reads it. The only place where host indices become tensors, besides the words of a
//! step that is replayed (`replay/`).

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_paged::{AttentionMetadataBuilder, CacheGeometry, MetadataError, SequenceStep};
use burn_paged_model::ModelInput;

use crate::scheduler::ScheduledBatch;
use crate::sequence::RunningSequence;

/// Packs the tokens of a step in the order of the batch; `running` is what its indices refer to.
///
/// # Shapes
/// - `token_ids`, `positions`: `[num_tokens]` i32
/// - `logits_indices`: `[num_logits]` i32, the last row of each sequence that samples, in the order of the batch
///
/// # Errors
/// [`MetadataError`] if the sequences do not fit the cache; then scheduler and cache disagree.
pub(crate) fn model_input(
    batch: &ScheduledBatch,
    running: &[RunningSequence],
    geometry: CacheGeometry,
    device: &Device,
) -> Result<ModelInput, MetadataError> {
    let num_tokens = batch.num_tokens();
    let mut token_ids = Vec::with_capacity(num_tokens);
    let mut positions = Vec::with_capacity(num_tokens);
    let mut logits_indices = Vec::new();
    let mut tables = Vec::with_capacity(batch.sequences.len());
    for scheduled in &batch.sequences {
        let RunningSequence { sequence, blocks } = &running[scheduled.index];
        let begin = blocks.num_computed_tokens();
        let new = begin..begin + scheduled.num_tokens;
        // Tokens are below the vocabulary and positions below the slots of the cache, both of which fit an i32.
        positions.extend(new.clone().map(|position| position as i32));
        token_ids.extend(sequence.tokens[new].iter().map(|token| *token as i32));
        if scheduled.samples {
            logits_indices.push(token_ids.len() as i32 - 1);
        }
        let table: Vec<u32> = blocks.block_ids().iter().map(|block| block.get()).collect();
        tables.push((table, begin, scheduled.num_tokens));
    }
    let mut builder = AttentionMetadataBuilder::new(geometry);
    for (table, num_computed, num_new) in &tables {
        let (num_computed, num_new) = (*num_computed, *num_new);
        builder.push(SequenceStep {
            blocks: table,
            num_computed,
            num_new,
        });
    }
    Ok(ModelInput {
        attention: builder.build(device)?,
        token_ids: upload(token_ids, device),
        positions: upload(positions, device),
        logits_indices: upload(logits_indices, device),
    })
}

fn upload(values: Vec<i32>, device: &Device) -> Tensor<1, Int> {
    let len = values.len();
    Tensor::from_data(TensorData::new(values, [len]), (device, DType::I32))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn_paged_kv_cache::CacheKey;

    use super::*;
    use crate::RequestId;
    use crate::scheduler::Scheduler;
    use crate::sequence::Sequence;

    fn ints(tensor: &Tensor<1, Int>) -> Vec<i64> {
        tensor.clone().into_data().iter::<i64>().collect()
    }

    /// Runs a step in which the only sequence samples `token`.
    fn step(scheduler: &mut Scheduler, token: u32) {
        let batch = scheduler.schedule();
        assert_eq!(batch.sequences.len(), 1);
        scheduler.mark_computed(&batch);
        scheduler.push_token(0, token);
    }

    /// B has 5 tokens computed and decodes its sixth; of A's prompt of 6 tokens, the first block is cached.
    #[test]
    fn a_decode_and_a_prompt_behind_a_cached_block() {
        let mut scheduler = Scheduler::small(16);
        let add = |scheduler: &mut Scheduler, id: u64, prompt: &[u32]| {
            let id = RequestId::new(id);
            scheduler.add(Sequence::new(id, prompt.to_vec(), CacheKey::default()));
            id
        };
        let first = add(&mut scheduler, 0, &[10, 11, 12, 13]);
        step(&mut scheduler, 99);
        assert!(scheduler.remove(first), "its block 0 stays cached");
        add(&mut scheduler, 1, &[20, 21, 22, 23]);
        step(&mut scheduler, 24);
        step(&mut scheduler, 25);
        add(&mut scheduler, 2, &[10, 11, 12, 13, 14, 15]);

        let batch = scheduler.schedule();
        let geometry = CacheGeometry {
            num_blocks: 16,
            block_size: 4,
            num_kv_heads: 1,
            head_dim: 2,
        };
        let input = model_input(&batch, scheduler.running(), geometry, &Device::flex()).unwrap();
        assert_eq!(ints(&input.token_ids), [25, 14, 15]);
        assert_eq!(ints(&input.positions), [5, 4, 5]);
        assert_eq!(ints(&input.logits_indices), [0, 2]);
        let attention = &input.attention;
        assert_eq!(attention.cu_seqlens_q().host(), [0, 1, 3]);
        assert_eq!(attention.seq_lens().host(), [6, 6]);
        assert_eq!(attention.block_table().row(0), [1, 2]);
        assert_eq!(attention.block_table().row(1), [0, 3]);
        assert_eq!(
            attention.slot_mapping().host(),
            [2 * 4 + 1, 3 * 4, 3 * 4 + 1]
        );
    }

    #[test]
    fn blocks_that_the_cache_does_not_have_are_an_error() {
        let mut scheduler = Scheduler::small(16);
        scheduler.add(Sequence::new(
            RequestId::new(0),
            vec![1; 9],
            CacheKey::default(),
        ));
        let batch = scheduler.schedule();
        let geometry = CacheGeometry {
            num_blocks: 2,
            block_size: 4,
            num_kv_heads: 1,
            head_dim: 2,
        };
        let input = model_input(&batch, scheduler.running(), geometry, &Device::flex());
        assert!(matches!(
            input,
            Err(MetadataError::BlockOutOfRange { block: 2, .. })
        ));
    }
}
