//! Vector code for the width that the machine has, chosen at run time by `pulp`.

#![allow(
    clippy::needless_range_loop,
    reason = "loops over registers index several arrays at once"
)]

use pulp::{Arch, Simd, WithSimd};

/// Runs `op` compiled for the widest vectors of this machine.
pub(super) fn dispatch<O: WithSimd>(op: O) -> O::Output {
    Arch::new().dispatch(op)
}

/// Asks for the cache lines of a row that is read soon. Does nothing where that cannot be said.
#[inline(always)]
pub(super) fn prefetch<E>(row: &[E]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

        const LINE: usize = 64;
        let start = row.as_ptr().cast::<i8>();
        let mut offset = 0;
        while offset < size_of_val(row) {
            // SAFETY: a prefetch reads nothing that a program could see, and faults at no address.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(start.wrapping_add(offset)) };
            offset += LINE;
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = row;
}

/// Dot products of `ROWS` rows of weights with `TOKENS` rows of activations, all of one length.
///
/// Plain loops on purpose: a closure, as in `array::from_fn`, may not be inlined, and is then compiled without the vector
/// instructions of its caller.
#[inline(always)]
pub(super) fn dots<S: Simd, const ROWS: usize, const TOKENS: usize>(
    simd: S,
    weights: [&[f32]; ROWS],
    tokens: [&[f32]; TOKENS],
) -> [[f32; TOKENS]; ROWS] {
    let empty: (&[S::f32s], &[f32]) = (&[], &[]);
    let (mut weight_parts, mut token_parts) = ([empty; ROWS], [empty; TOKENS]);
    for row in 0..ROWS {
        weight_parts[row] = S::as_simd_f32s(weights[row]);
    }
    for token in 0..TOKENS {
        token_parts[token] = S::as_simd_f32s(tokens[token]);
    }
    // Equal lengths, spelled out so that the bounds checks leave the loop.
    let len = token_parts[0].0.len();
    for part in weight_parts.iter_mut().chain(&mut token_parts) {
        part.0 = &part.0[..len];
    }
    let mut sums = [[simd.splat_f32s(0.0); TOKENS]; ROWS];
    for at in 0..len {
        for token in 0..TOKENS {
            let x = token_parts[token].0[at];
            for row in 0..ROWS {
                let weight = weight_parts[row].0[at];
                sums[row][token] = simd.mul_add_f32s(weight, x, sums[row][token]);
            }
        }
    }
    let mut dots = [[0.0; TOKENS]; ROWS];
    for row in 0..ROWS {
        for token in 0..TOKENS {
            let mut dot = simd.reduce_sum_f32s(sums[row][token]);
            let (weights, tokens) = (weight_parts[row].1, token_parts[token].1);
            for at in 0..weights.len() {
                dot += weights[at] * tokens[at];
            }
            dots[row][token] = dot;
        }
    }
    dots
}

/// `exp(x)` by range reduction and a polynomial, so that a loop over it vectorizes.
///
/// Relative error below 2e-7 for `x` in `[-87, 88]`; 0 below, as the softmax wants.
///
/// # Source
/// Cody and Waite's reduction with the minimax coefficients of Cephes `expf`.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding and subtracting 1.5 · 2^23 rounds to the nearest integer in the default rounding mode.
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.clamp(-87.3, 88.3);
    let n = (clamped * LOG2_E + ROUND) - ROUND;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let p = p * r * r + r + 1.0;
    let scale = f32::from_bits(((n as i32 + 127) as u32) << 23);
    // Below the clamp the result is 0; NaN stays NaN.
    match x < -87.3 {
        true => 0.0,
        false => p * scale,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_everywhere() {
        let mut x = -87.0f32;
        while x < 88.0 {
            let expected = f64::from(x).exp();
            let error = (f64::from(exp(x)) - expected).abs() / expected;
            assert!(error < 2e-7, "exp({x}): relative error {error:e}");
            x += 0.013;
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-200.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn dots_handle_tails() {
        struct Op<'a>(&'a [f32], &'a [f32]);
        impl WithSimd for Op<'_> {
            type Output = [[f32; 1]; 2];
            #[inline(always)]
            fn with_simd<S: Simd>(self, simd: S) -> Self::Output {
                dots(simd, [self.0, self.1], [self.1])
            }
        }
        for len in [1, 3, 16, 17, 35] {
            let a: Vec<f32> = (0..len).map(|i| (i as f32) - 2.0).collect();
            let b: Vec<f32> = (0..len).map(|i| 3.0 - (i as f32)).collect();
            let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
            let [[ab], [bb]] = dispatch(Op(&a, &b));
            assert_eq!((ab, bb), (dot(&a, &b), dot(&b, &b)), "length {len}");
        }
    }
}
