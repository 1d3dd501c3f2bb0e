//! The devices that this build can run on, and the random numbers of the tests.

use burn::tensor::{DType, Device, Tensor, TensorData};
use rand::{RngExt, SeedableRng, rngs::StdRng};

/// Every device that the features of this build bring.
pub(crate) fn devices() -> Vec<(&'static str, Device)> {
    let devices: Vec<(&'static str, Device)> = vec![
        #[cfg(feature = "flex")]
        ("flex", Device::flex()),
        #[cfg(feature = "cpu")]
        ("cpu", Device::cpu()),
        #[cfg(feature = "cuda")]
        ("cuda", Device::cuda(0)),
    ];
    assert!(
        !devices.is_empty(),
        "the tests need a backend feature, for example flex"
    );
    devices
}

/// Whether kernels are compiled for each variant as they are first used, which takes a second each. `burn-paged-kernels`
/// runs its own full table there; here a few cases show that tensors reach the kernels as they should.
pub(crate) fn is_jit(name: &str) -> bool {
    name != "flex"
}

/// The dtypes of the contract that `device` supports; a skip is printed with its reason.
pub(crate) fn dtypes(name: &str, device: &Device) -> Vec<DType> {
    let reason = |dtype: DType| {
        if !device.supports_dtype(dtype) {
            return Some("the device does not support it");
        }
        // The JIT then calls a C runtime function that most C runtimes do not export, and reads give old bytes.
        let is_jit_without_bf16 = name == "cpu" && dtype == DType::BF16 && !host_has_bf16();
        is_jit_without_bf16.then_some("the processor has no bf16 instructions")
    };
    let mut supported = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        match reason(dtype) {
            Some(reason) => println!("skip {dtype:?} on {name}: {reason}"),
            None => supported.push(dtype),
        }
    }
    supported
}

#[cfg(target_arch = "x86_64")]
fn host_has_bf16() -> bool {
    std::is_x86_feature_detected!("avx512bf16")
}

#[cfg(not(target_arch = "x86_64"))]
fn host_has_bf16() -> bool {
    false
}

/// Repeatable random tensors.
pub(crate) struct Random(StdRng);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(StdRng::seed_from_u64(seed))
    }

    pub(crate) fn values(&mut self, len: usize, scale: f32) -> Vec<f32> {
        (0..len)
            .map(|_| self.0.random_range(-1.0..1.0) * scale)
            .collect()
    }

    /// A permutation of `0..len`.
    pub(crate) fn shuffled(&mut self, len: usize) -> Vec<u32> {
        let mut values: Vec<u32> = (0..len as u32).collect();
        for at in (1..len).rev() {
            values.swap(at, self.0.random_range(0..=at));
        }
        values
    }

    /// Uniform in `(-scale, scale)`.
    pub(crate) fn tensor<const D: usize>(
        &mut self,
        shape: [usize; D],
        scale: f32,
        dtype: DType,
        device: &Device,
    ) -> Tensor<D> {
        let values = self.values(shape.iter().product(), scale);
        tensor(values, shape, dtype, device)
    }
}

pub(crate) fn tensor<const D: usize>(
    values: Vec<f32>,
    shape: [usize; D],
    dtype: DType,
    device: &Device,
) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values, shape), (device, dtype))
}

pub(crate) fn host<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    // Without fusion, reads of nothing overflow a count in CubeCL's backend of Burn 0.22.1.
    if tensor.dims().contains(&0) {
        return Vec::new();
    }
    tensor
        .clone()
        .cast(DType::F32)
        .into_data()
        .iter::<f32>()
        .collect()
}
