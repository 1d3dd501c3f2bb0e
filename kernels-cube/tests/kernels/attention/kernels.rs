//! Every kernel that the device runs, each on the same table: tiles of many rows, long contexts, split keys.
//!
//! The planner chooses one of them; here each has to be right on its own.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use burn_paged_kernels::{
    AttentionChoice, AttentionKernel, AttentionOptions, DecodeTile, HopperTile, KernelError,
    Launcher,
};

use super::host::{Attended, Blocks, Heads, HostBatch, try_packed, try_paged};
use crate::arith::{Arith, Dtype};
use crate::compare::{assert_close, assert_same};
use crate::place::{Layout, launcher};
use crate::share::Share;

/// Tiles that end inside a sequence and with it, sequences shorter than a tile, rows without keys, empty sequences.
const MIXED: &[(usize, usize)] = &[
    (1, 300),
    (130, 130),
    (0, 7),
    (40, 333),
    (9, 0),
    (1, 65),
    (6, 3),
    (64, 64),
];

/// Decoding over contexts that are no multiples of anything.
const DECODE: &[(usize, usize)] = &[(1, 1000), (1, 1), (1, 64), (1, 77), (1, 0), (2, 513)];

/// Decoding of one sequence: with tiles of one or two cubes, its keys are cut into parts, some of which a window leaves empty.
const ALONE: &[(usize, usize)] = &[(1, 3000)];

/// Decoding of so many sequences that none is cut into parts.
const MANY: &[(usize, usize)] = &[(1, 130); 40];

/// Decodes, chunks and long prompts in one batch, sequences without rows between them, and lengths that leave warpgroups of a
/// tile without a row.
const UNEVEN: &[(usize, usize)] = &[
    (1, 200),
    (0, 0),
    (150, 320),
    (1, 129),
    (0, 60),
    (1, 1),
    (310, 310),
    (33, 33),
    (1, 0),
];

/// Few rows over many keys, whose parts end in the middle of what rows see.
const PARTS: &[(usize, usize)] = &[(90, 2000), (20, 700)];

/// One prompt of more than a tile.
const PROMPT: &[(usize, usize)] = &[(200, 200)];

/// More tiles of rows than three times the multiprocessors of an H200, of uneven length, so that cubes draw one after the other.
const QUEUE: &[(usize, usize)] = &{
    let lens = [
        (1, 90),
        (300, 310),
        (40, 140),
        (129, 129),
        (0, 20),
        (257, 300),
        (64, 100),
    ];
    let mut all = [(0, 0); 35];
    let mut at = 0;
    while at < all.len() {
        all[at] = lens[at % lens.len()];
        at += 1;
    }
    all
};

/// Several tiles of keys: prompts, and chunks on a prefix whose length is no multiple of a tile.
const LONG: &[(usize, usize)] = &[(300, 300), (70, 557), (0, 40), (129, 400)];

#[derive(Clone, Copy, Debug)]
struct Case {
    lens: &'static [(usize, usize)],
    heads: Heads,
    block_size: usize,
    causal: bool,
    window: Option<usize>,
    softcap: Option<f32>,
    fixed_split: Option<usize>,
    q_bound: f64,
    layout: Layout,
}

const BASE: Case = Case {
    lens: MIXED,
    heads: heads(4, 1, 128),
    block_size: 16,
    causal: true,
    window: None,
    softcap: None,
    fixed_split: None,
    q_bound: 4.0,
    layout: Layout::Dense,
};

const fn heads(group_size: usize, num_kv_heads: usize, head_dim: usize) -> Heads {
    Heads {
        group_size,
        num_kv_heads,
        head_dim,
    }
}

