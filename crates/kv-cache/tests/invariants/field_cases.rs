//! Small exact cases, each for a fault that paged caches have had in the field.

use burn_paged_kv_cache::{BlockManager, BlockManagerConfig, CacheKey, KvCacheError};

use crate::{ConstantHasher, ids, manager, prefill, run};

fn key() -> CacheKey {
    CacheKey::default()
}

/// A prompt that was cached to its end once left nothing to compute, or one block less than there should be.
#[test]
fn a_fully_cached_prompt_still_computes_its_last_token() {
    let expected = [
        (4, 0),
        (5, 4),
        (7, 4),
        (8, 4),
        (9, 8),
        (12, 8),
        (13, 12),
        (17, 16),
    ];
    for (prompt_len, num_cached) in expected {
        let mut manager = manager(12, 4);
        let prompt: Vec<u32> = (100..100 + prompt_len).collect();
        assert_eq!(run(&mut manager, &prompt), 0);
        for _ in 0..2 {
            let (mut sequence, cached) = prefill(&mut manager, &prompt, &key());
            assert_eq!(cached, num_cached, "prompt of {prompt_len}");
            assert_eq!(sequence.block_ids().len(), prompt_len.div_ceil(4) as usize);
            // The first decode step works at every distance from a block border.
            manager.append(&mut sequence, 1).unwrap();
            assert_eq!(
                sequence.block_ids().len(),
                (prompt_len + 1).div_ceil(4) as usize
            );
            manager.free(sequence);
        }
    }
}

/// A live reader of the same blocks is not disturbed by the recomputed last block of another.
#[test]
fn the_recomputed_last_block_is_a_block_of_its_own() {
    let mut manager = manager(6, 4);
    let prompt: Vec<u32> = (0..8).collect();
    let (first, _) = prefill(&mut manager, &prompt, &key());
    let (second, num_cached) = prefill(&mut manager, &prompt, &key());
    assert_eq!(num_cached, 4);
    assert_eq!(first.block_ids()[0], second.block_ids()[0]);
    assert_ne!(first.block_ids()[1], second.block_ids()[1]);
    manager.free(first);
    manager.free(second);
}

/// The map once kept the old hash of a block with new content.
#[test]
fn a_block_with_new_content_is_no_hit_for_the_old() {
    let mut manager = manager(2, 4);
    assert_eq!(run(&mut manager, &[1, 2, 3, 4, 5]), 0);
    assert_eq!(run(&mut manager, &[9, 9, 9, 9, 8]), 0);
    assert_eq!(manager.num_cached_blocks(), 1);
    assert_eq!(run(&mut manager, &[1, 2, 3, 4, 5]), 0);
    for first in 0..100 {
        run(&mut manager, &[first, 9, 9, 9, 8]);
        assert!(manager.num_cached_blocks() <= 2);
    }
}

/// Two blocks were once equal because their hashes were.
#[test]
fn a_hash_collision_is_not_a_hit() {
    let config = BlockManagerConfig {
        num_blocks: 8,
        block_size: 4,
        enable_prefix_caching: true,
    };
    let mut manager = BlockManager::with_hasher(config, Box::new(ConstantHasher)).unwrap();
    assert_eq!(run(&mut manager, &[1, 2, 3, 4, 5]), 0);
    assert_eq!(run(&mut manager, &[6, 6, 6, 6, 5]), 0);
    assert_eq!(run(&mut manager, &[1, 2, 3, 4, 5]), 4);
    assert_eq!(run(&mut manager, &[6, 6, 6, 6, 5]), 4);
}

/// The same tokens at the same place are other content after another beginning.
#[test]
fn a_block_after_another_parent_is_not_a_hit() {
    let mut manager = manager(8, 4);
    assert_eq!(run(&mut manager, &[1, 1, 1, 1, 2, 2, 2, 2, 7]), 0);
    assert_eq!(run(&mut manager, &[3, 3, 3, 3, 2, 2, 2, 2, 7]), 0);
    assert_eq!(run(&mut manager, &[2, 2, 2, 2, 7]), 0);
}

/// Adapter names and salts once shared one space.
#[test]
fn an_adapter_is_not_a_salt_of_the_same_name() {
    let mut manager = manager(12, 4);
    let keys = [
        key().with_adapter("x"),
        key().with_salt("x"),
        key(),
        key().with_salt("x").with_adapter("x"),
    ];
    for key in &keys {
        let (sequence, num_cached) = prefill(&mut manager, &[1, 2, 3, 4, 5], key);
        assert_eq!(num_cached, 0, "{key:?}");
        manager.free(sequence);
    }
    for key in &keys {
        assert_eq!(
            manager
                .match_prefix(&[1, 2, 3, 4, 5], key)
                .num_cached_tokens(),
            4
        );
    }
}

