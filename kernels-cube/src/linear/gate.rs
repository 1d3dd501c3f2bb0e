//! What a gate lets through, in the instructions of a GPU: divisions and powers that are exact to the last bits take
//! several times as long as the rest of an epilogue.

use cubecl::prelude::*;

/// `silu(gate) · up`, with the errors of two approximations of 2 units in the last place of f32.
#[cube]
pub(super) fn gated(gate: f32, up: f32) -> f32 {
    let scaled = gate * comptime!(-std::f32::consts::LOG2_E);
    let power: f32;
    gpu_asm!("ex2.approx.ftz.f32 {}, {};", out(_) power, in(_) scaled, options(pure, nomem));
    let below = power + 1.0;
    let inverse: f32;
    gpu_asm!("rcp.approx.ftz.f32 {}, {};", out(_) inverse, in(_) below, options(pure, nomem));
    gate * inverse * up
}

/// [`gated`] of four.
#[cube]
pub(super) fn gated_quad(
    gate: Vector<f32, Const<4>>,
    up: Vector<f32, Const<4>>,
) -> Vector<f32, Const<4>> {
    let mut quad = Vector::<f32, Const<4>>::empty();
    #[unroll]
    for at in 0..4usize {
        quad.insert(at, gated(gate.extract(at), up.extract(at)));
    }
    quad
}
