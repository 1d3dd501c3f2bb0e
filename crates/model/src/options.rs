//! What the caller chooses when a model is loaded, and how the dtype is settled.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use burn::tensor::{DType, Device};
use burn_paged_checkpoint::FloatKind;

use crate::error::LoadError;

/// Choices of the operator; what the model is, stands in its checkpoint.
#[derive(Clone)]
#[non_exhaustive]
pub struct LoadOptions {
    /// Where weights and activations live.
    pub device: Device,
    /// Dtype of weights, activations and cache.
    pub dtype: ModelDType,
    /// Positions to make tables for, in tokens; `None` is as many as the model supports.
    pub max_positions: Option<usize>,
    /// Called after each tensor, on the thread that loads.
    pub progress: Option<Arc<dyn Fn(LoadProgress) + Send + Sync>>,
}

impl LoadOptions {
    /// Dtype [`Auto`](ModelDType::Auto), all positions, no progress.
    pub fn new(device: Device) -> Self {
        Self {
            device,
            dtype: ModelDType::Auto,
            max_positions: None,
            progress: None,
        }
    }

    /// With the given dtype.
    pub fn with_dtype(self, dtype: ModelDType) -> Self {
        Self { dtype, ..self }
    }

    /// With tables for `max_positions` tokens only.
    pub fn with_max_positions(self, max_positions: usize) -> Self {
        Self {
            max_positions: Some(max_positions),
            ..self
        }
    }

    /// With a function that is called after each tensor.
    pub fn with_progress(self, progress: impl Fn(LoadProgress) + Send + Sync + 'static) -> Self {
        Self {
            progress: Some(Arc::new(progress)),
            ..self
        }
    }
}

impl fmt::Debug for LoadOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadOptions")
            .field("device", &self.device)
            .field("dtype", &self.dtype)
            .field("max_positions", &self.max_positions)
            .field("progress", &self.progress.is_some())
            .finish()
    }
}

/// How far loading has come. The last call has `bytes == total_bytes`.
///
/// [Random weights](crate::RandomWeights) have no files: all numbers are 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes of the files that are done.
    pub bytes: u64,
    /// Bytes of all tensors in the files.
    pub total_bytes: u64,
    /// Tensors that are done.
    pub tensors: usize,
    /// Tensors in the files.
    pub total_tensors: usize,
}

/// The dtype that a model is wanted in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ModelDType {
    /// On a GPU the dtype of the checkpoint (bf16 if that is quantised) if the device computes in it, else f32; on the CPU
    /// f32, which is the fastest there.
    #[default]
    Auto,
    /// 32-bit float.
    F32,
    /// 16-bit IEEE float; weights above 65,504 are refused.
    F16,
    /// 16-bit brain float.
    BF16,
}

impl ModelDType {
    /// All values with their names.
    const NAMES: [(&'static str, Self); 4] = [
        ("auto", Self::Auto),
        ("f32", Self::F32),
        ("f16", Self::F16),
        ("bf16", Self::BF16),
    ];
}

impl fmt::Display for ModelDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let found = Self::NAMES.iter().find(|(_, dtype)| dtype == self);
        f.write_str(found.map_or("auto", |(name, _)| name))
    }
}

/// A dtype name that is not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("dtype {0:?} is not one of auto, f32, f16, bf16")]
pub struct UnknownDType(pub String);

impl FromStr for ModelDType {
    type Err = UnknownDType;

    fn from_str(name: &str) -> Result<Self, UnknownDType> {
        let found = Self::NAMES.iter().find(|(known, _)| *known == name);
        found
            .map(|(_, dtype)| *dtype)
            .ok_or_else(|| UnknownDType(name.to_owned()))
    }
}

