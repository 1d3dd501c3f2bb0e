//! `sample`.

use burn_paged_kernels::{Launcher, SAMPLE_WORDS, greedy, sample};

use crate::arith::Dtype;
use crate::place::{Layout, Placed, ints, launcher, launchers, read_ints, runs};
use crate::random::Random;

/// The options of one row.
#[derive(Clone, Copy, Debug)]
struct Options {
    temperature: f32,
    top_k: i32,
    top_p: f32,
    min_p: f32,
    seed: u64,
    draw: u32,
}

/// Without filters.
const FREE: Options = options(1.0, 0, 1.0, 0.0);

const fn options(temperature: f32, top_k: i32, top_p: f32, min_p: f32) -> Options {
    Options {
        temperature,
        top_k,
        top_p,
        min_p,
        seed: 7,
        draw: 0,
    }
}

/// Each filter alone and together, at temperatures that show its threshold: hot rows are nearly
/// flat, so that a set of kept tokens that is off by one soon gives another token.
const TABLE: [Options; 32] = [
    options(0.0, 0, 1.0, 0.0),
    options(-1.0, 40, 0.5, 0.1),
    options(1.0, 1, 1.0, 0.0),
    options(1.0, 0, 0.0, 0.0),
    FREE,
    options(0.7, 0, 1.0, 0.0),
    options(30.0, 0, 1.0, 0.0),
    options(1e-3, 0, 1.0, 0.0),
    options(1e-40, 0, 1.0, 0.0),
    options(1e30, 0, 1.0, 0.0),
    options(30.0, 2, 1.0, 0.0),
    options(30.0, 5, 1.0, 0.0),
    options(30.0, 32, 1.0, 0.0),
    options(30.0, 99, 1.0, 0.0),
    options(30.0, i32::MAX, 1.0, 0.0),
    options(30.0, -3, 1.0, 0.0),
    options(30.0, 0, 0.01, 0.0),
    options(30.0, 0, 0.1, 0.0),
    options(30.0, 0, 0.5, 0.0),
    options(30.0, 0, 0.9, 0.0),
    options(2.0, 0, 0.99, 0.0),
    options(1.0, 0, 1e-9, 0.0),
    options(1.0, 0, 0.999_999_9, 0.0),
    options(1.0, 0, 1.5, -0.5),
    options(1.0, 0, 1.0, 0.05),
    options(30.0, 0, 1.0, 0.9),
    options(30.0, 0, 1.0, 1.0),
    options(30.0, 0, 1.0, 2.0),
    options(0.8, 20, 0.9, 0.0),
    options(30.0, 7, 0.5, 0.0),
    options(1.3, 50, 0.95, 0.05),
    options(30.0, 60, 0.6, 0.8),
];

impl Options {
    fn words(&self) -> [i32; SAMPLE_WORDS] {
        let float = |x: f32| x.to_bits() as i32;
        [
            float(self.temperature),
            self.top_k,
            float(self.top_p),
            float(self.min_p),
            self.seed as i32,
            (self.seed >> 32) as i32,
            self.draw as i32,
            -1,
        ]
    }
}

/// The token of a row, and the scores of those that the filters keep: by sorting, with
/// probabilities in f64.
fn host(logits: &[f32], options: &Options) -> (i32, Vec<f32>) {
    let mut scores = vec![f32::NEG_INFINITY; logits.len()];
    if logits.iter().any(|x| x.is_nan() || *x == f32::INFINITY) {
        return (-1, scores);
    }
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        return (-1, scores);
    }
    let best = logits.iter().position(|&x| x == max).unwrap();
    if options.temperature <= 0.0 || options.top_k == 1 || options.top_p <= 0.0 {
        return (best as i32, scores);
    }
    let scaled: Vec<f32> = logits
        .iter()
        .map(|x| (x - max) / options.temperature)
        .collect();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| scaled[b].partial_cmp(&scaled[a]).unwrap().then(a.cmp(&b)));
    if options.top_k > 0 && (options.top_k as usize) < order.len() {
        let kth = scaled[order[options.top_k as usize - 1]];
        order.retain(|&i| scaled[i] >= kth);
    }
    order.retain(|&i| scaled[i] > f32::NEG_INFINITY);
    if options.top_p < 1.0 {
        let weight = |i: usize| f64::from(scaled[i]).exp();
        let total: f64 = order.iter().map(|&i| weight(i)).sum();
        let mut sum = 0.0;
        let mut reached = false;
        order.retain(|&i| {
            let keep = !reached;
            sum += weight(i);
            reached |= sum >= f64::from(options.top_p) * total;
            keep
        });
    }
    if options.min_p > 0.0 {
        order.retain(|&i| scaled[i] >= options.min_p.ln());
    }
    for &i in &order {
        scores[i] = scaled[i] + gumbel(options, i as u32);
    }
    let top = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    match top {
        f32::NEG_INFINITY => (best as i32, scores),
        _ => (
            scores.iter().position(|&x| x == top).unwrap() as i32,
            scores,
        ),
    }
}

