//! Token ids by the host definition, a row per task.

use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::{
    element::FlexElement,
    view::{self, View, indices, readable},
};
use crate::{
    SAMPLING_WORDS, SamplingOptions,
    sampling::{SamplingError, argmax, sample_row},
};

pub(super) fn greedy<E: FlexElement>(logits: &FlexTensor) -> FlexTensor {
    each_row::<E>(logits, |_, row| argmax(row))
}

/// Draws by options given as words, `[num_rows, SAMPLING_WORDS]`.
pub(super) fn sample<E: FlexElement>(logits: &FlexTensor, options: &FlexTensor) -> FlexTensor {
    let words = indices(options);
    let (words, _) = words.as_chunks::<SAMPLING_WORDS>();
    each_row::<E>(logits, |at, row| {
        sample_row(row, &SamplingOptions::from_words(words[at]))
    })
}

/// An id per row, -1 where `pick` finds none.
fn each_row<E: FlexElement>(
    logits: &FlexTensor,
    pick: impl Fn(usize, &[f32]) -> Result<usize, SamplingError> + Sync,
) -> FlexTensor {
    let logits = readable::<2>(logits);
    let rows = View::<E, 2>::new(&logits).expect("made readable above");
    let [num_rows, vocab_size] = rows.shape();
    let ids = (0..num_rows).into_par_iter().map_init(
        || vec![0.0; vocab_size],
        |values, at| {
            E::widen(rows.row(&[at]), values);
            pick(at, values).map_or(-1, |token| token as i32)
        },
    );
    view::from_indices(ids.collect())
}
