//! Attention values worked out by hand, and values computed by PyTorch: they pin the reference as well as the
//! implementations.

use burn::tensor::{DType, Device, Tensor};
use burn_paged::{
    AttentionOptions, AttentionOutput, CuSeqlens, reference, varlen_attention_with_lse,
};

use crate::{
    compare::assert_close,
    devices::{devices, host, is_jit, tensor},
};

type Attend = fn(
    Tensor<3>,
    Tensor<3>,
    Tensor<3>,
    &CuSeqlens,
    &CuSeqlens,
    AttentionOptions,
) -> AttentionOutput;

/// The implementation under test and the reference; the latter needs Burn's own matrix product, which finds no kernel on
/// the JIT without tuning.
fn both(name: &str) -> Vec<(&'static str, Attend)> {
    let mut both: Vec<(&'static str, Attend)> = vec![("op", varlen_attention_with_lse)];
    if !is_jit(name) {
        both.push(("reference", reference::varlen_attention));
    }
    both
}

fn cu_seqlens(values: &[i32], device: &Device) -> CuSeqlens {
    CuSeqlens::new(values.to_vec(), device).unwrap()
}

/// With `q = 0` every visible key weighs the same, so a row gives the mean of the values that it sees.
#[test]
fn the_causal_mask_is_bottom_right_and_per_sequence() {
    for (name, device) in devices() {
        for (implementation, attend) in both(name) {
            let q = Tensor::zeros([8, 1, 8], &device);
            let k = Tensor::ones([10, 1, 8], &device);
            let rows = [1.0, 2.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1.0, 2.0];
            let v = rows.iter().flat_map(|value| [*value; 8]).collect();
            let v = tensor(v, [10, 1, 8], DType::F32, &device);
            let cu_q = cu_seqlens(&[0, 2, 4, 8], &device);
            let cu_k = cu_seqlens(&[0, 2, 8, 10], &device);
            let found = attend(q, k, v, &cu_q, &cu_k, AttentionOptions::causal());
            let what = format!("{name}, {implementation}");
            let means = [1.0, 1.5, 3.0, 3.5, 0.0, 0.0, 1.0, 1.5];
            let expected: Vec<f32> = means.iter().flat_map(|mean| [*mean; 8]).collect();
            assert_close(&what, &host(&found.out), &expected, None, DType::F32);
            let ln = |count: f32| count.ln();
            let none = f32::NEG_INFINITY;
            let lse = [0.0, ln(2.0), ln(5.0), ln(6.0), none, none, 0.0, ln(2.0)];
            assert_close(&what, &host(&found.lse), &lse, None, DType::F32);
        }
    }
}

#[test]
fn query_heads_share_key_heads_in_groups() {
    for (name, device) in devices() {
        for (implementation, attend) in both(name) {
            for (num_heads, num_kv_heads) in [(28, 4), (32, 2), (9, 3), (6, 6), (8, 1)] {
                let q = Tensor::zeros([1, num_heads, 8], &device);
                let k = Tensor::ones([3, num_kv_heads, 8], &device);
                let v: Vec<f32> = (0..3)
                    .flat_map(|_| (0..num_kv_heads).flat_map(|head| [(head + 1) as f32; 8]))
                    .collect();
                let v = tensor(v, [3, num_kv_heads, 8], DType::F32, &device);
                let (cu_q, cu_k) = (cu_seqlens(&[0, 1], &device), cu_seqlens(&[0, 3], &device));
                let found = attend(q, k, v, &cu_q, &cu_k, AttentionOptions::causal());
                let group = num_heads / num_kv_heads;
                let expected: Vec<f32> = (0..num_heads)
                    .flat_map(|head| [(head / group + 1) as f32; 8])
                    .collect();
                let what = format!("{name}, {implementation}, {num_heads} over {num_kv_heads}");
                assert_close(&what, &host(&found.out), &expected, None, DType::F32);
            }
        }
    }
}

/// Scores `j · ln 2` for keys 0, 1, 2 give weights 1/7, 2/7, 4/7; only the last element of a head carries them.
#[test]
fn every_element_of_odd_head_sizes_counts() {
    for (name, device) in devices() {
        for (implementation, attend) in both(name) {
            let sizes: &[usize] = if is_jit(name) {
                &[5, 80]
            } else {
                &[5, 64, 72, 80, 96, 128, 256]
            };
            for &head_dim in sizes {
                let mut q = vec![0.0; head_dim];
                q[head_dim - 1] = (head_dim as f32).sqrt() * 2f32.ln();
                let mut k = vec![0.0; 3 * head_dim];
                (0..3).for_each(|j| k[j * head_dim + head_dim - 1] = j as f32);
                let v = (0..3)
                    .flat_map(|j| vec![(j + 1) as f32; head_dim])
                    .collect();
                let rows = |values, rows| tensor(values, [rows, 1, head_dim], DType::F32, &device);
                let (cu_q, cu_k) = (cu_seqlens(&[0, 1], &device), cu_seqlens(&[0, 3], &device));
                let options = AttentionOptions::causal();
                let found = attend(rows(q, 1), rows(k, 3), rows(v, 3), &cu_q, &cu_k, options);
                let what = format!("{name}, {implementation}, head_dim {head_dim}");
                let expected = vec![17.0 / 7.0; head_dim];
                assert_close(&what, &host(&found.out), &expected, None, DType::F32);
            }
        }
    }
}

/// Values from `torch.nn.functional.scaled_dot_product_attention` in f64, see `tools/reference/make_attention_fixture.py`.
#[test]
fn attention_agrees_with_pytorch() {
    let fixture = include_str!("fixtures/attention.txt");
    let mut lines = fixture.lines().filter(|line| !line.starts_with('#'));
    let mut next = || -> Vec<f32> {
        let line = lines.next().expect("the fixture has a line per tensor");
        line.split_whitespace()
            .map(|value| value.parse().unwrap())
            .collect()
    };
    let (q, k, v, out, lse) = (next(), next(), next(), next(), next());
    for (name, device) in devices() {
        for (implementation, attend) in both(name) {
            let q = tensor(q.clone(), [5, 4, 6], DType::F32, &device);
            let k = tensor(k.clone(), [9, 2, 6], DType::F32, &device);
            let v = tensor(v.clone(), [9, 2, 6], DType::F32, &device);
            let (cu_q, cu_k) = (cu_seqlens(&[0, 5], &device), cu_seqlens(&[0, 9], &device));
            let found = attend(q, k, v, &cu_q, &cu_k, AttentionOptions::causal());
            let what = format!("{name}, {implementation}");
            assert_close(&what, &host(&found.out), &out, None, DType::F32);
            assert_close(&what, &host(&found.lse), &lse, None, DType::F32);
        }
    }
}
