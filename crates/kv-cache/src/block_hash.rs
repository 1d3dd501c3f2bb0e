//! The chained hash by which full blocks are looked up, and the key at the root of each chain.
//!
//! A hash only says where to look. Whether two blocks are the same is decided by comparing keys, parents and tokens
//! (`prefix_cache.rs`), so a weak hash costs time and never correctness.

use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;

/// What, besides the tokens, must be equal for two sequences to share cached blocks.
///
/// The default key shares with everybody who uses the default key. A salt sets a tenant or a conversation apart, an
/// adapter id sets apart what other weights computed. The two are different fields: adapter `x` without a salt is not
/// salt `x` without an adapter, and an empty string is not an absent one.
///
/// Cloning is cheap: the strings are shared.
///
/// # Examples
/// ```
/// use burn_paged_kv_cache::CacheKey;
///
/// let salted = CacheKey::default().with_salt("x");
/// let adapted = CacheKey::default().with_adapter("x");
/// assert_ne!(salted, adapted);
/// assert_ne!(salted.to_bytes(), adapted.to_bytes());
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CacheKey {
    salt: Option<Arc<str>>,
    adapter: Option<Arc<str>>,
}

impl CacheKey {
    /// This key with a salt.
    pub fn with_salt(mut self, salt: impl Into<Arc<str>>) -> Self {
        self.salt = Some(salt.into());
        self
    }

    /// This key with the id of an adapter.
    pub fn with_adapter(mut self, adapter: impl Into<Arc<str>>) -> Self {
        self.adapter = Some(adapter.into());
        self
    }

    /// The salt, if there is one.
    pub fn salt(&self) -> Option<&str> {
        self.salt.as_deref()
    }

    /// The adapter id, if there is one.
    pub fn adapter(&self) -> Option<&str> {
        self.adapter.as_deref()
    }

    /// The key as bytes for hashing: per field a tag (0 absent, 1 present), and for a present one its length as 8
    /// bytes, little endian, and its UTF-8 text. Different keys give different bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for field in [self.salt(), self.adapter()] {
            match field {
                None => bytes.push(0),
                Some(text) => {
                    bytes.push(1);
                    bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
                    bytes.extend_from_slice(text.as_bytes());
                }
            }
        }
        bytes
    }
}

/// Hash of a full block and everything before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(u64);

impl BlockHash {
    /// The hash with this value.
    pub const fn new(value: u64) -> Self {
        Self(value)
    }

    /// The value.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// How blocks are hashed. The same arguments must always give the same hash; nothing else is asked for.
pub trait BlockHasher: fmt::Debug + Send + Sync {
    /// Start of the chains under `key`: the parent of their first block.
    fn hash_key(&self, key: &CacheKey) -> BlockHash;

    /// Hash of a block with these `tokens` after a prefix with the hash `parent`.
    fn hash_block(&self, parent: BlockHash, tokens: &[u32]) -> BlockHash;
}

/// The default [`BlockHasher`]: the standard library's keyed hash with a random key per hasher.
///
/// Because clients choose the tokens, a hash with a known key would let them aim for one bucket of the map.
/// The consequence is that hash values differ between two runs of a program; nothing that this crate returns does.
#[derive(Debug, Clone, Default)]
pub struct KeyedBlockHasher {
    state: RandomState,
}

// The tag keeps the hash of a key from being reachable as the hash of some block.
const KEY_TAG: u8 = 0;
const BLOCK_TAG: u8 = 1;

impl BlockHasher for KeyedBlockHasher {
    fn hash_key(&self, key: &CacheKey) -> BlockHash {
        let mut hasher = self.state.build_hasher();
        hasher.write_u8(KEY_TAG);
        hasher.write(&key.to_bytes());
        BlockHash(hasher.finish())
    }

    fn hash_block(&self, parent: BlockHash, tokens: &[u32]) -> BlockHash {
        let mut hasher = self.state.build_hasher();
        hasher.write_u8(BLOCK_TAG);
        hasher.write_u64(parent.0);
        for &token in tokens {
            hasher.write_u32(token);
        }
        BlockHash(hasher.finish())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn keys() -> Vec<CacheKey> {
        let key = CacheKey::default;
        vec![
            key(),
            key().with_salt(""),
            key().with_adapter(""),
            key().with_salt("x"),
            key().with_adapter("x"),
            key().with_salt("").with_adapter("x"),
            key().with_salt("x").with_adapter(""),
            key().with_salt("x").with_adapter("x"),
            key().with_salt("xx"),
            // Without lengths, these three could be read as one another.
            key().with_salt("a\u{1}b"),
            key().with_salt("a").with_adapter("b"),
            key().with_salt("a\u{1}").with_adapter("b"),
        ]
    }

    #[test]
    fn different_keys_have_different_bytes_and_hashes() {
        let hasher = KeyedBlockHasher::default();
        let keys = keys();
        let bytes: HashSet<Vec<u8>> = keys.iter().map(CacheKey::to_bytes).collect();
        let hashes: HashSet<BlockHash> = keys.iter().map(|key| hasher.hash_key(key)).collect();
        assert_eq!((bytes.len(), hashes.len()), (keys.len(), keys.len()));
    }

    #[test]
    fn the_bytes_are_tagged_and_length_prefixed() {
        let key = CacheKey::default().with_adapter("ab");
        assert_eq!(key.to_bytes(), [0, 1, 2, 0, 0, 0, 0, 0, 0, 0, b'a', b'b']);
    }

    #[test]
    fn the_hash_depends_on_parent_tokens_and_their_order() {
        let hasher = KeyedBlockHasher::default();
        let root = hasher.hash_key(&CacheKey::default());
        let first = hasher.hash_block(root, &[1, 2]);
        let others = [
            root,
            first,
            hasher.hash_block(root, &[2, 1]),
            hasher.hash_block(root, &[1, 2, 0]),
            hasher.hash_block(first, &[1, 2]),
        ];
        assert_eq!(others.iter().collect::<HashSet<_>>().len(), others.len());
        assert_eq!(first, hasher.hash_block(root, &[1, 2]));
    }
}
