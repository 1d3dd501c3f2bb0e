//! Small inputs that went wrong in other projects, with their answers.

use burn_paged_kernels::AttentionOptions;

use super::host::{Attended, Blocks, Heads, HostBatch, HostSequence, run_packed, run_paged};
use crate::arith::{Arith, Dtype};
use crate::compare::{assert_close, assert_same};
use crate::place::{Layout, launcher, launchers};

/// All keys score 0, so that the output is the mean of the values that a row sees.
fn flat(heads: Heads, lens: &[(usize, usize)], value: impl Fn(usize, usize) -> f64) -> HostBatch {
    let sequences = lens
        .iter()
        .map(|&(q_len, kv_len)| {
            let rows = (0..kv_len).flat_map(|key| (0..heads.num_kv_heads).map(move |h| (key, h)));
            let rows = rows.map(|(key, head)| value(key, head));
            HostSequence {
                q: vec![0.0; q_len * heads.num_heads() * heads.head_dim],
                k: vec![1.0; kv_len * heads.num_kv_heads * heads.head_dim],
                v: rows.flat_map(|x| vec![x; heads.head_dim]).collect(),
            }
        })
        .collect();
    HostBatch {
        dtype: Dtype::F32,
        heads,
        sequences,
        padding_rows: 0,
        scales: None,
    }
}

/// Both ways to hold keys, and both forms of a launch.
fn run_all(batch: &HostBatch, block_size: usize, options: &AttentionOptions) -> Vec<Attended> {
    let blocks = Blocks::shuffled(&batch.kv_lens(), block_size, false);
    let mut all = Vec::new();
    for launcher in launchers() {
        all.push(run_packed(&launcher, batch, Layout::Dense, options));
        all.push(run_paged(
            &launcher,
            batch,
            Layout::Dense,
            &blocks,
            f64::NAN,
            options,
        ));
    }
    all
}

fn close(what: &str, actual: &[f64], expected: &[f64]) {
    assert_close(what, Dtype::F32, actual, expected, expected);
}

/// A mask anchored at the top left, or with the offset of another sequence, gives other means.
#[test]
fn causal_mask_is_aligned_at_the_bottom_right_of_each_sequence() {
    let heads = Heads {
        group_size: 1,
        num_kv_heads: 1,
        head_dim: 8,
    };
    let batch = flat(heads, &[(2, 2), (2, 6), (4, 2)], |key, _| key as f64 + 1.0);
    let means = [1.0, 1.5, 3.0, 3.5, 0.0, 0.0, 1.0, 1.5];
    let lse = [1.0f64, 2.0, 5.0, 6.0, 0.0, 0.0, 1.0, 2.0].map(f64::ln);
    for (out, sums) in run_all(&batch, 4, &AttentionOptions::causal(8)) {
        let expected: Vec<f64> = means.iter().flat_map(|&m| vec![m; 8]).collect();
        close("out", &out, &expected);
        close("lse", &sums, &lse);
    }
}

/// Heads once read key head `h / num_kv_heads` or `h % num_kv_heads`, or all the first one.
#[test]
fn each_head_reads_the_key_head_of_its_group() {
    for (num_heads, num_kv_heads) in [(28, 4), (32, 2), (9, 3), (6, 6), (8, 1)] {
        let heads = Heads {
            group_size: num_heads / num_kv_heads,
            num_kv_heads,
            head_dim: 8,
        };
        let batch = flat(heads, &[(1, 3)], |_, head| head as f64 + 1.0);
        let head_of = |h: usize| (h / heads.group_size) as f64 + 1.0;
        let expected: Vec<f64> = (0..num_heads).flat_map(|h| vec![head_of(h); 8]).collect();
        for (out, _) in run_all(&batch, 2, &AttentionOptions::causal(8)) {
            close(&format!("{num_heads} over {num_kv_heads}"), &out, &expected);
        }
    }
}

