//! The tokens that end an answer.

use std::collections::BTreeSet;

use serde_json::Value;

/// All tokens that end an answer, sorted.
///
/// Models name them in several places, one or a list, and mean all of them: a chat model may end with the end-of-turn token
/// of its template or with the end-of-text token of its training.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StopTokens {
    ids: BTreeSet<u32>,
}

impl StopTokens {
    /// Whether `id` ends an answer.
    pub fn contains(&self, id: u32) -> bool {
        self.ids.contains(&id)
    }

    /// The ids, smallest first.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.ids.iter().copied()
    }

    /// The number of ids.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether nothing ends an answer but its length.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Adds the `eos_token_id` of a `config.json` or `generation_config.json`: a number, a list of numbers or null. What is
    /// no token of a vocabulary of `vocab_size` is left out with a warning; published files hold such ids.
    pub(crate) fn add_config(&mut self, config: &Value, vocab_size: usize) {
        let value = &config["eos_token_id"];
        let numbers = match value {
            Value::Null => return,
            Value::Array(numbers) => numbers.as_slice(),
            number => std::slice::from_ref(number),
        };
        for number in numbers {
            let id = number.as_u64().and_then(|id| u32::try_from(id).ok());
            match id.filter(|&id| (id as usize) < vocab_size) {
                Some(id) => _ = self.ids.insert(id),
                None => log::warn!("eos_token_id {number} is no token id below {vocab_size}"),
            }
        }
    }
}

impl FromIterator<u32> for StopTokens {
    fn from_iter<I: IntoIterator<Item = u32>>(ids: I) -> Self {
        Self {
            ids: ids.into_iter().collect(),
        }
    }
}

impl Extend<u32> for StopTokens {
    fn extend<I: IntoIterator<Item = u32>>(&mut self, ids: I) {
        self.ids.extend(ids);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_number_a_list_and_nothing_all_count() {
        let mut stop = StopTokens::from_iter([1]);
        stop.add_config(&json!({"eos_token_id": [9, 3]}), 10);
        stop.add_config(&json!({"eos_token_id": 4}), 10);
        stop.add_config(&json!({"eos_token_id": null}), 10);
        stop.add_config(&json!({}), 10);
        assert_eq!(stop.iter().collect::<Vec<_>>(), [1, 3, 4, 9]);
    }

    #[test]
    fn ids_outside_the_vocabulary_are_left_out() {
        let mut stop = StopTokens::default();
        stop.add_config(
            &json!({"eos_token_id": [-1, 10, 9, "x", 4294967296_u64]}),
            10,
        );
        assert_eq!(stop.iter().collect::<Vec<_>>(), [9]);
    }
}
