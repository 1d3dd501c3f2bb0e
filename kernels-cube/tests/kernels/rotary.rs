//! `rotary` and `rotary_and_store`.

use burn_paged_kernels::{Launcher, RotaryTable, rotary, rotary_and_store};

use crate::arith::{Arith, Dtype};
use crate::compare::{assert_close, assert_same};
use crate::place::{Layout, Placed, ints, launchers, runs};
use crate::random::Random;

const MAX_POSITIONS: usize = 50;

#[derive(Clone, Copy)]
struct Case {
    num_tokens: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    rotary_dim: usize,
}

impl Case {
    const fn new(t: usize, h: usize, kv: usize, head_dim: usize, rotary_dim: usize) -> Self {
        Self {
            num_tokens: t,
            num_heads: h,
            num_kv_heads: kv,
            head_dim,
            rotary_dim,
        }
    }

    fn positions(&self) -> Vec<i32> {
        (0..self.num_tokens)
            .map(|t| (t * 17 % MAX_POSITIONS) as i32)
            .collect()
    }
}

const CASES: [Case; 7] = [
    Case::new(5, 9, 3, 64, 64),
    Case::new(1, 7, 1, 80, 80),
    Case::new(3, 4, 4, 72, 72),
    Case::new(4, 2, 1, 128, 32),
    Case::new(2, 3, 1, 96, 48),
    Case::new(2, 3, 3, 256, 256),
    Case::new(6, 1, 1, 6, 2),
];

/// Cosines, then sines, of every position.
fn table(rotary_dim: usize) -> Vec<f64> {
    let half = rotary_dim / 2;
    let angle = |p: usize, i: usize| p as f64 * 10_000f64.powf(-(i as f64) / half as f64);
    let row = |p: usize| {
        let cos = (0..half).map(move |i| angle(p, i).cos());
        cos.chain((0..half).map(move |i| angle(p, i).sin()))
    };
    (0..MAX_POSITIONS)
        .flat_map(row)
        .map(|x| Dtype::F32.round(x))
        .collect()
}

fn host(arith: Arith, x: &[f64], positions: &[i32], heads: usize, case: &Case) -> Vec<f64> {
    let table = table(case.rotary_dim);
    let half = case.rotary_dim / 2;
    let mut out = x.to_vec();
    for (index, head) in out.chunks_exact_mut(case.head_dim).enumerate() {
        let position = positions[index / heads].clamp(0, MAX_POSITIONS as i32 - 1) as usize;
        for i in 0..half {
            let cos = arith.op(table[position * case.rotary_dim + i]);
            let sin = arith.op(table[position * case.rotary_dim + half + i]);
            let (a, b) = (head[i], head[i + half]);
            head[i] = arith.op(arith.op(a * cos) - arith.op(b * sin));
            head[i + half] = arith.op(arith.op(b * cos) + arith.op(a * sin));
        }
    }
    out
}

#[test]
fn pairs_half_a_head_apart_are_rotated() {
    let mut count = 0;
    for case in &CASES {
        for dtype in Dtype::ALL {
            for layout in Layout::ALL {
                for launcher in launchers() {
                    if runs(&launcher, dtype) {
                        rotary_case(&launcher, case, dtype, layout, &case.positions());
                        store_case(&launcher, case, dtype, layout);
                        count += 2;
                    }
                }
            }
        }
    }
    println!("rotary, rotary_and_store: {count} cases");
}

#[test]
fn positions_outside_the_table_take_its_ends() {
    for launcher in launchers() {
        let positions = [-1, i32::MIN, MAX_POSITIONS as i32, i32::MAX, 3];
        rotary_case(&launcher, &CASES[0], Dtype::F32, Layout::Dense, &positions);
    }
}

