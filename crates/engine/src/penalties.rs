//! Penalties on tokens that occurred before.

use std::collections::{HashMap, HashSet};

use crate::SamplingParams;

/// Tokens of the prompt and of the answer, as the penalties count them.
#[derive(Debug, Clone, Default)]
pub(crate) struct TokenCounts {
    prompt: HashSet<u32>,
    output: HashMap<u32, u32>,
}

impl TokenCounts {
    pub(crate) fn new(prompt: &[u32]) -> Self {
        Self {
            prompt: prompt.iter().copied().collect(),
            output: HashMap::new(),
        }
    }

    /// Counts a token of the answer.
    pub(crate) fn record(&mut self, token: u32) {
        *self.output.entry(token).or_insert(0) += 1;
    }
}

/// Whether `params` have a penalty that does something.
pub(crate) fn has_penalties(params: &SamplingParams) -> bool {
    params.repetition_penalty != 1.0
        || params.presence_penalty != 0.0
        || params.frequency_penalty != 0.0
}

/// Changes the logits of tokens that occurred before; without penalties, not one bit.
///
/// - repetition, over prompt and answer, once per token: a positive logit is divided by the penalty and a negative one
///   multiplied, so that a penalty above 1 always makes the token less likely;
/// - frequency and presence, over the answer alone: `logit - frequency * count - presence`.
///
/// # Source
/// Repetition: Keskar et al. 2019, arXiv:1909.05858, section 4.1, with the rule for negative logits. Frequency and
/// presence: the definition of the OpenAI API.
pub(crate) fn apply_penalties(logits: &mut [f32], params: &SamplingParams, counts: &TokenCounts) {
    let repetition = params.repetition_penalty;
    if repetition != 1.0 {
        let only_output = counts
            .output
            .keys()
            .filter(|token| !counts.prompt.contains(token));
        for token in counts.prompt.iter().chain(only_output) {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit = if *logit > 0.0 {
                    *logit / repetition
                } else {
                    *logit * repetition
                };
            }
        }
    }
    if params.frequency_penalty != 0.0 || params.presence_penalty != 0.0 {
        for (token, count) in &counts.output {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit -= params.frequency_penalty * *count as f32 + params.presence_penalty;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(prompt: &[u32], output: &[u32]) -> TokenCounts {
        let mut counts = TokenCounts::new(prompt);
        for token in output {
            counts.record(*token);
        }
        counts
    }

    fn penalized(params: SamplingParams, counts: &TokenCounts) -> [f32; 3] {
        let mut logits = [2.0, -1.0, 0.5];
        apply_penalties(&mut logits, &params, counts);
        logits
    }

    #[test]
    fn repetition_lowers_positive_and_negative_logits_once_per_token() {
        let params = SamplingParams {
            repetition_penalty: 2.0,
            ..Default::default()
        };
        // The history is 0, 1, 0, however it is split between prompt and answer.
        for split in 0..=3 {
            let (prompt, output) = [0, 1, 0].split_at(split);
            let found = penalized(params.clone(), &counts(prompt, output));
            assert_eq!(
                found,
                [1.0, -2.0, 0.5],
                "prompt {prompt:?}, answer {output:?}"
            );
        }
    }

    #[test]
    fn frequency_and_presence_count_the_answer_alone() {
        let params = SamplingParams {
            frequency_penalty: 0.5,
            presence_penalty: 0.25,
            ..Default::default()
        };
        assert_eq!(
            penalized(params, &counts(&[2, 2], &[0, 0, 1])),
            [0.75, -1.75, 0.5]
        );
    }

    #[test]
    fn neutral_penalties_change_no_bit() {
        let params = SamplingParams::default();
        assert!(!has_penalties(&params));
        let mut logits = [0.1_f32, -0.0, f32::MIN_POSITIVE / 2.0, f32::NEG_INFINITY];
        let before = logits.map(f32::to_bits);
        apply_penalties(&mut logits, &params, &counts(&[0, 1, 2, 3], &[0, 1, 2, 3]));
        assert_eq!(logits.map(f32::to_bits), before);
    }

    #[test]
    fn a_token_outside_the_row_is_ignored() {
        let params = SamplingParams {
            repetition_penalty: 2.0,
            presence_penalty: 1.0,
            ..Default::default()
        };
        assert_eq!(penalized(params, &counts(&[7], &[9])), [2.0, -1.0, 0.5]);
    }
}
