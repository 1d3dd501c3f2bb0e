//! What is refused before a launch, and what launches nothing.

use burn_paged_kernels::{
    AttentionOptions, DeviceFacts, KernelError, Keys, KvScales, Launcher, NextBlocks,
    PartialAttention, RotaryTable, SAMPLE_MAX_VOCAB, SAMPLE_WORDS, TensorRef, attention, embedding,
    gather_kv, greedy, merge_attention, next_tokens, rms_norm, rotary, sample, silu_and_mul,
    store_kv,
};

use crate::arith::Dtype;
use crate::place::{Layout, Placed, ints, launcher};

fn zeros(launcher: &Launcher, dtype: Dtype, shape: &[usize]) -> TensorRef {
    Placed::dense(launcher, dtype, shape, &vec![0.0; shape.iter().product()]).tensor
}

fn invalid(result: Result<(), KernelError>, part: &str) {
    match result {
        Err(KernelError::Invalid { reason, .. }) => {
            assert!(reason.contains(part), "{reason:?} does not say {part:?}");
        }
        other => panic!("expected an invalid argument about {part:?}, got {other:?}"),
    }
}

#[test]
fn shapes_dtypes_and_strides_are_checked() {
    let on = &launcher();
    let f32 = |shape: &[usize]| zeros(on, Dtype::F32, shape);
    let x = f32(&[3, 8]);
    let out = f32(&[3, 8]);
    invalid(
        rms_norm(on, &x, &f32(&[7]), 1e-5, &out),
        "[7], expected [8]",
    );
    invalid(
        rms_norm(on, &x, &zeros(on, Dtype::F16, &[8]), 1e-5, &out),
        "expected f32",
    );
    invalid(rms_norm(on, &x, &f32(&[8]), f32::NAN, &out), "epsilon NaN");
    invalid(
        rms_norm(on, &f32(&[3, 2, 4]), &f32(&[8]), 1e-5, &out),
        "expected 2 axes",
    );
    invalid(silu_and_mul(on, &f32(&[3, 7]), &out), "7 columns");
    let ids = |len: usize| ints(on, &[len], &vec![0; len]);
    invalid(next_tokens(on, &ids(3), &ids(2), None), "[2], expected [3]");
    let table = ints(on, &[3, 2], &[0; 6]);
    let appended = |num_slots: usize, table: &TensorRef, block_size: usize| {
        let blocks = NextBlocks {
            positions: &ids(3),
            slots: &ids(num_slots),
            table,
            block_size,
        };
        next_tokens(on, &ids(3), &ids(3), Some(blocks))
    };
    invalid(appended(2, &table, 4), "[2], expected [3]");
    invalid(
        appended(3, &ints(on, &[2, 2], &[0; 4]), 4),
        "[2, 2], expected [3, 2]",
    );
    invalid(appended(3, &table, 0), "blocks of 0 tokens");
    invalid(
        greedy(on, &x, &ints(on, &[2], &[0; 2])),
        "[2], expected [3]",
    );
    invalid(
        greedy(on, &ints(on, &[3, 8], &[0; 24]), &ints(on, &[3], &[0; 3])),
        "expected f32",
    );

    let columns = TensorRef::new(x.handle().clone(), [8, 3], [1, 8], x.dtype());
    invalid(
        rms_norm(on, &columns, &f32(&[3]), 1e-5, &f32(&[8, 3])),
        "stride 8 along its last",
    );
}

#[test]
fn tensors_outside_their_buffer_are_refused() {
    let on = &launcher();
    let short = zeros(on, Dtype::F32, &[2, 8]);
    let out = zeros(on, Dtype::F32, &[3, 8]);
    let weight = zeros(on, Dtype::F32, &[8]);
    let long = TensorRef::contiguous(short.handle().clone(), [3, 8], short.dtype());
    invalid(
        rms_norm(on, &long, &weight, 1e-5, &out),
        "buffer of 64 bytes",
    );
    let huge = [usize::MAX / 2, 8];
    let huge = TensorRef::new(short.handle().clone(), huge, [8, 1], short.dtype());
    invalid(rms_norm(on, &huge, &weight, 1e-5, &out), "does not fit");
    let moved = TensorRef::contiguous(
        short.handle().clone().offset_start(4),
        [2, 8],
        short.dtype(),
    );
    let out = zeros(on, Dtype::F32, &[2, 8]);
    invalid(
        rms_norm(on, &moved, &weight, 1e-5, &out),
        "buffer of 60 bytes",
    );
}

