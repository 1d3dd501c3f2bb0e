//! Gumbel noise by a hash, in 32-bit arithmetic alone, which every runtime has.

use cubecl::prelude::*;

/// Below this distance from 1, −ln(1 − d) is summed as a series: shader languages promise nothing
/// about the relative error of a logarithm there, and the largest noise comes from there.
const SERIES_BOUND: f32 = 0.0625;
const THIRD: f32 = 1.0 / 3.0;
const SIXTH: f32 = 1.0 / 6.0;

/// 2⁻²³.
const UNIT: f32 = f32::EPSILON;

/// The generator of one draw of one row.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Noise {
    seed_low: u32,
    seed_high: u32,
    draw: u32,
}

#[cube]
impl Noise {
    pub(super) fn new(seed_low: u32, seed_high: u32, draw: u32) -> Noise {
        Noise {
            seed_low: advance(seed_low),
            seed_high: advance(seed_high),
            draw: advance(draw),
        }
    }

    /// Standard Gumbel noise of one token.
    pub(super) fn gumbel(&self, token: u32) -> f32 {
        // 23 bits, centred: every value is exact in f32, and none is 0 or 1.
        let uniform = (f32::cast_from(self.hash(token) >> 9) + 0.5) * UNIT;
        -minus_ln(uniform).ln()
    }

    /// The first word of `pcg4d` of (seed, draw, token).
    ///
    /// Jarzynski and Olano, "Hash Functions for GPU Rendering", JCGT 9(3), 2020.
    fn hash(&self, token: u32) -> u32 {
        let mut w = advance(token);
        let mut x = self.seed_low + self.seed_high * w;
        let mut y = self.seed_high + self.draw * x;
        let z = self.draw + x * y;
        w += y * z;
        x ^= x >> 16;
        y ^= y >> 16;
        w ^= w >> 16;
        x + y * w
    }
}

/// One step of a linear congruential generator; wraps.
#[cube]
fn advance(word: u32) -> u32 {
    word * 1_664_525u32 + 1_013_904_223u32
}

/// −ln(x) for x above 0 and below 1.
#[cube]
fn minus_ln(x: f32) -> f32 {
    let d = 1.0 - x;
    let mut result = -x.ln();
    if d < SERIES_BOUND {
        // The first term left out is d⁷ / 7: below half a unit in the last place.
        let mut tail = d * SIXTH + 0.2;
        tail = tail * d + 0.25;
        tail = tail * d + THIRD;
        tail = tail * d + 0.5;
        result = d + d * d * tail;
    }
    result
}
