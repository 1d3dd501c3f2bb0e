//! Attention of packed queries over packed keys and over the paged cache: prefill, prefill over a prefix, decode, both in one
//! call.
//!
//! Run with: cargo bench -p burn-paged-benches --no-default-features --features cuda-hopper --bench attention --
//! --device cuda [--all-plans] [--kv fp8] [--json OUT.json]; see benches/README.md.

use burn_paged_benches::kernel::{
    AttentionCase, Bound, CaseName, CubeDevice, Dtype, Filled, Heads, Session, Shapes, Target,
    Values, Work, ints, relative_error, shuffled,
};
use burn_paged_kernels::{
    AttentionChoice, AttentionKernel, AttentionOptions, AttentionPlan, AttentionProblem,
    DecodeTile, HopperTile, Keys, KvScales, Launcher, TensorRef, attention, attention_with,
};

/// Sets of inputs, at most.
const MAX_SETS: usize = 256;

fn main() -> Result<(), String> {
    Session::run("attention", |session, target, shapes| {
        for heads in &shapes.heads {
            for case in &shapes.attention {
                let layouts = match session.args().kv_dtype() {
                    Dtype::E4m3 => &[Layout::PagedFp8][..],
                    _ => &[Layout::Paged, Layout::Packed],
                };
                for &layout in layouts {
                    run(session, target, shapes, heads, case, layout);
                }
            }
        }
        Ok(())
    })
}

fn run(
    session: &mut Session,
    target: &Target,
    shapes: &Shapes,
    heads: &Heads,
    case: &AttentionCase,
    layout: Layout,
) {
    let name = CaseName {
        kind: case.kind,
        head: heads.name.clone(),
        case: case.name.clone(),
        op: "attention",
        layout: layout.name(),
        tokens: None,
    };
    let (dtype, kv_dtype) = (session.args().dtype, session.args().kv_dtype());
    let kv_bytes = case.kv_bytes(heads, kv_dtype);
    if kv_bytes > shapes.max_kv_bytes {
        let reason = format!("{:.0} GB of K and V", kv_bytes as f64 / 1e9);
        return session.leave_out(&name, &reason);
    }
    for way in ways(session, target, heads, case) {
        session.case(target, name.clone(), |session| {
            let batch = Batch::new(heads, case, layout, shapes.page_size, [dtype, kv_dtype]);
            match target {
                Target::Cube(device) => {
                    let sets = session.sets(target, batch.bytes(), MAX_SETS);
                    cube(device, batch, way, sets)
                }
                #[cfg(feature = "flex")]
                Target::Flex(_) if kv_dtype == Dtype::E4m3 => Err("no cache of eight bits".into()),
                #[cfg(feature = "flex")]
                Target::Flex(device) => flex::work(device, batch),
            }
        });
    }
}

/// The planned way, and with `--all-plans` the others that the kernels for Hopper know.
fn ways(
    session: &Session,
    target: &Target,
    heads: &Heads,
    case: &AttentionCase,
) -> Vec<Option<AttentionChoice>> {
    let mut ways = vec![None];
    let has_hopper = match target {
        Target::Cube(device) => device.launcher().facts().hopper,
        #[cfg(feature = "flex")]
        Target::Flex(_) => false,
    };
    if !session.args().all_plans || !has_hopper {
        return ways;
    }
    let kv_dtype = session.args().kv_dtype();
    if case.kind == "decode" {
        ways.push(Some(AttentionChoice::Kernel(AttentionKernel::MmaDecode)));
        let tiles = DecodeTile::all(heads.head_dim, kv_dtype.size()).into_iter();
        ways.extend(tiles.map(AttentionChoice::Decode).map(Some));
    } else {
        let tiles = HopperTile::all(heads.head_dim, kv_dtype.size()).into_iter();
        ways.extend(tiles.map(AttentionChoice::Prefill).map(Some));
    }
    ways
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layout {
    Paged,
    /// The same of eight bits.
    PagedFp8,
    Packed,
}

impl Layout {
    fn name(self) -> &'static str {
        match self {
            Self::Paged => "paged",
            Self::PagedFp8 => "paged fp8",
            Self::Packed => "packed",
        }
    }
}

