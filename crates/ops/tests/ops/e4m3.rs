//! The cache of e4m3 codes: what is stored, what is read, and attention over it, on every device.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{DType, Device, Int, Tensor};
use burn_paged::{
    AttentionMetadata, AttentionMetadataBuilder, AttentionOptions, CacheDType, CacheError,
    CacheGeometry, CacheScales, LayerKv, PagedKvCache, RotaryTable, SequenceStep, SlotMapping,
    gather_kv, paged_attention_with_lse, reference, rotary_and_store, store_kv,
};

use crate::{
    compare::assert_close,
    devices::{Random, devices, dtypes, host, is_jit, tensor},
    oracle::{self, Inputs},
};

const GEOMETRY: CacheGeometry = CacheGeometry {
    num_blocks: 9,
    block_size: 8,
    num_kv_heads: 3,
    head_dim: 32,
};

/// NaN, which nobody may read.
const POISON: u8 = 0x7f;

fn scales(device: &Device) -> CacheScales {
    let of = |values: Vec<f32>| Tensor::from_data(values.as_slice(), (device, DType::F32));
    CacheScales::new(of(vec![1.0, 0.02, 0.3]), of(vec![0.7, 1.0, 8.0]))
}

fn codes(device: &Device) -> Tensor<4, Int> {
    Tensor::full(GEOMETRY.shape(), i32::from(POISON), (device, DType::U8))
}

fn layer(dtype: DType, device: &Device) -> LayerKv {
    LayerKv::e4m3(codes(device), codes(device), scales(device), dtype)
}

fn bytes(codes: &Tensor<4, Int>) -> Vec<u8> {
    codes.clone().into_data().iter::<u8>().collect()
}

/// Sequences of 19, 0 and 11 tokens, of which the first has 3 new ones and the last all.
fn metadata(computed: [usize; 3], new: [usize; 3], device: &Device) -> AttentionMetadata {
    let mut builder = AttentionMetadataBuilder::new(GEOMETRY);
    let blocks: [&[u32]; 3] = [&[7, 2, 4], &[], &[0, 8]];
    for (at, blocks) in blocks.into_iter().enumerate() {
        builder.push(SequenceStep {
            blocks,
            num_computed: computed[at],
            num_new: new[at],
        });
    }
    builder.build(device).unwrap()
}

#[test]
fn codes_are_those_of_the_reference_and_read_as_its_numbers() {
    for (name, device) in devices() {
        for dtype in dtypes(name, &device) {
            let mut random = Random::new(5);
            let CacheGeometry {
                num_kv_heads,
                head_dim,
                ..
            } = GEOMETRY;
            let metadata = metadata([0; 3], [19, 0, 11], &device);
            let shape = [30, num_kv_heads, head_dim];
            // Some below the smallest number under a scale of 8, some above the largest under one of 0.02.
            let k = random.tensor(shape, 12.0, dtype, &device);
            let v = random.tensor(shape, 0.1, dtype, &device);
            let slots = metadata.slot_mapping();
            let mut cache = layer(dtype, &device);
            store_kv(&mut cache, k.clone(), v.clone(), slots);
            let expected = reference::store_kv_e4m3(
                k,
                v,
                codes(&device),
                codes(&device),
                &scales(&device),
                slots,
            );
            let (k_codes, v_codes, _) = cache.codes().unwrap();
            assert_eq!(bytes(k_codes), bytes(&expected.0), "{name} {dtype:?}, K");
            assert_eq!(bytes(v_codes), bytes(&expected.1), "{name} {dtype:?}, V");
            let num_poisoned = bytes(k_codes)
                .iter()
                .filter(|code| **code == POISON)
                .count();
            assert_eq!(num_poisoned, (72 - 30) * num_kv_heads * head_dim, "{name}");

            let (k, v) = gather_kv(&cache, &metadata);
            let (exact_k, exact_v) = reference::gather_kv(&cache, &metadata);
            assert_eq!((k.dtype(), v.dtype()), (dtype, dtype));
            assert_eq!(host(&k), host(&exact_k), "{name} {dtype:?}, K");
            assert_eq!(host(&v), host(&exact_v), "{name} {dtype:?}, V");
            assert!(host(&k).iter().all(|value| value.is_finite()));
        }
    }
}

