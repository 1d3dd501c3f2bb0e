use super::*;

use crate::check::{F32, U8};
use crate::device::tests::{cpu, gpu};

const BF16: ElemType = ElemType::Float(FloatKind::BF16);

fn problem(num_tokens: usize, head_dim: usize) -> AttentionProblem {
    AttentionProblem {
        num_tokens,
        num_seqs: 3,
        num_heads: 9,
        num_kv_heads: 3,
        head_dim,
        max_keys: 1000,
        expected_keys: 1000,
        block_size: Some(16),
        dtype: F32,
        kv_dtype: F32,
    }
}

fn llama(num_seqs: usize, q_len: usize, max_keys: usize) -> AttentionPlan {
    let problem = AttentionProblem {
        num_tokens: num_seqs * q_len,
        num_seqs,
        num_heads: 32,
        num_kv_heads: 8,
        head_dim: 128,
        max_keys,
        expected_keys: max_keys,
        block_size: Some(16),
        dtype: BF16,
        kv_dtype: BF16,
    };
    AttentionPlan::new(&gpu(), &problem, 8, &AttentionOptions::causal(128))
}

#[test]
fn every_row_and_head_has_a_unit() {
    for num_tokens in [1, 7, 100_000_000] {
        for facts in [gpu(), cpu()] {
            let options = AttentionOptions::causal(64);
            let plan = AttentionPlan::new(&facts, &problem(num_tokens, 64), 4, &options);
            let units = num_tokens as u64 * 9 * plan.num_splits as u64;
            assert!(plan.grid.unwrap().num_units() >= units);
        }
    }
}

#[test]
fn odd_heads_are_looped_over_and_wide_vectors_are_bounded() {
    let plan = |head_dim, n| {
        let options = AttentionOptions::causal(head_dim);
        AttentionPlan::new(&cpu(), &problem(1, head_dim), n, &options)
    };
    assert!(!plan(255, 1).unroll);
    assert!(plan(256, 16).unroll);
    assert_eq!(plan(256, 32).vector_size, 16);
}

#[test]
fn rows_per_sequence_choose_the_kernel() {
    assert_eq!(llama(8, 1, 1024).kernel, AttentionKernel::HopperDecode);
    assert_eq!(llama(8, 4, 1024).kernel, AttentionKernel::MmaDecode);
    assert_eq!(llama(1, 512, 1024).kernel, AttentionKernel::HopperPrefill);
}

#[test]
fn what_tensor_cores_do_not_take_goes_to_the_portable_kernel() {
    let kernel = |facts: DeviceFacts, head_dim, vector_size, dtype| {
        let problem = AttentionProblem {
            dtype,
            ..problem(600, head_dim)
        };
        let options = AttentionOptions::causal(head_dim);
        AttentionPlan::new(&facts, &problem, vector_size, &options).kernel
    };
    let gpu = || DeviceFacts {
        hopper: false,
        ..gpu()
    };
    let without = DeviceFacts {
        mma_bf16: false,
        ..gpu()
    };
    assert_eq!(kernel(gpu(), 64, 8, BF16), AttentionKernel::MmaPrefill);
    assert_eq!(kernel(without, 64, 8, BF16), AttentionKernel::Portable);
    assert_eq!(kernel(gpu(), 64, 4, BF16), AttentionKernel::Portable);
    assert_eq!(kernel(gpu(), 256, 8, BF16), AttentionKernel::Portable);
    assert_eq!(kernel(gpu(), 64, 4, F32), AttentionKernel::Portable);
    assert_eq!(kernel(cpu(), 64, 16, BF16), AttentionKernel::Portable);
}

