//! The two ceilings of a device.

use std::time::Instant;

use burn::tensor::{DType, Device, Distribution, Tensor};

use crate::kernel::{CubeDevice, Effort};
use crate::median;

/// What the device reaches when it does nothing else.
#[derive(Debug, Clone, Copy)]
pub struct Ceilings {
    /// Bytes read and written per second by a copy that no cache holds.
    pub copy_bytes_per_s: f64,
    /// Floating-point operations per second of a large matrix product.
    pub matmul_flop_per_s: f64,
}

impl Ceilings {
    /// Measures the device of this name; a few seconds.
    ///
    /// The product is the faster one of the backend's own and of the op that models use, in the dtype of the model,
    /// unless `matmul_flop_per_s` says what others measured.
    ///
    /// # Errors
    /// If the copy cannot be timed.
    ///
    /// # Panics
    /// If the device faults.
    pub fn measure(
        name: &str,
        device: &Device,
        dtype: DType,
        matmul_flop_per_s: Option<f64>,
    ) -> Result<Self, String> {
        let is_host = matches!(name, "flex" | "cpu");
        let copy_bytes_per_s = match is_host {
            true => copy_on_host(),
            false => CubeDevice::open(name)?.copy_bytes_per_second(&Effort {
                samples: 9,
                window: 2e-3,
                budget: 1.0,
                graphs: false,
            })?,
        };
        let size = if is_host { 1024 } else { 8192 };
        Ok(Self {
            copy_bytes_per_s,
            matmul_flop_per_s: matmul_flop_per_s.unwrap_or_else(|| matmul(device, dtype, size)),
        })
    }
}

/// Seconds of `work`, which must leave nothing queued; the median of five after one that warms up.
fn seconds(mut work: impl FnMut()) -> f64 {
    let times = (0..6).map(|_| {
        let begin = Instant::now();
        work();
        begin.elapsed().as_secs_f64()
    });
    let times: Vec<f64> = times.skip(1).collect();
    median(&times)
}

/// The threads of the machine share the copy, because a backend's own copy is single-threaded and would be too easy a
/// bar.
fn copy_on_host() -> f64 {
    const ELEMENTS: usize = 64 << 20;
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
    let from = vec![1f32; ELEMENTS];
    let mut to = vec![0f32; ELEMENTS];
    let part = ELEMENTS.div_ceil(threads);
    let time = seconds(|| {
        std::thread::scope(|scope| {
            for (from, to) in from.chunks(part).zip(to.chunks_mut(part)) {
                scope.spawn(|| to.copy_from_slice(from));
            }
        });
    });
    2.0 * 4.0 * ELEMENTS as f64 / time
}

fn matmul(device: &Device, dtype: DType, size: usize) -> f64 {
    let random = || {
        let distribution = Distribution::Uniform(-1.0, 1.0);
        Tensor::<2>::random([size, size], distribution, (device, dtype))
    };
    let (a, b) = (random(), random());
    let sync = || device.sync().expect("the device works");
    let backend = seconds(|| {
        drop(a.clone().matmul(b.clone().transpose()));
        sync();
    });
    let op = seconds(|| {
        drop(burn_paged::linear(a.clone(), &b, None));
        sync();
    });
    2.0 * (size as f64).powi(3) / backend.min(op)
}
