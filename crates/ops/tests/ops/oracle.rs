//! Attention in f64 on the host, one row at a time as the formula reads: shares nothing with any implementation.

use burn_paged::AttentionOptions;

/// Packed inputs as f32 values, which are exact in f64.
pub(crate) struct Inputs<'a> {
    pub(crate) q: &'a [f32],
    pub(crate) k: &'a [f32],
    pub(crate) v: &'a [f32],
    pub(crate) query_lens: &'a [usize],
    pub(crate) kv_lens: &'a [usize],
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
}

/// Output `[num_tokens, num_heads, head_dim]` and log-sum-exp `[num_tokens, num_heads]`.
pub(crate) fn attention(inputs: &Inputs<'_>, options: &AttentionOptions) -> (Vec<f32>, Vec<f32>) {
    let Inputs {
        num_heads,
        num_kv_heads,
        head_dim,
        ..
    } = *inputs;
    let group = num_heads / num_kv_heads;
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    let (mut q_begin, mut k_begin) = (0, 0);
    for (query_len, kv_len) in inputs.query_lens.iter().zip(inputs.kv_lens) {
        for row in 0..*query_len {
            for head in 0..num_heads {
                let at =
                    |token: usize, heads: usize, head: usize| (token * heads + head) * head_dim;
                let q = &inputs.q[at(q_begin + row, num_heads, head)..][..head_dim];
                let keys: Vec<usize> = (0..*kv_len)
                    .filter(|key| sees(options, row, *query_len, *key, *kv_len))
                    .collect();
                let key_at = |key: usize| at(k_begin + key, num_kv_heads, head / group);
                let score = |key: &usize| {
                    let k = &inputs.k[key_at(*key)..][..head_dim];
                    let dot: f64 = q
                        .iter()
                        .zip(k)
                        .map(|(q, k)| f64::from(*q) * f64::from(*k))
                        .sum();
                    let score = dot * f64::from(options.scale_for(head_dim));
                    let softcap = options.softcap.map(f64::from);
                    softcap.map_or(score, |softcap| softcap * (score / softcap).tanh())
                };
                let scores: Vec<f64> = keys.iter().map(score).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
                for element in 0..head_dim {
                    let weighted = keys.iter().zip(&scores).map(|(key, score)| {
                        (score - max).exp() / sum * f64::from(inputs.v[key_at(*key) + element])
                    });
                    out.push(weighted.sum::<f64>() as f32);
                }
                lse.push(if keys.is_empty() {
                    f32::NEG_INFINITY
                } else {
                    (max + sum.ln()) as f32
                });
            }
        }
        (q_begin, k_begin) = (q_begin + query_len, k_begin + kv_len);
    }
    (out, lse)
}

/// The mask, written from the contract and not from `AttentionOptions::visible`.
fn sees(
    options: &AttentionOptions,
    row: usize,
    query_len: usize,
    key: usize,
    kv_len: usize,
) -> bool {
    let position = row as i64 + kv_len as i64 - query_len as i64;
    let key = key as i64;
    let in_window = options
        .window
        .is_none_or(|window| position - key < window as i64);
    (!options.causal || key <= position) && in_window
}