#[test]
fn many_rows_go_to_the_kernel_for_hopper_where_it_takes_them() {
    let base = AttentionProblem {
        num_tokens: 4096,
        num_heads: 32,
        num_kv_heads: 8,
        dtype: BF16,
        ..problem(1, 128)
    };
    let kernel = |problem: &AttentionProblem, vector_size| {
        let options = AttentionOptions::causal(problem.head_dim);
        AttentionPlan::new(&gpu(), problem, vector_size, &options).kernel
    };
    for head_dim in [64, 80, 96, 128, 256] {
        for block_size in [None, Some(8), Some(16), Some(256)] {
            let problem = AttentionProblem {
                head_dim,
                block_size,
                ..base
            };
            assert_eq!(kernel(&problem, 8), AttentionKernel::HopperPrefill);
        }
    }
    assert_eq!(kernel(&base, 4), AttentionKernel::Portable);
    for block_size in [4, 24] {
        let block_size = Some(block_size);
        let problem = AttentionProblem { block_size, ..base };
        assert_eq!(kernel(&problem, 8), AttentionKernel::MmaPrefill);
    }
}

#[test]
fn tiles_for_hopper_fit_into_shared_memory() {
    let two_bytes = [8, 64, 72, 128, 136, 256].map(|head_dim| (head_dim, 2));
    let one_byte = [16, 64, 80, 128].map(|head_dim| (head_dim, 1));
    for (head_dim, kv_bytes) in two_bytes.into_iter().chain(one_byte) {
        for tile in HopperTile::all(head_dim, kv_bytes) {
            let stages = tile.stages + tile.codes;
            let (barriers, blocks) = (8 * (4 * stages + 6) + 4 * stages + 8, 4 * 64);
            assert!(tile.data_bytes() + barriers + blocks <= gpu().max_shared_memory_bytes);
            assert!(tile.columns * 64 >= head_dim && tile.stages >= 2);
            assert_eq!(tile.codes >= 2, kv_bytes == 1);
        }
    }
    let of = |warpgroups| HopperTile {
        warpgroups,
        ..HopperTile::all(64, 2)[0]
    };
    let heads = [1, 3, 4, 7, 8, 128, 256].map(|group| of(2).heads(group));
    assert_eq!(heads, [1, 1, 4, 1, 8, 128, 1]);
    let heads = [1, 3, 4, 7, 8, 128, 256].map(|group| of(3).heads(group));
    assert_eq!(heads, [1, 3, 4, 1, 8, 1, 1]);
}

#[test]
fn tiles_for_hopper_are_dealt_to_no_more_cubes_than_run_at_a_time() {
    let plan = llama(16, 1024, 1024);
    let multiprocessors = gpu().num_multiprocessors.unwrap() as usize;
    assert_eq!(plan.num_cubes, multiprocessors);
    let tile = plan.tile.unwrap();
    assert!(plan.num_tiles * tile.cluster * tile.rows() >= 16 * 1024 * 32);
}

#[test]
fn clusters_of_cubes_are_whole_and_no_tile_is_too_many() {
    let problem = AttentionProblem {
        num_tokens: 1000,
        num_heads: 8,
        num_kv_heads: 2,
        dtype: BF16,
        kv_dtype: BF16,
        ..problem(1, 128)
    };
    let facts = |multiprocessors| DeviceFacts {
        num_multiprocessors: Some(multiprocessors),
        ..gpu()
    };
    for tile in HopperTile::all(128, 2) {
        let count = tile.count(&problem);
        // Three sequences, each of whose last tiles may hold one row.
        assert!(count * tile.cluster * tile.rows() >= 1000 * 8, "{tile:?}");
        for multiprocessors in [1, 2, 3, 78, 132, 1000] {
            let cubes = tile.cubes(&facts(multiprocessors), count);
            assert!(cubes > 0 && cubes.is_multiple_of(tile.cluster));
            assert!(cubes <= count * tile.cluster);
            let at_once = tile.cluster.max(multiprocessors as usize);
            assert!(!tile.stays || cubes <= at_once, "{tile:?}: {cubes}");
        }
    }
    assert!(HopperTile::all(128, 2).iter().any(|tile| tile.cluster > 1));
}

