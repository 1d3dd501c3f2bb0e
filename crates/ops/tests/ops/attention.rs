//! Packed and paged attention × every case × every device and dtype, against loops in f64.

use burn::tensor::{DType, Device, Tensor};
use burn_paged::{
    AttentionMetadata, AttentionMetadataBuilder, AttentionOutput, CacheGeometry, LayerKv,
    SequenceStep, gather_kv, merge_attention, paged_attention_with_lse, reference,
    varlen_attention_with_lse,
};

use crate::{
    cases::{Case, cases, few_cases},
    compare::assert_close,
    devices::{Random, devices, dtypes, host, is_jit, tensor},
    oracle::{self, Inputs},
};

/// The tensors of a case on one device: shuffled blocks, NaN wherever no sequence has a token.
pub(crate) struct Setup {
    pub(crate) q: Tensor<3>,
    /// K and V of every sequence, packed.
    pub(crate) k: Tensor<3>,
    pub(crate) v: Tensor<3>,
    pub(crate) cache: LayerKv,
    pub(crate) metadata: AttentionMetadata,
}

pub(crate) fn setup(case: &Case, dtype: DType, device: &Device, poison: f32) -> Setup {
    let mut random = Random::new(11);
    let Case {
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        scale,
        ..
    } = *case;
    let num_tokens: usize = case.query_lens.iter().sum();
    let q = random.values(num_tokens * num_heads * head_dim, scale);

    let blocks_of = |len: &usize| len.div_ceil(block_size);
    let num_blocks = case.kv_lens.iter().map(blocks_of).sum::<usize>() + 3;
    let mut free = random.shuffled(num_blocks).into_iter();
    let mut tables: Vec<Vec<u32>> = Vec::new();
    for len in &case.kv_lens {
        let shared = tables
            .first()
            .map_or(0, |first| case.shared_blocks.min(first.len()));
        let mut table = tables
            .first()
            .map_or(Vec::new(), |first| first[..shared].to_vec());
        table.extend(free.by_ref().take(blocks_of(len) - shared));
        tables.push(table);
    }

    let width = num_kv_heads * head_dim;
    let num_slots = num_blocks * block_size;
    let (mut k_cache, mut v_cache) = (
        vec![poison; num_slots * width],
        vec![poison; num_slots * width],
    );
    let (mut k, mut v) = (Vec::new(), Vec::new());
    let mut written = vec![false; num_slots];
    for (table, len) in tables.iter().zip(&case.kv_lens) {
        for position in 0..*len {
            let slot = table[position / block_size] as usize * block_size + position % block_size;
            let range = slot * width..(slot + 1) * width;
            if !std::mem::replace(&mut written[slot], true) {
                k_cache[range.clone()].copy_from_slice(&random.values(width, scale));
                v_cache[range.clone()].copy_from_slice(&random.values(width, 2.0));
            }
            k.extend_from_slice(&k_cache[range.clone()]);
            v.extend_from_slice(&v_cache[range]);
        }
    }

    let geometry = CacheGeometry {
        num_blocks,
        block_size,
        num_kv_heads,
        head_dim,
    };
    let mut builder = AttentionMetadataBuilder::new(geometry);
    for (at, table) in tables.iter().enumerate() {
        let num_new = case.query_lens[at];
        builder.push(SequenceStep {
            blocks: table,
            num_computed: case.kv_lens[at] - num_new,
            num_new,
        });
    }
    let num_keys = case.kv_lens.iter().sum();
    let rows = |values: Vec<f32>| tensor(values, [num_keys, num_kv_heads, head_dim], dtype, device);
    let blocks = |values: Vec<f32>| tensor(values, geometry.shape(), dtype, device);
    Setup {
        q: tensor(q, [num_tokens, num_heads, head_dim], dtype, device),
        k: rows(k),
        v: rows(v),
        cache: LayerKv::new(blocks(k_cache), blocks(v_cache)),
        metadata: builder.build(device).unwrap(),
    }
}

/// Every way to compute a case.
#[derive(Debug, Clone, Copy)]
enum Implementation {
    Packed,
    Paged,
    GatherThenPacked,
    ReferencePaged,
    /// Inputs that are slices of a fused projection, with strides of their own.
    PackedStrided,
}

impl Implementation {
    const ALL: [Self; 5] = [
        Self::Packed,
        Self::Paged,
        Self::GatherThenPacked,
        Self::ReferencePaged,
        Self::PackedStrided,
    ];