/// A case on the host: where everything lies, and what comes out.
#[derive(Clone)]
struct Batch {
    heads: Heads,
    case: AttentionCase,
    layout: Layout,
    page: usize,
    dtype: Dtype,
    kv_dtype: Dtype,
    cu_q: Vec<i32>,
    cu_k: Vec<i32>,
    /// Rows of the block table, padded with -1.
    table: Vec<i32>,
    max_blocks: usize,
    num_blocks: usize,
}

impl Batch {
    fn new(
        heads: &Heads,
        case: &AttentionCase,
        layout: Layout,
        page: usize,
        [dtype, kv_dtype]: [Dtype; 2],
    ) -> Self {
        let blocks: Vec<usize> = case.kv_lens.iter().map(|len| len.div_ceil(page)).collect();
        let num_blocks = blocks.iter().sum();
        let max_blocks = blocks.iter().copied().max().unwrap_or(0);
        let mut free = shuffled(num_blocks, 2).into_iter();
        let mut table = Vec::with_capacity(blocks.len() * max_blocks);
        for &count in &blocks {
            table.extend(free.by_ref().take(count));
            table.extend(std::iter::repeat_n(-1, max_blocks - count));
        }
        Self {
            heads: heads.clone(),
            case: case.clone(),
            layout,
            page,
            dtype,
            kv_dtype,
            cu_q: cumulative(&case.q_lens),
            cu_k: cumulative(&case.kv_lens),
            table,
            max_blocks,
            num_blocks,
        }
    }

    fn q_shape(&self) -> [usize; 3] {
        let heads = &self.heads;
        [self.case.num_tokens(), heads.q_heads, heads.head_dim]
    }

    /// Keys or values of number `seed`.
    fn filled_keys(&self, device: &CubeDevice, seed: usize) -> Result<Filled, String> {
        let [kv_heads, head_dim] = [self.heads.kv_heads, self.heads.head_dim];
        match self.layout {
            Layout::Paged | Layout::PagedFp8 => {
                let shape = [self.num_blocks, self.page, kv_heads, head_dim];
                device.filled_cache(shape, self.kv_dtype, seed)
            }
            Layout::Packed => {
                let shape = [self.case.num_keys(), kv_heads, head_dim];
                Ok(device.filled(&shape, self.dtype, seed))
            }
        }
    }

    /// Keys of a sequence, as `attention` guesses them from the shapes of its arguments.
    fn expected_keys(&self) -> usize {
        match self.layout {
            Layout::Paged | Layout::PagedFp8 => self.max_blocks * self.page,
            Layout::Packed => self.case.num_keys() / self.case.kv_lens.len().max(1),
        }
    }

    fn flops(&self) -> f64 {
        self.case.flops(&self.heads)
    }

    fn bytes(&self) -> f64 {
        self.case.bytes(&self.heads, self.dtype, self.kv_dtype)
    }

    /// Where key `position` of a sequence begins in K and V.
    fn key_at(&self, sequence: usize, position: usize, kv_head: usize) -> usize {
        let slot = match self.layout {
            Layout::Packed => self.cu_k[sequence] as usize + position,
            Layout::Paged | Layout::PagedFp8 => {
                let block = self.table[sequence * self.max_blocks + position / self.page];
                block as usize * self.page + position % self.page
            }
        };
        (slot * self.heads.kv_heads + kv_head) * self.heads.head_dim
    }

    /// First, middle and last row of the first, middle and last sequence, with three heads each.
    fn samples(&self) -> Vec<(usize, usize, usize)> {
        let three = |count: usize| {
            let mut numbers = vec![0, count / 2, count - 1];
            numbers.dedup();
            numbers
        };
        let mut samples = Vec::new();
        for sequence in three(self.case.q_lens.len()) {
            for row in three(self.case.q_lens[sequence]) {
                for head in three(self.heads.q_heads) {
                    samples.push((sequence, row, head));
                }
            }
        }
        samples
    }

