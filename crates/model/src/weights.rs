//! From a source of weights to tensors on a device, one at a time, with an account of what was missing and what was left
//! over.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_paged_checkpoint::{Checkpoint, FloatData, FloatKind, HostTensor};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::config::{ConfigError, parse_config};
use crate::error::{LoadError, Misshapen, list};
use crate::options::{LoadOptions, LoadProgress, settle_dtype};
use crate::source::WeightSource;

/// Buffers that older checkpoints carry and every model computes itself.
const COMPUTED: [&str; 1] = [".rotary_emb.inv_freq"];

/// Loads weights for a model that is being built.
///
/// A tensor that is missing or has the wrong shape does not stop the loading: it is noted, a placeholder without values takes
/// its place, and [`load_with`] refuses the model with the names of all of them. From the first fault on, nothing more is
/// read. So a model that is handed out has all its weights.
///
/// Tensors are read, converted and uploaded one by one: beside the model, host memory holds one tensor.
#[derive(Debug)]
pub struct WeightLoader<'a> {
    source: WeightSource<'a>,
    options: &'a LoadOptions,
    dtype: DType,
    kind: FloatKind,
    missing: Vec<String>,
    misshapen: Vec<Misshapen>,
    progress: LoadProgress,
}

/// Builds a model with `build` and hands it out only if every weight that it asked for was there.
///
/// Tensors of the checkpoint that nothing asked for are listed in one warning of the log.
///
/// # Errors
/// - what `build` returns;
/// - [`LoadError::Weights`] with all missing and all misshapen tensors;
/// - [`LoadError::UnsupportedDType`] if the options force a dtype that the device does not compute in.
pub fn load_with<'a, M>(
    source: impl Into<WeightSource<'a>>,
    options: &'a LoadOptions,
    build: impl FnOnce(&mut WeightLoader<'_>) -> Result<M, LoadError>,
) -> Result<M, LoadError> {
    let source = source.into();
    let (dtype, kind) = settle_dtype(options, source.stored_kind())?;
    let mut progress = LoadProgress::default();
    match source {
        WeightSource::Checkpoint(checkpoint) => {
            progress.total_bytes = checkpoint.total_bytes();
            progress.total_tensors = checkpoint.num_tensors();
        }
        WeightSource::Random(random) => log::warn!(
            "weights are random, the model answers with noise: seed {}, standard deviation {}",
            random.seed(),
            random.std()
        ),
    }
    let (missing, misshapen) = (Vec::new(), Vec::new());
    let mut loader = WeightLoader {
        source,
        options,
        dtype,
        kind,
        missing,
        misshapen,
        progress,
    };
    let model = build(&mut loader)?;
    loader.finish()?;
    Ok(model)
}

