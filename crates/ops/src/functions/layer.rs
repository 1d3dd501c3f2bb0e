//! The ops of a decoder layer around attention.

use std::ops::Range;

use burn::tensor::{Int, Tensor};

use crate::{RotaryTable, check, ops, reference};

fn check_norm(op: &str, x: &Tensor<2>, weight: &Tensor<1>) {
    let hidden_size = x.dims()[1];
    assert!(
        weight.dims() == [hidden_size] && hidden_size > 0,
        "{op}: x has shape {:?}, weight {:?}",
        x.dims(),
        weight.dims()
    );
    check::float_dtype(op, "x", x.dtype());
    check::same_dtype(op, ("x", x.dtype()), ("weight", weight.dtype()));
    check::same_device(op, ("x", x), ("weight", weight));
}

/// Normalizes each row by its root mean square and scales it by `weight`.
///
/// `y = x / sqrt(mean(x²) + epsilon) · weight`
///
/// # Shapes
/// - `x`: `[num_tokens, hidden_size]`, f32 | f16 | bf16
/// - `weight`: `[hidden_size]`, same dtype
/// - returns: as `x`
///
/// # Numerics
/// Mean and division in f32; cast to the dtype of `x`; then multiplied by `weight`.
///
/// # Panics
/// If shapes, dtypes or devices disagree.
///
/// # Source
/// Zhang and Sennrich 2019, arXiv:1910.07467, equation 4. Rounding order as Hugging Face `LlamaRMSNorm`.
pub fn rms_norm(x: Tensor<2>, weight: Tensor<1>, epsilon: f64) -> Tensor<2> {
    check_norm("rms_norm", &x, &weight);
    if x.dims()[0] == 0 {
        return x;
    }
    if ops::has_implementation(&x.device()) {
        return ops::rms_norm(x, weight, epsilon);
    }
    reference::rms_norm(x, weight, epsilon)
}

/// Adds `x` to the residual stream and normalizes the sum: `(rms_norm(x + residual), x + residual)`.
///
/// # Shapes
/// - `x`, `residual`: `[num_tokens, hidden_size]`, same dtype
/// - `weight`: `[hidden_size]`, same dtype
/// - returns: the normalized rows and the new residual, as `x`
///
/// # Numerics
/// The sum is rounded to the dtype, then normalized as in [`rms_norm`].
///
/// # Panics
/// If shapes, dtypes or devices disagree.
pub fn add_rms_norm(
    x: Tensor<2>,
    residual: Tensor<2>,
    weight: Tensor<1>,
    epsilon: f64,
) -> (Tensor<2>, Tensor<2>) {
    const OP: &str = "add_rms_norm";
    check_norm(OP, &x, &weight);
    assert!(
        x.dims() == residual.dims(),
        "{OP}: x has shape {:?}, residual {:?}",
        x.dims(),
        residual.dims()
    );
    check::same_dtype(OP, ("x", x.dtype()), ("residual", residual.dtype()));
    check::same_device(OP, ("x", &x), ("residual", &residual));
    if x.dims()[0] == 0 {
        return (x, residual);
    }
    if ops::has_implementation(&x.device()) {
        return ops::add_rms_norm(x, residual, weight, epsilon);
    }
    reference::add_rms_norm(x, residual, weight, epsilon)
}

pub(crate) fn check_rotary(
    op: &str,
    q: &Tensor<3>,
    k: &Tensor<3>,
    positions: &Tensor<1, Int>,
    table: &RotaryTable,
) {
    let [num_tokens, _, head_dim] = q.dims();
    assert!(
        k.dims()[0] == num_tokens && k.dims()[2] == head_dim,
        "{op}: q has shape {:?}, k {:?}",
        q.dims(),
        k.dims()
    );
    check::index_tensor(op, "positions", positions, [num_tokens]);
    let rotary_dim = table.rotary_dim();
    assert!(
        rotary_dim <= head_dim,
        "{op}: the table rotates {rotary_dim} elements, heads have {head_dim}"
    );
    check::float_dtype(op, "q", q.dtype());
    check::same_dtype(op, ("q", q.dtype()), ("k", k.dtype()));
    check::same_device(op, ("q", q), ("k", k));
    check::same_device(op, ("q", q), ("table", table.tensor()));
}