#[test]
fn outputs_that_overlap_are_refused() {
    let on = &launcher();
    let x = zeros(on, Dtype::F32, &[3, 8]);
    let weight = zeros(on, Dtype::F32, &[8]);
    invalid(
        rms_norm(on, &x, &weight, 1e-5, &x),
        "out shares memory with x",
    );
    let repeated = TensorRef::new(
        zeros(on, Dtype::F32, &[8]).handle().clone(),
        [3, 8],
        [0, 1],
        x.dtype(),
    );
    invalid(rms_norm(on, &x, &weight, 1e-5, &repeated), "repeats");
    let cache = zeros(on, Dtype::F32, &[2, 2, 1, 8]);
    let k = zeros(on, Dtype::F32, &[1, 1, 8]);
    let slots = ints(on, &[1], &[0]);
    invalid(
        store_kv(on, &k, &k, &cache, &cache, None, &slots),
        "k_cache shares memory with v_cache",
    );
    // Two halves of one buffer do not overlap.
    let both = zeros(on, Dtype::F32, &[6, 8]);
    let half = TensorRef::contiguous(both.handle().clone(), [3, 8], both.dtype());
    let other = TensorRef::contiguous(both.handle().clone().offset_start(96), [3, 8], both.dtype());
    rms_norm(on, &half, &weight, 1e-5, &other).unwrap();
}

#[test]
fn attention_refuses_what_it_cannot_honour() {
    let on = &launcher();
    let f32 = |shape: &[usize]| zeros(on, Dtype::F32, shape);
    let cu_seqlens = ints(on, &[2], &[0, 3]);
    let run = |heads: usize, kv_heads: usize, head_dim: usize, options: AttentionOptions| {
        let (k, v) = (f32(&[3, kv_heads, head_dim]), f32(&[3, kv_heads, head_dim]));
        let keys = Keys::Packed {
            k: &k,
            v: &v,
            cu_seqlens_k: &cu_seqlens,
        };
        let q = f32(&[3, heads, head_dim]);
        let (out, lse) = (f32(&[3, heads, head_dim]), f32(&[3, heads]));
        attention(on, &q, &cu_seqlens, keys, &out, &lse, &options)
    };
    let options = AttentionOptions::causal(8);
    run(4, 2, 8, options).unwrap();
    invalid(run(33, 2, 8, options), "33 heads over 2 kv heads");
    invalid(run(3, 2, 8, options), "3 heads over 2 kv heads");
    invalid(
        run(
            4,
            2,
            8,
            AttentionOptions {
                scale: f32::INFINITY,
                ..options
            },
        ),
        "scale inf",
    );
    invalid(
        run(
            4,
            2,
            8,
            AttentionOptions {
                window: Some(0),
                ..options
            },
        ),
        "window of 0",
    );
    invalid(
        run(
            4,
            2,
            8,
            AttentionOptions {
                softcap: Some(0.0),
                ..options
            },
        ),
        "softcap 0",
    );
    let wide = run(1, 1, 257, options);
    assert!(
        matches!(wide, Err(KernelError::Unsupported { .. })),
        "{wide:?}"
    );
}

#[test]
fn sampling_checks_its_options_and_its_columns() {
    let on = &launcher();
    let ids = ints(on, &[3], &[0; 3]);
    let words = |rows: usize, words: usize| ints(on, &[rows, words], &vec![0; rows * words]);
    let run = |columns: usize, options: &TensorRef| {
        let logits = zeros(on, Dtype::F32, &[3, columns]);
        sample(on, &logits, options, &ids)
    };
    run(5, &words(3, SAMPLE_WORDS)).unwrap();
    invalid(run(5, &words(2, SAMPLE_WORDS)), "expected [3, 8]");
    invalid(run(5, &words(3, 7)), "expected [3, 8]");
    invalid(run(0, &words(3, SAMPLE_WORDS)), "0 columns");
    let wide = run(SAMPLE_MAX_VOCAB + 1, &words(3, SAMPLE_WORDS));
    assert!(
        matches!(wide, Err(KernelError::Unsupported { .. })),
        "{wide:?}"
    );
}

#[test]
fn parts_to_merge_must_agree() {
    let on = &launcher();
    let f32 = |shape: &[usize]| zeros(on, Dtype::F32, shape);
    let (out, lse) = (f32(&[3, 2, 8]), f32(&[3, 2]));
    fn part<'a>(out: &'a TensorRef, lse: &'a TensorRef) -> PartialAttention<'a> {
        PartialAttention { out, lse }
    }
    let (other_out, other_lse) = (f32(&[3, 2, 8]), f32(&[3, 2]));
    let a = part(&other_out, &other_lse);
    let merged = part(&out, &lse);
    merge_attention(on, a, a, merged).unwrap();
    invalid(
        merge_attention(on, a, part(&f32(&[3, 2, 7]), &other_lse), merged),
        "b.out has shape [3, 2, 7]",
    );
    invalid(
        merge_attention(on, a, part(&other_out, &f32(&[3, 1])), merged),
        "b.lse has shape [3, 1]",
    );
    let half = zeros(on, Dtype::F16, &[3, 2]);
    invalid(
        merge_attention(on, part(&other_out, &half), a, merged),
        "a.lse is f16",
    );
    invalid(
        merge_attention(on, a, a, part(&other_out, &lse)),
        "out shares memory with a.out",
    );
    invalid(
        merge_attention(on, a, a, part(&out, &other_lse)),
        "lse shares memory with a.lse",
    );
}

