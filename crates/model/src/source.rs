//! Where a model comes from: files, or a configuration alone.

use std::path::Path;

use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_paged_checkpoint::{Checkpoint, FloatKind, SourceDType};
use serde_json::Value;

/// Standard deviation of drawn weights, as most decoders begin their training with.
const STD: f64 = 0.02;

/// What a model is loaded from. A reference to either kind turns into it, so that the caller names the kind.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum WeightSource<'a> {
    /// Files.
    Checkpoint(&'a Checkpoint),
    /// Weights without meaning.
    Random(&'a RandomWeights),
}

impl<'a> From<&'a Checkpoint> for WeightSource<'a> {
    fn from(checkpoint: &'a Checkpoint) -> Self {
        Self::Checkpoint(checkpoint)
    }
}

impl<'a> From<&'a RandomWeights> for WeightSource<'a> {
    fn from(random: &'a RandomWeights) -> Self {
        Self::Random(random)
    }
}

impl<'a> WeightSource<'a> {
    /// The configuration, in the form of a Hugging Face `config.json`.
    pub fn config(self) -> &'a Value {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.config(),
            Self::Random(random) => random.config(),
        }
    }

    /// The files, for messages; words in their place where there are none.
    pub fn path(self) -> &'a Path {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.path(),
            Self::Random(_) => Path::new("(random weights)"),
        }
    }

    /// The float type that most bytes are stored in. Quantised weights count as bf16, because it has the range of the
    /// activations that such models were trained with, which f16 has not; so do random ones.
    pub(crate) fn stored_kind(self) -> FloatKind {
        match self {
            Self::Checkpoint(checkpoint) => stored_kind(checkpoint),
            Self::Random(_) => FloatKind::BF16,
        }
    }
}

fn stored_kind(checkpoint: &Checkpoint) -> FloatKind {
    let kinds = [FloatKind::F32, FloatKind::F16, FloatKind::BF16];
    let mut bytes = [0u64; 3];
    for info in checkpoint
        .names()
        .filter_map(|name| checkpoint.info(name).ok())
    {
        let at = match info.dtype {
            SourceDType::F32 => 0,
            SourceDType::F16 => 1,
            _ => 2,
        };
        bytes[at] += info.num_bytes as u64;
    }
    let most = (0..3).max_by_key(|at| bytes[*at]).unwrap_or(0);
    kinds[most]
}

/// A model without files: a configuration, and weights that the device draws where they are needed.
///
/// For benches and for trying sizes out: the time of a step does not depend on what the weights say. The model that comes
/// out answers with noise, so nothing falls back to this kind, and loading it warns in the log.
///
/// Every tensor that the model asks for is there, in the shape that it asks for; one that a checkpoint may lack, is not.
/// Weights of normalizations are ones; all others are drawn from a normal distribution around 0. A tensor's values
/// follow from the seed and its name, the same ones on every run on the same kind of device.
///
/// # Examples
/// ```no_run
/// use burn::tensor::Device;
/// use burn_paged_model::{LoadError, LoadOptions, ModelFamily, RandomWeights, load_model};
///
/// fn load(families: &[ModelFamily], config: serde_json::Value) -> Result<(), LoadError> {
///     let random = RandomWeights::new(config, 1);
///     let model = load_model(families, &random, &LoadOptions::new(Device::default()))?;
///     log::info!("{} layers", model.spec().num_layers);
///     Ok(())
/// }
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct RandomWeights {
    config: Value,
    seed: u64,
    std: f64,
}

impl RandomWeights {
    /// Weights for a model of this `config.json`, with a standard deviation of 0.02.
    pub fn new(config: Value, seed: u64) -> Self {
        Self {
            config,
            seed,
            std: STD,
        }
    }

    /// With another standard deviation.
    pub fn with_std(self, std: f64) -> Self {
        Self { std, ..self }
    }

    /// The configuration.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// Where the weights come from.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The standard deviation of what is drawn.
    pub fn std(&self) -> f64 {
        self.std
    }

    /// Makes a tensor on the device; no value of it is ever on the host, unless the device is.
    pub(crate) fn tensor<const D: usize>(
        &self,
        name: &str,
        shape: [usize; D],
        device: &Device,
        dtype: DType,
    ) -> Tensor<D> {
        if name.ends_with("norm.weight") {
            return Tensor::ones(shape, (device, dtype));
        }
        // The order in which a model asks for its tensors is its own business, so each has a seed of its own.
        device.seed(self.seed ^ hash(name));
        Tensor::random(shape, Distribution::Normal(0.0, self.std), (device, dtype))
    }
}

/// FNV-1a. The standard library's hashes may change with its version.
fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{LoadError, LoadOptions, ModelDType, WeightLoader, load_with};

    fn devices() -> Vec<Device> {
        vec![
            #[cfg(feature = "flex")]
            Device::flex(),
            #[cfg(feature = "cpu")]
            Device::cpu(),
            #[cfg(feature = "cuda")]
            Device::cuda(0),
        ]
    }

    fn load<M>(
        device: &Device,
        build: impl FnOnce(&mut WeightLoader<'_>) -> Result<M, LoadError>,
    ) -> M {
        let random = RandomWeights::new(json!({}), 3).with_std(0.05);
        let options = LoadOptions::new(device.clone()).with_dtype(ModelDType::F32);
        load_with(&random, &options, build).unwrap()
    }

    fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
        tensor.into_data().try_to_vec::<f32>().unwrap()
    }

    /// One test, because the generator of a device belongs to the process.
    #[test]
    fn weights_are_normal_those_of_norms_are_ones_and_order_does_not_matter() {
        for device in devices() {
            let (weight, stacked, norm) = load(&device, |loader| {
                let stacked = loader.stacked(&[("a.weight", 40), ("b.weight", 24)], [64, 96])?;
                let norm = loader.tensor("input_layernorm.weight", [33])?;
                Ok((loader.tensor("w.weight", [65, 97])?, stacked, norm))
            });
            let weight = values(weight);
            let count = weight.len() as f32;
            let mean = weight.iter().sum::<f32>() / count;
            let std = (weight.iter().map(|x| x * x).sum::<f32>() / count - mean * mean).sqrt();
            assert!(mean.abs() < 0.003, "{device:?}: mean {mean}");
            assert!((std - 0.05).abs() < 0.003, "{device:?}: deviation {std}");
            assert_eq!(values(norm), [1.0; 33]);

            let again = load(&device, |loader| loader.tensor("w.weight", [65, 97]));
            assert_eq!(values(again), weight, "{device:?}");
            assert_ne!(values(stacked)[..97], weight[..97]);
        }
    }

    #[test]
    fn a_checkpoint_may_lack_what_is_optional_and_random_weights_lack_it() {
        for device in devices() {
            load(&device, |loader| {
                assert!(loader.optional("extra.weight", [4, 4])?.is_none());
                assert!(loader.optional_host_vector("factors", 4)?.is_none());
                Ok(())
            });
        }
    }
}