#[test]
fn a_copy_brings_keys_of_one_block_for_one_cube() {
    for tile in HopperTile::all(128, 2) {
        let blocks = [None, Some(8), Some(64), Some(128), Some(256)];
        let keys = match tile.cluster {
            1 => [128, 8, 64, 128, 128],
            _ => [64, 8, 64, 64, 64],
        };
        assert_eq!(blocks.map(|block| tile.keys_at_once(block)), keys);
    }
}

#[test]
fn cubes_draw_tiles_where_there_are_more_than_one_for_each() {
    let plan = |num_seqs, q_len, keys| {
        let plan = llama(num_seqs, q_len, keys);
        assert_eq!(plan.kernel, AttentionKernel::HopperPrefill);
        assert_eq!(plan.num_splits, 1, "{plan:?}");
        plan
    };
    let multiprocessors = gpu().num_multiprocessors.unwrap() as usize;
    for (num_seqs, q_len, keys) in [
        (16, 1024, 1024),
        (16, 1024, 4096),
        (1, 8192, 8192),
        (16, 128, 4224),
        (1, 2048, 34_816),
    ] {
        let plan = plan(num_seqs, q_len, keys);
        assert!(plan.tile.unwrap().draws(), "{plan:?}");
        assert!(plan.num_cubes == multiprocessors && plan.num_tiles > multiprocessors);
    }
    assert!(!plan(1, 512, 512).tile.unwrap().draws());
    // Decodes and chunks in one call.
    let problem = AttentionProblem {
        num_tokens: 32 + 2 * 1024,
        num_seqs: 34,
        num_heads: 32,
        num_kv_heads: 8,
        max_keys: 5120,
        expected_keys: 5120,
        dtype: BF16,
        ..problem(1, 128)
    };
    let mixed = AttentionPlan::new(&gpu(), &problem, 8, &AttentionOptions::causal(128));
    assert_eq!(mixed.tile.unwrap().cluster, 1, "decodes fill no pair");
    // Nor do they beside one long chunk, of which a sequence has 242 tokens on average.
    let problem = AttentionProblem {
        num_tokens: 16 + 4096,
        num_seqs: 17,
        max_keys: 32_768,
        expected_keys: 32_768,
        ..problem
    };
    let chunk = AttentionPlan::new(&gpu(), &problem, 8, &AttentionOptions::causal(128));
    assert_eq!(chunk.tile.unwrap().cluster, 1);
    for (num_seqs, q_len) in [(1, 8192), (8, 1024), (16, 1024)] {
        assert_eq!(llama(num_seqs, q_len, q_len).tile.unwrap().cluster, 2);
    }
    assert_eq!(llama(16, 128, 4224).tile.unwrap().cluster, 1);
    assert_eq!(mixed.kernel, AttentionKernel::HopperPrefill);
    assert_eq!(mixed.num_splits, 1);
}

#[test]
fn few_tiles_for_hopper_are_cut_into_parts_that_run_at_a_time() {
    let multiprocessors = gpu().num_multiprocessors.unwrap() as usize;
    let problem = AttentionProblem {
        num_tokens: 512,
        num_seqs: 1,
        max_keys: 8704,
        expected_keys: 8704,
        dtype: BF16,
        ..problem(1, 64)
    };
    let plan = |problem| AttentionPlan::new(&gpu(), problem, 8, &AttentionOptions::causal(64));
    let few = plan(&problem);
    assert_eq!(few.kernel, AttentionKernel::HopperPrefill);
    assert!(few.num_splits >= 4 && !few.tile.unwrap().draws(), "{few:?}");
    assert!(HopperTile::all(64, 2)[0].expected(&problem) * few.num_splits <= multiprocessors);
    // Tiles of one prompt are long and short ones: in two parts, more than multiprocessors, they are drawn.
    let prompt = AttentionProblem {
        num_tokens: 2048,
        num_heads: 9,
        num_kv_heads: 3,
        max_keys: 2048,
        expected_keys: 2048,
        ..problem
    };
    let drawn = plan(&prompt);
    assert_eq!(drawn.num_splits, 2, "{drawn:?}");
    assert!(drawn.tile.unwrap().draws() && drawn.num_cubes == multiprocessors);
    // A merge would take as long as it saves.
    let short = AttentionProblem {
        max_keys: 512,
        expected_keys: 512,
        ..problem
    };
    assert_eq!(plan(&short).num_splits, 1);
    let many = AttentionProblem {
        num_tokens: 16 * 1024,
        num_seqs: 16,
        max_keys: 1024,
        expected_keys: 1024,
        ..problem
    };
    let many = plan(&many);
    assert_eq!((many.num_splits, many.num_cubes), (1, multiprocessors));
    assert!(many.tile.unwrap().draws());
}

