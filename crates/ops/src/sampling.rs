//! Logits to tokens on the host: the definition that the device samplers follow.
//!
//! A draw is the argmax of `logit / temperature + gumbel` over the tokens that the filters keep, where the Gumbel noise
//! of a token is a hash of (seed, draw, token). No state is carried, so a row's token depends on its own logits and
//! options alone: not on the batch it runs in, nor on the order of the rows.

use crate::SamplingOptions;

/// Why a row could not be sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplingError {
    /// A logit is NaN or plus infinity: the model or its weights broke.
    #[error("logit {token} is {kind}")]
    BadLogit {
        /// Index of the first such logit.
        token: usize,
        /// What it is.
        kind: &'static str,
    },
    /// Every logit is minus infinity, or the row is empty.
    #[error("no token has a probability above zero")]
    NothingToSample,
}

/// Picks the token of one row.
///
/// Ties at the maximum go to the lowest index. Tokens that tie with the k-th are kept by top-k.
///
/// # Shapes
/// - `logits`: `[vocab_size]`
///
/// # Errors
/// [`SamplingError`] if a logit is NaN or plus infinity, or no token is left.
///
/// # Source
/// Gumbel-max: Gumbel 1954; Maddison, Tarlow and Minka 2014, arXiv:1411.0030. Order of the filters as Hugging Face
/// transformers' logits warpers: temperature, top-k, top-p, min-p.
pub fn sample_row(logits: &[f32], options: &SamplingOptions) -> Result<usize, SamplingError> {
    let best = argmax(logits)?;
    if options.temperature <= 0.0 || options.top_k == 1 || options.top_p <= 0.0 {
        return Ok(best);
    }
    let max = logits[best];
    // The maximum is subtracted before the division: a tiny temperature then cannot overflow.
    let scaled = |token: usize| (logits[token] - max) / options.temperature;
    let kept = keep(logits.len(), scaled, options);
    let drawn = kept
        .map(|token| {
            (
                token,
                scaled(token) + gumbel(options.seed, options.draw, token as u32),
            )
        })
        .fold(
            None,
            |best: Option<(usize, f32)>, (token, score)| match best {
                Some((_, top)) if score <= top => best,
                _ if score == f32::NEG_INFINITY => best,
                _ => Some((token, score)),
            },
        );
    Ok(drawn.map_or(best, |(token, _)| token))
}

/// Index of the largest logit, the lowest on ties.
///
/// # Errors
/// [`SamplingError`] as [`sample_row`].
pub fn argmax(logits: &[f32]) -> Result<usize, SamplingError> {
    let mut best: Option<usize> = None;
    for (token, logit) in logits.iter().enumerate() {
        if logit.is_nan() {
            return Err(SamplingError::BadLogit { token, kind: "NaN" });
        }
        if *logit == f32::INFINITY {
            return Err(SamplingError::BadLogit {
                token,
                kind: "infinite",
            });
        }
        if *logit > best.map_or(f32::NEG_INFINITY, |best| logits[best]) {
            best = Some(token);
        }
    }
    best.ok_or(SamplingError::NothingToSample)
}

/// Natural logarithm of the softmax of a row, computed in f64 and rounded once.
pub fn log_softmax_row(logits: &[f32]) -> Vec<f32> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits
        .iter()
        .map(|logit| f64::from(logit - max).exp())
        .sum();
    let log_sum = f64::from(max) + sum.ln();
    logits
        .iter()
        .map(|logit| (f64::from(*logit) - log_sum) as f32)
        .collect()
}

/// The tokens that the filters keep, in ascending order.
fn keep(
    len: usize,
    scaled: impl Fn(usize) -> f32 + Copy,
    options: &SamplingOptions,
) -> impl Iterator<Item = usize> {
    let mut floor = f32::NEG_INFINITY;
    if options.top_k > 0 && options.top_k < len {
        let mut values: Vec<f32> = (0..len).map(scaled).collect();
        let (_, kth, _) = values.select_nth_unstable_by(options.top_k - 1, |a, b| b.total_cmp(a));
        floor = *kth;
    }
    let mut kept: Vec<usize> = (0..len)
        .filter(|token| scaled(*token) >= floor && scaled(*token) > f32::NEG_INFINITY)
        .collect();
    if options.top_p < 1.0 {
        kept.sort_by(|a, b| scaled(*b).total_cmp(&scaled(*a)).then(a.cmp(b)));
        let weight = |token: &usize| f64::from(scaled(*token)).exp();
        let total: f64 = kept.iter().map(weight).sum();
        let mut sum = 0.0;
        let enough = kept.iter().position(|token| {
            sum += weight(token);
            sum >= f64::from(options.top_p) * total
        });
        kept.truncate(enough.map_or(kept.len(), |last| last + 1));
        kept.sort_unstable();
    }
    if options.min_p > 0.0 {
        // The most probable token has scaled logit 0.
        let floor = options.min_p.ln();
        kept.retain(|token| scaled(*token) >= floor);
    }
    kept.into_iter()
}

/// Standard Gumbel noise of one token of one draw.
fn gumbel(seed: u64, draw: u64, token: u32) -> f32 {
    let bits = hash([seed as u32, (seed >> 32) as u32, draw as u32, token]);
    -(-uniform(bits).ln()).ln()
}

/// A number between 0 and 1 of a random word, neither of them included.
fn uniform(bits: u32) -> f32 {
    // 23 bits, centred: a 24th would not leave f32 one for the half, and the largest would round to 1.
    ((bits >> 9) as f32 + 0.5) / 8_388_608.0
}

