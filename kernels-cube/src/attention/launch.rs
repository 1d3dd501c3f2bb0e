use cubecl::prelude::BufferArg;

#[cfg(feature = "hopper")]
use cubecl::prelude::{CubeCount, CubeDim};

#[cfg(feature = "hopper")]
use super::hopper_decode::{DecodeSpec, hopper_decode_kernel};
#[cfg(feature = "hopper")]
use super::hopper_prefill::{
    DealLaunch, HopperSpec, hopper_prefill_kernel, hopper_prefill_start_kernel,
};
use super::keys::{BatchShapeLaunch, KeySource, ScoreParamsLaunch, SplitsLaunch};
use super::mask::{MaskBoundsLaunch, NO_WINDOW};
use super::merge::merge_kernel;
use super::mma::MmaSpec;
use super::mma_decode::mma_decode_kernel;
use super::mma_prefill::mma_prefill_kernel;
use super::plan::{AttentionKernel, AttentionPlan, DecodeTile, HopperTile};
use super::portable::{PortableSpec, attention_kernel};
use super::{AttentionOptions, AttentionProblem};
use crate::cache::{CacheProblem, KvScales};
#[cfg(feature = "hopper")]
use crate::check::F16;
use crate::check::{Check, F32, I32, U32};
use crate::e4m3::Codes;
use crate::error::KernelError;
#[cfg(feature = "hopper")]
use crate::hopper::{HalfType, tma};
use crate::launcher::Launcher;
use crate::layout::{HeadLayoutLaunch, head_layout, slot_layout};
use crate::paged::BlockTableShape;
use crate::rows::RowSplit;
use crate::tensor::TensorRef;

/// The keys and values that queries attend over.
#[derive(Clone, Copy, Debug)]
pub enum Keys<'a> {
    /// Sequences one after the other.
    Packed {
        /// Keys, `[total_keys, num_kv_heads, head_dim]`, last axis contiguous.
        k: &'a TensorRef,
        /// Values, as `k`.
        v: &'a TensorRef,
        /// Where sequences begin, `[num_seqs + 1]`, i32; starts at 0, never falls.
        cu_seqlens_k: &'a TensorRef,
    },
    /// Sequences in blocks of one layer's cache.
    Paged {
        /// Keys, `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous; u8 with `scales`.
        k_cache: &'a TensorRef,
        /// Values, as `k_cache`.
        v_cache: &'a TensorRef,
        /// What codes of eight bits are multiplied with; `head_dim` is then a multiple of 4.
        scales: Option<KvScales<'a>>,
        /// Blocks of each sequence, `[num_seqs, max_blocks]`, i32, last axis contiguous.
        block_table: &'a TensorRef,
        /// Keys of each sequence, `[num_seqs]`, i32.
        seq_lens: &'a TensorRef,
    },
}

/// Attention of packed queries over packed keys or over the paged cache.
///
/// `out[t, h] = Σ_j softmax_j(scale · q[t, h] · k[j]) · v[j]`, over the keys that row `t` sees;
/// `lse[t, h]` is the natural logarithm of the sum of the exponents.
///
/// # Shapes
/// - `q`: `[num_tokens, num_heads, head_dim]`, f32 | f16 | bf16, last axis contiguous;
///   `head_dim <= 256`, `num_heads` a multiple of `num_kv_heads`
/// - `cu_seqlens_q`: `[num_seqs + 1]`, i32; starts at 0, never falls
/// - `keys`: see [`Keys`], the dtype of `q`, or u8
/// - `out`: as `q`
/// - `lse`: `[num_tokens, num_heads]`, f32, contiguous
///
/// # Numerics
/// Everything in f32, one cast on write. A row that sees no key gives 0 and −inf, and so does a row
/// past the last sequence. Keys that nobody may see are not read. A key whose block is none of the
/// cache's is left out.
///
/// Tensor-core kernels round the weights to the dtype before they multiply the values, and a value of infinity or NaN
/// that one row of a tile sees may reach rows of the tile that do not. Of eight bits ([`KvScales`]), products are of the
/// numbers of the codes, and scales are applied to their sums.
///
/// # Memory
/// Where the plan cuts keys into parts ([`AttentionPlan::num_splits`]), their results are kept in f32 in a buffer of the
/// client's pool until a second launch has put them together.
///
/// # Errors
/// [`KernelError::Invalid`] if shapes, strides, dtypes, buffers or options disagree,
/// [`KernelError::Unsupported`] and [`KernelError::Launch`] if the device cannot serve them.
pub fn attention(
    launcher: &Launcher,
    q: &TensorRef,
    cu_seqlens_q: &TensorRef,
    keys: Keys<'_>,
    out: &TensorRef,
    lse: &TensorRef,
    options: &AttentionOptions,
) -> Result<(), KernelError> {
    attend(launcher, q, cu_seqlens_q, keys, out, lse, options, None)
}

