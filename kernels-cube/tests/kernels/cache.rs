//! `store_kv` and `gather_kv`.

use burn_paged_kernels::{DeviceFacts, Launcher, gather_kv, store_kv};

use crate::arith::Dtype;
use crate::compare::assert_same;
use crate::place::{Layout, Placed, ints, launcher, launchers, runs};
use crate::random::Random;

struct Case {
    num_tokens: usize,
    num_kv_heads: usize,
    head_dim: usize,
    block_size: usize,
    num_blocks: usize,
}

const CASES: [Case; 6] = [
    Case {
        num_tokens: 7,
        num_kv_heads: 3,
        head_dim: 64,
        block_size: 16,
        num_blocks: 3,
    },
    Case {
        num_tokens: 1,
        num_kv_heads: 2,
        head_dim: 72,
        block_size: 5,
        num_blocks: 4,
    },
    Case {
        num_tokens: 33,
        num_kv_heads: 1,
        head_dim: 80,
        block_size: 1,
        num_blocks: 50,
    },
    Case {
        num_tokens: 20,
        num_kv_heads: 8,
        head_dim: 128,
        block_size: 64,
        num_blocks: 2,
    },
    Case {
        num_tokens: 5,
        num_kv_heads: 2,
        head_dim: 256,
        block_size: 5,
        num_blocks: 2,
    },
    Case {
        num_tokens: 9,
        num_kv_heads: 2,
        head_dim: 33,
        block_size: 4,
        num_blocks: 5,
    },
];

#[test]
fn store_writes_the_named_slots_and_no_other() {
    let mut count = 0;
    for case in &CASES {
        for dtype in Dtype::ALL {
            for layout in Layout::ALL {
                for launcher in launchers() {
                    if runs(&launcher, dtype) {
                        store_case(&launcher, case, dtype, layout);
                        count += 1;
                    }
                }
            }
        }
    }
    println!("store_kv: {count} cases");
}

fn store_case(launcher: &Launcher, case: &Case, dtype: Dtype, layout: Layout) {
    let &Case {
        num_tokens,
        num_kv_heads,
        head_dim,
        block_size,
        num_blocks,
    } = case;
    let mut random = Random::new(num_tokens as u64);
    let packed = [num_tokens, num_kv_heads, head_dim];
    let row = num_kv_heads * head_dim;
    let num_slots = num_blocks * block_size;
    let k = random.values(dtype, 1.0, num_tokens * row);
    let v = random.values(dtype, 1.0, num_tokens * row);
    let mut slots: Vec<i32> = random
        .shuffled(num_slots)
        .iter()
        .map(|&s| s as i32)
        .collect();
    slots.truncate(num_tokens);
    for (i, stray) in [-1, num_slots as i32, i32::MIN, i32::MAX]
        .into_iter()
        .enumerate()
    {
        if 2 * i + 1 < num_tokens {
            slots[2 * i + 1] = stray;
        }
    }

    let shape = [num_blocks, block_size, num_kv_heads, head_dim];
    let mut k_cache = random.values(dtype, 1.0, num_slots * row);
    let mut v_cache = random.values(dtype, 1.0, num_slots * row);
    let k_cache_on = Placed::dense(launcher, dtype, &shape, &k_cache);
    let v_cache_on = Placed::dense(launcher, dtype, &shape, &v_cache);
    let k_on = Placed::new(launcher, dtype, &packed, layout, &k);
    let v_on = Placed::new(launcher, dtype, &packed, layout.other(), &v);
    let slots_on = ints(launcher, &[num_tokens], &slots);
    store_kv(
        launcher,
        &k_on.tensor,
        &v_on.tensor,
        &k_cache_on.tensor,
        &v_cache_on.tensor,
        None,
        &slots_on,
    )
    .unwrap();

    for (token, &slot) in slots.iter().enumerate() {
        if (0..num_slots as i32).contains(&slot) {
            let (from, to) = (token * row, slot as usize * row);
            k_cache[to..to + row].copy_from_slice(&k[from..from + row]);
            v_cache[to..to + row].copy_from_slice(&v[from..from + row]);
        }
    }
    assert_same("k_cache", &k_cache_on.read(launcher), &k_cache);
    assert_same("v_cache", &v_cache_on.read(launcher), &v_cache);
}

