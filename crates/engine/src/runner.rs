//! Owner of the model and of the cache tensors: a model input in, tokens out.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::time::Instant;

use burn::tensor::{DType, Int, Tensor};
use burn_paged::{
    CacheGeometry, CaptureError, CapturedStep, ImplementedBy, PagedKvCache, PendingIds,
    SamplingOptions, StepWords, capture, greedy, implemented_by, queue_together, sample,
    sample_by_words, samples_on_device, supports_capture,
};
use burn_paged_model::{CausalLm, ModelInput, ModelSpec};

use crate::generation::Generation;
use crate::replay::{DecodeWords, StepShape, StepShapes};
use crate::sampler::SampledToken;
use crate::{GenerationError, GraphMode};

/// Most recordings of steps with prompts: lengths, numbers of sequences and widths of tables make more shapes than there may be
/// memory for.
const MOST_PROMPT_GRAPHS: usize = 32;

/// A token per row, or why that row has none.
pub(crate) type SampledRows = Vec<Result<SampledToken, GenerationError>>;

/// What a step left on the device.
pub(crate) enum Launched {
    /// Logits of the rows that sample, `[num_logits, vocab_size]`.
    Logits(Tensor<2>),
    /// Ids of the rows of a step over fixed words, and which of the rows are sampled for a request.
    Ids {
        ids: Tensor<1, Int>,
        rows: Vec<usize>,
    },
    /// The same, after the next decode was launched on them.
    PendingIds { ids: PendingIds, rows: Vec<usize> },
}

/// Steps over fixed words: one shape at a time is written, each has its own recording.
struct Replays {
    /// Recordings hold addresses of what the others own, so they go first.
    graphs: HashMap<StepShape, CapturedStep<Tensor<1, Int>>>,
    words: StepWords,
    /// The shape whose words those on the device are, unless they are nobody's.
    written: Option<StepShape>,
    shapes: StepShapes,
    /// Shapes of steps with prompts that came once.
    seen: HashSet<StepShape>,
    /// Whether the device records.
    captures: bool,
    /// Whether shapes without a recording run, too, kernel by kernel.
    emulates: bool,
}

/// Runs steps. All device work of an engine is here.
pub(crate) struct Runner {
    /// `None` where every step runs kernel by kernel, over tensors of its own.
    replays: Option<Replays>,
    model: Box<dyn CausalLm>,
    cache: PagedKvCache,
}

impl fmt::Debug for Runner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (spec, cache) = (self.model.spec(), self.cache.geometry());
        f.debug_struct("Runner")
            .field("spec", spec)
            .field("cache", &cache)
            .field("num_graphs", &self.num_graphs())
            .finish()
    }
}

impl Runner {
    /// `shapes` are what steps are captured in; the log says whether they are.
    pub(crate) fn new(
        model: Box<dyn CausalLm>,
        cache: PagedKvCache,
        mode: GraphMode,
        shapes: StepShapes,
    ) -> Self {
        let replays = match captures(model.as_ref(), mode) {
            Ok(captures) => {
                let device = &model.spec().device;
                let mut words = StepWords::new(shapes.num_words(), device);
                // Compiles what no recording needs, before a request waits for it.
                let shape = shapes.decodes().last().expect("there are decodes");
                words.write(DecodeWords::padding(shape));
                let blocks = shape.next_blocks(cache.geometry());
                let ids = Tensor::zeros([shape.num_rows], (device, DType::I32));
                drop(words.feed_back(shape.layout().token_ids, ids, Some(blocks)));
                let how = match captures {
                    true => "run as captured graphs for",
                    false => "run kernel by kernel, padded to",
                };
                let (batch_sizes, widths) = (shapes.batch_sizes(), shapes.widths());
                let prompt_sizes = shapes.prompt_sizes();
                log::info!(
                    "decodes {how} {batch_sizes:?} sequences, steps with prompts for {prompt_sizes:?} tokens, of up to \
                     {widths:?} blocks"
                );
                Some(Replays {
                    graphs: HashMap::new(),
                    words,
                    written: None,
                    shapes,
                    seen: HashSet::new(),
                    captures,
                    emulates: mode == GraphMode::Emulated,
                })
            }
            Err(reason) => {
                log::info!("steps run kernel by kernel: {reason}");
                None
            }
        };
        Self {
            replays,
            model,
            cache,
        }
    }

