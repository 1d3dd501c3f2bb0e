//! Traffic of the paged cache: new keys and values into it, sequences out of it.
//!
//! Run with: cargo bench -p burn-paged-benches --no-default-features --features cuda-hopper --bench cache --
//! --device cuda [--kv fp8] [--json OUT.json]; see benches/README.md.

use burn_paged_benches::kernel::{
    Bound, CaseName, CubeDevice, Dtype, Filled, Heads, Session, Shapes, Target, Values, Work, ints,
    relative_error, shuffled,
};
use burn_paged_kernels::{KvScales, TensorRef, gather_kv, store_kv};

/// Sets of inputs, at most.
const MAX_SETS: usize = 64;
/// Up to so many tokens fall anywhere, as those of a decode do; more fill whole blocks, as those of a prompt do.
const SCATTERED_TOKENS: usize = 256;

fn main() -> Result<(), String> {
    Session::run("cache", |session, target, shapes| {
        for heads in &shapes.heads {
            for &tokens in &shapes.cache.store_tokens {
                run(session, target, shapes, heads, Kind::Store, tokens);
            }
        }
        for heads in &shapes.heads {
            for &tokens in &shapes.cache.gather_tokens {
                run(session, target, shapes, heads, Kind::Gather, tokens);
            }
        }
        Ok(())
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Store,
    Gather,
}

fn run(
    session: &mut Session,
    target: &Target,
    shapes: &Shapes,
    heads: &Heads,
    kind: Kind,
    tokens: usize,
) {
    let (kind_name, op) = match kind {
        Kind::Store => ("store", "store_kv"),
        Kind::Gather => ("gather", "gather_kv"),
    };
    let name = CaseName {
        kind: kind_name,
        head: heads.name.clone(),
        case: format!("T={tokens}"),
        op,
        layout: match session.args().kv_dtype() {
            Dtype::E4m3 => "paged fp8",
            _ => "paged",
        },
        tokens: Some(tokens),
    };
    let num_blocks = shapes.cache.pool_tokens / shapes.page_size;
    if tokens.div_ceil(shapes.page_size) > num_blocks {
        return session.leave_out(&name, "the cache is smaller");
    }
    session.case(target, name, |session| {
        let dtypes = [session.args().dtype, session.args().kv_dtype()];
        let traffic = Traffic::new(heads, tokens, shapes.page_size, num_blocks, dtypes);
        match target {
            Target::Cube(device) => {
                let sets = session.sets(target, traffic.bytes(), MAX_SETS);
                match kind {
                    Kind::Store => store(device, traffic, sets),
                    Kind::Gather => gather(device, traffic, sets),
                }
            }
            #[cfg(feature = "flex")]
            Target::Flex(_) if traffic.is_fp8() => Err("no cache of eight bits".into()),
            #[cfg(feature = "flex")]
            Target::Flex(device) => match kind {
                Kind::Store => flex::store(device, traffic),
                Kind::Gather => flex::gather(device, traffic),
            },
        }
    });
}

/// Tokens between a cache and packed rows.
struct Traffic {
    heads: Heads,
    tokens: usize,
    page: usize,
    num_blocks: usize,
    dtype: Dtype,
    kv_dtype: Dtype,
    /// All blocks, in an order that each set takes another part of.
    order: Vec<i32>,
}

impl Traffic {
    fn new(
        heads: &Heads,
        tokens: usize,
        page: usize,
        num_blocks: usize,
        [dtype, kv_dtype]: [Dtype; 2],
    ) -> Self {
        Self {
            heads: heads.clone(),
            tokens,
            page,
            num_blocks,
            dtype,
            kv_dtype,
            order: shuffled(num_blocks, 7),
        }
    }

    /// Elements of K, or of V, of one token.
    fn row(&self) -> usize {
        self.heads.kv_heads * self.heads.head_dim
    }

    fn cache_shape(&self) -> [usize; 4] {
        let Heads {
            kv_heads, head_dim, ..
        } = self.heads;
        [self.num_blocks, self.page, kv_heads, head_dim]
    }

    fn packed_shape(&self) -> [usize; 3] {
        [self.tokens, self.heads.kv_heads, self.heads.head_dim]
    }

    /// K and V, read and written; slots and tables left out.
    fn bytes(&self) -> f64 {
        let sizes = self.dtype.size() + self.kv_dtype.size();
        (2 * sizes * self.tokens * self.row()) as f64
    }

    fn is_fp8(&self) -> bool {
        self.kv_dtype == Dtype::E4m3
    }

    /// What a cache of eight bits holds of `values`, or what any other does.
    fn stored(&self, values: Values) -> Values {
        match self.is_fp8() {
            true => values.quantised(),
            false => values,
        }
    }

    /// Elements of the cache, from what it was read as.
    fn numbers(&self, mut read: Vec<f64>) -> Vec<f64> {
        if self.is_fp8() {
            for x in &mut read {
                *x *= Values::scale();
            }
        }
        read
    }

    /// The blocks of one sequence of all tokens.
    fn blocks(&self, set: usize) -> Vec<i32> {
        let count = self.tokens.div_ceil(self.page);
        let from = set * count % (self.num_blocks - count + 1);
        self.order[from..][..count].to_vec()
    }

    fn slots(&self, set: usize) -> Vec<i32> {
        let page = self.page as i32;
        if self.tokens <= SCATTERED_TOKENS.min(self.num_blocks) {
            // One slot of each of so many blocks.
            let from = set * self.tokens % (self.num_blocks - self.tokens + 1);
            let blocks = self.order[from..][..self.tokens].iter().zip(0i32..);
            return blocks.map(|(block, i)| block * page + i % page).collect();
        }
        let slots = self.blocks(set).into_iter();
        let slots = slots.flat_map(|block| block * page..(block + 1) * page);
        slots.take(self.tokens).collect()
    }

    /// The slot of every token of one sequence over `blocks`.
    fn slot_of(&self, blocks: &[i32], token: usize) -> usize {
        blocks[token / self.page] as usize * self.page + token % self.page
    }

    /// Tokens that are compared: the ends, and some between them.
    fn samples(&self) -> Vec<usize> {
        let mut samples: Vec<usize> = (0..16).map(|i| i * (self.tokens - 1) / 15).collect();
        samples.dedup();
        samples
    }

    /// The relative error of rows `to` against elements of `values` at rows `from`, over samples of `(from, to)`.
    fn error(
        &self,
        values: Values,
        rows: impl Iterator<Item = (usize, usize)>,
        read: &dyn Fn(usize, usize) -> Result<Vec<f64>, String>,
    ) -> Result<f64, String> {
        let row = self.row();
        let (mut found, mut expected) = (Vec::new(), Vec::new());
        for (from, to) in rows {
            expected.extend(values.range(from * row, row));
            found.extend(read(to * row, row)?);
        }
        Ok(relative_error(&found, &expected))
    }
}

/// The larger of two errors; NaN if one is.
fn worse(a: f64, b: f64) -> f64 {
    if a > b || a.is_nan() { a } else { b }
}

/// Keys and values, and where they go.
struct Stored {
    k: Filled,
    v: Filled,
    slots: TensorRef,
}

fn store(device: &CubeDevice, traffic: Traffic, sets: usize) -> Result<Work<'_>, String> {
    let dtype = traffic.dtype;
    let inputs: Vec<Stored> = (0..sets)
        .map(|set| Stored {
            k: device.filled(&traffic.packed_shape(), dtype, 2 * set),
            v: device.filled(&traffic.packed_shape(), dtype, 2 * set + 1),
            slots: ints(device, &[traffic.tokens], &traffic.slots(set)),
        })
        .collect();
    let caches = [0, 1].map(|_| device.poisoned(&traffic.cache_shape(), traffic.kv_dtype));
    let values = [inputs[0].k.values, inputs[0].v.values].map(|values| traffic.stored(values));
    let scales = traffic
        .is_fp8()
        .then(|| device.scales(traffic.heads.kv_heads));
    let slots = traffic.slots(0);
    let [k_cache, v_cache] = caches.clone();
    let bytes = traffic.bytes();
    Ok(Work {
        quantisation: None,
        path: "Portable".into(),
        flops: 0.0,
        bytes,
        bound: Bound::Bytes,
        sets,
        outputs: caches.to_vec(),
        launch: Box::new(move |set| {
            let Stored { k, v, slots } = &inputs[set];
            let launcher = device.launcher();
            let (k, v) = (&k.tensor, &v.tensor);
            let scales = scales.as_ref().map(|both| KvScales { k: both, v: both });
            store_kv(launcher, k, v, &k_cache, &v_cache, scales, slots)
                .map_err(|error| error.to_string())
        }),
        check: Box::new(move || {
            let mut error = 0.0;
            for (values, cache) in values.iter().zip(&caches) {
                let rows = traffic.samples().into_iter();
                let rows = rows.map(|token| (token, slots[token] as usize));
                let read = |from, len| {
                    let read = device.read(cache, traffic.kv_dtype, from, len)?;
                    Ok(traffic.numbers(read))
                };
                error = worse(traffic.error(*values, rows, &read)?, error);
            }
            Ok(error)
        }),
    })
}

fn gather(device: &CubeDevice, traffic: Traffic, sets: usize) -> Result<Work<'_>, String> {
    let dtype = traffic.dtype;
    let filled = |seed| device.filled_cache(traffic.cache_shape(), traffic.kv_dtype, seed);
    let caches = [filled(0)?, filled(1)?];
    let scales = traffic
        .is_fp8()
        .then(|| device.scales(traffic.heads.kv_heads));
    let outs = [0, 1].map(|_| device.poisoned(&traffic.packed_shape(), dtype));
    // Other blocks of a large cache each time: the sources take turns by themselves.
    let tables: Vec<TensorRef> = (0..sets)
        .map(|set| traffic.blocks(set))
        .map(|blocks| ints(device, &[1, blocks.len()], &blocks))
        .collect();
    let cu_seqlens_k = ints(device, &[2], &[0, traffic.tokens as i32]);
    let values = [caches[0].values, caches[1].values];
    let [k_cache, v_cache] = caches.map(|cache| cache.tensor);
    let [out_k, out_v] = outs.clone();
    let bytes = traffic.bytes();
    Ok(Work {
        quantisation: None,
        path: "Portable".into(),
        flops: 0.0,
        bytes,
        bound: Bound::Bytes,
        sets,
        outputs: outs.to_vec(),
        launch: Box::new(move |set| {
            let (launcher, table) = (device.launcher(), &tables[set]);
            let scales = scales.as_ref().map(|both| KvScales { k: both, v: both });
            gather_kv(
                launcher,
                &k_cache,
                &v_cache,
                scales,
                table,
                &cu_seqlens_k,
                &out_k,
                &out_v,
            )
            .map_err(|error| error.to_string())
        }),
        check: Box::new(move || {
            let blocks = traffic.blocks(0);
            let mut error = 0.0;
            for (values, out) in values.iter().zip(&outs) {
                let rows = traffic.samples().into_iter();
                let rows = rows.map(|token| (traffic.slot_of(&blocks, token), token));
                let read = |from, len| device.read(out, dtype, from, len);
                error = worse(traffic.error(*values, rows, &read)?, error);
            }
            Ok(error)
        }),
    })
}

