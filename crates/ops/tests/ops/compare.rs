//! One comparison for all tests.

use burn::tensor::DType;

/// Error that is always allowed, relative to the largest expected value: a few units in the last place, because
/// two orders of summation may differ by that even where the plain implementation happens to be exact.
fn floor(dtype: DType) -> f32 {
    match dtype {
        DType::F32 => 1e-5,
        DType::F16 => 1e-3,
        DType::BF16 => 8e-3,
        other => panic!("no floor for {other:?}"),
    }
}

/// The largest difference, and where it is; NaN counts as infinitely wrong.
pub(crate) fn worst(found: &[f32], expected: &[f32]) -> (usize, f32) {
    assert_eq!(found.len(), expected.len(), "lengths differ");
    let difference = |(found, expected): (&f32, &f32)| {
        // Equal infinities are equal.
        if found == expected {
            0.0
        } else {
            (found - expected).abs()
        }
    };
    let rank = |value: f32| if value.is_nan() { f32::INFINITY } else { value };
    (found
        .iter()
        .zip(expected)
        .map(difference)
        .map(rank)
        .enumerate())
    .fold(
        (0, 0.0),
        |worst, next| if next.1 > worst.1 { next } else { worst },
    )
}

/// Asserts `max|found - exact| <= 2 · max|plain - exact| + floor`, where `plain` is the reference run in the dtype of
/// `found`.
pub(crate) fn assert_close(
    what: &str,
    found: &[f32],
    exact: &[f32],
    plain: Option<&[f32]>,
    dtype: DType,
) {
    let plain_error = plain.map_or(0.0, |plain| {
        let error = worst(plain, exact).1;
        if error.is_finite() { error } else { 0.0 }
    });
    let finite = exact.iter().copied().filter(|value| value.is_finite());
    let magnitude = finite.fold(1.0, |largest: f32, value| largest.max(value.abs()));
    let allowed = 2.0 * plain_error + floor(dtype) * magnitude;
    let (at, error) = worst(found, exact);
    assert!(
        error <= allowed,
        "{what} {dtype:?}: element {at} is {}, expected {}: error {error:e} above {allowed:e} (plain {plain_error:e})",
        found[at],
        exact[at]
    );
}
