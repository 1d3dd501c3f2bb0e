//! Numbers that are the same on every machine and in every version of a library.

use crate::arith::Dtype;

/// SplitMix64.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    /// Uniform in `-bound..bound`, rounded to `dtype`.
    pub(crate) fn value(&mut self, dtype: Dtype, bound: f64) -> f64 {
        let unit = (self.bits() >> 11) as f64 / (1u64 << 53) as f64;
        dtype.round((2.0 * unit - 1.0) * bound)
    }

    pub(crate) fn values(&mut self, dtype: Dtype, bound: f64, count: usize) -> Vec<f64> {
        (0..count).map(|_| self.value(dtype, bound)).collect()
    }

    pub(crate) fn shuffled(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for i in (1..count).rev() {
            order.swap(i, self.below(i + 1));
        }
        order
    }
}