    fn run(self, case: &Case, setup: &Setup) -> AttentionOutput {
        let Setup {
            q,
            k,
            v,
            cache,
            metadata,
        } = setup;
        let (cu_q, cu_k) = (metadata.cu_seqlens_q(), metadata.cu_seqlens_k());
        let packed = |q, k, v| varlen_attention_with_lse(q, k, v, cu_q, cu_k, case.options);
        match self {
            Self::Packed => packed(q.clone(), k.clone(), v.clone()),
            Self::Paged => paged_attention_with_lse(q.clone(), cache, metadata, case.options),
            Self::GatherThenPacked => {
                let (k, v) = gather_kv(cache, metadata);
                packed(q.clone(), k, v)
            }
            Self::ReferencePaged => {
                reference::paged_attention(q.clone(), cache, metadata, case.options)
            }
            Self::PackedStrided => packed(strided(q), strided(k), strided(v)),
        }
    }
}

/// The same values with a longer row stride and heads in another order in memory.
fn strided(x: &Tensor<3>) -> Tensor<3> {
    let [rows, heads, head_dim] = x.dims();
    if rows == 0 {
        return x.clone();
    }
    let swapped = x.clone().swap_dims(0, 1);
    let padding = swapped.clone().full_like(f32::NAN);
    Tensor::cat(vec![swapped, padding], 1)
        .slice([0..heads, 0..rows, 0..head_dim])
        .swap_dims(0, 1)
}

/// The oracle's output and log-sum-exp, and those of the plain implementation in the dtype of the inputs.
struct Expected {
    out: Vec<f32>,
    lse: Vec<f32>,
    plain_out: Vec<f32>,
    plain_lse: Vec<f32>,
}

fn expected(case: &Case, setup: &Setup) -> Expected {
    let (q, k, v) = (host(&setup.q), host(&setup.k), host(&setup.v));
    let Case {
        num_heads,
        num_kv_heads,
        head_dim,
        ..
    } = *case;
    let (query_lens, kv_lens) = (case.query_lens.as_slice(), case.kv_lens.as_slice());
    let inputs = Inputs {
        q: &q,
        k: &k,
        v: &v,
        query_lens,
        kv_lens,
        num_heads,
        num_kv_heads,
        head_dim,
    };
    let (out, lse) = oracle::attention(&inputs, &case.options);

    let (mut plain_out, mut plain_lse) = (Vec::new(), Vec::new());
    let (mut q_begin, mut k_begin) = (0, 0);
    for (query_len, kv_len) in query_lens.iter().zip(kv_lens) {
        let (q_end, k_end) = (q_begin + query_len, k_begin + kv_len);
        if *query_len > 0 {
            let part = |x: &Tensor<3>, begin, end| on_host(x).slice(begin..end);
            let q = part(&setup.q, q_begin, q_end);
            let (k, v) = (
                part(&setup.k, k_begin, k_end),
                part(&setup.v, k_begin, k_end),
            );
            let plain = reference::dense_attention(q, k, v, case.options);
            plain_out.extend(host(&plain.out));
            plain_lse.extend(host(&plain.lse));
        }
        (q_begin, k_begin) = (q_end, k_end);
    }
    Expected {
        out,
        lse,
        plain_out,
        plain_lse,
    }
}

fn cases_for(name: &str) -> Vec<Case> {
    if is_jit(name) { few_cases() } else { cases() }
}

/// On the host, where there is a backend for it: the plain implementation shall not depend on the device under test, nor on its
/// matrix product.
fn on_host(x: &Tensor<3>) -> Tensor<3> {
    #[cfg(feature = "flex")]
    return Tensor::from_data(x.clone().into_data(), (&Device::flex(), x.dtype()));
    #[cfg(not(feature = "flex"))]
    x.clone()
}

#[test]
fn every_implementation_agrees_with_the_reference_on_every_case() {
    let mut count = 0;
    for (name, device) in devices() {
        for dtype in dtypes(name, &device) {
            for case in cases_for(name) {
                let setup = setup(&case, dtype, &device, f32::NAN);
                let expected = expected(&case, &setup);
                for implementation in Implementation::ALL {
                    if is_jit(name) && matches!(implementation, Implementation::ReferencePaged) {
                        continue; // Burn's own matrix product finds no kernel there without tuning.
                    }
                    let found = implementation.run(&case, &setup);
                    let what = format!("{name}, {implementation:?}, {}", case.name);
                    assert_eq!(found.out.dims(), setup.q.dims(), "{what}");
                    assert_eq!(found.out.dtype(), dtype, "{what}");
                    assert_eq!(found.lse.dtype(), DType::F32, "{what}");
                    let (out, lse) = (host(&found.out), host(&found.lse));
                    assert!(
                        out.iter().all(|value| value.is_finite()),
                        "{what}: not finite"
                    );
                    assert_close(&what, &out, &expected.out, Some(&expected.plain_out), dtype);
                    let what = format!("{what}, lse");
                    let plain = Some(expected.plain_lse.as_slice());
                    assert_close(&what, &lse, &expected.lse, plain, DType::F32);
                    count += 1;
                }
            }
        }
    }
    println!("attention: {count} cases run");
}

