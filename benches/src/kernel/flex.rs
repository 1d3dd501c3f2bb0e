//! Tensors of Burn's Flex backend with the values that kernels get.

use burn::tensor::{DType, Device, Tensor, TensorData};

use super::{Dtype, Values};

/// The dtype as Burn names it.
pub fn dtype(dtype: Dtype) -> DType {
    match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::Bf16 => DType::BF16,
        Dtype::E4m3 => DType::U8,
    }
}

/// A tensor of the first elements of `values`.
pub fn filled<const D: usize>(
    device: &Device,
    shape: [usize; D],
    dtype_: Dtype,
    values: Values,
) -> Tensor<D> {
    let len = shape.iter().product();
    let numbers: Vec<f32> = values.range(0, len).iter().map(|&x| x as f32).collect();
    Tensor::from_data(TensorData::new(numbers, shape), (device, dtype(dtype_)))
}

/// Elements `from .. from + len` in row-major order.
pub fn elements<const D: usize>(tensor: &Tensor<D>, from: usize, len: usize) -> Vec<f64> {
    let data = tensor.clone().cast(DType::F32).into_data();
    let numbers = data.iter::<f32>().skip(from).take(len);
    numbers.map(f64::from).collect()
}
