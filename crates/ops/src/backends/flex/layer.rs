//! Norms, rotary and the gated activation, row by row in f32.

use burn::tensor::Shape;
use burn_flex::FlexTensor;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::{
    element::FlexElement,
    simd,
    view::{self, View, indices, readable},
};

/// Fewer elements than this per op are not worth waking another thread for.
const PARALLEL_ELEMENTS: usize = 1 << 15;

/// Builds `[rows, width]` by one call of `row` per row, in parallel where that pays.
pub(super) fn by_rows<E: FlexElement>(
    rows: usize,
    width: usize,
    row: impl Fn(usize, &mut [E]) + Sync,
) -> Vec<E> {
    let mut values = vec![E::zeroed(); rows * width];
    if rows * width < PARALLEL_ELEMENTS {
        values
            .chunks_mut(width)
            .enumerate()
            .for_each(|(at, out)| row(at, out));
    } else {
        values
            .par_chunks_mut(width)
            .enumerate()
            .for_each(|(at, out)| row(at, out));
    }
    values
}

pub(super) fn add<E: FlexElement>(a: &FlexTensor, b: &FlexTensor) -> FlexTensor {
    let (a, b) = (readable::<2>(a), readable::<2>(b));
    let (a, b) = (View::<E, 2>::new(&a), View::<E, 2>::new(&b));
    let (a, b) = (
        a.expect("made readable above"),
        b.expect("made readable above"),
    );
    let [rows, width] = a.shape();
    let values = by_rows::<E>(rows, width, |row, out| {
        let (mut sum, mut other) = (vec![0.0; width], vec![0.0; width]);
        E::widen(a.row(&[row]), &mut sum);
        E::widen(b.row(&[row]), &mut other);
        sum.iter_mut()
            .zip(&other)
            .for_each(|(sum, other)| *sum += other);
        E::round(&sum, out);
    });
    view::from_vec(values, Shape::new([rows, width]))
}

pub(super) fn rms_norm<E: FlexElement>(
    x: &FlexTensor,
    weight: &FlexTensor,
    epsilon: f64,
) -> FlexTensor {
    let (x, weight) = (readable::<2>(x), readable::<1>(weight));
    let x = View::<E, 2>::new(&x).expect("made readable above");
    let [rows, width] = x.shape();
    let mut scale = vec![0.0; width];
    E::widen(
        View::<E, 1>::new(&weight)
            .expect("made readable above")
            .row(&[]),
        &mut scale,
    );
    let values = by_rows::<E>(rows, width, |row, out| {
        let mut values = vec![0.0; width];
        E::widen(x.row(&[row]), &mut values);
        let squares = simd::dispatch(Dot(&values, &values));
        let inverse = 1.0 / (squares / width as f32 + epsilon as f32).sqrt();
        values.iter_mut().for_each(|value| *value *= inverse);
        // The contract rounds to the dtype before the weight and again after it.
        E::round(&values, out);
        E::widen(out, &mut values);
        values
            .iter_mut()
            .zip(&scale)
            .for_each(|(value, scale)| *value *= scale);
        E::round(&values, out);
    });
    view::from_vec(values, Shape::new([rows, width]))
}

struct Dot<'a>(&'a [f32], &'a [f32]);

impl WithSimd for Dot<'_> {
    type Output = f32;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f32 {
        simd::dots(simd, [self.0], [self.1])[0][0]
    }
}

/// Rotates every head of `[num_tokens, num_heads, head_dim]` by its token's position.
pub(super) fn rotate<E: FlexElement>(
    x: &FlexTensor,
    positions: &FlexTensor,
    table: &FlexTensor,
) -> FlexTensor {
    let (x, table) = (readable::<3>(x), readable::<2>(table));
    let x = View::<E, 3>::new(&x).expect("made readable above");
    let table = View::<f32, 2>::new(&table).expect("made readable above");
    let positions = indices(positions);
    let [num_tokens, num_heads, head_dim] = x.shape();
    let half = table.shape()[1] / 2;
    let values = by_rows::<E>(num_tokens, num_heads * head_dim, |token, out| {
        let (cos, sin) = table.row(&[positions[token] as usize]).split_at(half);
        let mut head_values = vec![0.0; head_dim];
        for (head, out) in out.chunks_mut(head_dim).enumerate() {
            E::widen(x.row(&[token, head]), &mut head_values);
            let (first, second) = head_values[..2 * half].split_at_mut(half);
            for at in 0..half {
                let (a, b) = (first[at], second[at]);
                first[at] = a * cos[at] - b * sin[at];
                second[at] = b * cos[at] + a * sin[at];
            }
            E::round(&head_values, out);
        }
    });
    view::from_vec(values, Shape::new([num_tokens, num_heads, head_dim]))
}

pub(super) fn silu_and_mul<E: FlexElement>(x: &FlexTensor) -> FlexTensor {
    let x = readable::<2>(x);
    let x = View::<E, 2>::new(&x).expect("made readable above");
    let [rows, double] = x.shape();
    let width = double / 2;
    let values = by_rows::<E>(rows, width, |row, out| {
        let mut values = vec![0.0; double];
        E::widen(x.row(&[row]), &mut values);
        let (gate, up) = values.split_at_mut(width);
        simd::dispatch(SiluAndMul { gate, up });
        E::round(gate, out);
    });
    view::from_vec(values, Shape::new([rows, width]))
}

/// `gate = silu(gate) · up`.
struct SiluAndMul<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
}

impl WithSimd for SiluAndMul<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        // Plain Rust: inside this call the compiler may use the machine's vectors.
        for (gate, up) in self.gate.iter_mut().zip(self.up) {
            *gate = *gate / (1.0 + simd::exp(-*gate)) * up;
        }
    }
}
