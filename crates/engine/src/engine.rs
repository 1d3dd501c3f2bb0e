//! The engine's face: requests in, events out. What happens in a step is in `engine/step.rs`, and which is launched before
//! it is its turn in `engine/ahead.rs`.

mod ahead;
mod generate;
mod step;

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::rc::Rc;

use burn_paged::PagedKvCache;
use burn_paged_kv_cache::{BlockManager, BlockManagerConfig};
use burn_paged_model::{CausalLm, ModelSpec};

use self::ahead::DecodeAhead;
use crate::config::geometry;
use crate::generation::Generation;
use crate::replay::{DecodeWords, StepShapes};
use crate::runner::Runner;
use crate::scheduler::Scheduler;
use crate::sequence::Sequence;
use crate::{
    Detokenizer, EngineConfig, EngineError, EngineLimits, EngineMetrics, FinishReason, Request,
    RequestError, RequestId, StepSummary, TokenEvent,
};

/// Runs many requests over one model and one paged cache.
///
/// Requests come in by [`add_request`](Self::add_request); each [`step`](Self::step) runs the model once for all that
/// can run and returns what came out. There are no threads and no channels inside: whoever owns the engine calls
/// `step` while [`has_work`](Self::has_work), on one thread.
///
/// No request can panic the engine: what a caller may get wrong is refused by `add_request`, and what breaks later
/// ends the requests it concerns with [`FinishReason::Error`].
///
/// # Examples
#[cfg_attr(feature = "flex", doc = "```")]
#[cfg_attr(not(feature = "flex"), doc = "```no_run")]
/// use burn::tensor::Device;
/// use burn_paged_engine::{CacheSize, Engine, EngineConfig, Request, testing::FakeModel};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let model = FakeModel::hashed(32, &Device::default());
/// let config = EngineConfig { cache_size: CacheSize::Tokens(256), ..Default::default() };
/// let mut engine = Engine::new(Box::new(model), config)?;
///
/// let id = engine.add_request(Request::new([3, 1, 4, 1, 5]).with_max_tokens(4))?;
/// let mut tokens = Vec::new();
/// while engine.has_work() {
///     for event in engine.step() {
///         assert_eq!(event.request_id, id);
///         tokens.extend(event.token);
///     }
/// }
/// assert_eq!(tokens.len(), 4);
/// # Ok(())
/// # }
/// ```
pub struct Engine {
    limits: EngineLimits,
    scheduler: Scheduler,
    runner: Runner,
    generations: HashMap<RequestId, Generation>,
    /// Block tables of the next step, written while the last one ran, as long as no sequence has lost its blocks since.
    next_words: Option<DecodeWords>,
    /// The decode that the device runs already, of the sequences that run.
    ahead: Option<DecodeAhead>,
    detokenizer: Option<Rc<dyn Detokenizer>>,
    end_tokens: Rc<BTreeSet<u32>>,
    /// Events that [`generate`](Engine::generate) saw and that belong to others.
    undelivered: Vec<TokenEvent>,
    next_id: u64,
    seed: u64,
    counters: EngineMetrics,
    last_step: StepSummary,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            limits,
            scheduler,
            runner,
            ..
        } = self;
        f.debug_struct("Engine")
            .field("limits", limits)
            .field("runner", runner)
            .field("running", &scheduler.running().len())
            .field("waiting", &scheduler.num_waiting())
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// An engine for `model`: checks the config and allocates the cache.
    ///
    /// # Errors
    /// - [`EngineError::Config`]: a field does not fit the others or the model.
    /// - [`EngineError::Blocks`], [`EngineError::Cache`]: there cannot be a cache of this size and dtype.
    pub fn new(model: Box<dyn CausalLm>, config: EngineConfig) -> Result<Self, EngineError> {
        let spec = model.spec();
        let limits = config.limits(spec)?;
        let shapes = StepShapes::new(&config.graphs, &limits)?;
        let EngineLimits {
            num_blocks,
            block_size,
            ..
        } = limits;
        let enable_prefix_caching = config.enable_prefix_caching;
        let blocks = BlockManagerConfig {
            num_blocks,
            block_size,
            enable_prefix_caching,
        };
        let scheduler = Scheduler::new(&limits, BlockManager::new(blocks)?);
        let geometry = geometry(spec, num_blocks, block_size);
        let kv_dtype = config.kv_dtype.of(spec);
        let cache = PagedKvCache::new(spec.num_layers, geometry, kv_dtype, &spec.device)?;
        if limits.max_model_len > limits.num_slots() {
            log::warn!(
                "the cache holds {} tokens, fewer than the context of {}: longer answers end early",
                limits.num_slots(),
                limits.max_model_len,
            );
        }
        Ok(Self {
            limits,
            scheduler,
            runner: Runner::new(model, cache, config.graphs.mode, shapes),
            generations: HashMap::new(),
            next_words: None,
            ahead: None,
            detokenizer: None,
            end_tokens: Rc::default(),
            undelivered: Vec::new(),
            next_id: 0,
            // The standard library's hasher has random keys from the operating system.
            seed: config
                .seed
                .unwrap_or_else(|| RandomState::new().build_hasher().finish()),
            counters: EngineMetrics::default(),
            last_step: StepSummary::default(),
        })
    }

    /// With text: events carry it, and stop strings are possible. Without, the engine deals in tokens alone.
    pub fn with_detokenizer(self, detokenizer: impl Detokenizer + 'static) -> Self {
        Self {
            detokenizer: Some(Rc::new(detokenizer)),
            ..self
        }
    }

    /// With the tokens that end an answer: all of the model's, not only the first.
    pub fn with_end_tokens(self, end_tokens: impl IntoIterator<Item = u32>) -> Self {
        Self {
            end_tokens: Rc::new(end_tokens.into_iter().collect()),
            ..self
        }
    }

    /// Whether steps run as graphs of the device, and not all kernel by kernel.
    pub fn captures_steps(&self) -> bool {
        self.runner.captures_steps()
    }

    /// Captures every size of decodes of [`GraphConfig`](crate::GraphConfig) now, and not each when it is first needed. `progress` is
    /// told how many of how many there are, first 0. Without graphs it does nothing.
    ///
    /// On CUDA a capture breaks if another thread of the process allocates or synchronizes meanwhile. Steps then run
    /// kernel by kernel, and the log says so.
    pub fn capture_decodes(&mut self, mut progress: impl FnMut(usize, usize)) {
        let shapes = self.runner.decode_shapes();
        progress(0, shapes.len());
        for (at, shape) in shapes.iter().enumerate() {
            if let Err(error) = self.runner.capture_padding(*shape) {
                self.lose_cache(&error);
            }
            progress(at + 1, shapes.len());
        }
    }

    /// The limits that requests are checked against.
    pub fn limits(&self) -> &EngineLimits {
        &self.limits
    }

    /// What the model says of itself.
    pub fn model_spec(&self) -> &ModelSpec {
        self.runner.spec()
    }

    /// Takes a request in. It runs when [`step`](Self::step) finds room for it.
    ///
    /// # Errors
    /// [`RequestError`] names the field that is wrong; nothing has changed. A prompt that could never run, because it
    /// is longer than the context or than the whole cache, is refused here.
    pub fn add_request(&mut self, request: Request) -> Result<RequestId, RequestError> {
        request.check(&self.limits, self.detokenizer.is_some())?;
        let id = match request.id {
            Some(id) if self.generations.contains_key(&id) => {
                return Err(RequestError::DuplicateId { id });
            }
            Some(id) => id,
            None => self.unused_id(),
        };
        let seed = request.sampling.seed.unwrap_or_else(|| self.next_seed());
        let stream = self
            .detokenizer
            .as_ref()
            .map(|detokenizer| detokenizer.stream(&request.prompt));
        let end_tokens = Rc::clone(&self.end_tokens);
        let generation = Generation::new(id, &request, seed, &self.limits, end_tokens, stream);
        self.generations.insert(id, generation);
        self.scheduler
            .add(Sequence::new(id, request.prompt, request.cache_key));
        self.counters.accepted += 1;
        Ok(id)
    }

    /// Ends a request at once and frees its blocks. Returns its last event, with the text that was held back; `None` if
    /// no such request is live, for instance because it ended by itself.
    pub fn abort(&mut self, id: RequestId) -> Option<TokenEvent> {
        // Events that nobody has taken yet are for nobody now.
        self.undelivered.retain(|event| event.request_id != id);
        self.end(id, FinishReason::Abort)
    }

    /// Whether a step would do something.
    pub fn has_work(&self) -> bool {
        !self.generations.is_empty() || !self.undelivered.is_empty()
    }

    /// Runs the model once for every sequence that can run, and returns what came out of it: at most one event per
    /// request, and none for a request that waits or whose prompt is not finished.
    pub fn step(&mut self) -> Vec<TokenEvent> {
        let mut events = std::mem::take(&mut self.undelivered);
        self.run_step(&mut events);
        events
    }

    /// State and counters.
    pub fn metrics(&self) -> EngineMetrics {
        let blocks = self.scheduler.blocks();
        EngineMetrics {
            running: self.scheduler.running().len(),
            waiting: self.scheduler.num_waiting(),
            num_blocks: blocks.num_blocks(),
            free_blocks: blocks.num_free_blocks(),
            cached_blocks: blocks.num_cached_blocks(),
            num_graphs: self.runner.num_graphs(),
            cache: blocks.stats(),
            ..self.counters.clone()
        }
    }

    /// What the last step did.
    pub fn last_step(&self) -> &StepSummary {
        &self.last_step
    }

    /// Forgets all cached prefixes. Running requests go on.
    pub fn reset_prefix_cache(&mut self) {
        self.scheduler.reset_prefix_cache();
    }

    /// Ends a live request with an event of its own.
    fn end(&mut self, id: RequestId, reason: FinishReason) -> Option<TokenEvent> {
        let event = self.generations.get_mut(&id)?.close(reason);
        self.forget(id);
        Some(event)
    }

    fn forget(&mut self, id: RequestId) {
        // Another sequence may come under the same id.
        self.next_words = None;
        self.scheduler.remove(id);
        self.generations.remove(&id);
        self.counters.finished += 1;
    }

    fn unused_id(&mut self) -> RequestId {
        loop {
            let id = RequestId::new(self.next_id);
            self.next_id = self.next_id.wrapping_add(1);
            if !self.generations.contains_key(&id) {
                return id;
            }
        }
    }

    fn next_seed(&mut self) -> u64 {
        // A counter is enough: the sampler's generator hashes its seed.
        self.seed = self.seed.wrapping_add(1);
        self.seed
    }
}
