//! The calls whose kernels are checked, and what is promised of each.
//!
//! To add one: a line in the list of its op, with sizes that select the form of interest. Tensors
//! are free on a device without memory, so sizes may be as large as a form needs.

use burn_paged_kernels::{
    AttentionChoice, AttentionKernel, AttentionOptions, Epilogue, HopperTile, KernelError, Keys,
    KvScales, Launcher, NextBlocks, PartialAttention, RotaryTable, TensorRef, add_rms_norm,
    attention, attention_with, embedding, gather_kv, greedy, linear, merge_attention, next_tokens,
    rms_norm, rotary, rotary_and_store, sample, silu_and_mul, store_kv,
};
use cubecl::ir::{ElemType, FloatKind, IntKind, UIntKind};

use crate::promise::Promise;

type Run = dyn Fn(&Tensors<'_>) -> Result<(), KernelError> + Sync;

/// One call of a public op.
pub(crate) struct Call {
    /// Op, form and dtype.
    pub(crate) name: String,
    pub(crate) promise: Promise,
    run: Box<Run>,
}

impl Call {
    /// Calls the op as a user would.
    pub(crate) fn run(&self, launcher: &Launcher) -> Result<(), KernelError> {
        (self.run)(&Tensors { launcher })
    }
}

/// Tensors that nobody reads.
struct Tensors<'a> {
    launcher: &'a Launcher,
}

impl Tensors<'_> {
    fn tensor(&self, dtype: ElemType, shape: &[usize]) -> TensorRef {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        TensorRef::contiguous(self.launcher.client().empty(bytes), shape.to_vec(), dtype)
    }

    fn ints(&self, shape: &[usize]) -> TensorRef {
        self.tensor(ElemType::Int(IntKind::I32), shape)
    }
}

/// Every call, in every dtype.
pub(crate) fn all() -> Vec<Call> {
    let kinds = [
        ("f32", FloatKind::F32),
        ("f16", FloatKind::F16),
        ("bf16", FloatKind::BF16),
    ];
    let calls = kinds.map(|(name, kind)| {
        let mut calls = Calls {
            suffix: name,
            dtype: ElemType::Float(kind),
            choice: None,
            max_blocks: MAX_BLOCKS,
            fp8: false,
            calls: Vec::new(),
        };
        calls.norm();
        calls.rotary();
        calls.rows();
        calls.linear();
        calls.cache();
        calls.attention();
        calls.fp8 = true;
        calls.choice = None;
        calls.cache_of_eight_bits();
        calls.attention_over_eight_bits();
        calls.calls
    });
    calls.into_iter().flatten().collect()
}

/// The calls of one dtype.
struct Calls {
    suffix: &'static str,
    dtype: ElemType,
    /// What computes the next calls of attention; `None` for what is planned.
    choice: Option<AttentionChoice>,
    /// Blocks of a sequence.
    max_blocks: usize,
    /// Whether the next calls of attention read a cache of eight bits.
    fp8: bool,
    calls: Vec<Call>,
}