fn rotary_case(launcher: &Launcher, case: &Case, dtype: Dtype, layout: Layout, positions: &[i32]) {
    let q_shape = [case.num_tokens, case.num_heads, case.head_dim];
    let k_shape = [case.num_tokens, case.num_kv_heads, case.head_dim];
    let mut random = Random::new(case.head_dim as u64);
    let q = random.values(dtype, 3.0, q_shape.iter().product());
    let k = random.values(dtype, 3.0, k_shape.iter().product());
    let angles = table(case.rotary_dim);
    let angles = Placed::dense(
        launcher,
        Dtype::F32,
        &[MAX_POSITIONS, case.rotary_dim],
        &angles,
    );
    let q_out = Placed::poison(launcher, dtype, &q_shape, layout.other());
    let k_out = Placed::poison(launcher, dtype, &k_shape, Layout::Dense);
    rotary(
        launcher,
        &Placed::new(launcher, dtype, &q_shape, layout, &q).tensor,
        &Placed::new(launcher, dtype, &k_shape, layout.other(), &k).tensor,
        RotaryTable {
            positions: &ints(launcher, &[case.num_tokens], positions),
            table: &angles.tensor,
        },
        &q_out.tensor,
        &k_out.tensor,
    )
    .unwrap();
    for (name, out, x, heads) in [
        ("q", &q_out, &q, case.num_heads),
        ("k", &k_out, &k, case.num_kv_heads),
    ] {
        let exact = host(Arith::Exact, x, positions, heads, case);
        let plain = host(Arith::Plain(dtype), x, positions, heads, case);
        assert_close(name, dtype, &out.read(launcher), &exact, &plain);
    }
}

fn store_case(launcher: &Launcher, case: &Case, dtype: Dtype, layout: Layout) {
    let q_shape = [case.num_tokens, case.num_heads, case.head_dim];
    let k_shape = [case.num_tokens, case.num_kv_heads, case.head_dim];
    let cache_shape = [4, 3, case.num_kv_heads, case.head_dim];
    let num_slots = 12;
    let mut random = Random::new(case.head_dim as u64 + 7);
    let q = random.values(dtype, 3.0, q_shape.iter().product());
    let k = random.values(dtype, 3.0, k_shape.iter().product());
    let v = random.values(dtype, 3.0, k_shape.iter().product());
    let positions = case.positions();
    let mut slots: Vec<i32> = random
        .shuffled(num_slots)
        .iter()
        .map(|&s| s as i32)
        .collect();
    slots.truncate(case.num_tokens);
    if let [_, skipped, ..] = slots.as_mut_slice() {
        *skipped = -1;
    }

    let angles = table(case.rotary_dim);
    let angles = Placed::dense(
        launcher,
        Dtype::F32,
        &[MAX_POSITIONS, case.rotary_dim],
        &angles,
    );
    let q_out = Placed::poison(launcher, dtype, &q_shape, layout);
    let k_cache = Placed::poison(launcher, dtype, &cache_shape, Layout::Dense);
    let v_cache = Placed::poison(launcher, dtype, &cache_shape, Layout::Dense);
    rotary_and_store(
        launcher,
        &Placed::new(launcher, dtype, &q_shape, layout, &q).tensor,
        &Placed::new(launcher, dtype, &k_shape, layout, &k).tensor,
        &Placed::new(launcher, dtype, &k_shape, Layout::Pitched, &v).tensor,
        RotaryTable {
            positions: &ints(launcher, &[case.num_tokens], &positions),
            table: &angles.tensor,
        },
        &ints(launcher, &[case.num_tokens], &slots),
        &q_out.tensor,
        &k_cache.tensor,
        &v_cache.tensor,
        None,
    )
    .unwrap();

    let exact = host(Arith::Exact, &q, &positions, case.num_heads, case);
    let plain = host(Arith::Plain(dtype), &q, &positions, case.num_heads, case);
    assert_close("q", dtype, &q_out.read(launcher), &exact, &plain);
    let exact = host(Arith::Exact, &k, &positions, case.num_kv_heads, case);
    let plain = host(Arith::Plain(dtype), &k, &positions, case.num_kv_heads, case);
    let row = case.num_kv_heads * case.head_dim;
    let (k_stored, v_stored) = (k_cache.read(launcher), v_cache.read(launcher));
    let mut v_expected = vec![f64::NAN; num_slots * row];
    for slot in 0..num_slots {
        let to = slot * row..(slot + 1) * row;
        match slots.iter().position(|&s| s == slot as i32) {
            Some(token) => {
                let from = token * row..(token + 1) * row;
                let (exact, plain) = (&exact[from.clone()], &plain[from.clone()]);
                assert_close("k_cache", dtype, &k_stored[to.clone()], exact, plain);
                v_expected[to].copy_from_slice(&v[from]);
            }
            None => assert!(
                k_stored[to].iter().all(|x| x.is_nan()),
                "slot {slot} was written"
            ),
        }
    }
    assert_same("v_cache", &v_stored, &v_expected);
}
