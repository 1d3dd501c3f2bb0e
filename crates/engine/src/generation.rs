//! The answer of one request as it grows: what each token does to it, and when it ends.

use std::collections::BTreeSet;
use std::rc::Rc;

use crate::sampler::{RowSampler, SampledToken};
use crate::stop_strings::Scan;
use crate::text::{TextOutput, TextStream};
use crate::{EngineLimits, FinishReason, Request, RequestId, TokenEvent, Usage};

/// State of one live request, besides its tokens, which the scheduler has.
#[derive(Debug)]
pub(crate) struct Generation {
    id: RequestId,
    sampler: RowSampler,
    text: TextOutput,
    /// End tokens of the model, unless the request ignores them.
    end_tokens: Rc<BTreeSet<u32>>,
    stop_token_ids: Vec<u32>,
    min_tokens: usize,
    /// Tokens after which context, cache or request allow no more.
    max_tokens: usize,
    usage: Usage,
}

impl Generation {
    /// The begin of an answer. `request` has been checked against `limits`.
    pub(crate) fn new(
        id: RequestId,
        request: &Request,
        seed: u64,
        limits: &EngineLimits,
        end_tokens: Rc<BTreeSet<u32>>,
        stream: Option<Box<dyn TextStream>>,
    ) -> Self {
        let Request {
            prompt,
            sampling,
            stop,
            ..
        } = request;
        let room = limits.max_seq_len() - prompt.len();
        Self {
            id,
            sampler: RowSampler::new(sampling.clone(), seed, prompt),
            text: TextOutput::new(stream, stop.stop_strings.clone()),
            end_tokens: if stop.ignore_eos {
                Rc::default()
            } else {
                end_tokens
            },
            stop_token_ids: stop.stop_token_ids.clone(),
            min_tokens: stop.min_tokens,
            max_tokens: stop.max_tokens.unwrap_or(room).min(room),
            usage: Usage {
                prompt_tokens: prompt.len(),
                ..Usage::default()
            },
        }
    }

    pub(crate) fn sampler(&self) -> &RowSampler {
        &self.sampler
    }

    /// Whether the logits of the next token have to be on the host.
    pub(crate) fn needs_logits(&self) -> bool {
        self.sampler.needs_logits() || self.bans_stop_tokens()
    }

    /// Whether the next token is the last, whatever it is.
    pub(crate) fn ends_with_next(&self) -> bool {
        self.usage.generated_tokens + 1 >= self.max_tokens
    }

    /// Tokens that may not be picked next.
    pub(crate) fn banned(&self) -> Vec<u32> {
        match self.bans_stop_tokens() {
            true => self
                .end_tokens
                .iter()
                .chain(&self.stop_token_ids)
                .copied()
                .collect(),
            false => Vec::new(),
        }
    }

    /// Notes what the prefix cache had of the prompt.
    pub(crate) fn set_cached_tokens(&mut self, num_cached_tokens: usize) {
        self.usage.cached_tokens = num_cached_tokens;
    }

    /// Adds a sampled token to the answer, or ends it.
    pub(crate) fn accept(&mut self, sampled: SampledToken) -> TokenEvent {
        let SampledToken { token, logprobs } = sampled;
        let is_stop = self.end_tokens.contains(&token) || self.stop_token_ids.contains(&token);
        if is_stop && !self.bans_stop_tokens() {
            return self.close(FinishReason::StopToken(token));
        }
        self.usage.generated_tokens += 1;
        self.sampler.record(token);
        let num_generated = self.usage.generated_tokens;
        let Scan { mut text, stop } = self.text.push(token, num_generated > self.min_tokens);
        let mut finish = stop.map(FinishReason::StopString);
        if finish.is_none() && num_generated >= self.max_tokens {
            let rest = self.text.finish();
            text.push_str(&rest.text);
            finish = Some(
                rest.stop
                    .map_or(FinishReason::Length, FinishReason::StopString),
            );
        }
        TokenEvent {
            token: Some(token),
            text,
            logprobs,
            finish,
            ..self.event()
        }
    }

    /// Ends the answer without another token: lets the held text go.
    pub(crate) fn close(&mut self, reason: FinishReason) -> TokenEvent {
        let Scan { text, stop } = self.text.finish();
        let finish = match (reason, stop) {
            (FinishReason::StopToken(_), Some(stop)) => FinishReason::StopString(stop),
            (reason, _) => reason,
        };
        TokenEvent {
            text,
            finish: Some(finish),
            ..self.event()
        }
    }

    fn bans_stop_tokens(&self) -> bool {
        self.usage.generated_tokens < self.min_tokens
    }

    fn event(&self) -> TokenEvent {
        TokenEvent {
            request_id: self.id,
            token: None,
            text: String::new(),
            logprobs: None,
            finish: None,
            usage: self.usage,
        }
    }
}
