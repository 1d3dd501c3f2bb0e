//! Llama: a decoder of blocks that each attend and then transform, both on normalized input and added to a residual.
//!
//! Touvron et al. 2023, arXiv:2302.13971; grouped heads from arXiv:2307.09288. Reference: Hugging Face
//! `modeling_llama.py`, and `modeling_mistral.py` for the sliding window. What differs here: q, k and v are one product,
//! and so are gate and up; K and V go to a paged cache; logits are made for the wanted rows only.
//!
//! Letters in shapes: H query heads, KH key/value heads, D elements per head.

use burn::tensor::Tensor;
use burn_paged::{
    AttentionOptions, LayerKv, PagedKvCache, RotaryTable, columns, paged_attention,
    rotary_and_store,
};
use burn_paged_model::layers::{Embedding, GatedLinear, Linear, RmsNorm};
use burn_paged_model::{
    CausalLm, LoadError, ModelFamily, ModelInput, ModelSpec, RopeConfig, WeightLoader, architecture,
};

use crate::LlamaConfig;

/// The entry for the registry of models.
pub const FAMILY: ModelFamily = ModelFamily {
    architectures: &["LlamaForCausalLM", "MistralForCausalLM"],
    load: |loader| Ok(Box::new(Llama::load(loader)?)),
};

/// Attention of one block.
#[derive(Debug)]
struct LlamaAttention {
    /// q, k and v, one below the other: `[(H + 2·KH)·D, hidden_size]`.
    qkv_proj: Linear,
    /// `[hidden_size, H·D]`.
    o_proj: Linear,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    options: AttentionOptions,
}

impl LlamaAttention {
    fn load(
        loader: &mut WeightLoader<'_>,
        prefix: &str,
        config: &LlamaConfig,
    ) -> Result<Self, LoadError> {
        let (num_heads, num_kv_heads) = (config.num_attention_heads, config.num_kv_heads());
        let (head_dim, hidden_size) = (config.head_dim(), config.hidden_size);
        let parts = [
            ("q_proj", num_heads * head_dim),
            ("k_proj", num_kv_heads * head_dim),
            ("v_proj", num_kv_heads * head_dim),
        ];
        let bias = config.attention_bias;
        let o_proj = [hidden_size, num_heads * head_dim];
        let mut options = AttentionOptions::causal();
        options.window = config.window();
        Ok(Self {
            qkv_proj: Linear::load_stacked(loader, prefix, &parts, hidden_size, bias)?,
            o_proj: Linear::load(loader, &format!("{prefix}o_proj"), o_proj, bias)?,
            num_heads,
            num_kv_heads,
            head_dim,
            options,
        })
    }

    fn forward(
        &self,
        hidden: Tensor<2>,
        input: &ModelInput,
        rope: &RotaryTable,
        cache: &mut LayerKv,
    ) -> Tensor<2> {
        let num_tokens = hidden.dims()[0];
        let qkv = self.qkv_proj.forward(hidden); // [num_tokens, (H + 2·KH)·D]
        let heads = |first: usize, count: usize| {
            let range = first * self.head_dim..(first + count) * self.head_dim;
            columns(&qkv, range).reshape([num_tokens, count, self.head_dim])
        };
        let q = heads(0, self.num_heads); // [num_tokens, H, D]
        let k = heads(self.num_heads, self.num_kv_heads); // [num_tokens, KH, D]
        let v = heads(self.num_heads + self.num_kv_heads, self.num_kv_heads);
        let attention = &input.attention;
        let q = rotary_and_store(
            q,
            k,
            v,
            &input.positions,
            rope,
            cache,
            attention.slot_mapping(),
        );
        let out = paged_attention(q, cache, attention, self.options);
        self.o_proj
            .forward(out.reshape([num_tokens, self.num_heads * self.head_dim]))
    }
}

/// Gated MLP of one block.
#[derive(Debug)]
struct LlamaMlp {
    /// gate and up in one: `[2·intermediate_size, hidden_size]`.
    gate_up_proj: GatedLinear,
    /// `[hidden_size, intermediate_size]`.
    down_proj: Linear,
}

impl LlamaMlp {
    fn load(
        loader: &mut WeightLoader<'_>,
        prefix: &str,
        config: &LlamaConfig,
    ) -> Result<Self, LoadError> {
        let (hidden_size, intermediate_size) = (config.hidden_size, config.intermediate_size);
        let (parts, gate) = (["gate_proj", "up_proj"], [intermediate_size, hidden_size]);
        let (bias, down_proj) = (config.mlp_bias, [hidden_size, intermediate_size]);
        Ok(Self {
            gate_up_proj: GatedLinear::load(loader, prefix, parts, gate, bias)?,
            down_proj: Linear::load(loader, &format!("{prefix}down_proj"), down_proj, bias)?,
        })
    }

