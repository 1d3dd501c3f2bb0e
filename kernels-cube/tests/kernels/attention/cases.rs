//! The table of cases, each over packed and over paged keys.

use burn_paged_kernels::{AttentionOptions, Launcher};

use super::host::{Blocks, Heads, HostBatch, run_packed, run_paged};
use crate::arith::{Arith, Dtype};
use crate::compare::assert_close;
use crate::place::{Layout, launchers, runs};

/// Queries and keys of each sequence: decode rows, prompts, chunks on a prefix, empty sequences,
/// rows without keys, more queries than keys.
const LENS: [(usize, usize); 9] = [
    (1, 17),
    (5, 5),
    (0, 0),
    (3, 40),
    (4, 2),
    (1, 1),
    (2, 0),
    (0, 9),
    (7, 23),
];

#[derive(Clone, Copy, Debug)]
struct Case {
    heads: Heads,
    block_size: usize,
    causal: bool,
    window: Option<usize>,
    softcap: Option<f32>,
    fixed_split: Option<usize>,
    /// Bound of the queries: the larger, the more peaked the softmax.
    q_bound: f64,
    layout: Layout,
}

const BASE: Case = Case {
    heads: heads(3, 2, 64),
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

const CASES: [Case; 26] = [
    BASE,
    Case {
        heads: heads(1, 3, 64),
        q_bound: 30.0,
        ..BASE
    },
    Case {
        heads: heads(4, 2, 72),
        block_size: 5,
        ..BASE
    },
    Case {
        heads: heads(7, 2, 80),
        block_size: 1,
        ..BASE
    },
    Case {
        heads: heads(8, 1, 96),
        block_size: 64,
        ..BASE
    },
    Case {
        heads: heads(1, 2, 128),
        causal: false,
        ..BASE
    },
    Case {
        heads: heads(4, 1, 256),
        block_size: 5,
        q_bound: 12.0,
        ..BASE
    },
    Case {
        heads: heads(3, 2, 8),
        block_size: 3,
        causal: false,
        ..BASE
    },
    Case {
        heads: heads(2, 1, 255),
        block_size: 7,
        ..BASE
    },
    Case {
        heads: heads(3, 1, 33),
        block_size: 4,
        ..BASE
    },
    Case {
        heads: heads(1, 1, 1),
        block_size: 2,
        ..BASE
    },
    Case {
        window: Some(5),
        ..BASE
    },
    Case {
        window: Some(1),
        block_size: 5,
        ..BASE
    },
    Case {
        window: Some(3),
        causal: false,
        softcap: Some(10.0),
        block_size: 5,
        ..BASE
    },
    Case {
        window: Some(usize::MAX),
        block_size: 64,
        ..BASE
    },
    Case {
        softcap: Some(2.0),
        q_bound: 30.0,
        ..BASE
    },
    Case {
        q_bound: 0.0,
        causal: false,
        block_size: 5,
        ..BASE
    },
    Case {
        q_bound: 1000.0,
        ..BASE
    },
    Case {
        layout: Layout::Pitched,
        heads: heads(3, 2, 72),
        ..BASE
    },
    Case {
        layout: Layout::Slice,
        ..BASE
    },
    Case {
        layout: Layout::OddSlice,
        ..BASE
    },
    Case {
        layout: Layout::Transposed,
        block_size: 1,
        ..BASE
    },
    Case {
        layout: Layout::Slice,
        heads: heads(7, 2, 80),
        window: Some(9),
        ..BASE
    },
    Case {
        fixed_split: Some(7),
        block_size: 5,
        ..BASE
    },
    Case {
        fixed_split: Some(16),
        window: Some(9),
        heads: heads(4, 1, 72),
        ..BASE
    },
    Case {
        fixed_split: Some(1),
        causal: false,
        softcap: Some(5.0),
        ..BASE
    },
];

#[test]
fn attention_agrees_with_plain_loops_in_f32() {
    run_cases(Dtype::F32);
}

#[test]
fn attention_agrees_with_plain_loops_in_f16() {
    run_cases(Dtype::F16);
}

#[test]
fn attention_agrees_with_plain_loops_in_bf16() {
    run_cases(Dtype::Bf16);
}

#[test]
fn attention_over_eight_bits_agrees_with_plain_loops() {
    let mut count = 0;
    let cases = || CASES.iter().filter(|case| case.heads.head_dim % 4 == 0);
    for launcher in launchers() {
        for case in cases() {
            run_case(&launcher, case, Dtype::F32, true);
            count += 1;
        }
    }
    // The dtype is that of queries and output alone: some cases tell.
    for dtype in [Dtype::F16, Dtype::Bf16] {
        for case in cases().step_by(4) {
            let [launcher, _] = launchers();
            if runs(&launcher, dtype) {
                run_case(&launcher, case, dtype, true);
                count += 1;
            }
        }
    }
    println!("attention over eight bits: {count} cases");
}

fn run_cases(dtype: Dtype) {
    let mut count = 0;
    for case in &CASES {
        for launcher in launchers() {
            if runs(&launcher, dtype) {
                run_case(&launcher, case, dtype, false);
                count += 2;
            }
        }
    }
    println!("attention, {dtype:?}: {count} cases");
}

fn run_case(launcher: &Launcher, case: &Case, dtype: Dtype, fp8: bool) {
    let options = AttentionOptions {
        scale: (case.heads.head_dim as f32).sqrt().recip(),
        causal: case.causal,
        window: case.window,
        softcap: case.softcap,
        fixed_split: case.fixed_split,
    };
    // Scores of thousands end in weights of one key, or of two by chance: what is left is the error of the one sum in f32.
    let q_bound = if fp8 {
        case.q_bound.min(300.0)
    } else {
        case.q_bound
    };
    let mut batch = HostBatch::random(dtype, case.heads, &LENS, q_bound);
    let blocks = Blocks::shuffled(&batch.kv_lens(), case.block_size, true);
    blocks.share(&mut batch);
    if fp8 {
        batch.quantise();
    }

    let exact = batch.attend(Arith::Exact, &options);
    let plain = batch.attend(Arith::Plain(dtype), &options);
    let plain_f32 = batch.attend(Arith::Plain(Dtype::F32), &options);
    let paged = run_paged(launcher, &batch, case.layout, &blocks, f64::NAN, &options);
    let mut results = vec![(if fp8 { "eight bits" } else { "paged" }, paged)];
    if !fp8 {
        let packed = run_packed(launcher, &batch, case.layout, &options);
        results.push(("packed", packed));
    }
    for (keys, (out, lse)) in &results {
        let what = format!("{keys} {case:?}");
        assert_close(&what, dtype, out, &exact.0, &plain.0);
        // The log-sum-exp is f32 whatever the dtype.
        assert_close(
            &format!("lse {what}"),
            Dtype::F32,
            lse,
            &exact.1,
            &plain_f32.1,
        );
    }
}