/// A tile width that does not divide `head_dim` once lost the last columns.
#[test]
fn the_last_column_of_odd_heads_counts() {
    for head_dim in [64, 80, 96, 128, 256] {
        let heads = Heads {
            group_size: 1,
            num_kv_heads: 1,
            head_dim,
        };
        let mut batch = flat(heads, &[(1, 3)], |key, _| key as f64 + 1.0);
        let sequence = &mut batch.sequences[0];
        sequence.k.fill(0.0);
        for key in 0..3 {
            sequence.k[(key + 1) * head_dim - 1] = key as f64;
        }
        let last = (head_dim as f64).sqrt() * std::f64::consts::LN_2;
        sequence.q[head_dim - 1] = Dtype::F32.round(last);
        for (out, _) in run_all(&batch, 2, &AttentionOptions::causal(head_dim)) {
            close(
                &format!("head_dim {head_dim}"),
                &out,
                &vec![17.0 / 7.0; head_dim],
            );
        }
    }
}

/// Rubbish in unused slots once reached the output as weight zero times NaN.
#[test]
fn what_lies_in_unused_slots_changes_no_bit() {
    let heads = Heads {
        group_size: 3,
        num_kv_heads: 2,
        head_dim: 64,
    };
    let options = AttentionOptions::causal(64);
    for lens in [[(1, 17)], [(3, 17)]] {
        let batch = HostBatch::random(Dtype::F32, heads, &lens, 4.0);
        let blocks = Blocks::shuffled(&[17], 16, false);
        let exact = batch.attend(Arith::Exact, &options);
        let plain = batch.attend(Arith::Plain(Dtype::F32), &options);
        for launcher in launchers() {
            let run =
                |poison| run_paged(&launcher, &batch, Layout::Dense, &blocks, poison, &options);
            let clean = run(0.0);
            assert_close("out", Dtype::F32, &clean.0, &exact.0, &plain.0);
            for poison in [f64::NAN, f64::INFINITY, 1e4] {
                let other = run(poison);
                assert_same(&format!("out with {poison}"), &other.0, &clean.0);
                assert_same(&format!("lse with {poison}"), &other.1, &clean.1);
            }
        }
    }
}

/// A kernel was once chosen that could not launch when the number of keys was no multiple of 32.
#[test]
fn every_number_of_keys_launches() {
    let launcher = launcher();
    let mut count = 0;
    for head_dim in [64, 128, 256] {
        let heads = Heads {
            group_size: 4,
            num_kv_heads: 2,
            head_dim,
        };
        let options = AttentionOptions::causal(head_dim);
        for kv_len in 1..=130 {
            let batch = HostBatch::random(Dtype::F32, heads, &[(1, kv_len)], 4.0);
            let blocks = Blocks::shuffled(&[kv_len], 16, false);
            let exact = batch.attend(Arith::Exact, &options);
            let plain = batch.attend(Arith::Plain(Dtype::F32), &options);
            let packed = run_packed(&launcher, &batch, Layout::Dense, &options);
            let paged = run_paged(
                &launcher,
                &batch,
                Layout::Dense,
                &blocks,
                f64::NAN,
                &options,
            );
            for (out, lse) in [&packed, &paged] {
                let what = format!("head_dim {head_dim}, {kv_len} keys");
                assert_close(&what, Dtype::F32, out, &exact.0, &plain.0);
                assert_close(&what, Dtype::F32, lse, &exact.1, &plain.1);
                count += 1;
            }
        }
    }
    println!("attention, one row over 1 to 130 keys: {count} cases");
}

/// Padding rows of a batch that a graph was captured for.
#[test]
fn rows_past_the_last_sequence_see_nothing() {
    let heads = Heads {
        group_size: 2,
        num_kv_heads: 1,
        head_dim: 8,
    };
    let mut batch = flat(heads, &[(2, 2), (2, 4)], |key, _| key as f64 + 1.0);
    let exact = batch.attend(Arith::Exact, &AttentionOptions::causal(8));
    batch.padding_rows = 3;
    for (out, lse) in run_all(&batch, 4, &AttentionOptions::causal(8)) {
        close("out", &out[..exact.0.len()], &exact.0);
        assert_same("padding", &out[exact.0.len()..], &[0.0; 48]);
        assert_same("padding", &lse[exact.1.len()..], &[f64::NEG_INFINITY; 6]);
    }
}