/// A hit block was once given away as room for the rest of the same sequence.
#[test]
fn hit_blocks_are_pinned_before_new_ones_are_taken() {
    let mut manager = manager(4, 4);
    let (a, _) = prefill(&mut manager, &[1, 2, 3, 4], &key());
    let block_of_a = a.block_ids()[0];
    manager.free(a);
    run(&mut manager, &(90..102).collect::<Vec<_>>());
    assert_eq!(manager.num_cached_blocks(), 4);
    assert_eq!(
        manager.free_blocks().next(),
        Some(block_of_a),
        "the block of A is the oldest"
    );

    let b_tokens: Vec<u32> = [1, 2, 3, 4].into_iter().chain(50..59).collect();
    let (b, num_cached) = prefill(&mut manager, &b_tokens, &key());
    assert_eq!((num_cached, b.block_ids()[0]), (4, block_of_a));
    let mut distinct = ids(&b);
    distinct.sort_unstable();
    assert_eq!(distinct, [0, 1, 2, 3]);
    manager.free(b);

    // In one step: B again, and C, for which there is no room beside it.
    let (b, num_cached) = prefill(&mut manager, &b_tokens, &key());
    assert_eq!((num_cached, b.block_ids().len()), (12, 4));
    let c_tokens: Vec<u32> = (70..82).collect();
    let refused = manager.admit(&c_tokens, 12, &key()).unwrap_err();
    assert_eq!(refused, KvCacheError::NoFreeBlocks { needed: 3, free: 0 });
    manager.free(b);
    let (c, num_cached) = prefill(&mut manager, &c_tokens, &key());
    assert_eq!((num_cached, c.block_ids().len()), (0, 3));
    manager.free(c);
}

/// Free blocks that the sequence itself would use as hits once counted as room for its other tokens.
#[test]
fn free_hits_do_not_count_as_room() {
    let mut manager = manager(3, 4);
    run(&mut manager, &[1, 1, 1, 1, 2, 2, 2, 2, 3]);
    let (other, _) = prefill(&mut manager, &[9], &key());
    assert_eq!(manager.num_free_blocks(), 2);
    let refused = manager
        .admit(&[1, 1, 1, 1, 2, 2, 2, 2, 3], 1, &key())
        .unwrap_err();
    assert_eq!(refused, KvCacheError::NoFreeBlocks { needed: 1, free: 0 });
    assert_eq!(manager.num_free_blocks(), 2);
    manager.free(other);
}

/// The rule of when a new block is taken was copied wrongly in several places.
#[test]
fn blocks_held_before_each_forward() {
    let expected = [
        (3, [1, 1, 2, 2, 2]),
        (4, [1, 2, 2, 2, 2]),
        (5, [2, 2, 2, 2, 3]),
    ];
    for (prompt_len, blocks_held) in expected {
        let mut manager = manager(4, 4);
        let mut tokens: Vec<u32> = (0..prompt_len).collect();
        let (mut sequence, _) = manager.admit(&tokens, tokens.len(), &key()).unwrap();
        for (step, held) in blocks_held.into_iter().enumerate() {
            if step > 0 {
                tokens.push(50);
                manager.append(&mut sequence, 1).unwrap();
            }
            assert_eq!(
                sequence.block_ids().len(),
                held,
                "prompt {prompt_len}, step {step}"
            );
            // A block is registered only when its last position is written.
            assert_eq!(
                manager.num_cached_blocks(),
                sequence.num_computed_tokens() / 4
            );
            manager.mark_computed(&mut sequence, &tokens);
            assert_eq!(manager.num_cached_blocks(), tokens.len() / 4);
        }
        manager.free(sequence);
        assert_eq!(manager.num_free_blocks(), 4);
    }
}

/// "No room now" and "no room ever" were once treated alike, and the queue stood still.
#[test]
fn what_never_fits_is_told_apart_from_what_does_not_fit_now() {
    let mut manager = manager(8, 4);
    let never = KvCacheError::NeverFits {
        needed: 10,
        total: 8,
    };
    assert_eq!(manager.check_fits(40), Err(never.clone()));
    assert_eq!(manager.check_fits(32), Ok(()));
    // A first chunk that fits does not help a prompt that does not.
    assert_eq!(manager.admit(&[7; 40], 4, &key()).unwrap_err(), never);

    let (mut first, _) = prefill(&mut manager, &[1; 28], &key());
    let now = KvCacheError::NoFreeBlocks { needed: 2, free: 1 };
    assert_eq!(manager.admit(&[2; 8], 8, &key()).unwrap_err(), now);
    // The only running sequence fills the pool: 32 tokens have room and the next one never will.
    manager.append(&mut first, 4).unwrap();
    manager.mark_computed(&mut first, &[1; 32]);
    let outgrown = KvCacheError::NeverFits {
        needed: 9,
        total: 8,
    };
    assert_eq!(manager.append(&mut first, 1), Err(outgrown));
    manager.free(first);
    assert_eq!(manager.num_free_blocks(), 8);
}
