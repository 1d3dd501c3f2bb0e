//! The cache of eight bits: codes and numbers, `store_kv`, `rotary_and_store` and `gather_kv`.

use burn_paged_kernels::{
    DeviceFacts, KvScales, Launcher, RotaryTable, TensorRef, gather_kv, rotary_and_store, store_kv,
};

use crate::arith::{Dtype, e4m3_code, e4m3_number};
use crate::compare::assert_same;
use crate::place::{Layout, Placed, ints, launchers, runs};
use crate::random::Random;

/// The forms of a launch, and where instructions convert, one by integer arithmetic.
fn all_launchers() -> Vec<Launcher> {
    let mut all = launchers().to_vec();
    if all[0].facts().inline_ptx {
        let facts = DeviceFacts {
            inline_ptx: false,
            ..all[0].facts().clone()
        };
        all.push(Launcher::with_facts(all[0].client().clone(), facts));
    }
    all
}

fn f32s(launcher: &Launcher, values: &[f64]) -> TensorRef {
    Placed::dense(launcher, Dtype::F32, &[values.len()], values).tensor
}

/// A cache of these codes.
fn codes(launcher: &Launcher, shape: [usize; 4], codes: &[u8]) -> TensorRef {
    assert_eq!(codes.len(), shape.iter().product::<usize>());
    let handle = launcher.client().create_from_slice(codes);
    TensorRef::contiguous(handle, shape, Dtype::E4m3.elem())
}

fn read_codes(launcher: &Launcher, cache: &TensorRef) -> Vec<u8> {
    let bytes = launcher.client().read_one(cache.handle().clone());
    bytes.expect("readable output").to_vec()
}

#[test]
fn the_oracle_has_the_numbers_of_the_specification() {
    let number = |code| e4m3_number(code);
    assert_eq!([number(0x7e), number(0xfe)], [448.0, -448.0]);
    assert_eq!([number(0x01), number(0x07)], [0.001_953_125, 0.013_671_875]);
    assert_eq!([number(0x08), number(0x38)], [0.015_625, 1.0]);
    assert!(number(0x7f).is_nan() && number(0xff).is_nan());
    for code in (0..=0xffu8).filter(|code| code & 0x7f != 0x7f) {
        assert_eq!(e4m3_code(number(code)), code);
    }
    // Between 1 and 1.125, and between 1.125 and 1.25: the even code.
    assert_eq!([e4m3_code(1.0625), e4m3_code(1.1875)], [0x38, 0x3a]);
    assert_eq!([e4m3_code(464.0), e4m3_code(-1e9)], [0x7e, 0xfe]);
}

#[test]
fn every_code_is_read_as_its_number() {
    let all: Vec<u8> = (0..=255).collect();
    let mut count = 0;
    for launcher in all_launchers() {
        for dtype in Dtype::ALL {
            for (head_dim, layout) in [
                (32, Layout::Dense),
                (32, Layout::OddSlice),
                (4, Layout::Dense),
            ] {
                if !runs(&launcher, dtype) {
                    continue;
                }
                let tokens = 256 / head_dim;
                let cache = codes(&launcher, [1, tokens, 1, head_dim], &all);
                let outs = [(); 2]
                    .map(|()| Placed::poison(&launcher, dtype, &[tokens, 1, head_dim], layout));
                let one = f32s(&launcher, &[1.0]);
                gather_kv(
                    &launcher,
                    &cache,
                    &codes(&launcher, [1, tokens, 1, head_dim], &all),
                    Some(KvScales { k: &one, v: &one }),
                    &ints(&launcher, &[1, 1], &[0]),
                    &ints(&launcher, &[2], &[0, tokens as i32]),
                    &outs[0].tensor,
                    &outs[1].tensor,
                )
                .unwrap();
                let expected: Vec<f64> = all.iter().map(|&code| e4m3_number(code)).collect();
                for out in &outs {
                    assert_same(
                        &format!("{dtype:?} {head_dim}"),
                        &out.read(&launcher),
                        &expected,
                    );
                }
                count += 1;
            }
        }
    }
    println!("e4m3, codes to numbers: {count} cases");
}

/// What is hard to round: every number, what lies half way to the next and beside it, and what has no number.
fn hard_numbers() -> Vec<f64> {
    let mut numbers = vec![
        0.0,
        448.0,
        463.9,
        464.0,
        480.0,
        1e9,
        f64::INFINITY,
        f64::NAN,
    ];
    numbers.extend([1e-45, 1e-38, 1e-20, 2f64.powi(-10), 2f64.powi(-11), 3.3e38]);
    for code in 0..0x7eu8 {
        let number = e4m3_number(code);
        let half_way = ((number + e4m3_number(code + 1)) / 2.0) as f32;
        let beside = |by: i32| f32::from_bits(half_way.to_bits().wrapping_add_signed(by));
        numbers.push(number);
        numbers.extend([half_way, beside(1), beside(-1)].map(f64::from));
    }
    let negative: Vec<f64> = numbers.iter().map(|x| -x).collect();
    numbers.extend(negative);
    numbers.resize(numbers.len().next_multiple_of(16), 1.0);
    numbers
}

