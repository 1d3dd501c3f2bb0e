//! Attention problems as data; every implementation runs every one.

use burn_paged::AttentionOptions;

#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// New tokens of each sequence.
    pub(crate) query_lens: Vec<usize>,
    /// Tokens of each sequence after the step.
    pub(crate) kv_lens: Vec<usize>,
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) block_size: usize,
    pub(crate) options: AttentionOptions,
    /// Sequences after the first use its blocks for their first `shared_blocks` blocks.
    pub(crate) shared_blocks: usize,
    /// Scale of the random queries and keys: 4 gives a peaked softmax, 0 a flat one.
    pub(crate) scale: f32,
}

impl Case {
    fn new(
        name: &'static str,
        lens: &[(usize, usize)],
        heads: (usize, usize),
        head_dim: usize,
        block_size: usize,
    ) -> Self {
        Self {
            name,
            query_lens: lens.iter().map(|(query_len, _)| *query_len).collect(),
            kv_lens: lens.iter().map(|(_, kv_len)| *kv_len).collect(),
            num_heads: heads.0,
            num_kv_heads: heads.1,
            head_dim,
            block_size,
            options: AttentionOptions::causal(),
            shared_blocks: 0,
            scale: 4.0,
        }
    }

    fn options(mut self, options: AttentionOptions) -> Self {
        self.options = options;
        self
    }
}

/// `(query_len, kv_len)` of prompts, chunks with a prefix, decodes and empty sequences around the block borders.
const MIXED: [(usize, usize); 8] = [
    (3, 3),
    (1, 17),
    (5, 21),
    (0, 0),
    (1, 1),
    (16, 16),
    (1, 16),
    (7, 15),
];

/// The cases that also run where each variant of a kernel is compiled first.
pub(crate) fn few_cases() -> Vec<Case> {
    let names = [
        "mixed, group 3, block 4",
        "window 6",
        "softcap",
        "shared blocks",
        "no sequences",
    ];
    cases()
        .into_iter()
        .filter(|case| names.contains(&case.name))
        .collect()
}

pub(crate) fn cases() -> Vec<Case> {
    let causal = AttentionOptions::causal();
    let mut shared = Case::new(
        "shared blocks",
        &[(4, 37), (1, 33), (9, 41)],
        (4, 2),
        16,
        16,
    );
    shared.shared_blocks = 2;
    let mut flat = Case::new("flat softmax", &MIXED, (2, 2), 16, 4);
    flat.scale = 0.0;
    let mut large = Case::new("large scores", &MIXED, (3, 1), 24, 5);
    large.scale = 40.0;
    vec![
        Case::new("mixed, group 1, block 1", &MIXED, (3, 3), 64, 1),
        Case::new("mixed, group 3, block 4", &MIXED, (9, 3), 64, 4),
        Case::new("mixed, group 4, block 16", &MIXED, (8, 2), 80, 16),
        Case::new("mixed, group 7, block 5", &MIXED, (7, 1), 72, 5),
        Case::new("mixed, group 8, block 64", &MIXED, (16, 2), 96, 64),
        Case::new(
            "head_dim 128, block 16",
            &[(5, 150), (1, 140), (33, 33)],
            (4, 1),
            128,
            16,
        ),
        Case::new(
            "head_dim 256, block 256",
            &[(2, 7), (1, 300)],
            (2, 1),
            256,
            256,
        ),
        Case::new("head_dim 5", &MIXED, (2, 1), 5, 3),
        Case::new(
            "tall: more than one query tile",
            &[(150, 290), (70, 70)],
            (6, 2),
            20,
            16,
        ),
        Case::new("one decode, long", &[(1, 517)], (3, 1), 64, 16),
        Case::new("bidirectional", &MIXED, (4, 2), 16, 4)
            .options(AttentionOptions::bidirectional()),
        Case::new("window 1", &MIXED, (4, 2), 16, 4).options(causal.with_window(1)),
        Case::new("window 6", &MIXED, (4, 2), 16, 4).options(causal.with_window(6)),
        Case::new("window 0: rows see nothing", &MIXED, (4, 2), 16, 4)
            .options(causal.with_window(0)),
        Case::new(
            "window over several tiles",
            &[(40, 400), (1, 350)],
            (4, 2),
            16,
            16,
        )
        .options(causal.with_window(150)),
        Case::new("softcap", &MIXED, (4, 2), 16, 4).options(causal.with_softcap(5.0)),
        Case::new("scale", &MIXED, (4, 2), 16, 4).options(causal.with_scale(0.31)),
        shared,
        flat,
        large,
        Case::new("only empty sequences", &[(0, 0), (0, 0)], (2, 1), 16, 4),
        Case::new("no sequences", &[], (2, 1), 16, 4),
        Case::new(
            "no new tokens, some cached",
            &[(0, 5), (1, 6)],
            (2, 1),
            16,
            4,
        ),
    ]
}
