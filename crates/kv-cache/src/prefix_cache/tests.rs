//! Links, collisions and forgetting, looked at from the inside.

use super::*;
use crate::KeyedBlockHasher;

#[derive(Debug)]
struct ConstantHasher;

impl BlockHasher for ConstantHasher {
    fn hash_key(&self, _key: &CacheKey) -> BlockHash {
        BlockHash::new(7)
    }

    fn hash_block(&self, _parent: BlockHash, _tokens: &[u32]) -> BlockHash {
        BlockHash::new(7)
    }
}

/// Caches for 12 blocks of 2 tokens, one with a good hash and one with the worst.
fn caches() -> [PrefixCache; 2] {
    let hashers: [Box<dyn BlockHasher>; 2] = [
        Box::new(KeyedBlockHasher::default()),
        Box::new(ConstantHasher),
    ];
    hashers.map(|hasher| PrefixCache::new(12, BlockSize::new(2).unwrap(), hasher))
}

fn block(index: u32) -> BlockId {
    BlockId::new(index)
}

/// Registers the full blocks of `tokens` under the default key.
fn register(cache: &mut PrefixCache, tokens: &[u32], blocks: &[u32]) -> (Vec<EntryId>, Extension) {
    let mut chain = Vec::new();
    let blocks: Vec<BlockId> = blocks.iter().copied().map(block).collect();
    let extension = cache.extend(&mut chain, &CacheKey::default(), tokens, &blocks);
    (chain, extension)
}

fn hits(cache: &PrefixCache, tokens: &[u32]) -> Vec<u32> {
    let chain = cache.longest_prefix(tokens, &CacheKey::default());
    chain.into_iter().map(|id| id.block().get()).collect()
}

/// Every link has its counterpart, every entry is in its bucket once, and every parent lives.
fn assert_consistent(cache: &PrefixCache) {
    let cached: Vec<BlockId> = (0..12)
        .map(block)
        .filter(|&id| cache.is_cached(id))
        .collect();
    assert_eq!(cached.len(), cache.len());

    let mut in_buckets = Vec::new();
    for (&hash, &first) in &cache.buckets {
        let list = std::iter::successors(Some(first), |&id| cache.entry(id).next_same_hash);
        for id in list.take(13) {
            assert_eq!(cache.entry(id).hash, hash);
            in_buckets.push(id);
        }
    }
    in_buckets.sort_unstable();
    assert_eq!(in_buckets, cached);

    let mut num_children = 0;
    for &id in &cached {
        let entry = cache.entry(id);
        if let Parent::Entry(parent) = &entry.parent {
            assert!(cache.is_alive(*parent), "block {id} has lost its parent");
        }
        let mut previous = None;
        let mut child = entry.first_child;
        while let Some(current) = child {
            let links = cache.entry(current);
            assert_eq!(
                links.parent,
                Parent::Entry(EntryId {
                    block: id,
                    serial: entry.serial
                })
            );
            assert_eq!(links.previous_sibling, previous);
            (previous, child) = (Some(current), links.next_sibling);
            num_children += 1;
        }
    }
    let with_parent = cached
        .iter()
        .filter(|&&id| matches!(cache.entry(id).parent, Parent::Entry(_)));
    assert_eq!(num_children, with_parent.count());
}

#[test]
fn a_collision_is_never_a_hit() {
    for mut cache in caches() {
        register(&mut cache, &[1, 1, 2, 2, 3, 3], &[0, 1, 2]);
        assert_eq!(hits(&cache, &[1, 1, 2, 2, 3, 3]), [0, 1, 2]);
        assert_eq!(
            hits(&cache, &[1, 1, 3, 3]),
            [0],
            "the tokens match a block with another parent"
        );
        assert_eq!(
            hits(&cache, &[2, 2, 3, 3]),
            [],
            "a later block is not a first block"
        );
        assert_eq!(hits(&cache, &[1, 2]), []);
        let other = CacheKey::default().with_salt("other");
        assert_eq!(cache.longest_prefix(&[1, 1, 2, 2], &other), []);
        assert_consistent(&cache);
    }
}

#[test]
fn only_full_blocks_are_registered_and_found() {
    for mut cache in caches() {
        let (chain, extension) = register(&mut cache, &[1, 1, 2], &[0, 1]);
        assert_eq!((chain.len(), extension.registered, cache.len()), (1, 1, 1));
        assert_eq!(hits(&cache, &[1]), []);
        assert_eq!(hits(&cache, &[1, 1, 2]), [0]);
    }
}