#[test]
fn rubbish_in_unused_slots_changes_no_bit() {
    let fillings = [0.0, 1e4, f32::INFINITY, f32::NAN];
    let poisoned = |case: &Case, device: &Device, filling| {
        let setup = setup(case, DType::F32, device, filling);
        let found = Implementation::Paged.run(case, &setup);
        (host(&found.out), host(&found.lse))
    };
    for (name, device) in devices() {
        for case in cases_for(name).iter().filter(|case| case.block_size > 1) {
            let clean = poisoned(case, &device, fillings[0]);
            for filling in &fillings[1..] {
                let found = poisoned(case, &device, *filling);
                assert_eq!(
                    found, clean,
                    "{name}, {}, slots filled with {filling}",
                    case.name
                );
            }
        }
    }
}

#[test]
fn with_fixed_parts_a_row_does_not_depend_on_its_batch() {
    for (name, device) in devices() {
        let case = Case {
            options: cases()[1].options.with_fixed_split(16),
            ..cases()[1].clone()
        };
        let setup = setup(&case, DType::F32, &device, f32::NAN);
        let all = host(&Implementation::Paged.run(&case, &setup).out);
        let width = case.num_heads * case.head_dim;
        let mut first = 0;
        for (sequence, query_len) in case.query_lens.iter().copied().enumerate() {
            let geometry = setup.cache.geometry();
            let row = setup.metadata.block_table().row(sequence);
            let blocks: Vec<u32> = row.iter().filter(|b| **b >= 0).map(|b| *b as u32).collect();
            let num_computed = case.kv_lens[sequence] - query_len;
            let mut builder = AttentionMetadataBuilder::new(geometry);
            builder.push(SequenceStep {
                blocks: &blocks,
                num_computed,
                num_new: query_len,
            });
            let metadata = builder.build(&device).unwrap();
            let q = setup.q.clone().slice(first..first + query_len);
            let alone = paged_attention_with_lse(q, &setup.cache, &metadata, case.options);
            let begin = first * width;
            assert_eq!(
                host(&alone.out),
                all[begin..begin + query_len * width],
                "{name}, sequence {sequence}"
            );
            first += query_len;
        }
    }
}

#[test]
fn two_halves_merge_into_the_whole() {
    for (name, device) in devices() {
        for dtype in dtypes(name, &device) {
            // A decode over 33 keys, cut after 20; and a cut after 33, which leaves one part without keys.
            for cut in [20, 33] {
                let mut random = Random::new(5);
                let mut draw = |rows, heads| random.tensor([rows, heads, 24], 3.0, dtype, &device);
                let (q, k, v) = (draw(2, 4), draw(33, 2), draw(33, 2));
                let options = burn_paged::AttentionOptions::bidirectional();
                let attend = |begin: usize, end: usize| {
                    let lens = |len| burn_paged::CuSeqlens::from_lens([len], &device).unwrap();
                    let part = |x: &Tensor<3>| x.clone().narrow(0, begin, end - begin);
                    let (k, v) = (part(&k), part(&v));
                    let (cu_q, cu_k) = (lens(2), lens(end - begin));
                    varlen_attention_with_lse(q.clone(), k, v, &cu_q, &cu_k, options)
                };
                let whole = attend(0, 33);
                let none = || AttentionOutput {
                    out: whole.out.zeros_like(),
                    lse: whole.lse.full_like(f32::NEG_INFINITY),
                };
                let tail = if cut == 33 { none() } else { attend(cut, 33) };
                let merged = merge_attention(attend(0, cut), tail);
                let what = format!("{name}, cut {cut}");
                assert_close(&what, &host(&merged.out), &host(&whole.out), None, dtype);
                assert_close(
                    &what,
                    &host(&merged.lse),
                    &host(&whole.lse),
                    None,
                    DType::F32,
                );
                let nothing = merge_attention(none(), none());
                assert!(
                    host(&nothing.out).iter().all(|value| *value == 0.0),
                    "{what}"
                );
                assert!(
                    host(&nothing.lse)
                        .iter()
                        .all(|lse| *lse == f32::NEG_INFINITY),
                    "{what}"
                );
            }
        }
    }
}

#[test]
fn every_key_length_from_1_to_130_runs() {
    for (name, device) in devices() {
        for kv_len in 1..=130 {
            let mut case = cases()[9].clone();
            (case.query_lens, case.kv_lens) = (vec![1], vec![kv_len]);
            let setup = setup(&case, DType::F32, &device, f32::NAN);
            let expected = expected(&case, &setup);
            let found = host(&Implementation::Paged.run(&case, &setup).out);
            let what = format!("{name}, kv_len {kv_len}");
            assert_close(
                &what,
                &found,
                &expected.out,
                Some(&expected.plain_out),
                DType::F32,
            );
        }
    }
}