impl<'a> WeightLoader<'a> {
    /// Where the weights come from.
    pub fn source(&self) -> WeightSource<'a> {
        self.source
    }

    /// The whole configuration, for what [`config`](Self::config) does not cover.
    pub fn config_json(&self) -> &'a Value {
        self.source.config()
    }

    /// The caller's choices.
    pub fn options(&self) -> &'a LoadOptions {
        self.options
    }

    /// Where the weights go.
    pub fn device(&self) -> &'a Device {
        &self.options.device
    }

    /// The dtype of the weights.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The configuration as the model's own type.
    ///
    /// # Errors
    /// [`LoadError::Config`] naming the field.
    pub fn config<T: DeserializeOwned>(&self) -> Result<T, LoadError> {
        parse_config(self.config_json()).map_err(|source| self.config_error(source))
    }

    /// A fault in the configuration, with the path of the files.
    pub fn config_error(&self, source: ConfigError) -> LoadError {
        LoadError::config(self.source.path(), source)
    }

    /// The positions that the model is loaded for: those that were asked for, or all that it supports.
    ///
    /// # Errors
    /// [`LoadError::MaxPositions`] if more were asked for; [`LoadError::Config`] for 0.
    pub fn max_positions(&self, supported: usize) -> Result<usize, LoadError> {
        match self.options.max_positions.unwrap_or(supported) {
            0 => Err(self.config_error(ConfigError::new("max_positions", "is 0"))),
            wanted if wanted > supported => Err(LoadError::MaxPositions { wanted, supported }),
            wanted => Ok(wanted),
        }
    }

    /// Whether a tensor of this name is stored.
    pub fn contains(&self, name: &str) -> bool {
        match self.source {
            WeightSource::Checkpoint(checkpoint) => checkpoint.contains(name),
            WeightSource::Random(_) => false,
        }
    }

    /// Loads a tensor.
    ///
    /// # Errors
    /// What the reader of the file reports. A tensor that is missing or misshapen is noted instead, see [`WeightLoader`].
    pub fn tensor<const D: usize>(
        &mut self,
        name: &str,
        shape: [usize; D],
    ) -> Result<Tensor<D>, LoadError> {
        self.load(&[(name, shape.first().copied().unwrap_or(1))], shape)
    }

    /// Loads a tensor that the checkpoint may lack.
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor).
    pub fn optional<const D: usize>(
        &mut self,
        name: &str,
        shape: [usize; D],
    ) -> Result<Option<Tensor<D>>, LoadError> {
        self.contains(name)
            .then(|| self.tensor(name, shape))
            .transpose()
    }

    /// Loads several tensors into one, stacked along the first axis: projections that are computed in one product.
    ///
    /// # Shapes
    /// - `parts`: name and rows of each, all with the trailing dimensions `shape[1..]`; `shape[0]` is the sum of the rows
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor).
    ///
    /// # Panics
    /// If the rows of the parts do not add up to `shape[0]`.
    pub fn stacked<const D: usize>(
        &mut self,
        parts: &[(impl AsRef<str>, usize)],
        shape: [usize; D],
    ) -> Result<Tensor<D>, LoadError> {
        let total: usize = parts.iter().map(|(_, rows)| rows).sum();
        assert!(
            total == shape[0],
            "parts have {total} rows, the shape is {shape:?}"
        );
        let parts: Vec<(&str, usize)> = parts
            .iter()
            .map(|(name, rows)| (name.as_ref(), *rows))
            .collect();
        self.load(&parts, shape)
    }

    /// Reads a small vector to the host in f32, if the checkpoint has it: for what goes into a table and not into a product.
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor).
    pub fn optional_host_vector(
        &mut self,
        name: &str,
        len: usize,
    ) -> Result<Option<Vec<f32>>, LoadError> {
        if !self.contains(name) {
            return Ok(None);
        }
        self.check(name, &[len]);
        let WeightSource::Checkpoint(checkpoint) = self.source else {
            return Ok(None);
        };
        if self.is_faulty() {
            return Ok(None);
        }
        let host = checkpoint.read(name, FloatKind::F32)?;
        self.advance(&[name])?;
        match host.data {
            FloatData::F32(values) => Ok(Some(values)),
            other => unreachable!("asked for f32, got {}", other.kind()),
        }
    }

    /// Says that the model does without this tensor on purpose, so that it is not reported as unused.
    pub fn ignore(&mut self, name: &str) {
        if let WeightSource::Checkpoint(checkpoint) = self.source
            && checkpoint.mark_used(name).is_ok()
        {
            log::debug!("{name} is not needed");
        }
    }

    /// Loads parts that lie one below the other, which may be one.
    fn load<const D: usize>(
        &mut self,
        parts: &[(&str, usize)],
        shape: [usize; D],
    ) -> Result<Tensor<D>, LoadError> {
        let checkpoint = match self.source {
            WeightSource::Checkpoint(checkpoint) => checkpoint,
            // A stack of parts is drawn as a whole, under the name of its first.
            WeightSource::Random(random) => {
                return Ok(self.persistent((), |()| {
                    random.tensor(parts[0].0, shape, self.device(), self.dtype)
                }));
            }
        };
        for (name, rows) in parts {
            let mut part = shape;
            if let Some(first) = part.first_mut() {
                *first = *rows;
            }
            self.check(name, &part);
        }
        if self.is_faulty() {
            return Ok(self.placeholder(shape));
        }
        let names: Vec<&str> = parts.iter().map(|(name, _)| *name).collect();
        let host = match names[..] {
            [name] => checkpoint.read(name, self.kind)?,
            _ => checkpoint.read_stacked(&names, self.kind)?,
        };
        self.advance(&names)?;
        Ok(self.upload(host, shape))
    }

    fn is_faulty(&self) -> bool {
        !self.missing.is_empty() || !self.misshapen.is_empty()
    }

    /// Notes a tensor that cannot be loaded.
    fn check(&mut self, name: &str, expected: &[usize]) {
        let WeightSource::Checkpoint(checkpoint) = self.source else {
            return;
        };
        match checkpoint.info(name) {
            Err(_) => self.missing.push(name.to_owned()),
            Ok(info) if info.shape != expected => self.misshapen.push(Misshapen {
                name: name.to_owned(),
                expected: expected.to_vec(),
                found: info.shape.clone(),
            }),
            Ok(_) => {}
        }
    }

    /// Stands for a weight of a model that will not be handed out: the shape, and one element of memory.
    fn placeholder<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        Tensor::<D>::zeros([1; D], (self.device(), self.dtype)).expand(shape)
    }

    fn upload<const D: usize>(&self, host: HostTensor, shape: [usize; D]) -> Tensor<D> {
        let data = match host.data {
            FloatData::F32(values) => TensorData::new(values, shape),
            FloatData::F16(values) => TensorData::new(values, shape),
            FloatData::BF16(values) => TensorData::new(values, shape),
        };
        let options = (self.device(), self.dtype);
        self.persistent(data, |data| Tensor::from_data(data, options))
    }

    /// Weights live as long as the model: the persistent pool keeps them out of the way of a step's allocations.
    fn persistent<I: Send, const D: usize>(
        &self,
        input: I,
        make: impl Fn(I) -> Tensor<D> + Send,
    ) -> Tensor<D> {
        self.device().memory_persistent_allocations(input, make)
    }

    fn advance(&mut self, names: &[&str]) -> Result<(), LoadError> {
        let WeightSource::Checkpoint(checkpoint) = self.source else {
            return Ok(());
        };
        for name in names {
            self.progress.bytes += checkpoint.info(name)?.num_bytes as u64;
            self.progress.tensors += 1;
        }
        self.report();
        Ok(())
    }

    fn report(&self) {
        if let Some(progress) = &self.options.progress {
            progress(self.progress);
        }
    }

    fn finish(mut self) -> Result<(), LoadError> {
        if self.is_faulty() {
            let path = self.source.path().to_path_buf();
            let (missing, misshapen) = (self.missing, self.misshapen);
            return Err(LoadError::Weights {
                path,
                missing,
                misshapen,
            });
        }
        if let WeightSource::Checkpoint(checkpoint) = self.source {
            warn_of_unused(checkpoint);
        }
        self.progress.bytes = self.progress.total_bytes;
        self.progress.tensors = self.progress.total_tensors;
        self.report();
        Ok(())
    }
}

fn warn_of_unused(checkpoint: &Checkpoint) {
    let is_computed = |name: &str| COMPUTED.iter().any(|end| name.ends_with(end));
    let mut unused = checkpoint.unused();
    unused.retain(|name| !is_computed(name));
    if !unused.is_empty() {
        let path = checkpoint.path().display();
        log::warn!(
            "{} tensors of {path} are not used: {}",
            unused.len(),
            list(&unused)
        );
    }
}