fn gumbel(options: &Options, token: u32) -> f32 {
    let words = [
        options.seed as u32,
        (options.seed >> 32) as u32,
        options.draw,
        token,
    ];
    let uniform = (f64::from(pcg4d(words)[0] >> 9) + 0.5) / f64::from(1 << 23);
    -(-uniform.ln()).ln() as f32
}

fn pcg4d(words: [u32; 4]) -> [u32; 4] {
    let mix = |v: [u32; 4]| {
        let [mut x, mut y, mut z, mut w] = v;
        x = x.wrapping_add(y.wrapping_mul(w));
        y = y.wrapping_add(z.wrapping_mul(x));
        z = z.wrapping_add(x.wrapping_mul(y));
        w = w.wrapping_add(y.wrapping_mul(z));
        [x, y, z, w]
    };
    let first = mix(words.map(|x| x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223)));
    mix(first.map(|x| x ^ (x >> 16)))
}

fn draw_ids(
    launcher: &Launcher,
    dtype: Dtype,
    vocab: usize,
    layout: Layout,
    logits: &[f64],
    options: &[Options],
) -> Vec<i32> {
    let rows = options.len();
    let words: Vec<i32> = options.iter().flat_map(Options::words).collect();
    let logits = Placed::new(launcher, dtype, &[rows, vocab], layout, logits);
    let ids = ints(launcher, &[rows], &vec![-7; rows]);
    let words = ints(launcher, &[rows, SAMPLE_WORDS], &words);
    sample(launcher, &logits.tensor, &words, &ids).unwrap();
    read_ints(launcher, &ids)
}

/// Fails unless ids are those of the host, up to scores that rounding cannot tell apart.
fn assert_ids(what: &str, found: &[i32], logits: &[f64], options: &[Options]) {
    let vocab = logits.len() / options.len();
    for (row, (&id, options)) in found.iter().zip(options).enumerate() {
        let row_logits: Vec<f32> = logits[row * vocab..(row + 1) * vocab]
            .iter()
            .map(|&x| x as f32)
            .collect();
        let (expected, scores) = host(&row_logits, options);
        let is_close = || {
            let score = |id: i32| usize::try_from(id).ok().and_then(|id| scores.get(id));
            match (score(id), score(expected)) {
                (Some(a), Some(b)) => (a - b).abs() <= 4.0 * f32::EPSILON * b.abs().max(1.0),
                _ => false,
            }
        };
        assert!(
            id == expected || is_close(),
            "{what}: row {row} gives {id}, expected {expected}, {options:?}"
        );
    }
}

#[test]
fn ids_are_those_of_sorting_on_the_host() {
    let mut count = 0;
    for (vocab, layout) in [
        (1, Layout::Dense),
        (2, Layout::Dense),
        (33, Layout::OddSlice),
        (100, Layout::Slice),
        (1000, Layout::Pitched),
        (4099, Layout::Dense),
    ] {
        for dtype in Dtype::ALL {
            let [own, fine] = launchers();
            // Units that meet at a barrier are slow on a processor.
            let fine_draws = if vocab <= 100 { 1 } else { 0 };
            for (launcher, draws) in [(own, 6), (fine, fine_draws)] {
                if draws > 0 && runs(&launcher, dtype) {
                    table_case(&launcher, vocab, dtype, layout, draws);
                    count += 1;
                }
            }
        }
    }
    println!("sample: {count} cases of the whole table");
}

