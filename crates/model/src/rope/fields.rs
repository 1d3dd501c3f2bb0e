//! Reading the settings out of a configuration.

use serde_json::{Map, Value};

use super::{Llama3Scaling, RopeScaling, YarnScaling};
use crate::config::ConfigError;

/// The object with the settings, and the configuration around it, where older files have some of them.
pub(super) struct Fields<'a> {
    config: &'a Value,
    /// Name and content of `rope_parameters` or `rope_scaling`.
    object: Option<(&'static str, &'a Map<String, Value>)>,
}

impl<'a> Fields<'a> {
    pub(super) fn find(config: &'a Value) -> Self {
        let find = |name: &'static str| {
            let object = config.get(name)?.as_object()?;
            Some((name, object))
        };
        Self {
            config,
            object: find("rope_parameters").or_else(|| find("rope_scaling")),
        }
    }

    /// A field of the object, else of the configuration; `null` counts as absent.
    fn get(&self, name: &str) -> Option<&'a Value> {
        let inner = self.object.and_then(|(_, object)| object.get(name));
        [inner, self.config.get(name)]
            .into_iter()
            .flatten()
            .find(|value| !value.is_null())
    }

    pub(super) fn error(&self, name: &str, reason: impl Into<String>) -> ConfigError {
        match self.object {
            Some((object, fields)) if fields.contains_key(name) => {
                ConfigError::new(format!("{object}.{name}"), reason)
            }
            _ => ConfigError::new(name, reason),
        }
    }

    fn number(&self, name: &str) -> Result<Option<f64>, ConfigError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        match value.as_f64() {
            Some(number) if number.is_finite() => Ok(Some(number)),
            _ => Err(self.error(name, format!("is {value}, a number is needed"))),
        }
    }

    pub(super) fn number_or(&self, name: &str, default: f64) -> Result<f64, ConfigError> {
        Ok(self.number(name)?.unwrap_or(default))
    }

    fn required(&self, name: &str, kind: &str) -> Result<f64, ConfigError> {
        let missing = || {
            let object = self.object.map_or("rope_scaling", |(object, _)| object);
            ConfigError::new(
                format!("{object}.{name}"),
                format!("is missing, {kind} needs it"),
            )
        };
        self.number(name)?.ok_or_else(missing)
    }

    /// A factor below 1 would shrink the context.
    fn factor(&self, kind: &str) -> Result<f64, ConfigError> {
        let factor = self.required("factor", kind)?;
        match factor >= 1.0 {
            true => Ok(factor),
            false => Err(self.error("factor", format!("is {factor}, at least 1 is needed"))),
        }
    }

    fn original_context(&self, fallback: usize) -> Result<usize, ConfigError> {
        const NAME: &str = "original_max_position_embeddings";
        // Where both have the field, the outer one holds the trained length.
        let outer = self.config.get(NAME).filter(|value| !value.is_null());
        let Some(value) = outer.or_else(|| self.get(NAME)) else {
            return Ok(fallback);
        };
        match value.as_u64() {
            Some(len) if len > 0 => Ok(len as usize),
            _ => Err(self.error(NAME, format!("is {value}, a number above 0 is needed"))),
        }
    }

    fn kind(&self) -> Result<&'a str, ConfigError> {
        let Some((object, fields)) = self.object else {
            return Ok("default");
        };
        let (name, value) = match (fields.get("rope_type"), fields.get("type")) {
            (Some(value), _) => ("rope_type", value),
            (None, Some(value)) => ("type", value),
            (None, None) if fields.values().any(Value::is_object) => {
                let reason = "has settings per kind of layer, which is not supported";
                return Err(ConfigError::new(object, reason));
            }
            (None, None) if fields.contains_key("factor") => {
                return Err(ConfigError::new(
                    object,
                    "has a factor, but neither rope_type nor type",
                ));
            }
            (None, None) => return Ok("default"),
        };
        match value {
            Value::Null => Ok("default"),
            Value::String(kind) => Ok(kind),
            other => Err(self.error(name, format!("is {other}, a name is needed"))),
        }
    }

    pub(super) fn scaling(
        &self,
        max_position_embeddings: usize,
    ) -> Result<RopeScaling, ConfigError> {
        match self.kind()? {
            "default" => Ok(RopeScaling::None),
            "linear" => Ok(RopeScaling::Linear {
                factor: self.factor("linear")?,
            }),
            "dynamic" => Ok(RopeScaling::Dynamic {
                factor: self.factor("dynamic")?,
            }),
            "yarn" => self.yarn(max_position_embeddings).map(RopeScaling::Yarn),
            "llama3" => self
                .llama3(max_position_embeddings)
                .map(RopeScaling::Llama3),
            other => {
                let name = match self.object {
                    Some((_, fields)) if fields.contains_key("rope_type") => "rope_type",
                    _ => "type",
                };
                let known = "default, linear, dynamic, yarn, llama3";
                let reason = format!("is {other:?}, which is not supported (supported: {known})");
                Err(self.error(name, reason))
            }
        }
    }

    fn yarn(&self, max_position_embeddings: usize) -> Result<YarnScaling, ConfigError> {
        let original_max_position_embeddings = self.original_context(max_position_embeddings)?;
        let factor = match self.get("factor") {
            Some(_) => self.factor("yarn")?,
            None => max_position_embeddings as f64 / original_max_position_embeddings as f64,
        };
        let beta_fast = self.number_or("beta_fast", 32.0)?;
        let beta_slow = self.number_or("beta_slow", 1.0)?;
        if !(beta_slow > 0.0 && beta_fast >= beta_slow) {
            let reason = format!("is {beta_fast}, but beta_slow is {beta_slow}");
            return Err(self.error("beta_fast", reason));
        }
        let truncate = match self.get("truncate") {
            None => true,
            Some(Value::Bool(truncate)) => *truncate,
            Some(other) => {
                return Err(self.error("truncate", format!("is {other}, true or false is needed")));
            }
        };
        let attention_factor = match self.number("attention_factor")? {
            Some(attention_factor) => attention_factor,
            None => self.yarn_attention_factor(factor)?,
        };
        Ok(YarnScaling {
            factor,
            original_max_position_embeddings,
            beta_fast,
            beta_slow,
            attention_factor,
            truncate,
        })
    }

    /// The paper's `0.1 ln(factor) + 1`, or the ratio of two of them where the file weighs the logarithm.
    fn yarn_attention_factor(&self, factor: f64) -> Result<f64, ConfigError> {
        let magnitude = |weight: f64| match factor > 1.0 {
            true => 0.1 * weight * factor.ln() + 1.0,
            false => 1.0,
        };
        let mscale = self.number_or("mscale", 0.0)?;
        let mscale_all_dim = self.number_or("mscale_all_dim", 0.0)?;
        match mscale != 0.0 && mscale_all_dim != 0.0 {
            true => Ok(magnitude(mscale) / magnitude(mscale_all_dim)),
            false => Ok(magnitude(1.0)),
        }
    }

    fn llama3(&self, max_position_embeddings: usize) -> Result<Llama3Scaling, ConfigError> {
        let low_freq_factor = self.required("low_freq_factor", "llama3")?;
        let high_freq_factor = self.required("high_freq_factor", "llama3")?;
        if !(low_freq_factor > 0.0 && high_freq_factor > low_freq_factor) {
            let reason = format!("is {high_freq_factor}, but low_freq_factor is {low_freq_factor}");
            return Err(self.error("high_freq_factor", reason));
        }
        Ok(Llama3Scaling {
            factor: self.factor("llama3")?,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings: self.original_context(max_position_embeddings)?,
        })
    }
}