#[test]
fn numbers_are_stored_as_the_nearest_code() {
    let numbers = hard_numbers();
    let rows = numbers.len() / 16;
    let mut count = 0;
    for launcher in all_launchers() {
        for layout in [Layout::Dense, Layout::OddSlice] {
            let x = Placed::new(&launcher, Dtype::F32, &[rows, 1, 16], layout, &numbers).tensor;
            let cache = || codes(&launcher, [1, rows, 1, 16], &vec![0x55; numbers.len()]);
            let (k_cache, v_cache) = (cache(), cache());
            let one = f32s(&launcher, &[1.0]);
            let slots: Vec<i32> = (0..rows as i32).collect();
            store_kv(
                &launcher,
                &x,
                &x,
                &k_cache,
                &v_cache,
                Some(KvScales { k: &one, v: &one }),
                &ints(&launcher, &[rows], &slots),
            )
            .unwrap();
            for cache in [&k_cache, &v_cache] {
                for (&x, code) in numbers.iter().zip(read_codes(&launcher, cache)) {
                    let expected = e4m3_code(Dtype::F32.round(x));
                    assert_eq!(code, expected, "{x:e}: {code:#x}, expected {expected:#x}");
                    count += 1;
                }
            }
        }
    }
    println!("e4m3, numbers to codes: {count} numbers");
}

/// What a number is stored as.
fn stored(x: f64, scale: f64) -> u8 {
    let inverse = Dtype::F32.round(1.0 / scale);
    e4m3_code(Dtype::F32.round(x * inverse))
}

/// Scales of heads that are no powers of two.
fn scales(num_kv_heads: usize, first: f64) -> Vec<f64> {
    let heads = (0..num_kv_heads).map(|head| Dtype::F32.round((first + head as f64) / 448.0));
    heads.collect()
}

const STORES: [[usize; 4]; 6] = [
    // Tokens, key heads, elements of a head, tokens of a block.
    [7, 3, 64, 16],
    [1, 2, 72, 5],
    [33, 1, 80, 1],
    [20, 8, 128, 64],
    [5, 2, 256, 5],
    [9, 2, 36, 4],
];

#[test]
fn store_quantises_by_the_scale_of_the_head() {
    let mut count = 0;
    for case in STORES {
        for dtype in Dtype::ALL {
            for layout in Layout::ALL {
                for launcher in all_launchers() {
                    if runs(&launcher, dtype) {
                        store_case(&launcher, case, dtype, layout);
                        count += 1;
                    }
                }
            }
        }
    }
    println!("store_kv of eight bits: {count} cases");
}

fn store_case(
    launcher: &Launcher,
    [tokens, heads, head_dim, block_size]: [usize; 4],
    dtype: Dtype,
    layout: Layout,
) {
    let mut random = Random::new(head_dim as u64);
    let row = heads * head_dim;
    let num_blocks = tokens.div_ceil(block_size) + 2;
    let num_slots = num_blocks * block_size;
    let mut slots: Vec<i32> = random
        .shuffled(num_slots)
        .iter()
        .map(|&s| s as i32)
        .collect();
    slots.truncate(tokens);
    if let [_, stray, _, far, ..] = slots.as_mut_slice() {
        (*stray, *far) = (-1, num_slots as i32);
    }
    let mut caches: Vec<Vec<u8>> = (0..2u8)
        .map(|i| (0..num_slots * row).map(|at| at as u8 ^ i).collect())
        .collect();
    let shape = [num_blocks, block_size, heads, head_dim];
    let on_device = [0, 1].map(|i| codes(launcher, shape, &caches[i]));
    let factors = [scales(heads, 0.7), scales(heads, 1.9)];
    let [k_scales, v_scales] = [0, 1].map(|i| f32s(launcher, &factors[i]));
    let sources = [(); 2].map(|()| random.values(dtype, 1.0, tokens * row));
    let packed = [tokens, heads, head_dim];
    store_kv(
        launcher,
        &Placed::new(launcher, dtype, &packed, layout, &sources[0]).tensor,
        &Placed::new(launcher, dtype, &packed, layout.other(), &sources[1]).tensor,
        &on_device[0],
        &on_device[1],
        Some(KvScales {
            k: &k_scales,
            v: &v_scales,
        }),
        &ints(launcher, &[tokens], &slots),
    )
    .unwrap();
    for i in 0..2 {
        for (token, &slot) in slots.iter().enumerate() {
            if (0..num_slots as i32).contains(&slot) {
                for at in 0..row {
                    let scale = factors[i][at / head_dim];
                    caches[i][slot as usize * row + at] =
                        stored(sources[i][token * row + at], scale);
                }
            }
        }
        let read = read_codes(launcher, &on_device[i]);
        let wrong = read.iter().zip(&caches[i]).position(|(a, b)| a != b);
        assert_eq!(wrong, None, "{dtype:?} {layout:?} {packed:?}");
    }
}

