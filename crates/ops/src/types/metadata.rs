//! Index tensors of a step. Each keeps its host values beside the device tensor: checks and plans read the host
//! copy, kernels the tensor, and nothing is ever read back. A step that is captured and replayed has bounds in place of
//! the host values.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::CacheGeometry;

/// Why a piece of step metadata was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MetadataError {
    /// A table entry names a block that does not exist.
    #[error("sequence {sequence}: block {block} is not below num_blocks {num_blocks}")]
    BlockOutOfRange {
        /// Row of the table.
        sequence: usize,
        /// The entry found.
        block: i64,
        /// Number of blocks of the cache.
        num_blocks: usize,
    },
    /// A sequence has fewer blocks than its tokens need.
    #[error(
        "sequence {sequence}: {num_tokens} tokens need {needed} blocks of {block_size}, got {found}"
    )]
    TooFewBlocks {
        /// Row of the table.
        sequence: usize,
        /// Tokens of the sequence after this step.
        num_tokens: usize,
        /// Blocks that these tokens need.
        needed: usize,
        /// Blocks given.
        found: usize,
        /// Tokens per block.
        block_size: usize,
    },
    /// Two tokens of one step would be written to the same slot.
    #[error("slot {slot} is written by more than one token of the step")]
    DuplicateSlot {
        /// The slot.
        slot: i32,
    },
    /// Cumulative lengths do not start at 0 or fall.
    #[error("cumulative lengths must start at 0 and never fall: found {found} at index {index}")]
    NotCumulative {
        /// Index of the offending entry.
        index: usize,
        /// The entry found.
        found: i64,
    },
    /// A sequence has more queries than keys, which no step of a cache can have.
    #[error("sequence {sequence}: {query_len} query tokens exceed its length {seq_len}")]
    QueryLongerThanSequence {
        /// Index of the sequence.
        sequence: usize,
        /// Number of query tokens.
        query_len: usize,
        /// Length after this step.
        seq_len: usize,
    },
    /// Two pieces of metadata disagree on a count.
    #[error("{what}: expected {expected}, found {found}")]
    Count {
        /// What was counted.
        what: &'static str,
        /// Count that the other pieces imply.
        expected: usize,
        /// Count found.
        found: usize,
    },
    /// A count does not fit the i32 that index tensors hold.
    #[error("{what} {value} does not fit a 32-bit index")]
    TooLarge {
        /// What was counted.
        what: &'static str,
        /// The count.
        value: usize,
    },
}

/// A 1-D i32 tensor on `device` with the given values.
fn upload(values: &[i32], device: &Device) -> Tensor<1, Int> {
    Tensor::from_data(
        TensorData::new(values.to_vec(), [values.len()]),
        (device, DType::I32),
    )
}

fn index(what: &'static str, value: usize) -> Result<i32, MetadataError> {
    i32::try_from(value).map_err(|_| MetadataError::TooLarge { what, value })
}

/// Cumulative lengths of packed sequences, `[num_seqs + 1]` i32: sequence `s` has rows `cu[s]..cu[s + 1]`.
///
/// Invariant, held by the constructors: starts at 0, never falls, ends at the number of packed rows.
#[derive(Debug, Clone)]
pub struct CuSeqlens {
    host: Vec<i32>,
    device: Tensor<1, Int>,
}

impl CuSeqlens {
    /// From cumulative values.
    ///
    /// # Errors
    /// [`MetadataError::NotCumulative`] if the values are empty, do not start at 0 or fall.
    pub fn new(values: Vec<i32>, device: &Device) -> Result<Self, MetadataError> {
        if values.first() != Some(&0) {
            let found = values.first().map_or(-1, |value| i64::from(*value));
            return Err(MetadataError::NotCumulative { index: 0, found });
        }
        if let Some(at) = values.windows(2).position(|pair| pair[1] < pair[0]) {
            let found = i64::from(values[at + 1]);
            return Err(MetadataError::NotCumulative {
                index: at + 1,
                found,
            });
        }
        let device = upload(&values, device);
        Ok(Self {
            host: values,
            device,
        })
    }