#[test]
fn the_same_content_is_registered_once() {
    for mut cache in caches() {
        register(&mut cache, &[1, 1, 2, 2], &[0, 1]);
        let (chain, extension) = register(&mut cache, &[1, 1, 2, 2, 3, 3], &[4, 5, 6]);
        assert_eq!(
            extension,
            Extension {
                registered: 1,
                duplicates: 2
            }
        );
        assert_eq!(
            chain.iter().map(|id| id.block().get()).collect::<Vec<_>>(),
            [0, 1, 6]
        );
        assert!(!cache.is_cached(block(4)) && !cache.is_cached(block(5)));
        assert_eq!(hits(&cache, &[1, 1, 2, 2, 3, 3]), [0, 1, 6]);
        assert_consistent(&cache);
    }
}

#[test]
fn forgetting_a_block_forgets_what_continues_it() {
    for mut cache in caches() {
        register(&mut cache, &[1, 1, 2, 2, 3, 3], &[0, 1, 2]);
        register(&mut cache, &[1, 1, 2, 2, 4, 4], &[0, 1, 3]);
        register(&mut cache, &[1, 1, 5, 5], &[0, 4]);
        register(&mut cache, &[9, 9], &[5]);
        assert_eq!(cache.forget(block(1)), 3);
        assert_consistent(&cache);
        assert_eq!(hits(&cache, &[1, 1, 2, 2, 3, 3]), [0]);
        assert_eq!(hits(&cache, &[1, 1, 5, 5]), [0, 4]);
        assert_eq!(hits(&cache, &[9, 9]), [5]);
        assert_eq!(cache.forget(block(1)), 0, "there is nothing left to forget");
    }
}

#[test]
fn children_leave_the_list_from_both_ends_and_the_middle() {
    for removed in [1, 2, 3] {
        for mut cache in caches() {
            for child in 1..=3 {
                register(&mut cache, &[1, 1, child, child], &[0, child]);
            }
            assert_eq!(cache.forget(block(removed)), 1);
            assert_consistent(&cache);
            let left = (1..=3).filter(|&child| hits(&cache, &[1, 1, child, child]) == [0, child]);
            assert_eq!(left.count(), 2);
            assert_eq!(cache.forget(block(0)), 3);
            assert_consistent(&cache);
        }
    }
}

#[test]
fn a_block_with_new_content_is_not_the_old_parent() {
    for mut cache in caches() {
        let (old, _) = register(&mut cache, &[1, 1, 2, 2], &[0, 1]);
        cache.forget(block(0));
        let (new, _) = register(&mut cache, &[8, 8], &[0]);
        assert!(!cache.is_alive(old[0]) && cache.is_alive(new[0]));
        assert_eq!(hits(&cache, &[8, 8, 2, 2]), [0]);
    }
}

#[test]
fn a_chain_with_forgotten_entries_is_registered_again() {
    for mut cache in caches() {
        register(&mut cache, &[1, 1], &[0]);
        // This sequence holds a private copy of block 0 in block 4, and block 5 continues block 0.
        let (mut chain, _) = register(&mut cache, &[1, 1, 2, 2], &[4, 5]);
        assert_eq!(cache.forget(block(0)), 2);
        let tokens = [1, 1, 2, 2, 3, 3];
        let blocks = [4, 5, 6].map(block);
        let extension = cache.extend(&mut chain, &CacheKey::default(), &tokens, &blocks);
        assert_eq!(
            extension,
            Extension {
                registered: 3,
                duplicates: 0
            }
        );
        assert_eq!(hits(&cache, &tokens), [4, 5, 6]);
        assert_consistent(&cache);
    }
}

#[test]
fn clearing_leaves_nothing() {
    for mut cache in caches() {
        let (chain, _) = register(&mut cache, &[1, 1, 2, 2], &[0, 1]);
        cache.clear();
        assert_eq!((cache.len(), cache.buckets.len()), (0, 0));
        assert!(!cache.is_alive(chain[0]));
        assert_eq!(hits(&cache, &[1, 1, 2, 2]), []);
        register(&mut cache, &[2, 2], &[1]);
        assert_eq!(hits(&cache, &[2, 2]), [1]);
        assert_consistent(&cache);
    }
}
