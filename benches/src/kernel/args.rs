//! The command line that the benches of kernels share.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};

use super::{Dtype, Effort, Sizes};

/// Which cases are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum ShapeSet {
    /// Those of `shapes.json` on a GPU, small ones on a processor.
    Auto,
    /// Those of `shapes.json`.
    Full,
    /// Small ones.
    Small,
}

/// What a cache may hold beside the dtype of the other tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum KvKind {
    /// Codes of e4m3, with a scale for each key head.
    Fp8,
}

/// Times kernels, beside what the device allows.
#[derive(Debug, Clone, Parser)]
pub struct KernelArgs {
    /// Devices, the first of which the others are compared to: cpu, cuda, rocm, vulkan, metal, wgpu, flex.
    #[arg(long, value_delimiter = ',', default_value = "cpu")]
    pub(super) device: Vec<String>,
    /// Runs only cases whose name has this in it; may be given more than once.
    #[arg(long)]
    pub(super) filter: Vec<String>,
    /// Dtype of all float tensors.
    #[arg(long, value_enum, default_value = "bf16")]
    pub dtype: Dtype,
    /// What the cache of `attention` and `cache` holds, if not the dtype.
    #[arg(long, value_enum)]
    kv: Option<KvKind>,
    /// Tokens of a block of the cache; as in `shapes.json` if not given.
    #[arg(long)]
    pub(super) page: Option<usize>,
    /// Cases.
    #[arg(long, value_enum, default_value = "auto")]
    pub(super) shape: ShapeSet,
    /// Windows per case, of which the median counts.
    #[arg(long)]
    pub(super) samples: Option<usize>,
    /// Few and short windows, and only the last heads and model of `shapes.json`: to see that all works.
    #[arg(long)]
    pub quick: bool,
    /// Times the plans that were not chosen, too, where a bench knows some.
    #[arg(long)]
    pub all_plans: bool,
    /// Does not compare results before they are timed.
    #[arg(long)]
    pub(super) no_check: bool,
    /// Does not record and replay launches where the device could.
    #[arg(long)]
    pub(super) no_graph: bool,
    /// Rate of a large matrix product on the first device, measured by others in the same run.
    #[arg(long)]
    pub(super) matmul_tflops: Option<f64>,
    /// Writes the report as JSON, too.
    #[arg(long)]
    pub(super) json: Option<PathBuf>,
    /// Commit that the bench was built from, for the report.
    #[arg(long, default_value = "")]
    pub(super) commit: String,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

impl KernelArgs {
    /// The command line; ends the process with a message if it is wrong.
    pub fn from_command_line() -> Self {
        Self::parse()
    }

    /// What the cache holds.
    pub fn kv_dtype(&self) -> Dtype {
        match self.kv {
            Some(KvKind::Fp8) => Dtype::E4m3,
            None => self.dtype,
        }
    }

    pub(super) fn effort(&self) -> Effort {
        let (samples, window, budget) = match self.quick {
            true => (3, 0.2e-3, 0.2),
            false => (15, 2e-3, 1.5),
        };
        Effort {
            samples: self.samples.unwrap_or(samples).max(1),
            window,
            budget,
            graphs: !self.no_graph,
        }
    }

    pub(super) fn sizes(&self, on_cpu: bool) -> Sizes {
        match (self.shape, on_cpu) {
            (ShapeSet::Full, _) | (ShapeSet::Auto, false) => Sizes::Full,
            (ShapeSet::Small, _) | (ShapeSet::Auto, true) => Sizes::Small,
        }
    }

    pub(super) fn wants(&self, name: &str) -> bool {
        self.filter.is_empty() || self.filter.iter().any(|part| name.contains(part.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_gets_small_cases_unless_it_is_told_otherwise() {
        let args =
            |line: &[&str]| KernelArgs::try_parse_from([&["bench"][..], line].concat()).unwrap();
        assert_eq!(args(&[]).sizes(true), Sizes::Small);
        assert_eq!(args(&[]).sizes(false), Sizes::Full);
        assert_eq!(args(&["--shape", "full"]).sizes(true), Sizes::Full);
        assert_eq!(args(&["--shape", "small"]).sizes(false), Sizes::Small);
    }

    #[test]
    fn any_of_several_filters_is_enough() {
        let line = ["bench", "--filter", "decode", "--filter", "1x8192"];
        let args = KernelArgs::try_parse_from(line).unwrap();
        assert!(args.wants("decode llama3-8b b1c1024 paged"));
        assert!(args.wants("prefill llama3-8b 1x8192 paged"));
        assert!(!args.wants("prefill llama3-8b 4x4096 paged"));
    }
}