#[test]
fn attention_is_that_over_the_numbers_of_the_codes() {
    for (name, device) in devices() {
        for dtype in dtypes(name, &device) {
            let mut random = Random::new(6);
            let CacheGeometry {
                num_kv_heads,
                head_dim,
                ..
            } = GEOMETRY;
            let mut cache = layer(dtype, &device);
            for (computed, new) in [
                ([0; 3], [16, 0, 0]),
                ([16, 0, 0], [3, 0, 11]),
                ([18, 0, 10], [1, 0, 1]),
            ] {
                let metadata = metadata(computed, new, &device);
                let num_tokens = metadata.num_tokens();
                let shape = [num_tokens, num_kv_heads, head_dim];
                let k = random.tensor(shape, 3.0, dtype, &device);
                let v = random.tensor(shape, 2.0, dtype, &device);
                let q = random.tensor([num_tokens, 6, head_dim], 3.0, dtype, &device);
                store_kv(&mut cache, k, v, metadata.slot_mapping());
                let options = AttentionOptions::default();
                let found = paged_attention_with_lse(q.clone(), &cache, &metadata, options);
                let (k, v) = gather_kv(&cache, &metadata);
                let inputs = Inputs {
                    q: &host(&q),
                    k: &host(&k),
                    v: &host(&v),
                    query_lens: &new,
                    kv_lens: &std::array::from_fn::<_, 3, _>(|at| computed[at] + new[at]),
                    num_heads: 6,
                    num_kv_heads,
                    head_dim,
                };
                let (out, lse) = oracle::attention(&inputs, &options);
                let what = format!("{name}, {new:?} of {computed:?}");
                assert_close(&what, &host(&found.out), &out, None, dtype);
                assert_close(&what, &host(&found.lse), &lse, None, dtype);
            }
        }
    }
}

#[test]
fn rotary_and_store_equals_the_two_apart() {
    for (name, device) in devices() {
        for dtype in dtypes(name, &device) {
            let mut random = Random::new(8);
            let q = random.tensor([5, 6, 32], 2.0, dtype, &device);
            let k = random.tensor([5, 3, 32], 2.0, dtype, &device);
            let v = random.tensor([5, 3, 32], 2.0, dtype, &device);
            let frequencies: Vec<f64> = (0..16).map(|at| 0.6f64.powi(at)).collect();
            let table = RotaryTable::new(&frequencies, 1.1, 40, &device);
            let positions = Tensor::from_data([7, 0, 39, 3, 4], (&device, DType::I32));
            let slots = SlotMapping::new(vec![3, -1, 9, 0, 71], &device).unwrap();
            let mut fused = layer(dtype, &device);
            let rotated = rotary_and_store(
                q.clone(),
                k.clone(),
                v.clone(),
                &positions,
                &table,
                &mut fused,
                &slots,
            );
            let (q, k) = burn_paged::rotary(q, k, &positions, &table);
            let mut apart = layer(dtype, &device);
            store_kv(&mut apart, k, v, &slots);
            assert_eq!(host(&rotated), host(&q), "{name}");
            let (fused, apart) = (fused.codes().unwrap(), apart.codes().unwrap());
            // The kernel rounds once, from its own f32; the two apart round to the dtype in between.
            let numbers = |codes: &Tensor<4, Int>| -> Vec<i32> {
                let signed = |code: u8| match code & 0x80 {
                    0 => i32::from(code),
                    _ => -i32::from(code & 0x7f),
                };
                bytes(codes).into_iter().map(signed).collect()
            };
            let close = |left: &Tensor<4, Int>, right: &Tensor<4, Int>| {
                let (left, right) = (numbers(left), numbers(right));
                left.iter().zip(&right).all(|(a, b)| (a - b).abs() <= 1)
            };
            assert!(close(fused.0, apart.0), "{name} {dtype:?}, K");
            assert_eq!(bytes(fused.1), bytes(apart.1), "{name} {dtype:?}, V");
        }
    }
}

#[test]
fn a_cache_of_codes_has_a_byte_for_each_element_and_scales_of_1() {
    for (name, device) in devices() {
        let dtype = CacheDType::E4m3(DType::F32);
        let cache = PagedKvCache::new(2, GEOMETRY, dtype, &device).unwrap();
        assert_eq!(cache.dtype(), dtype, "{name}");
        let layer = cache.layer(1);
        assert_eq!((layer.cache_dtype(), layer.dtype()), (dtype, DType::F32));
        let (k, _, scales) = layer.codes().unwrap();
        assert_eq!(bytes(k), vec![0; 9 * 8 * 3 * 32], "{name}");
        assert_eq!(scales.k().to_data().iter::<f32>().sum::<f32>(), 3.0);
        let block = |dtype: CacheDType| PagedKvCache::bytes_per_block(2, GEOMETRY, dtype);
        assert_eq!(block(dtype), 2 * 2 * 8 * 3 * 32);
        assert_eq!(block(DType::BF16.into()), 2 * block(dtype));
    }
}

