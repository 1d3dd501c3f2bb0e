//! Logits to token ids.

use burn::tensor::{Device, Int, Tensor};

use crate::{SAMPLING_WORDS, SamplingOptions, check, ops, reference};

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
    let [num_rows, vocab_size] = logits.dims();
    if num_rows > 0 && vocab_size > 0 && ops::has_sample(&logits.device(), vocab_size) {
        return ops::sample(logits, options);
    }
    reference::sample(logits, options)
}

/// [`sample`] by options that are on the device already, so that a captured call draws anew after they are rewritten.
///
/// # Shapes
/// - `logits`: `[num_rows, vocab_size]`, f32 | f16 | bf16
/// - `words`: `[num_rows, SAMPLING_WORDS]` i32, contiguous, rows as [`SamplingOptions::to_words`] gives them
/// - returns: `[num_rows]` i32
///
/// # Panics
/// If shapes or dtypes disagree, or the device [does not sample](samples_on_device) rows of this length.
pub fn sample_by_words(logits: Tensor<2>, words: &Tensor<2, Int>) -> Tensor<1, Int> {
    const OP: &str = "sample_by_words";
    let [num_rows, vocab_size] = logits.dims();
    check::float_dtype(OP, "logits", logits.dtype());
    check::index_tensor(OP, "words", words, [num_rows, SAMPLING_WORDS]);
    assert!(
        num_rows > 0 && vocab_size > 0 && samples_on_device(&logits.device(), vocab_size),
        "{OP}: the device does not sample {num_rows} rows of {vocab_size} logits"
    );
    ops::sample_by_words(logits, words.clone())
}

/// Whether `device` itself samples rows of `vocab_size` logits. Where it does not, [`sample`] reads them back.
pub fn samples_on_device(device: &Device, vocab_size: usize) -> bool {
    ops::has_sample(device, vocab_size)
}