/// What computes a call, where the caller chooses and not the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionChoice {
    /// A kernel, in the form that is planned for it.
    Kernel(AttentionKernel),
    /// [`AttentionKernel::HopperPrefill`] with one of [`HopperTile::all`].
    Prefill(HopperTile),
    /// [`AttentionKernel::HopperDecode`] with one of [`DecodeTile::all`].
    Decode(DecodeTile),
}

impl AttentionChoice {
    /// The kernel.
    pub fn kernel(self) -> AttentionKernel {
        match self {
            Self::Kernel(kernel) => kernel,
            Self::Prefill(_) => AttentionKernel::HopperPrefill,
            Self::Decode(_) => AttentionKernel::HopperDecode,
        }
    }
}

/// As [`attention`] with what the caller chooses, for tests and benches.
///
/// # Errors
/// As [`attention`], and [`KernelError::Unsupported`] if the kernel does not run on the device or does not take the
/// problem, or the tile is none of `all` for its heads.
#[allow(
    clippy::too_many_arguments,
    reason = "those of `attention` and one more"
)]
pub fn attention_with(
    launcher: &Launcher,
    choice: AttentionChoice,
    q: &TensorRef,
    cu_seqlens_q: &TensorRef,
    keys: Keys<'_>,
    out: &TensorRef,
    lse: &TensorRef,
    options: &AttentionOptions,
) -> Result<(), KernelError> {
    let choice = Some(choice);
    attend(launcher, q, cu_seqlens_q, keys, out, lse, options, choice)
}

#[allow(
    clippy::too_many_arguments,
    reason = "those of `attention` and one more"
)]
fn attend(
    launcher: &Launcher,
    q: &TensorRef,
    cu_seqlens_q: &TensorRef,
    keys: Keys<'_>,
    out: &TensorRef,
    lse: &TensorRef,
    options: &AttentionOptions,
    choice: Option<AttentionChoice>,
) -> Result<(), KernelError> {
    let check = Check::new("attention");
    let (problem, operands) =
        Operands::checked(check, launcher, q, cu_seqlens_q, keys, out, lse, options)?;
    if problem.num_tokens == 0 || problem.num_heads == 0 {
        return Ok(());
    }
    let n = operands.vector_size(launcher, &problem);
    let facts = launcher.facts();
    let plan = match choice {
        None => AttentionPlan::new(facts, &problem, n, options),
        Some(choice)
            if options.fixed_split.is_some()
                && matches!(
                    choice.kernel(),
                    AttentionKernel::HopperPrefill | AttentionKernel::HopperDecode
                ) =>
        {
            // Their tiles depend on the batch, and with them the bits of a row.
            return check.unsupported(format!("{:?} in fixed parts", choice.kernel()));
        }
        Some(choice) if choice.kernel().runs(facts, &problem, n) => {
            let mut tile = HopperTile::new(facts, &problem);
            let mut decode = DecodeTile::new(facts, &problem);
            match choice {
                AttentionChoice::Kernel(_) => {}
                AttentionChoice::Prefill(chosen) => tile = chosen,
                AttentionChoice::Decode(chosen) => decode = chosen,
            }
            let kv_bytes = problem.kv_dtype.size();
            let known = HopperTile::all(problem.head_dim, kv_bytes).contains(&tile)
                && DecodeTile::all(problem.head_dim, kv_bytes).contains(&decode);
            if !known {
                return check.unsupported(format!(
                    "{choice:?} for heads of {} elements of {} bytes",
                    problem.head_dim, kv_bytes
                ));
            }
            let kernel = choice.kernel();
            AttentionPlan::with_kernel(facts, &problem, n, options, kernel, tile, decode)
        }
        Some(choice) => {
            return check.unsupported(format!(
                "{choice:?} for {problem:?} in vectors of {n} elements"
            ));
        }
    };
    if plan.num_splits == 1 {
        return launch(check, launcher, &problem, &plan, &operands, options);
    }
    let AttentionProblem {
        num_tokens,
        num_heads,
        head_dim,
        ..
    } = problem;
    let scratch = |sizes: &[usize]| {
        let bytes = sizes
            .iter()
            .try_fold(F32.size(), |n, &size| n.checked_mul(size));
        match bytes {
            Some(bytes) => {
                let handle = launcher.client().empty(bytes);
                Ok(TensorRef::contiguous(handle, sizes.to_vec(), F32))
            }
            None => check.too_large(format!("parts of {sizes:?} elements")),
        }
    };
    // Parts lie one after the other, as rows of so many more tokens.
    let parts = scratch(&[plan.num_splits * num_tokens, num_heads, head_dim])?;
    let part_lse = scratch(&[plan.num_splits * num_tokens, num_heads])?;
    let split = Operands {
        out: &parts,
        lse: &part_lse,
        ..operands
    };
    launch(check, launcher, &problem, &plan, &split, options)?;
    merge(
        check, launcher, &problem, &plan, &parts, &part_lse, out, lse,
    )
}

