//! Inputs that the device fills by itself and the host knows without reading them.
//!
//! Element `i` of a tensor is a hash of `i` and the tensor's seed, one of 256 multiples of 1/64 in [-2, 2). All of them
//! are exact in every dtype but e4m3, so device and host agree to the last bit. What a cache of eight bits holds of them is
//! rounded, by the op that stores, with one scale that brings 2 to the largest number.

use burn_paged_kernels::{KvScales, TensorRef, store_kv};
use cubecl::prelude::*;

use super::dtype::e4m3_round;
use super::{CubeDevice, Dtype, ints};

/// A NaN in f32, and two of them in f16 and bf16.
const POISON: u32 = 0x7fc0_7fc0;
/// Four NaN in e4m3.
const POISON_E4M3: u32 = 0x7f7f_7f7f;
/// The scale of every head of a cache of eight bits.
const SCALE: f32 = 2.0 / 448.0;

/// A reproducible sequence of numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Values {
    seed: u32,
    is_quantised: bool,
}

impl Values {
    /// The sequence with number `seed`; different ones have nothing in common.
    pub fn new(seed: usize) -> Self {
        Self {
            seed: mix(seed as u32 ^ 0x9e37_79b9),
            is_quantised: false,
        }
    }

    /// What a cache of eight bits holds of it.
    pub fn quantised(self) -> Self {
        Self {
            is_quantised: true,
            ..self
        }
    }

    /// What it was before a cache of eight bits.
    pub fn unquantised(self) -> Self {
        Self {
            is_quantised: false,
            ..self
        }
    }

    /// What the codes of a cache of eight bits are multiplied with.
    pub fn scale() -> f64 {
        f64::from(SCALE)
    }

    /// Element `index`.
    pub fn at(&self, index: usize) -> f64 {
        // Kernels count in 32 bits, so that sequences repeat after 2³².
        let bits = mix((index as u32).wrapping_add(self.seed));
        let x = (f64::from(bits >> 24) - 128.0) / 64.0;
        match self.is_quantised {
            true => e4m3_round(f64::from(x as f32 * (1.0 / SCALE))) * f64::from(SCALE),
            false => x,
        }
    }

    /// Elements `from .. from + len`.
    pub fn range(&self, from: usize, len: usize) -> Vec<f64> {
        (from..from + len).map(|index| self.at(index)).collect()
    }
}

