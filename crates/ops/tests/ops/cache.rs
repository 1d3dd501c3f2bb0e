//! Store and gather: slots that are skipped, values that stay, buffers that are not copied.

use burn::tensor::{DType, Device, Tensor};
use burn_paged::{
    AttentionMetadataBuilder, AttentionOptions, CacheGeometry, LayerKv, RotaryTable, SequenceStep,
    SlotMapping, gather_kv, paged_attention, reference, rotary_and_store, store_kv,
};

use crate::devices::{Random, devices, dtypes, host, tensor};

fn layer(geometry: CacheGeometry, dtype: DType, device: &Device) -> LayerKv {
    let zeros = || Tensor::zeros(geometry.shape(), (device, dtype));
    LayerKv::new(zeros(), zeros())
}

#[test]
fn negative_slots_and_slots_past_the_end_write_nothing() {
    for (name, device) in devices() {
        for dtype in dtypes(name, &device) {
            let geometry = CacheGeometry {
                num_blocks: 4,
                block_size: 4,
                num_kv_heads: 1,
                head_dim: 8,
            };
            let mut cache = layer(geometry, dtype, &device);
            let rows: Vec<f32> = (0..4).flat_map(|token| [(token + 1) as f32; 8]).collect();
            let rows = || tensor(rows.clone(), [4, 1, 8], dtype, &device);
            let slots = SlotMapping::new(vec![0, -1, 5, -1], &device).unwrap();
            store_kv(&mut cache, rows(), rows(), &slots);
            for past_the_end in [16, i32::MAX, i32::MIN] {
                let slots = SlotMapping::new(vec![past_the_end], &device).unwrap();
                let row = || Tensor::full([1, 1, 8], 9.0, (&device, dtype));
                store_kv(&mut cache, row(), row(), &slots);
            }
            let none = SlotMapping::new(vec![], &device).unwrap();
            let empty = || Tensor::zeros([0, 1, 8], (&device, dtype));
            store_kv(&mut cache, empty(), empty(), &none);
            let mut expected = [0.0; 16];
            (expected[0], expected[5]) = (1.0, 3.0);
            let expected: Vec<f32> = expected.iter().flat_map(|value| [*value; 8]).collect();
            assert_eq!(host(cache.k()), expected, "{name}, K");
            assert_eq!(host(cache.v()), expected, "{name}, V");
        }
    }
}

#[test]
fn what_is_stored_is_what_is_gathered() {
    let geometry = CacheGeometry {
        num_blocks: 9,
        block_size: 5,
        num_kv_heads: 3,
        head_dim: 7,
    };
    for (name, device) in devices() {
        for dtype in dtypes(name, &device) {
            let mut random = Random::new(2);
            let mut cache = layer(geometry, dtype, &device);
            let (first, second): (&[u32], &[u32]) = (&[8, 1, 4], &[0, 6]);
            let mut step = |computed: [usize; 2], new: [usize; 2]| {
                let mut builder = AttentionMetadataBuilder::new(geometry);
                for (at, blocks) in [first, second].into_iter().enumerate() {
                    let (num_computed, num_new) = (computed[at], new[at]);
                    builder.push(SequenceStep {
                        blocks,
                        num_computed,
                        num_new,
                    });
                }
                let metadata = builder.build(&device).unwrap();
                // Slices of one fused projection: rows are further apart than they are long.
                let fused = random.tensor([metadata.num_tokens(), 2 * 3 * 7], 3.0, dtype, &device);
                let part = |at: usize| {
                    fused
                        .clone()
                        .narrow(1, at * 21, 21)
                        .reshape([metadata.num_tokens(), 3, 7])
                };
                store_kv(&mut cache, part(0), part(1), metadata.slot_mapping());
                (host(&part(0)), host(&part(1)), gather_kv(&cache, &metadata))
            };
            let (k1, v1, (k, v)) = step([0, 0], [6, 4]);
            assert_eq!(host(&k), k1, "{name}");
            assert_eq!(host(&v), v1, "{name}");
            let (k2, _, (k, _)) = step([6, 4], [7, 1]);
            let join = |first: &[f32], second: &[f32]| {
                let cut = |at: usize, len: usize| at * 21..(at + len) * 21;
                [
                    &first[cut(0, 6)],
                    &second[cut(0, 7)],
                    &first[cut(6, 4)],
                    &second[cut(7, 1)],
                ]
                .concat()
            };
            assert_eq!(k.dims(), [18, 3, 7], "{name}");
            assert_eq!(host(&k), join(&k1, &k2), "{name}");
        }
    }
}