/// In place of a block table, where keys are packed and the kernel reads none.
const NO_TABLE: BlockTableShape = BlockTableShape {
    row_stride: 0,
    max_blocks: 0,
    block_size: 1,
    num_blocks: 0,
};

/// The tensors of a launch, checked.
#[derive(Clone, Copy)]
struct Operands<'a> {
    q: &'a TensorRef,
    cu_seqlens_q: &'a TensorRef,
    source: Source<'a>,
    out: &'a TensorRef,
    lse: &'a TensorRef,
}

impl<'a> Operands<'a> {
    #[allow(clippy::too_many_arguments, reason = "those of `attention`")]
    fn checked(
        check: Check,
        launcher: &Launcher,
        q: &'a TensorRef,
        cu_seqlens_q: &'a TensorRef,
        keys: Keys<'a>,
        out: &'a TensorRef,
        lse: &'a TensorRef,
        options: &AttentionOptions,
    ) -> Result<(AttentionProblem, Self), KernelError> {
        let [num_tokens, num_heads, head_dim] = check.sizes("q", q)?;
        let dtype = check.float(launcher.facts(), "q", q)?;
        let [num_offsets] = check.sizes("cu_seqlens_q", cu_seqlens_q)?;
        let Some(num_seqs) = num_offsets.checked_sub(1) else {
            return check.invalid("cu_seqlens_q is empty, expected at least one entry".into());
        };
        let source = Source::checked(check, launcher, keys, num_seqs)?;
        let num_kv_heads = source.k.shape()[source.k.shape().len() - 2];
        let problem = AttentionProblem {
            num_tokens,
            num_seqs,
            num_heads,
            num_kv_heads,
            head_dim,
            max_keys: source.max_keys as usize,
            expected_keys: source.expected_keys,
            block_size: source.block_size(),
            dtype,
            kv_dtype: source.k.dtype(),
        };
        problem.check(check, options)?;
        check.same(
            "keys",
            "head_dim",
            source.k.shape().last().unwrap_or(&0),
            &head_dim,
        )?;
        if source.scales.is_none() {
            check.same("keys", "dtype", &source.k.dtype(), &dtype)?;
        }
        check.rows("q", q, &[num_tokens, num_heads, head_dim], dtype)?;
        check.contiguous("cu_seqlens_q", cu_seqlens_q, &[num_seqs + 1], I32)?;
        check.rows("out", out, &[num_tokens, num_heads, head_dim], dtype)?;
        check.contiguous("lse", lse, &[num_tokens, num_heads], F32)?;
        let inputs = [("q", q), ("keys", source.k), ("values", source.v)];
        check.output("out", out, &inputs)?;
        check.output("lse", lse, &[("out", out), inputs[0], inputs[1], inputs[2]])?;
        if let Some(scales) = source.scales {
            let scales = [("k scales", scales.k), ("v scales", scales.v)];
            check.output("out", out, &scales)?;
            check.output("lse", lse, &scales)?;
        }
        let operands = Self {
            q,
            cu_seqlens_q,
            source,
            out,
            lse,
        };
        Ok((problem, operands))
    }