#[test]
fn few_cubes_are_split_until_the_device_is_full() {
    assert_eq!(llama(256, 1, 8192).num_splits, 1);
    assert_eq!(llama(1, 8192, 8192).num_splits, 1);
    let few = llama(1, 8, 32_768);
    assert!(few.num_splits >= 16, "{few:?}");
    let short = llama(1, 8, 64);
    assert_eq!(short.num_splits, 1);
    let chunk = llama(1, 128, 32_768);
    assert!(chunk.num_splits > 1, "{chunk:?}");
    let options = AttentionOptions::causal(64);
    assert_eq!(
        AttentionPlan::new(&cpu(), &problem(1, 64), 4, &options).num_splits,
        1
    );
}

#[test]
fn clusters_share_long_sequences_of_few_heads() {
    let of = |num_seqs, keys| {
        let plan = llama(num_seqs, 1, keys);
        assert_eq!(plan.kernel, AttentionKernel::HopperDecode);
        let cubes = num_seqs * 8 * plan.decode.unwrap().parts * plan.num_splits;
        assert_eq!(plan.num_cubes, cubes);
        plan.num_splits
    };
    assert_eq!([1024, 32_768].map(|keys| of(1, keys)), [1; 2]);
    assert_eq!([2, 8, 256].map(|num_seqs| of(num_seqs, 32_768)), [1; 3]);
    let few_heads = AttentionProblem {
        num_seqs: 1,
        dtype: BF16,
        kv_dtype: BF16,
        max_keys: 32_768,
        expected_keys: 32_768,
        ..problem(1, 64)
    };
    let plan = AttentionPlan::new(&gpu(), &few_heads, 8, &AttentionOptions::causal(64));
    assert_eq!((plan.num_splits, plan.num_cubes), (4, 96));
    // What the case table of the kernels counts on.
    let case = AttentionProblem {
        num_tokens: 4,
        num_heads: 3,
        num_kv_heads: 1,
        expected_keys: 3000,
        ..few_heads
    };
    let alone = &DecodeTile::all(64, 2)[0];
    assert!(alone.parts == 1 && alone.num_clusters(&gpu(), &case) > 8);
    let several_heads = AttentionProblem {
        num_heads: 9,
        num_kv_heads: 3,
        ..case
    };
    assert_eq!(alone.num_clusters(&gpu(), &several_heads), 8);
}

#[test]
fn few_tokens_are_shared_by_clusters_until_the_device_is_full() {
    let parts = |num_seqs, keys| llama(num_seqs, 1, keys).decode.unwrap().parts;
    assert_eq!(parts(1, 8192), 8);
    assert_eq!(parts(1, 64), 1);
    assert_eq!(parts(256, 4096), 1);
    assert_eq!(parts(256, 8192), 1);
    assert_eq!(llama(256, 1, 8192).kernel, AttentionKernel::HopperDecode);
    for num_seqs in [1, 2, 5, 8, 16, 100] {
        let plan = llama(num_seqs, 1, 1024);
        assert_eq!(plan.num_splits, 1);
        assert_eq!(plan.num_cubes, num_seqs * 8 * parts(num_seqs, 1024));
    }
}

