//! A dense Llama as host loops in f64, written from the formulas: no cache, no blocks, nothing shared with the crate.

use super::files::Tensors;
use super::tiny::{EPSILON, THETA, Tiny};

/// The model as the loops want it.
pub(crate) struct Oracle {
    tiny: Tiny,
    tensors: Tensors,
    /// Radians per position of each pair.
    pub(crate) inv_freq: Vec<f64>,
    /// Factor on cosine and sine.
    pub(crate) attention_factor: f64,
    /// Tokens that a token sees, itself included.
    pub(crate) window: Option<usize>,
}

type Rows = Vec<Vec<f64>>;

impl Oracle {
    pub(crate) fn new(tiny: &Tiny, tensors: &Tensors) -> Self {
        let (dim, tiny, tensors) = (tiny.head_dim, tiny.clone(), tensors.clone());
        let inv_freq = (0..dim / 2)
            .map(|at| THETA.powf(-2.0 * at as f64 / dim as f64))
            .collect();
        Self {
            tiny,
            tensors,
            inv_freq,
            attention_factor: 1.0,
            window: None,
        }
    }

    /// Logits after every token.
    pub(crate) fn logits(&self, tokens: &[u32]) -> Vec<Vec<f32>> {
        let (table, width) = (
            self.weight("model.embed_tokens.weight"),
            self.tiny.hidden_size,
        );
        let row = |token: &u32| &table[*token as usize * width..][..width];
        let mut stream: Rows = tokens
            .iter()
            .map(|token| row(token).iter().map(|value| f64::from(*value)).collect())
            .collect();
        for layer in 0..self.tiny.num_layers {
            let name = |part: &str| format!("model.layers.{layer}.{part}");
            let normed = self.norm(&stream, &name("input_layernorm"));
            add(&mut stream, self.attention(&normed, &name("self_attn")));
            let normed = self.norm(&stream, &name("post_attention_layernorm"));
            add(&mut stream, self.mlp(&normed, &name("mlp")));
        }
        let head = if self.tiny.tied {
            "model.embed_tokens"
        } else {
            "lm_head"
        };
        let logits = self.linear(&self.norm(&stream, "model.norm"), head);
        logits
            .iter()
            .map(|row| row.iter().map(|value| *value as f32).collect())
            .collect()
    }

    /// Greedy tokens after a prompt.
    pub(crate) fn greedy(&self, prompt: &[u32], count: usize) -> Vec<u32> {
        let mut tokens = prompt.to_vec();
        for _ in 0..count {
            let logits = self.logits(&tokens);
            tokens.push(super::argmax(&logits[logits.len() - 1]) as u32);
        }
        tokens.split_off(prompt.len())
    }

    fn weight(&self, name: &str) -> &[f32] {
        &self.tensors[name].values
    }

    fn linear(&self, rows: &Rows, name: &str) -> Rows {
        let weight = &self.tensors[&format!("{name}.weight")];
        let bias = self.tensors.get(&format!("{name}.bias"));
        let (outputs, inputs) = (weight.shape[0], weight.shape[1]);
        let dot = |row: &[f64], output: usize| -> f64 {
            let weights = &weight.values[output * inputs..][..inputs];
            row.iter()
                .zip(weights)
                .map(|(x, w)| x * f64::from(*w))
                .sum()
        };
        let start = |output: usize| bias.map_or(0.0, |bias| f64::from(bias.values[output]));
        let output = |row: &Vec<f64>| (0..outputs).map(|at| dot(row, at) + start(at)).collect();
        rows.iter().map(output).collect()
    }

    fn norm(&self, rows: &Rows, name: &str) -> Rows {
        let weight = self.weight(&format!("{name}.weight"));
        let normalize = |row: &Vec<f64>| {
            let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
            let scale = 1.0 / (mean + EPSILON).sqrt();
            row.iter()
                .zip(weight)
                .map(|(x, w)| x * scale * f64::from(*w))
                .collect()
        };
        rows.iter().map(normalize).collect()
    }

    fn mlp(&self, rows: &Rows, name: &str) -> Rows {
        let gate = self.linear(rows, &format!("{name}.gate_proj"));
        let up = self.linear(rows, &format!("{name}.up_proj"));
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let inner = gate
            .iter()
            .zip(&up)
            .map(|(gate, up)| {
                gate.iter()
                    .zip(up)
                    .map(|(gate, up)| silu(*gate) * up)
                    .collect()
            })
            .collect();
        self.linear(&inner, &format!("{name}.down_proj"))
    }

    fn attention(&self, rows: &Rows, name: &str) -> Rows {
        let Tiny {
            num_heads,
            num_kv_heads,
            head_dim,
            ..
        } = self.tiny;
        let q = self.rotated(self.linear(rows, &format!("{name}.q_proj")), num_heads);
        let k = self.rotated(self.linear(rows, &format!("{name}.k_proj")), num_kv_heads);
        let v = self.linear(rows, &format!("{name}.v_proj"));
        let mut out = vec![vec![0.0; num_heads * head_dim]; rows.len()];
        for (position, out) in out.iter_mut().enumerate() {
            for head in 0..num_heads {
                let kv_head = head / (num_heads / num_kv_heads);
                let first = self
                    .window
                    .map_or(0, |window| (position + 1).saturating_sub(window));
                let q = &q[position][head * head_dim..][..head_dim];
                let score = |key: usize| -> f64 {
                    let k = &k[key][kv_head * head_dim..][..head_dim];
                    q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() / (head_dim as f64).sqrt()
                };
                let scores: Vec<f64> = (first..=position).map(score).collect();
                let top = scores.iter().copied().fold(f64::MIN, f64::max);
                let sum: f64 = scores.iter().map(|score| (score - top).exp()).sum();
                for (key, score) in (first..=position).zip(&scores) {
                    let weight = (score - top).exp() / sum;
                    for at in 0..head_dim {
                        out[head * head_dim + at] += weight * v[key][kv_head * head_dim + at];
                    }
                }
            }
        }
        self.linear(&out, &format!("{name}.o_proj"))
    }

    fn rotated(&self, mut rows: Rows, heads: usize) -> Rows {
        let (head_dim, half) = (self.tiny.head_dim, self.inv_freq.len());
        for (position, row) in rows.iter_mut().enumerate() {
            for head in 0..heads {
                let head = &mut row[head * head_dim..][..head_dim];
                for (at, freq) in self.inv_freq.iter().enumerate() {
                    let (sin, cos) = (position as f64 * freq).sin_cos();
                    let (sin, cos) = (sin * self.attention_factor, cos * self.attention_factor);
                    let (first, second) = (head[at], head[at + half]);
                    head[at] = first * cos - second * sin;
                    head[at + half] = second * cos + first * sin;
                }
            }
        }
        rows
    }
}

fn add(stream: &mut Rows, rows: Rows) {
    for (stream, row) in stream.iter_mut().zip(rows) {
        stream
            .iter_mut()
            .zip(row)
            .for_each(|(stream, value)| *stream += value);
    }
}