/// Every entry of the table on logits of several spreads: uniform ones, some with ties everywhere,
/// some with many tokens ruled out.
fn table_case(launcher: &Launcher, vocab: usize, dtype: Dtype, layout: Layout, draws: usize) {
    let mut random = Random::new(vocab as u64);
    let (mut logits, mut options) = (Vec::new(), Vec::new());
    for draw in 0..draws {
        for entry in TABLE {
            options.push(Options {
                seed: random.bits(),
                draw: draw as u32,
                ..entry
            });
            let bound = [0.5, 4.0, 25.0][random.below(3)];
            let kind = random.below(3);
            let mut row = random.values(dtype, bound, vocab);
            for x in &mut row {
                if kind == 1 {
                    *x = dtype.round((*x * 2.0).round() / 2.0);
                }
                if kind == 2 && random.below(3) > 0 {
                    *x = f64::NEG_INFINITY;
                }
            }
            row[random.below(vocab)] = 0.25;
            logits.extend(row);
        }
    }
    let found = draw_ids(launcher, dtype, vocab, layout, &logits, &options);
    assert_ids(
        &format!("sample {vocab} {dtype:?} {layout:?}"),
        &found,
        &logits,
        &options,
    );
}

/// A vocabulary as models have it, in which f32 sums of weights lose digits.
#[test]
fn a_large_vocabulary_gives_the_ids_of_the_host() {
    let vocab = 151_939;
    let launcher = launcher();
    let entries = [
        FREE,
        options(30.0, 40, 1.0, 0.0),
        options(30.0, 100_003, 1.0, 0.0),
        options(1.0, 0, 0.9, 0.0),
        options(30.0, 0, 0.5, 0.0),
        options(0.8, 50, 0.95, 0.02),
    ];
    let mut random = Random::new(3);
    for dtype in [Dtype::F32, Dtype::Bf16] {
        if runs(&launcher, dtype) {
            let logits = random.values(dtype, 12.0, entries.len() * vocab);
            let found = draw_ids(&launcher, dtype, vocab, Layout::Dense, &logits, &entries);
            assert_ids(&format!("{vocab} {dtype:?}"), &found, &logits, &entries);
        }
    }
}

/// The threshold lies among weights that are small beside the first, and draws are those that a
/// threshold moved by a two-thousandth would change.
#[test]
fn small_weights_add_up_whatever_the_number_of_units() {
    let vocab = 97;
    let mut random = Random::new(9);
    let (mut logits, mut entries) = (Vec::new(), Vec::new());
    for step in 0..24 {
        let mut row = random.values(Dtype::F32, 0.5, vocab);
        row[step] = 9.0;
        let on_host: Vec<f32> = row.iter().map(|&x| x as f32).collect();
        let top_p = 0.9895 + 0.0004 * step as f32;
        let moved = if step % 2 == 0 { 5e-4 } else { -5e-4 };
        let near = (0..100_000)
            .map(|draw| Options {
                top_p,
                draw,
                ..FREE
            })
            .find(|entry| {
                let other = Options {
                    top_p: top_p + moved,
                    ..*entry
                };
                host(&on_host, entry).0 != host(&on_host, &other).0
            });
        entries.push(near.expect("a draw near the threshold"));
        logits.extend(row);
    }
    for launcher in launchers() {
        let found = draw_ids(
            &launcher,
            Dtype::F32,
            vocab,
            Layout::Dense,
            &logits,
            &entries,
        );
        assert_ids("small weights", &found, &logits, &entries);
    }
}

#[test]
fn draws_follow_the_softmax() {
    let logits = [2.0, 1.0, f64::NEG_INFINITY, 0.5, -1.0, 1.0, -3.0];
    let temperature = 0.9f32;
    let draws = 20_000;
    let options: Vec<Options> = (0..draws)
        .map(|draw| Options {
            temperature,
            draw,
            ..FREE
        })
        .collect();
    let launcher = launcher();
    let all = logits.repeat(draws as usize);
    let found = draw_ids(
        &launcher,
        Dtype::F32,
        logits.len(),
        Layout::Dense,
        &all,
        &options,
    );
    let weights = logits.map(|x| (x / f64::from(temperature)).exp());
    let total: f64 = weights.iter().sum();
    let mut chi_square = 0.0;
    for (token, weight) in weights.iter().enumerate() {
        let count = found.iter().filter(|&&id| id == token as i32).count() as f64;
        let expected = f64::from(draws) * weight / total;
        match expected {
            0.0 => assert_eq!(count, 0.0),
            _ => chi_square += (count - expected).powi(2) / expected,
        }
    }
    // 99.99 % of five degrees of freedom.
    assert!(chi_square < 25.7, "{chi_square}");
}