    /// The larger of the relative errors of outputs and of log-sum-exps, on the sampled rows.
    ///
    /// `out` and `lse` read elements of the results; a result without log-sum-exp gives none.
    fn error(
        &self,
        [q, k, v]: [Values; 3],
        out: &dyn Fn(usize, usize) -> Result<Vec<f64>, String>,
        lse: Option<&dyn Fn(usize) -> Result<f64, String>>,
    ) -> Result<f64, String> {
        let dim = self.heads.head_dim;
        let (mut outs, mut lses) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        for (sequence, row, head) in self.samples() {
            let at = (self.cu_q[sequence] as usize + row) * self.heads.q_heads + head;
            let q = q.range(at * dim, dim);
            let (exact, exact_lse) = self.attend(&q, k, v, sequence, row, head);
            outs[0].extend(out(at * dim, dim)?);
            outs[1].extend(exact);
            if let Some(lse) = lse {
                lses[0].push(lse(at)?);
                lses[1].push(exact_lse);
            }
        }
        let out_error = relative_error(&outs[0], &outs[1]);
        let lse_error = relative_error(&lses[0], &lses[1]);
        // `max` would drop a NaN.
        Ok(match lse_error > out_error || lse_error.is_nan() {
            true => lse_error,
            false => out_error,
        })
    }

    /// One row of causal attention, in f64.
    fn attend(
        &self,
        q: &[f64],
        k: Values,
        v: Values,
        sequence: usize,
        row: usize,
        head: usize,
    ) -> (Vec<f64>, f64) {
        let dim = self.heads.head_dim;
        let kv_head = head / (self.heads.q_heads / self.heads.kv_heads);
        let (q_len, kv_len) = (self.case.q_lens[sequence], self.case.kv_lens[sequence]);
        let visible = kv_len - q_len + row + 1;
        let scale = 1.0 / (dim as f64).sqrt();
        let score = |position| {
            let at = self.key_at(sequence, position, kv_head);
            let dot: f64 = q.iter().enumerate().map(|(i, q)| q * k.at(at + i)).sum();
            dot * scale
        };
        let scores: Vec<f64> = (0..visible).map(score).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
        let mut out = vec![0.0; dim];
        for (position, score) in scores.iter().enumerate() {
            let weight = (score - max).exp() / sum;
            let at = self.key_at(sequence, position, kv_head);
            for (i, out) in out.iter_mut().enumerate() {
                *out += weight * v.at(at + i);
            }
        }
        (out, max + sum.ln())
    }
}

/// 0 and the sums of the lengths so far.
fn cumulative(lens: &[usize]) -> Vec<i32> {
    let sums = lens.iter().scan(0, |sum, &len| {
        *sum += len as i32;
        Some(*sum)
    });
    std::iter::once(0).chain(sums).collect()
}

/// Queries, keys and values that take turns with others.
struct Inputs {
    q: Filled,
    k: Filled,
    v: Filled,
}

/// Index tensors, which all sets share.
struct Indices {
    cu_q: TensorRef,
    cu_k: TensorRef,
    table: TensorRef,
    kv_lens: TensorRef,
}

