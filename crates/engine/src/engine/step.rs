//! One step: schedule, build, run, sample, update. A decode may have been launched by the step before it, as `ahead.rs` says.

use std::time::Instant;

use burn_paged::{CaptureError, MetadataError};

use super::Engine;
use super::ahead::{DecodeAhead, can_decode_again};
use crate::generation::Generation;
use crate::replay::{DecodeWords, StepShape, prompt_words, words_ahead};
use crate::runner::{Launched, Runner, SampledRows};
use crate::scheduler::{ScheduledBatch, ScheduledSequence};
use crate::sequence::RunningSequence;
use crate::{FinishReason, GenerationError, SequenceSummary, TokenEvent, batch};

/// Why a step gave no tokens.
enum StepError {
    /// Its requests end.
    Failed(GenerationError),
    /// The contents of the cache are gone; the requests are not.
    CacheLost(CaptureError),
}

impl From<GenerationError> for StepError {
    fn from(error: GenerationError) -> Self {
        Self::Failed(error)
    }
}

impl From<MetadataError> for StepError {
    fn from(error: MetadataError) -> Self {
        Self::Failed(error.into())
    }
}

impl From<CaptureError> for StepError {
    fn from(error: CaptureError) -> Self {
        match error {
            CaptureError::Failed { .. } => Self::CacheLost(error),
            error => Self::Failed(GenerationError::Device(error.to_string())),
        }
    }
}

/// The shape that a batch is replayed in; `None` if it runs kernel by kernel, or needs logits on the host.
fn replay_shape(
    runner: &mut Runner,
    batch: &ScheduledBatch,
    running: &[RunningSequence],
    requests: &[&Generation],
) -> Option<StepShape> {
    let sequences = &batch.sequences;
    let sampling = sequences.iter().filter(|scheduled| scheduled.samples);
    if requests.len() != sampling.count() || requests.iter().any(|request| request.needs_logits()) {
        return None;
    }
    let blocks = |scheduled: &ScheduledSequence| &running[scheduled.index].blocks;
    let decodes = |scheduled: &ScheduledSequence| scheduled.num_tokens == 1 && scheduled.samples;
    if sequences.iter().all(decodes) {
        let held = |scheduled| blocks(scheduled).block_ids().len();
        return runner.decode_shape(sequences.len(), sequences.iter().map(held).max()?);
    }
    let block_size = runner.cache().geometry().block_size;
    let used = |scheduled: &ScheduledSequence| {
        let end = blocks(scheduled).num_computed_tokens() + scheduled.num_tokens;
        end.div_ceil(block_size)
    };
    let max_blocks = sequences.iter().map(used).max()?;
    runner.prompt_shape(batch.num_tokens(), sequences.len(), max_blocks)
}

impl Engine {
    pub(super) fn run_step(&mut self, events: &mut Vec<TokenEvent>) {
        let begin = Instant::now();
        let running = self.scheduler.running();
        let ahead = self.ahead.take().filter(|_| !running.is_empty());
        let batch = match &ahead {
            Some(_) => self.scheduler.schedule_again(),
            None => self.scheduler.schedule(),
        };
        self.counters.time.schedule += begin.elapsed();
        self.counters.preemptions += batch.preempted.len() as u64;
        if !batch.preempted.is_empty() {
            self.next_words = None;
        }
        self.note_step(&batch);
        for (id, error) in &batch.failed {
            log::error!("request {id} ends: {error}");
            events.extend(self.end(*id, FinishReason::Error(error.clone().into())));
        }
        if batch.sequences.is_empty() {
            return;
        }
        match self.run_batch(&batch, ahead) {
            Ok(rows) => self.update(&batch, rows, events),
            Err(StepError::Failed(error)) => self.fail_batch(&batch, &error, events),
            Err(StepError::CacheLost(error)) => self.lose_cache(&error),
        }
    }