    pub(crate) fn spec(&self) -> &ModelSpec {
        self.model.spec()
    }

    pub(crate) fn cache(&self) -> &PagedKvCache {
        &self.cache
    }

    /// Whether steps run as graphs of the device.
    pub(crate) fn captures_steps(&self) -> bool {
        self.replays
            .as_ref()
            .is_some_and(|replays| replays.captures)
    }

    /// Recordings that are kept.
    pub(crate) fn num_graphs(&self) -> usize {
        let graphs = self.replays.as_ref().map(|replays| &replays.graphs);
        graphs.map_or(0, HashMap::len)
    }

    /// Shapes of decodes that are captured, now or when they are first needed; none where nothing is.
    pub(crate) fn decode_shapes(&self) -> Vec<StepShape> {
        let replays = self.replays.as_ref().filter(|replays| replays.captures);
        replays.map_or(Vec::new(), |replays| replays.shapes.decodes().collect())
    }

    /// The shape for a decode of so many sequences, of which none has more blocks; `None` if it runs kernel by kernel.
    pub(crate) fn decode_shape(&self, num_rows: usize, max_blocks: usize) -> Option<StepShape> {
        let replays = self.replays.as_ref()?;
        match replays.captures || replays.emulates {
            true => replays.shapes.decode(num_rows, max_blocks),
            false => None,
        }
    }

    /// The shape for a step with prompts of so many tokens of so many sequences, of which none has more blocks; `None` if it runs
    /// kernel by kernel, as the first of a shape does where shapes are captured (lengths of prompts vary, and a shape that never comes
    /// again is not worth a recording), and as any new shape does once there are as many recordings as may be.
    pub(crate) fn prompt_shape(
        &mut self,
        num_tokens: usize,
        num_rows: usize,
        max_blocks: usize,
    ) -> Option<StepShape> {
        let replays = self.replays.as_mut()?;
        let shape = replays.shapes.prompts(num_tokens, num_rows, max_blocks)?;
        let runs = match replays.captures {
            true => {
                let was_seen = !replays.seen.insert(shape);
                let prompts = replays.graphs.keys().filter(|shape| !shape.is_decode());
                let is_full = prompts.count() >= MOST_PROMPT_GRAPHS;
                was_seen && (!is_full || replays.graphs.contains_key(&shape))
            }
            false => replays.emulates,
        };
        runs.then_some(shape)
    }

    /// One step: writes the cache and gives the logits of the wanted rows, `[num_logits, vocab_size]`.
    pub(crate) fn forward(&mut self, input: &ModelInput) -> Tensor<2> {
        self.model.forward(input, &mut self.cache)
    }

    /// One step of the given shape over its words: writes the cache and gives an id per row.
    ///
    /// # Errors
    /// [`CaptureError::Failed`] if the shape was to be captured now and the recording broke: the contents of the cache are
    /// lost. [`CaptureError::Replay`] if the device takes no more work.
    ///
    /// # Panics
    /// If [`decode_shape`](Self::decode_shape) and [`prompt_shape`](Self::prompt_shape) give no shapes.
    pub(crate) fn replay(
        &mut self,
        shape: StepShape,
        words: Vec<i32>,
    ) -> Result<Tensor<1, Int>, CaptureError> {
        let replays = self.replays.as_mut().expect("there are shapes");
        replays.words.write(words);
        replays.written = Some(shape);
        self.launch(shape)
    }

    /// Whether the words on the device are those of the last replayed step, and it had this shape: what [`decode_ahead`](Self::decode_ahead)
    /// goes on from.
    pub(crate) fn holds_words_of(&self, shape: StepShape) -> bool {
        let written = self.replays.as_ref().and_then(|replays| replays.written);
        written == Some(shape)
    }

