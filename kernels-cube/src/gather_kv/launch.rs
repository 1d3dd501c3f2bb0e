use super::fp8::gather_kv_fp8_kernel;
use super::portable::gather_kv_kernel;
use crate::cache::{CacheProblem, KvScales};
use crate::check::{Check, I32};
use crate::e4m3::Codes;
use crate::error::KernelError;
use crate::launcher::Launcher;
use crate::layout::{head_layout, slot_layout};
use crate::rows::RowSplit;
use crate::tensor::TensorRef;

/// Reads the keys and values of sequences out of their blocks into packed tensors.
///
/// Position `j` of sequence `s` lands in row `cu_seqlens_k[s] + j`. Rows past the last sequence,
/// and rows whose block is none of the cache's, become 0.
///
/// # Shapes
/// - `k_cache`, `v_cache`: `[num_blocks, block_size, num_kv_heads, head_dim]`, f32 | f16 | bf16, or
///   u8 with `scales`, contiguous
/// - `scales`: see [`KvScales`]; `head_dim` is then a multiple of 4
/// - `block_table`: `[num_seqs, max_blocks]`, i32, last axis contiguous
/// - `cu_seqlens_k`: `[num_seqs + 1]`, i32; starts at 0, never falls
/// - `out_k`, `out_v`: `[total, num_kv_heads, head_dim]`, the caches' dtype, or any of the three with
///   `scales`, last axis contiguous, two buffers
///
/// # Errors
/// [`KernelError::Invalid`] if shapes, strides, dtypes or buffers disagree,
/// [`KernelError::Unsupported`] and [`KernelError::Launch`] if the device cannot serve them.
#[allow(clippy::too_many_arguments, reason = "the tensors of the op")]
pub fn gather_kv(
    launcher: &Launcher,
    k_cache: &TensorRef,
    v_cache: &TensorRef,
    scales: Option<KvScales<'_>>,
    block_table: &TensorRef,
    cu_seqlens_k: &TensorRef,
    out_k: &TensorRef,
    out_v: &TensorRef,
) -> Result<(), KernelError> {
    let check = Check::new("gather_kv");
    let cache = CacheProblem::checked(check, launcher.facts(), k_cache, v_cache, scales)?;
    let [num_seqs, _] = check.sizes("block_table", block_table)?;
    let table = cache.check_block_table(check, block_table, num_seqs)?;
    check.contiguous("cu_seqlens_k", cu_seqlens_k, &[num_seqs + 1], I32)?;
    let [total, _, _] = check.sizes("out_k", out_k)?;
    let packed = cache.packed_shape(total);
    let dtype = match cache.is_fp8() {
        true => check.float(launcher.facts(), "out_k", out_k)?,
        false => cache.dtype,
    };
    check.rows("out_k", out_k, &packed, dtype)?;
    check.rows("out_v", out_v, &packed, dtype)?;
    let inputs = [("k_cache", k_cache), ("v_cache", v_cache)];
    check.output("out_k", out_k, &[inputs[0], inputs[1], ("out_v", out_v)])?;
    check.output("out_v", out_v, &inputs)?;
    if let Some(scales) = scales {
        let scales = [("k scales", scales.k), ("v scales", scales.v)];
        check.output("out_k", out_k, &scales)?;
        check.output("out_v", out_v, &scales)?;
    }
    if total > i32::MAX as usize {
        return check.too_large(format!("{total} rows, more than an i32 counts"));
    }
    if out_k.num_elements() == 0 {
        return Ok(());
    }

    let n = launcher.vector_size(dtype, &[cache.head_dim], &[k_cache, v_cache, out_k, out_v]);
    let head_vectors = cache.head_dim / n;
    let split = RowSplit::new(launcher.facts(), total * cache.num_kv_heads, head_vectors);
    let tensors = [k_cache, v_cache, out_k, out_v];
    let grid = split.grid(launcher.facts());
    let (count, dim, address) = launcher.topology(check, grid, n, &tensors)?;
    if let Some(scales) = scales {
        let codes = Codes {
            vector: n,
            inline_ptx: launcher.facts().inline_ptx,
        };
        // SAFETY: as below.
        unsafe {
            gather_kv_fp8_kernel::launch_unchecked(
                launcher.client(),
                count,
                dim,
                address,
                n,
                codes.words(),
                k_cache.buffer_arg(codes.per_read()),
                v_cache.buffer_arg(codes.per_read()),
                scales.k.buffer_arg(1),
                scales.v.buffer_arg(1),
                block_table.buffer_arg(1),
                cu_seqlens_k.buffer_arg(1),
                out_k.buffer_arg(n),
                out_v.buffer_arg(n),
                slot_layout(k_cache, codes.per_read()),
                head_layout(out_k, n),
                head_layout(out_v, n),
                table.arg(),
                split.arg(),
                num_seqs,
                cache.num_kv_heads,
                head_vectors,
                codes,
                dtype,
            );
        }
        return Ok(());
    }
    // SAFETY: every tensor lies in its buffer, blocks and positions are tested against the cache
    // and the table, the outputs overlap nothing, and surplus units end first.
    unsafe {
        gather_kv_kernel::launch_unchecked(
            launcher.client(),
            count,
            dim,
            address,
            n,
            k_cache.buffer_arg(n),
            v_cache.buffer_arg(n),
            block_table.buffer_arg(1),
            cu_seqlens_k.buffer_arg(1),
            out_k.buffer_arg(n),
            out_v.buffer_arg(n),
            slot_layout(k_cache, n),
            head_layout(out_k, n),
            head_layout(out_v, n),
            table.arg(),
            split.arg(),
            num_seqs,
            cache.num_kv_heads,
            head_vectors,
            cache.dtype,
        );
    }
    Ok(())
}
