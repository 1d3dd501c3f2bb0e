//! Why a model could not be loaded. Every message names the file, and the tensor or field where there is one.

use std::fmt;
use std::path::{Path, PathBuf};

use burn::tensor::DType;
use burn_paged_checkpoint::CheckpointError;

use crate::config::ConfigError;

/// What went wrong while a model was loaded.
///
/// Three families: the file is not what it should be ([`Checkpoint`](Self::Checkpoint), [`Config`](Self::Config),
/// [`Weights`](Self::Weights)), the caller asked for something that the model cannot give
/// ([`MaxPositions`](Self::MaxPositions)), or nothing here can do it
/// ([`UnsupportedArchitecture`](Self::UnsupportedArchitecture), [`UnsupportedDType`](Self::UnsupportedDType)).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The files cannot be read, or a tensor cannot be converted.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),

    /// A field of the configuration is missing, has the wrong type or a value that cannot be.
    #[error("configuration of {}: {source}", path.display())]
    Config {
        /// The folder or file.
        path: PathBuf,
        /// The field and what is wrong with it.
        source: ConfigError,
    },

    /// Tensors that the model needs are not there, or do not have the shape that the configuration implies.
    #[error("weights of {}: {}", path.display(), faults(missing, misshapen))]
    Weights {
        /// The folder or file.
        path: PathBuf,
        /// Names of all tensors that are missing, in the order in which the model asked for them.
        missing: Vec<String>,
        /// All tensors with another shape than expected, in the order in which the model asked for them.
        misshapen: Vec<Misshapen>,
    },

    /// No model family of the list knows this architecture.
    #[error(
        "{} holds the architecture {found}, which is not supported (supported: {})",
        path.display(),
        supported.join(", ")
    )]
    UnsupportedArchitecture {
        /// The folder or file.
        path: PathBuf,
        /// What the checkpoint calls its architecture.
        found: String,
        /// What the families of the list can load.
        supported: Vec<String>,
    },

    /// The device does not compute in the dtype that was asked for.
    #[error("device {device} does not compute in {dtype:?}; use dtype auto or f32")]
    UnsupportedDType {
        /// The device.
        device: String,
        /// The dtype.
        dtype: DType,
    },

    /// More positions were asked for than the model supports.
    #[error("{wanted} positions wanted, but the model supports {supported}")]
    MaxPositions {
        /// Positions that were asked for.
        wanted: usize,
        /// Positions that the model supports.
        supported: usize,
    },
}

impl LoadError {
    /// A fault in the configuration of the model at `path`.
    pub fn config(path: &Path, source: ConfigError) -> Self {
        Self::Config {
            path: path.to_path_buf(),
            source,
        }
    }
}

/// A tensor whose stored shape is not the one that the configuration implies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Misshapen {
    /// The tensor.
    pub name: String,
    /// The shape that the configuration implies.
    pub expected: Vec<usize>,
    /// The stored shape.
    pub found: Vec<usize>,
}

impl fmt::Display for Misshapen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} (is {:?}, expected {:?})",
            self.name, self.found, self.expected
        )
    }
}

/// How many names a message lists: a wrong number of layers makes thousands, and the first ones tell the story.
const MAX_LISTED: usize = 16;

/// Joins the first names, and says how many more there are.
pub(crate) fn list<T: fmt::Display>(items: &[T]) -> String {
    let listed: Vec<String> = items.iter().take(MAX_LISTED).map(T::to_string).collect();
    match items.len().saturating_sub(MAX_LISTED) {
        0 => listed.join(", "),
        more => format!("{} and {more} more", listed.join(", ")),
    }
}

fn faults(missing: &[String], misshapen: &[Misshapen]) -> String {
    let mut parts = Vec::new();
    if !missing.is_empty() {
        parts.push(format!(
            "{} missing: {}",
            count(missing.len()),
            list(missing)
        ));
    }
    if !misshapen.is_empty() {
        let what = count(misshapen.len());
        parts.push(format!("{what} with another shape: {}", list(misshapen)));
    }
    parts.join("; ")
}

fn count(tensors: usize) -> String {
    match tensors {
        1 => "1 tensor".to_owned(),
        more => format!("{more} tensors"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_list_the_first_names_and_count_the_rest() {
        let names: Vec<String> = (0..18).map(|layer| format!("layers.{layer}")).collect();
        let text = list(&names);
        assert!(text.starts_with("layers.0, layers.1, "), "{text}");
        assert!(text.ends_with("layers.15 and 2 more"), "{text}");
        assert_eq!(list(&names[..2]), "layers.0, layers.1");
    }

    #[test]
    fn a_weights_message_names_missing_and_misshapen_tensors() {
        let misshapen = Misshapen {
            name: "b".to_owned(),
            expected: vec![4, 2],
            found: vec![2, 4],
        };
        let error = LoadError::Weights {
            path: PathBuf::from("model"),
            missing: vec!["a".to_owned()],
            misshapen: vec![misshapen],
        };
        let expected = "weights of model: 1 tensor missing: a; 1 tensor with another shape: \
                        b (is [2, 4], expected [4, 2])";
        assert_eq!(error.to_string(), expected);
    }
}
