//! `silu_and_mul`, `embedding`, `greedy` and `next_tokens`.

use burn_paged_kernels::{Launcher, NextBlocks, embedding, greedy, next_tokens, silu_and_mul};

use crate::arith::{Arith, Dtype};
use crate::compare::{assert_close, assert_same};
use crate::place::{Layout, Placed, ints, launchers, read_ints, runs};
use crate::random::Random;

const LAYOUTS: [Layout; 4] = [
    Layout::Dense,
    Layout::Pitched,
    Layout::Slice,
    Layout::OddSlice,
];

#[test]
fn the_gate_is_the_first_half() {
    let mut count = 0;
    for (rows, columns) in [(1, 1), (3, 1536), (7, 72), (2, 33), (70, 16), (5, 100)] {
        for dtype in Dtype::ALL {
            for layout in LAYOUTS {
                for (launcher, scale) in launchers().into_iter().zip([2.0, 60.0]) {
                    if runs(&launcher, dtype) {
                        silu_case(&launcher, [rows, columns], dtype, layout, scale);
                        count += 1;
                    }
                }
            }
        }
    }
    println!("silu_and_mul: {count} cases");
}

fn silu_case(
    launcher: &Launcher,
    [rows, columns]: [usize; 2],
    dtype: Dtype,
    layout: Layout,
    scale: f64,
) {
    let mut random = Random::new(columns as u64);
    let mut x = random.values(dtype, scale, rows * 2 * columns);
    x[0] = dtype.round(-200.0);
    let out = Placed::poison(launcher, dtype, &[rows, columns], layout.other());
    let x_on = Placed::new(launcher, dtype, &[rows, 2 * columns], layout, &x);
    silu_and_mul(launcher, &x_on.tensor, &out.tensor).unwrap();
    let host = |arith: Arith| -> Vec<f64> {
        x.chunks_exact(2 * columns)
            .flat_map(|row| {
                let (gate, up) = row.split_at(columns);
                let silu = gate.iter().map(move |g| arith.op(g / (1.0 + (-g).exp())));
                silu.zip(up).map(move |(s, u)| arith.op(s * u))
            })
            .collect()
    };
    let what = format!("silu_and_mul [{rows}, {columns}]");
    let (exact, plain) = (host(Arith::Exact), host(Arith::Plain(dtype)));
    assert_close(&what, dtype, &out.read(launcher), &exact, &plain);
}

#[test]
fn embedding_copies_rows_and_zeroes_strangers() {
    let mut count = 0;
    for (vocab, columns) in [(1, 1), (49, 576), (7, 72), (5, 33), (9, 100)] {
        for dtype in Dtype::ALL {
            for layout in LAYOUTS {
                for launcher in launchers() {
                    if runs(&launcher, dtype) {
                        embedding_case(&launcher, vocab, columns, dtype, layout);
                        count += 1;
                    }
                }
            }
        }
    }
    println!("embedding: {count} cases");
}

fn embedding_case(launcher: &Launcher, vocab: usize, columns: usize, dtype: Dtype, layout: Layout) {
    let mut random = Random::new(columns as u64);
    let weight = random.values(dtype, 1.0, vocab * columns);
    let last = vocab as i32 - 1;
    let ids = [
        last,
        0,
        -1,
        last / 2,
        vocab as i32,
        i32::MAX,
        i32::MIN,
        last,
        last,
    ];
    let out = Placed::poison(launcher, dtype, &[ids.len(), columns], layout);
    let weight_on = Placed::new(launcher, dtype, &[vocab, columns], layout, &weight);
    embedding(
        launcher,
        &weight_on.tensor,
        &ints(launcher, &[ids.len()], &ids),
        &out.tensor,
    )
    .unwrap();
    let expected: Vec<f64> = ids
        .iter()
        .flat_map(|&id| match usize::try_from(id) {
            Ok(id) if id < vocab => weight[id * columns..(id + 1) * columns].to_vec(),
            _ => vec![0.0; columns],
        })
        .collect();
    assert_same("embedding", &out.read(launcher), &expected);
}

