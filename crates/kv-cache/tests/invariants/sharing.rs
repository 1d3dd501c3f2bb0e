//! Who shares what with whom, and what is kept for how long.

use burn_paged_kv_cache::{BlockManager, BlockManagerConfig, CacheKey, KvCacheError};

use crate::{ids, manager, prefill, run};

fn key() -> CacheKey {
    CacheKey::default()
}

fn cached(manager: &BlockManager, tokens: &[u32]) -> usize {
    manager.match_prefix(tokens, &key()).num_cached_tokens()
}

#[test]
fn a_prompt_can_be_computed_in_chunks() {
    let mut manager = manager(8, 4);
    let prompt: Vec<u32> = (0..13).collect();
    run(&mut manager, &prompt[..5]);
    let (mut sequence, num_cached) = manager.admit(&prompt, 3, &key()).unwrap();
    assert_eq!(
        (
            num_cached,
            sequence.num_tokens(),
            sequence.block_ids().len()
        ),
        (4, 7, 2)
    );
    manager.mark_computed(&mut sequence, &prompt[..7]);
    assert_eq!(
        cached(&manager, &prompt),
        4,
        "the second block is not full yet"
    );
    manager.append(&mut sequence, 3).unwrap();
    manager.mark_computed(&mut sequence, &prompt[..10]);
    assert_eq!(cached(&manager, &prompt), 8);
    manager.append(&mut sequence, 3).unwrap();
    assert_eq!((sequence.num_tokens(), sequence.block_ids().len()), (13, 4));
    manager.mark_computed(&mut sequence, &prompt);
    assert_eq!(cached(&manager, &prompt), 12);
    manager.free(sequence);
}

#[test]
fn asking_again_before_the_step_asks_for_the_same_room() {
    let mut manager = manager(4, 4);
    let (mut sequence, _) = prefill(&mut manager, &[1, 2, 3], &key());
    for _ in 0..3 {
        manager.append(&mut sequence, 2).unwrap();
        assert_eq!((sequence.num_tokens(), sequence.block_ids().len()), (5, 2));
    }
    manager.append(&mut sequence, 1).unwrap();
    assert_eq!(
        (sequence.num_tokens(), sequence.capacity()),
        (4, 8),
        "less room keeps the blocks"
    );
    manager.free(sequence);
}

#[test]
fn two_sequences_that_compute_the_same_share_nothing_and_register_once() {
    let mut manager = manager(8, 2);
    let tokens = [1, 1, 2, 2, 3];
    let (mut first, _) = manager.admit(&tokens, 5, &key()).unwrap();
    let (mut second, _) = manager.admit(&tokens, 5, &key()).unwrap();
    manager.mark_computed(&mut first, &tokens);
    manager.mark_computed(&mut second, &tokens);
    assert_eq!((ids(&first), ids(&second)), (vec![0, 1, 2], vec![3, 4, 5]));
    assert_eq!(
        (manager.stats().registrations, manager.stats().duplicates),
        (2, 2)
    );
    assert_eq!(
        manager.match_prefix(&tokens, &key()).blocks(),
        &first.block_ids()[..2]
    );
    manager.free(first);
    manager.free(second);
    // The private copies are worth nothing and are given away before the cached blocks.
    let last_two: Vec<u32> = manager
        .free_blocks()
        .skip(6)
        .map(|block| block.get())
        .collect();
    assert_eq!(last_two, [1, 0]);
}

/// The sequence with the private copies goes on alone; its blocks continue cached blocks that it does not hold.
#[test]
fn a_private_copy_keeps_the_cached_prefix_young() {
    let mut manager = manager(8, 2);
    let (mut first, _) = manager.admit(&[1, 1, 2], 3, &key()).unwrap();
    let (mut second, _) = manager.admit(&[1, 1, 3, 3, 4], 5, &key()).unwrap();
    manager.mark_computed(&mut first, &[1, 1, 2]);
    manager.mark_computed(&mut second, &[1, 1, 3, 3, 4]);
    manager.free(first);
    run(&mut manager, &[7, 7, 8]);
    manager.free(second);
    // Needs all blocks but two: the older [7, 7] goes, the prefix of the second sequence stays.
    run(&mut manager, &[9; 11]);
    assert_eq!(cached(&manager, &[1, 1, 3, 3, 4]), 4);
    assert_eq!(cached(&manager, &[7, 7, 8]), 0);
}

