//! Options of the ops. An option that a path cannot honour is refused, never ignored.

/// How attention scores are made and masked.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct AttentionOptions {
    /// Factor on `q · k`; `None` is `1 / sqrt(head_dim)`.
    pub scale: Option<f32>,
    /// Bottom-right aligned causal mask: query `i` sees key `j` iff `j <= i + kv_len - q_len`.
    pub causal: bool,
    /// Sliding window: a query at position `p = i + kv_len - q_len` sees key `j` iff `p - j < window`.
    pub window: Option<usize>,
    /// Soft cap: scores become `softcap * tanh(score / softcap)` before the mask.
    pub softcap: Option<f32>,
    /// Positions after which the keys of each row are cut into parts that are attended on their own, so that the bits of a
    /// row depend on nothing else in the batch. On a GPU each part of each row takes an output in f32 for the time of the
    /// call, so small parts of long contexts take much memory. `None` leaves it to the device to cut as it likes.
    pub fixed_split: Option<usize>,
}

impl Default for AttentionOptions {
    fn default() -> Self {
        Self {
            scale: None,
            causal: true,
            window: None,
            softcap: None,
            fixed_split: None,
        }
    }
}

impl AttentionOptions {
    /// Causal attention with the usual scale.
    pub fn causal() -> Self {
        Self::default()
    }

    /// Attention without a causal mask.
    pub fn bidirectional() -> Self {
        Self {
            causal: false,
            ..Self::default()
        }
    }

    /// With the given factor on the scores.
    pub fn with_scale(self, scale: f32) -> Self {
        Self {
            scale: Some(scale),
            ..self
        }
    }

    /// With a sliding window of `window` tokens.
    pub fn with_window(self, window: usize) -> Self {
        Self {
            window: Some(window),
            ..self
        }
    }

    /// With a soft cap on the scores.
    pub fn with_softcap(self, softcap: f32) -> Self {
        Self {
            softcap: Some(softcap),
            ..self
        }
    }

    /// With parts of `positions` keys, for rows whose bits do not depend on the batch.
    pub fn with_fixed_split(self, positions: usize) -> Self {
        Self {
            fixed_split: Some(positions),
            ..self
        }
    }

    /// The factor on the scores for heads of `head_dim` elements.
    pub fn scale_for(&self, head_dim: usize) -> f32 {
        self.scale.unwrap_or_else(|| 1.0 / (head_dim as f32).sqrt())
    }

    /// The keys `[begin, end)` that query `row` of a sequence sees.
    ///
    /// Empty if the row sees none, which happens where a causal sequence has more queries than keys.
    pub fn visible(&self, row: usize, query_len: usize, kv_len: usize) -> core::ops::Range<usize> {
        // Position of the row among the keys, shifted by query_len to stay unsigned.
        let position = row + kv_len;
        let end = match self.causal {
            true => (position + 1).saturating_sub(query_len).min(kv_len),
            false => kv_len,
        };
        let begin = match self.window {
            Some(window) => (position + 1).saturating_sub(query_len + window),
            None => 0,
        };
        begin.min(end)..end
    }
}

/// How one row of logits becomes a token.
///
/// Filters apply in this order: temperature, top-k, top-p, min-p.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingOptions {
    /// Divides the logits; 0 is greedy.
    pub temperature: f32,
    /// Keeps the k most probable tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the smallest set of most probable tokens whose probabilities reach this sum; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens of at least this fraction of the highest probability; 0 keeps all.
    pub min_p: f32,
    /// Seed of the row's generator.
    pub seed: u64,
    /// Index of the draw under this seed: the number of tokens the row has generated.
    pub draw: u64,
}

impl Default for SamplingOptions {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            draw: 0,
        }
    }
}

/// 32-bit words of [`SamplingOptions`] on a device, see [`SamplingOptions::to_words`].
pub const SAMPLING_WORDS: usize = 8;

impl SamplingOptions {
    /// The options as a row of words, for [`sample_by_words`](crate::sample_by_words): temperature, top-k, top-p, min-p,
    /// the halves of the seed, the low half of the draw, and one that is not read; floats by their bits.
    pub fn to_words(self) -> [i32; SAMPLING_WORDS] {
        let float = |value: f32| value.to_bits() as i32;
        [
            float(self.temperature),
            // No vocabulary is as large as the largest.
            i32::try_from(self.top_k).unwrap_or(i32::MAX),
            float(self.top_p),
            float(self.min_p),
            self.seed as i32,
            (self.seed >> 32) as i32,
            self.draw as i32,
            0,
        ]
    }

    /// The options of one row of the options tensor. Of `draw` only the low half is kept, which is all that a draw uses.
    #[cfg(feature = "flex")]
    pub(crate) fn from_words(words: [i32; SAMPLING_WORDS]) -> Self {
        let float = |word: i32| f32::from_bits(word as u32);
        let half = |word: i32| u64::from(word as u32);
        Self {
            temperature: float(words[0]),
            top_k: usize::try_from(words[1]).unwrap_or(0),
            top_p: float(words[2]),
            min_p: float(words[3]),
            seed: half(words[4]) | (half(words[5]) << 32),
            draw: half(words[6]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "flex")]
    #[test]
    fn words_give_the_options_back() {
        let options = SamplingOptions {
            temperature: 0.7,
            top_k: 40,
            top_p: 0.9,
            min_p: 0.05,
            seed: 0xfedc_ba98_7654_3210,
            draw: 0x8000_0001,
        };
        assert_eq!(SamplingOptions::from_words(options.to_words()), options);
        let all = SamplingOptions {
            top_k: usize::MAX,
            ..options
        };
        assert_eq!(all.to_words()[1], i32::MAX);
    }

    #[test]
    fn visible_keys_are_aligned_at_the_bottom_right() {
        let causal = AttentionOptions::causal();
        assert_eq!(causal.visible(0, 2, 6), 0..5);
        assert_eq!(causal.visible(1, 2, 6), 0..6);
        // More queries than keys: the first rows see nothing.
        assert!(causal.visible(0, 4, 2).is_empty());
        assert!(causal.visible(1, 4, 2).is_empty());
        assert_eq!(causal.visible(2, 4, 2), 0..1);
        assert_eq!(AttentionOptions::bidirectional().visible(0, 2, 6), 0..6);
        let windowed = causal.with_window(3);
        assert_eq!(windowed.visible(0, 2, 6), 2..5);
        assert_eq!(windowed.visible(0, 6, 6), 0..1);
        assert!(causal.with_window(0).visible(0, 1, 4).is_empty());
    }
}
