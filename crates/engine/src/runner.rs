//! Owner of the model and of the cache tensors: a model input in, tokens out.

use std::fmt;

use burn::tensor::{DType, Int, Tensor};
use burn_paged::{PagedKvCache, SamplingOptions, greedy, sample};
use burn_paged_model::{CausalLm, ModelInput, ModelSpec};

use crate::GenerationError;
use crate::generation::Generation;
use crate::sampler::SampledToken;

/// A token per row, or why that row has none.
pub(crate) type SampledRows = Vec<Result<SampledToken, GenerationError>>;

/// Runs steps. All device work of an engine is here.
pub(crate) struct Runner {
    model: Box<dyn CausalLm>,
    cache: PagedKvCache,
}

impl fmt::Debug for Runner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (spec, cache) = (self.model.spec(), self.cache.geometry());
        f.debug_struct("Runner")
            .field("spec", spec)
            .field("cache", &cache)
            .finish()
    }
}

impl Runner {
    pub(crate) fn new(model: Box<dyn CausalLm>, cache: PagedKvCache) -> Self {
        Self { model, cache }
    }

    pub(crate) fn spec(&self) -> &ModelSpec {
        self.model.spec()
    }

    pub(crate) fn cache(&self) -> &PagedKvCache {
        &self.cache
    }

    /// One step: writes the cache and gives the logits of the wanted rows, `[num_logits, vocab_size]`.
    pub(crate) fn forward(&mut self, input: &ModelInput) -> Tensor<2> {
        self.model.forward(input, &mut self.cache)
    }

    /// Picks a token per row of `logits`, row `i` for `requests[i]`.
    ///
    /// If no row needs its logits on the host, the device samples and only ids are read back.
    ///
    /// # Errors
    /// [`GenerationError::Device`] if nothing could be read back.
    pub(crate) fn sample(
        &self,
        logits: Tensor<2>,
        requests: &[&Generation],
    ) -> Result<SampledRows, GenerationError> {
        match requests.iter().any(|request| request.needs_logits()) {
            true => sample_on_host(logits, requests),
            false => sample_on_device(logits, requests),
        }
    }
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
    let ids = read(ids.try_into_data())?;
    // A negative id is the device's word for a row that cannot be sampled.
    let sampled = |id: i64| match u32::try_from(id) {
        Ok(token) => Ok(SampledToken {
            token,
            logprobs: None,
        }),
        Err(_) => Err(GenerationError::DeviceLogits),
    };
    Ok(ids.iter::<i64>().map(sampled).collect())
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
