//! The numbers of `/stats`.

use burn_paged_engine::Usage;

use crate::answer::Answer;

/// Sums over a conversation, and its last answer.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    num_answers: usize,
    usage: Usage,
    last: Option<Answer>,
}

impl Totals {
    /// Counts one more answer.
    pub(crate) fn add(&mut self, answer: &Answer) {
        let usage = answer.completion.usage;
        self.num_answers += 1;
        self.usage.prompt_tokens += usage.prompt_tokens;
        self.usage.cached_tokens += usage.cached_tokens;
        self.usage.generated_tokens += usage.generated_tokens;
        self.last = Some(answer.clone());
    }

    /// The sums and the last answer as lines of text.
    pub(crate) fn report(&self) -> String {
        let Some(last) = &self.last else {
            return "nothing has been answered yet".to_owned();
        };
        let speed = match last.tokens_per_second() {
            Some(speed) => format!("{speed:.1} tokens per second after it"),
            None => "no token after it".to_owned(),
        };
        format!(
            "last answer: {}\n  first token after {:.2} s, {speed}, ended by {}\n\
             all {} answers: {}",
            tokens(last.completion.usage),
            last.time_to_first_token.as_secs_f64(),
            last.finish_reason().unwrap_or("nothing"),
            self.num_answers,
            tokens(self.usage),
        )
    }
}

fn tokens(usage: Usage) -> String {
    let Usage {
        prompt_tokens,
        cached_tokens,
        generated_tokens,
        ..
    } = usage;
    format!(
        "{prompt_tokens} prompt tokens, {cached_tokens} of them from the prefix cache; \
         {generated_tokens} generated"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_paged_engine::{Completion, FinishReason, RequestId};
    use std::time::Duration;

    #[test]
    fn the_report_tells_the_last_answer_and_the_sum() {
        let mut totals = Totals::default();
        assert_eq!(totals.report(), "nothing has been answered yet");
        for (prompt_tokens, cached_tokens, generated_tokens) in [(30, 0, 5), (50, 32, 9)] {
            let mut completion = Completion::new(RequestId::new(0));
            completion.usage = Usage {
                prompt_tokens,
                cached_tokens,
                generated_tokens,
            };
            completion.finish = Some(FinishReason::Length);
            let (time_to_first_token, decode_time) =
                (Duration::from_millis(250), Duration::from_secs(2));
            totals.add(&Answer {
                completion,
                time_to_first_token,
                decode_time,
            });
        }
        assert_eq!(
            totals.report(),
            "last answer: 50 prompt tokens, 32 of them from the prefix cache; 9 generated\n  \
             first token after 0.25 s, 4.0 tokens per second after it, ended by length\n\
             all 2 answers: 80 prompt tokens, 32 of them from the prefix cache; 14 generated"
        );
    }
}