/// The cached prefix is evicted while the sequence with the private copy runs: it registers its own blocks instead.
#[test]
fn a_running_sequence_registers_again_what_was_evicted_under_it() {
    let mut manager = manager(6, 2);
    let tokens = [1, 1, 3, 3, 4, 4];
    let (mut first, _) = manager.admit(&[1, 1], 2, &key()).unwrap();
    let (mut second, _) = manager.admit(&tokens[..5], 5, &key()).unwrap();
    manager.mark_computed(&mut first, &[1, 1]);
    manager.mark_computed(&mut second, &tokens[..5]);
    manager.free(first);
    let (other, _) = prefill(&mut manager, &[9, 8, 7, 6, 5, 4], &key());
    assert_eq!(cached(&manager, &tokens), 0);
    assert_eq!(
        manager.stats().evictions,
        2,
        "the prefix, and the block that continues it"
    );
    manager.mark_computed(&mut second, &tokens[..5]);
    assert_eq!(
        manager.match_prefix(&tokens, &key()).blocks(),
        &second.block_ids()[..2]
    );
    manager.free(second);
    manager.free(other);
}

/// The same for a sequence that learns of it only through its fork, which shares the private copy.
#[test]
fn the_cached_prefix_stays_young_for_a_sequence_that_does_not_know_it() {
    let mut manager = manager(8, 2);
    let tokens = [1, 1, 3, 3];
    let (mut first, _) = manager.admit(&[1, 1], 2, &key()).unwrap();
    let (mut second, _) = manager.admit(&tokens, 4, &key()).unwrap();
    manager.mark_computed(&mut first, &[1, 1]);
    manager.mark_computed(&mut second, &tokens);
    let mut fork = manager.fork(&second);
    manager.free(first);
    // Evicts the prefix, computes it anew elsewhere, and the fork registers what continues it.
    run(&mut manager, &[9; 12]);
    run(&mut manager, &[1, 1]);
    manager.mark_computed(&mut fork, &tokens);
    manager.free(fork);
    run(&mut manager, &[7, 7]);
    manager.free(second);
    assert_eq!(cached(&manager, &[1, 1, 3, 3, 0]), 4);

    let prefix = manager.match_prefix(&[1, 1, 3, 3, 0], &key());
    let last_two: Vec<_> = manager.free_blocks().skip(6).collect();
    assert_eq!(last_two, [prefix.blocks()[1], prefix.blocks()[0]]);
}

#[test]
fn a_preempted_sequence_finds_its_blocks_again() {
    let mut manager = manager(8, 4);
    let tokens: Vec<u32> = (0..14).collect();
    let (sequence, _) = prefill(&mut manager, &tokens, &key());
    let block_ids = ids(&sequence);
    manager.free(sequence);
    let (resumed, num_cached) = prefill(&mut manager, &tokens, &key());
    assert_eq!((num_cached, &ids(&resumed)[..3]), (12, &block_ids[..3]));
    assert_eq!(manager.stats().hit_tokens, 12);
    manager.free(resumed);
}

#[test]
fn the_least_recently_used_goes_first_and_tails_before_prefixes() {
    let mut manager = manager(6, 2);
    run(&mut manager, &[1, 1, 2, 2, 3]);
    run(&mut manager, &[5, 5, 6, 6, 7]);
    // Using the older one again makes it the younger one.
    assert_eq!(run(&mut manager, &[1, 1, 2, 2, 3]), 4);
    let kept = |manager: &BlockManager| {
        (
            cached(manager, &[1, 1, 2, 2, 3]),
            cached(manager, &[5, 5, 6, 6, 7]),
        )
    };
    assert_eq!(kept(&manager), (4, 4));
    // Two blocks are blank, so a sequence of n blocks evicts n - 2, and adds none itself.
    for (num_blocks, expected) in [(3, (4, 2)), (4, (4, 0)), (5, (2, 0)), (6, (0, 0))] {
        let (mut sequence, _) = manager.admit(&[], num_blocks * 2, &key()).unwrap();
        assert_eq!(sequence.block_ids().len(), num_blocks);
        manager.mark_computed(&mut sequence, &[]);
        manager.free(sequence);
        assert_eq!(kept(&manager), expected);
    }
}

#[test]
fn looking_does_not_make_younger() {
    let mut manager = manager(4, 2);
    run(&mut manager, &[1, 1]);
    run(&mut manager, &[2, 2]);
    let before: Vec<_> = manager.free_blocks().collect();
    assert_eq!(cached(&manager, &[1, 1, 0]), 2);
    assert_eq!(manager.free_blocks().collect::<Vec<_>>(), before);
    assert_eq!(manager.stats().hit_tokens, 0);
}

#[test]
fn a_fork_shares_full_blocks_and_computes_the_rest_again() {
    let mut manager = manager(6, 4);
    let mut tokens: Vec<u32> = (0..10).collect();
    let (mut parent, _) = prefill(&mut manager, &tokens, &key());
    let mut fork = manager.fork(&parent);
    assert_eq!(fork.block_ids(), &parent.block_ids()[..2]);
    assert_eq!(
        (
            fork.num_computed_tokens(),
            fork.num_tokens(),
            fork.num_cached_tokens()
        ),
        (8, 8, 8)
    );
    assert_eq!(manager.ref_count(fork.block_ids()[0]), Some(2));

    // Both go on with different tokens, each in its own block.
    let mut fork_tokens = tokens.clone();
    tokens.push(50);
    fork_tokens.push(60);
    manager.append(&mut parent, 1).unwrap();
    manager.append(&mut fork, 3).unwrap();
    manager.mark_computed(&mut parent, &tokens);
    manager.mark_computed(&mut fork, &fork_tokens);
    assert_ne!(fork.slot(8), parent.slot(8));

    let shared = parent.block_ids()[0];
    manager.free(parent);
    assert_eq!(
        manager.ref_count(shared),
        Some(1),
        "the fork outlives its parent"
    );
    manager.free(fork);
    assert_eq!(manager.num_free_blocks(), 6);
}

