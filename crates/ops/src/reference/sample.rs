//! Sampling on the host: reads the logits back.

use burn::tensor::{DType, Int, Tensor, TensorData};

use crate::{SamplingOptions, sampling::sample_row};

/// [`greedy`](crate::greedy).
pub fn greedy(logits: Tensor<2>) -> Tensor<1, Int> {
    let options = vec![SamplingOptions::default(); logits.dims()[0]];
    sample(logits, &options)
}

/// [`sample`](crate::sample).
pub fn sample(logits: Tensor<2>, options: &[SamplingOptions]) -> Tensor<1, Int> {
    let device = logits.device();
    let vocab_size = logits.dims()[1].max(1);
    let values: Vec<f32> = logits.cast(DType::F32).into_data().iter::<f32>().collect();
    let ids: Vec<i32> = (values.chunks(vocab_size).zip(options))
        .map(|(row, options)| sample_row(row, options).map_or(-1, |token| token as i32))
        .collect();
    let num_rows = ids.len();
    Tensor::from_data(TensorData::new(ids, [num_rows]), (&device, DType::I32))
}
