//! Loads a tiny Qwen3 with arbitrary weights and lets the engine run three requests over it.
//!
//! Run with
//!
//! ```text
//! cargo run --package burn-paged-example-add-a-model
//! ```

#![allow(
    clippy::print_stdout,
    reason = "what it prints is what the example is for"
)]

use burn::tensor::Device;
use burn_paged_checkpoint::Checkpoint;
use burn_paged_engine::{CacheSize, Engine, EngineConfig, Request, SamplingParams};
use burn_paged_example_add_a_model::{FAMILY, tiny};
use burn_paged_model::{LoadOptions, load_model};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    tiny::write(folder.path())?;

    // A program has one list of families. The checkpoint's architecture picks from it.
    let checkpoint = Checkpoint::open(folder.path())?;
    let model = load_model(&[FAMILY], &checkpoint, &LoadOptions::new(Device::default()))?;
    println!(
        "loaded {} with {} layers",
        model.spec().architecture,
        model.spec().num_layers
    );

    let config = EngineConfig {
        block_size: 4,
        cache_size: CacheSize::Tokens(512),
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(model, config)?;

    // Everything behind `Engine` came for nothing: batching, prefix caching, sampling, stop conditions.
    let prompt = [3, 14, 15, 9, 2, 6, 5, 35, 8];
    let sampling = SamplingParams {
        temperature: 0.8,
        seed: Some(7),
        ..Default::default()
    };
    let requests = [
        Request::new(prompt).with_max_tokens(8),
        Request::new([1, 2]).with_max_tokens(8),
        Request::new(prompt)
            .with_max_tokens(8)
            .with_sampling(sampling),
    ];
    for completion in engine.generate(requests.clone())? {
        println!(
            "request {}: {:?}",
            completion.request_id, completion.token_ids
        );
    }

    // The same prompt again finds its full blocks in the cache, and says the same.
    let [first, ..] = requests;
    for completion in engine.generate([first])? {
        let usage = completion.usage;
        println!(
            "request {}: {:?}, {} of {} prompt tokens cached",
            completion.request_id, completion.token_ids, usage.cached_tokens, usage.prompt_tokens
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_runs() {
        super::main().unwrap();
    }
}