    fn forward(&self, hidden: Tensor<2>) -> Tensor<2> {
        let gated = self.gate_up_proj.forward(hidden); // [num_tokens, intermediate_size]
        self.down_proj.forward(gated) // [num_tokens, hidden_size]
    }
}

/// One block.
#[derive(Debug)]
struct LlamaBlock {
    input_layernorm: RmsNorm,
    self_attn: LlamaAttention,
    post_attention_layernorm: RmsNorm,
    mlp: LlamaMlp,
}

impl LlamaBlock {
    fn load(
        loader: &mut WeightLoader<'_>,
        prefix: &str,
        config: &LlamaConfig,
    ) -> Result<Self, LoadError> {
        let norm = |loader: &mut WeightLoader<'_>, name: &str| {
            let name = format!("{prefix}{name}");
            RmsNorm::load(loader, &name, config.hidden_size, config.rms_norm_eps)
        };
        Ok(Self {
            input_layernorm: norm(loader, "input_layernorm")?,
            self_attn: LlamaAttention::load(loader, &format!("{prefix}self_attn."), config)?,
            post_attention_layernorm: norm(loader, "post_attention_layernorm")?,
            mlp: LlamaMlp::load(loader, &format!("{prefix}mlp."), config)?,
        })
    }

    /// Takes and gives what the last layer added and the residual stream without it, so that the addition is one with the
    /// next normalization.
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
        let (hidden, residual) = self
            .post_attention_layernorm
            .forward_residual(hidden, Some(residual));
        (self.mlp.forward(hidden), residual)
    }
}

/// A Llama model with its weights.
#[derive(Debug)]
pub struct Llama {
    embed_tokens: Embedding,
    layers: Vec<LlamaBlock>,
    norm: RmsNorm,
    lm_head: Linear,
    rope: RotaryTable,
    spec: ModelSpec,
}

impl Llama {
    /// Builds the model out of a checkpoint; to be called through
    /// [`load_model`](burn_paged_model::load_model) with [`FAMILY`], or [`load_with`](burn_paged_model::load_with).
    ///
    /// With `tie_word_embeddings` the output layer is the embedding, and a stored `lm_head.weight` is not read; without, it is
    /// `lm_head.weight`, which must be there.
    ///
    /// # Errors
    /// [`LoadError`] for a configuration that cannot be run; missing and misshapen weights are the loader's to report.
    pub fn load(loader: &mut WeightLoader<'_>) -> Result<Self, LoadError> {
        let config: LlamaConfig = loader.config()?;
        config
            .validate()
            .map_err(|source| loader.config_error(source))?;
        let (rope, max_positions) = load_rope(loader, &config)?;
        let (vocab_size, hidden_size) = (config.vocab_size, config.hidden_size);

        let embed_tokens = Embedding::load(loader, "model.embed_tokens", vocab_size, hidden_size)?;
        let layers = (0..config.num_hidden_layers)
            .map(|layer| LlamaBlock::load(loader, &format!("model.layers.{layer}."), &config))
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
            num_kv_heads: config.num_kv_heads(),
            head_dim: config.head_dim(),
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
    loader: &mut WeightLoader<'_>,
    config: &LlamaConfig,
) -> Result<(RotaryTable, usize), LoadError> {
    let rope = RopeConfig::from_config(loader.config_json(), config.max_position_embeddings)
        .map_err(|source| loader.config_error(source))?;
    let max_positions = loader.max_positions(rope.max_positions())?;
    LlamaConfig::validate_positions(max_positions).map_err(|source| loader.config_error(source))?;
    let mut frequencies = rope
        .frequencies(config.head_dim(), max_positions)
        .map_err(|source| loader.config_error(source))?;
    // GGUF files of Llama 3 have the scaling worked out, one factor for each frequency.
    let num_factors = frequencies.inv_freq.len();
    if let Some(factors) = loader.optional_host_vector("rope_freqs.weight", num_factors)? {
        frequencies
            .divide_by(&factors)
            .map_err(|source| loader.config_error(source))?;
    }
    Ok((
        frequencies.table(max_positions, loader.device()),
        max_positions,
    ))
}

impl CausalLm for Llama {
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
            return Tensor::zeros(
                [0, self.spec.vocab_size],
                (&self.spec.device, self.spec.dtype),
            );
        }
        let rows = |x: Tensor<2>| match wanted.dims()[0] == x.dims()[0] {
            true => x,
            false => x.select(0, wanted.clone()), // [num_logits, hidden_size]
        };
        let (hidden, _) = self.norm.forward_residual(rows(hidden), residual.map(rows));
        self.lm_head.forward(hidden) // [num_logits, vocab_size]
    }
}