/// A padding row once overwrote the last slot of a cache, because -1 was taken as an index.
#[test]
fn slot_minus_one_writes_nothing() {
    let launcher = launcher();
    let rows = |count: usize| {
        (0..count)
            .flat_map(|t| vec![t as f64 + 1.0; 8])
            .collect::<Vec<_>>()
    };
    let cache = || Placed::dense(&launcher, Dtype::F32, &[4, 4, 1, 8], &[0.0; 128]);
    let (k_cache, v_cache) = (cache(), cache());
    for (slots, count) in [(vec![0, -1, 5, -1], 4), (vec![16], 1)] {
        let k = Placed::dense(&launcher, Dtype::F32, &[count, 1, 8], &rows(count));
        let slots = ints(&launcher, &[count], &slots);
        store_kv(
            &launcher,
            &k.tensor,
            &k.tensor,
            &k_cache.tensor,
            &v_cache.tensor,
            None,
            &slots,
        )
        .unwrap();
    }
    let mut expected = vec![0.0; 128];
    expected[..8].fill(1.0);
    expected[40..48].fill(3.0);
    assert_same("k_cache", &k_cache.read(&launcher), &expected);
    assert_same("v_cache", &v_cache.read(&launcher), &expected);
}

/// More tokens than a grid axis holds on some devices.
#[test]
fn store_of_many_tokens_is_split_over_the_grid() {
    let base = launcher();
    let facts = DeviceFacts {
        max_cube_count: (65_535, 65_535, 65_535),
        ..base.facts().clone()
    };
    let launcher = Launcher::with_facts(base.client().clone(), facts);
    let num_tokens = 70_000 * launcher.facts().num_cpu_cores.unwrap_or(1) as usize;
    let values: Vec<f64> = (0..num_tokens).map(|t| t as f64).collect();
    let k = Placed::dense(&launcher, Dtype::F32, &[num_tokens, 1, 1], &values);
    let k_cache = Placed::poison(&launcher, Dtype::F32, &[num_tokens, 1, 1, 1], Layout::Dense);
    let v_cache = Placed::poison(&launcher, Dtype::F32, &[num_tokens, 1, 1, 1], Layout::Dense);
    let reversed: Vec<i32> = (0..num_tokens as i32).rev().collect();
    let slots = ints(&launcher, &[num_tokens], &reversed);
    store_kv(
        &launcher,
        &k.tensor,
        &k.tensor,
        &k_cache.tensor,
        &v_cache.tensor,
        None,
        &slots,
    )
    .unwrap();
    let expected: Vec<f64> = values.into_iter().rev().collect();
    assert_same("k_cache", &k_cache.read(&launcher), &expected);
    assert_same("v_cache", &v_cache.read(&launcher), &expected);
}

#[test]
fn gather_reads_each_sequence_out_of_its_blocks() {
    let mut count = 0;
    for (kv_heads, head_dim, block_size) in [
        (3, 64, 16),
        (2, 72, 5),
        (1, 80, 1),
        (2, 128, 64),
        (1, 256, 3),
        (2, 33, 4),
    ] {
        for dtype in Dtype::ALL {
            for layout in Layout::ALL {
                for launcher in launchers() {
                    if runs(&launcher, dtype) {
                        gather_case(&launcher, kv_heads, head_dim, block_size, dtype, layout);
                        count += 1;
                    }
                }
            }
        }
    }
    println!("gather_kv: {count} cases");
}

