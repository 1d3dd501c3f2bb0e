//! A cache of more elements than 32 bits count.

use burn_paged_kernels::{AttentionOptions, Keys, TensorRef, attention, gather_kv, store_kv};

use crate::arith::{Arith, Dtype};
use crate::compare::{assert_close, assert_same};
use crate::place::{Layout, Placed, ints, launcher};
use crate::random::Random;

/// 8 heads of 128 elements in blocks of 16: 16,384 elements a block, 2³² in 262,144 of them.
const NUM_BLOCKS: usize = 262_150;

/// Blocks on both sides of 2³¹ and 2³² elements.
const BLOCKS: [i32; 5] = [0, 131_071, 131_072, 262_143, 262_149];

/// Needs 17 GB on the device: on a GPU whose memory is large enough.
#[test]
fn offsets_past_32_bits_are_right() {
    let launcher = launcher();
    let properties = launcher.client().properties();
    let bytes = NUM_BLOCKS as u64 * 16_384 * 2;
    if launcher.facts().is_cpu() || properties.memory.max_page_size < bytes {
        println!("skipped: a cache of 2 x {bytes} bytes");
        return;
    }
    let dtype = Dtype::Bf16;
    let cache = || {
        let handle = launcher.client().empty(bytes as usize);
        TensorRef::contiguous(handle, [NUM_BLOCKS, 16, 8, 128], dtype.elem())
    };
    let (k_cache, v_cache) = (cache(), cache());
    let num_keys = BLOCKS.len() * 16;
    let mut random = Random::new(32);
    let shape = [num_keys, 8, 128];
    let (k, v) = (
        random.values(dtype, 1.0, num_keys * 1024),
        random.values(dtype, 1.0, num_keys * 1024),
    );
    let slots: Vec<i32> = BLOCKS
        .iter()
        .flat_map(|block| (0..16).map(move |at| block * 16 + at))
        .collect();
    let place = |values: &[f64]| Placed::dense(&launcher, dtype, &shape, values).tensor;
    let slots = ints(&launcher, &[num_keys], &slots);
    store_kv(
        &launcher,
        &place(&k),
        &place(&v),
        &k_cache,
        &v_cache,
        None,
        &slots,
    )
    .unwrap();

    let table = ints(&launcher, &[1, BLOCKS.len()], &BLOCKS);
    let starts = ints(&launcher, &[2], &[0, num_keys as i32]);
    let gathered = [(); 2].map(|()| Placed::poison(&launcher, dtype, &shape, Layout::Dense));
    gather_kv(
        &launcher,
        &k_cache,
        &v_cache,
        None,
        &table,
        &starts,
        &gathered[0].tensor,
        &gathered[1].tensor,
    )
    .unwrap();
    assert_same("k", &gathered[0].read(&launcher), &k);
    assert_same("v", &gathered[1].read(&launcher), &v);

    // One query row of equal weights: the mean of the values.
    let q = Placed::dense(&launcher, dtype, &[1, 8, 128], &[0.0; 1024]);
    let out = Placed::poison(&launcher, dtype, &[1, 8, 128], Layout::Dense);
    let lse = Placed::poison(&launcher, Dtype::F32, &[1, 8], Layout::Dense);
    let keys = Keys::Paged {
        k_cache: &k_cache,
        v_cache: &v_cache,
        scales: None,
        block_table: &table,
        seq_lens: &ints(&launcher, &[1], &[num_keys as i32]),
    };
    let options = AttentionOptions::causal(128);
    let q_starts = ints(&launcher, &[2], &[0, 1]);
    attention(
        &launcher,
        &q.tensor,
        &q_starts,
        keys,
        &out.tensor,
        &lse.tensor,
        &options,
    )
    .unwrap();
    let mean = |arith: Arith| -> Vec<f64> {
        (0..1024)
            .map(|i| {
                let sum: f64 = (0..num_keys).map(|key| v[key * 1024 + i]).sum();
                arith.op(sum / num_keys as f64)
            })
            .collect()
    };
    let (exact, plain) = (mean(Arith::Exact), mean(Arith::Plain(dtype)));
    assert_close("mean", dtype, &out.read(&launcher), &exact, &plain);
}
