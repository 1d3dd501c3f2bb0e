//! Counters of the prefix cache.

/// What the prefix cache has done since the manager was made. All counters stay at 0 when prefix caching is off.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheStats {
    /// Sequences that were admitted, a resumed one each time. Read-only matches and refused admissions do not count.
    pub lookups: u64,
    /// Tokens of the admitted sequences.
    pub queried_tokens: u64,
    /// Those of them that were found in the cache.
    pub hit_tokens: u64,
    /// Full blocks that became available to other sequences.
    pub registrations: u64,
    /// Full blocks that were computed although another block held the same content already.
    pub duplicates: u64,
    /// Cached blocks that were forgotten to make room. A reset of the cache does not count.
    pub evictions: u64,
}

impl CacheStats {
    /// Fraction of the queried tokens that were found, from 0 to 1; 0 before the first lookup.
    pub fn hit_rate(&self) -> f64 {
        match self.queried_tokens {
            0 => 0.0,
            queried => self.hit_tokens as f64 / queried as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hit_rate_is_a_fraction_of_tokens() {
        assert_eq!(CacheStats::default().hit_rate(), 0.0);
        let stats = CacheStats {
            lookups: 2,
            queried_tokens: 40,
            hit_tokens: 10,
            ..Default::default()
        };
        assert_eq!(stats.hit_rate(), 0.25);
    }
}