    /// The widest vector in which all tensors can be seen.
    fn vector_size(&self, launcher: &Launcher, problem: &AttentionProblem) -> usize {
        let tensors = [self.q, self.source.k, self.source.v, self.out];
        launcher.vector_size(problem.dtype, &[problem.head_dim], &tensors)
    }
}

/// Packed and paged keys in the form that a kernel takes.
#[derive(Clone, Copy)]
struct Source<'a> {
    kind: KeySource,
    k: &'a TensorRef,
    v: &'a TensorRef,
    scales: Option<KvScales<'a>>,
    kv_lens: &'a TensorRef,
    block_table: &'a TensorRef,
    table: BlockTableShape,
    max_keys: i32,
    expected_keys: usize,
}

impl<'a> Source<'a> {
    fn checked(
        check: Check,
        launcher: &Launcher,
        keys: Keys<'a>,
        num_seqs: usize,
    ) -> Result<Self, KernelError> {
        match keys {
            Keys::Packed { k, v, cu_seqlens_k } => {
                let shape: [usize; 3] = check.sizes("k", k)?;
                let dtype = check.float(launcher.facts(), "k", k)?;
                check.rows("k", k, &shape, dtype)?;
                check.rows("v", v, &shape, dtype)?;
                check.contiguous("cu_seqlens_k", cu_seqlens_k, &[num_seqs + 1], I32)?;
                if shape[0] > i32::MAX as usize {
                    return check.too_large(format!("{} keys, more than an i32 counts", shape[0]));
                }
                Ok(Self {
                    kind: KeySource::Packed,
                    k,
                    v,
                    scales: None,
                    kv_lens: cu_seqlens_k,
                    // Not read by the kernel for packed keys; any i32 buffer will do.
                    block_table: cu_seqlens_k,
                    table: NO_TABLE,
                    max_keys: shape[0] as i32,
                    expected_keys: shape[0] / num_seqs.max(1),
                })
            }
            Keys::Paged {
                k_cache,
                v_cache,
                scales,
                block_table,
                seq_lens,
            } => {
                let facts = launcher.facts();
                let cache = CacheProblem::checked(check, facts, k_cache, v_cache, scales)?;
                let table = cache.check_block_table(check, block_table, num_seqs)?;
                // Without a block, no sequence has a key.
                let max_blocks = if table.num_blocks == 0 {
                    0
                } else {
                    table.max_blocks
                };
                let max_positions = max_blocks.saturating_mul(table.block_size);
                check.contiguous("seq_lens", seq_lens, &[num_seqs], I32)?;
                Ok(Self {
                    kind: KeySource::Paged,
                    k: k_cache,
                    v: v_cache,
                    scales,
                    kv_lens: seq_lens,
                    block_table,
                    table,
                    max_keys: i32::try_from(max_positions).unwrap_or(i32::MAX),
                    expected_keys: max_positions,
                })
            }
        }
    }

    /// Tokens of a block, where keys are paged.
    fn block_size(&self) -> Option<usize> {
        (self.kind == KeySource::Paged).then_some(self.table.block_size)
    }

    /// The scales of keys and of values; where there are none, what no kernel reads.
    fn scale_args(&self) -> [BufferArg; 2] {
        let unread = KvScales {
            k: self.kv_lens,
            v: self.kv_lens,
        };
        let KvScales { k, v } = self.scales.unwrap_or(unread);
        // SAFETY: kernels read as many elements as the checked shape has, or none.
        [k, v].map(|scales| unsafe { scales.buffer_arg(1) })
    }