fn cube(
    device: &CubeDevice,
    batch: Batch,
    way: Option<AttentionChoice>,
    sets: usize,
) -> Result<Work<'_>, String> {
    let dtype = batch.dtype;
    let filled = |set| {
        Ok(Inputs {
            q: device.filled(&batch.q_shape(), dtype, 3 * set),
            k: batch.filled_keys(device, 3 * set + 1)?,
            v: batch.filled_keys(device, 3 * set + 2)?,
        })
    };
    let inputs: Vec<Inputs> = (0..sets).map(filled).collect::<Result<_, String>>()?;
    let scales = device.scales(batch.heads.kv_heads);
    let num_seqs = batch.case.q_lens.len();
    let kv_lens: Vec<i32> = batch.case.kv_lens.iter().map(|&len| len as i32).collect();
    let indices = Indices {
        cu_q: ints(device, &[num_seqs + 1], &batch.cu_q),
        cu_k: ints(device, &[num_seqs + 1], &batch.cu_k),
        table: ints(device, &[num_seqs, batch.max_blocks], &batch.table),
        kv_lens: ints(device, &[num_seqs], &kv_lens),
    };
    let out = device.poisoned(&batch.q_shape(), dtype);
    let lse = device.poisoned(&batch.q_shape()[..2], Dtype::F32);
    let (path, flops, bytes) = (
        path(device.launcher(), &batch, way),
        batch.flops(),
        batch.bytes(),
    );
    let bound = match batch.case.kind {
        "decode" => Bound::Bytes,
        _ => Bound::Operations,
    };
    let values = [&inputs[0].q, &inputs[0].k, &inputs[0].v].map(|filled| filled.values);
    let outputs = vec![out.clone(), lse.clone()];
    let (compared, result) = (batch.clone(), out.clone());
    let quantisation = move || {
        let read = |from, len| device.read(&result, dtype, from, len);
        compared.error(values.map(Values::unquantised), &read, None)
    };
    let quantisation = (batch.layout == Layout::PagedFp8)
        .then(|| Box::new(quantisation) as Box<dyn Fn() -> Result<f64, String>>);
    let layout = batch.layout;
    let options = AttentionOptions::causal(batch.heads.head_dim);
    let (to, to_lse) = (out.clone(), lse.clone());
    Ok(Work {
        quantisation,
        path,
        flops,
        bytes,
        bound,
        sets,
        launch: Box::new(move |set| {
            let Inputs { q, k, v } = &inputs[set];
            let keys = match layout {
                Layout::Paged | Layout::PagedFp8 => Keys::Paged {
                    k_cache: &k.tensor,
                    v_cache: &v.tensor,
                    scales: (layout == Layout::PagedFp8).then_some(KvScales {
                        k: &scales,
                        v: &scales,
                    }),
                    block_table: &indices.table,
                    seq_lens: &indices.kv_lens,
                },
                Layout::Packed => Keys::Packed {
                    k: &k.tensor,
                    v: &v.tensor,
                    cu_seqlens_k: &indices.cu_k,
                },
            };
            let launcher = device.launcher();
            let (q, cu_q) = (&q.tensor, &indices.cu_q);
            match way {
                None => attention(launcher, q, cu_q, keys, &to, &to_lse, &options),
                Some(way) => attention_with(launcher, way, q, cu_q, keys, &to, &to_lse, &options),
            }
            .map_err(|error| error.to_string())
        }),
        check: {
            let (batch, out) = (batch.clone(), out.clone());
            Box::new(move || {
                let read = |from, len| device.read(&out, dtype, from, len);
                let read_lse = |at| device.read(&lse, Dtype::F32, at, 1).map(|values| values[0]);
                batch.error(values, &read, Some(&read_lse))
            })
        },
        outputs,
    })
}

/// The kernel that `attention` chooses for contiguous tensors, or the one that it is told.
fn path(launcher: &Launcher, batch: &Batch, way: Option<AttentionChoice>) -> String {
    match way {
        None => {}
        Some(AttentionChoice::Kernel(kernel)) => return format!("{kernel:?}"),
        Some(AttentionChoice::Prefill(tile)) => {
            return format!("{:?} {tile:?}", AttentionKernel::HopperPrefill);
        }
        Some(AttentionChoice::Decode(tile)) => {
            return format!("{:?} {tile:?}", AttentionKernel::HopperDecode);
        }
    }
    let problem = AttentionProblem {
        num_tokens: batch.case.num_tokens(),
        num_seqs: batch.case.q_lens.len(),
        num_heads: batch.heads.q_heads,
        num_kv_heads: batch.heads.kv_heads,
        head_dim: batch.heads.head_dim,
        max_keys: batch.expected_keys(),
        expected_keys: batch.expected_keys(),
        block_size: None,
        dtype: batch.dtype.elem(),
        kv_dtype: batch.kv_dtype.elem(),
    };
    let facts = launcher.facts();
    let vector_size = facts.vector_size(batch.dtype.size(), batch.heads.head_dim);
    let options = AttentionOptions::causal(batch.heads.head_dim);
    let plan = AttentionPlan::new(facts, &problem, vector_size, &options);
    let parts = match plan.num_splits {
        1 => String::new(),
        parts => format!(" x{parts}"),
    };
    match plan.decode {
        Some(tile) => format!("{:?}{parts} {tile:?}", plan.kernel),
        None => format!("{:?}{parts}", plan.kernel),
    }
}

