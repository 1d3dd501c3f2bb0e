//! From `config.json` to a model's own configuration type, with the field in every error.

use std::fmt;

use serde::de::value::MapDeserializer;
use serde::de::{self, DeserializeOwned, Deserializer, IntoDeserializer, Visitor};
use serde_json::Value;

/// A field of a configuration, and what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} {reason}")]
pub struct ConfigError {
    /// The field as `config.json` names it, with dots for nesting.
    pub field: String,
    /// What is wrong with it: reads on from the field.
    pub reason: String,
}

impl ConfigError {
    /// An error about `field`; `reason` reads on from its name, as in "is 0, at least 1 is needed".
    pub fn new(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self {
            field: field.into(),
            reason: reason.into(),
        }
    }
}

/// Reads a configuration type out of a JSON object. Fields that the type does not have are ignored.
///
/// # Errors
/// [`ConfigError`] naming the first field that is missing or of another type.
pub fn parse_config<T: DeserializeOwned>(config: &Value) -> Result<T, ConfigError> {
    let Some(object) = config.as_object() else {
        return Err(ConfigError::new("config.json", "is not an object"));
    };
    let fields = object
        .iter()
        .map(|(name, value)| (name.as_str(), Field { name, value }));
    T::deserialize(MapDeserializer::new(fields))
}

impl de::Error for ConfigError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::new("config.json", message.to_string())
    }

    fn missing_field(field: &'static str) -> Self {
        Self::new(field, "is missing")
    }
}

/// A value that knows the name of its field, so that errors can tell it.
#[derive(Clone, Copy)]
struct Field<'de> {
    name: &'de str,
    value: &'de Value,
}

impl Field<'_> {
    fn error(self, source: &serde_json::Error) -> ConfigError {
        ConfigError::new(self.name, format!("cannot be read: {source}"))
    }
}

impl<'de> IntoDeserializer<'de, ConfigError> for Field<'de> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

/// Hands each request on to the JSON value and puts the name on what comes back.
macro_rules! forward {
    ($($method:ident)*) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConfigError> {
            self.value.$method(visitor).map_err(|source| self.error(&source))
        })*
    };
}

impl<'de> Deserializer<'de> for Field<'de> {
    type Error = ConfigError;

    forward! {
        deserialize_any deserialize_bool deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64
        deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64 deserialize_f32 deserialize_f64
        deserialize_char deserialize_str deserialize_string deserialize_bytes deserialize_byte_buf
        deserialize_option deserialize_unit deserialize_seq deserialize_map deserialize_identifier
        deserialize_ignored_any
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, ConfigError> {
        self.value
            .deserialize_unit_struct(name, visitor)
            .map_err(|source| self.error(&source))
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, ConfigError> {
        self.value
            .deserialize_newtype_struct(name, visitor)
            .map_err(|source| self.error(&source))
    }

    fn deserialize_tuple<V: Visitor<'de>>(
        self,
        len: usize,
        visitor: V,
    ) -> Result<V::Value, ConfigError> {
        self.value
            .deserialize_tuple(len, visitor)
            .map_err(|source| self.error(&source))
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        len: usize,
        visitor: V,
    ) -> Result<V::Value, ConfigError> {
        self.value
            .deserialize_tuple_struct(name, len, visitor)
            .map_err(|source| self.error(&source))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ConfigError> {
        self.value
            .deserialize_struct(name, fields, visitor)
            .map_err(|source| self.error(&source))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ConfigError> {
        self.value
            .deserialize_enum(name, variants, visitor)
            .map_err(|source| self.error(&source))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;
    use serde_json::json;

    #[derive(Debug, Deserialize, PartialEq)]
    struct Sizes {
        hidden_size: usize,
        rms_norm_eps: f64,
        head_dim: Option<usize>,
        #[serde(default)]
        mlp_bias: bool,
    }

    #[test]
    fn fields_are_read_and_unknown_ones_are_ignored() {
        let config =
            json!({"hidden_size": 8, "rms_norm_eps": 1, "head_dim": null, "other": {"a": [1]}});
        let expected = Sizes {
            hidden_size: 8,
            rms_norm_eps: 1.0,
            head_dim: None,
            mlp_bias: false,
        };
        assert_eq!(parse_config::<Sizes>(&config), Ok(expected));
    }

    #[test]
    fn errors_name_the_field() {
        let parse = |config| parse_config::<Sizes>(&config).unwrap_err();
        let missing = parse(json!({"rms_norm_eps": 1e-5}));
        assert_eq!(missing.to_string(), "hidden_size is missing");
        let negative = parse(json!({"hidden_size": -1, "rms_norm_eps": 1e-5}));
        assert_eq!(negative.field, "hidden_size");
        assert!(negative.reason.contains("-1"), "{negative}");
        let text = parse(json!({"hidden_size": 8, "rms_norm_eps": 1e-5, "head_dim": "64"}));
        assert_eq!(text.field, "head_dim");
        assert_eq!(parse(json!([])).field, "config.json");
    }
}