/// The dtype to load in: the tensor library's name and the file reader's name of one thing.
pub(crate) fn settle_dtype(
    options: &LoadOptions,
    stored: FloatKind,
) -> Result<(DType, FloatKind), LoadError> {
    let device = &options.device;
    let is_supported = |kind| device.supports_dtype(to_dtype(kind));
    match choose(options.dtype, stored, is_cpu(device), is_supported) {
        Ok(kind) => {
            if kind != stored {
                log::info!("weights are stored in {stored}; computing in {kind} on {device:?}");
            }
            Ok((to_dtype(kind), kind))
        }
        Err(kind) => {
            let (device, dtype) = (format!("{device:?}"), to_dtype(kind));
            Err(LoadError::UnsupportedDType { device, dtype })
        }
    }
}

/// The rule of [`ModelDType`]; the error is a type that was demanded and is not supported.
fn choose(
    wanted: ModelDType,
    stored: FloatKind,
    is_cpu: bool,
    is_supported: impl Fn(FloatKind) -> bool,
) -> Result<FloatKind, FloatKind> {
    let demanded = match wanted {
        ModelDType::Auto if !is_cpu && is_supported(stored) => return Ok(stored),
        ModelDType::Auto | ModelDType::F32 => FloatKind::F32,
        ModelDType::F16 => FloatKind::F16,
        ModelDType::BF16 => FloatKind::BF16,
    };
    if is_supported(demanded) {
        Ok(demanded)
    } else {
        Err(demanded)
    }
}

fn to_dtype(kind: FloatKind) -> DType {
    match kind {
        FloatKind::F32 => DType::F32,
        FloatKind::F16 => DType::F16,
        FloatKind::BF16 => DType::BF16,
    }
}

/// Whether the device is this machine's processor.
fn is_cpu(device: &Device) -> bool {
    is_flex(device) || is_jit_cpu(device)
}

#[cfg(feature = "flex")]
fn is_flex(device: &Device) -> bool {
    *device == Device::flex()
}

#[cfg(not(feature = "flex"))]
fn is_flex(_: &Device) -> bool {
    false
}

#[cfg(feature = "cpu")]
fn is_jit_cpu(device: &Device) -> bool {
    *device == Device::cpu()
}

#[cfg(not(feature = "cpu"))]
fn is_jit_cpu(_: &Device) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    use FloatKind::{BF16, F16, F32};

    #[test]
    fn auto_keeps_the_stored_type_where_a_gpu_supports_it() {
        let auto = |stored, is_cpu, lacks: Option<FloatKind>| {
            choose(ModelDType::Auto, stored, is_cpu, |kind| Some(kind) != lacks)
        };
        assert_eq!(auto(BF16, false, None), Ok(BF16));
        assert_eq!(auto(F16, false, None), Ok(F16));
        // A checkpoint in bf16 on a device without it.
        assert_eq!(auto(BF16, false, Some(BF16)), Ok(F32));
        // On the CPU f32 is the fastest even where the others work.
        assert_eq!(auto(BF16, true, None), Ok(F32));
    }

    #[test]
    fn a_demanded_type_is_taken_or_refused() {
        let lacks_bf16 = |kind| kind != BF16;
        assert_eq!(choose(ModelDType::BF16, F32, false, lacks_bf16), Err(BF16));
        assert_eq!(choose(ModelDType::F16, BF16, true, lacks_bf16), Ok(F16));
        assert_eq!(choose(ModelDType::F32, BF16, false, lacks_bf16), Ok(F32));
        let error = LoadError::UnsupportedDType {
            device: "gpu".to_owned(),
            dtype: to_dtype(BF16),
        };
        assert_eq!(
            error.to_string(),
            "device gpu does not compute in BF16; use dtype auto or f32"
        );
    }

    #[test]
    fn names_round_trip() {
        for (name, dtype) in ModelDType::NAMES {
            assert_eq!(name.parse(), Ok(dtype));
            assert_eq!(dtype.to_string(), name);
        }
        let error = "fp16".parse::<ModelDType>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "dtype \"fp16\" is not one of auto, f32, f16, bf16"
        );
    }
}
