//! Which blocks hold which prefix: the lookup from tokens to blocks that sequences may share.
//!
//! An entry says that a block holds these tokens after that parent. Entries form a forest, one tree per prefix, whose
//! roots know their [`CacheKey`]. Invariants:
//!
//! - one entry per block at most, so the map never has more entries than the pool has blocks;
//! - one entry per content at most: no two entries have the same parent (or key) and the same tokens;
//! - the parent of an entry is an entry too: forgetting a block forgets everything that continues it, so nothing is
//!   kept that a lookup cannot reach, and one living entry vouches for all before it;
//! - an entry is found by comparing parent (or key) and tokens; the hash only says where to look.

use std::collections::HashMap;

use crate::{BlockHash, BlockHasher, BlockId, BlockSize, CacheKey};

/// Names one registration of one block. Registering the block again gives another id, so an old id never
/// means new content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EntryId {
    block: BlockId,
    serial: u64,
}

impl EntryId {
    /// The block that holds the content.
    pub(crate) fn block(self) -> BlockId {
        self.block
    }
}

/// What [`PrefixCache::extend`] did with the full blocks of a sequence.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Extension {
    /// Blocks that are registered now and were not before.
    pub(crate) registered: usize,
    /// Blocks that were left alone because another block is registered with the same content.
    pub(crate) duplicates: usize,
}

/// Hash map from content to block, and the forest of entries.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    block_size: BlockSize,
    hasher: Box<dyn BlockHasher>,
    /// First block of each list of blocks with the same hash; the lists go on in `Entry::next_same_hash`.
    buckets: HashMap<BlockHash, BlockId>,
    /// The entry of each block.
    entries: Vec<Option<Entry>>,
    /// The tokens of each block, meaningful where the block has an entry.
    tokens: Vec<u32>,
    num_entries: usize,
    next_serial: u64,
}

#[derive(Debug)]
struct Entry {
    serial: u64,
    hash: BlockHash,
    parent: Parent,
    next_same_hash: Option<BlockId>,
    first_child: Option<BlockId>,
    previous_sibling: Option<BlockId>,
    next_sibling: Option<BlockId>,
}

/// What comes before a block.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Parent {
    /// Nothing: the block begins a sequence under this key.
    Key(CacheKey),
    /// The content of this entry.
    Entry(EntryId),
}

impl PrefixCache {
    pub(crate) fn new(
        num_blocks: usize,
        block_size: BlockSize,
        hasher: Box<dyn BlockHasher>,
    ) -> Self {
        Self {
            block_size,
            hasher,
            buckets: HashMap::new(),
            entries: std::iter::repeat_with(|| None).take(num_blocks).collect(),
            tokens: vec![0; num_blocks * block_size.tokens()],
            num_entries: 0,
            next_serial: 0,
        }
    }

    /// Number of blocks that have an entry.
    pub(crate) fn len(&self) -> usize {
        self.num_entries
    }

    /// Whether `block` has an entry.
    pub(crate) fn is_cached(&self, block: BlockId) -> bool {
        self.entries.get(block.index()).is_some_and(Option::is_some)
    }

    /// Whether the registration `id` still stands.
    pub(crate) fn is_alive(&self, id: EntryId) -> bool {
        self.entry_of(id.block) == Some(id)
    }

    /// The entry of `block`, if it has one.
    pub(crate) fn entry_of(&self, block: BlockId) -> Option<EntryId> {
        let entry = self.entries[block.index()].as_ref()?;
        Some(EntryId {
            block,
            serial: entry.serial,
        })
    }

    /// The entry that the living entry `id` continues; `None` if it begins a sequence.
    pub(crate) fn parent(&self, id: EntryId) -> Option<EntryId> {
        match self.entry(id.block).parent {
            Parent::Key(_) => None,
            Parent::Entry(parent) => Some(parent),
        }
    }

    /// Entries of the longest run of full blocks at the start of `tokens` that are all cached under `key`.
    pub(crate) fn longest_prefix(&self, tokens: &[u32], key: &CacheKey) -> Vec<EntryId> {
        let mut chain = Vec::new();
        for block_tokens in tokens.chunks_exact(self.block_size.tokens()) {
            let parent = parent_of(&chain, key);
            let hash = self.hash(&parent, block_tokens);
            match self.find(hash, &parent, block_tokens) {
                Some(id) => chain.push(id),
                None => break,
            }
        }
        chain
    }

    /// Brings `chain`, the entries of a sequence's full blocks in order, up to the full blocks of `tokens`.
    ///
    /// Entries of the chain that were forgotten meanwhile are dropped from it first. Then each missing block gets the
    /// entry that holds its content, or becomes that entry itself: `blocks` are the sequence's own blocks.
    pub(crate) fn extend(
        &mut self,
        chain: &mut Vec<EntryId>,
        key: &CacheKey,
        tokens: &[u32],
        blocks: &[BlockId],
    ) -> Extension {
        // A living entry has living ancestors, so looking from the end is enough.
        while chain.last().is_some_and(|&id| !self.is_alive(id)) {
            chain.pop();
        }
        let mut extension = Extension::default();
        let (size, num_known) = (self.block_size.tokens(), chain.len());
        let new_tokens = tokens[num_known * size..].chunks_exact(size);
        for (block_tokens, &block) in new_tokens.zip(&blocks[num_known..]) {
            let parent = parent_of(chain, key);
            let hash = self.hash(&parent, block_tokens);
            let id = match self.find(hash, &parent, block_tokens) {
                Some(id) => id,
                None => {
                    extension.registered += 1;
                    self.insert(block, hash, parent, block_tokens)
                }
            };
            extension.duplicates += usize::from(id.block != block);
            chain.push(id);
        }
        extension
    }

