//! The worked step of ARCHITECTURE.md, and inconsistent sequence states.

use burn::tensor::{DType, Device};
use burn_paged::*;

use crate::devices::devices;

const GEOMETRY: CacheGeometry = CacheGeometry {
    num_blocks: 16,
    block_size: 4,
    num_kv_heads: 1,
    head_dim: 8,
};

fn build(steps: &[SequenceStep<'_>], device: &Device) -> Result<AttentionMetadata, MetadataError> {
    let mut builder = AttentionMetadataBuilder::new(GEOMETRY);
    steps.iter().for_each(|step| {
        builder.push(*step);
    });
    builder.build(device)
}

#[test]
fn the_worked_step_gives_the_written_numbers() {
    for (name, device) in devices() {
        let steps = [
            SequenceStep {
                blocks: &[7, 2],
                num_computed: 4,
                num_new: 2,
            },
            SequenceStep {
                blocks: &[3, 9],
                num_computed: 5,
                num_new: 1,
            },
        ];
        let metadata = build(&steps, &device).unwrap();
        assert_eq!(metadata.num_tokens(), 3);
        assert_eq!(metadata.cu_seqlens_q().host(), [0, 2, 3]);
        assert_eq!(metadata.cu_seqlens_k().host(), [0, 6, 12]);
        assert_eq!(metadata.seq_lens().host(), [6, 6]);
        assert_eq!(metadata.block_table().row(0), [7, 2]);
        assert_eq!(metadata.block_table().row(1), [3, 9]);
        assert_eq!(metadata.slot_mapping().host(), [8, 9, 37]);
        assert!(!metadata.is_prefix_free());
        let slots = metadata.slot_mapping().tensor().clone().into_data();
        assert_eq!(
            slots.iter::<i32>().collect::<Vec<_>>(),
            [8, 9, 37],
            "{name}"
        );
        let table = metadata.block_table().tensor().clone().into_data();
        assert_eq!(
            table.iter::<i32>().collect::<Vec<_>>(),
            [7, 2, 3, 9],
            "{name}"
        );
    }
}

#[test]
fn empty_steps_are_legal() {
    for (_, device) in devices() {
        let metadata = build(&[], &device).unwrap();
        assert_eq!((metadata.num_tokens(), metadata.num_seqs()), (0, 0));
        assert!(metadata.is_prefix_free());
        let empty = SequenceStep {
            blocks: &[],
            num_computed: 0,
            num_new: 0,
        };
        assert_eq!(build(&[empty, empty], &device).unwrap().num_seqs(), 2);
    }
}

#[test]
fn inconsistent_states_are_refused_with_the_numbers() {
    let (_, device) = devices().remove(0);
    let error = |steps: &[SequenceStep<'_>]| build(steps, &device).unwrap_err().to_string();
    let short = SequenceStep {
        blocks: &[1],
        num_computed: 4,
        num_new: 1,
    };
    assert_eq!(
        error(&[short]),
        "sequence 0: 5 tokens need 2 blocks of 4, got 1"
    );
    let outside = SequenceStep {
        blocks: &[16],
        num_computed: 0,
        num_new: 1,
    };
    assert_eq!(
        error(&[outside]),
        "sequence 0: block 16 is not below num_blocks 16"
    );
    let writer = SequenceStep {
        blocks: &[5],
        num_computed: 2,
        num_new: 1,
    };
    assert_eq!(
        error(&[writer, writer]),
        "slot 22 is written by more than one token of the step"
    );
    let cumulative = |values: Vec<i32>| CuSeqlens::new(values, &device).unwrap_err().to_string();
    assert!(cumulative(vec![0, 3, 2]).contains("found 2 at index 2"));
    assert!(cumulative(vec![1, 3]).contains("found 1 at index 0"));
    assert!(cumulative(vec![]).contains("at index 0"));
    let lens = SequenceLengths::new([1], &device).unwrap();
    let table = BlockTable::new(&[&[0]], 16, &device).unwrap();
    let slots = SlotMapping::new(vec![0, 1], &device).unwrap();
    let cu = CuSeqlens::from_lens([2], &device).unwrap();
    let error = AttentionMetadata::new(cu, lens, table, slots, 4).unwrap_err();
    assert_eq!(
        error.to_string(),
        "sequence 0: 2 query tokens exceed its length 1"
    );
}

#[test]
fn caches_that_cannot_be_are_refused() {
    let (_, device) = devices().remove(0);
    let new = |geometry, dtype| PagedKvCache::new(2, geometry, dtype, &device).map(|_| ());
    let zero = CacheGeometry {
        block_size: 0,
        ..GEOMETRY
    };
    assert_eq!(
        new(zero, DType::F32),
        Err(CacheError::Zero { what: "block_size" })
    );
    let (num_blocks, block_size) = (1 << 30, 4);
    let huge = CacheGeometry {
        num_blocks,
        block_size,
        ..GEOMETRY
    };
    assert_eq!(
        new(huge, DType::F32),
        Err(CacheError::TooManySlots {
            num_blocks,
            block_size
        })
    );
    assert_eq!(
        PagedKvCache::bytes_per_block(2, GEOMETRY, DType::F16),
        2 * 2 * 4 * 8 * 2
    );
    let cache = PagedKvCache::new(2, GEOMETRY, DType::F32, &device).unwrap();
    assert_eq!(
        (cache.num_layers(), cache.layer(1).geometry()),
        (2, GEOMETRY)
    );
}