/// Rotates q and k by their positions (rotary position embedding, half-split layout).
///
/// With `r = rotary_dim / 2` and the cosine and sine of the token's position,
/// `y[i] = x[i] · cos[i] - x[i + r] · sin[i]` and `y[i + r] = x[i + r] · cos[i] + x[i] · sin[i]` for `i < r`; elements
/// past `rotary_dim` pass through.
///
/// # Shapes
/// - `q`: `[num_tokens, num_heads, head_dim]`, `k`: `[num_tokens, num_kv_heads, head_dim]`, same dtype
/// - `positions`: `[num_tokens]` i32, each at least 0 and below the table's `max_positions` (not checked: the values are on
///   the device)
/// - returns: `q` and `k` rotated
///
/// # Numerics
/// In f32, rounded once.
///
/// # Panics
/// If shapes, dtypes or devices disagree.
///
/// # Source
/// Su et al. 2021, arXiv:2104.09864. Half-split layout as Hugging Face `rotate_half`; checkpoints with adjacent pairs
/// must have their Q and K rows reordered first.
pub fn rotary(
    q: Tensor<3>,
    k: Tensor<3>,
    positions: &Tensor<1, Int>,
    table: &RotaryTable,
) -> (Tensor<3>, Tensor<3>) {
    check_rotary("rotary", &q, &k, positions, table);
    if q.dims()[0] == 0 {
        return (q, k);
    }
    if ops::has_implementation(&q.device()) {
        return ops::rotary(q, k, positions, table);
    }
    reference::rotary(q, k, positions, table)
}

/// The gated activation of a Llama MLP: `silu(gate) · up`, with `silu(x) = x / (1 + exp(-x))`.
///
/// # Shapes
/// - `x`: `[num_tokens, 2 * intermediate_size]`, the gate in the first half of each row
/// - returns: `[num_tokens, intermediate_size]`, dtype of `x`
///
/// # Numerics
/// In f32, rounded once.
///
/// # Panics
/// If the last axis is odd or the dtype is not a supported float.
///
/// # Source
/// Shazeer 2020, arXiv:2002.05202, SwiGLU.
pub fn silu_and_mul(x: Tensor<2>) -> Tensor<2> {
    let width = x.dims()[1];
    assert!(
        width.is_multiple_of(2),
        "silu_and_mul: the last axis has odd size {width}"
    );
    check::float_dtype("silu_and_mul", "x", x.dtype());
    if x.dims().contains(&0) {
        return Tensor::empty([x.dims()[0], width / 2], (&x.device(), x.dtype()));
    }
    if ops::has_implementation(&x.device()) {
        return ops::silu_and_mul(x);
    }
    reference::silu_and_mul(x)
}

/// Some of the columns of a product, such as the queries of a product with stacked weights.
///
/// Where memory is addressed by pointers (CUDA, ROCm) and the first column begins at a multiple of 16 bytes, the result is a view:
/// Burn's own slice copies unless its beginning and its end are multiples of what the device aligns memory to (512 bytes on CUDA).
/// Elsewhere it is that slice.
///
/// # Shapes
/// - `x`: `[num_tokens, width]`, f32 | f16 | bf16
/// - returns: `[num_tokens, columns.len()]`
///
/// # Panics
/// If the range is not one of columns of `x`, or the dtype is not one of these.
pub fn columns(x: &Tensor<2>, columns: Range<usize>) -> Tensor<2> {
    let [num_tokens, width] = x.dims();
    assert!(
        columns.start <= columns.end && columns.end <= width,
        "columns: {columns:?} of {width}"
    );
    check::float_dtype("columns", "x", x.dtype());
    let (start, count) = (columns.start, columns.len());
    if num_tokens == 0 || count == 0 {
        return Tensor::empty([num_tokens, count], (&x.device(), x.dtype()));
    }
    if ops::has_implementation(&x.device()) {
        return ops::columns(x.clone(), start, [num_tokens, count]);
    }
    reference::columns(x, columns)
}

/// `y = x · weightᵀ + bias`.
///
/// # Shapes
/// - `x`: `[num_tokens, in_features]`, f32 | f16 | bf16
/// - `weight`: `[out_features, in_features]`, same dtype: the order of checkpoints, and the faster one for few rows
/// - `bias`: `[out_features]`, same dtype
/// - returns: `[num_tokens, out_features]`
///
/// # Panics
/// If shapes, dtypes or devices disagree.
pub fn linear(x: Tensor<2>, weight: &Tensor<2>, bias: Option<&Tensor<1>>) -> Tensor<2> {
    const OP: &str = "linear";
    let [out_features, in_features] = weight.dims();
    assert!(
        x.dims()[1] == in_features,
        "{OP}: x has shape {:?}, weight {:?}",
        x.dims(),
        weight.dims()
    );
    check::float_dtype(OP, "x", x.dtype());
    check::same_dtype(OP, ("x", x.dtype()), ("weight", weight.dtype()));
    check::same_device(OP, ("x", &x), ("weight", weight));
    if let Some(bias) = bias {
        assert!(
            bias.dims() == [out_features],
            "{OP}: weight has shape {:?}, bias {:?}",
            weight.dims(),
            bias.dims()
        );
        check::same_dtype(OP, ("x", x.dtype()), ("bias", bias.dtype()));
        check::same_device(OP, ("x", &x), ("bias", bias));
    }
    if x.dims()[0] == 0 {
        // Some backends choose a kernel by the sizes before they see that there is nothing to do, and find none.
        return Tensor::empty([0, out_features], (&x.device(), x.dtype()));
    }
    if ops::has_linear(weight) {
        return ops::linear(x, weight, bias);
    }
    reference::linear(x, weight, bias)
}

