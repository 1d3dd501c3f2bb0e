//! `merge_attention`.

use burn_paged_kernels::{Launcher, PartialAttention, merge_attention};

use crate::arith::{Arith, Dtype};
use crate::compare::{assert_close, assert_same};
use crate::place::{Layout, Placed, launchers, runs};
use crate::random::Random;

const NONE: f64 = f64::NEG_INFINITY;

/// The log-sum-exps of one row of both parts.
fn lse_pair(random: &mut Random, row: usize) -> [f64; 2] {
    match row % 6 {
        0 => [NONE, random.value(Dtype::F32, 9.0)],
        1 => [random.value(Dtype::F32, 9.0), NONE],
        2 => [NONE, NONE],
        // One part outweighs the other, or scores are large.
        3 => [random.value(Dtype::F32, 300.0), 0.0],
        4 => [1e4, 1e4 - 0.5],
        _ => [random.value(Dtype::F32, 2.0), random.value(Dtype::F32, 2.0)],
    }
}

#[derive(Clone)]
struct Part {
    out: Vec<f64>,
    lse: Vec<f64>,
}

fn host(arith: Arith, a: &Part, b: &Part, head_dim: usize) -> Part {
    let mut merged = Part {
        out: Vec::new(),
        lse: Vec::new(),
    };
    for (row, (&x, &y)) in a.lse.iter().zip(&b.lse).enumerate() {
        let max = x.max(y);
        let weight = |lse: f64| match lse {
            NONE => 0.0,
            lse => arith.acc((lse - max).exp()),
        };
        let sum = arith.acc(weight(x) + weight(y));
        merged.lse.push(arith.acc(max + sum.ln()));
        for i in row * head_dim..(row + 1) * head_dim {
            let part = |lse: f64, out: f64| match weight(lse) {
                0.0 => 0.0,
                weight => arith.acc(out * arith.acc(weight / sum)),
            };
            let both = part(x, a.out[i]) + part(y, b.out[i]);
            merged.out.push(arith.op(arith.acc(both)));
        }
    }
    merged
}

#[test]
fn two_parts_are_weighted_by_their_sums() {
    let mut count = 0;
    for shape in [[1, 1, 1], [3, 4, 64], [7, 3, 33], [2, 5, 80], [6, 1, 100]] {
        for dtype in Dtype::ALL {
            for layout in Layout::ALL {
                for launcher in launchers() {
                    if runs(&launcher, dtype) {
                        merge_case(&launcher, shape, dtype, layout);
                        count += 1;
                    }
                }
            }
        }
    }
    println!("merge_attention: {count} cases");
}

fn merge_case(launcher: &Launcher, shape: [usize; 3], dtype: Dtype, layout: Layout) {
    let [num_tokens, num_heads, head_dim] = shape;
    let rows = num_tokens * num_heads;
    let mut random = Random::new((rows * head_dim) as u64);
    let mut part = || Part {
        out: random.values(dtype, 2.0, rows * head_dim),
        lse: Vec::new(),
    };
    let (mut a, mut b) = (part(), part());
    for row in 0..rows {
        // A part that saw no key may hold anything.
        let [x, y] = lse_pair(&mut random, row);
        for (part, lse) in [(&mut a, x), (&mut b, y)] {
            part.lse.push(lse);
            if lse == NONE {
                part.out[row * head_dim..(row + 1) * head_dim].fill(f64::NAN);
            }
        }
    }

    let place = |part: &Part, layout: Layout| {
        (
            Placed::new(launcher, dtype, &shape, layout, &part.out),
            Placed::dense(launcher, Dtype::F32, &shape[..2], &part.lse),
        )
    };
    let (a_on, b_on) = (place(&a, layout), place(&b, layout.other()));
    let out = Placed::poison(launcher, dtype, &shape, layout);
    let lse = Placed::poison(launcher, Dtype::F32, &shape[..2], Layout::Dense);
    fn partial<'a>(out: &'a Placed, lse: &'a Placed) -> PartialAttention<'a> {
        PartialAttention {
            out: &out.tensor,
            lse: &lse.tensor,
        }
    }
    merge_attention(
        launcher,
        partial(&a_on.0, &a_on.1),
        partial(&b_on.0, &b_on.1),
        partial(&out, &lse),
    )
    .unwrap();

    let what = format!("merge_attention {shape:?} {layout:?}");
    let exact = host(Arith::Exact, &a, &b, head_dim);
    let plain = host(Arith::Plain(dtype), &a, &b, head_dim);
    let plain_lse = host(Arith::Plain(Dtype::F32), &a, &b, head_dim).lse;
    let (out, lse) = (out.read(launcher), lse.read(launcher));
    assert_close(&what, dtype, &out, &exact.out, &plain.out);
    assert_close(&what, Dtype::F32, &lse, &exact.lse, &plain_lse);
    // What only one part saw is copied to the bit.
    for row in (0..rows).filter(|&row| a.lse[row] == NONE || b.lse[row] == NONE) {
        let elements = row * head_dim..(row + 1) * head_dim;
        assert_same(&what, &out[elements.clone()], &exact.out[elements]);
        assert_same(&what, &lse[row..row + 1], &exact.lse[row..row + 1]);
    }
}