    /// From one length per sequence.
    ///
    /// # Errors
    /// [`MetadataError::TooLarge`] if the sum does not fit an i32.
    pub fn from_lens(
        lens: impl IntoIterator<Item = usize>,
        device: &Device,
    ) -> Result<Self, MetadataError> {
        let mut values = vec![0];
        let mut total = 0usize;
        for len in lens {
            total = total.saturating_add(len);
            values.push(index("packed rows", total)?);
        }
        Self::new(values, device)
    }

    /// Values that only the device knows, for so many rows in all. In their place the host has one row for each sequence where
    /// there are as many, and all rows in the first sequence where there are not.
    fn on_device(num_rows: usize, device: Tensor<1, Int>) -> Self {
        let num_seqs = device.dims()[0] - 1;
        let host = match num_rows == num_seqs {
            true => (0..=num_rows as i32).collect(),
            false => (0..=num_seqs)
                .map(|at| if at == 0 { 0 } else { num_rows as i32 })
                .collect(),
        };
        Self { host, device }
    }

    /// Number of sequences.
    pub fn num_seqs(&self) -> usize {
        self.host.len() - 1
    }

    /// Number of packed rows.
    pub fn total(&self) -> usize {
        self.host[self.host.len() - 1] as usize
    }

    /// Length of each sequence.
    pub fn lens(&self) -> impl Iterator<Item = usize> + '_ {
        self.host
            .windows(2)
            .map(|pair| (pair[1] - pair[0]) as usize)
    }

    /// The longest sequence, 0 for an empty batch.
    pub fn max_len(&self) -> usize {
        self.lens().max().unwrap_or(0)
    }

    /// The values on the host.
    pub fn host(&self) -> &[i32] {
        &self.host
    }

    /// The values on the device, `[num_seqs + 1]` i32.
    pub fn tensor(&self) -> &Tensor<1, Int> {
        &self.device
    }
}

/// Length of each sequence in the cache after this step, `[num_seqs]` i32.
#[derive(Debug, Clone)]
pub struct SequenceLengths {
    host: Vec<i32>,
    device: Tensor<1, Int>,
}

impl SequenceLengths {
    /// From one length per sequence.
    ///
    /// # Errors
    /// [`MetadataError::TooLarge`] if a length does not fit an i32.
    pub fn new(
        lens: impl IntoIterator<Item = usize>,
        device: &Device,
    ) -> Result<Self, MetadataError> {
        let host = lens
            .into_iter()
            .map(|len| index("sequence length", len))
            .collect::<Result<Vec<_>, _>>()?;
        let device = upload(&host, device);
        Ok(Self { host, device })
    }

    /// Lengths that only the device knows, none above `bound`, which the host has in their place.
    fn up_to(bound: i32, device: Tensor<1, Int>) -> Self {
        let host = vec![bound; device.dims()[0]];
        Self { host, device }
    }

    /// Number of sequences.
    pub fn num_seqs(&self) -> usize {
        self.host.len()
    }

    /// The longest sequence, 0 for an empty batch.
    pub fn max_len(&self) -> usize {
        self.host.iter().copied().max().unwrap_or(0) as usize
    }

    /// The values on the host; none is negative.
    pub fn host(&self) -> &[i32] {
        &self.host
    }

    /// The values on the device, `[num_seqs]` i32.
    pub fn tensor(&self) -> &Tensor<1, Int> {
        &self.device
    }
}

/// Where each new token's K and V are written, `[num_tokens]` i32: `block * block_size + offset`.
///
/// A negative slot, or one past the capacity of the cache, is skipped: this is how padding rows are written nowhere.
/// Invariant: no slot that is not negative occurs twice.
#[derive(Debug, Clone)]
pub struct SlotMapping {
    host: Vec<i32>,
    device: Tensor<1, Int>,
}

