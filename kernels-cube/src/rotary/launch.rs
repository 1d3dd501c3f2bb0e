use cubecl::ir::ElemType;

use super::fp8::rotary_and_store_fp8_kernel;
use super::portable::{RotaryShapeLaunch, rotary_and_store_kernel, rotary_kernel};
use crate::cache::{CacheProblem, KvScales};
use crate::check::{Check, F32, I32};
use crate::e4m3::{self, Pieces};
use crate::error::KernelError;
use crate::launcher::Launcher;
use crate::layout::{head_layout, slot_layout};
use crate::rows::RowSplit;
use crate::tensor::TensorRef;

/// The angles of every position, and the position of every token.
#[derive(Clone, Copy, Debug)]
pub struct RotaryTable<'a> {
    /// Positions, `[num_tokens]`, i32. One outside the table takes its first or last row.
    pub positions: &'a TensorRef,
    /// Cosines, then sines, `[max_positions, rotary_dim]`, f32, contiguous; `rotary_dim` is even
    /// and at most `head_dim`.
    pub table: &'a TensorRef,
}

/// Rotates queries and keys by their positions.
///
/// Pairs are elements `i` and `i + rotary_dim / 2` of a head; elements from `rotary_dim` on pass
/// through.
///
/// # Shapes
/// - `q`: `[num_tokens, num_heads, head_dim]`, f32 | f16 | bf16, last axis contiguous
/// - `k`: `[num_tokens, num_kv_heads, head_dim]`, same dtype, last axis contiguous
/// - `rope`: see [`RotaryTable`]
/// - `q_out`, `k_out`: as `q` and `k`, other buffers
///
/// # Numerics
/// In f32, one cast on write.
///
/// # Errors
/// [`KernelError::Invalid`] if shapes, strides, dtypes or buffers disagree,
/// [`KernelError::Unsupported`] and [`KernelError::Launch`] if the device cannot serve them.
///
/// # Source
/// Su et al. 2021, arXiv:2104.09864; halves as in GPT-NeoX and Hugging Face Llama.
pub fn rotary(
    launcher: &Launcher,
    q: &TensorRef,
    k: &TensorRef,
    rope: RotaryTable<'_>,
    q_out: &TensorRef,
    k_out: &TensorRef,
) -> Result<(), KernelError> {
    let check = Check::new("rotary");
    let problem = RotaryProblem::checked(check, launcher, q, k, rope)?;
    check.rows("q_out", q_out, q.shape(), problem.dtype)?;
    check.rows("k_out", k_out, k.shape(), problem.dtype)?;
    let inputs = [("q", q), ("k", k), ("table", rope.table)];
    check.output("q_out", q_out, &inputs)?;
    check.output(
        "k_out",
        k_out,
        &[inputs[0], inputs[1], inputs[2], ("q_out", q_out)],
    )?;
    if problem.is_empty() {
        return Ok(());
    }

    let tensors = [q, k, q_out, k_out, rope.table];
    let n = problem.vector_size(launcher, &tensors);
    let split = problem.split(launcher, n);
    let grid = split.grid(launcher.facts());
    let (count, dim, address) = launcher.topology(check, grid, n, &tensors)?;
    // SAFETY: every tensor lies in its buffer, positions are held inside the table, the outputs
    // overlap nothing, and surplus units end first.
    unsafe {
        rotary_kernel::launch_unchecked(
            launcher.client(),
            count,
            dim,
            address,
            n,
            q.buffer_arg(n),
            k.buffer_arg(n),
            rope.positions.buffer_arg(1),
            rope.table.buffer_arg(n),
            q_out.buffer_arg(n),
            k_out.buffer_arg(n),
            head_layout(q, n),
            head_layout(k, n),
            head_layout(q_out, n),
            head_layout(k_out, n),
            problem.arg(n),
            split.arg(),
            problem.dtype,
        );
    }
    Ok(())
}

