use super::portable::merge_attention_kernel;
use crate::check::{Check, F32};
use crate::error::KernelError;
use crate::launcher::Launcher;
use crate::layout::head_layout;
use crate::rows::RowSplit;
use crate::tensor::TensorRef;

/// A result of attention over some of the keys.
#[derive(Clone, Copy, Debug)]
pub struct PartialAttention<'a> {
    /// `[num_tokens, num_heads, head_dim]`, f32 | f16 | bf16, last axis contiguous.
    pub out: &'a TensorRef,
    /// Natural logarithm of the sum of the exponentiated scores, `[num_tokens, num_heads]`, f32,
    /// contiguous; minus infinity for a row that saw no key.
    pub lse: &'a TensorRef,
}

/// Joins two results of attention of the same queries over disjoint sets of keys.
///
/// With `w = exp(lse - max(lse))` of each part, `out = Σ w · out / Σ w` and `lse = max + ln Σ w`.
///
/// # Shapes
/// - `a`, `b`, `merged`: the same, see [`PartialAttention`]; `merged` is written
///
/// # Numerics
/// In f32, one cast on write. Where one part saw no key, the other is copied, whatever the first
/// holds; where neither did, the result is 0 and minus infinity.
///
/// # Errors
/// [`KernelError::Invalid`] if shapes, strides, dtypes or buffers disagree,
/// [`KernelError::Unsupported`] and [`KernelError::Launch`] if the device cannot serve them.
///
/// # Source
/// The rescaling of partial sums: FlashAttention-2 (arXiv:2307.08691), section 3.1.
pub fn merge_attention(
    launcher: &Launcher,
    a: PartialAttention,
    b: PartialAttention,
    merged: PartialAttention,
) -> Result<(), KernelError> {
    let check = Check::new("merge_attention");
    let shape @ [num_tokens, num_heads, head_dim] = check.sizes("a.out", a.out)?;
    let dtype = check.float(launcher.facts(), "a.out", a.out)?;
    let parts = [
        (["a.out", "a.lse"], a),
        (["b.out", "b.lse"], b),
        (["out", "lse"], merged),
    ];
    for ([out, lse], part) in parts {
        check.rows(out, part.out, &shape, dtype)?;
        check.contiguous(lse, part.lse, &shape[..2], F32)?;
    }
    let inputs = [
        ("a.out", a.out),
        ("a.lse", a.lse),
        ("b.out", b.out),
        ("b.lse", b.lse),
        ("lse", merged.lse),
    ];
    check.output("out", merged.out, &inputs)?;
    check.output("lse", merged.lse, &inputs[..4])?;
    if shape.contains(&0) {
        return match merged.lse.num_elements() {
            0 => Ok(()),
            _ => check.invalid("head_dim is 0".to_string()),
        };
    }

    let outs = [a.out, b.out, merged.out];
    let n = launcher.vector_size(dtype, &[head_dim], &outs);
    let split = RowSplit::new(launcher.facts(), num_tokens * num_heads, head_dim / n);
    let grid = split.grid(launcher.facts());
    let (count, dim, address) = launcher.topology(check, grid, n, &outs)?;
    // SAFETY: every tensor lies in its buffer, the outputs overlap nothing, and surplus units end
    // first.
    unsafe {
        merge_attention_kernel::launch_unchecked(
            launcher.client(),
            count,
            dim,
            address,
            n,
            a.out.buffer_arg(n),
            a.lse.buffer_arg(1),
            b.out.buffer_arg(n),
            b.lse.buffer_arg(1),
            merged.out.buffer_arg(n),
            merged.lse.buffer_arg(1),
            head_layout(a.out, n),
            head_layout(b.out, n),
            head_layout(merged.out, n),
            split.arg(),
            num_heads,
            head_dim / n,
            dtype,
        );
    }
    Ok(())
}
