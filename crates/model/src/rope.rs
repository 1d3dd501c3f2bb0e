//! Rotary embedding settings: from the fields of a configuration to inverse frequencies.
//!
//! Three spellings are read: `rope_theta` with an optional `rope_scaling` object beside it, whose kind stands under
//! `rope_type` or `type`, and the newer `rope_parameters` object that holds all of it. A kind that is not known is refused
//! by name: taking it for "none" gives sound short answers and nonsense in long ones.

use std::f64::consts::TAU;

use burn::tensor::Device;
use burn_paged::RotaryTable;
use serde_json::Value;

use self::fields::Fields;
use crate::config::ConfigError;

mod fields;

/// How a model turns positions into angles.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeConfig {
    /// Base of the geometric series of frequencies.
    pub theta: f64,
    /// Leading part of each head that is rotated, above 0 and at most 1.
    pub partial_rotary_factor: f64,
    /// `max_position_embeddings` of the configuration, in tokens.
    pub max_position_embeddings: usize,
    /// How the frequencies are changed for contexts longer than the trained one.
    pub scaling: RopeScaling,
}

/// The kinds of scaling, each with the fields that the configuration has for it.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// The frequencies as trained.
    None,
    /// All frequencies divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// A base that grows with the length of the context.
    Dynamic {
        /// How far the context is stretched.
        factor: f64,
    },
    /// High frequencies kept, low ones divided by `factor`, a ramp over the dimensions between; and longer vectors.
    Yarn(YarnScaling),
    /// High frequencies kept, low ones divided by `factor`, a ramp over the wavelengths between.
    Llama3(Llama3Scaling),
}

/// Fields of `yarn`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct YarnScaling {
    /// How far the context is stretched.
    pub factor: f64,
    /// Length of the contexts that the model was first trained on, in tokens.
    pub original_max_position_embeddings: usize,
    /// Frequencies of at least so many turns over the original context are kept.
    pub beta_fast: f64,
    /// Frequencies of at most so many turns over the original context are divided.
    pub beta_slow: f64,
    /// Multiplies cosine and sine.
    pub attention_factor: f64,
    /// Whether the ramp begins and ends at whole dimensions.
    pub truncate: bool,
}

/// Fields of `llama3`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Llama3Scaling {
    /// Divisor of the low frequencies.
    pub factor: f64,
    /// Frequencies of at most so many turns over the original context are divided.
    pub low_freq_factor: f64,
    /// Frequencies of at least so many turns over the original context are kept.
    pub high_freq_factor: f64,
    /// Length of the contexts that the model was first trained on, in tokens.
    pub original_max_position_embeddings: usize,
}

/// What a table of cosines and sines is made of.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeFrequencies {
    /// Radians per position, `rotary_dim / 2` of them.
    pub inv_freq: Vec<f64>,
    /// Multiplies cosine and sine.
    pub attention_factor: f64,
}

impl RopeConfig {
    /// Reads the settings out of a configuration.
    ///
    /// # Errors
    /// [`ConfigError`] naming the field, if a kind of scaling is not known, a field of a known kind is missing, or a number
    /// cannot be.
    pub fn from_config(
        config: &Value,
        max_position_embeddings: usize,
    ) -> Result<Self, ConfigError> {
        let rope = Fields::find(config);
        let theta = rope.number_or("rope_theta", 10_000.0)?;
        if theta <= 1.0 {
            return Err(rope.error("rope_theta", format!("is {theta}, above 1 is needed")));
        }
        let partial_rotary_factor = rope.number_or("partial_rotary_factor", 1.0)?;
        if !(partial_rotary_factor > 0.0 && partial_rotary_factor <= 1.0) {
            let reason = format!("is {partial_rotary_factor}, above 0 and at most 1 is needed");
            return Err(rope.error("partial_rotary_factor", reason));
        }
        let scaling = rope.scaling(max_position_embeddings)?;
        Ok(Self {
            theta,
            partial_rotary_factor,
            max_position_embeddings,
            scaling,
        })
    }

    /// How many positions the model supports, in tokens.
    ///
    /// `linear` and `dynamic` stretch `max_position_embeddings` by their factor. `yarn` stretches the original length, and
    /// most configurations have the result in `max_position_embeddings` already: the larger one counts. `llama3` has it there.
    pub fn max_positions(&self) -> usize {
        let stretched = |len: usize, factor: f64| (len as f64 * factor) as usize;
        match self.scaling {
            RopeScaling::None | RopeScaling::Llama3(_) => self.max_position_embeddings,
            RopeScaling::Linear { factor } | RopeScaling::Dynamic { factor } => {
                stretched(self.max_position_embeddings, factor)
            }
            RopeScaling::Yarn(yarn) => {
                stretched(yarn.original_max_position_embeddings, yarn.factor)
                    .max(self.max_position_embeddings)
            }
        }
    }

    /// The elements of a head that are rotated.
    ///
    /// # Errors
    /// [`ConfigError`] if they are not an even number of at least 2.
    pub fn rotary_dim(&self, head_dim: usize) -> Result<usize, ConfigError> {
        let rotary_dim = (head_dim as f64 * self.partial_rotary_factor) as usize;
        match rotary_dim >= 2 && rotary_dim.is_multiple_of(2) {
            true => Ok(rotary_dim),
            false => Err(ConfigError::new(
                "head_dim",
                format!(
                    "is {head_dim}, of which {rotary_dim} are rotated: an even number is needed"
                ),
            )),
        }
    }