#[test]
fn gather_multiplies_by_the_scale_of_the_head() {
    let mut count = 0;
    for (heads, head_dim, block_size) in [(3, 64, 16), (2, 72, 5), (1, 80, 1), (2, 256, 3)] {
        for dtype in Dtype::ALL {
            for layout in Layout::ALL {
                for launcher in all_launchers() {
                    if runs(&launcher, dtype) {
                        gather_case(&launcher, heads, head_dim, block_size, dtype, layout);
                        count += 1;
                    }
                }
            }
        }
    }
    println!("gather_kv of eight bits: {count} cases");
}

fn gather_case(
    launcher: &Launcher,
    heads: usize,
    head_dim: usize,
    block_size: usize,
    dtype: Dtype,
    layout: Layout,
) {
    let row = heads * head_dim;
    let len = 2 * block_size + 1;
    let table = [5, -1, 2];
    let mut random = Random::new(row as u64);
    let factors = [scales(heads, 0.7), scales(heads, 1.9)];
    let caches = [(); 2].map(|()| {
        let codes = (0..6 * block_size * row).map(|_| random.bits() as u8);
        codes
            .map(|code| if code & 0x7f == 0x7f { 0 } else { code })
            .collect::<Vec<u8>>()
    });
    let shape = [6, block_size, heads, head_dim];
    let on_device = [0, 1].map(|i| codes(launcher, shape, &caches[i]));
    let [k_scales, v_scales] = [0, 1].map(|i| f32s(launcher, &factors[i]));
    // Two rows past the last sequence.
    let packed = [len + 2, heads, head_dim];
    let outs =
        [layout, layout.other()].map(|layout| Placed::poison(launcher, dtype, &packed, layout));
    gather_kv(
        launcher,
        &on_device[0],
        &on_device[1],
        Some(KvScales {
            k: &k_scales,
            v: &v_scales,
        }),
        &ints(launcher, &[1, 3], &table),
        &ints(launcher, &[2], &[0, len as i32]),
        &outs[0].tensor,
        &outs[1].tensor,
    )
    .unwrap();
    for i in 0..2 {
        let mut expected = vec![0.0; (len + 2) * row];
        for position in 0..len {
            let Ok(block) = usize::try_from(table[position / block_size]) else {
                continue;
            };
            let slot = block * block_size + position % block_size;
            for at in 0..row {
                let number = e4m3_number(caches[i][slot * row + at]);
                let product = Dtype::F32.round(number * factors[i][at / head_dim]);
                expected[position * row + at] = dtype.round(product);
            }
        }
        assert_same(
            &format!("{dtype:?} {layout:?}"),
            &outs[i].read(launcher),
            &expected,
        );
    }
}

/// Heads of which all was 0 once got a scale of 0, and with it NaN.
#[test]
fn a_scale_of_zero_stores_and_reads_zeros() {
    for launcher in all_launchers() {
        let x = Placed::dense(
            &launcher,
            Dtype::F32,
            &[1, 2, 8],
            &[0.0, 1.0, -2.0, 3e38].repeat(4),
        );
        let cache = || codes(&launcher, [1, 1, 2, 8], &[0x7f; 16]);
        let (k_cache, v_cache) = (cache(), cache());
        let scales = f32s(&launcher, &[0.0, 1e-42]);
        let scales = KvScales {
            k: &scales,
            v: &scales,
        };
        let slots = ints(&launcher, &[1], &[0]);
        store_kv(
            &launcher,
            &x.tensor,
            &x.tensor,
            &k_cache,
            &v_cache,
            Some(scales),
            &slots,
        )
        .unwrap();
        let outs =
            [(); 2].map(|()| Placed::poison(&launcher, Dtype::F32, &[1, 2, 8], Layout::Dense));
        gather_kv(
            &launcher,
            &k_cache,
            &v_cache,
            Some(scales),
            &ints(&launcher, &[1, 1], &[0]),
            &ints(&launcher, &[2], &[0, 1]),
            &outs[0].tensor,
            &outs[1].tensor,
        )
        .unwrap();
        for out in &outs {
            assert_same("zeros", &out.read(&launcher), &[0.0; 16]);
        }
    }
}

