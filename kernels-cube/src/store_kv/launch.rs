use super::fp8::store_kv_fp8_kernel;
use super::portable::store_kv_kernel;
use crate::cache::{CacheProblem, KvScales};
use crate::check::{Check, I32};
use crate::e4m3::Pieces;
use crate::error::KernelError;
use crate::launcher::Launcher;
use crate::layout::{head_layout, slot_layout};
use crate::rows::RowSplit;
use crate::tensor::TensorRef;

/// Writes the keys and values of new tokens to their slots of one layer's cache.
///
/// `cache[slots[t], h] = source[t, h]`
///
/// A slot below 0 or past the cache is skipped. If two tokens name one slot, either may win.
///
/// # Shapes
/// - `k`, `v`: `[num_tokens, num_kv_heads, head_dim]`, f32 | f16 | bf16, last axis contiguous
/// - `k_cache`, `v_cache`: `[num_blocks, block_size, num_kv_heads, head_dim]`, same dtype, or u8
///   with `scales`, contiguous, two buffers; written in place
/// - `scales`: see [`KvScales`]; `head_dim` is then a multiple of 4
/// - `slots`: `[num_tokens]`, i32
///
/// # Errors
/// [`KernelError::Invalid`] if shapes, strides, dtypes or buffers disagree,
/// [`KernelError::Unsupported`] and [`KernelError::Launch`] if the device cannot serve them.
pub fn store_kv(
    launcher: &Launcher,
    k: &TensorRef,
    v: &TensorRef,
    k_cache: &TensorRef,
    v_cache: &TensorRef,
    scales: Option<KvScales<'_>>,
    slots: &TensorRef,
) -> Result<(), KernelError> {
    let check = Check::new("store_kv");
    let cache = CacheProblem::checked(check, launcher.facts(), k_cache, v_cache, scales)?;
    let [num_tokens, _, _] = check.sizes("k", k)?;
    let packed = cache.packed_shape(num_tokens);
    let dtype = match cache.is_fp8() {
        true => check.float(launcher.facts(), "k", k)?,
        false => cache.dtype,
    };
    check.rows("k", k, &packed, dtype)?;
    check.rows("v", v, &packed, dtype)?;
    check.contiguous("slots", slots, &[num_tokens], I32)?;
    check.output(
        "k_cache",
        k_cache,
        &[("k", k), ("v", v), ("v_cache", v_cache)],
    )?;
    check.output("v_cache", v_cache, &[("k", k), ("v", v)])?;
    if let Some(scales) = scales {
        let scales = [("k scales", scales.k), ("v scales", scales.v)];
        check.output("k_cache", k_cache, &scales)?;
        check.output("v_cache", v_cache, &scales)?;
    }
    if cache.is_empty() || num_tokens == 0 {
        return Ok(());
    }

    let n = launcher.vector_size(dtype, &[cache.head_dim], &[k, v, k_cache, v_cache]);
    let pieces = Pieces::new(n, launcher.facts().inline_ptx);
    let head_vectors = match scales {
        Some(_) => cache.head_dim / pieces.elements,
        None => cache.head_dim / n,
    };
    let split = RowSplit::new(
        launcher.facts(),
        num_tokens * cache.num_kv_heads,
        head_vectors,
    );
    let grid = split.grid(launcher.facts());
    let (count, dim, address) = launcher.topology(check, grid, n, &[k, v, k_cache, v_cache])?;
    if let Some(scales) = scales {
        // SAFETY: as below.
        unsafe {
            store_kv_fp8_kernel::launch_unchecked(
                launcher.client(),
                count,
                dim,
                address,
                n,
                pieces.elements,
                pieces.words(),
                k.buffer_arg(n),
                v.buffer_arg(n),
                scales.k.buffer_arg(1),
                scales.v.buffer_arg(1),
                slots.buffer_arg(1),
                k_cache.buffer_arg(pieces.elements),
                v_cache.buffer_arg(pieces.elements),
                head_layout(k, n),
                head_layout(v, n),
                slot_layout(k_cache, pieces.elements),
                split.arg(),
                cache.num_kv_heads,
                head_vectors,
                cache.num_slots(),
                pieces,
                dtype,
            );
        }
        return Ok(());
    }
    // SAFETY: every tensor lies in its buffer, slots are tested against the cache, the outputs
    // overlap nothing, and surplus units end first.
    unsafe {
        store_kv_kernel::launch_unchecked(
            launcher.client(),
            count,
            dim,
            address,
            n,
            k.buffer_arg(n),
            v.buffer_arg(n),
            slots.buffer_arg(1),
            k_cache.buffer_arg(n),
            v_cache.buffer_arg(n),
            head_layout(k, n),
            head_layout(v, n),
            slot_layout(k_cache, n),
            split.arg(),
            cache.num_kv_heads,
            head_vectors,
            cache.num_slots(),
            cache.dtype,
        );
    }
    Ok(())
}