/// Rows of a gate that follow each other in the weights of [`gated_linear`], and then rows of what it lets through.
pub const GATE_TURN: usize = 64;

/// `y = silu(x · gateᵀ) · (x · upᵀ)`, with the rows of both weights in one, by turns: [`GATE_TURN`] of the gate, as many of
/// what it lets through, and so on. See [`in_turns`].
///
/// # Shapes
/// - `x`: `[num_tokens, in_features]`, f32 | f16 | bf16
/// - `weight`: `[2·out_features, in_features]`, same dtype; `out_features` a multiple of [`GATE_TURN`]
/// - returns: `[num_tokens, out_features]`
///
/// # Numerics
/// Where it is one kernel ([`has_gated_linear`]): all in f32, one cast on write. Elsewhere the products are rounded first,
/// as [`linear`] and then [`silu_and_mul`] would.
///
/// # Panics
/// If shapes, dtypes or devices disagree.
///
/// # Source
/// Shazeer 2020, arXiv:2002.05202, SwiGLU.
pub fn gated_linear(x: Tensor<2>, weight: &Tensor<2>) -> Tensor<2> {
    const OP: &str = "gated_linear";
    let [rows, in_features] = weight.dims();
    assert!(
        x.dims()[1] == in_features && rows.is_multiple_of(2 * GATE_TURN),
        "{OP}: x has shape {:?}, weight {:?}, whose rows come in turns of {GATE_TURN}",
        x.dims(),
        weight.dims()
    );
    check::float_dtype(OP, "x", x.dtype());
    check::same_dtype(OP, ("x", x.dtype()), ("weight", weight.dtype()));
    check::same_device(OP, ("x", &x), ("weight", weight));
    if x.dims()[0] == 0 {
        return Tensor::empty([0, rows / 2], (&x.device(), x.dtype()));
    }
    if has_gated_linear(weight) {
        return ops::gated_linear(x, weight);
    }
    // Not the reference, whose product has no kernel on some devices.
    let num_tokens = x.dims()[0];
    let product = linear(x, weight, None);
    let turns = product.reshape([num_tokens, rows / 2 / GATE_TURN, 2, GATE_TURN]);
    silu_and_mul(turns.swap_dims(1, 2).reshape([num_tokens, rows]))
}

/// Whether [`gated_linear`] is one kernel for weights of this shape, dtype and device. Elsewhere [`linear`] and
/// [`silu_and_mul`] on stacked weights are faster.
pub fn has_gated_linear(weight: &Tensor<2>) -> bool {
    weight.dims()[0].is_multiple_of(2 * GATE_TURN) && ops::has_gated_linear(weight)
}

/// The weights of a gate and of what it lets through, stacked one below the other, as [`gated_linear`] takes them.
///
/// # Shapes
/// - `stacked`: `[2·out_features, in_features]`, `out_features` a multiple of [`GATE_TURN`]
/// - returns: as `stacked`
///
/// # Panics
/// If the rows are not whole turns.
pub fn in_turns(stacked: Tensor<2>) -> Tensor<2> {
    let [rows, in_features] = stacked.dims();
    assert!(
        rows.is_multiple_of(2 * GATE_TURN),
        "in_turns: {rows} rows are no turns of {GATE_TURN}"
    );
    let turns = stacked.reshape([2, rows / 2 / GATE_TURN, GATE_TURN, in_features]);
    turns.swap_dims(0, 1).reshape([rows, in_features])
}

/// Rows of `weight` by token id.
///
/// # Shapes
/// - `weight`: `[vocab_size, hidden_size]`
/// - `ids`: `[num_tokens]` i32, each at least 0 and below `vocab_size` (not checked: the values are on the device)
/// - returns: `[num_tokens, hidden_size]`
///
/// # Panics
/// If `ids` is not i32.
pub fn embedding(weight: &Tensor<2>, ids: &Tensor<1, Int>) -> Tensor<2> {
    check::index_tensor("embedding", "ids", ids, ids.dims());
    reference::embedding(weight, ids)
}
