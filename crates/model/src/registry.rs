//! Which family loads a model.

use serde_json::Value;

use crate::causal_lm::CausalLm;
use crate::error::LoadError;
use crate::options::LoadOptions;
use crate::source::WeightSource;
use crate::weights::{WeightLoader, load_with};

/// A model crate's entry: the architectures that it knows, and how it loads them.
#[derive(Debug, Clone, Copy)]
pub struct ModelFamily {
    /// Class names as in `architectures` of `config.json`.
    pub architectures: &'static [&'static str],
    /// Builds the model. Weights that are missing or misshapen are the loader's business, see [`WeightLoader`].
    pub load: fn(&mut WeightLoader<'_>) -> Result<Box<dyn CausalLm>, LoadError>,
}

/// Loads a checkpoint, or [random weights](crate::RandomWeights), with the family that knows the architecture.
///
/// # Errors
/// [`LoadError::UnsupportedArchitecture`] if no family does, with the list of those that are; else as [`load_with`].
///
/// # Examples
/// ```no_run
/// use burn::tensor::Device;
/// use burn_paged_checkpoint::Checkpoint;
/// use burn_paged_model::{LoadError, LoadOptions, ModelFamily, load_model};
///
/// fn load(families: &[ModelFamily]) -> Result<(), LoadError> {
///     let checkpoint = Checkpoint::open("model.gguf")?;
///     let options = LoadOptions::new(Device::default())
///         .with_progress(|progress| log::info!("{} of {} bytes", progress.bytes, progress.total_bytes));
///     let model = load_model(families, &checkpoint, &options)?;
///     log::info!("{} layers", model.spec().num_layers);
///     Ok(())
/// }
/// ```
pub fn load_model<'a>(
    families: &[ModelFamily],
    source: impl Into<WeightSource<'a>>,
    options: &'a LoadOptions,
) -> Result<Box<dyn CausalLm>, LoadError> {
    let source = source.into();
    let found = architecture(source.config());
    let family = families
        .iter()
        .find(|family| family.architectures.contains(&found));
    let Some(family) = family else {
        let supported = families.iter().flat_map(|family| family.architectures);
        return Err(LoadError::UnsupportedArchitecture {
            path: source.path().to_path_buf(),
            found: found.to_owned(),
            supported: supported.map(|name| (*name).to_owned()).collect(),
        });
    };
    load_with(source, options, family.load)
}

/// What a configuration calls its architecture: the first of `architectures`, else `model_type`.
pub fn architecture(config: &Value) -> &str {
    let listed = config.get("architectures").and_then(|names| names.get(0));
    let name = listed
        .or_else(|| config.get("model_type"))
        .and_then(Value::as_str);
    name.unwrap_or("(none named)")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_first_listed_architecture_counts() {
        let config = json!({"architectures": ["A", "B"], "model_type": "c"});
        assert_eq!(architecture(&config), "A");
        assert_eq!(architecture(&json!({"model_type": "c"})), "c");
        assert_eq!(
            architecture(&json!({"architectures": [], "model_type": "c"})),
            "c"
        );
        assert_eq!(architecture(&json!({})), "(none named)");
    }
}
