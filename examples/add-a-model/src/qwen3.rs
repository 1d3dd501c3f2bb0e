//! Qwen3: a Llama-like decoder that normalizes the heads of q and k before it rotates them.
//!
//! Qwen Team 2025, arXiv:2505.09388. Reference: Hugging Face `modeling_qwen3.py`, dense models. What differs from Llama:
//! `q_norm` and `k_norm`, one weight of `head_dim` elements each for all heads of a layer; and `head_dim` is a number
//! of its own, so that `num_heads * head_dim` need not be `hidden_size`.
//!
//! Letters in shapes: H query heads, KH key/value heads, D elements per head.

use burn::tensor::Tensor;
use burn_paged::{
    AttentionOptions, LayerKv, PagedKvCache, RotaryTable, columns, paged_attention,
    rotary_and_store, silu_and_mul,
};
use burn_paged_model::layers::{Embedding, Linear, RmsNorm};
use burn_paged_model::{
    CausalLm, ConfigError, LoadError, ModelFamily, ModelInput, ModelSpec, RopeConfig, WeightLoader,
    architecture,
};
use serde::Deserialize;

/// The entry for the registry of models.
pub const FAMILY: ModelFamily = ModelFamily {
    architectures: &["Qwen3ForCausalLM"],
    load: |loader| Ok(Box::new(Qwen3::load(loader)?)),
};

/// The fields of `config.json` that the model reads, under their published names.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[non_exhaustive]
pub struct Qwen3Config {
    /// Elements of the residual stream.
    pub hidden_size: usize,
    /// Elements of the MLP's inner activation.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key/value heads.
    pub num_key_value_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Tokens of the vocabulary, rows of the embedding.
    pub vocab_size: usize,
    /// Longest context, in tokens, before rope scaling.
    pub max_position_embeddings: usize,
    /// Epsilon of the normalizations.
    pub rms_norm_eps: f64,
    /// Activation of the gate; `silu` is the only one.
    pub hidden_act: String,
    /// Whether the attention projections have a bias.
    #[serde(default)]
    pub attention_bias: bool,
    /// Whether the output layer is the embedding.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// Whether some layers see a window only; not supported.
    #[serde(default)]
    pub use_sliding_window: bool,
}

impl Qwen3Config {
    /// Refuses what cannot be, and what this model does not do, before anything is allocated.
    ///
    /// # Errors
    /// [`ConfigError`] naming the field and its value.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let (num_heads, num_kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        if num_kv_heads == 0 || num_heads == 0 || !num_heads.is_multiple_of(num_kv_heads) {
            let reason =
                format!("is {num_kv_heads}, which does not divide {num_heads} query heads");
            return Err(ConfigError::new("num_key_value_heads", reason));
        }
        if self.head_dim == 0 || self.head_dim > 256 || !self.head_dim.is_multiple_of(2) {
            let reason = format!("is {}, an even number up to 256 is needed", self.head_dim);
            return Err(ConfigError::new("head_dim", reason));
        }
        if self.hidden_act != "silu" {
            let reason = format!("is {:?}, only \"silu\" is supported", self.hidden_act);
            return Err(ConfigError::new("hidden_act", reason));
        }
        if self.use_sliding_window {
            return Err(ConfigError::new(
                "use_sliding_window",
                "is true, which is not supported",
            ));
        }
        Ok(())
    }
}

/// Attention of one block.
#[derive(Debug)]
struct Qwen3Attention {
    /// q, k and v, one below the other: `[(H + 2·KH)·D, hidden_size]`.
    qkv_proj: Linear,
    /// `[D]`.
    q_norm: RmsNorm,
    /// `[D]`.
    k_norm: RmsNorm,
    /// `[hidden_size, H·D]`.
    o_proj: Linear,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
}