#[test]
fn heads_that_a_device_does_not_take_are_refused_when_a_cache_is_made() {
    for (name, device) in devices() {
        let geometry = CacheGeometry {
            head_dim: 12,
            ..GEOMETRY
        };
        let new = |dtype: CacheDType| PagedKvCache::new(1, geometry, dtype, &device).map(|_| ());
        let refused = CacheError::HeadDim {
            device: format!("{device:?}"),
            head_dim: 12,
            multiple: 8,
        };
        let codes = new(CacheDType::E4m3(DType::F32));
        assert_eq!(codes.err(), is_jit(name).then_some(refused), "{name}");
        assert_eq!(new(DType::F32.into()), Ok(()), "{name}");
    }
}

#[test]
fn a_cache_of_no_float_is_refused_when_it_is_made() {
    for (name, device) in devices() {
        for dtype in [
            CacheDType::E4m3(DType::U8),
            CacheDType::E4m3(DType::F64),
            CacheDType::Float(DType::I32),
        ] {
            let made = PagedKvCache::new(1, GEOMETRY, dtype, &device).map(|_| ());
            let refused = CacheError::UnsupportedDType {
                device: format!("{device:?}"),
                dtype: dtype.float(),
            };
            assert_eq!(made, Err(refused), "{name}: {dtype:?}");
        }
    }
}

/// The words of the panic of `call`, or nothing.
fn panic_of(call: impl FnOnce()) -> String {
    let Err(payload) = catch_unwind(AssertUnwindSafe(call)) else {
        return String::new();
    };
    *payload.downcast::<String>().expect("a panic with values")
}

#[test]
fn codes_of_heads_and_rotations_that_a_device_does_not_take_are_refused() {
    for (name, device) in devices() {
        let said = panic_of(|| {
            let codes = || Tensor::zeros([2, 4, 3, 12], (&device, DType::U8));
            LayerKv::e4m3(codes(), codes(), scales(&device), DType::F32);
        });
        let refused = said.contains("a multiple of 8 elements, not of 12");
        assert_eq!(refused, is_jit(name), "{name}: {said}");

        let mut cache = layer(DType::F32, &device);
        let said = panic_of(|| {
            let rows = |heads| Tensor::zeros([1, heads, 32], (&device, DType::F32));
            let table = RotaryTable::new(&[1.0, 0.5, 0.3, 0.2, 0.1, 0.05], 1.0, 8, &device);
            let positions = Tensor::from_data([3], (&device, DType::I32));
            let slots = SlotMapping::new(vec![0], &device).unwrap();
            let (q, k, v) = (rows(6), rows(3), rows(3));
            rotary_and_store(q, k, v, &positions, &table, &mut cache, &slots);
        });
        let refused = said.contains("the table rotates 12 elements");
        assert_eq!(refused, is_jit(name), "{name}: {said}");
        // Either way, the cache is still there.
        assert!(cache.codes().is_some());
    }
}

#[test]
#[should_panic(expected = "what is stored has dtype U8")]
fn codes_of_no_float_are_refused() {
    let (_, device) = devices().remove(0);
    LayerKv::e4m3(codes(&device), codes(&device), scales(&device), DType::U8);
}

#[test]
#[should_panic(expected = "the cache is shared")]
fn a_second_handle_of_codes_is_refused() {
    let (_, device) = devices().remove(0);
    let mut cache = layer(DType::F32, &device);
    let _held = cache.codes().unwrap().0.clone();
    let row = || tensor(vec![1.0; 96], [1, 3, 32], DType::F32, &device);
    let slots = SlotMapping::new(vec![0], &device).unwrap();
    store_kv(&mut cache, row(), row(), &slots);
}

#[test]
#[should_panic(expected = "a scale for each head")]
fn other_numbers_of_scales_are_refused() {
    let (_, device) = devices().remove(0);
    let scales = CacheScales::ones(2, &device);
    LayerKv::e4m3(codes(&device), codes(&device), scales, DType::F32);
}

#[test]
#[should_panic(expected = "cache has dtype F32, k has dtype F16")]
fn keys_of_another_dtype_are_refused() {
    let (_, device) = devices().remove(0);
    let mut cache = layer(DType::F32, &device);
    let row = || tensor(vec![1.0; 96], [1, 3, 32], DType::F16, &device);
    let slots = SlotMapping::new(vec![0], &device).unwrap();
    store_kv(&mut cache, row(), row(), &slots);
}