    fn layout(&self, tensor: &TensorRef, vector_size: usize) -> HeadLayoutLaunch {
        match self.kind {
            KeySource::Packed => head_layout(tensor, vector_size),
            KeySource::Paged => slot_layout(tensor, vector_size),
        }
    }
}

fn launch(
    check: Check,
    launcher: &Launcher,
    problem: &AttentionProblem,
    plan: &AttentionPlan,
    operands: &Operands<'_>,
    options: &AttentionOptions,
) -> Result<(), KernelError> {
    let Operands {
        q,
        cu_seqlens_q,
        source,
        out,
        lse,
    } = operands;
    let n = plan.vector_size;
    let tensors = [*q, source.k, source.v, *out];
    let (count, dim, address) = launcher.topology(check, plan.grid, n, &tensors)?;
    let batch = BatchShapeLaunch::new(
        problem.num_tokens,
        problem.num_seqs,
        problem.num_heads,
        problem.num_heads / problem.num_kv_heads,
        source.max_keys,
    );
    let params = ScoreParamsLaunch::new(options.scale, options.softcap.unwrap_or(1.0));
    let window = options.window.map_or(NO_WINDOW, |window| {
        i32::try_from(window).unwrap_or(NO_WINDOW).min(NO_WINDOW)
    });
    let bounds = MaskBoundsLaunch::new(u32::from(options.causal), window);
    // Longer parts hold every key, and the end of a part must not wrap.
    let splits = SplitsLaunch::new(plan.num_splits, plan.fixed_split.min(1 << 30) as i32);
    let dtypes = [problem.dtype, out.dtype()];
    let block_log2 = source.table.block_size.max(1).ilog2();
    let mma_spec = MmaSpec {
        keys: source.kind,
        head_dim: problem.head_dim,
        softcapped: options.softcap.is_some(),
        scaled_first: options.softcap.is_some() || options.scale <= 0.0,
        inline_ptx: launcher.facts().inline_ptx,
        by_shift: source.table.block_size.is_power_of_two(),
        fp8: problem.is_fp8(),
    };
    let [k_scales, v_scales] = source.scale_args();
    // SAFETY: every tensor lies in its buffer, lengths and blocks are tested against the tables and
    // the keys, the outputs overlap nothing, and surplus units end first, all those of a cube together
    // where units share memory.
    unsafe {
        match plan.kernel {
            #[cfg(not(feature = "hopper"))]
            AttentionKernel::HopperPrefill | AttentionKernel::HopperDecode => {
                return check.unsupported(format!("{:?} without the feature hopper", plan.kernel));
            }
            #[cfg(feature = "hopper")]
            AttentionKernel::HopperDecode => {
                let Some(tile) = plan.decode else {
                    return check.unsupported("HopperDecode without a plan".into());
                };
                let Some(query) = HalfType::of(problem.dtype) else {
                    return check.unsupported(format!("HopperDecode for {:?}", problem.dtype));
                };
                let piece_keys = source.block_size().unwrap_or(tile.keys).min(tile.keys);
                let group = problem.num_heads / problem.num_kv_heads;
                let spec = DecodeSpec {
                    tile,
                    mma: mma_spec,
                    piece_keys,
                    halves: group.div_ceil(8),
                    query,
                    in_parts: plan.num_splits > 1,
                };
                // Products of codes are of f16, and two codes are an element of 16 bits to the copy engine.
                let (products, k, v) = match problem.is_fp8() {
                    true => (F16, in_pairs(source.k), in_pairs(source.v)),
                    false => (problem.dtype, source.k.clone(), source.v.clone()),
                };
                let columns = spec.copy_columns();
                let promotion = tma::Promotion::Row;
                hopper_decode_kernel::launch_unchecked(
                    launcher.client(),
                    count,
                    dim,
                    address,
                    // Queries are read in words of two elements, the output is written in vectors of four.
                    q.buffer_arg(2),
                    tma::narrow_heads_map(&k, piece_keys, 1, columns, promotion),
                    tma::narrow_heads_map(&v, piece_keys, 1, columns, promotion),
                    k_scales,
                    v_scales,
                    cu_seqlens_q.buffer_arg(1),
                    source.kv_lens.buffer_arg(1),
                    source.block_table.buffer_arg(1),
                    out.buffer_arg(4),
                    lse.buffer_arg(1),
                    head_layout(q, 2),
                    head_layout(out, 4),
                    source.table.arg(),
                    batch,
                    params,
                    bounds,
                    plan.num_splits,
                    block_log2,
                    spec,
                    [products, out.dtype()],
                );
            }
            #[cfg(feature = "hopper")]
            AttentionKernel::HopperPrefill => {
                let (Some(query), Some(tile)) = (HalfType::of(problem.dtype), plan.tile) else {
                    return check.unsupported(format!("HopperPrefill for {:?}", problem.dtype));
                };
                let group = problem.num_heads / problem.num_kv_heads;
                let heads = tile.heads(group);
                let piece_keys = tile.keys_at_once(source.block_size());
                let by_slots = HopperTile::by_slots(problem);
                // Vectors of 16 bytes.
                let in_parts = plan.num_splits > 1;
                let n = if in_parts { 4 } else { n };
                let spec = HopperSpec {
                    tile,
                    mma: mma_spec,
                    kind: if problem.is_fp8() {
                        HalfType::F16
                    } else {
                        query
                    },
                    query,
                    piece_keys,
                    by_slots,
                    in_parts,
                };
                let map = |keys: &TensorRef| match (problem.is_fp8(), by_slots) {
                    (true, _) => tma::narrow_heads_map(
                        &in_pairs(keys),
                        piece_keys,
                        1,
                        spec.code_columns(),
                        tma::Promotion::Two,
                    ),
                    (false, true) => tma::slots_map(keys, piece_keys),
                    (false, false) => tma::heads_map(keys, piece_keys, 1),
                };
                let pieces = plan.num_tiles * plan.num_splits;
                // Of this launch alone, so that launches of two streams do not draw from one another.
                let drawn = launcher.client().empty(I32.size());
                let drawn = TensorRef::contiguous(drawn, vec![1], I32);
                if tile.stays {
                    hopper_prefill_start_kernel::launch_unchecked(
                        launcher.client(),
                        CubeCount::new_single(),
                        CubeDim::new_1d(32),
                        drawn.buffer_arg(1),
                    );
                }
                hopper_prefill_kernel::launch_unchecked(
                    launcher.client(),
                    count,
                    dim,
                    address,
                    tma::heads_map(q, tile.rows() / heads, heads),
                    map(source.k),
                    map(source.v),
                    k_scales,
                    v_scales,
                    cu_seqlens_q.buffer_arg(1),
                    source.kv_lens.buffer_arg(1),
                    source.block_table.buffer_arg(1),
                    drawn.buffer_arg(1),
                    out.buffer_arg(n),
                    lse.buffer_arg(1),
                    head_layout(out, n),
                    source.table.arg(),
                    BatchShapeLaunch::new(
                        problem.num_tokens,
                        problem.num_seqs,
                        problem.num_heads,
                        heads,
                        source.max_keys,
                    ),
                    params,
                    bounds,
                    group,
                    DealLaunch::new(pieces, plan.num_cubes / tile.cluster, plan.num_splits),
                    block_log2,
                    spec,
                    problem.dtype,
                );
            }
            AttentionKernel::Portable => {
                let codes = problem.is_fp8().then_some(Codes {
                    vector: n,
                    inline_ptx: launcher.facts().inline_ptx,
                });
                // Elements of keys that are read at a time, and how they are seen.
                let (read, kv_dtype, kv_vector) = match codes {
                    Some(codes) => (codes.per_read(), U32, codes.words()),
                    None => (n, problem.dtype, n),
                };
                attention_kernel::launch_unchecked(
                    launcher.client(),
                    count,
                    dim,
                    address,
                    n,
                    kv_vector,
                    q.buffer_arg(n),
                    source.k.buffer_arg(read),
                    source.v.buffer_arg(read),
                    k_scales,
                    v_scales,
                    cu_seqlens_q.buffer_arg(1),
                    source.kv_lens.buffer_arg(1),
                    source.block_table.buffer_arg(1),
                    out.buffer_arg(n),
                    lse.buffer_arg(1),
                    head_layout(q, n),
                    source.layout(source.k, read),
                    source.layout(source.v, read),
                    head_layout(out, n),
                    source.table.arg(),
                    batch,
                    params,
                    bounds,
                    splits,
                    PortableSpec {
                        keys: source.kind,
                        head_vectors: problem.head_dim / n,
                        unroll: plan.unroll,
                        softcapped: options.softcap.is_some(),
                        codes,
                    },
                    [problem.dtype, kv_dtype, out.dtype()],
                );
            }
            AttentionKernel::MmaDecode => mma_decode_kernel::launch_unchecked(
                launcher.client(),
                count,
                dim,
                address,
                mma_spec.vector_words(),
                q.buffer_arg(n),
                source.k.buffer_arg(n),
                source.v.buffer_arg(n),
                k_scales,
                v_scales,
                cu_seqlens_q.buffer_arg(1),
                source.kv_lens.buffer_arg(1),
                source.block_table.buffer_arg(1),
                out.buffer_arg(n),
                lse.buffer_arg(1),
                head_layout(q, n),
                source.layout(source.k, n),
                source.layout(source.v, n),
                head_layout(out, n),
                source.table.arg(),
                batch,
                params,
                bounds,
                splits,
                plan.num_cubes,
                block_log2,
                mma_spec,
                dtypes,
            ),
            AttentionKernel::MmaPrefill => mma_prefill_kernel::launch_unchecked(
                launcher.client(),
                count,
                dim,
                address,
                mma_spec.vector_words(),
                q.buffer_arg(n),
                source.k.buffer_arg(n),
                source.v.buffer_arg(n),
                k_scales,
                v_scales,
                cu_seqlens_q.buffer_arg(1),
                source.kv_lens.buffer_arg(1),
                source.block_table.buffer_arg(1),
                // The output is written in pairs of elements.
                out.buffer_arg(2),
                lse.buffer_arg(1),
                head_layout(q, n),
                source.layout(source.k, n),
                source.layout(source.v, n),
                head_layout(out, 2),
                source.table.arg(),
                batch,
                params,
                bounds,
                splits,
                plan.num_cubes,
                block_log2,
                mma_spec,
                dtypes,
            ),
        }
    }
    Ok(())
}