#[test]
fn a_reset_forgets_everything_and_running_sequences_register_nothing_more() {
    let mut manager = manager(8, 2);
    let tokens = [1, 1, 2, 2];
    let (mut running, _) = prefill(&mut manager, &tokens, &key());
    run(&mut manager, &[3, 3, 4]);
    manager.reset_prefix_cache();
    assert_eq!(manager.num_cached_blocks(), 0);
    assert_eq!(cached(&manager, &[1, 1, 2]), 0);

    let mut fork = manager.fork(&running);
    for sequence in [&mut running, &mut fork] {
        manager.append(sequence, 2).unwrap();
        manager.mark_computed(sequence, &[1, 1, 2, 2, 5, 5]);
    }
    assert_eq!(
        manager.num_cached_blocks(),
        0,
        "part of their blocks is from before the reset"
    );
    manager.free(running);
    manager.free(fork);
    assert_eq!(
        (run(&mut manager, &[1, 1, 2]), run(&mut manager, &[1, 1, 2])),
        (0, 2)
    );
}

#[test]
fn without_prefix_caching_nothing_is_shared_or_counted() {
    let config = BlockManagerConfig {
        num_blocks: 4,
        block_size: 2,
        enable_prefix_caching: false,
    };
    let mut manager = BlockManager::new(config).unwrap();
    for _ in 0..2 {
        assert_eq!(run(&mut manager, &[1, 1, 2, 2, 3]), 0);
    }
    manager.reset_prefix_cache();
    assert_eq!(
        (manager.num_cached_blocks(), manager.stats()),
        (0, Default::default())
    );
    // A fork is explicit and works all the same.
    let (sequence, _) = prefill(&mut manager, &[1, 1, 2], &key());
    let fork = manager.fork(&sequence);
    assert_eq!(ids(&fork), ids(&sequence)[..1]);
    manager.free(sequence);
    manager.free(fork);
    assert_eq!(manager.num_free_blocks(), 4);
}

#[test]
fn impossible_pools_are_refused() {
    let new = |num_blocks, block_size| {
        let config = BlockManagerConfig {
            num_blocks,
            block_size,
            enable_prefix_caching: false,
        };
        BlockManager::new(config).map(|manager| manager.num_blocks())
    };
    assert_eq!(new(0, 4), Err(KvCacheError::ZeroBlocks));
    assert_eq!(new(4, 0), Err(KvCacheError::ZeroBlockSize));
    assert_eq!(new(1, i32::MAX as usize), Ok(1));
    for (num_blocks, block_size) in [(1, 1 << 31), (1 << 40, 1 << 40), (usize::MAX, 1)] {
        let limit = i32::MAX as usize;
        let expected = KvCacheError::TooManySlots {
            num_blocks,
            block_size,
            limit,
        };
        assert_eq!(new(num_blocks, block_size), Err(expected));
    }
}

#[test]
fn absurd_lengths_are_refused_and_not_added_up() {
    let mut manager = manager(4, 2);
    run(&mut manager, &[1, 1, 2]);
    let refused = manager.admit(&[1, 1, 2], usize::MAX, &key()).unwrap_err();
    assert!(matches!(refused, KvCacheError::NeverFits { total: 4, .. }));
    let (mut sequence, _) = prefill(&mut manager, &[1, 1, 2], &key());
    let refused = manager.append(&mut sequence, usize::MAX).unwrap_err();
    assert!(matches!(refused, KvCacheError::NeverFits { total: 4, .. }));
    manager.free(sequence);
}

#[test]
#[should_panic(expected = "4 tokens cannot be computed: 0 were before, and there is room for 3")]
fn tokens_without_room_cannot_be_marked() {
    let mut manager = manager(4, 2);
    let (mut sequence, _) = manager.admit(&[1, 2, 3, 4], 3, &key()).unwrap();
    manager.mark_computed(&mut sequence, &[1, 2, 3, 4]);
}

#[test]
#[should_panic(expected = "1 tokens cannot be computed: 2 were before")]
fn computed_tokens_cannot_be_taken_back() {
    let mut manager = manager(4, 2);
    let (mut sequence, _) = prefill(&mut manager, &[1, 2], &key());
    manager.mark_computed(&mut sequence, &[1]);
}
