//! `x · weightᵀ` on the CPU: few rows by dot products that stream the weights once, many rows by the backend's GEMM.

use burn::backend::{Flex, ops::FloatTensorOps};
use burn::tensor::{DType, Shape};
use burn_flex::FlexTensor;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::{simd, view};

/// Up to this many rows the weights are streamed through dot products; a GEMM packs them first, which costs another
/// pass over memory. Two groups of 8 tokens; where the two ways meet has not been measured.
const MAX_SKINNY_ROWS: usize = 16;

/// Weight rows of one task: with 1,536 columns they fill half of a 512 KiB L2 cache, so that a second group of
/// tokens finds them there.
const TASK_ROWS: usize = 32;

pub(super) fn linear(x: FlexTensor, weight: FlexTensor) -> FlexTensor {
    let (x_shape, w_shape) = (x.layout().shape().clone(), weight.layout().shape().clone());
    let [num_tokens, in_features] = [x_shape[0], x_shape[1]];
    let out_features = w_shape[0];
    let is_skinny = num_tokens <= MAX_SKINNY_ROWS && x.dtype() == DType::F32 && in_features > 0;
    if !is_skinny || !weight.is_contiguous() {
        return Flex::float_matmul(x, <Flex as FloatTensorOps<Flex>>::float_transpose(weight));
    }
    let x = x.to_contiguous();
    let (begin, end) = x
        .layout()
        .contiguous_offsets()
        .expect("made contiguous above");
    let tokens: Vec<&[f32]> = x.storage::<f32>()[begin..end].chunks(in_features).collect();
    let weight: &[f32] = weight.as_slice().expect("checked to be contiguous");

    // Transposed, so that every task owns a contiguous piece of the result.
    let mut transposed = vec![0.0; out_features * num_tokens];
    transposed
        .par_chunks_mut(TASK_ROWS * num_tokens)
        .zip(weight.par_chunks(TASK_ROWS * in_features))
        .for_each(|(out, weight)| {
            simd::dispatch(Task {
                weight,
                tokens: &tokens,
                out,
            })
        });
    let values = match num_tokens {
        1 => transposed,
        _ => (0..num_tokens)
            .flat_map(|token| transposed.iter().skip(token).step_by(num_tokens).copied())
            .collect(),
    };
    view::from_vec(values, Shape::new([num_tokens, out_features]))
}

/// `out[row][token] = weight[row] · tokens[token]` for the rows of one task.
struct Task<'a> {
    weight: &'a [f32],
    tokens: &'a [&'a [f32]],
    out: &'a mut [f32],
}

impl WithSimd for Task<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            weight,
            tokens,
            out,
        } = self;
        let mut first = 0;
        // Groups of 8 tokens keep 16 sums and their operands in registers.
        while first < tokens.len() {
            let group = &tokens[first..];
            let step = match group.len() {
                8.. => tokens_group::<S, 8>(simd, weight, group, out, first, tokens.len()),
                4.. => tokens_group::<S, 4>(simd, weight, group, out, first, tokens.len()),
                2.. => tokens_group::<S, 2>(simd, weight, group, out, first, tokens.len()),
                _ => tokens_group::<S, 1>(simd, weight, group, out, first, tokens.len()),
            };
            first += step;
        }
    }
}

/// The first `TOKENS` rows of `group` against all weight rows; gives back `TOKENS`.
#[inline(always)]
fn tokens_group<S: Simd, const TOKENS: usize>(
    simd: S,
    weight: &[f32],
    group: &[&[f32]],
    out: &mut [f32],
    first: usize,
    num_tokens: usize,
) -> usize {
    let tokens: [&[f32]; TOKENS] = *group.first_chunk().expect("the caller counted the tokens");
    let in_features = tokens[0].len();
    let mut weights = weight.chunks_exact(in_features);
    let mut out = out.chunks_exact_mut(num_tokens);
    while let Some(row) = weights.next() {
        let out_row = out.next().expect("one row of the result per weight row");
        match weights.next() {
            Some(next) => {
                let sums = simd::dots(simd, [row, next], tokens);
                out_row[first..first + TOKENS].copy_from_slice(&sums[0]);
                let out_row = out.next().expect("one row of the result per weight row");
                out_row[first..first + TOKENS].copy_from_slice(&sums[1]);
            }
            None => {
                let sums = simd::dots(simd, [row], tokens);
                out_row[first..first + TOKENS].copy_from_slice(&sums[0]);
            }
        }
    }
    TOKENS
}