impl Qwen3Attention {
    fn load(
        loader: &mut WeightLoader<'_>,
        prefix: &str,
        config: &Qwen3Config,
    ) -> Result<Self, LoadError> {
        let (num_heads, num_kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let (head_dim, hidden_size) = (config.head_dim, config.hidden_size);
        let (epsilon, bias) = (config.rms_norm_eps, config.attention_bias);
        let parts = [
            ("q_proj", num_heads * head_dim),
            ("k_proj", num_kv_heads * head_dim),
            ("v_proj", num_kv_heads * head_dim),
        ];
        let o_proj = [hidden_size, num_heads * head_dim];
        Ok(Self {
            qkv_proj: Linear::load_stacked(loader, prefix, &parts, hidden_size, bias)?,
            q_norm: RmsNorm::load(loader, &format!("{prefix}q_norm"), head_dim, epsilon)?,
            k_norm: RmsNorm::load(loader, &format!("{prefix}k_norm"), head_dim, epsilon)?,
            o_proj: Linear::load(loader, &format!("{prefix}o_proj"), o_proj, bias)?,
            num_heads,
            num_kv_heads,
            head_dim,
        })
    }

    fn forward(
        &self,
        hidden: Tensor<2>,
        input: &ModelInput,
        rope: &RotaryTable,
        cache: &mut LayerKv,
    ) -> Tensor<2> {
        let Self {
            num_heads,
            num_kv_heads,
            head_dim,
            ..
        } = *self;
        let num_tokens = hidden.dims()[0];
        let attention = &input.attention;
        let qkv = self.qkv_proj.forward(hidden); // [num_tokens, (H + 2·KH)·D]
        let heads = |first: usize, count: usize| {
            columns(&qkv, first * head_dim..(first + count) * head_dim)
        };
        // A head is a row for its norm: [num_tokens, H·D] is [num_tokens·H, D].
        let normed = |x: Tensor<2>, norm: &RmsNorm, count: usize| {
            let rows = norm.forward(x.reshape([num_tokens * count, head_dim]));
            rows.reshape([num_tokens, count, head_dim])
        };
        let q = normed(heads(0, num_heads), &self.q_norm, num_heads); // [num_tokens, H, D]
        let k = normed(heads(num_heads, num_kv_heads), &self.k_norm, num_kv_heads);
        let v = heads(num_heads + num_kv_heads, num_kv_heads);
        let v = v.reshape([num_tokens, num_kv_heads, head_dim]); // [num_tokens, KH, D]
        let slots = attention.slot_mapping();
        let q = rotary_and_store(q, k, v, &input.positions, rope, cache, slots);
        let out = paged_attention(q, cache, attention, AttentionOptions::causal());
        self.o_proj
            .forward(out.reshape([num_tokens, num_heads * head_dim]))
    }
}

/// Gated MLP of one block.
#[derive(Debug)]
struct Qwen3Mlp {
    /// gate and up, one below the other: `[2·intermediate_size, hidden_size]`.
    gate_up_proj: Linear,
    /// `[hidden_size, intermediate_size]`.
    down_proj: Linear,
}

impl Qwen3Mlp {
    fn load(
        loader: &mut WeightLoader<'_>,
        prefix: &str,
        config: &Qwen3Config,
    ) -> Result<Self, LoadError> {
        let (hidden_size, intermediate_size) = (config.hidden_size, config.intermediate_size);
        let parts = [
            ("gate_proj", intermediate_size),
            ("up_proj", intermediate_size),
        ];
        let (name, down_proj) = (
            format!("{prefix}down_proj"),
            [hidden_size, intermediate_size],
        );
        Ok(Self {
            gate_up_proj: Linear::load_stacked(loader, prefix, &parts, hidden_size, false)?,
            down_proj: Linear::load(loader, &name, down_proj, false)?,
        })
    }

    fn forward(&self, hidden: Tensor<2>) -> Tensor<2> {
        let gate_up = self.gate_up_proj.forward(hidden); // [num_tokens, 2·intermediate_size]
        self.down_proj.forward(silu_and_mul(gate_up)) // [num_tokens, hidden_size]
    }
}

/// One block.
#[derive(Debug)]
struct Qwen3Block {
    input_layernorm: RmsNorm,
    self_attn: Qwen3Attention,
    post_attention_layernorm: RmsNorm,
    mlp: Qwen3Mlp,
}

impl Qwen3Block {
    fn load(
        loader: &mut WeightLoader<'_>,
        prefix: &str,
        config: &Qwen3Config,
    ) -> Result<Self, LoadError> {
        let norm = |loader: &mut WeightLoader<'_>, name: &str| {
            let name = format!("{prefix}{name}");
            RmsNorm::load(loader, &name, config.hidden_size, config.rms_norm_eps)
        };
        Ok(Self {
            input_layernorm: norm(loader, "input_layernorm")?,
            self_attn: Qwen3Attention::load(loader, &format!("{prefix}self_attn."), config)?,
            post_attention_layernorm: norm(loader, "post_attention_layernorm")?,
            mlp: Qwen3Mlp::load(loader, &format!("{prefix}mlp."), config)?,
        })
    }