#[test]
fn caches_are_checked() {
    let on = &launcher();
    let k = zeros(on, Dtype::F32, &[1, 1, 8]);
    let slots = ints(on, &[1], &[0]);
    let cache = |shape: &[usize]| zeros(on, Dtype::F32, shape);
    let store = |k_cache: &TensorRef, v_cache: &TensorRef| {
        store_kv(on, &k, &k, k_cache, v_cache, None, &slots)
    };
    invalid(
        store(&cache(&[2, 2, 1, 8]), &cache(&[2, 2, 2, 8])),
        "expected [2, 2, 1, 8]",
    );
    invalid(
        store(&cache(&[2, 2, 2, 8]), &cache(&[2, 2, 2, 8])),
        "expected [1, 2, 8]",
    );
    let pitched = Placed::poison(on, Dtype::F32, &[2, 2, 1, 8], Layout::Pitched);
    invalid(
        store(&pitched.tensor, &cache(&[2, 2, 1, 8])),
        "expected it contiguous",
    );
    let none = cache(&[2, 0, 1, 8]);
    invalid(store(&none, &none), "block_size is 0");
}

#[test]
fn caches_of_eight_bits_need_scales_and_whole_words() {
    let on = &launcher();
    let unsupported = |result: Result<(), KernelError>, part: &str| match result {
        Err(KernelError::Unsupported { reason, .. }) => {
            assert!(reason.contains(part), "{reason:?} does not say {part:?}");
        }
        other => panic!("expected no support for {part:?}, got {other:?}"),
    };
    let store = |dtype: Dtype, head_dim: usize, scales: Option<KvScales<'_>>| {
        let k = zeros(on, Dtype::F32, &[1, 2, head_dim]);
        let cache = || zeros(on, dtype, &[2, 2, 2, head_dim]);
        store_kv(
            on,
            &k,
            &k,
            &cache(),
            &cache(),
            scales,
            &ints(on, &[1], &[0]),
        )
    };
    let (two, three, half) = (
        zeros(on, Dtype::F32, &[2]),
        zeros(on, Dtype::F32, &[3]),
        zeros(on, Dtype::F16, &[2]),
    );
    fn scales<'a>(k: &'a TensorRef, v: &'a TensorRef) -> Option<KvScales<'a>> {
        Some(KvScales { k, v })
    }
    store(Dtype::E4m3, 8, scales(&two, &two)).unwrap();
    invalid(
        store(Dtype::E4m3, 8, None),
        "k_cache is u8, codes of e4m3, without scales",
    );
    invalid(
        store(Dtype::F32, 8, scales(&two, &two)),
        "scales for a k_cache of f32",
    );
    invalid(
        store(Dtype::E4m3, 8, scales(&three, &two)),
        "k scales has shape [3], expected [2]",
    );
    invalid(
        store(Dtype::E4m3, 8, scales(&two, &half)),
        "v scales is f16, expected f32",
    );
    unsupported(store(Dtype::E4m3, 33, scales(&two, &two)), "head_dim 33");

    let (q, lse) = (
        zeros(on, Dtype::F32, &[3, 2, 8]),
        zeros(on, Dtype::F32, &[3, 2]),
    );
    let out = zeros(on, Dtype::F32, &[3, 2, 8]);
    let starts = ints(on, &[2], &[0, 3]);
    let attend = |cache: &TensorRef, scales: Option<KvScales<'_>>| {
        let keys = Keys::Paged {
            k_cache: cache,
            v_cache: cache,
            scales,
            block_table: &ints(on, &[1, 2], &[0, 1]),
            seq_lens: &ints(on, &[1], &[3]),
        };
        attention(
            on,
            &q,
            &starts,
            keys,
            &out,
            &lse,
            &AttentionOptions::causal(8),
        )
    };
    let cache = zeros(on, Dtype::E4m3, &[2, 2, 2, 8]);
    attend(&cache, scales(&two, &two)).unwrap();
    invalid(attend(&cache, None), "without scales");
    invalid(
        attend(&cache, scales(&two, &three)),
        "v scales has shape [3]",
    );
    let floats = zeros(on, Dtype::F32, &[2, 2, 2, 8]);
    invalid(
        attend(&floats, scales(&two, &two)),
        "scales for a k_cache of f32",
    );
    let packed = zeros(on, Dtype::E4m3, &[3, 2, 8]);
    let keys = Keys::Packed {
        k: &packed,
        v: &packed,
        cu_seqlens_k: &starts,
    };
    let options = AttentionOptions::causal(8);
    invalid(
        attention(on, &q, &starts, keys, &out, &lse, &options),
        "k is u8",
    );
    let longer = zeros(on, Dtype::E4m3, &[3, 2, 2, 8]);
    let inside = longer.handle().clone().offset_start(4);
    let inside = TensorRef::contiguous(inside, [2, 2, 2, 8], longer.dtype());
    unsupported(attend(&inside, scales(&two, &two)), "starts at byte 4");
}