impl SlotMapping {
    /// From one slot per token.
    ///
    /// # Errors
    /// [`MetadataError::DuplicateSlot`] if two tokens would be written to one slot.
    pub fn new(slots: Vec<i32>, device: &Device) -> Result<Self, MetadataError> {
        let mut sorted: Vec<i32> = slots.iter().copied().filter(|slot| *slot >= 0).collect();
        sorted.sort_unstable();
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(MetadataError::DuplicateSlot { slot: pair[0] });
        }
        let device = upload(&slots, device);
        Ok(Self {
            host: slots,
            device,
        })
    }

    /// Slots that only the device knows; the host has -1 in their place.
    fn on_device(device: Tensor<1, Int>) -> Self {
        let host = vec![-1; device.dims()[0]];
        Self { host, device }
    }

    /// Number of tokens.
    pub fn num_tokens(&self) -> usize {
        self.host.len()
    }

    /// The values on the host.
    pub fn host(&self) -> &[i32] {
        &self.host
    }

    /// The values on the device, `[num_tokens]` i32.
    pub fn tensor(&self) -> &Tensor<1, Int> {
        &self.device
    }
}

/// Physical blocks of each sequence, padded to one width, `[num_seqs, max_blocks]` i32.
///
/// Entries past a sequence's length are padding and never read. Every entry is below `num_blocks`, or -1 for padding.
#[derive(Debug, Clone)]
pub struct BlockTable {
    host: Vec<i32>,
    num_seqs: usize,
    max_blocks: usize,
    /// No entry is above it; -1 for a table of padding alone.
    largest: i32,
    device: Tensor<2, Int>,
}

impl BlockTable {
    /// From the blocks of each sequence; shorter rows are padded with -1.
    ///
    /// # Errors
    /// [`MetadataError::BlockOutOfRange`] if a block is not below `num_blocks`.
    pub fn new(rows: &[&[u32]], num_blocks: usize, device: &Device) -> Result<Self, MetadataError> {
        // A width of at least one keeps the tensor non-empty for batches of empty sequences.
        let max_blocks = rows.iter().map(|row| row.len()).max().unwrap_or(0).max(1);
        let mut host = vec![-1; rows.len() * max_blocks];
        let mut largest = -1;
        for (sequence, row) in rows.iter().enumerate() {
            for (at, block) in row.iter().enumerate() {
                if *block as usize >= num_blocks {
                    let block = i64::from(*block);
                    return Err(MetadataError::BlockOutOfRange {
                        sequence,
                        block,
                        num_blocks,
                    });
                }
                let block = index("block", *block as usize)?;
                largest = largest.max(block);
                host[sequence * max_blocks + at] = block;
            }
        }
        let num_seqs = rows.len();
        let data = TensorData::new(host.clone(), [num_seqs, max_blocks]);
        let device = Tensor::from_data(data, (device, DType::I32));
        Ok(Self {
            host,
            num_seqs,
            max_blocks,
            largest,
            device,
        })
    }

    /// A table that only the device knows, of blocks up to `largest`; the host has padding in its place.
    fn on_device(largest: i32, device: Tensor<2, Int>) -> Self {
        let [num_seqs, max_blocks] = device.dims();
        Self {
            host: vec![-1; num_seqs * max_blocks],
            num_seqs,
            max_blocks,
            largest,
            device,
        }
    }

    /// Number of sequences.
    pub fn num_seqs(&self) -> usize {
        self.num_seqs
    }

    /// Width of the table, at least 1.
    pub fn max_blocks(&self) -> usize {
        self.max_blocks
    }

    /// No entry is above it; -1 for a table of padding alone.
    pub(crate) fn largest(&self) -> i32 {
        self.largest
    }

    /// The row of one sequence on the host, padding included.
    ///
    /// # Panics
    /// If `sequence` is not below [`num_seqs`](Self::num_seqs).
    pub fn row(&self, sequence: usize) -> &[i32] {
        &self.host[sequence * self.max_blocks..(sequence + 1) * self.max_blocks]
    }