#[cfg(feature = "flex")]
mod flex {
    use std::sync::{Arc, Mutex};

    use burn::tensor::{Device, Tensor};
    use burn_paged::{
        AttentionMetadataBuilder, CacheGeometry, LayerKv, SequenceStep, SlotMapping, gather_kv,
        store_kv,
    };
    use burn_paged_benches::kernel::{Values, Work, flex};

    use super::{Bound, Traffic, worse};

    fn geometry(traffic: &Traffic) -> CacheGeometry {
        CacheGeometry {
            num_blocks: traffic.num_blocks,
            block_size: traffic.page,
            num_kv_heads: traffic.heads.kv_heads,
            head_dim: traffic.heads.head_dim,
        }
    }

    fn cache(device: &Device, traffic: &Traffic, values: [Values; 2]) -> LayerKv {
        let shape = geometry(traffic).shape();
        let [k, v] = values.map(|values| flex::filled(device, shape, traffic.dtype, values));
        LayerKv::new(k, v)
    }

    pub(super) fn store(device: &Device, traffic: Traffic) -> Result<Work<'_>, String> {
        let values = [0, 1].map(Values::new);
        let shape = traffic.packed_shape();
        let [k, v] = values.map(|values| flex::filled(device, shape, traffic.dtype, values));
        let host_slots = traffic.slots(0);
        let slots = SlotMapping::new(host_slots.clone(), device).map_err(|e| e.to_string())?;
        let other = [2, 3].map(Values::new);
        let cache = Arc::new(Mutex::new(cache(device, &traffic, other)));
        let written = cache.clone();
        let bytes = traffic.bytes();
        Ok(Work {
            quantisation: None,
            path: "flex".into(),
            flops: 0.0,
            bytes,
            bound: Bound::Bytes,
            sets: 1,
            outputs: Vec::new(),
            launch: Box::new(move |_| {
                let mut cache = cache.lock().map_err(|error| error.to_string())?;
                store_kv(&mut cache, k.clone(), v.clone(), &slots);
                Ok(())
            }),
            check: Box::new(move || {
                let cache = written.lock().map_err(|error| error.to_string())?;
                let mut error = 0.0;
                for (values, cache) in values.iter().zip([cache.k(), cache.v()]) {
                    let rows = traffic.samples().into_iter();
                    let rows = rows.map(|token| (token, host_slots[token] as usize));
                    let read = |from, len| Ok(flex::elements(cache, from, len));
                    error = worse(traffic.error(*values, rows, &read)?, error);
                }
                Ok(error)
            }),
        })
    }

    pub(super) fn gather(device: &Device, traffic: Traffic) -> Result<Work<'_>, String> {
        let values = [0, 1].map(Values::new);
        let cache = cache(device, &traffic, values);
        let blocks = traffic.blocks(0);
        let row: Vec<u32> = blocks.iter().map(|&block| block as u32).collect();
        let mut builder = AttentionMetadataBuilder::new(geometry(&traffic));
        builder.push(SequenceStep {
            blocks: &row,
            num_computed: traffic.tokens - 1,
            num_new: 1,
        });
        let metadata = builder.build(device).map_err(|error| error.to_string())?;
        let gathered: Arc<Mutex<Option<[Tensor<3>; 2]>>> = Arc::default();
        let result = gathered.clone();
        let bytes = traffic.bytes();
        Ok(Work {
            quantisation: None,
            path: "flex".into(),
            flops: 0.0,
            bytes,
            bound: Bound::Bytes,
            sets: 1,
            outputs: Vec::new(),
            launch: Box::new(move |_| {
                let out = <[_; 2]>::from(gather_kv(&cache, &metadata));
                *gathered.lock().map_err(|error| error.to_string())? = Some(out);
                Ok(())
            }),
            check: Box::new(move || {
                let out = result.lock().map_err(|error| error.to_string())?;
                let out = out.as_ref().ok_or("nothing was computed")?;
                let mut error = 0.0;
                for (values, out) in values.iter().zip(out) {
                    let rows = traffic.samples().into_iter();
                    let rows = rows.map(|token| (traffic.slot_of(&blocks, token), token));
                    let read = |from, len| Ok(flex::elements(out, from, len));
                    error = worse(traffic.error(*values, rows, &read)?, error);
                }
                Ok(error)
            }),
        })
    }
}
