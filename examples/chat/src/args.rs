//! The command line: flags, their checks, and the text of `--help`.

use std::path::PathBuf;

use burn_paged_engine::KvDType;
use burn_paged_model::ModelDType;
use clap::Parser;

use crate::device::DeviceChoice;

/// Context in tokens where `--context` does not say: some models support 131,072, and a short talk should not reserve
/// gigabytes of cache for it.
pub(crate) const DEFAULT_CONTEXT: usize = 8192;

/// Chat with a local Llama-architecture model.
///
/// With --prompt it answers once and ends; without, it holds a conversation (type /help there).
///
/// The answer is greedy (temperature 0) unless --temperature says otherwise: the same question gives the same answer
/// on every run. Sampling defaults in a model's generation_config.json are not applied; its end tokens are.
///
/// Exit codes: 0 answered, 1 failed while running, 2 wrong flags, model or device.
#[derive(Debug, Parser)]
#[command(name = "chat", version, max_term_width = 100)]
pub(crate) struct Args {
    /// Model: a Hugging Face folder (config.json, safetensors, tokenizer.json) or a GGUF file.
    /// Default: the demo model that `cargo xtask model` puts into the user's cache
    #[arg(long, value_name = "DIR|FILE.gguf")]
    pub(crate) model: Option<PathBuf>,

    /// Answer this and end; standard output is the answer alone
    #[arg(long, value_name = "TEXT", value_parser = non_empty)]
    pub(crate) prompt: Option<String>,

    /// System message of the conversation
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    pub(crate) system: Option<String>,

    /// Most tokens of one answer
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = at_least_one)]
    pub(crate) max_tokens: usize,

    /// Randomness of the choice of tokens; 0 always takes the likeliest
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = temperature)]
    pub(crate) temperature: f32,

    /// Choose among the likeliest tokens that together have this probability [needs --temperature]
    #[arg(long, value_name = "X", value_parser = probability)]
    pub(crate) top_p: Option<f32>,

    /// Choose among the N likeliest tokens; 0 for all [needs --temperature]
    #[arg(long, value_name = "N")]
    pub(crate) top_k: Option<usize>,

    /// Seed of the random choice; default: another one on each run [needs --temperature]
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,

    /// Where to compute; everything but flex must be compiled in (`cargo xtask chat` does that)
    #[arg(long, value_name = DeviceChoice::FORMS, default_value = "flex")]
    pub(crate) device: DeviceChoice,

    /// Type of weights, activations and, unless --kv-dtype says otherwise, cache; auto is f32 on the CPU, elsewhere as the model is stored
    #[arg(long, value_name = "f32|f16|bf16", default_value_t)]
    pub(crate) dtype: ModelDType,

    /// Type of the KV cache; fp8 (e4m3) halves its bytes beside bf16, and loses some accuracy
    #[arg(long, value_name = "auto|fp8", default_value_t)]
    pub(crate) kv_dtype: KvDType,

    /// Most tokens of prompt and answer together; default: what the model supports, at most 8192
    #[arg(long, value_name = "N", value_parser = at_least_two)]
    pub(crate) context: Option<usize>,

    /// Tokens per block of the KV cache
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = block_size)]
    pub(crate) block_size: usize,

    /// Run every step kernel by kernel. Without it, a GPU that can captures the steps of an answer once and replays them
    #[arg(long)]
    pub(crate) no_graphs: bool,

    /// Continue the prompt's text: no chat template
    #[arg(long, requires = "prompt")]
    pub(crate) raw: bool,

    /// Print one JSON object: text, token ids, finish reason, usage and times
    #[arg(long, requires = "prompt")]
    pub(crate) json: bool,
}

impl Args {
    /// Checks that need more than one flag; the message names the flag.
    pub(crate) fn check(&self) -> Result<(), String> {
        let greedy = self.temperature == 0.0;
        let without_effect = [
            ("--top-p", self.top_p.is_some()),
            ("--top-k", self.top_k.is_some()),
            ("--seed", self.seed.is_some()),
        ];
        match without_effect.iter().find(|(_, given)| greedy && *given) {
            Some((flag, _)) => Err(format!("{flag} needs a --temperature above 0")),
            None => Ok(()),
        }
    }
}

fn non_empty(text: &str) -> Result<String, String> {
    if text.is_empty() {
        Err("it is empty".to_owned())
    } else {
        Ok(text.to_owned())
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("it must be at least 1".to_owned()),
        Ok(number) => Ok(number),
        Err(_) => Err("it is not a number of tokens".to_owned()),
    }
}

/// A block is allocated whole, so one alone may be as large as the default cache and no larger.
fn block_size(text: &str) -> Result<usize, String> {
    match at_least_one(text)? {
        number if number > DEFAULT_CONTEXT => Err(format!("it must be at most {DEFAULT_CONTEXT}")),
        number => Ok(number),
    }
}

/// One token of prompt and one of answer.
fn at_least_two(text: &str) -> Result<usize, String> {
    match at_least_one(text)? {
        1 => Err("it must be at least 2".to_owned()),
        number => Ok(number),
    }
}

fn temperature(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err("it must be a finite number, at least 0".to_owned()),
    }
}

fn probability(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(number) if (0.0..=1.0).contains(&number) => Ok(number),
        _ => Err("it must be between 0 and 1".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// First line of what is wrong with the arguments, if anything is.
    fn fault(line: &[&str]) -> Option<String> {
        let args = std::iter::once("chat").chain(line.iter().copied());
        match Args::try_parse_from(args) {
            Ok(args) => args.check().err(),
            Err(error) => error.to_string().lines().next().map(str::to_owned),
        }
    }

    #[test]
    fn the_definition_is_consistent() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }

    #[test]
    fn good_arguments_pass() {
        assert_eq!(fault(&[]), None);
        assert_eq!(
            fault(&["--prompt", "hi", "--raw", "--json", "--device", "cuda:1"]),
            None
        );
        assert_eq!(
            fault(&[
                "--temperature",
                "0.7",
                "--top-p",
                "0.9",
                "--top-k",
                "0",
                "--seed",
                "7"
            ]),
            None
        );
        assert_eq!(
            fault(&["--dtype", "bf16", "--block-size", "1", "--max-tokens", "1"]),
            None
        );
        assert_eq!(fault(&["--kv-dtype", "fp8"]), None);
    }

    #[test]
    fn every_fault_names_its_flag_in_one_line() {
        for (line, flag) in [
            (&["--temperature", "NaN"][..], "--temperature"),
            (&["--temperature", "inf"], "--temperature"),
            (&["--temperature=-1"], "--temperature"),
            (&["--top-p", "1.5"], "--top-p"),
            (&["--top-p", "nan"], "--top-p"),
            (&["--max-tokens", "0"], "--max-tokens"),
            (&["--block-size", "0"], "--block-size"),
            (&["--block-size", "8193"], "--block-size"),
            (&["--context", "0"], "--context"),
            (&["--context", "1"], "--context"),
            (&["--prompt", ""], "--prompt"),
            (&["--dtype", "f64"], "--dtype"),
            (&["--kv-dtype", "fp4"], "--kv-dtype"),
            (&["--device", "tpu"], "--device"),
            (&["--device", "flex:1"], "--device"),
            (&["--top-k", "4"], "--top-k"),
            (&["--seed", "1", "--temperature", "0"], "--seed"),
        ] {
            let fault = fault(line).unwrap_or_else(|| panic!("{line:?} passed"));
            assert!(fault.contains(flag), "{line:?}: {fault}");
        }
    }
}
