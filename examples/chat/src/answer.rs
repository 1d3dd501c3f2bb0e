//! One answer: what came out, and what it took.

use std::time::Duration;

use burn_paged_engine::{Completion, FinishReason};
use serde_json::{Value, json};

/// What came out of one request.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    /// Text, tokens, finish reason and usage.
    pub(crate) completion: Completion,
    /// From the request to its first token.
    pub(crate) time_to_first_token: Duration,
    /// From the first token to the end.
    pub(crate) decode_time: Duration,
}

impl Answer {
    /// Tokens per second after the first one; `None` for an answer that has no second.
    pub(crate) fn tokens_per_second(&self) -> Option<f64> {
        let steps = self.completion.usage.generated_tokens.checked_sub(1)?;
        let seconds = self.decode_time.as_secs_f64();
        (steps > 0 && seconds > 0.0).then(|| steps as f64 / seconds)
    }

    /// The word for why it ended.
    pub(crate) fn finish_reason(&self) -> Option<&'static str> {
        self.completion.finish.as_ref().map(FinishReason::as_str)
    }

    /// The object that `--json` prints.
    pub(crate) fn to_json(&self) -> Value {
        let Completion {
            text,
            token_ids,
            usage,
            ..
        } = &self.completion;
        json!({
            "text": text,
            "token_ids": token_ids,
            "finish_reason": self.finish_reason(),
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "completion_tokens": usage.generated_tokens,
            },
            "time_to_first_token_s": self.time_to_first_token.as_secs_f64(),
            "tokens_per_second": self.tokens_per_second(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_paged_engine::RequestId;

    fn answer(num_tokens: usize) -> Answer {
        let mut completion = Completion::new(RequestId::new(1));
        completion.usage.generated_tokens = num_tokens;
        let second = Duration::from_secs(1);
        Answer {
            completion,
            time_to_first_token: second,
            decode_time: 2 * second,
        }
    }

    #[test]
    fn speed_counts_the_tokens_after_the_first() {
        assert_eq!(answer(11).tokens_per_second(), Some(5.0));
        assert_eq!(answer(1).tokens_per_second(), None);
        assert_eq!(answer(0).tokens_per_second(), None);
        assert!(answer(1).to_json()["tokens_per_second"].is_null());
    }
}