    /// One decode of the given shape whose tokens are the `ids` of the one before it, row by row, and whose tables are those before
    /// it with the blocks of the new tokens; `words` are all that it needs besides. Gives the `ids`, on their way to the host, and
    /// what [`replay`](Self::replay) does.
    ///
    /// # Errors
    /// As [`replay`](Self::replay); nothing is captured where the shape was decoded before.
    ///
    /// # Panics
    /// As [`replay`](Self::replay), and unless [`holds_words_of`](Self::holds_words_of) the shape.
    pub(crate) fn decode_ahead(
        &mut self,
        shape: StepShape,
        words: Vec<i32>,
        ids: Tensor<1, Int>,
    ) -> Result<(PendingIds, Tensor<1, Int>), CaptureError> {
        assert!(self.holds_words_of(shape), "the words are not of {shape:?}");
        let blocks = shape.next_blocks(self.cache.geometry());
        let layout = shape.layout();
        let Replays {
            graphs, words: all, ..
        } = self.replays.as_mut().expect("there are shapes");
        let write = |all: &mut StepWords| {
            all.write_from(layout.positions, words);
            all.feed_back(layout.token_ids, ids, Some(blocks))
        };
        let Some(graph) = graphs.get(&shape) else {
            let pending = write(all);
            return Ok((pending, self.launch(shape)?));
        };
        let pending = queue_together(&self.model.spec().device, || {
            let pending = write(all);
            // SAFETY: as in `launch`: whichever thread this is, ours waits for it, and our stream orders what is queued.
            unsafe { graph.replay() }.map(|()| pending)
        })?;
        Ok((pending, graph.output().clone()))
    }

    /// Runs the step of a shape over what is in the words.
    fn launch(&mut self, shape: StepShape) -> Result<Tensor<1, Int>, CaptureError> {
        let replays = self.replays.as_mut().expect("there are shapes");
        if replays.captures && !replays.graphs.contains_key(&shape) {
            self.capture(shape)?;
        }
        let replays = self.replays.as_ref().expect("there are shapes");
        let Some(graph) = replays.graphs.get(&shape) else {
            return Ok(step(&*self.model, &mut self.cache, &replays.words, shape));
        };
        // SAFETY: weights, cache and words are this value's own, on whose thread everything happens: an engine cannot be
        // sent to another. A new cache comes with a new set of recordings.
        unsafe { graph.replay() }?;
        Ok(graph.output().clone())
    }

    /// Captures the shape of a decode on padding alone, if it is not captured yet.
    ///
    /// # Errors
    /// As [`replay`](Self::replay).
    pub(crate) fn capture_padding(&mut self, shape: StepShape) -> Result<(), CaptureError> {
        match &mut self.replays {
            Some(replays) if replays.captures && !replays.graphs.contains_key(&shape) => {
                replays.written = None;
                replays.words.write(DecodeWords::padding(shape));
                self.capture(shape)
            }
            _ => Ok(()),
        }
    }

