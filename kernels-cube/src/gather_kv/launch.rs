use super::portable::gather_kv_kernel;
use crate::cache::CacheProblem;
use crate::check::{Check, I32};
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
/// - `k_cache`, `v_cache`: `[num_blocks, block_size, num_kv_heads, head_dim]`, f32 | f16 | bf16,
///   contiguous
/// - `block_table`: `[num_seqs, max_blocks]`, i32, last axis contiguous
/// - `cu_seqlens_k`: `[num_seqs + 1]`, i32; starts at 0, never falls
/// - `out_k`, `out_v`: `[total, num_kv_heads, head_dim]`, the caches' dtype, last axis contiguous,
///   two buffers
///
/// # Errors
/// [`KernelError::Invalid`] if shapes, strides, dtypes or buffers disagree,
/// [`KernelError::Unsupported`] and [`KernelError::Launch`] if the device cannot serve them.
pub fn gather_kv(
    launcher: &Launcher,
    k_cache: &TensorRef,
    v_cache: &TensorRef,
    block_table: &TensorRef,
    cu_seqlens_k: &TensorRef,
    out_k: &TensorRef,
    out_v: &TensorRef,
) -> Result<(), KernelError> {
    let check = Check::new("gather_kv");
    let cache = CacheProblem::checked(check, launcher.facts(), k_cache, v_cache)?;
    let [num_seqs, _] = check.sizes("block_table", block_table)?;
    let table = cache.check_block_table(check, block_table, num_seqs)?;
    check.contiguous("cu_seqlens_k", cu_seqlens_k, &[num_seqs + 1], I32)?;
    let [total, _, _] = check.sizes("out_k", out_k)?;
    let packed = cache.packed_shape(total);
    check.rows("out_k", out_k, &packed, cache.dtype)?;
    check.rows("out_v", out_v, &packed, cache.dtype)?;
    let inputs = [("k_cache", k_cache), ("v_cache", v_cache)];
    check.output("out_k", out_k, &[inputs[0], inputs[1], ("out_v", out_v)])?;
    check.output("out_v", out_v, &inputs)?;
    if total > i32::MAX as usize {
        return check.too_large(format!("{total} rows, more than an i32 counts"));
    }
    if out_k.num_elements() == 0 {
        return Ok(());
    }

    let n = launcher.vector_size(
        cache.dtype,
        &[cache.head_dim],
        &[k_cache, v_cache, out_k, out_v],
    );
    let head_vectors = cache.head_dim / n;
    let split = RowSplit::new(launcher.facts(), total * cache.num_kv_heads, head_vectors);
    let tensors = [k_cache, v_cache, out_k, out_v];
    let grid = split.grid(launcher.facts());
    let (count, dim, address) = launcher.topology(check, grid, n, &tensors)?;
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