#[test]
fn rotary_and_store_equals_the_two_apart() {
    let geometry = CacheGeometry {
        num_blocks: 4,
        block_size: 4,
        num_kv_heads: 2,
        head_dim: 12,
    };
    for (name, device) in devices() {
        for dtype in dtypes(name, &device) {
            let mut random = Random::new(8);
            let q = random.tensor([5, 6, 12], 2.0, dtype, &device);
            let k = random.tensor([5, 2, 12], 2.0, dtype, &device);
            let v = random.tensor([5, 2, 12], 2.0, dtype, &device);
            let table = RotaryTable::new(&[1.0, 0.3, 0.05, 0.004], 1.1, 40, &device);
            let positions = Tensor::from_data([7, 0, 39, 3, 4], (&device, DType::I32));
            let slots = SlotMapping::new(vec![3, -1, 9, 0, 15], &device).unwrap();
            let mut fused = layer(geometry, dtype, &device);
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
            let apart = layer(geometry, dtype, &device).into_parts();
            let (k_cache, v_cache) = reference::store_kv(k, v, apart.0, apart.1, &slots);
            assert_eq!(host(&rotated), host(&q), "{name}");
            assert_eq!(host(fused.k()), host(&k_cache), "{name}");
            assert_eq!(host(fused.v()), host(&v_cache), "{name}");
        }
    }
}

/// The address of the K buffer on Flex: it must be the same before and after a store.
#[cfg(feature = "flex")]
fn address(tensor: &Tensor<4>) -> *const u8 {
    use burn::backend::Flex;
    let primitive = tensor.clone().try_into_primitive::<Flex>().unwrap();
    primitive.bytes().as_ptr()
}

#[cfg(feature = "flex")]
#[test]
fn a_store_writes_in_place() {
    let device = Device::flex();
    let geometry = CacheGeometry {
        num_blocks: 4,
        block_size: 4,
        num_kv_heads: 1,
        head_dim: 8,
    };
    let mut cache = layer(geometry, DType::F32, &device);
    let before = (address(cache.k()), address(cache.v()));
    for step in 0..16 {
        let slots = SlotMapping::new(vec![step], &device).unwrap();
        let row = || Tensor::full([1, 1, 8], step as f32, (&device, DType::F32));
        store_kv(&mut cache, row(), row(), &slots);
        assert_eq!(
            (address(cache.k()), address(cache.v())),
            before,
            "step {step}"
        );
    }
}

/// Thousands of decoding steps on one cache leave nothing behind. That none copies it is held by the refusal of a cache with
/// a second handle.
#[test]
#[cfg(feature = "cube")]
#[allow(
    irrefutable_let_patterns,
    reason = "unless other backends are built in"
)]
fn memory_stays_flat_over_many_steps() {
    use burn::backend::DispatchDevice;
    use cubecl::MemoryScope;

    for (name, device) in devices() {
        let DispatchDevice::Cube(cube) = device.as_dispatch() else {
            continue;
        };
        let client = cube.client();
        let bytes = || {
            // Work that is queued holds what it will free.
            device.sync().unwrap();
            client
                .memory_report(MemoryScope::Device)
                .usage()
                .bytes_in_use
        };
        let geometry = CacheGeometry {
            num_blocks: 64,
            block_size: 16,
            num_kv_heads: 2,
            head_dim: 64,
        };
        let cache_bytes = 2 * geometry.shape().iter().product::<usize>() as u64 * 4;
        let mut cache = layer(geometry, DType::F32, &device);
        let blocks: Vec<u32> = (0..64).rev().collect();
        let table = RotaryTable::new(&[1.0, 0.1, 0.01, 0.001], 1.0, 1024, &device);
        let mut step = |step: usize| {
            let mut builder = AttentionMetadataBuilder::new(geometry);
            builder.push(SequenceStep {
                blocks: &blocks,
                num_computed: step % 1000,
                num_new: 1,
            });
            let metadata = builder.build(&device).unwrap();
            let positions = Tensor::from_data([(step % 1000) as i32], (&device, DType::I32));
            let rows = |heads| Tensor::full([1, heads, 64], 0.5, (&device, DType::F32));
            let q = rotary_and_store(
                rows(4),
                rows(2),
                rows(2),
                &positions,
                &table,
                &mut cache,
                metadata.slot_mapping(),
            );
            paged_attention(q, &cache, &metadata, AttentionOptions::causal())
        };
        let steps = if name == "cpu" { 300 } else { 10_000 };
        for at in 0..100 {
            drop(step(at));
        }
        let before = bytes();
        for at in 100..steps {
            drop(step(at));
            if at % 100 == 0 {
                device.sync().unwrap();
            }
        }
        let after = bytes();
        println!("{name}: {before} bytes in use after 100 steps, {after} after {steps}");
        assert!(
            after < before + cache_bytes / 2,
            "{name}: {before} bytes in use after 100 steps, {after} after {steps}"
        );
    }
}
