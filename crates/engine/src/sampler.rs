//! One row of logits to one token: penalties, bias, bans, draw, log-probabilities.
//!
//! A row depends on nothing but its own request, so the rows of a batch cannot influence each other.

use burn_paged::SamplingOptions;
use burn_paged::sampling::{SamplingError, log_softmax_row, sample_row};

use crate::penalties::{TokenCounts, apply_penalties, has_penalties};
use crate::{SamplingParams, TokenLogprobs};

/// A token and what was asked to be known about it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SampledToken {
    pub(crate) token: u32,
    pub(crate) logprobs: Option<TokenLogprobs>,
}

/// Sampling state of one request.
#[derive(Debug)]
pub(crate) struct RowSampler {
    params: SamplingParams,
    seed: u64,
    /// Kept only where a penalty reads it.
    counts: Option<TokenCounts>,
    /// Number of tokens drawn: the index of the next draw. It survives a preemption, so a resumed request draws what
    /// it would have drawn.
    num_draws: u64,
}

impl RowSampler {
    /// A sampler for a request with this prompt; `seed` is the request's own or the engine's choice.
    pub(crate) fn new(params: SamplingParams, seed: u64, prompt: &[u32]) -> Self {
        let counts = has_penalties(&params).then(|| TokenCounts::new(prompt));
        Self {
            params,
            seed,
            counts,
            num_draws: 0,
        }
    }

    /// Whether the row has to be on the host: something besides the draw reads or changes its logits.
    pub(crate) fn needs_logits(&self) -> bool {
        self.counts.is_some()
            || !self.params.logit_bias.is_empty()
            || self.params.logprobs.is_some()
    }

    /// The draw, for a sampler on the device or on the host.
    pub(crate) fn options(&self) -> SamplingOptions {
        self.options_after(0)
    }

    /// The draw that follows `num_draws` others.
    pub(crate) fn options_after(&self, num_draws: u64) -> SamplingOptions {
        SamplingOptions {
            temperature: self.params.temperature,
            top_k: self.params.top_k,
            top_p: self.params.top_p,
            min_p: self.params.min_p,
            seed: self.seed,
            draw: self.num_draws + num_draws,
        }
    }

