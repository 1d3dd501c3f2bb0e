//! Wrong calls are refused on the host, with the numbers in the message, and lose nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{DType, Device, Tensor};
use burn_paged::*;

use crate::devices::{devices, host};

const GEOMETRY: CacheGeometry = CacheGeometry {
    num_blocks: 4,
    block_size: 4,
    num_kv_heads: 2,
    head_dim: 8,
};

fn layer(device: &Device) -> LayerKv {
    let zeros = || Tensor::zeros(GEOMETRY.shape(), (device, DType::F32));
    LayerKv::new(zeros(), zeros())
}

/// Runs a call that must panic and asserts that its message holds every given part.
pub(crate) fn refused(call: impl FnOnce(), parts: &[&str]) {
    let payload = catch_unwind(AssertUnwindSafe(call)).expect_err("the call should be refused");
    let message = match payload.downcast_ref::<String>() {
        Some(message) => message.clone(),
        None => (*payload.downcast_ref::<&str>().expect("a panic message")).to_string(),
    };
    for part in parts {
        assert!(message.contains(part), "message {message:?} lacks {part:?}");
    }
}

#[test]
fn a_shared_cache_is_refused_and_kept() {
    for (name, device) in devices() {
        let mut cache = layer(&device);
        let slots = SlotMapping::new(vec![1], &device).unwrap();
        let row = |value: f32| Tensor::full([1, 2, 8], value, (&device, DType::F32));
        let stray = cache.v().clone();
        refused(
            || store_kv(&mut cache, row(1.0), row(1.0), &slots),
            &["shared", "16 slots"],
        );
        drop(stray);
        store_kv(&mut cache, row(2.0), row(2.0), &slots);
        let k = host(cache.k());
        assert!(
            k[16..32].iter().all(|value| *value == 2.0),
            "{name}: the cache lost its rows"
        );
        assert!(
            k[..16].iter().chain(&k[32..]).all(|value| *value == 0.0),
            "{name}"
        );
    }
}

#[test]
fn store_names_shapes_and_dtypes() {
    for (_, device) in devices() {
        let mut cache = layer(&device);
        let slots = SlotMapping::new(vec![1, 2, 3], &device).unwrap();
        let rows = |shape: [usize; 3]| Tensor::zeros(shape, (&device, DType::F32));
        let mut store = |k, v| store_kv(&mut cache, k, v, &slots);
        refused(
            || store(rows([3, 1, 8]), rows([3, 2, 8])),
            &["k has shape [3, 1, 8]", "[3, 2, 8]"],
        );
        refused(
            || store(rows([3, 2, 8]), rows([2, 2, 8])),
            &["v has shape [2, 2, 8]"],
        );
        let half = rows([3, 2, 8]).cast(DType::F16);
        refused(|| store(half, rows([3, 2, 8])), &["F32", "F16"]);
    }
}

#[test]
fn attention_names_what_disagrees() {
    for (_, device) in devices() {
        let cache = layer(&device);
        let build = |geometry| {
            let mut builder = AttentionMetadataBuilder::new(geometry);
            builder.push(SequenceStep {
                blocks: &[3, 0],
                num_computed: 4,
                num_new: 2,
            });
            builder.build(&device).unwrap()
        };
        let metadata = build(GEOMETRY);
        let q = |shape: [usize; 3]| Tensor::zeros(shape, (&device, DType::F32));
        let attend = |q, metadata: &AttentionMetadata, options| {
            paged_attention(q, &cache, metadata, options);
        };
        let causal = AttentionOptions::causal();
        for heads in [33, 3] {
            let message = format!("{heads} query heads");
            let parts = [message.as_str(), "2 key/value heads"];
            refused(|| attend(q([2, heads, 8]), &metadata, causal), &parts);
        }
        refused(
            || attend(q([2, 4, 9]), &metadata, causal),
            &["head_dim 9", "8"],
        );
        refused(
            || attend(q([3, 4, 8]), &metadata, causal),
            &["2 query tokens", "3 rows"],
        );
        let other = build(CacheGeometry {
            block_size: 8,
            ..GEOMETRY
        });
        refused(
            || attend(q([2, 4, 8]), &other, causal),
            &["block_size 8", "4"],
        );
        let larger = {
            let mut builder = AttentionMetadataBuilder::new(CacheGeometry {
                num_blocks: 9,
                ..GEOMETRY
            });
            builder.push(SequenceStep {
                blocks: &[8],
                num_computed: 0,
                num_new: 2,
            });
            builder.build(&device).unwrap()
        };
        refused(
            || attend(q([2, 4, 8]), &larger, causal),
            &["block 8", "the cache has 4"],
        );
        let softcap = causal.with_softcap(0.0);
        refused(|| attend(q([2, 4, 8]), &metadata, softcap), &["softcap 0"]);
        let scale = causal.with_scale(f32::NAN);
        refused(|| attend(q([2, 4, 8]), &metadata, scale), &["scale NaN"]);
        let bf16 = q([2, 4, 8]).cast(DType::F16);
        refused(|| attend(bf16, &metadata, causal), &["F16", "F32"]);

        let cu = |lens: &[usize]| CuSeqlens::from_lens(lens.iter().copied(), &device).unwrap();
        let kv = || q([5, 2, 8]);
        let packed = |cu_q: &CuSeqlens, cu_k: &CuSeqlens| {
            varlen_attention(q([2, 4, 8]), kv(), kv(), cu_q, cu_k, causal);
        };
        refused(
            || packed(&cu(&[2]), &cu(&[3, 2])),
            &["1 sequences", "2 of keys"],
        );
        refused(|| packed(&cu(&[3]), &cu(&[5])), &["ends at 3", "2 rows"]);
        refused(|| packed(&cu(&[2]), &cu(&[4])), &["ends at 4", "5 rows"]);
    }
}

#[test]
fn layer_ops_name_what_disagrees() {
    for (_, device) in devices() {
        let x = |shape: [usize; 2]| Tensor::<2>::zeros(shape, (&device, DType::F32));
        let w = |len: usize| Tensor::<1>::zeros([len], (&device, DType::F32));
        refused(|| drop(rms_norm(x([2, 8]), w(7), 1e-5)), &["[2, 8]", "[7]"]);
        refused(
            || drop(add_rms_norm(x([2, 8]), x([3, 8]), w(8), 1e-5)),
            &["[2, 8]", "[3, 8]"],
        );
        refused(|| drop(silu_and_mul(x([2, 7]))), &["odd size 7"]);
        refused(
            || drop(linear(x([2, 8]), &x([4, 9]), None)),
            &["[2, 8]", "[4, 9]"],
        );
        refused(
            || drop(linear(x([2, 8]), &x([4, 8]), Some(&w(5)))),
            &["[4, 8]", "[5]"],
        );
        refused(
            || drop(linear(x([2, 8]), &x([4, 8]).cast(DType::F16), None)),
            &["F32", "F16"],
        );
        let options = [SamplingOptions::default(); 3];
        refused(
            || drop(sample(x([2, 8]), &options)),
            &["2 rows", "3 options"],
        );
    }
}