/// A tensor of codes, seen in pairs, which the copy engine moves as elements of 16 bits.
#[cfg(feature = "hopper")]
fn in_pairs(codes: &TensorRef) -> TensorRef {
    let mut shape = codes.shape().to_vec();
    let mut strides = codes.strides().to_vec();
    let last = shape.len() - 1;
    shape[last] /= 2;
    for stride in &mut strides[..last] {
        *stride /= 2;
    }
    TensorRef::new(codes.handle().clone(), shape, strides, F16)
}

/// Puts the parts of a split call together.
#[allow(clippy::too_many_arguments, reason = "the tensors of one launch")]
fn merge(
    check: Check,
    launcher: &Launcher,
    problem: &AttentionProblem,
    plan: &AttentionPlan,
    parts: &TensorRef,
    part_lse: &TensorRef,
    out: &TensorRef,
    lse: &TensorRef,
) -> Result<(), KernelError> {
    let n = launcher.vector_size(problem.dtype, &[problem.head_dim], &[out]);
    let head_vectors = problem.head_dim / n;
    let rows = problem.num_tokens * problem.num_heads;
    let split = RowSplit::new(launcher.facts(), rows, head_vectors);
    let grid = split.grid(launcher.facts());
    let (count, dim, address) = launcher.topology(check, grid, n, &[parts, out])?;
    // SAFETY: the parts are ours, the outputs were checked, and surplus units end first.
    unsafe {
        merge_kernel::launch_unchecked(
            launcher.client(),
            count,
            dim,
            address,
            n,
            parts.buffer_arg(n),
            part_lse.buffer_arg(1),
            out.buffer_arg(n),
            lse.buffer_arg(1),
            head_layout(out, n),
            split.arg(),
            problem.num_tokens,
            problem.num_heads,
            head_vectors,
            plan.num_splits,
            problem.dtype,
        );
    }
    Ok(())
}