    /// Picks a token from the row. `banned` tokens are not picked.
    ///
    /// # Errors
    /// [`SamplingError`] if a logit is NaN or plus infinity, or no token is left.
    pub(crate) fn sample(
        &self,
        mut logits: Vec<f32>,
        banned: &[u32],
    ) -> Result<SampledToken, SamplingError> {
        let log_probs = self.params.logprobs.map(|_| log_softmax_row(&logits));
        if let Some(counts) = &self.counts {
            apply_penalties(&mut logits, &self.params, counts);
        }
        for (token, bias) in &self.params.logit_bias {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit += bias;
            }
        }
        for token in banned {
            // A NaN stays one: a ban must not hide a broken row.
            if let Some(logit) = logits
                .get_mut(*token as usize)
                .filter(|logit| !logit.is_nan())
            {
                *logit = f32::NEG_INFINITY;
            }
        }
        let token = sample_row(&logits, &self.options())? as u32;
        let logprobs = log_probs.map(|log_probs| self.logprobs(&log_probs, token));
        Ok(SampledToken { token, logprobs })
    }

    /// Counts a drawn token.
    pub(crate) fn record(&mut self, token: u32) {
        self.num_draws += 1;
        if let Some(counts) = &mut self.counts {
            counts.record(token);
        }
    }

    fn logprobs(&self, log_probs: &[f32], token: u32) -> TokenLogprobs {
        let num_top = self.params.logprobs.unwrap_or(0).min(log_probs.len());
        let mut order: Vec<u32> = (0..log_probs.len() as u32).collect();
        let by_rank = |a: &u32, b: &u32| {
            log_probs[*b as usize]
                .total_cmp(&log_probs[*a as usize])
                .then(a.cmp(b))
        };
        if num_top < order.len() {
            order.select_nth_unstable_by(num_top, by_rank);
            order.truncate(num_top);
        }
        order.sort_unstable_by(by_rank);
        let top = order
            .into_iter()
            .map(|token| (token, log_probs[token as usize]))
            .collect();
        TokenLogprobs {
            logprob: log_probs[token as usize],
            top,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const LOGITS: [f32; 4] = [2.0, 1.0, 0.5, -1.0];

    fn params(change: impl FnOnce(&mut SamplingParams)) -> SamplingParams {
        let mut params = SamplingParams {
            temperature: 1.0,
            ..Default::default()
        };
        change(&mut params);
        params
    }

    fn draws(params: &SamplingParams, logits: &[f32], count: usize) -> Vec<u32> {
        let mut sampler = RowSampler::new(params.clone(), 11, &[]);
        let draw = |_| {
            let token = sampler.sample(logits.to_vec(), &[]).unwrap().token;
            sampler.record(token);
            token
        };
        (0..count).map(draw).collect()
    }

    #[test]
    fn edge_values_give_the_best_token_or_no_filter() {
        let best = vec![0; 64];
        assert_eq!(draws(&params(|p| p.temperature = 0.0), &LOGITS, 64), best);
        assert_eq!(draws(&params(|p| p.temperature = 1e-6), &LOGITS, 64), best);
        assert_eq!(draws(&params(|p| p.top_p = 0.0), &LOGITS, 64), best);
        let free = draws(&params(|_| ()), &LOGITS, 64);
        assert_ne!(free, best);
        assert_eq!(draws(&params(|p| p.top_p = 1.0), &LOGITS, 64), free);
        assert_eq!(draws(&params(|p| p.top_k = 5_000_000), &LOGITS, 64), free);
        assert_eq!(draws(&params(|p| p.top_k = 0), &LOGITS, 64), free);
        assert_eq!(
            draws(&params(|p| p.temperature = 0.0), &[3.0; 4], 64),
            best,
            "ties"
        );
    }

    #[test]
    fn a_broken_row_is_an_error_with_and_without_bans() {
        let sampler = RowSampler::new(SamplingParams::default(), 0, &[]);
        let row = vec![2.0, f32::NAN, 1.0, 0.0];
        assert!(sampler.sample(row.clone(), &[]).is_err());
        assert!(sampler.sample(row, &[1]).is_err());
        assert!(sampler.sample(vec![1.0, 2.0], &[0, 1]).is_err());
    }

    #[test]
    fn bans_and_bias_move_the_choice() {
        let sampler = RowSampler::new(SamplingParams::default(), 0, &[]);
        assert_eq!(sampler.sample(LOGITS.to_vec(), &[0, 1]).unwrap().token, 2);
        let biased = params(|p| {
            p.temperature = 0.0;
            p.logit_bias = BTreeMap::from([(0, f32::NEG_INFINITY), (3, 2.5)]);
        });
        assert!(RowSampler::new(biased.clone(), 0, &[]).needs_logits());
        assert_eq!(draws(&biased, &LOGITS, 1), [3]);
    }

    #[test]
    fn a_penalized_token_loses_its_lead() {
        let presence = params(|p| {
            p.temperature = 0.0;
            p.presence_penalty = 1.25;
        });
        // Token 0 leads until it occurred, then 1, then the rest of the order with 1.25 less each.
        assert_eq!(draws(&presence, &LOGITS, 4), [0, 1, 0, 0]);
        let frequency = params(|p| {
            p.temperature = 0.0;
            p.frequency_penalty = 0.75;
        });
        // 2 > 1.25 > 1 > 0.5: twice token 0, then 1, then 0 again at 0.5, the lower id of a tie with 2.
        assert_eq!(draws(&frequency, &LOGITS, 4), [0, 0, 1, 0]);
    }

    #[test]
    fn logprobs_are_the_models_own() {
        let asked = params(|p| {
            p.temperature = 0.0;
            p.logprobs = Some(2);
            p.logit_bias = BTreeMap::from([(3, 100.0)]);
        });
        let sampled = RowSampler::new(asked, 0, &[])
            .sample(LOGITS.to_vec(), &[])
            .unwrap();
        let total: f32 = LOGITS.iter().map(|logit| logit.exp()).sum();
        let expected = |token: usize| LOGITS[token] - total.ln();
        let logprobs = sampled.logprobs.unwrap();
        assert_eq!(sampled.token, 3);
        assert!((logprobs.logprob - expected(3)).abs() < 1e-6);
        let tokens: Vec<u32> = logprobs.top.iter().map(|(token, _)| *token).collect();
        assert_eq!(tokens, [0, 1]);
        assert!(
            logprobs
                .top
                .iter()
                .all(|(token, p)| (p - expected(*token as usize)).abs() < 1e-6)
        );
    }

    #[test]
    fn top_logprobs_are_ranked_with_ties_by_id_and_never_more_than_the_vocabulary() {
        let asked = params(|p| p.logprobs = Some(9));
        let row = vec![0.5, 1.0, 0.5, 1.0];
        let top = RowSampler::new(asked, 0, &[])
            .sample(row, &[])
            .unwrap()
            .logprobs
            .unwrap()
            .top;
        let tokens: Vec<u32> = top.iter().map(|(token, _)| *token).collect();
        assert_eq!(tokens, [1, 3, 0, 2]);
    }

    #[test]
    fn a_row_draws_the_same_whatever_else_was_drawn() {
        let sampled = params(|_| ());
        let long = draws(&sampled, &LOGITS, 32);
        assert_eq!(draws(&sampled, &LOGITS, 8), long[..8]);
    }
}