/// Four words to one, in 32-bit arithmetic alone so that every GPU language has it.
///
/// # Source
/// `pcg4d` of Jarzynski and Olano, "Hash Functions for GPU Rendering", JCGT 9(3), 2020.
fn hash(words: [u32; 4]) -> u32 {
    let mut v = words.map(|word| word.wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
    let mix = |v: &mut [u32; 4]| {
        v[0] = v[0].wrapping_add(v[1].wrapping_mul(v[3]));
        v[1] = v[1].wrapping_add(v[2].wrapping_mul(v[0]));
        v[2] = v[2].wrapping_add(v[0].wrapping_mul(v[1]));
        v[3] = v[3].wrapping_add(v[1].wrapping_mul(v[2]));
    };
    mix(&mut v);
    v = v.map(|word| word ^ (word >> 16));
    mix(&mut v);
    v[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 4] = [2.0, 1.0, 0.5, -1.0];

    fn with(change: impl FnOnce(&mut SamplingOptions)) -> SamplingOptions {
        let mut options = SamplingOptions {
            temperature: 1.0,
            seed: 7,
            ..Default::default()
        };
        change(&mut options);
        options
    }

    fn draws(options: SamplingOptions, count: u64) -> Vec<usize> {
        (0..count)
            .map(|draw| sample_row(&LOGITS, &SamplingOptions { draw, ..options }).unwrap())
            .collect()
    }

    #[test]
    fn edge_values_of_temperature_and_filters() {
        let only_best = |options| draws(options, 200).iter().all(|token| *token == 0);
        assert!(only_best(with(|o| o.temperature = 0.0)));
        assert!(only_best(with(|o| o.temperature = 1e-6)));
        assert!(only_best(with(|o| o.temperature = 1e-40)));
        assert!(only_best(with(|o| o.top_p = 0.0)));
        assert!(only_best(with(|o| o.top_k = 1)));
        assert!(only_best(with(|o| o.min_p = 1.0)));
        let free = draws(with(|_| ()), 200);
        assert_eq!(free, draws(with(|o| o.top_p = 1.0), 200));
        assert_eq!(free, draws(with(|o| o.top_k = 5_000_000), 200));
        assert_eq!(free, draws(with(|o| o.top_k = 0), 200));
        assert!(
            free.contains(&3),
            "200 draws at temperature 1 should reach every token"
        );
        let two = draws(with(|o| o.top_k = 2), 200);
        assert!(two.iter().all(|token| *token < 2) && two.contains(&1));
        // Probabilities are about 0.61, 0.22, 0.14, 0.03: two tokens reach 0.7.
        let most = draws(with(|o| o.top_p = 0.7), 200);
        assert!(most.iter().all(|token| *token < 2) && most.contains(&1));
    }

    /// The largest word once gave 1, whose noise is infinite: that token won, whatever its logit.
    #[test]
    fn noise_is_finite_for_every_word() {
        for bits in [0, 1, u32::MAX >> 1, u32::MAX - (1 << 9), u32::MAX] {
            let uniform = uniform(bits);
            assert!(uniform > 0.0 && uniform < 1.0, "{bits}: {uniform}");
        }
    }

    #[test]
    fn ties_go_to_the_lowest_index() {
        assert_eq!(sample_row(&[3.0; 5], &SamplingOptions::default()), Ok(0));
        assert_eq!(
            sample_row(&[1.0, 3.0, 3.0], &with(|o| o.top_p = 0.0)),
            Ok(1)
        );
    }

    #[test]
    fn broken_rows_are_errors() {
        let options = with(|_| ());
        let nan = sample_row(&[2.0, f32::NAN, 1.0, 0.0], &options);
        assert_eq!(
            nan,
            Err(SamplingError::BadLogit {
                token: 1,
                kind: "NaN"
            })
        );
        let infinite = sample_row(&[2.0, f32::INFINITY], &options);
        assert_eq!(
            infinite,
            Err(SamplingError::BadLogit {
                token: 1,
                kind: "infinite"
            })
        );
        let masked = sample_row(&[f32::NEG_INFINITY; 3], &options);
        assert_eq!(masked, Err(SamplingError::NothingToSample));
        assert_eq!(
            sample_row(&[], &options),
            Err(SamplingError::NothingToSample)
        );
        let one_left = [f32::NEG_INFINITY, -4.0, f32::NEG_INFINITY];
        assert_eq!(sample_row(&one_left, &options), Ok(1));
    }

    #[test]
    fn draws_follow_the_softmax() {
        let draws = draws(with(|_| ()), 20_000);
        let log_probs = log_softmax_row(&LOGITS);
        for (token, log_prob) in log_probs.iter().enumerate() {
            let expected = f64::from(log_prob.exp());
            let count = draws.iter().filter(|drawn| **drawn == token).count();
            let found = count as f64 / draws.len() as f64;
            // Five standard deviations of a binomial with 20,000 draws.
            let bound = 5.0 * (expected * (1.0 - expected) / draws.len() as f64).sqrt();
            assert!(
                (found - expected).abs() < bound,
                "token {token}: {found} against {expected}"
            );
        }
    }

    #[test]
    fn seeds_and_draws_differ_and_repeat() {
        let options = with(|_| ());
        assert_eq!(draws(options, 100), draws(options, 100));
        assert_ne!(draws(options, 100), draws(with(|o| o.seed = 8), 100));
        assert_ne!(
            draws(options, 100),
            draws(with(|o| o.seed = 7 + (1 << 32)), 100)
        );
    }
}
