//! Sequence states → the index tensors of a step.

use burn::tensor::Device;

use super::{
    AttentionMetadata, BlockTable, CacheGeometry, CuSeqlens, MetadataError, SequenceLengths,
    SlotMapping,
};

/// One sequence of a step: what is in the cache already and what is computed now.
#[derive(Debug, Clone, Copy)]
pub struct SequenceStep<'a> {
    /// Physical blocks of the sequence, in order; they cover `num_computed + num_new` tokens.
    pub blocks: &'a [u32],
    /// Tokens whose K and V are in the cache.
    pub num_computed: usize,
    /// Tokens computed in this step.
    pub num_new: usize,
}

/// Turns sequence states into [`AttentionMetadata`]; the only place that computes slots from blocks on the host.
///
/// # Examples
/// Two sequences in blocks of 4: A has 4 tokens cached in block 7 and computes 2 more into block 2; B has 5 tokens in
/// blocks 3 and 9 and decodes its sixth.
#[cfg_attr(feature = "flex", doc = "```")]
#[cfg_attr(not(feature = "flex"), doc = "```no_run")]
/// use burn_paged::{AttentionMetadataBuilder, CacheGeometry, SequenceStep};
///
/// # fn main() -> Result<(), burn_paged::MetadataError> {
/// let device = burn::tensor::Device::default();
/// let geometry = CacheGeometry { num_blocks: 16, block_size: 4, num_kv_heads: 1, head_dim: 8 };
/// let mut builder = AttentionMetadataBuilder::new(geometry);
/// builder.push(SequenceStep { blocks: &[7, 2], num_computed: 4, num_new: 2 });
/// builder.push(SequenceStep { blocks: &[3, 9], num_computed: 5, num_new: 1 });
/// let metadata = builder.build(&device)?;
/// assert_eq!(metadata.cu_seqlens_q().host(), [0, 2, 3]);
/// assert_eq!(metadata.seq_lens().host(), [6, 6]);
/// assert_eq!(metadata.slot_mapping().host(), [8, 9, 37]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct AttentionMetadataBuilder<'a> {
    geometry: CacheGeometry,
    sequences: Vec<SequenceStep<'a>>,
}

impl<'a> AttentionMetadataBuilder<'a> {
    /// An empty step over a cache of the given geometry.
    pub fn new(geometry: CacheGeometry) -> Self {
        Self {
            geometry,
            sequences: Vec::new(),
        }
    }

    /// Adds a sequence; its query rows follow those of the sequences before it.
    pub fn push(&mut self, sequence: SequenceStep<'a>) -> &mut Self {
        self.sequences.push(sequence);
        self
    }

    /// Builds and uploads the index tensors.
    ///
    /// # Errors
    /// A [`MetadataError`] if a block does not exist, a sequence has too few blocks, or two tokens of the step would
    /// be written to one slot.
    pub fn build(&self, device: &Device) -> Result<AttentionMetadata, MetadataError> {
        let CacheGeometry {
            num_blocks,
            block_size,
            ..
        } = self.geometry;
        let rows: Vec<&[u32]> = self
            .sequences
            .iter()
            .map(|sequence| sequence.blocks)
            .collect();
        let block_table = BlockTable::new(&rows, num_blocks, device)?;
        let mut slots = Vec::new();
        for (at, sequence) in self.sequences.iter().enumerate() {
            self.push_slots(at, sequence, &mut slots)?;
        }
        let query_lens = self.sequences.iter().map(|sequence| sequence.num_new);
        let lens = self
            .sequences
            .iter()
            .map(|sequence| sequence.num_computed + sequence.num_new);
        AttentionMetadata::new(
            CuSeqlens::from_lens(query_lens, device)?,
            SequenceLengths::new(lens, device)?,
            block_table,
            SlotMapping::new(slots, device)?,
            block_size,
        )
    }

    fn push_slots(
        &self,
        at: usize,
        sequence: &SequenceStep<'_>,
        slots: &mut Vec<i32>,
    ) -> Result<(), MetadataError> {
        let block_size = self.geometry.block_size;
        let num_tokens = sequence.num_computed + sequence.num_new;
        let needed = num_tokens.div_ceil(block_size);
        if sequence.blocks.len() < needed {
            let found = sequence.blocks.len();
            return Err(MetadataError::TooFewBlocks {
                sequence: at,
                num_tokens,
                needed,
                found,
                block_size,
            });
        }
        for position in sequence.num_computed..num_tokens {
            let block = sequence.blocks[position / block_size] as usize;
            let slot = block * block_size + position % block_size;
            let slot = i32::try_from(slot).map_err(|_| MetadataError::TooLarge {
                what: "slot",
                value: slot,
            })?;
            slots.push(slot);
        }
        Ok(())
    }
}