    /// Takes and gives what the last layer added and the residual stream without it, so that the addition is one with
    /// the next normalization.
    fn forward(
        &self,
        hidden: Tensor<2>,
        residual: Option<Tensor<2>>,
        input: &ModelInput,
        rope: &RotaryTable,
        cache: &mut LayerKv,
    ) -> (Tensor<2>, Tensor<2>) {
        let (hidden, residual) = self.input_layernorm.forward_residual(hidden, residual);
        let hidden = self.self_attn.forward(hidden, input, rope, cache);
        let norm = &self.post_attention_layernorm;
        let (hidden, residual) = norm.forward_residual(hidden, Some(residual));
        (self.mlp.forward(hidden), residual)
    }
}

/// A Qwen3 model with its weights.
#[derive(Debug)]
pub struct Qwen3 {
    embed_tokens: Embedding,
    layers: Vec<Qwen3Block>,
    norm: RmsNorm,
    lm_head: Linear,
    rope: RotaryTable,
    spec: ModelSpec,
}

impl Qwen3 {
    /// Builds the model out of a checkpoint; called by [`load_model`](burn_paged_model::load_model) through [`FAMILY`].
    ///
    /// # Errors
    /// [`LoadError`] for a configuration that cannot be run; missing and misshapen weights are the loader's to report.
    pub fn load(loader: &mut WeightLoader<'_>) -> Result<Self, LoadError> {
        let config: Qwen3Config = loader.config()?;
        config
            .validate()
            .map_err(|source| loader.config_error(source))?;
        let (rope, max_positions) = load_rope(loader, &config)?;
        let (vocab_size, hidden_size) = (config.vocab_size, config.hidden_size);

        let embed_tokens = Embedding::load(loader, "model.embed_tokens", vocab_size, hidden_size)?;
        let layers = (0..config.num_hidden_layers)
            .map(|layer| Qwen3Block::load(loader, &format!("model.layers.{layer}."), &config))
            .collect::<Result<_, _>>()?;
        let norm = RmsNorm::load(loader, "model.norm", hidden_size, config.rms_norm_eps)?;
        let lm_head = match config.tie_word_embeddings {
            true => {
                loader.ignore("lm_head.weight");
                embed_tokens.as_linear()
            }
            false => Linear::load(loader, "lm_head", [vocab_size, hidden_size], false)?,
        };
        let spec = ModelSpec {
            architecture: architecture(loader.config_json()).to_owned(),
            num_layers: config.num_hidden_layers,
            num_kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            vocab_size,
            max_positions,
            dtype: loader.dtype(),
            device: loader.device().clone(),
        };
        Ok(Self {
            embed_tokens,
            layers,
            norm,
            lm_head,
            rope,
            spec,
        })
    }
}

/// The rotary table and the number of its positions.
fn load_rope(
    loader: &WeightLoader<'_>,
    config: &Qwen3Config,
) -> Result<(RotaryTable, usize), LoadError> {
    let error = |source| loader.config_error(source);
    let json = loader.config_json();
    let rope = RopeConfig::from_config(json, config.max_position_embeddings).map_err(error)?;
    let max_positions = loader.max_positions(rope.max_positions())?;
    let frequencies = rope
        .frequencies(config.head_dim, max_positions)
        .map_err(error)?;
    Ok((
        frequencies.table(max_positions, loader.device()),
        max_positions,
    ))
}

impl CausalLm for Qwen3 {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn forward(&self, input: &ModelInput, cache: &mut PagedKvCache) -> Tensor<2> {
        let mut hidden = self.embed_tokens.forward(&input.token_ids); // [num_tokens, hidden_size]
        let mut residual = None;
        for (at, layer) in self.layers.iter().enumerate() {
            let cache = cache.layer_mut(at);
            let (added, stream) = layer.forward(hidden, residual, input, &self.rope, cache);
            (hidden, residual) = (added, Some(stream));
        }

        // The head is the largest product of a prompt: only the wanted rows go through it.
        let wanted = &input.logits_indices;
        if wanted.dims()[0] == 0 {
            let ModelSpec {
                vocab_size,
                device,
                dtype,
                ..
            } = &self.spec;
            return Tensor::zeros([0, *vocab_size], (device, *dtype));
        }
        let rows = |x: Tensor<2>| x.select(0, wanted.clone()); // [num_logits, hidden_size]
        let (hidden, _) = self.norm.forward_residual(rows(hidden), residual.map(rows));
        self.lm_head.forward(hidden) // [num_logits, vocab_size]
    }
}