#[rustfmt::skip]
const CASES: &[Case] = &[
    BASE,
    Case { lens: PROMPT, heads: heads(1, 2, 128), q_bound: 30.0, ..BASE },
    Case { lens: PROMPT, heads: heads(4, 2, 64), block_size: 64, ..BASE },
    Case { lens: PROMPT, heads: heads(4, 2, 64), block_size: 64, q_bound: 0.0, ..BASE },
    Case { lens: PROMPT, heads: heads(4, 2, 64), block_size: 64, q_bound: 1e-9, ..BASE },
    Case { heads: heads(3, 2, 64), block_size: 5, ..BASE },
    Case { heads: heads(7, 1, 80), block_size: 1, ..BASE },
    Case { heads: heads(8, 1, 96), block_size: 256, ..BASE },
    Case { heads: heads(2, 1, 72), block_size: 16, layout: Layout::Slice, ..BASE },
    Case { heads: heads(1, 1, 8), ..BASE },
    Case { heads: heads(1, 1, 24), causal: false, ..BASE },
    Case { heads: heads(1, 2, 128), causal: false, layout: Layout::Transposed, ..BASE },
    Case { heads: heads(4, 1, 64), window: Some(5), ..BASE },
    Case { heads: heads(4, 1, 64), window: Some(100), block_size: 64, ..BASE },
    Case { heads: heads(2, 1, 64), window: Some(33), causal: false, ..BASE },
    Case { heads: heads(2, 1, 128), softcap: Some(3.0), q_bound: 30.0, ..BASE },
    Case { heads: heads(1, 2, 64), q_bound: 1000.0, ..BASE },
    Case { lens: LONG, ..BASE },
    Case { lens: LONG, heads: heads(1, 2, 128), causal: false, block_size: 8, ..BASE },
    Case { lens: LONG, heads: heads(3, 1, 64), block_size: 64, q_bound: 30.0, ..BASE },
    Case { lens: LONG, heads: heads(8, 1, 128), block_size: 256, window: Some(150), ..BASE },
    Case { lens: LONG, heads: heads(2, 2, 96), block_size: 32, softcap: Some(5.0), ..BASE },
    Case { lens: LONG, heads: heads(2, 1, 256), block_size: 128, ..BASE },
    Case { lens: LONG, heads: heads(1, 1, 96), block_size: 256, ..BASE },
    Case { lens: LONG, heads: heads(4, 1, 80), block_size: 8, q_bound: 30.0, ..BASE },
    Case { lens: LONG, heads: heads(1, 2, 72), layout: Layout::Transposed, window: Some(64), causal: false, ..BASE },
    Case { lens: QUEUE, heads: heads(1, 8, 128), block_size: 64, ..BASE },
    Case { lens: UNEVEN, ..BASE },
    Case { lens: UNEVEN, heads: heads(3, 3, 64), q_bound: 30.0, ..BASE },
    Case { lens: PARTS, ..BASE },
    Case { lens: PARTS, heads: heads(3, 1, 64), block_size: 64, window: Some(500), ..BASE },
    Case { lens: PARTS, heads: heads(1, 1, 72), causal: false, softcap: Some(9.0), ..BASE },
    Case { lens: PARTS, heads: heads(2, 1, 256), block_size: 8, ..BASE },
    Case { lens: DECODE, ..BASE },
    Case { lens: DECODE, heads: heads(16, 1, 128), block_size: 8, causal: false, ..BASE },
    Case { lens: DECODE, heads: heads(9, 2, 80), block_size: 64, softcap: Some(5.0), ..BASE },
    Case { lens: DECODE, heads: heads(4, 8, 128), block_size: 256, window: Some(70), ..BASE },
    Case { lens: ALONE, heads: heads(3, 1, 64), q_bound: 30.0, ..BASE },
    Case { lens: ALONE, heads: heads(16, 1, 128), block_size: 64, ..BASE },
    Case { lens: ALONE, heads: heads(3, 3, 64), ..BASE },
    Case { lens: ALONE, heads: heads(4, 1, 64), window: Some(100), ..BASE },
    Case { lens: MANY, heads: heads(4, 8, 64), ..BASE },
    Case { lens: DECODE, heads: heads(3, 3, 64), block_size: 64, layout: Layout::Pitched, ..BASE },
    Case { lens: DECODE, heads: heads(8, 2, 128), window: Some(300), block_size: 5, ..BASE },
    Case { lens: DECODE, heads: heads(16, 1, 64), fixed_split: Some(100), ..BASE },
    Case { lens: DECODE, heads: heads(20, 1, 128), fixed_split: Some(256), ..BASE },
    Case { lens: DECODE, heads: heads(1, 3, 64), block_size: 8, q_bound: 30.0, ..BASE },
    Case { lens: DECODE, heads: heads(7, 2, 80), block_size: 16, window: Some(90), ..BASE },
    Case { lens: DECODE, heads: heads(3, 1, 16), block_size: 32, ..BASE },
    Case { lens: DECODE, heads: heads(12, 1, 48), block_size: 64, q_bound: 1000.0, ..BASE },
    Case { fixed_split: Some(48), window: Some(60), heads: heads(3, 1, 64), ..BASE },
    Case { fixed_split: Some(64), heads: heads(4, 1, 96), causal: false, softcap: Some(20.0), ..BASE },
];

