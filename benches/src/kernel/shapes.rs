//! The cases, from `benches/shapes.json`, and what each costs at least.

use serde::Deserialize;

use super::Dtype;

/// The file of shapes, which peers read as well.
const SHAPES: &str = include_str!("../../shapes.json");

/// Heads of attention.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Heads {
    /// The model that has them.
    pub name: String,
    /// Query heads.
    pub q_heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

/// Lengths of the sequences of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttentionCase {
    /// prefill, prefix, mixed or decode.
    pub kind: &'static str,
    /// The name in results.
    pub name: String,
    /// New tokens of each sequence.
    pub q_lens: Vec<usize>,
    /// All tokens of each sequence, the new ones included.
    pub kv_lens: Vec<usize>,
}

/// Token counts of cache traffic.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct CacheShapes {
    /// Tokens written by a launch.
    pub store_tokens: Vec<usize>,
    /// Tokens read by a launch.
    pub gather_tokens: Vec<usize>,
    /// Tokens of the whole cache.
    pub pool_tokens: usize,
}

/// Sizes of a decoder.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Model {
    /// The model that has them.
    pub name: String,
    /// Elements of a hidden state.
    pub hidden: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Query heads.
    pub q_heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements between the two products of the feed-forward part.
    pub ffn: usize,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Whether the output layer is the embedding.
    pub tied: bool,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Added to the mean of squares.
    pub norm_eps: f32,
}

impl Model {
    /// The sizes as a `config.json` of a Llama model, of which they are all that a step's time depends on.
    #[cfg(feature = "llama")]
    pub fn config(&self) -> serde_json::Value {
        serde_json::json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.q_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": 8192,
            "rms_norm_eps": f64::from(self.norm_eps),
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tied,
        })
    }
}

/// A batch of equal sequences for a whole model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelCase {
    /// Sequences.
    pub batch: usize,
    /// Tokens of each: all new in a prefill; in a decode, all that are attended to.
    pub tokens: usize,
}

/// Whether cases are as large as a GPU takes them, or as small as a processor does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sizes {
    /// As in `shapes.json`.
    Full,
    /// Hundreds of tokens.
    Small,
}

/// All cases of one size.
#[derive(Debug, Clone, PartialEq)]
pub struct Shapes {
    /// Tokens of a block of the cache.
    pub page_size: usize,
    /// Cases with more bytes of K and V than this are left out.
    pub max_kv_bytes: usize,
    /// Heads, each of which runs every case.
    pub heads: Vec<Heads>,
    /// Batches for attention.
    pub attention: Vec<AttentionCase>,
    /// Traffic of the cache.
    pub cache: CacheShapes,
    /// Models whose layers are timed, and which are timed as a whole.
    pub models: Vec<Model>,
    /// Batches of prompts for a whole model.
    pub model_prefill: Vec<ModelCase>,
    /// Batches of decodes for a whole model.
    pub model_decode: Vec<ModelCase>,
    /// Rows of a layer's activations.
    pub layer_rows: Vec<usize>,
    /// Rows of products with weights.
    pub linear_rows: Vec<usize>,
    /// Rows, columns and depth of a product of squares.
    pub square: usize,
}

#[derive(Deserialize)]
struct File {
    page_size: usize,
    max_kv_bytes: usize,
    heads: Vec<Heads>,
    prefill: Vec<Lens>,
    prefix: Vec<Lens>,
    mixed: Vec<Lens>,
    decode: Vec<Decode>,
    cache: CacheShapes,
    llama: Llama,
}

#[derive(Deserialize)]
struct Lens {
    name: String,
    q_lens: Vec<usize>,
    kv_lens: Vec<usize>,
}

#[derive(Deserialize)]
struct Decode {
    name: String,
    batch: usize,
    context: usize,
}

#[derive(Deserialize)]
struct Llama {
    models: Vec<Model>,
    prefill: Vec<LlamaPrefill>,
    decode: Vec<LlamaDecode>,
}

#[derive(Deserialize)]
struct LlamaPrefill {
    batch: usize,
    tokens: usize,
}

#[derive(Deserialize)]
struct LlamaDecode {
    batch: usize,
    context: usize,
}

impl Shapes {
    /// The cases of the given size.
    ///
    /// # Errors
    /// If the embedded file is not what it should be.
    pub fn new(sizes: Sizes) -> Result<Self, String> {
        let file: File =
            serde_json::from_str(SHAPES).map_err(|error| format!("shapes.json: {error}"))?;
        let lens = |kind, lens: Vec<Lens>| {
            lens.into_iter().map(move |lens| AttentionCase {
                kind,
                name: lens.name,
                q_lens: lens.q_lens,
                kv_lens: lens.kv_lens,
            })
        };
        let decode = file
            .decode
            .into_iter()
            .map(|decode| AttentionCase::decode(decode.name, decode.batch, decode.context));
        let mut shapes = Self {
            page_size: file.page_size,
            max_kv_bytes: file.max_kv_bytes,
            heads: file.heads,
            attention: lens("prefill", file.prefill)
                .chain(lens("prefix", file.prefix))
                .chain(lens("mixed", file.mixed))
                .chain(decode)
                .collect(),
            cache: file.cache,
            models: file.llama.models,
            layer_rows: vec![1, 32, 256, 2048, 8192, 16384],
            linear_rows: vec![1, 8, 32, 64, 128, 256, 512, 2048, 8192],
            square: 8192,
            model_prefill: file
                .llama
                .prefill
                .iter()
                .map(|case| ModelCase {
                    batch: case.batch,
                    tokens: case.tokens,
                })
                .collect(),
            model_decode: file
                .llama
                .decode
                .iter()
                .map(|case| ModelCase {
                    batch: case.batch,
                    tokens: case.context,
                })
                .collect(),
        };
        if sizes == Sizes::Small {
            shapes.attention = small_attention();
            shapes.cache = CacheShapes {
                store_tokens: vec![1, 32, 256],
                gather_tokens: vec![256, 2048],
                pool_tokens: 8192,
            };
            shapes.layer_rows = vec![1, 32, 256];
            shapes.linear_rows = vec![1, 8];
            shapes.square = 128;
            let cases = |cases: &[(usize, usize)]| {
                let cases = cases.iter();
                cases
                    .map(|&(batch, tokens)| ModelCase { batch, tokens })
                    .collect()
            };
            shapes.model_prefill = cases(&[(1, 128), (8, 128), (1, 1024)]);
            shapes.model_decode = cases(&[(1, 128), (8, 128), (1, 1024)]);
        }
        Ok(shapes)
    }
}