#[test]
fn top_k_of_one_is_greedy() {
    for launcher in launchers() {
        let (rows, vocab) = (9, 77);
        let mut random = Random::new(5);
        let logits: Vec<f64> = (0..rows * vocab).map(|_| random.below(9) as f64).collect();
        let entries: Vec<Options> = (0..rows as u64)
            .map(|seed| Options {
                top_k: 1,
                seed,
                ..FREE
            })
            .collect();
        let found = draw_ids(
            &launcher,
            Dtype::F32,
            vocab,
            Layout::Dense,
            &logits,
            &entries,
        );
        let logits = Placed::dense(&launcher, Dtype::F32, &[rows, vocab], &logits);
        let ids = ints(&launcher, &[rows], &vec![-7; rows]);
        greedy(&launcher, &logits.tensor, &ids).unwrap();
        assert_eq!(found, read_ints(&launcher, &ids));
    }
}

#[test]
fn broken_rows_have_no_token_and_ruled_out_tokens_never_win() {
    let none = f64::NEG_INFINITY;
    for launcher in launchers() {
        let vocab = 11;
        let mut rows = vec![vec![1.0; vocab]; 4];
        rows[0][10] = f64::NAN;
        rows[1][4] = f64::INFINITY;
        rows[2] = vec![none; vocab];
        rows[3] = vec![none; vocab];
        rows[3][7] = -1e30;
        let hot = [
            options(1e30, 0, 1.0, 0.0),
            options(30.0, 5, 0.7, 0.1),
            options(0.0, 0, 1.0, 0.0),
        ];
        for entry in hot {
            let found = draw_ids(
                &launcher,
                Dtype::F32,
                vocab,
                Layout::Dense,
                &rows.concat(),
                &[entry; 4],
            );
            assert_eq!(found, [-1, -1, -1, 7], "{entry:?}");
        }
        let mut half = vec![none; vocab];
        half[1] = 0.0;
        half[6] = -9.0;
        let draws: Vec<Options> = (0..12).map(|draw| Options { draw, ..hot[0] }).collect();
        let found = draw_ids(
            &launcher,
            Dtype::F32,
            vocab,
            Layout::Dense,
            &half.repeat(12),
            &draws,
        );
        assert!(found.iter().all(|id| [1, 6].contains(id)), "{found:?}");
        assert!(found.contains(&1) && found.contains(&6), "{found:?}");
    }
}

#[test]
fn seeds_and_draws_differ_and_repeat() {
    let launcher = launcher();
    let run = |change: fn(usize, &mut Options)| {
        let mut entries = [options(1.0, 0, 1.0, 0.0); 40];
        entries
            .iter_mut()
            .enumerate()
            .for_each(|(row, entry)| change(row, entry));
        draw_ids(
            &launcher,
            Dtype::F32,
            50,
            Layout::Dense,
            &[0.0; 40 * 50],
            &entries,
        )
    };
    let same = run(|_, _| ());
    assert!(same.iter().all(|&id| id == same[0]), "{same:?}");
    let draws = run(|row, entry| entry.draw = row as u32);
    let seeds = run(|row, entry| entry.seed = row as u64);
    let high = run(|row, entry| entry.seed = 7 + ((row as u64) << 32));
    assert_eq!(draws, run(|row, entry| entry.draw = row as u32));
    for (what, ids) in [("draws", &draws), ("seeds", &seeds), ("high", &high)] {
        let mut distinct = ids.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert!(distinct.len() > 15, "{what}: {ids:?}");
    }
    assert_ne!(draws, seeds);
    assert_ne!(seeds, high);
}
