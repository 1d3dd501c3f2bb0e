//! `rms_norm` and `add_rms_norm`.

use burn_paged_kernels::{Launcher, add_rms_norm, rms_norm};

use crate::arith::{Arith, Dtype};
use crate::compare::{assert_close, assert_same};
use crate::place::{Layout, Placed, launchers, runs};
use crate::random::Random;

const EPSILON: f64 = 1e-5;

fn host(arith: Arith, x: &[f64], weight: &[f64]) -> Vec<f64> {
    let rows = x.chunks_exact(weight.len());
    rows.flat_map(|row| {
        let squares = row.iter().fold(0.0, |sum, x| arith.acc(sum + x * x));
        let mean = arith.acc(squares / row.len() as f64);
        let factor = arith.acc(1.0 / arith.acc(mean + EPSILON).sqrt());
        let scaled = row.iter().map(move |x| arith.op(arith.acc(x * factor)));
        scaled.zip(weight).map(move |(x, w)| arith.op(x * w))
    })
    .collect()
}

#[test]
fn rows_are_normalized_then_rounded_then_weighted() {
    let mut count = 0;
    for (rows, columns) in [
        (1, 1),
        (3, 576),
        (7, 72),
        (2, 33),
        (70, 128),
        (1, 4096),
        (5, 100),
    ] {
        for dtype in Dtype::ALL {
            for layout in [
                Layout::Dense,
                Layout::Pitched,
                Layout::Slice,
                Layout::OddSlice,
            ] {
                for (launcher, scale) in launchers().into_iter().zip([1.0, 30.0]) {
                    if runs(&launcher, dtype) {
                        norm_case(&launcher, [rows, columns], dtype, layout, scale);
                        add_norm_case(&launcher, [rows, columns], dtype, layout, scale);
                        count += 2;
                    }
                }
            }
        }
    }
    println!("rms_norm, add_rms_norm: {count} cases");
}

fn norm_case(launcher: &Launcher, shape: [usize; 2], dtype: Dtype, layout: Layout, scale: f64) {
    let mut random = Random::new(shape[1] as u64);
    let x = random.values(dtype, scale, shape[0] * shape[1]);
    let weight = random.values(dtype, 2.0, shape[1]);
    let out = Placed::poison(launcher, dtype, &shape, layout.other());
    rms_norm(
        launcher,
        &Placed::new(launcher, dtype, &shape, layout, &x).tensor,
        &Placed::dense(launcher, dtype, &shape[1..], &weight).tensor,
        EPSILON as f32,
        &out.tensor,
    )
    .unwrap();
    let exact = host(Arith::Exact, &x, &weight);
    let plain = host(Arith::Plain(dtype), &x, &weight);
    assert_close(
        &format!("rms_norm {shape:?}"),
        dtype,
        &out.read(launcher),
        &exact,
        &plain,
    );
}

fn add_norm_case(launcher: &Launcher, shape: [usize; 2], dtype: Dtype, layout: Layout, scale: f64) {
    let mut random = Random::new(shape[1] as u64 + 1);
    let x = random.values(dtype, scale, shape[0] * shape[1]);
    let residual = random.values(dtype, scale, shape[0] * shape[1]);
    let weight = random.values(dtype, 2.0, shape[1]);
    let sum = Placed::poison(launcher, dtype, &shape, layout);
    let out = Placed::poison(launcher, dtype, &shape, Layout::Dense);
    add_rms_norm(
        launcher,
        &Placed::new(launcher, dtype, &shape, layout, &x).tensor,
        &Placed::new(launcher, dtype, &shape, Layout::Pitched, &residual).tensor,
        &Placed::dense(launcher, dtype, &shape[1..], &weight).tensor,
        EPSILON as f32,
        &sum.tensor,
        &out.tensor,
    )
    .unwrap();
    let added = x.iter().zip(&residual).map(|(a, b)| a + b);
    let added: Vec<f64> = added
        .map(|sum| dtype.round(f64::from(sum as f32)))
        .collect();
    assert_same("sum", &sum.read(launcher), &added);
    let exact = host(Arith::Exact, &added, &weight);
    let plain = host(Arith::Plain(dtype), &added, &weight);
    assert_close(
        &format!("add_rms_norm {shape:?}"),
        dtype,
        &out.read(launcher),
        &exact,
        &plain,
    );
}

/// "Cast down, then multiply" and "multiply, then cast down" differ; greedy decoding shows it.
#[test]
fn the_normalized_row_is_rounded_before_the_weight() {
    for launcher in launchers() {
        let dtype = Dtype::F16;
        if !runs(&launcher, dtype) {
            continue;
        }
        // One element: x / |x| is 1 less a little, which f16 rounds to 1 − 2⁻¹¹ or to 1.
        let x: Vec<f64> = (1..200)
            .map(|i| dtype.round(f64::from(i) * 0.003))
            .collect();
        let weight = vec![dtype.round(1.0 + 2f64.powi(-10) * 37.0)];
        let out = Placed::poison(&launcher, dtype, &[x.len(), 1], Layout::Dense);
        rms_norm(
            &launcher,
            &Placed::dense(&launcher, dtype, &[x.len(), 1], &x).tensor,
            &Placed::dense(&launcher, dtype, &[1], &weight).tensor,
            EPSILON as f32,
            &out.tensor,
        )
        .unwrap();
        let expected = host(Arith::Plain(dtype), &x, &weight);
        let actual = out.read(&launcher);
        let equal = actual.iter().zip(&expected).filter(|(a, e)| a == e).count();
        // The factor itself may differ in its last bit, which moves a rounding now and then.
        assert!(
            equal * 100 >= expected.len() * 98,
            "{equal} of {} agree",
            expected.len()
        );
    }
}
