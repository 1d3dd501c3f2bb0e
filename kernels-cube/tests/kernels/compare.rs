//! The one comparison of a kernel with the host.

use crate::arith::Dtype;

/// Fails unless the error is at most twice that of the plain arithmetic, plus the dtype's floor.
///
/// Infinities must agree exactly, and nothing may be NaN.
pub(crate) fn assert_close(what: &str, dtype: Dtype, actual: &[f64], exact: &[f64], plain: &[f64]) {
    assert_eq!(actual.len(), exact.len(), "{what}: size");
    let finite = || exact.iter().filter(|x| x.is_finite());
    let largest = finite().fold(0.0f64, |m, x| m.max(x.abs()));
    let error = |values: &[f64]| {
        let pairs = values.iter().zip(exact).filter(|(_, e)| e.is_finite());
        pairs.map(|(a, e)| (a - e).abs()).fold(0.0f64, f64::max)
    };
    let allowed = 2.0 * error(plain) + dtype.floor() * largest;

    for (i, (&a, &e)) in actual.iter().zip(exact).enumerate() {
        let good = if e.is_finite() {
            (a - e).abs() <= allowed
        } else {
            a == e
        };
        assert!(
            good,
            "{what} {dtype:?}: element {i} is {a}, expected {e} within {allowed:e}"
        );
    }
}

/// Fails unless all values agree bit for bit, NaN with NaN.
pub(crate) fn assert_same(what: &str, actual: &[f64], expected: &[f64]) {
    assert_eq!(actual.len(), expected.len(), "{what}: size");
    for (i, (a, e)) in actual.iter().zip(expected).enumerate() {
        let good = a == e || (a.is_nan() && e.is_nan());
        assert!(good, "{what}: element {i} is {a}, expected {e}");
    }
}