impl Calls {
    fn add(
        &mut self,
        name: &str,
        promise: Promise,
        run: impl Fn(&Tensors<'_>) -> Result<(), KernelError> + Sync + 'static,
    ) {
        self.calls.push(Call {
            name: format!("{name} {}", self.suffix),
            promise,
            run: Box::new(run),
        });
    }

    fn norm(&mut self) {
        let dtype = self.dtype;
        // One plane a row, several, as many as share a row, and a row that has no vectors.
        for columns in [64, 576, 4096, 33] {
            self.add(
                &format!("rms_norm {columns}"),
                Promise::new(&["rms_norm_kernel"], 48),
                move |t| {
                    let rows = || t.tensor(dtype, &[7, columns]);
                    rms_norm(
                        t.launcher,
                        &rows(),
                        &t.tensor(dtype, &[columns]),
                        1e-5,
                        &rows(),
                    )
                },
            );
            self.add(
                &format!("add_rms_norm {columns}"),
                Promise::new(&["add_rms_norm_kernel"], 48),
                move |t| {
                    let rows = || t.tensor(dtype, &[7, columns]);
                    let weight = t.tensor(dtype, &[columns]);
                    add_rms_norm(
                        t.launcher,
                        &rows(),
                        &rows(),
                        &weight,
                        1e-5,
                        &rows(),
                        &rows(),
                    )
                },
            );
        }
    }

    fn rotary(&mut self) {
        let dtype = self.dtype;
        // Whole heads, a part of each, and heads without vectors.
        for (head_dim, rotary_dim) in [(128, 128), (80, 32), (33, 22)] {
            self.add(
                &format!("rotary {rotary_dim} of {head_dim}"),
                Promise::new(&["rotary_kernel"], 32).with_local_memory(
                    8,
                    32,
                    "ptxas keeps eight cubes on a multiprocessor rather than two more registers",
                ),
                move |t| {
                    let heads = |heads| t.tensor(dtype, &[7, heads, head_dim]);
                    rotary(
                        t.launcher,
                        &heads(8),
                        &heads(2),
                        RotaryTable {
                            positions: &t.ints(&[7]),
                            table: &t.tensor(F32, &[512, rotary_dim]),
                        },
                        &heads(8),
                        &heads(2),
                    )
                },
            );
            self.add(
                &format!("rotary_and_store {rotary_dim} of {head_dim}"),
                Promise::new(&["rotary_and_store_kernel"], 40),
                move |t| {
                    let heads = |heads| t.tensor(dtype, &[7, heads, head_dim]);
                    let cache = || t.tensor(dtype, &[64, 16, 2, head_dim]);
                    rotary_and_store(
                        t.launcher,
                        &heads(8),
                        &heads(2),
                        &heads(2),
                        RotaryTable {
                            positions: &t.ints(&[7]),
                            table: &t.tensor(F32, &[512, rotary_dim]),
                        },
                        &t.ints(&[7]),
                        &heads(8),
                        &cache(),
                        &cache(),
                        None,
                    )
                },
            );
        }
    }

    fn linear(&mut self) {
        for (tokens, out, inner) in [(7, 96, 33), (7, 96, 576)] {
            self.product([tokens, out, inner], false, Epilogue::None, false);
        }
        if !self.on_matrix_units() {
            return;
        }
        // Every number of tokens that is compiled for, alone and in clusters.
        for tokens in [1, 16, 32, 64, 96, 128, 192, 256] {
            self.product([tokens, 4096, 4096], false, Epilogue::None, false);
        }
        // Tokens that cubes share, alone and beside parts, and several tiles of tokens.
        for [tokens, out, inner] in [
            [128, 6144, 4096],
            [64, 2048, 2048],
            [384, 6144, 4096],
            [512, 2048, 2048],
            [512, 576, 576],
        ] {
            self.product([tokens, out, inner], false, Epilogue::None, false);
        }
        for epilogue in [Epilogue::None, Epilogue::SiluAndMul] {
            for (tokens, many) in [(8, false), (192, false), (256, true)] {
                self.product([tokens, 28_672, 4096], true, epilogue, many);
            }
            // Wide tiles, and narrow ones.
            for tokens in [8192, 300] {
                self.product([tokens, 4096, 4096], false, epilogue, true);
                self.product([tokens, 4096, 4096], true, epilogue, true);
            }
            // Without clusters.
            self.product([4096, 3072, 576], false, epilogue, true);
        }
    }

    /// Whether kernels for Hopper are compiled in, and take this dtype.
    fn on_matrix_units(&self) -> bool {
        cfg!(feature = "hopper") && self.dtype.size() == 2
    }

    /// A product of `[tokens, inner]` with `[out, inner]`, for the kernel for many tokens or the one for few.
    fn product(
        &mut self,
        [tokens, out, inner]: [usize; 3],
        bias: bool,
        epilogue: Epilogue,
        many: bool,
    ) {
        let dtype = self.dtype;
        let promise = match self.on_matrix_units() && inner.is_multiple_of(8) {
            false => Promise::new(&["linear_kernel"], 80),
            true if many => Promise::new(&["large_linear_kernel"], 168).on_tensor_cores(),
            true => Promise::new(&["skinny_linear_kernel"], 224).on_tensor_cores(),
        };
        let name = match (bias, epilogue) {
            (false, Epilogue::None) => "linear".to_owned(),
            (true, Epilogue::None) => "linear, bias".to_owned(),
            (false, epilogue) => format!("linear, {epilogue:?}"),
            (true, epilogue) => format!("linear, bias, {epilogue:?}"),
        };
        self.add(
            &format!("{name} {tokens}x{inner}x{out}"),
            promise,
            move |t| {
                let (x, weight) = (
                    t.tensor(dtype, &[tokens, inner]),
                    t.tensor(dtype, &[out, inner]),
                );
                let columns = match epilogue {
                    Epilogue::None => out,
                    Epilogue::SiluAndMul => out / 2,
                };
                let bias = bias.then(|| t.tensor(dtype, &[out]));
                let y = t.tensor(dtype, &[tokens, columns]);
                linear(t.launcher, &x, &weight, bias.as_ref(), epilogue, &y)
            },
        );
    }

    fn rows(&mut self) {
        let dtype = self.dtype;
        for width in [576, 33] {
            self.add(
                &format!("silu_and_mul {width}"),
                Promise::new(&["silu_and_mul_kernel"], 40),
                move |t| {
                    let x = t.tensor(dtype, &[7, 2 * width]);
                    silu_and_mul(t.launcher, &x, &t.tensor(dtype, &[7, width]))
                },
            );
            self.add(
                &format!("embedding {width}"),
                Promise::new(&["embedding_kernel"], 24),
                move |t| {
                    let (ids, table) = (t.ints(&[7]), t.tensor(dtype, &[500, width]));
                    embedding(t.launcher, &table, &ids, &t.tensor(dtype, &[7, width]))
                },
            );
        }
        for vocab_size in [49_152, 1001] {
            self.add(
                &format!("greedy {vocab_size}"),
                Promise::new(&["greedy_kernel"], 32),
                move |t| {
                    greedy(
                        t.launcher,
                        &t.tensor(dtype, &[7, vocab_size]),
                        &t.ints(&[7]),
                    )
                },
            );
        }
        self.add(
            "next_tokens",
            Promise::new(&["next_tokens_kernel"], 16),
            |t| next_tokens(t.launcher, &t.ints(&[7]), &t.ints(&[7]), None),
        );
        self.add(
            "next_tokens and blocks",
            Promise::new(&["next_tokens_and_blocks_kernel"], 32),
            |t| {
                let blocks = NextBlocks {
                    positions: &t.ints(&[7]),
                    slots: &t.ints(&[7]),
                    table: &t.ints(&[7, 9]),
                    block_size: 16,
                };
                next_tokens(t.launcher, &t.ints(&[7]), &t.ints(&[7]), Some(blocks))
            },
        );
        for vocab_size in [128_256, 33] {
            self.add(
                &format!("sample {vocab_size}"),
                Promise::new(&["sample_kernel"], 64),
                move |t| {
                    let logits = t.tensor(dtype, &[7, vocab_size]);
                    sample(t.launcher, &logits, &t.ints(&[7, 8]), &t.ints(&[7]))
                },
            );
        }
        for head_dim in [128, 33] {
            self.add(
                &format!("merge_attention {head_dim}"),
                Promise::new(&["merge_attention_kernel"], 48),
                move |t| {
                    let outs = [(); 3].map(|()| t.tensor(dtype, &[7, 4, head_dim]));
                    let sums = [(); 3].map(|()| t.tensor(F32, &[7, 4]));
                    let part = |i: usize| PartialAttention {
                        out: &outs[i],
                        lse: &sums[i],
                    };
                    merge_attention(t.launcher, part(0), part(1), part(2))
                },
            );
        }
    }

    fn cache(&mut self) {
        let dtype = self.dtype;
        // Heads with vectors and without, and a cache whose indices need 64 bits.
        for (blocks, head_dim) in [(64, 128), (64, 33), (WIDE_BLOCKS, 33)] {
            let wide = if blocks == WIDE_BLOCKS { " wide" } else { "" };
            self.add(
                &format!("store_kv {head_dim}{wide}"),
                Promise::new(&["store_kv_kernel"], 32),
                move |t| {
                    let new = || t.tensor(dtype, &[7, 2, head_dim]);
                    let cache = || t.tensor(dtype, &[blocks, 16, 2, head_dim]);
                    store_kv(
                        t.launcher,
                        &new(),
                        &new(),
                        &cache(),
                        &cache(),
                        None,
                        &t.ints(&[7]),
                    )
                },
            );
            self.add(
                &format!("gather_kv {head_dim}{wide}"),
                Promise::new(&["gather_kv_kernel"], 32),
                move |t| {
                    let out = || t.tensor(dtype, &[70, 2, head_dim]);
                    let cache = || t.tensor(dtype, &[blocks, 16, 2, head_dim]);
                    let (table, starts) = (t.ints(&[3, 9]), t.ints(&[4]));
                    gather_kv(
                        t.launcher,
                        &cache(),
                        &cache(),
                        None,
                        &table,
                        &starts,
                        &out(),
                        &out(),
                    )
                },
            );
        }
    }

    fn attention(&mut self) {
        let causal = AttentionOptions::causal(128);
        let all = AttentionOptions {
            causal: false,
            ..causal
        };
        let every = AttentionOptions {
            window: Some(256),
            softcap: Some(30.0),
            ..causal
        };
        let llama = Heads::new(32, 8, 128);
        if self.dtype == F32 {
            let spilling = portable(255).with_local_memory(768, 3072, UNIT_HOLDS_A_ROW);
            self.packed("packed", llama, all, spilling);
            self.packed("packed causal", llama, causal, spilling);
            self.paged("prefill", 512, llama, causal, spilling);
            self.paged("window, softcap", 512, llama, every, spilling);
            self.paged("prefill", 512, Heads::new(9, 3, 64), causal, portable(255));
            let spilling = portable(255).with_local_memory(128, 512, UNIT_HOLDS_A_ROW);
            self.paged("prefill", 512, Heads::new(4, 1, 80), causal, spilling);
        } else {
            if cfg!(feature = "hopper") {
                for head_dim in [64, 72, 96, 128, 256] {
                    let heads = Heads::new(32, 8, head_dim);
                    let promise = hopper_prefill(head_dim);
                    self.packed("packed causal", heads, causal, HOPPER_PREFILL);
                    self.paged("prefill", 512, heads, causal, promise);
                }
                for head_dim in [64, 128, 256] {
                    let heads = Heads::new(32, 8, head_dim);
                    for (nth, tile) in HopperTile::all(head_dim, 2).into_iter().enumerate() {
                        self.choice = Some(AttentionChoice::Prefill(tile));
                        let mut promise = hopper_prefill(head_dim);
                        if tile.draws() {
                            promise.kernels = &["hopper_prefill_start_kernel", HOPPER_KERNEL];
                        }
                        let form = format!("packed tile {nth}");
                        let mut packed = HOPPER_PREFILL;
                        packed.kernels = promise.kernels;
                        self.packed(&form, heads, causal, packed);
                        let form = format!("prefill tile {nth}");
                        self.paged(&form, 512, heads, causal, promise);
                    }
                }
                self.choice = None;
                for heads in [Heads::new(9, 3, 64), Heads::new(8, 2, 128)] {
                    let mut promise = hopper_prefill(heads.head_dim);
                    promise.kernels = &[HOPPER_KERNEL, "merge_kernel"];
                    self.paged("prefill in parts", 512, heads, causal, promise);
                }
                for heads in [Heads::new(9, 3, 64), Heads::new(8, 2, 128)] {
                    for tile in HopperTile::all(heads.head_dim, 2) {
                        if !tile.draws() {
                            continue;
                        }
                        self.choice = Some(AttentionChoice::Prefill(tile));
                        let mut promise = hopper_prefill(heads.head_dim);
                        promise.kernels =
                            &["hopper_prefill_start_kernel", HOPPER_KERNEL, "merge_kernel"];
                        self.paged("prefill in drawn parts", 512, heads, causal, promise);
                    }
                }
                self.choice = None;
                self.packed("packed window, softcap", llama, every, HOPPER_PREFILL);
                self.paged("prefill window, softcap", 512, llama, every, HOPPER_PREFILL);
                self.choice = Some(AttentionChoice::Kernel(AttentionKernel::HopperDecode));
                // In clusters, and each cube on its own.
                for num_tokens in [4, 512] {
                    let form = format!("decode {num_tokens}");
                    for heads in [llama, Heads::new(9, 3, 64), Heads::new(16, 1, 80)] {
                        self.paged(&form, num_tokens, heads, causal, HOPPER_DECODE);
                    }
                }
                self.packed("packed decode", llama, causal, HOPPER_DECODE);
                let heads = Heads::new(16, 1, 128);
                self.paged("decode window, softcap", 4, heads, every, HOPPER_DECODE);
                self.max_blocks = 1000;
                for heads in [Heads::new(9, 3, 64), heads] {
                    self.paged("decode in parts", 1, heads, causal, SPLIT_HOPPER_DECODE);
                }
                self.max_blocks = MAX_BLOCKS;
            }
            self.choice = Some(AttentionChoice::Kernel(AttentionKernel::MmaPrefill));
            self.packed("packed", llama, all, PREFILL);
            self.packed("packed causal", llama, causal, PREFILL);
            self.packed("packed window, softcap", llama, every, PREFILL);
            self.paged("prefill", 512, llama, causal, PREFILL);
            self.paged("prefill", 512, Heads::new(9, 3, 64), causal, SPLIT_PREFILL);
            self.paged("prefill", 512, Heads::new(4, 1, 80), causal, SPLIT_PREFILL);
            self.paged("prefill", 512, Heads::new(4, 1, 72), causal, SPLIT_PREFILL);
            self.paged("prefill window, softcap", 512, llama, every, PREFILL);
            self.choice = Some(AttentionChoice::Kernel(AttentionKernel::MmaDecode));
            self.paged("decode", 4, llama, causal, DECODE);
            self.paged("decode", 4, Heads::new(9, 3, 64), causal, DECODE);
            self.paged("decode", 4, Heads::new(4, 1, 80), causal, DECODE);
            self.paged("decode window, softcap", 4, llama, every, DECODE);
        }
        self.choice = Some(AttentionChoice::Kernel(AttentionKernel::Portable));
        let spilling = portable(255).with_local_memory(4096, 24_576, UNIT_HOLDS_A_ROW);
        self.paged("prefill", 512, Heads::new(8, 4, 256), causal, spilling);
        self.paged("prefill", 512, Heads::new(4, 1, 33), causal, portable(128));
    }

    fn cache_of_eight_bits(&mut self) {
        let dtype = self.dtype;
        // In vectors, in words, and a cache whose indices need 64 bits.
        for (blocks, head_dim) in [(64, 128), (64, 36), (WIDE_BLOCKS, 36)] {
            let wide = if blocks == WIDE_BLOCKS { " wide" } else { "" };
            let cache = move |t: &Tensors<'_>| t.tensor(U8, &[blocks, 16, 2, head_dim]);
            let scales = |t: &Tensors<'_>| [(); 2].map(|()| t.tensor(F32, &[2]));
            self.add(
                &format!("store_kv fp8 {head_dim}{wide}"),
                Promise::new(&["store_kv_fp8_kernel"], 40),
                move |t| {
                    let new = || t.tensor(dtype, &[7, 2, head_dim]);
                    let [k, v] = &scales(t);
                    let scales = Some(KvScales { k, v });
                    let slots = t.ints(&[7]);
                    store_kv(
                        t.launcher,
                        &new(),
                        &new(),
                        &cache(t),
                        &cache(t),
                        scales,
                        &slots,
                    )
                },
            );
            self.add(
                &format!("gather_kv fp8 {head_dim}{wide}"),
                Promise::new(&["gather_kv_fp8_kernel"], 40),
                move |t| {
                    let out = || t.tensor(dtype, &[70, 2, head_dim]);
                    let [k, v] = &scales(t);
                    gather_kv(
                        t.launcher,
                        &cache(t),
                        &cache(t),
                        Some(KvScales { k, v }),
                        &t.ints(&[3, 9]),
                        &t.ints(&[4]),
                        &out(),
                        &out(),
                    )
                },
            );
        }
        for (head_dim, rotary_dim) in [(128, 128), (80, 32), (36, 24)] {
            self.add(
                &format!("rotary_and_store fp8 {rotary_dim} of {head_dim}"),
                Promise::new(&["rotary_and_store_fp8_kernel"], 64),
                move |t| {
                    let heads = |heads| t.tensor(dtype, &[7, heads, head_dim]);
                    let cache = || t.tensor(U8, &[64, 16, 2, head_dim]);
                    let [k, v] = [(); 2].map(|()| t.tensor(F32, &[2]));
                    rotary_and_store(
                        t.launcher,
                        &heads(8),
                        &heads(2),
                        &heads(2),
                        RotaryTable {
                            positions: &t.ints(&[7]),
                            table: &t.tensor(F32, &[512, rotary_dim]),
                        },
                        &t.ints(&[7]),
                        &heads(8),
                        &cache(),
                        &cache(),
                        Some(KvScales { k: &k, v: &v }),
                    )
                },
            );
        }
    }

    fn attention_over_eight_bits(&mut self) {
        let causal = AttentionOptions::causal(128);
        let every = AttentionOptions {
            window: Some(256),
            softcap: Some(30.0),
            ..causal
        };
        let llama = Heads::new(32, 8, 128);
        if self.dtype != F32 {
            if cfg!(feature = "hopper") {
                for head_dim in [64, 96, 128] {
                    let heads = Heads::new(32, 8, head_dim);
                    let plain = hopper_prefill(head_dim);
                    self.choice = None;
                    self.paged("prefill", 512, heads, causal, plain);
                    if head_dim > 64 {
                        self.paged("prefill window, softcap", 512, heads, every, plain);
                    }
                    for (nth, tile) in HopperTile::all(head_dim, 1).into_iter().enumerate() {
                        self.choice = Some(AttentionChoice::Prefill(tile));
                        let mut promise = plain;
                        if tile.draws() {
                            promise.kernels = &["hopper_prefill_start_kernel", HOPPER_KERNEL];
                        }
                        self.paged(&format!("prefill tile {nth}"), 512, heads, causal, promise);
                    }
                    // A few heads, whose keys are cut into parts.
                    let heads = Heads::new(4, 1, head_dim);
                    for tile in HopperTile::all(head_dim, 1) {
                        self.choice = Some(AttentionChoice::Prefill(tile));
                        let mut promise = match tile.draws() && head_dim <= 64 {
                            true => plain.with_local_memory(32, 88, NUMBERS_OF_ROWS),
                            false => plain,
                        };
                        promise.kernels = match tile.draws() {
                            true => &["hopper_prefill_start_kernel", HOPPER_KERNEL, "merge_kernel"],
                            false => &[HOPPER_KERNEL, "merge_kernel"],
                        };
                        let form = if tile.draws() { "drawn parts" } else { "parts" };
                        self.paged(&format!("prefill in {form}"), 512, heads, causal, promise);
                    }
                }
                // In clusters, and each cube on its own.
                for num_tokens in [4, 512] {
                    let form = format!("decode {num_tokens}");
                    self.choice = Some(AttentionChoice::Kernel(AttentionKernel::HopperDecode));
                    for heads in [llama, Heads::new(9, 3, 64)] {
                        self.paged(&form, num_tokens, heads, causal, HOPPER_DECODE);
                    }
                    let spilling = HOPPER_DECODE.with_local_memory(
                        8,
                        12,
                        "ptxas keeps four cubes on a multiprocessor rather than two more registers",
                    );
                    let heads = Heads::new(16, 1, 80);
                    self.paged(&form, num_tokens, heads, causal, spilling);
                }
                let heads = Heads::new(16, 1, 128);
                self.paged("decode window, softcap", 4, heads, every, HOPPER_DECODE);
                self.max_blocks = 1000;
                self.paged("decode in parts", 1, heads, causal, SPLIT_HOPPER_DECODE);
                self.max_blocks = MAX_BLOCKS;
            }
            self.choice = Some(AttentionChoice::Kernel(AttentionKernel::MmaPrefill));
            self.paged("prefill", 512, llama, causal, PREFILL);
            self.paged("prefill", 512, Heads::new(9, 3, 64), causal, SPLIT_PREFILL);
            self.paged("prefill", 512, Heads::new(4, 1, 80), causal, SPLIT_PREFILL);
            self.paged("prefill window, softcap", 512, llama, every, PREFILL);
            self.choice = Some(AttentionChoice::Kernel(AttentionKernel::MmaDecode));
            self.paged("decode", 4, llama, causal, DECODE);
            self.paged("decode", 4, Heads::new(9, 3, 64), causal, DECODE);
            self.paged("decode", 4, Heads::new(4, 1, 80), causal, DECODE);
            self.paged("decode window, softcap", 4, llama, every, DECODE);
        }
        self.choice = Some(AttentionChoice::Kernel(AttentionKernel::Portable));
        self.paged("prefill", 512, Heads::new(9, 3, 64), causal, portable(255));
        self.paged("prefill", 512, Heads::new(4, 1, 36), causal, portable(255));
    }

    fn packed(&mut self, form: &str, heads: Heads, options: AttentionOptions, promise: Promise) {
        let (dtype, choice) = (self.dtype, self.choice);
        self.add(&heads.name(form, choice), promise, move |t| {
            let q = || t.tensor(dtype, &[512, heads.num_heads, heads.head_dim]);
            let k = || t.tensor(dtype, &[700, heads.num_kv_heads, heads.head_dim]);
            let keys = Keys::Packed {
                k: &k(),
                v: &k(),
                cu_seqlens_k: &t.ints(&[NUM_SEQS + 1]),
            };
            let lse = t.tensor(F32, &[512, heads.num_heads]);
            let starts = t.ints(&[NUM_SEQS + 1]);
            attend(
                t.launcher,
                choice,
                &q(),
                &starts,
                keys,
                &q(),
                &lse,
                &options,
            )
        });
    }

    /// `num_tokens` query rows of [`NUM_SEQS`] sequences over a cache.
    fn paged(
        &mut self,
        form: &str,
        num_tokens: usize,
        heads: Heads,
        options: AttentionOptions,
        promise: Promise,
    ) {
        let (dtype, choice, fp8) = (self.dtype, self.choice, self.fp8);
        let max_blocks = self.max_blocks;
        let form = format!("{form}{}", if fp8 { " fp8" } else { "" });
        self.add(&heads.name(&form, choice), promise, move |t| {
            let q = || t.tensor(dtype, &[num_tokens, heads.num_heads, heads.head_dim]);
            let kv_dtype = if fp8 { U8 } else { dtype };
            let cache = || t.tensor(kv_dtype, &[1000, 16, heads.num_kv_heads, heads.head_dim]);
            let scales = [(); 2].map(|()| t.tensor(F32, &[heads.num_kv_heads]));
            let keys = Keys::Paged {
                k_cache: &cache(),
                v_cache: &cache(),
                scales: fp8.then_some(KvScales {
                    k: &scales[0],
                    v: &scales[1],
                }),
                block_table: &t.ints(&[NUM_SEQS, max_blocks]),
                seq_lens: &t.ints(&[NUM_SEQS]),
            };
            let lse = t.tensor(F32, &[num_tokens, heads.num_heads]);
            let starts = t.ints(&[NUM_SEQS + 1]);
            attend(
                t.launcher,
                choice,
                &q(),
                &starts,
                keys,
                &q(),
                &lse,
                &options,
            )
        });
    }
}

const F32: ElemType = ElemType::Float(FloatKind::F32);
const U8: ElemType = ElemType::UInt(UIntKind::U8);

/// Sequences of a call of attention.
const NUM_SEQS: usize = 4;

/// Blocks of a sequence, if nothing else is said.
const MAX_BLOCKS: usize = 200;

/// Blocks of 16 slots of two heads of 33 elements, more than 32 bits count.
const WIDE_BLOCKS: usize = 1 << 24;

const fn portable(max_registers: u32) -> Promise {
    Promise::new(&["attention_kernel", "merge_kernel"], max_registers)
}

/// Tiles of many rows, on Hopper. A unit starts with 168 registers; those that multiply take 240.
const HOPPER_PREFILL: Promise =
    Promise::new(&[HOPPER_KERNEL], 168).with_tensor_cores_in(HOPPER_KERNEL);
const HOPPER_KERNEL: &str = "hopper_prefill_kernel";

/// Why some forms for three warpgroups spill: what the loop over keys reads stays in registers.
const NUMBERS_OF_ROWS: &str = "numbers of the tile of rows, none of which the loop over keys reads";

/// The same over pages, for heads of `head_dim` elements.
fn hopper_prefill(head_dim: usize) -> Promise {
    match head_dim {
        ..=64 => HOPPER_PREFILL.with_local_memory(8, 40, NUMBERS_OF_ROWS),
        _ => HOPPER_PREFILL,
    }
}

/// One token and key head at a time, on Hopper: registers for two cubes of four warps are no concern.
const HOPPER_DECODE: Promise = Promise::new(&["hopper_decode_kernel"], 255).on_tensor_cores();

/// The same, where several clusters share the keys of a token.
const SPLIT_HOPPER_DECODE: Promise =
    Promise::new(&["hopper_decode_kernel", "merge_kernel"], 255).on_tensor_cores();

/// Tiles of many rows.
const PREFILL: Promise = Promise::new(&["mma_prefill_kernel"], 255).on_tensor_cores();

/// The same, where so few tiles would leave multiprocessors without work.
const SPLIT_PREFILL: Promise =
    Promise::new(&["mma_prefill_kernel", "merge_kernel"], 255).on_tensor_cores();

/// Tiles of few rows, whose keys are split so that the few sequences of these calls fill the device.
const DECODE: Promise = Promise::new(&["mma_decode_kernel", "merge_kernel"], 255).on_tensor_cores();

/// Why the portable attention kernel spills from 80 elements of a head on.
const UNIT_HOLDS_A_ROW: &str = "a unit holds a row of queries and of outputs in f32";

/// The heads of a call of attention.
#[derive(Clone, Copy)]
struct Heads {
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
}

impl Heads {
    fn new(num_heads: usize, num_kv_heads: usize, head_dim: usize) -> Self {
        Self {
            num_heads,
            num_kv_heads,
            head_dim,
        }
    }

    fn name(&self, form: &str, choice: Option<AttentionChoice>) -> String {
        let Self {
            num_heads,
            num_kv_heads,
            head_dim,
        } = self;
        let kernel = match choice {
            Some(AttentionChoice::Kernel(kernel)) => format!("{kernel:?}"),
            _ => "planned".to_owned(),
        };
        format!("attention {form}, {kernel}, {num_heads}/{num_kv_heads} x {head_dim}")
    }
}

/// One of the two forms of attention.
#[allow(clippy::too_many_arguments, reason = "those of `attention_with`")]
fn attend(
    launcher: &Launcher,
    choice: Option<AttentionChoice>,
    q: &TensorRef,
    starts: &TensorRef,
    keys: Keys<'_>,
    out: &TensorRef,
    lse: &TensorRef,
    options: &AttentionOptions,
) -> Result<(), KernelError> {
    match choice {
        None => attention(launcher, q, starts, keys, out, lse, options),
        Some(choice) => attention_with(launcher, choice, q, starts, keys, out, lse, options),
    }
}
