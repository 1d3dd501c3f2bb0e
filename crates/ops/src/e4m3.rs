//! Numbers of 8 bits: a sign, four bits of exponent with bias 7, three of mantissa; no infinities, one NaN of each sign.
//!
//! # Source
//! Micikevicius et al. 2022, arXiv:2209.05433, the encoding E4M3.

/// The largest number.
pub(crate) const MAX: f32 = 448.0;

/// The smallest number whose mantissa is normal, 2⁻⁶.
const MIN_NORMAL: f32 = 1.0 / 64.0;

/// The code of NaN without its sign.
const NAN: u8 = 0x7f;

/// Bits of an f32 mantissa that a code does not have.
const DROPPED: u32 = 20;

/// What values are multiplied with before they are stored under `scale`: nothing is stored under a scale without an inverse.
pub(crate) fn inverse(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse.is_infinite() { 0.0 } else { inverse }
}

/// The code nearest to `value`, ties to even, saturated at 448; NaN stays NaN.
pub(crate) fn encode(value: f32) -> u8 {
    let sign = (value.to_bits() >> 24) as u8 & 0x80;
    let magnitude = value.abs().min(MAX);
    let code = if value.is_nan() {
        NAN
    } else if magnitude < MIN_NORMAL {
        // Eighths of the smallest normal number; the eighth of them is that number's own code.
        (magnitude * 512.0).round_ties_even() as u8
    } else {
        let bits = magnitude.to_bits();
        let half_less_tie = (1 << (DROPPED - 1)) - 1 + (bits >> DROPPED & 1);
        // From a bias of 127 to one of 7.
        (((bits + half_less_tie) >> DROPPED) - (120 << 3)) as u8
    };
    sign | code
}

/// The number of a code.
pub(crate) fn decode(code: u8) -> f32 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    match code & 0x7f {
        NAN => f32::NAN,
        // Exponent and mantissa where those of an f32 are, which has another bias; small ones come right, too.
        bits => sign * f32::from_bits(u32::from(bits) << DROPPED) * 2f32.powi(120),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By the definition, exponent and mantissa apart.
    fn number(code: u8) -> f64 {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
        let magnitude = match exponent {
            0 => mantissa / 8.0 * 2f64.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
        };
        if code & 0x80 == 0 {
            magnitude
        } else {
            -magnitude
        }
    }

    #[test]
    fn codes_are_their_numbers_and_back() {
        for code in 0..=255u8 {
            if code & 0x7f == NAN {
                assert!(decode(code).is_nan());
            } else {
                assert_eq!(f64::from(decode(code)), number(code), "{code:#x}");
                assert_eq!(encode(decode(code)), code);
            }
        }
    }

    #[test]
    fn values_between_go_to_the_nearest_and_ties_to_the_even_code() {
        for code in 0..0x7e_u8 {
            let (low, high) = (decode(code), decode(code + 1));
            let middle = (low + high) / 2.0;
            let even = if code % 2 == 0 { code } else { code + 1 };
            let just = |value: f32, by: i32| f32::from_bits((value.to_bits() as i32 + by) as u32);
            for (value, expected) in [
                (middle, even),
                (just(middle, -1), code),
                (just(middle, 1), code + 1),
            ] {
                assert_eq!(
                    encode(value),
                    expected,
                    "{value:e} between {low:e} and {high:e}"
                );
                assert_eq!(encode(-value), expected | 0x80);
            }
        }
    }

    #[test]
    fn what_is_too_large_saturates_and_nan_stays() {
        for value in [448.0, 449.0, 464.0, 1e6, f32::MAX, f32::INFINITY] {
            assert_eq!((encode(value), encode(-value)), (0x7e, 0xfe), "{value}");
        }
        assert_eq!(encode(f32::NAN) & 0x7f, NAN);
        assert_eq!((encode(0.0), encode(-0.0)), (0, 0x80));
        assert_eq!(encode(f32::MIN_POSITIVE / 2.0), 0);
    }
}