/// The finalizer of MurmurHash3.
fn mix(bits: u32) -> u32 {
    let bits = (bits ^ (bits >> 16u32)).wrapping_mul(0x85eb_ca6b);
    let bits = (bits ^ (bits >> 13)).wrapping_mul(0xc2b2_ae35);
    bits ^ (bits >> 16)
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn fill_kernel<F: Float>(out: &mut [F], seed: u32, #[define(F)] _dtype: ElemType) {
    if ABSOLUTE_POS < out.len() {
        let bits = u32::cast_from(ABSOLUTE_POS) + seed;
        let bits = (bits ^ (bits >> 16u32)) * 0x85eb_ca6bu32;
        let bits = (bits ^ (bits >> 13)) * 0xc2b2_ae35u32;
        let bits = bits ^ (bits >> 16u32);
        out[ABSOLUTE_POS] = F::cast_from((f32::cast_from(bits >> 24u32) - 128.0f32) / 64.0f32);
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn poison_kernel(out: &mut [u32], bits: u32) {
    if ABSOLUTE_POS < out.len() {
        out[ABSOLUTE_POS] = bits;
    }
}

/// A tensor on the device whose elements the host knows.
#[derive(Debug, Clone)]
pub struct Filled {
    /// The tensor, contiguous.
    pub tensor: TensorRef,
    /// Its elements, in row-major order.
    pub values: Values,
}

impl CubeDevice {
    /// A contiguous tensor filled with the sequence of number `seed`.
    pub fn filled(&self, shape: &[usize], dtype: Dtype, seed: usize) -> Filled {
        let values = Values::new(seed);
        let tensor = self.empty(shape, dtype);
        let len = tensor.num_elements();
        let (count, dim, address) = self.elementwise(len);
        // SAFETY: the buffer holds `len` elements, and the kernel tests for its end.
        unsafe {
            fill_kernel::launch_unchecked(
                self.client(),
                count,
                dim,
                address,
                BufferArg::from_raw_parts(tensor.handle().clone(), len),
                values.seed,
                dtype.elem(),
            );
        }
        Filled { tensor, values }
    }

    /// A layer's keys or values, `[num_blocks, page, kv_heads, head_dim]`, filled with the sequence of number `seed`, rounded
    /// if `dtype` has eight bits.
    ///
    /// # Errors
    /// If codes cannot be stored.
    pub fn filled_cache(
        &self,
        shape: [usize; 4],
        dtype: Dtype,
        seed: usize,
    ) -> Result<Filled, String> {
        if dtype != Dtype::E4m3 {
            return Ok(self.filled(&shape, dtype, seed));
        }
        let [num_blocks, page, kv_heads, head_dim] = shape;
        let tokens = num_blocks * page;
        let source = self.filled(&[tokens, kv_heads, head_dim], Dtype::F16, seed);
        let [tensor, other] = [(); 2].map(|()| self.empty(&shape, dtype));
        let scales = self.scales(kv_heads);
        let slots: Vec<i32> = (0..tokens as i32).collect();
        let slots = ints(self, &[tokens], &slots);
        let scales = KvScales {
            k: &scales,
            v: &scales,
        };
        let source_tensor = &source.tensor;
        let launcher = self.launcher();
        store_kv(
            launcher,
            source_tensor,
            source_tensor,
            &tensor,
            &other,
            Some(scales),
            &slots,
        )
        .map_err(|error| error.to_string())?;
        Ok(Filled {
            tensor,
            values: source.values.quantised(),
        })
    }

    /// The scales of a cache of eight bits.
    pub fn scales(&self, kv_heads: usize) -> TensorRef {
        let bytes = SCALE.to_ne_bytes().repeat(kv_heads);
        let handle = self.client().create_from_slice(&bytes);
        TensorRef::contiguous(handle, [kv_heads], Dtype::F32.elem())
    }

    /// A contiguous tensor of NaN, for a kernel to write to.
    pub fn poisoned(&self, shape: &[usize], dtype: Dtype) -> TensorRef {
        let tensor = self.empty(shape, dtype);
        let words = (tensor.num_elements() * dtype.size()).div_ceil(4);
        let bits = match dtype {
            Dtype::E4m3 => POISON_E4M3,
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 => POISON,
        };
        let (count, dim, address) = self.elementwise(words);
        // SAFETY: `empty` allocates whole words, and the kernel tests for their end.
        unsafe {
            poison_kernel::launch_unchecked(
                self.client(),
                count,
                dim,
                address,
                BufferArg::from_raw_parts(tensor.handle().clone(), words),
                bits,
            );
        }
        tensor
    }
}

/// The numbers below `count` in a reproducible order without pattern.
pub fn shuffled(count: usize, seed: usize) -> Vec<i32> {
    let order = Values::new(seed);
    let mut numbers: Vec<i32> = (0..count as i32).collect();
    numbers.sort_by_key(|&number| mix((number as u32).wrapping_add(order.seed)));
    numbers
}

/// ‖out − reference‖ / ‖reference‖; NaN if there is a NaN in either, and the norm of `out` if the reference is zero.
pub fn relative_error(out: &[f64], reference: &[f64]) -> f64 {
    if out.len() != reference.len() {
        return f64::NAN;
    }
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut out.iter().zip(reference).map(|(a, b)| a - b));
    let size = norm(&mut reference.iter().copied());
    if size > 0.0 {
        difference / size
    } else {
        difference
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_exact_in_every_dtype_and_differ_by_seed() {
        let values = Values::new(3).range(0, 4096);
        assert!(values.iter().all(|x| (-2.0..2.0).contains(x)));
        assert!(
            values
                .iter()
                .all(|&x| half::bf16::from_f64(x).to_f64() == x)
        );
        assert!(values.iter().any(|x| *x < -1.9) && values.iter().any(|x| *x > 1.9));
        let mean = values.iter().sum::<f64>() / 4096.0;
        assert!(mean.abs() < 0.1, "mean {mean}");
        assert_ne!(values, Values::new(4).range(0, 4096));
    }

    #[test]
    fn an_error_is_relative_and_nan_never_passes() {
        assert_eq!(relative_error(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
        assert!((relative_error(&[3.0, 4.5], &[3.0, 4.0]) - 0.1).abs() < 1e-12);
        assert!(relative_error(&[f64::NAN], &[1.0]).is_nan());
        assert!(relative_error(&[1.0], &[1.0, 1.0]).is_nan());
    }

    #[test]
    fn a_shuffle_loses_no_number() {
        let mut numbers = shuffled(1000, 5);
        assert!(numbers.windows(2).any(|pair| pair[0] > pair[1]));
        assert_ne!(numbers, shuffled(1000, 6));
        numbers.sort();
        assert!(numbers.into_iter().eq(0..1000));
    }

    /// What the host assumes of the device.
    #[cfg(feature = "cpu")]
    #[test]
    fn the_device_fills_what_the_host_computes() {
        let device = CubeDevice::open("cpu").unwrap();
        let cache = device.filled_cache([5, 4, 2, 12], Dtype::E4m3, 11).unwrap();
        let read = device.read(&cache.tensor, Dtype::E4m3, 5, 100).unwrap();
        let read: Vec<f64> = read.iter().map(|x| x * f64::from(SCALE)).collect();
        assert_eq!(read, cache.values.range(5, 100));
        assert!(relative_error(&read, &cache.values.unquantised().range(5, 100)) > 1e-3);
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let filled = device.filled(&[3, 37], dtype, 11);
            let read = device.read(&filled.tensor, dtype, 5, 100).unwrap();
            assert_eq!(read, filled.values.range(5, 100));
            let poison = device.poisoned(&[7, 3], dtype);
            let read = device.read(&poison, dtype, 0, 21).unwrap();
            assert!(read.iter().all(|x| x.is_nan()));
        }
    }
}