#[test]
fn devices_without_a_dtype_or_with_a_small_grid_say_so() {
    let base = launcher();
    let facts = DeviceFacts {
        f16: false,
        max_cube_count: (1, 1, 1),
        ..base.facts().clone()
    };
    let on = &Launcher::with_facts(base.client().clone(), facts);
    let weight = zeros(on, Dtype::F16, &[8]);
    let (x, out) = (
        zeros(on, Dtype::F16, &[3, 8]),
        zeros(on, Dtype::F16, &[3, 8]),
    );
    let refused = rms_norm(on, &x, &weight, 1e-5, &out);
    assert!(
        matches!(refused, Err(KernelError::Unsupported { .. })),
        "{refused:?}"
    );
    let (x, out) = (
        zeros(on, Dtype::F32, &[9999, 8]),
        zeros(on, Dtype::F32, &[9999, 8]),
    );
    let refused = rms_norm(on, &x, &zeros(on, Dtype::F32, &[8]), 1e-5, &out);
    assert!(
        matches!(refused, Err(KernelError::Launch { .. })),
        "{refused:?}"
    );
}

/// Empty tensors once divided by zero, or launched a grid of nothing.
#[test]
fn empty_inputs_are_legal() {
    let on = &launcher();
    let f32 = |shape: &[usize]| zeros(on, Dtype::F32, shape);
    let i32 = |shape: &[usize]| ints(on, shape, &vec![0; shape.iter().product()]);
    let none = i32(&[0]);
    let cu_seqlens = i32(&[1]);
    let (k, q) = (f32(&[0, 2, 8]), f32(&[0, 4, 8]));
    let (k_cache, v_cache) = (f32(&[3, 4, 2, 8]), f32(&[3, 4, 2, 8]));
    store_kv(on, &k, &k, &k_cache, &v_cache, None, &none).unwrap();
    gather_kv(
        on,
        &k_cache,
        &v_cache,
        None,
        &i32(&[0, 2]),
        &cu_seqlens,
        &k,
        &f32(&[0, 2, 8]),
    )
    .unwrap();
    rms_norm(on, &f32(&[0, 8]), &f32(&[8]), 1e-5, &f32(&[0, 8])).unwrap();
    silu_and_mul(on, &f32(&[0, 16]), &f32(&[0, 8])).unwrap();
    greedy(on, &f32(&[0, 8]), &none).unwrap();
    sample(on, &f32(&[0, 8]), &i32(&[0, SAMPLE_WORDS]), &none).unwrap();
    let (parts, sums) = (
        [(); 3].map(|()| f32(&[0, 2, 8])),
        [(); 3].map(|()| f32(&[0, 2])),
    );
    let [a, b, merged] = [0, 1, 2].map(|i| PartialAttention {
        out: &parts[i],
        lse: &sums[i],
    });
    merge_attention(on, a, b, merged).unwrap();
    embedding(on, &f32(&[5, 8]), &none, &f32(&[0, 8])).unwrap();
    let rope = RotaryTable {
        positions: &none,
        table: &f32(&[9, 8]),
    };
    rotary(on, &q, &k, rope, &f32(&[0, 4, 8]), &f32(&[0, 2, 8])).unwrap();
    let options = AttentionOptions::causal(8);
    let keys = Keys::Packed {
        k: &k,
        v: &k,
        cu_seqlens_k: &cu_seqlens,
    };
    let (out, lse) = (f32(&[0, 4, 8]), f32(&[0, 4]));
    attention(on, &q, &cu_seqlens, keys, &out, &lse, &options).unwrap();
    let keys = Keys::Paged {
        k_cache: &k_cache,
        v_cache: &v_cache,
        scales: None,
        block_table: &i32(&[0, 2]),
        seq_lens: &none,
    };
    attention(on, &q, &cu_seqlens, keys, &out, &lse, &options).unwrap();
}