/// Batches that a processor attends over in about a second.
fn small_attention() -> Vec<AttentionCase> {
    let case = |kind, name: &str, q_lens: &[usize], kv_lens: &[usize]| AttentionCase {
        kind,
        name: name.to_owned(),
        q_lens: q_lens.to_vec(),
        kv_lens: kv_lens.to_vec(),
    };
    vec![
        case("prefill", "1x128", &[128], &[128]),
        case(
            "prefill",
            "mixed200",
            &[97, 61, 31, 8, 3],
            &[97, 61, 31, 8, 3],
        ),
        case("prefix", "1x32+512", &[32], &[544]),
        case("mixed", "2x1+511,1x32+512", &[1, 1, 32], &[512, 512, 544]),
        AttentionCase::decode("b1c1024".to_owned(), 1, 1024),
        AttentionCase::decode("b8c512".to_owned(), 8, 512),
    ]
}

impl AttentionCase {
    fn decode(name: String, batch: usize, context: usize) -> Self {
        Self {
            kind: "decode",
            name,
            q_lens: vec![1; batch],
            kv_lens: vec![context; batch],
        }
    }

    /// New tokens of the batch.
    pub fn num_tokens(&self) -> usize {
        self.q_lens.iter().sum()
    }

    /// All tokens of the batch.
    pub fn num_keys(&self) -> usize {
        self.kv_lens.iter().sum()
    }

    /// Operations: two products over every visible pair of a query and a key.
    pub fn flops(&self, heads: &Heads) -> f64 {
        let pairs =
            |(&q, &kv): (&usize, &usize)| (q * kv) as f64 - (q * q.saturating_sub(1) / 2) as f64;
        let pairs: f64 = self.q_lens.iter().zip(&self.kv_lens).map(pairs).sum();
        4.0 * (heads.head_dim * heads.q_heads) as f64 * pairs
    }

    /// Bytes of K and V.
    pub fn kv_bytes(&self, heads: &Heads, dtype: Dtype) -> usize {
        2 * dtype.size() * heads.kv_heads * heads.head_dim * self.num_keys()
    }

    /// Bytes: each input read once, the output written once; keys and values of `kv_dtype`.
    pub fn bytes(&self, heads: &Heads, dtype: Dtype, kv_dtype: Dtype) -> f64 {
        let rows = 2 * dtype.size() * self.num_tokens() * heads.q_heads * heads.head_dim;
        (rows + self.kv_bytes(heads, kv_dtype)) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_has_the_cases_that_peers_run() {
        let shapes = Shapes::new(Sizes::Full).unwrap();
        let count = |kind| {
            shapes
                .attention
                .iter()
                .filter(|case| case.kind == kind)
                .count()
        };
        let kinds = ["prefill", "prefix", "mixed", "decode"];
        // Two prompts of the models' steps and the calls of mixed kinds are ours alone.
        assert_eq!(kinds.map(count), [2 + 4, 3, 3, 12]);
        assert_eq!(shapes.heads.len(), 3);
        assert_eq!((shapes.page_size, shapes.models[0].ffn), (16, 14336));
        assert_eq!(
            (shapes.model_prefill.len(), shapes.model_decode.len()),
            (2, 4)
        );
        for sizes in [Sizes::Full, Sizes::Small] {
            for case in Shapes::new(sizes).unwrap().attention {
                assert_eq!(case.q_lens.len(), case.kv_lens.len(), "{}", case.name);
                assert!(case.q_lens.iter().zip(&case.kv_lens).all(|(q, kv)| q <= kv));
            }
        }
    }

    /// Figures that the peers' scripts print for these cases.
    #[test]
    fn costs_count_each_input_once_and_visible_pairs_only() {
        let heads = Heads {
            name: "gqa".into(),
            q_heads: 6,
            kv_heads: 2,
            head_dim: 8,
        };
        let case = AttentionCase {
            kind: "prefix",
            name: "2".into(),
            q_lens: vec![3, 1],
            kv_lens: vec![5, 4],
        };
        // Rows see 3, 4 and 5 keys, and 4.
        assert_eq!(case.flops(&heads), 4.0 * 8.0 * 6.0 * 16.0);
        // 4 rows in and out, 9 keys and values.
        let bytes = 2.0 * (2.0 * 4.0 * 48.0 + 2.0 * 9.0 * 16.0);
        assert_eq!(case.bytes(&heads, Dtype::Bf16, Dtype::Bf16), bytes);
        assert_eq!(case.bytes(&heads, Dtype::F32, Dtype::F32), 2.0 * bytes);
        let eight = 2.0 * (2.0 * 4.0 * 48.0 + 9.0 * 16.0);
        assert_eq!(case.bytes(&heads, Dtype::Bf16, Dtype::E4m3), eight);
    }
}