    /// Forgets `block` and every block that continues it. Returns how many were forgotten.
    pub(crate) fn forget(&mut self, block: BlockId) -> usize {
        if !self.is_cached(block) {
            return 0;
        }
        let mut pending = vec![block];
        let mut num_forgotten = 0;
        while let Some(block) = pending.pop() {
            let Some(entry) = self.entries[block.index()].take() else {
                continue;
            };
            self.unlink_from_bucket(block, &entry);
            self.unlink_from_siblings(&entry);
            let mut child = entry.first_child;
            while let Some(id) = child {
                pending.push(id);
                child = self.entries[id.index()]
                    .as_ref()
                    .and_then(|child| child.next_sibling);
            }
            num_forgotten += 1;
        }
        self.num_entries -= num_forgotten;
        num_forgotten
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.buckets.clear();
        self.entries.fill_with(|| None);
        self.num_entries = 0;
    }

    fn hash(&self, parent: &Parent, tokens: &[u32]) -> BlockHash {
        let parent_hash = match parent {
            Parent::Key(key) => self.hasher.hash_key(key),
            Parent::Entry(id) => self.entry(id.block).hash,
        };
        self.hasher.hash_block(parent_hash, tokens)
    }

    fn find(&self, hash: BlockHash, parent: &Parent, tokens: &[u32]) -> Option<EntryId> {
        let mut candidate = self.buckets.get(&hash).copied();
        while let Some(block) = candidate {
            let entry = self.entry(block);
            if entry.parent == *parent && self.tokens_of(block) == tokens {
                return Some(EntryId {
                    block,
                    serial: entry.serial,
                });
            }
            candidate = entry.next_same_hash;
        }
        None
    }

    fn insert(
        &mut self,
        block: BlockId,
        hash: BlockHash,
        parent: Parent,
        tokens: &[u32],
    ) -> EntryId {
        assert!(!self.is_cached(block), "block {block} is registered twice");
        let next_sibling = match &parent {
            Parent::Key(_) => None,
            Parent::Entry(id) => self.entry_mut(id.block).first_child.replace(block),
        };
        if let Some(sibling) = next_sibling {
            self.entry_mut(sibling).previous_sibling = Some(block);
        }
        let start = block.index() * self.block_size.tokens();
        self.tokens[start..start + tokens.len()].copy_from_slice(tokens);
        let serial = self.next_serial;
        self.next_serial += 1;
        self.num_entries += 1;
        self.entries[block.index()] = Some(Entry {
            serial,
            hash,
            parent,
            next_same_hash: self.buckets.insert(hash, block),
            first_child: None,
            previous_sibling: None,
            next_sibling,
        });
        EntryId { block, serial }
    }

    fn unlink_from_bucket(&mut self, block: BlockId, entry: &Entry) {
        let first = self.buckets[&entry.hash];
        if first != block {
            let mut before = first;
            while self.entry(before).next_same_hash != Some(block) {
                before = self
                    .entry(before)
                    .next_same_hash
                    .expect("a block is in its bucket");
            }
            self.entry_mut(before).next_same_hash = entry.next_same_hash;
        } else if let Some(next) = entry.next_same_hash {
            self.buckets.insert(entry.hash, next);
        } else {
            self.buckets.remove(&entry.hash);
        }
    }

    /// Takes `entry` out of its parent's list of children. A parent that is being forgotten has no list any more.
    fn unlink_from_siblings(&mut self, entry: &Entry) {
        if let Some(next) = entry
            .next_sibling
            .and_then(|next| self.entries[next.index()].as_mut())
        {
            next.previous_sibling = entry.previous_sibling;
        }
        let previous = entry
            .previous_sibling
            .and_then(|block| self.entries[block.index()].as_mut());
        match (previous, &entry.parent) {
            (Some(previous), _) => previous.next_sibling = entry.next_sibling,
            (None, Parent::Entry(id)) => {
                if let Some(parent) = self.entries[id.block.index()].as_mut() {
                    parent.first_child = entry.next_sibling;
                }
            }
            (None, Parent::Key(_)) => {}
        }
    }

    fn tokens_of(&self, block: BlockId) -> &[u32] {
        let size = self.block_size.tokens();
        &self.tokens[block.index() * size..][..size]
    }

    fn entry(&self, block: BlockId) -> &Entry {
        self.entries[block.index()]
            .as_ref()
            .expect("linked blocks have an entry")
    }

    fn entry_mut(&mut self, block: BlockId) -> &mut Entry {
        self.entries[block.index()]
            .as_mut()
            .expect("linked blocks have an entry")
    }
}

/// What comes before the block that would be added to `chain`.
fn parent_of(chain: &[EntryId], key: &CacheKey) -> Parent {
    match chain.last() {
        Some(&id) => Parent::Entry(id),
        None => Parent::Key(key.clone()),
    }
}

#[cfg(test)]
mod tests;