#[test]
fn rotated_keys_are_quantised_as_they_are_stored() {
    let mut count = 0;
    // Tokens, heads, key heads, elements of a head, rotated ones.
    for case in [
        [5, 9, 3, 64, 64],
        [1, 7, 1, 80, 80],
        [4, 2, 1, 128, 32],
        [2, 3, 3, 256, 256],
        [3, 1, 2, 36, 24],
    ] {
        for dtype in Dtype::ALL {
            for layout in Layout::ALL {
                for launcher in all_launchers() {
                    if runs(&launcher, dtype) {
                        rotary_case(&launcher, case, dtype, layout);
                        count += 1;
                    }
                }
            }
        }
    }
    println!("rotary_and_store of eight bits: {count} cases");
}

fn rotary_case(
    launcher: &Launcher,
    [tokens, num_heads, heads, head_dim, rotary_dim]: [usize; 5],
    dtype: Dtype,
    layout: Layout,
) {
    let (half, row) = (rotary_dim / 2, heads * head_dim);
    let mut random = Random::new(head_dim as u64);
    let angles: Vec<f64> = (0..tokens)
        .flat_map(|p| {
            let angle = move |i: usize| p as f64 + i as f64 / 7.0;
            let cos = (0..half).map(move |i| angle(i).cos());
            cos.chain((0..half).map(move |i| angle(i).sin()))
        })
        .map(|x| Dtype::F32.round(x))
        .collect();
    let q = random.values(dtype, 3.0, tokens * num_heads * head_dim);
    let k = random.values(dtype, 3.0, tokens * row);
    let v = random.values(dtype, 3.0, tokens * row);
    let factors = [scales(heads, 2.5), scales(heads, 1.9)];
    let [k_scales, v_scales] = [0, 1].map(|i| f32s(launcher, &factors[i]));
    let shape = [2, tokens, heads, head_dim];
    let untouched = vec![0x55; 2 * tokens * row];
    let [k_cache, v_cache] = [(); 2].map(|()| codes(launcher, shape, &untouched));
    let q_shape = [tokens, num_heads, head_dim];
    let k_shape = [tokens, heads, head_dim];
    let q_out = Placed::poison(launcher, dtype, &q_shape, layout);
    let positions: Vec<i32> = (0..tokens as i32).collect();
    // The odd tokens go nowhere.
    let slots: Vec<i32> = (0..tokens as i32)
        .map(|t| {
            if t % 2 == 0 {
                2 * tokens as i32 - 1 - t
            } else {
                -1
            }
        })
        .collect();
    rotary_and_store(
        launcher,
        &Placed::new(launcher, dtype, &q_shape, layout, &q).tensor,
        &Placed::new(launcher, dtype, &k_shape, layout, &k).tensor,
        &Placed::new(launcher, dtype, &k_shape, layout.other(), &v).tensor,
        RotaryTable {
            positions: &ints(launcher, &[tokens], &positions),
            table: &Placed::dense(launcher, Dtype::F32, &[tokens, rotary_dim], &angles).tensor,
        },
        &ints(launcher, &[tokens], &slots),
        &q_out.tensor,
        &k_cache,
        &v_cache,
        Some(KvScales {
            k: &k_scales,
            v: &v_scales,
        }),
    )
    .unwrap();
    assert!(q_out.read(launcher).iter().all(|x| x.is_finite()));
    let (k_read, v_read) = (
        read_codes(launcher, &k_cache),
        read_codes(launcher, &v_cache),
    );
    for slot in 0..2 * tokens {
        let token = slots.iter().position(|&s| s == slot as i32);
        for at in 0..row {
            let (key, value) = (k_read[slot * row + at], v_read[slot * row + at]);
            let Some(token) = token else {
                assert_eq!([key, value], [0x55, 0x55], "slot {slot} was written");
                continue;
            };
            let (head, i) = (at / head_dim, at % head_dim);
            let x = |i: usize| k[token * row + head * head_dim + i];
            let angle = |i: usize| angles[token * rotary_dim + i];
            let exact = match i {
                _ if i < half => x(i) * angle(i) - x(i + half) * angle(half + i),
                _ if i < rotary_dim => x(i) * angle(i - half) + x(i - half) * angle(i),
                _ => x(i),
            };
            let scale = factors[0][head];
            // One of two codes as near, where f32 rounds past the middle.
            let error = |code: u8| (e4m3_number(code) - (exact / scale).clamp(-448.0, 448.0)).abs();
            let least = error(e4m3_code(exact / scale));
            assert!(
                error(key) <= least + 1e-4,
                "key {at} of token {token}: {key:#x}, {exact}"
            );
            let expected = stored(v[token * row + at], factors[1][head]);
            assert_eq!(value, expected, "value {at} of token {token}");
        }
    }
}
