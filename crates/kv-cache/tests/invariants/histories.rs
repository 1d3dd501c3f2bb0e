//! Random histories of a pool that is too small, over an alphabet that is too small.
//!
//! Two or three different tokens make prefixes meet by chance, and a pool of at most twelve blocks makes every history
//! evict. A failing history is shrunk by proptest and printed as the list of its steps.

use burn_paged_kv_cache::{BlockHasher, BlockManagerConfig, CacheKey, KeyedBlockHasher};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use crate::model::{Counts, Model};
use crate::{ConstantHasher, LastTokenHasher};

/// One step. Numbers that choose a sequence are taken modulo the number of live ones.
#[derive(Debug, Clone)]
enum Step {
    Admit {
        key: usize,
        tokens: Vec<u32>,
        num_new: usize,
    },
    Resume {
        parked: usize,
        num_new: usize,
    },
    Append {
        sequence: usize,
        num_new: usize,
    },
    Compute {
        sequence: usize,
        count: usize,
        sampled: u32,
    },
    /// Finishes, aborts or (`park`) preempts.
    Free {
        sequence: usize,
        park: bool,
    },
    Fork {
        sequence: usize,
    },
    Reset,
}

#[derive(Debug, Clone)]
struct History {
    config: BlockManagerConfig,
    hasher: usize,
    steps: Vec<Step>,
}

/// Prompts that often begin alike: two letters at random, or the same letter all along.
fn prompts() -> impl Strategy<Value = Vec<u32>> {
    prop_oneof![
        1 => prop::collection::vec(0..2_u32, 0..12),
        1 => (0..2_u32, 0..12_usize).prop_map(|(token, len)| vec![token; len]),
    ]
}

fn steps() -> impl Strategy<Value = Step> {
    let sequence = 0..8_usize;
    prop_oneof![
        20 => (0..5_usize, prompts(), 0..9_usize)
            .prop_map(|(key, tokens, num_new)| Step::Admit { key, tokens, num_new }),
        6 => (sequence.clone(), 1..9_usize).prop_map(|(parked, num_new)| Step::Resume { parked, num_new }),
        15 => (sequence.clone(), 0..4_usize).prop_map(|(sequence, num_new)| Step::Append { sequence, num_new }),
        40 => (sequence.clone(), 0..12_usize, 0..2_u32)
            .prop_map(|(sequence, count, sampled)| Step::Compute { sequence, count, sampled }),
        20 => (sequence.clone(), any::<bool>()).prop_map(|(sequence, park)| Step::Free { sequence, park }),
        4 => sequence.prop_map(|sequence| Step::Fork { sequence }),
        1 => Just(Step::Reset),
    ]
}

fn histories() -> impl Strategy<Value = History> {
    // Pools of a few blocks, large blocks and histories without a cache need fewer cases.
    let num_blocks = prop_oneof![1 => 1..4_usize, 6 => 4..13_usize];
    let block_size = prop_oneof![3 => 1..3_usize, 1 => 3..6_usize];
    let caching = prop::bool::weighted(0.95);
    let steps = prop::collection::vec(steps(), 1..200);
    (num_blocks, block_size, caching, 0..3_usize, steps).prop_map(
        |(num_blocks, block_size, enable_prefix_caching, hasher, steps)| History {
            config: BlockManagerConfig {
                num_blocks,
                block_size,
                enable_prefix_caching,
            },
            hasher,
            steps,
        },
    )
}

fn key(index: usize) -> CacheKey {
    match index {
        // The default key is the most frequent one.
        0..=2 => CacheKey::default(),
        3 => CacheKey::default().with_salt("x"),
        _ => CacheKey::default().with_adapter("x"),
    }
}

fn apply(model: &mut Model, step: Step) {
    let num_live = model.sequences.len();
    match step {
        Step::Admit {
            key: index,
            tokens,
            num_new,
        } => {
            model.admit(tokens, num_new, key(index));
        }
        Step::Resume { parked, num_new } if !model.parked.is_empty() => {
            let index = parked % model.parked.len();
            let (key, tokens) = model.parked[index].clone();
            if model.admit(tokens, num_new, key) {
                model.parked.swap_remove(index);
            }
        }
        Step::Append { sequence, num_new } if num_live > 0 => {
            model.append(sequence % num_live, num_new);
        }
        Step::Compute {
            sequence,
            count,
            sampled,
        } if num_live > 0 => {
            model.compute(sequence % num_live, count, sampled);
        }
        Step::Free { sequence, park } if num_live > 0 => model.free(sequence % num_live, park),
        Step::Fork { sequence } if num_live > 0 => model.fork(sequence % num_live),
        Step::Reset => model.reset(),
        _ => {}
    }
}

/// Runs a history, with all checks after each step, and gives everything back at the end.
fn play(history: History) -> Counts {
    let hasher: Box<dyn BlockHasher> = match history.hasher {
        0 => Box::new(KeyedBlockHasher::default()),
        1 => Box::new(ConstantHasher),
        _ => Box::new(LastTokenHasher),
    };
    let mut model = Model::new(history.config, hasher);
    for step in history.steps {
        apply(&mut model, step);
        model.check();
    }
    while !model.sequences.is_empty() {
        model.free(0, false);
        model.check();
    }
    assert_eq!(model.manager.num_free_blocks(), history.config.num_blocks);
    model.counts
}

proptest! {
    // About a second; PROPTEST_CASES overrides the number.
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn every_history_keeps_the_invariants(history in histories()) {
        play(history);
    }
}

/// Guards the guard: with these strategies, every rare thing does happen.
#[test]
fn histories_reach_the_rare_states() {
    let mut runner = TestRunner::deterministic();
    let mut sum = Counts::default();
    for _ in 0..1000 {
        let counts = play(histories().new_tree(&mut runner).unwrap().current());
        sum.hit_tokens += counts.hit_tokens;
        sum.duplicates += counts.duplicates;
        sum.evictions += counts.evictions;
        sum.descendants_evicted += counts.descendants_evicted;
        sum.registered_again += counts.registered_again;
        sum.registered_by_a_fork += counts.registered_by_a_fork;
        sum.no_free_blocks += counts.no_free_blocks;
        sum.never_fits += counts.never_fits;
    }
    let rare = [
        sum.descendants_evicted,
        sum.registered_again,
        sum.registered_by_a_fork,
    ];
    let common = [
        sum.hit_tokens,
        sum.duplicates,
        sum.evictions,
        sum.no_free_blocks,
        sum.never_fits,
    ];
    assert!(rare.iter().all(|&count| count >= 1), "{sum:?}");
    assert!(common.iter().all(|&count| count >= 50), "{sum:?}");
}