#[cfg(feature = "flex")]
mod flex {
    use std::sync::Mutex;

    use burn::tensor::{Device, Tensor};
    use burn_paged::{
        AttentionMetadataBuilder, AttentionOptions, CacheGeometry, CuSeqlens, LayerKv,
        SequenceStep, paged_attention, varlen_attention,
    };
    use burn_paged_benches::kernel::{Values, Work, flex};

    use super::{Batch, Bound, Layout};

    pub(super) fn work(device: &Device, batch: Batch) -> Result<Work<'_>, String> {
        let [q, k, v] = [0, 1, 2].map(Values::new);
        let attend = attend(device, &batch, [q, k, v])?;
        let (flops, bytes) = (batch.flops(), batch.bytes());
        let bound = match batch.case.kind {
            "decode" => Bound::Bytes,
            _ => Bound::Operations,
        };
        let out = std::sync::Arc::new(Mutex::new(None));
        let result = out.clone();
        Ok(Work {
            quantisation: None,
            path: "flex".into(),
            flops,
            bytes,
            bound,
            sets: 1,
            launch: Box::new(move |_| {
                let attended = attend();
                *out.lock().map_err(|error| error.to_string())? = Some(attended);
                Ok(())
            }),
            check: Box::new(move || {
                let out = result.lock().map_err(|error| error.to_string())?;
                let out = out.as_ref().ok_or("nothing was computed")?;
                batch.error(
                    [q, k, v],
                    &|from, len| Ok(flex::elements(out, from, len)),
                    None,
                )
            }),
            outputs: Vec::new(),
        })
    }

    type Attend<'a> = Box<dyn Fn() -> Tensor<3> + Send + Sync + 'a>;

    fn attend<'a>(
        device: &'a Device,
        batch: &Batch,
        [q, k, v]: [Values; 3],
    ) -> Result<Attend<'a>, String> {
        let dtype = batch.dtype;
        let q = flex::filled(device, batch.q_shape(), dtype, q);
        let [kv_heads, head_dim] = [batch.heads.kv_heads, batch.heads.head_dim];
        let options = AttentionOptions::causal();
        let text = |error: burn_paged::MetadataError| error.to_string();
        if batch.layout == Layout::Packed {
            let shape = [batch.case.num_keys(), kv_heads, head_dim];
            let [k, v] = [k, v].map(|values| flex::filled(device, shape, dtype, values));
            let lens = |lens: &[usize]| CuSeqlens::from_lens(lens.iter().copied(), device);
            let cu_q = lens(&batch.case.q_lens).map_err(text)?;
            let cu_k = lens(&batch.case.kv_lens).map_err(text)?;
            return Ok(Box::new(move || {
                varlen_attention(q.clone(), k.clone(), v.clone(), &cu_q, &cu_k, options)
            }));
        }
        let geometry = CacheGeometry {
            num_blocks: batch.num_blocks,
            block_size: batch.page,
            num_kv_heads: kv_heads,
            head_dim,
        };
        let [k, v] = [k, v].map(|values| flex::filled(device, geometry.shape(), dtype, values));
        let rows: Vec<Vec<u32>> = batch
            .table
            .chunks(batch.max_blocks)
            .map(|row| {
                row.iter()
                    .filter_map(|&block| block.try_into().ok())
                    .collect()
            })
            .collect();
        let mut builder = AttentionMetadataBuilder::new(geometry);
        for ((blocks, &q_len), &kv_len) in
            rows.iter().zip(&batch.case.q_lens).zip(&batch.case.kv_lens)
        {
            builder.push(SequenceStep {
                blocks,
                num_computed: kv_len - q_len,
                num_new: q_len,
            });
        }
        let metadata = builder.build(device).map_err(text)?;
        let cache = LayerKv::new(k, v);
        Ok(Box::new(move || {
            paged_attention(q.clone(), &cache, &metadata, options)
        }))
    }
}