fn options(case: &Case) -> AttentionOptions {
    AttentionOptions {
        scale: (case.heads.head_dim as f32).sqrt().recip(),
        causal: case.causal,
        window: case.window,
        softcap: case.softcap,
        fixed_split: case.fixed_split,
    }
}

/// The tensor-core kernels of the device.
fn tiled(launcher: &Launcher) -> Vec<AttentionKernel> {
    let mut kernels = vec![AttentionKernel::MmaPrefill, AttentionKernel::MmaDecode];
    if launcher.facts().hopper {
        kernels.extend([
            AttentionKernel::HopperPrefill,
            AttentionKernel::HopperDecode,
        ]);
    }
    kernels
}

#[test]
fn every_kernel_agrees_with_plain_loops_in_f16() {
    run_cases(Dtype::F16, false);
}

#[test]
fn every_kernel_agrees_with_plain_loops_in_bf16() {
    run_cases(Dtype::Bf16, false);
}

#[test]
fn every_kernel_agrees_with_plain_loops_over_eight_bits_in_f16() {
    run_cases(Dtype::F16, true);
}

#[test]
fn every_kernel_agrees_with_plain_loops_over_eight_bits_in_bf16() {
    run_cases(Dtype::Bf16, true);
}

/// Every way of the kernels for Hopper: for one dtype and the usual heads, because each takes a second to compile.
fn other_tiles(launcher: &Launcher, dtype: Dtype, case: &Case, fp8: bool) -> Vec<AttentionChoice> {
    let usual = [64, 96, 128].contains(&case.heads.head_dim);
    if !launcher.facts().hopper || dtype != Dtype::Bf16 || !usual {
        return Vec::new();
    }
    let plain = case.window.is_none() && case.softcap.is_none() && case.fixed_split.is_none();
    let kv_bytes = if fp8 { 1 } else { 2 };
    let decodes = DecodeTile::all(case.heads.head_dim, kv_bytes).into_iter();
    if case.lens == DECODE && case.block_size >= 16 && plain {
        return decodes.map(AttentionChoice::Decode).collect();
    }
    if case.lens == ALONE {
        // As many warps as a cube has that is alone on its multiprocessor: only such calls are cut.
        let alone = decodes.filter(|tile| format!("{tile:?}").contains("warps: 8"));
        return alone.map(AttentionChoice::Decode).collect();
    }
    if ![LONG, UNEVEN, PARTS, QUEUE].contains(&case.lens) {
        return Vec::new();
    }
    let tiles = HopperTile::all(case.heads.head_dim, kv_bytes).into_iter();
    tiles.map(AttentionChoice::Prefill).collect()
}

/// Whether this process runs a kernel: the only one, where `BURN_PAGED_KERNEL` names it.
fn is_asked_for(choice: &AttentionChoice) -> bool {
    let Ok(asked_for) = std::env::var("BURN_PAGED_KERNEL") else {
        return true;
    };
    let is = |kernel: &AttentionKernel| format!("{kernel:?}") == asked_for;
    let all = AttentionKernel::ALL;
    assert!(all.iter().any(is), "BURN_PAGED_KERNEL is one of {all:?}");
    is(&choice.kernel())
}

/// Takes cases on as many threads as there are cores for this process: the loops on the host take longer than the kernels.
fn for_each_case(run: impl Fn(&Case) + Sync) {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let Share { first, step } = Share::of_this_process();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..cores.div_ceil(step).min(CASES.len()) {
            scope.spawn(|| {
                while let Some(case) = CASES.get(first + step * next.fetch_add(1, Relaxed)) {
                    run(case);
                }
            });
        }
    });
}