/// Rotates queries and keys by their positions, and writes keys and values to their slots of one
/// layer's cache.
///
/// As [`rotary`] and `store_kv`, in one launch: the rotated keys go to the cache only. A slot below
/// 0 or past the cache is skipped.
///
/// # Shapes
/// - `q`: `[num_tokens, num_heads, head_dim]`, f32 | f16 | bf16, last axis contiguous
/// - `k`, `v`: `[num_tokens, num_kv_heads, head_dim]`, same dtype, last axis contiguous
/// - `rope`: see [`RotaryTable`]
/// - `slots`: `[num_tokens]`, i32
/// - `q_out`: as `q`, another buffer
/// - `k_cache`, `v_cache`: `[num_blocks, block_size, num_kv_heads, head_dim]`, same dtype, or u8
///   with `scales`, contiguous, two buffers; written in place
/// - `scales`: see [`KvScales`]; `head_dim` is then a multiple of 4, `rotary_dim` one of 8
///
/// # Numerics
/// As [`rotary`]; with `scales`, rotated keys become codes without a cast between.
///
/// # Errors
/// As [`rotary`].
#[allow(clippy::too_many_arguments)]
pub fn rotary_and_store(
    launcher: &Launcher,
    q: &TensorRef,
    k: &TensorRef,
    v: &TensorRef,
    rope: RotaryTable<'_>,
    slots: &TensorRef,
    q_out: &TensorRef,
    k_cache: &TensorRef,
    v_cache: &TensorRef,
    scales: Option<KvScales<'_>>,
) -> Result<(), KernelError> {
    let check = Check::new("rotary_and_store");
    let problem = RotaryProblem::checked(check, launcher, q, k, rope)?;
    let cache = CacheProblem::checked(check, launcher.facts(), k_cache, v_cache, scales)?;
    let packed = cache.packed_shape(problem.num_tokens);
    check.rows("k", k, &packed, problem.dtype)?;
    check.rows("v", v, &packed, problem.dtype)?;
    check.rows("q_out", q_out, q.shape(), problem.dtype)?;
    if !cache.is_fp8() {
        check.same("cache", "dtype", &cache.dtype, &problem.dtype)?;
    } else if !problem.rotary_dim.is_multiple_of(2 * e4m3::WORD) {
        return check.unsupported(format!(
            "rotary_dim {} with a cache of eight bits, expected a multiple of {}",
            problem.rotary_dim,
            2 * e4m3::WORD
        ));
    }
    check.contiguous("slots", slots, &[problem.num_tokens], I32)?;
    let inputs = [("q", q), ("k", k), ("v", v), ("table", rope.table)];
    check.output("q_out", q_out, &inputs)?;
    check.output("k_cache", k_cache, &inputs)?;
    check.output("v_cache", v_cache, &inputs)?;
    check.output(
        "k_cache",
        k_cache,
        &[("q_out", q_out), ("v_cache", v_cache)],
    )?;
    check.output("v_cache", v_cache, &[("q_out", q_out)])?;
    if let Some(scales) = scales {
        let scales = [("k scales", scales.k), ("v scales", scales.v)];
        check.output("q_out", q_out, &scales)?;
        check.output("k_cache", k_cache, &scales)?;
        check.output("v_cache", v_cache, &scales)?;
    }
    if problem.is_empty() {
        return Ok(());
    }

    let tensors = [q, k, v, q_out, k_cache, v_cache, rope.table];
    let n = problem.vector_size(launcher, &tensors);
    let split = problem.split(launcher, n);
    let grid = split.grid(launcher.facts());
    let (count, dim, address) = launcher.topology(check, grid, n, &tensors)?;
    if let Some(scales) = scales {
        let pieces = Pieces::new(n, launcher.facts().inline_ptx);
        // SAFETY: as below.
        unsafe {
            rotary_and_store_fp8_kernel::launch_unchecked(
                launcher.client(),
                count,
                dim,
                address,
                n,
                pieces.elements,
                pieces.words(),
                q.buffer_arg(n),
                k.buffer_arg(n),
                v.buffer_arg(n),
                rope.positions.buffer_arg(1),
                rope.table.buffer_arg(n),
                slots.buffer_arg(1),
                scales.k.buffer_arg(1),
                scales.v.buffer_arg(1),
                q_out.buffer_arg(n),
                k_cache.buffer_arg(pieces.elements),
                v_cache.buffer_arg(pieces.elements),
                head_layout(q, n),
                head_layout(k, n),
                head_layout(v, n),
                head_layout(q_out, n),
                slot_layout(k_cache, pieces.elements),
                problem.arg(n),
                split.arg(),
                cache.num_slots(),
                pieces,
                problem.dtype,
            );
        }
        return Ok(());
    }
    // SAFETY: every tensor lies in its buffer, positions are held inside the table, slots are
    // tested against the cache, the outputs overlap nothing, and surplus units end first.
    unsafe {
        rotary_and_store_kernel::launch_unchecked(
            launcher.client(),
            count,
            dim,
            address,
            n,
            q.buffer_arg(n),
            k.buffer_arg(n),
            v.buffer_arg(n),
            rope.positions.buffer_arg(1),
            rope.table.buffer_arg(n),
            slots.buffer_arg(1),
            q_out.buffer_arg(n),
            k_cache.buffer_arg(n),
            v_cache.buffer_arg(n),
            head_layout(q, n),
            head_layout(k, n),
            head_layout(v, n),
            head_layout(q_out, n),
            slot_layout(k_cache, n),
            problem.arg(n),
            split.arg(),
            cache.num_slots(),
            problem.dtype,
        );
    }
    Ok(())
}

