//! Two results of attention over different keys as one.

use burn::tensor::Shape;
use burn_flex::FlexTensor;

use super::{
    element::FlexElement,
    layer::by_rows,
    view::{self, View, readable},
};

/// What each part contributes to one row; `None` for a part that saw no key, whose values are not read.
#[derive(Clone, Copy)]
pub(super) struct Shares([Option<f32>; 2]);

/// The merged log-sum-exp, `[num_tokens, num_heads]`, and the shares of its rows.
pub(super) fn shares(a: &FlexTensor, b: &FlexTensor) -> (FlexTensor, Vec<Shares>) {
    let (a, b) = (readable::<2>(a), readable::<2>(b));
    let a = View::<f32, 2>::new(&a).expect("made readable above");
    let b = View::<f32, 2>::new(&b).expect("made readable above");
    let [num_tokens, num_heads] = a.shape();
    let pairs = (0..num_tokens).flat_map(|token| a.row(&[token]).iter().zip(b.row(&[token])));
    let (lse, shares): (Vec<f32>, Vec<Shares>) = pairs.map(|(a, b)| share(*a, *b)).unzip();
    (
        view::from_vec(lse, Shape::new([num_tokens, num_heads])),
        shares,
    )
}

fn share(a: f32, b: f32) -> (f32, Shares) {
    const NONE: f32 = f32::NEG_INFINITY;
    match (a == NONE, b == NONE) {
        (true, true) => (NONE, Shares([None, None])),
        (false, true) => (a, Shares([Some(1.0), None])),
        (true, false) => (b, Shares([None, Some(1.0)])),
        (false, false) => {
            let max = a.max(b);
            let (a, b) = ((a - max).exp(), (b - max).exp());
            let sum = a + b;
            (max + sum.ln(), Shares([Some(a / sum), Some(b / sum)]))
        }
    }
}

/// The sum of both parts, `[num_tokens, num_heads, head_dim]`, weighted by the shares of each row.
pub(super) fn merge<E: FlexElement>(
    a: &FlexTensor,
    b: &FlexTensor,
    shares: &[Shares],
) -> FlexTensor {
    let (a, b) = (readable::<3>(a), readable::<3>(b));
    let parts = [&a, &b].map(|part| View::<E, 3>::new(part).expect("made readable above"));
    let [num_tokens, num_heads, head_dim] = parts[0].shape();
    let values = by_rows::<E>(num_tokens * num_heads, head_dim, |row, out| {
        let (mut sum, mut values) = (vec![0.0; head_dim], vec![0.0; head_dim]);
        for (part, share) in parts.iter().zip(shares[row].0) {
            let Some(share) = share else { continue };
            E::widen(part.row(&[row / num_heads, row % num_heads]), &mut values);
            sum.iter_mut()
                .zip(&values)
                .for_each(|(sum, value)| *sum += value * share);
        }
        E::round(&sum, out);
    });
    view::from_vec(values, Shape::new([num_tokens, num_heads, head_dim]))
}