#[test]
fn rings_of_decoding_fit_into_shared_memory() {
    for (head_dim, kv_dtype) in [16, 64, 80, 128]
        .into_iter()
        .flat_map(|d| [(d, BF16), (d, U8)])
    {
        let of_kind = AttentionProblem {
            kv_dtype,
            ..problem(3, head_dim)
        };
        let planned = DecodeTile::new(&gpu(), &of_kind);
        let size = kv_dtype.size();
        assert!(DecodeTile::all(head_dim, size).contains(&planned));
        for tile in DecodeTile::all(head_dim, size) {
            let rest = tile.warps * (12 * tile.stages + 16 * 16) + 16 * 16;
            let ring = tile.ring_bytes(head_dim, size);
            assert!(
                tile.warps * ring + rest <= gpu().max_shared_memory_bytes,
                "{tile:?}"
            );
            assert!(ring.is_multiple_of(1024));
        }
    }
}

#[test]
fn keys_of_eight_bits_go_to_the_kernels_that_take_them() {
    let kernel = |facts: DeviceFacts, num_tokens, head_dim, fixed_split| {
        let problem = AttentionProblem {
            num_tokens,
            expected_keys: 8192,
            max_keys: 8192,
            num_seqs: 300,
            dtype: BF16,
            kv_dtype: U8,
            ..problem(1, head_dim)
        };
        let options = AttentionOptions {
            fixed_split,
            ..AttentionOptions::causal(head_dim)
        };
        AttentionPlan::new(&facts, &problem, 8, &options).kernel
    };
    let ampere = || DeviceFacts {
        hopper: false,
        ..gpu()
    };
    use AttentionKernel::{HopperDecode, HopperPrefill, MmaDecode, MmaPrefill, Portable};
    for head_dim in [64, 80, 128] {
        assert_eq!(kernel(gpu(), 300, head_dim, None), HopperDecode);
        assert_eq!(kernel(ampere(), 300, head_dim, None), MmaDecode);
        for facts in [gpu(), ampere()] {
            assert_eq!(kernel(facts, 301, head_dim, None), MmaDecode);
        }
        assert_eq!(kernel(gpu(), 60_000, head_dim, None), HopperPrefill);
        assert_eq!(kernel(ampere(), 60_000, head_dim, None), MmaPrefill);
        assert_eq!(kernel(cpu(), 300, head_dim, None), Portable);
    }
    assert_eq!(kernel(gpu(), 300, 72, None), MmaDecode);
    assert_eq!(kernel(gpu(), 60_000, 72, None), MmaPrefill);
    assert_eq!(kernel(gpu(), 300, 128, Some(256)), MmaDecode);
    assert_eq!(kernel(gpu(), 60_000, 256, None), Portable);
}

#[test]
fn as_many_bytes_are_on_their_way_with_eight_bits() {
    for head_dim in [64, 128] {
        let ring = |kv_dtype: ElemType| {
            let problem = AttentionProblem {
                kv_dtype,
                ..problem(3, head_dim)
            };
            let tile = DecodeTile::new(&gpu(), &problem);
            tile.stages * tile.keys * DecodeTile::row_bytes(head_dim, kv_dtype.size())
        };
        assert_eq!(ring(BF16), ring(U8));
    }
}

#[test]
fn fixed_parts_make_the_plan_independent_of_the_batch() {
    let plan = |num_seqs, q_len| {
        let problem = AttentionProblem {
            num_tokens: num_seqs * q_len,
            num_seqs,
            dtype: BF16,
            ..problem(1, 64)
        };
        let options = AttentionOptions {
            fixed_split: Some(256),
            ..AttentionOptions::causal(64)
        };
        AttentionPlan::new(&gpu(), &problem, 8, &options)
    };
    for other in [plan(1, 1), plan(200, 1), plan(3, 500)] {
        assert_eq!(other.kernel, AttentionKernel::MmaDecode);
        assert_eq!((other.num_splits, other.fixed_split), (4, 256));
    }
}
