//! Logits to token ids.

use burn::tensor::{Int, Tensor};

use crate::{SamplingOptions, check, ops, reference};

/// Index of the largest logit of each row, the lowest on ties; -1 for a row that holds NaN or plus infinity, or minus
/// infinity alone.
///
/// # Shapes
/// - `logits`: `[num_rows, vocab_size]`, f32 | f16 | bf16
/// - returns: `[num_rows]` i32
///
/// # Panics
/// If the dtype is not a supported float.
pub fn greedy(logits: Tensor<2>) -> Tensor<1, Int> {
    check::float_dtype("greedy", "logits", logits.dtype());
    if !logits.dims().contains(&0) && ops::has_implementation(&logits.device()) {
        return ops::greedy(logits);
    }
    reference::greedy(logits)
}

/// One token of each row, drawn as [`sample_row`](crate::sampling::sample_row) defines; -1 for a row that
/// cannot be sampled.
///
/// # Shapes
/// - `logits`: `[num_rows, vocab_size]`, f32 | f16 | bf16
/// - `options`: one per row
/// - returns: `[num_rows]` i32
///
/// # Numerics
/// On a device logarithms and sums are rounded in another way than on the host: where two tokens score the same up to
/// that, or a token lies on the edge of a filter up to that, the other may be taken.
///
/// # Panics
/// If the number of options differs from the number of rows.
pub fn sample(logits: Tensor<2>, options: &[SamplingOptions]) -> Tensor<1, Int> {
    check::float_dtype("sample", "logits", logits.dtype());
    assert!(
        options.len() == logits.dims()[0],
        "sample: {} rows of logits, {} options",
        logits.dims()[0],
        options.len()
    );
    if !logits.dims().contains(&0) && ops::has_sample(&logits) {
        return ops::sample(logits, options);
    }
    reference::sample(logits, options)
}
