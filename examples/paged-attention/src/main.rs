//! The ops alone: two sequences share one paged cache, on a Burn user's own tensors.
//!
//! Run with: cargo run -p burn-paged-example-paged-attention
#![allow(clippy::print_stdout)] // An example shows its results on the terminal.

use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_paged::{
    AttentionMetadataBuilder, AttentionOptions, CacheGeometry, PagedKvCache, SequenceStep,
    gather_kv, paged_attention, store_kv, varlen_attention,
};

const NUM_HEADS: usize = 4;
const GEOMETRY: CacheGeometry = CacheGeometry {
    num_blocks: 8,
    block_size: 4,
    num_kv_heads: 2,
    head_dim: 16,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::default();
    let mut cache = PagedKvCache::new(1, GEOMETRY, DType::F32, &device)?;
    let random = |tokens: usize, heads: usize| {
        let shape = [tokens, heads, GEOMETRY.head_dim];
        Tensor::<3>::random(shape, Distribution::Normal(0.0, 1.0), (&device, DType::F32))
    };

    // Step 1: two prompts, of 6 and 3 tokens. Which blocks they get is up to the caller; the order does not matter.
    let (first, second): (&[u32], &[u32]) = (&[5, 2], &[7]);
    let mut builder = AttentionMetadataBuilder::new(GEOMETRY);
    builder.push(SequenceStep {
        blocks: first,
        num_computed: 0,
        num_new: 6,
    });
    builder.push(SequenceStep {
        blocks: second,
        num_computed: 0,
        num_new: 3,
    });
    let prompts = builder.build(&device)?;

    let (q, k, v) = (random(9, NUM_HEADS), random(9, 2), random(9, 2));
    store_kv(
        cache.layer_mut(0),
        k.clone(),
        v.clone(),
        prompts.slot_mapping(),
    );
    let options = AttentionOptions::causal();
    // Nothing was cached before, so attention over the packed keys is the same as attention over the pages.
    let packed = varlen_attention(
        q.clone(),
        k,
        v,
        prompts.cu_seqlens_q(),
        prompts.cu_seqlens_q(),
        options,
    );
    let paged = paged_attention(q, cache.layer(0), &prompts, options);
    println!(
        "prompts: packed and paged differ by {:.1e}",
        difference(packed, paged)
    );

    // Step 2: the first sequence decodes one token, the second takes a chunk of two. Both see their cached prefix.
    let mut builder = AttentionMetadataBuilder::new(GEOMETRY);
    builder.push(SequenceStep {
        blocks: first,
        num_computed: 6,
        num_new: 1,
    });
    builder.push(SequenceStep {
        blocks: &[7, 0],
        num_computed: 3,
        num_new: 2,
    });
    let step = builder.build(&device)?;
    store_kv(
        cache.layer_mut(0),
        random(3, 2),
        random(3, 2),
        step.slot_mapping(),
    );
    let q = random(3, NUM_HEADS);
    let paged = paged_attention(q.clone(), cache.layer(0), &step, options);

    // The other way to the same result: gather the sequences out of their blocks, then attend over packed keys.
    let (k, v) = gather_kv(cache.layer(0), &step);
    println!("gathered keys: {:?}", k.dims());
    let packed = varlen_attention(q, k, v, step.cu_seqlens_q(), step.cu_seqlens_k(), options);
    println!(
        "decode and chunk: packed and paged differ by {:.1e}",
        difference(packed, paged)
    );
    Ok(())
}

/// The largest absolute difference.
fn difference(a: Tensor<3>, b: Tensor<3>) -> f32 {
    (a - b).abs().max().into_scalar()
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_runs() {
        super::main().unwrap();
    }
}