struct RotaryProblem {
    num_tokens: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    rotary_dim: usize,
    max_positions: usize,
    dtype: ElemType,
}

impl RotaryProblem {
    fn checked(
        check: Check,
        launcher: &Launcher,
        q: &TensorRef,
        k: &TensorRef,
        rope: RotaryTable<'_>,
    ) -> Result<Self, KernelError> {
        let [num_tokens, num_heads, head_dim] = check.sizes("q", q)?;
        let [_, num_kv_heads, _] = check.sizes("k", k)?;
        let [max_positions, rotary_dim] = check.sizes("table", rope.table)?;
        let dtype = check.float(launcher.facts(), "q", q)?;
        check.rows("q", q, &[num_tokens, num_heads, head_dim], dtype)?;
        check.rows("k", k, &[num_tokens, num_kv_heads, head_dim], dtype)?;
        check.contiguous("positions", rope.positions, &[num_tokens], I32)?;
        check.contiguous("table", rope.table, &[max_positions, rotary_dim], F32)?;
        if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) || rotary_dim > head_dim {
            return check.invalid(format!(
                "rotary_dim {rotary_dim}, expected an even number up to head_dim {head_dim}"
            ));
        }
        if max_positions == 0 {
            return check.invalid("table has no positions".into());
        }
        Ok(Self {
            num_tokens,
            num_heads,
            num_kv_heads,
            head_dim,
            rotary_dim,
            max_positions,
            dtype,
        })
    }

    fn is_empty(&self) -> bool {
        self.num_tokens * (self.num_heads + self.num_kv_heads) == 0
    }

    /// The widest vector in which `tensors`, halves and the table can be seen.
    fn vector_size(&self, launcher: &Launcher, tensors: &[&TensorRef]) -> usize {
        launcher.vector_size(self.dtype, &[self.head_dim, self.rotary_dim / 2], tensors)
    }

    fn split(&self, launcher: &Launcher, vector_size: usize) -> RowSplit {
        let rows = self.num_tokens * (self.num_heads + self.num_kv_heads);
        RowSplit::new(launcher.facts(), rows, self.rotary_dim / 2 / vector_size)
    }

    fn arg(&self, vector_size: usize) -> RotaryShapeLaunch {
        RotaryShapeLaunch::new(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim / vector_size,
            self.rotary_dim / 2 / vector_size,
            self.max_positions,
        )
    }
}