    /// Runs the model, unless `ahead` is the run already, and samples a row for each sequence of the batch that is
    /// complete. If the next step is known to be a decode of the same sequences, it is launched before the rows are read.
    fn run_batch(
        &mut self,
        batch: &ScheduledBatch,
        ahead: Option<DecodeAhead>,
    ) -> Result<SampledRows, StepError> {
        let Self {
            scheduler,
            runner,
            generations,
            counters,
            next_words,
            ahead: next_ahead,
            ..
        } = self;
        let begin = Instant::now();
        let sampling = batch.sequences.iter().filter(|sequence| sequence.samples);
        let requests: Vec<&Generation> = sampling
            .filter_map(|sequence| generations.get(&sequence.id))
            .collect();
        let geometry = runner.cache().geometry();
        counters.decodes_ahead += u64::from(ahead.is_some());
        let (launched, shape, built) = match ahead {
            Some(ahead) => {
                let (shape, rows) = (ahead.shape, ahead.rows(batch));
                let ids = ahead.ids;
                (Launched::Ids { ids, rows }, Some(shape), begin)
            }
            None => {
                let running = scheduler.running();
                match replay_shape(runner, batch, running, &requests) {
                    Some(shape) => {
                        let options = requests.iter().map(|request| request.sampler().options());
                        let words = match shape.is_decode() {
                            true => next_words
                                .take()
                                .filter(|words| words.are_for(shape, batch))
                                .unwrap_or_else(|| DecodeWords::new(shape, batch, running))
                                .finish(batch, running, options, geometry)?,
                            false => prompt_words(shape, batch, running, options, geometry)?,
                        };
                        let built = Instant::now();
                        let ids = runner.replay(shape, words)?;
                        let rows = batch.sequences.iter().enumerate();
                        let rows = rows.filter(|(_, scheduled)| scheduled.samples);
                        let rows = rows.map(|(row, _)| row).collect();
                        (Launched::Ids { ids, rows }, Some(shape), built)
                    }
                    None => {
                        let device = &runner.spec().device;
                        let input = batch::model_input(batch, running, geometry, device)?;
                        let built = Instant::now();
                        (Launched::Logits(runner.forward(&input)), None, built)
                    }
                }
            }
        };
        let ran = Instant::now();
        // The device works; what needs no token of it is done before one is waited for: the next step up to its launch, or its
        // block tables.
        scheduler.mark_computed(batch);
        // The ids of a decode are the tokens of the next one row by row, unless one of its sequences has ended.
        let rows_stay = match &launched {
            Launched::Ids { rows, .. } => rows.iter().copied().eq(0..rows.len()),
            _ => false,
        };
        let decode = shape.filter(|shape| shape.is_decode());
        let next_shape = decode.filter(|shape| {
            rows_stay && can_decode_again(*shape, batch, &requests, runner, scheduler)
        });
        let marked = Instant::now();
        let tables = |shape: StepShape| DecodeWords::new(shape, batch, scheduler.running());
        let (launched, built_next) = match (next_shape, launched) {
            (Some(shape), Launched::Ids { ids, rows }) => {
                let options = |request: &&Generation| request.sampler().options_after(1);
                let options = requests.iter().map(options);
                let running = scheduler.running();
                let words = words_ahead(shape, batch, running, options, geometry)?;
                let built = Instant::now();
                let (pending, next_ids) = runner.decode_ahead(shape, words, ids)?;
                *next_ahead = Some(DecodeAhead::new(shape, batch, next_ids));
                *next_words = None;
                (Launched::PendingIds { ids: pending, rows }, built)
            }
            (_, launched) => {
                *next_words = decode.map(tables);
                (launched, Instant::now())
            }
        };
        let ran_next = Instant::now();
        let rows = runner.sample(launched, &requests)?;
        let time = &mut counters.time;
        time.build += (built - begin) + (built_next - marked);
        time.forward += (ran - built) + (ran_next - built_next);
        time.update += marked - ran;
        time.sample += ran_next.elapsed();
        counters.steps += 1;
        counters.fixed_decodes += u64::from(decode.is_some());
        counters.fixed_prompts += u64::from(shape.is_some() && decode.is_none());
        Ok(rows)
    }

    /// Gives each row to its request, and ends those that are done.
    fn update(&mut self, batch: &ScheduledBatch, rows: SampledRows, events: &mut Vec<TokenEvent>) {
        let begin = Instant::now();
        let sampling = batch.sequences.iter().filter(|sequence| sequence.samples);
        let first_event = events.len();
        for (scheduled, row) in sampling.zip(rows) {
            let Some(generation) = self.generations.get_mut(&scheduled.id) else {
                continue;
            };
            let event = match row {
                Ok(sampled) => {
                    self.scheduler.push_token(scheduled.index, sampled.token);
                    generation.accept(sampled)
                }
                Err(error) => {
                    log::error!("request {} ends: {error}", scheduled.id);
                    generation.close(FinishReason::Error(error))
                }
            };
            events.push(event);
        }
        // Only now, because removing a sequence moves the indices of those behind it.
        for event in &events[first_event..] {
            if event.finish.is_some() {
                self.forget(event.request_id);
            }
        }
        self.counters.time.update += begin.elapsed();
    }

