//! What choosing a token starts from: the largest logit of a row, and whether the row is sound.

use cubecl::prelude::*;

use crate::reduce::{RowUnits, lane_pos, row_arg_max};

/// The id of a row that holds no token to choose.
pub(crate) const NO_TOKEN: i32 = -1;

/// The bits of f32's plus infinity, which every NaN passes once its sign is cleared.
pub(crate) const INFINITY_BITS: u32 = 0x7f80_0000;
const NEG_INFINITY_BITS: u32 = 0xff80_0000;
const MAGNITUDE_BITS: u32 = 0x7fff_ffff;

/// The largest logit of a row and the lowest id that has it.
///
/// The id is [`NO_TOKEN`] for a row that holds NaN or plus infinity, or nothing above minus
/// infinity. Every unit of the cube must call it.
#[cube]
pub(crate) fn row_best<F: Float, N: Size>(
    row: &[Vector<F, N>],
    row_vectors: usize,
    #[comptime] form: RowUnits,
) -> (f32, i32) {
    let width = N::value().comptime();
    let mut best = f32::NEG_INFINITY.runtime();
    let mut id = NO_TOKEN.runtime();
    let mut i = lane_pos(form);
    while i < row_vectors {
        let values = Vector::<f32, N>::cast_from(row[i]);
        #[unroll]
        for lane in 0..width {
            let value = values.extract(lane);
            if is_broken(value) {
                // Nothing is larger, and no id of a token is lower.
                best = f32::INFINITY.runtime();
                id = NO_TOKEN.runtime();
            } else if value > best {
                best = value;
                id = (i * width + lane) as i32;
            }
        }
        i += comptime!(form.units() as usize);
    }
    row_arg_max(best, id, form)
}

/// Whether a logit is NaN or plus infinity. In integers, because some compilers of shaders take it
/// that neither occurs.
#[cube]
fn is_broken(logit: f32) -> bool {
    let bits = u32::reinterpret(logit);
    (bits & MAGNITUDE_BITS) >= INFINITY_BITS && bits != NEG_INFINITY_BITS
}