    /// The values on the device, `[num_seqs, max_blocks]` i32.
    pub fn tensor(&self) -> &Tensor<2, Int> {
        &self.device
    }
}

/// Index tensors of a step that is replayed, all i32 and contiguous, for [`AttentionMetadata::for_replays`]: `num_tokens` new
/// tokens of `num_seqs` sequences, of which some of either may be padding.
///
/// What they hold changes from replay to replay. At each one it must be what [`AttentionMetadata::new`] would accept,
/// besides padding, which nobody checks on a device. A decode has as many tokens as sequences: one new token for each.
#[derive(Debug, Clone)]
pub struct ReplayedStep {
    /// Where the tokens of each sequence begin and end, `[num_seqs + 1]`. Tokens past the last value are padding. For a decode
    /// `0..=num_seqs`.
    pub cu_seqlens_q: Tensor<1, Int>,
    /// Keys of each sequence after the step, at most `max_blocks * block_size`, `[num_seqs]`. 0 is padding: its rows see
    /// nothing, and attention gives 0 for them.
    pub seq_lens: Tensor<1, Int>,
    /// Blocks of each sequence, `[num_seqs, max_blocks]`; what lies past its length is not read.
    pub block_table: Tensor<2, Int>,
    /// Where each token is written, `[num_tokens]`; -1 for padding, which is written nowhere.
    pub slot_mapping: Tensor<1, Int>,
}

/// All that the attention ops know of a step, built once and shared by all layers.
///
/// Invariants, held by [`AttentionMetadata::new`]: the pieces agree on the number of sequences and tokens; no
/// sequence has more queries than keys; the table of each sequence covers its length.
#[derive(Debug, Clone)]
pub struct AttentionMetadata {
    cu_seqlens_q: CuSeqlens,
    /// `None` where only the device knows the lengths.
    cu_seqlens_k: Option<CuSeqlens>,
    seq_lens: SequenceLengths,
    block_table: BlockTable,
    slot_mapping: SlotMapping,
    block_size: usize,
}

impl AttentionMetadata {
    /// Joins the pieces of a step.
    ///
    /// # Errors
    /// A [`MetadataError`] with the numbers if the pieces disagree.
    pub fn new(
        cu_seqlens_q: CuSeqlens,
        seq_lens: SequenceLengths,
        block_table: BlockTable,
        slot_mapping: SlotMapping,
        block_size: usize,
    ) -> Result<Self, MetadataError> {
        let num_seqs = cu_seqlens_q.num_seqs();
        let count = |what, expected, found| match expected == found {
            true => Ok(()),
            false => Err(MetadataError::Count {
                what,
                expected,
                found,
            }),
        };
        count("sequence lengths", num_seqs, seq_lens.num_seqs())?;
        count("rows of the block table", num_seqs, block_table.num_seqs())?;
        count("slots", cu_seqlens_q.total(), slot_mapping.num_tokens())?;
        for (sequence, query_len) in cu_seqlens_q.lens().enumerate() {
            let seq_len = seq_lens.host()[sequence] as usize;
            if query_len > seq_len {
                return Err(MetadataError::QueryLongerThanSequence {
                    sequence,
                    query_len,
                    seq_len,
                });
            }
            let needed = seq_len.div_ceil(block_size);
            let row = block_table.row(sequence);
            let found = row.iter().take_while(|block| **block >= 0).count();
            if found < needed {
                return Err(MetadataError::TooFewBlocks {
                    sequence,
                    num_tokens: seq_len,
                    needed,
                    found,
                    block_size,
                });
            }
        }
        let device = cu_seqlens_q.tensor().device();
        let lens = seq_lens.host().iter().map(|len| *len as usize);
        let cu_seqlens_k = Some(CuSeqlens::from_lens(lens, &device)?);
        Ok(Self {
            cu_seqlens_q,
            cu_seqlens_k,
            seq_lens,
            block_table,
            slot_mapping,
            block_size,
        })
    }