    /// The inverse frequencies for a context of up to `max_positions` tokens, in f64.
    ///
    /// # Numerics
    /// `dynamic` is static here: one base for `max_positions` (or for `max_position_embeddings` if that is longer), whatever
    /// the length of a sequence is. K in the cache is rotated once, so a base that moved with the length would mix two
    /// rotations in one sequence. A model loaded for `max_position_embeddings` or less has the trained frequencies.
    ///
    /// # Errors
    /// [`ConfigError`] as [`rotary_dim`](Self::rotary_dim).
    ///
    /// # Source
    /// `linear`: Chen et al. 2023, arXiv:2306.15595. `dynamic`: NTK-aware scaling as in Hugging Face
    /// `modeling_rope_utils.py`, with the fixed length that vLLM takes. `yarn`: Peng et al. 2023, arXiv:2309.00071,
    /// sections 3.2 to 3.4. `llama3`: Hugging Face `_compute_llama3_parameters`.
    pub fn frequencies(
        &self,
        head_dim: usize,
        max_positions: usize,
    ) -> Result<RopeFrequencies, ConfigError> {
        let dim = self.rotary_dim(head_dim)?;
        let trained = inverse_frequencies(self.theta, dim);
        let (inv_freq, attention_factor) = match self.scaling {
            RopeScaling::None => (trained, 1.0),
            RopeScaling::Linear { factor } => (divided(trained, factor), 1.0),
            RopeScaling::Dynamic { factor } => (
                inverse_frequencies(self.dynamic_theta(factor, dim, max_positions)?, dim),
                1.0,
            ),
            RopeScaling::Yarn(yarn) => {
                (yarn.apply(trained, self.theta, dim), yarn.attention_factor)
            }
            RopeScaling::Llama3(llama3) => (llama3.apply(trained), 1.0),
        };
        Ok(RopeFrequencies {
            inv_freq,
            attention_factor,
        })
    }

    fn dynamic_theta(
        &self,
        factor: f64,
        dim: usize,
        max_positions: usize,
    ) -> Result<f64, ConfigError> {
        if dim < 4 {
            let reason = format!("of kind dynamic needs 4 rotated elements, heads have {dim}");
            return Err(ConfigError::new("rope_scaling", reason));
        }
        let trained = self.max_position_embeddings.max(1);
        let stretch = max_positions.max(trained) as f64 / trained as f64;
        let exponent = dim as f64 / (dim as f64 - 2.0);
        Ok(self.theta * (factor * stretch - (factor - 1.0)).powf(exponent))
    }
}

impl RopeFrequencies {
    /// Divides each frequency by the factor of a `rope_freqs` tensor, which GGUF files have in place of `llama3` scaling.
    ///
    /// # Errors
    /// [`ConfigError`] if a factor is not finite and above 0.
    ///
    /// # Panics
    /// If there are not as many factors as frequencies.
    pub fn divide_by(&mut self, factors: &[f32]) -> Result<(), ConfigError> {
        assert_eq!(
            factors.len(),
            self.inv_freq.len(),
            "one factor per frequency"
        );
        for (freq, factor) in self.inv_freq.iter_mut().zip(factors) {
            if !(factor.is_finite() && *factor > 0.0) {
                let reason = format!("holds the factor {factor}, above 0 is needed");
                return Err(ConfigError::new("rope_freqs.weight", reason));
            }
            *freq /= f64::from(*factor);
        }
        Ok(())
    }

    /// The table of cosines and sines for `max_positions` tokens.
    pub fn table(&self, max_positions: usize, device: &Device) -> RotaryTable {
        RotaryTable::new(&self.inv_freq, self.attention_factor, max_positions, device)
    }
}

impl YarnScaling {
    fn apply(&self, trained: Vec<f64>, theta: f64, dim: usize) -> Vec<f64> {
        let context = self.original_max_position_embeddings as f64;
        // The dimension whose frequency makes this many turns over the original context.
        let dimension =
            |turns: f64| dim as f64 * (context / (turns * TAU)).ln() / (2.0 * theta.ln());
        let (mut low, mut high) = (dimension(self.beta_fast), dimension(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(dim as f64 - 1.0));
        if low == high {
            // A ramp of no width would divide by zero.
            high += 0.001;
        }
        let blend = |(at, freq): (usize, f64)| {
            let ramp = ((at as f64 - low) / (high - low)).clamp(0.0, 1.0);
            freq / self.factor * ramp + freq * (1.0 - ramp)
        };
        trained.into_iter().enumerate().map(blend).collect()
    }
}

impl Llama3Scaling {
    fn apply(&self, trained: Vec<f64>) -> Vec<f64> {
        let context = self.original_max_position_embeddings as f64;
        let scale = |freq: f64| {
            let turns = context * freq / TAU;
            let smooth =
                (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor);
            let kept = smooth.clamp(0.0, 1.0);
            (1.0 - kept) * freq / self.factor + kept * freq
        };
        trained.into_iter().map(scale).collect()
    }
}

/// `theta^(-2i / dim)` for `i < dim / 2`.
fn inverse_frequencies(theta: f64, dim: usize) -> Vec<f64> {
    (0..dim / 2)
        .map(|at| theta.powf(-2.0 * at as f64 / dim as f64))
        .collect()
}

fn divided(mut freqs: Vec<f64>, factor: f64) -> Vec<f64> {
    freqs.iter_mut().for_each(|freq| *freq /= factor);
    freqs
}

#[cfg(test)]
mod tests;
