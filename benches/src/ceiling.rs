//! The two ceilings of a device.

use std::time::Instant;

use burn::tensor::{DType, Device, Distribution, Tensor};

use crate::median;

/// What the device reaches when it does nothing else.
#[derive(Debug, Clone, Copy)]
pub struct Ceilings {
    /// Bytes read and written per second by a copy that no cache holds.
    pub copy_bytes_per_s: f64,
    /// Floating-point operations per second of a large matrix product by the backend's own kernel.
    pub matmul_flop_per_s: f64,
}

impl Ceilings {
    /// Measures both in f32; a second or two on a CPU.
    ///
    /// # Panics
    /// If the device faults.
    pub fn measure(device: &Device) -> Self {
        Self {
            copy_bytes_per_s: copy(device),
            matmul_flop_per_s: matmul(device),
        }
    }
}

/// Seconds of `work`, which must leave nothing queued; the median of five after one that warms up.
fn seconds(device: &Device, mut work: impl FnMut()) -> f64 {
    let times = (0..6).map(|_| {
        let begin = Instant::now();
        work();
        device.sync().expect("the device works");
        begin.elapsed().as_secs_f64()
    });
    let times: Vec<f64> = times.skip(1).collect();
    median(&times)
}

/// Reads one large tensor and writes another. On the host the threads of the machine share the copy, because the
/// backend's own copy is single-threaded and would be too easy a bar.
fn copy(device: &Device) -> f64 {
    const ELEMENTS: usize = 64 << 20;
    let bytes = 2.0 * 4.0 * ELEMENTS as f64;
    if is_host(device) {
        let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
        let from = vec![1f32; ELEMENTS];
        let mut to = vec![0f32; ELEMENTS];
        let part = ELEMENTS.div_ceil(threads);
        let time = seconds(device, || {
            std::thread::scope(|scope| {
                for (from, to) in from.chunks(part).zip(to.chunks_mut(part)) {
                    scope.spawn(|| to.copy_from_slice(from));
                }
            });
        });
        return bytes / time;
    }
    let x = Tensor::<1>::ones([ELEMENTS], (device, DType::F32));
    let time = seconds(device, || drop(x.clone() + 1.0));
    bytes / time
}

fn matmul(device: &Device) -> f64 {
    let size = if is_host(device) { 1024 } else { 8192 };
    let random = || {
        let options = (device, DType::F32);
        Tensor::<2>::random([size, size], Distribution::Uniform(-1.0, 1.0), options)
    };
    let (a, b) = (random(), random());
    let time = seconds(device, || drop(a.clone().matmul(b.clone().transpose())));
    2.0 * (size as f64).powi(3) / time
}

fn is_host(device: &Device) -> bool {
    let name = format!("{device:?}");
    name.contains("Flex") || name.contains("Cpu")
}
