/// What a caller chooses about attention. Every option is honoured by every kernel that takes it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionOptions {
    /// Factor of the dot products of queries and keys.
    pub scale: f32,
    /// Whether row `i` of a sequence sees key `j` only if `j <= i + kv_len - q_len`.
    pub causal: bool,
    /// Number of positions that a row sees, its own included: key `j` only if
    /// `i + kv_len - q_len - j < window`. `None` sees all.
    pub window: Option<usize>,
    /// Bound of the scores: `softcap · tanh(score / softcap)`. `None` leaves them unbounded.
    pub softcap: Option<f32>,
    /// Positions after which the keys of every row are cut into parts that are attended on their own, so that the bits of a
    /// row depend on nothing else in the batch. Each part of each row keeps an output in f32 until they are put together: as
    /// many as positions of the longest sequence allow. `None` cuts as it suits the device and the batch.
    pub fixed_split: Option<usize>,
}

impl AttentionOptions {
    /// Causal attention over all earlier positions, with the usual `1 / sqrt(head_dim)`.
    pub fn causal(head_dim: usize) -> Self {
        Self {
            scale: (head_dim as f32).sqrt().recip(),
            causal: true,
            window: None,
            softcap: None,
            fixed_split: None,
        }
    }
}