#[test]
fn greedy_takes_the_lowest_of_the_largest() {
    let mut count = 0;
    for (rows, vocab) in [(1, 1), (5, 33), (3, 1000), (70, 64), (2, 4099), (4, 12)] {
        for dtype in Dtype::ALL {
            for layout in LAYOUTS {
                for launcher in launchers() {
                    if runs(&launcher, dtype) {
                        greedy_case(&launcher, rows, vocab, dtype, layout);
                        count += 1;
                    }
                }
            }
        }
    }
    println!("greedy: {count} cases");
}

/// Few distinct values, so that ties are the rule; some rows broken, some with −inf.
fn greedy_case(launcher: &Launcher, rows: usize, vocab: usize, dtype: Dtype, layout: Layout) {
    let mut random = Random::new((rows * vocab) as u64);
    let mut logits: Vec<f64> = (0..rows * vocab)
        .map(|_| random.below(40) as f64 - 60.0)
        .collect();
    for (index, row) in logits.chunks_exact_mut(vocab).enumerate() {
        match index % 7 {
            1 => row[random.below(vocab)] = f64::NAN,
            2 => row[random.below(vocab)] = f64::INFINITY,
            3 => row.fill(f64::NEG_INFINITY),
            4 => {
                row.fill(f64::NEG_INFINITY);
                row[vocab - 1] = dtype.round(-1e4);
            }
            5 => row[random.below(vocab)] = f64::NEG_INFINITY,
            _ => {}
        }
    }
    let logits_on = Placed::new(launcher, dtype, &[rows, vocab], layout, &logits);
    let ids = ints(launcher, &[rows], &vec![-7; rows]);
    greedy(launcher, &logits_on.tensor, &ids).unwrap();

    let expected: Vec<i32> = logits
        .chunks_exact(vocab)
        .map(lowest_of_the_largest)
        .collect();
    assert_eq!(
        read_ints(launcher, &ids),
        expected,
        "[{rows}, {vocab}] {dtype:?} {layout:?}"
    );
}

fn lowest_of_the_largest(row: &[f64]) -> i32 {
    let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let is_sound = row.iter().all(|&x| x < f64::INFINITY) && largest > f64::NEG_INFINITY;
    match is_sound {
        true => row.iter().position(|&x| x == largest).unwrap() as i32,
        false => -1,
    }
}

#[test]
fn greedy_on_rows_without_a_number_gives_none() {
    for launcher in launchers() {
        let logits = Placed::poison(&launcher, Dtype::F32, &[3, 20], Layout::Dense);
        let ids = ints(&launcher, &[3], &[-7; 3]);
        greedy(&launcher, &logits.tensor, &ids).unwrap();
        assert_eq!(read_ints(&launcher, &ids), [-1; 3]);
    }
}

#[test]
fn rows_without_a_token_go_on_with_the_first() {
    for launcher in launchers() {
        for num_rows in [1, 5, 300] {
            let ids: Vec<i32> = (0..num_rows).map(|row| row * 7 % 11 - 2).collect();
            let shape = [num_rows as usize];
            let tokens = ints(&launcher, &shape, &vec![77; shape[0]]);
            next_tokens(&launcher, &ints(&launcher, &shape, &ids), &tokens, None).unwrap();
            let expected: Vec<i32> = ids.iter().map(|id| (*id).max(0)).collect();
            assert_eq!(read_ints(&launcher, &tokens), expected);
        }
    }
}

/// Blocks of 5 tokens, three for a sequence. Of these rows, the first stays in its block, the second begins one, the third is
/// padding, and the last two have positions that a table of three blocks has no entry for.
#[test]
fn the_block_of_a_token_is_written_where_the_table_has_its_position() {
    for launcher in launchers() {
        let of = |values: [i32; 5]| ints(&launcher, &[5], &values);
        let tokens = of([77; 5]);
        let table: Vec<i32> = (100..115).collect();
        let table = ints(&launcher, &[5, 3], &table);
        let blocks = NextBlocks {
            positions: &of([4, 10, 0, 15, -1]),
            slots: &of([9 * 5 + 4, 200_000 * 5, -1, 35, 40]),
            table: &table,
            block_size: 5,
        };
        next_tokens(&launcher, &of([3, -1, 0, 8, 9]), &tokens, Some(blocks)).unwrap();
        assert_eq!(read_ints(&launcher, &tokens), [3, 0, 0, 8, 9]);
        let mut expected: Vec<i32> = (100..115).collect();
        (expected[0], expected[5]) = (9, 200_000);
        assert_eq!(read_ints(&launcher, &table), expected);
    }
}