    /// Records the step of a shape. It runs for that, with what is in the words: a step that runs twice writes the same
    /// twice.
    fn capture(&mut self, shape: StepShape) -> Result<(), CaptureError> {
        let replays = self.replays.as_mut().expect("there are shapes");
        let (model, cache, words) = (&*self.model, &mut self.cache, &replays.words);
        let begin = Instant::now();
        match capture(&model.spec().device, || step(model, cache, words, shape)) {
            Ok(graph) => {
                let (ms, num_graphs) = (begin.elapsed().as_millis(), replays.graphs.len() + 1);
                log::info!("captured {shape:?} in {ms} ms, graph {num_graphs}");
                replays.graphs.insert(shape, graph);
                Ok(())
            }
            Err(CaptureError::Unsupported { reason }) => {
                log::warn!("steps run kernel by kernel from now on: {reason}");
                replays.captures = false;
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Makes the cache anew, after a capture broke and took its contents along. Nothing is captured any more.
    pub(crate) fn renew_cache(&mut self) {
        self.replays = None;
        let (geometry, dtype) = (self.cache.geometry(), self.cache.dtype());
        let (num_layers, device) = (self.cache.num_layers(), self.model.spec().device.clone());
        // The old one leaves before the new one comes: there may not be room for two.
        let one_block = CacheGeometry {
            num_blocks: 1,
            ..geometry
        };
        for (num_layers, geometry) in [(1, one_block), (num_layers, geometry)] {
            self.cache = PagedKvCache::new(num_layers, geometry, dtype, &device)
                .expect("what made the first cache makes another");
        }
    }

    /// Reads back a token for each of `requests`.
    ///
    /// If no row needs its logits on the host, the device samples and only ids are read back.
    ///
    /// # Errors
    /// [`GenerationError::Device`] if nothing could be read back.
    pub(crate) fn sample(
        &self,
        launched: Launched,
        requests: &[&Generation],
    ) -> Result<SampledRows, GenerationError> {
        match launched {
            _ if requests.is_empty() => Ok(Vec::new()),
            Launched::Ids { ids, rows } => Ok(sampled_rows(&read_ids(ids)?, rows)),
            Launched::PendingIds { ids, rows } => {
                let ids = ids.wait().map_err(GenerationError::Device)?;
                Ok(sampled_rows(&ids, rows))
            }
            Launched::Logits(logits) => match requests.iter().any(|request| request.needs_logits())
            {
                true => sample_on_host(logits, requests),
                false => sample_on_device(logits, requests),
            },
        }
    }
}

/// Whether steps of `model` are captured; an error says why they run kernel by kernel.
fn captures(model: &dyn CausalLm, mode: GraphMode) -> Result<bool, String> {
    let ModelSpec {
        architecture,
        device,
        vocab_size,
        ..
    } = model.spec();
    if mode == GraphMode::Off {
        return Err("graphs are off".to_owned());
    }
    if implemented_by(device) != ImplementedBy::Backend || !samples_on_device(device, *vocab_size) {
        return Err(format!(
            "the device does not sample rows of {vocab_size} logits"
        ));
    }
    if mode == GraphMode::Emulated {
        return Ok(false);
    }
    if !model.can_be_captured() {
        return Err(format!("{architecture} cannot be captured"));
    }
    supports_capture(device).map_err(|error| error.to_string())?;
    Ok(true)
}

/// What a step launches: the same whatever the words hold.
fn step(
    model: &dyn CausalLm,
    cache: &mut PagedKvCache,
    words: &StepWords,
    shape: StepShape,
) -> Tensor<1, Int> {
    let (input, options) = shape.views(words, cache.geometry());
    let logits = model.forward(&input, cache);
    sample_by_words(logits, &options)
}

fn sample_on_device(
    logits: Tensor<2>,
    requests: &[&Generation],
) -> Result<SampledRows, GenerationError> {
    let options: Vec<SamplingOptions> = requests
        .iter()
        .map(|request| request.sampler().options())
        .collect();
    let is_greedy = |options: &SamplingOptions| options.temperature <= 0.0;
    let ids: Tensor<1, Int> = match options.iter().all(is_greedy) {
        true => greedy(logits),
        false => sample(logits, &options),
    };
    Ok(sampled_rows(&read_ids(ids)?, 0..requests.len()))
}

fn read_ids(ids: Tensor<1, Int>) -> Result<Vec<i32>, GenerationError> {
    let ids = read(ids.try_into_data())?;
    Ok(ids.iter::<i32>().collect())
}

/// The tokens of some rows of `ids`.
fn sampled_rows(ids: &[i32], rows: impl IntoIterator<Item = usize>) -> SampledRows {
    // A negative id is the device's word for a row that cannot be sampled.
    let sampled = |row: usize| match u32::try_from(ids[row]) {
        Ok(token) => Ok(SampledToken {
            token,
            logprobs: None,
        }),
        Err(_) => Err(GenerationError::DeviceLogits),
    };
    rows.into_iter().map(sampled).collect()
}

fn sample_on_host(
    logits: Tensor<2>,
    requests: &[&Generation],
) -> Result<SampledRows, GenerationError> {
    let vocab_size = logits.dims()[1].max(1);
    let data = read(logits.cast(DType::F32).try_into_data())?;
    let values = read(data.try_into_vec::<f32>())?;
    let rows = values.chunks(vocab_size).zip(requests);
    Ok(rows
        .map(|(row, request)| Ok(request.sampler().sample(row.to_vec(), &request.banned())?))
        .collect())
}

fn read<T, E: fmt::Debug>(data: Result<T, E>) -> Result<T, GenerationError> {
    data.map_err(|error| GenerationError::Device(format!("{error:?}")))
}