    /// A step that is captured once and replayed with other values in the same tensors.
    ///
    /// Nothing of a value is on the host, so nothing can be baked in. In place of the values the host has bounds: every
    /// length is `max_blocks * block_size`, the largest block is the last of the cache, rows of the table are padding,
    /// slots are -1, and all tokens are of the first sequence, unless there is one for each. Only ops whose kernels read the
    /// tensors take such metadata: [`gather_kv`](crate::gather_kv), whose result has the size of the lengths, and devices that
    /// run the reference refuse it.
    ///
    /// # Panics
    /// If the shapes disagree, or tokens or `max_blocks * block_size` do not fit an i32.
    pub fn for_replays(step: ReplayedStep, geometry: CacheGeometry) -> Self {
        let ReplayedStep {
            cu_seqlens_q,
            seq_lens,
            block_table,
            slot_mapping,
        } = step;
        let [num_seqs, max_blocks] = block_table.dims();
        let found = [cu_seqlens_q.dims()[0], seq_lens.dims()[0]];
        assert!(
            found == [num_seqs + 1, num_seqs],
            "a table of {num_seqs} sequences with {found:?} offsets and lengths"
        );
        let num_tokens = slot_mapping.dims()[0];
        let fits = |count: usize| {
            i32::try_from(count)
                .unwrap_or_else(|_| panic!("{count} tokens do not fit a 32-bit index"))
        };
        fits(num_tokens);
        let bound = fits(max_blocks * geometry.block_size);
        // The cache's constructor refuses more slots than an i32 counts, and blocks are fewer.
        let largest = geometry.num_blocks as i32 - 1;
        Self {
            cu_seqlens_q: CuSeqlens::on_device(num_tokens, cu_seqlens_q),
            cu_seqlens_k: None,
            seq_lens: SequenceLengths::up_to(bound, seq_lens),
            block_table: BlockTable::on_device(largest, block_table),
            slot_mapping: SlotMapping::on_device(slot_mapping),
            block_size: geometry.block_size,
        }
    }

    /// Whether the values are on the device alone, see [`for_replays`](Self::for_replays).
    pub fn is_for_replays(&self) -> bool {
        self.cu_seqlens_k.is_none()
    }

    /// Cumulative query lengths.
    pub fn cu_seqlens_q(&self) -> &CuSeqlens {
        &self.cu_seqlens_q
    }

    /// Cumulative key lengths: where [`gather_kv`](crate::gather_kv) puts each sequence.
    ///
    /// # Panics
    /// If the metadata [is for replays](Self::is_for_replays): the host does not know the lengths.
    pub fn cu_seqlens_k(&self) -> &CuSeqlens {
        self.cu_seqlens_k
            .as_ref()
            .expect("metadata for replays has no cumulative key lengths")
    }

    /// Key length of each sequence after this step.
    pub fn seq_lens(&self) -> &SequenceLengths {
        &self.seq_lens
    }

    /// Physical blocks of each sequence.
    pub fn block_table(&self) -> &BlockTable {
        &self.block_table
    }

    /// Where the new tokens are written.
    pub fn slot_mapping(&self) -> &SlotMapping {
        &self.slot_mapping
    }

    /// Tokens per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Number of query tokens of the step.
    pub fn num_tokens(&self) -> usize {
        self.cu_seqlens_q.total()
    }

    /// Number of sequences of the step.
    pub fn num_seqs(&self) -> usize {
        self.cu_seqlens_q.num_seqs()
    }

    /// True if no sequence has a cached prefix, so that attention over the packed K and V of the step is enough.
    pub fn is_prefix_free(&self) -> bool {
        let cu_seqlens_k = self.cu_seqlens_k.as_ref().map(CuSeqlens::host);
        cu_seqlens_k == Some(self.cu_seqlens_q.host())
    }
}