fn run_cases(dtype: Dtype, fp8: bool) {
    let launcher = launcher();
    let (count, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
    if !launcher.facts().has_mma(dtype.elem()) {
        println!("skipped {dtype:?}: no tensor cores; the portable kernel has its own table");
        return;
    }
    for_each_case(|case| {
        let launcher = launcher.clone();
        let options = options(case);
        let mut batch = HostBatch::random(dtype, case.heads, case.lens, case.q_bound);
        batch.padding_rows = 3;
        let blocks = Blocks::shuffled(&batch.kv_lens(), case.block_size, true);
        blocks.share(&mut batch);
        if fp8 {
            batch.quantise();
        }
        let exact = padded(&batch, batch.attend(Arith::Exact, &options));
        let plain = padded(&batch, batch.attend(Arith::Plain(dtype), &options));
        let plain_f32 = padded(&batch, batch.attend(Arith::Plain(Dtype::F32), &options));
        let packed = |kernel| {
            let some = Some(kernel);
            let result = try_packed(&launcher, some, &batch, case.layout, &options);
            (kernel, "packed", result)
        };
        let paged = |kernel| {
            let (some, poison) = (Some(kernel), f64::NAN);
            let layout = case.layout;
            let result = try_paged(&launcher, some, &batch, layout, &blocks, poison, &options);
            (kernel, "paged", result)
        };
        let kernels = AttentionKernel::ALL
            .iter()
            .copied()
            .map(AttentionChoice::Kernel);
        let mut tiles = other_tiles(&launcher, dtype, case, fp8);
        tiles.retain(is_asked_for);
        let both = |kernel| {
            let packed = (!fp8).then(|| packed(kernel));
            packed.into_iter().chain([paged(kernel)])
        };
        let tiles = tiles.into_iter().flat_map(|tile| match tile {
            AttentionChoice::Decode(_) if case.lens != ALONE => vec![paged(tile)],
            _ => both(tile).collect(),
        });
        let results = kernels.filter(is_asked_for).flat_map(both).chain(tiles);
        for (kernel, keys, result) in results {
            let what = format!("{kernel:?} {keys} {case:?}");
            match result {
                Ok((out, lse)) => {
                    assert_close(&what, dtype, &out, &exact.0, &plain.0);
                    let what = format!("lse {what}");
                    assert_close(&what, Dtype::F32, &lse, &exact.1, &plain_f32.1);
                    count.fetch_add(1, Relaxed);
                }
                Err(KernelError::Unsupported { .. }) => {
                    println!("refused: {what}");
                    refused.fetch_add(1, Relaxed);
                }
                Err(error) => panic!("{what}: {error}"),
            }
        }
    });
    let (count, refused) = (count.into_inner(), refused.into_inner());
    let bits = if fp8 { " over eight bits" } else { "" };
    println!("attention, every kernel{bits}, {dtype:?}: {count} cases, {refused} refused");
}

/// What rows past the last sequence give.
fn padded(batch: &HostBatch, (mut out, mut lse): Attended) -> Attended {
    let rows = batch.padding_rows * batch.heads.num_heads();
    out.extend(vec![0.0; rows * batch.heads.head_dim]);
    lse.extend(vec![f64::NEG_INFINITY; rows]);
    (out, lse)
}

/// With fixed parts a sequence has the same bits alone and among others, wherever its rows are cut.
#[test]
fn with_fixed_parts_a_row_does_not_depend_on_the_batch() {
    let launcher = launcher();
    let heads = heads(4, 2, 64);
    let options = AttentionOptions {
        fixed_split: Some(32),
        ..AttentionOptions::causal(64)
    };
    let attend = |batch: &HostBatch| {
        if batch.scales.is_none() {
            return try_packed(&launcher, None, batch, Layout::Dense, &options).unwrap();
        }
        let blocks = Blocks::shuffled(&batch.kv_lens(), 16, false);
        let layout = Layout::Dense;
        try_paged(&launcher, None, batch, layout, &blocks, f64::NAN, &options).unwrap()
    };
    let mut count = 0;
    for (dtype, fp8) in Dtype::ALL.into_iter().flat_map(|d| [(d, false), (d, true)]) {
        if !crate::place::runs(&launcher, dtype) {
            continue;
        }
        let lens = [(1, 45), (3, 50), (1, 9), (70, 70)];
        let mut batch = HostBatch::random(dtype, heads, &lens, 4.0);
        if fp8 {
            batch.quantise();
        }
        let together = attend(&batch);
        let mut first = 0;
        for (sequence, (q_len, _)) in batch.sequences.iter().zip(lens) {
            let alone = attend(&HostBatch {
                sequences: vec![sequence.clone()],
                ..batch.clone()
            });
            let rows = first..first + q_len * heads.num_heads();
            let values = rows.start * 64..rows.end * 64;
            assert_same(&format!("{dtype:?} out"), &alone.0, &together.0[values]);
            assert_same(
                &format!("{dtype:?} lse"),
                &alone.1,
                &together.1[rows.clone()],
            );
            first = rows.end;
            count += 1;
        }
    }
    println!("attention, fixed parts: {count} sequences");
}

/// A block number outside of the cache, inside of a sequence, leaves its keys out and reads nothing else.
#[test]
fn keys_without_a_block_are_left_out_by_every_kernel() {
    // The third is larger than what a copy brings; the fourth is looked up behind others.
    for (dtype, head_dim, block, num_keys, lost) in [
        (Dtype::F16, 64, 16, 150, 2),
        (Dtype::Bf16, 128, 16, 150, 2),
        (Dtype::Bf16, 128, 256, 700, 1),
        (Dtype::Bf16, 128, 8, 700, 40),
    ] {
        leave_a_block_out(dtype, head_dim, block, num_keys, lost);
    }
}

fn leave_a_block_out(dtype: Dtype, head_dim: usize, block: usize, num_keys: usize, lost: usize) {
    let launcher = launcher();
    let heads = heads(2, 1, head_dim);
    if !launcher.facts().has_mma(dtype.elem()) {
        println!("skipped: no tensor cores");
        return;
    }
    let options = AttentionOptions {
        causal: false,
        ..AttentionOptions::causal(head_dim)
    };
    for fp8 in [false, true] {
        let mut whole = HostBatch::random(dtype, heads, &[(40, num_keys)], 4.0);
        if fp8 {
            whole.quantise();
        }
        let blocks = Blocks::shuffled(&[num_keys], block, false);
        // The same without the keys of one block: there is no mask, so that positions do not matter.
        let mut without = whole.clone();
        let rows = lost * block * head_dim..(lost + 1) * block * head_dim;
        without.sequences[0].k.drain(rows.clone());
        without.sequences[0].v.drain(rows);
        let exact = without.attend(Arith::Exact, &options);
        let plain = without.attend(Arith::Plain(dtype), &options);
        for wrong in [-1, i32::MAX, blocks.num_blocks as i32] {
            // The cache is filled through the right table, and read through the wrong one.
            let broken = Blocks {
                lost: Some((lost, wrong)),
                ..blocks.clone()
            };
            let tiles = match launcher.facts().hopper {
                true => HopperTile::all(head_dim, if fp8 { 1 } else { 2 }),
                false => Vec::new(),
            };
            let kernels = tiled(&launcher).into_iter().map(AttentionChoice::Kernel);
            for kernel in kernels.chain(tiles.into_iter().map(AttentionChoice::Prefill)) {
                let result = try_paged(
                    &launcher,
                    Some(kernel),
                    &whole,
                    Layout::Dense,
                    &broken,
                    f64::NAN,
                    &options,
                );
                let got = match result {
                    // Not every kernel takes eight bits.
                    Err(KernelError::Unsupported { .. }) if fp8 => continue,
                    result => result.unwrap(),
                };
                assert_close(
                    &format!("{kernel:?} {head_dim} {block} {wrong} {fp8}"),
                    dtype,
                    &got.0,
                    &exact.0,
                    &plain.0,
                );
            }
        }
    }
}