    /// Ends every request of a batch whose results are lost.
    fn fail_batch(
        &mut self,
        batch: &ScheduledBatch,
        error: &GenerationError,
        events: &mut Vec<TokenEvent>,
    ) {
        log::error!(
            "a step of {} sequences failed: {error}",
            batch.sequences.len()
        );
        for scheduled in &batch.sequences {
            events.extend(self.end(scheduled.id, FinishReason::Error(error.clone())));
        }
        // What the step wrote is unknown, so no block may be trusted as a prefix any more.
        self.scheduler.reset_prefix_cache();
    }

    /// After a capture broke: goes on with an empty cache and without graphs. Every running sequence is computed again.
    pub(super) fn lose_cache(&mut self, error: &CaptureError) {
        (self.next_words, self.ahead) = (None, None);
        let num_preempted = self.scheduler.preempt_all();
        self.counters.preemptions += num_preempted as u64;
        log::error!(
            "{error}; steps run kernel by kernel from now on, and {num_preempted} sequences are computed again"
        );
        self.runner.renew_cache();
    }

    fn note_step(&mut self, batch: &ScheduledBatch) {
        let running = self.scheduler.running();
        let summary = batch.sequences.iter().map(|scheduled| SequenceSummary {
            request_id: scheduled.id,
            num_tokens: scheduled.num_tokens,
            num_blocks: running[scheduled.index].blocks.block_ids().len(),
            sampled: scheduled.samples,
        });
        self.last_step.sequences.clear();
        self.last_step.sequences.extend(summary);
        self.last_step.preempted.clone_from(&batch.preempted);
        for scheduled in &batch.sequences {
            let running = &running[scheduled.index];
            if running.is_decode() {
                self.counters.decode_tokens += 1;
                continue;
            }
            self.counters.prefill_tokens += scheduled.num_tokens as u64;
            // Found at the first admission, which is never a decode.
            if let Some(generation) = self.generations.get_mut(&scheduled.id) {
                generation.set_cached_tokens(running.sequence.num_cached_tokens.unwrap_or(0));
            }
        }
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::testing::FakeModel;
    use crate::{CacheSize, EngineConfig, Request};

    /// What three requests are answered, if the cache is lost before step `lost`.
    fn answers(lost: Option<usize>) -> Vec<Vec<u32>> {
        let config = EngineConfig {
            block_size: 4,
            cache_size: CacheSize::Tokens(128),
            max_num_batched_tokens: 8,
            max_num_seqs: 3,
            ..Default::default()
        };
        let model = FakeModel::hashed(40, &Device::flex());
        let mut engine = Engine::new(Box::new(model), config).unwrap();
        let mut tokens = vec![Vec::new(); 3];
        let requests = [3, 9, 17].map(|len| Request::new(vec![len; len as usize]));
        let ids = requests.map(|request| {
            let request = request.with_max_tokens(7);
            engine.add_request(request).unwrap()
        });
        for at in 0.. {
            if lost == Some(at) {
                let reason = "a test says so".to_owned();
                engine.lose_cache(&CaptureError::Failed { reason });
                assert_eq!(engine.metrics().cached_blocks, 0);
            }
            if !engine.has_work() {
                break;
            }
            for event in engine.step() {
                let request = ids.iter().position(|id| *id == event.request_id).unwrap();
                tokens[request].extend(event.token);
            }
        }
        assert_eq!(engine.metrics().preemptions > 0, lost.is_some());
        tokens
    }

    #[test]
    fn a_lost_cache_changes_no_answer() {
        let expected = answers(None);
        assert!(expected.iter().all(|tokens| tokens.len() == 7));
        // In the middle of the prompts, and of the answers.
        for lost in [1, 2, 3, 5, 8] {
            assert_eq!(answers(Some(lost)), expected, "lost before step {lost}");
        }
    }
}