fn gather_case(
    launcher: &Launcher,
    num_kv_heads: usize,
    head_dim: usize,
    block_size: usize,
    dtype: Dtype,
    layout: Layout,
) {
    let lens = [0, 17, 1, 0, block_size, 2 * block_size + 1, 0];
    let max_blocks = lens
        .iter()
        .map(|len| len.div_ceil(block_size))
        .max()
        .unwrap()
        + 1;
    let used: usize = lens.iter().map(|len| len.div_ceil(block_size)).sum();
    let num_blocks = used + 3;
    let row = num_kv_heads * head_dim;
    let mut random = Random::new(row as u64);

    let mut free = random.shuffled(num_blocks);
    let mut table = vec![i32::MAX; lens.len() * max_blocks];
    for (sequence, len) in lens.iter().enumerate() {
        for block in 0..len.div_ceil(block_size) {
            table[sequence * max_blocks + block] = free.pop().unwrap() as i32;
        }
    }
    // A sequence shares its first block with an earlier one, and has one block that is none.
    table[4 * max_blocks] = table[max_blocks];
    table[5 * max_blocks + 1] = -3;

    let k_cache = random.values(dtype, 1.0, num_blocks * block_size * row);
    let v_cache = random.values(dtype, 1.0, num_blocks * block_size * row);
    let mut cu_seqlens = vec![0i32];
    let (mut k, mut v) = (Vec::new(), Vec::new());
    for (sequence, &len) in lens.iter().enumerate() {
        for position in 0..len {
            match usize::try_from(table[sequence * max_blocks + position / block_size]) {
                Ok(block) => {
                    let from = (block * block_size + position % block_size) * row;
                    k.extend_from_slice(&k_cache[from..from + row]);
                    v.extend_from_slice(&v_cache[from..from + row]);
                }
                Err(_) => {
                    k.extend(vec![0.0; row]);
                    v.extend(vec![0.0; row]);
                }
            }
        }
        cu_seqlens.push(cu_seqlens[sequence] + len as i32);
    }
    // Two rows past the last sequence.
    k.extend(vec![0.0; 2 * row]);
    v.extend(vec![0.0; 2 * row]);

    let shape = [num_blocks, block_size, num_kv_heads, head_dim];
    let packed = [k.len() / row, num_kv_heads, head_dim];
    let k_on = Placed::poison(launcher, dtype, &packed, layout);
    let v_on = Placed::poison(launcher, dtype, &packed, layout.other());
    gather_kv(
        launcher,
        &Placed::dense(launcher, dtype, &shape, &k_cache).tensor,
        &Placed::dense(launcher, dtype, &shape, &v_cache).tensor,
        None,
        &ints(launcher, &[lens.len(), max_blocks], &table),
        &ints(launcher, &[lens.len() + 1], &cu_seqlens),
        &k_on.tensor,
        &v_on.tensor,
    )
    .unwrap();
    assert_same("k", &k_on.read(launcher), &k);
    assert_same("v", &v_on.read(launcher), &v);
}

/// Wrong tables on the device give zeros, not stray reads.
#[test]
fn gather_with_a_short_table_gives_zeros() {
    let launcher = launcher();
    let cache = || Placed::dense(&launcher, Dtype::F32, &[2, 2, 1, 4], &[1.0; 16]);
    let out = || Placed::poison(&launcher, Dtype::F32, &[5, 1, 4], Layout::Dense);
    let (k, v) = (out(), out());
    gather_kv(
        &launcher,
        &cache().tensor,
        &cache().tensor,
        None,
        &ints(&launcher, &[1, 1], &[1]),
        &ints(&launcher, &[2], &[0, 5]),
        &k.tensor,
        &v.tensor,
    )
    .unwrap();
    let expected: Vec<f64> = (0..20).map(|i| if i < 8 { 1.0 } else { 0.0 }).collect();
    assert_same("k", &k.read(&launcher), &expected);
    assert_same("v", &v.read(&launcher), &expected);
}
