//! Results of whole models, as a Markdown table and as JSON.

use std::fmt;

use serde_json::{Map, Value, json};

use super::{Cost, Floor, StepSeconds};
use crate::kernel::ModelCase;

/// What a step does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Takes whole prompts.
    Prefill,
    /// Takes one token of each sequence.
    Decode,
}

impl Kind {
    /// The name in results, and in those of peers.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// One case of one model on one device.
#[derive(Debug, Clone)]
pub struct ModelRow {
    /// What a step does.
    pub kind: Kind,
    /// The model, in the words of the peers' results.
    pub model: String,
    /// The batch.
    pub case: ModelCase,
    /// On what.
    pub device: String,
    /// `engine`, or `model` for steps without one.
    pub by: &'static str,
    /// Where the weights came from: `checkpoint` or `random`.
    pub weights: &'static str,
    /// Dtype of weights, activations and cache.
    pub dtype: String,
    /// Tokens of a block of the cache.
    pub page: usize,
    /// What a step costs.
    pub cost: Cost,
    /// What the device allows.
    pub floor: Floor,
    /// Host microseconds of a step by part, through an engine.
    pub host_us: Option<[f64; 5]>,
    /// The times, or why there are none.
    pub seconds: Result<StepSeconds, String>,
}

impl ModelRow {
    /// The name that filters look at.
    pub fn name(kind: Kind, model: &str, case: ModelCase, by: &str) -> String {
        let ModelCase { batch, tokens } = case;
        let size = match kind {
            Kind::Prefill => format!("{batch}x{tokens}"),
            Kind::Decode => format!("b{batch}c{tokens}"),
        };
        format!("{} {model} {size} {by}", kind.name())
    }

    /// Tokens that a step takes: of the prompts, or one of each sequence.
    fn tokens(&self) -> usize {
        match self.kind {
            Kind::Prefill => self.case.batch * self.case.tokens,
            Kind::Decode => self.case.batch,
        }
    }

    /// The row for other programs; peers use the same keys.
    pub fn to_json(&self) -> Value {
        let length = match self.kind {
            Kind::Prefill => "tokens",
            Kind::Decode => "context",
        };
        let mut row = json!({
            "kind": self.kind.name(),
            "model": self.model,
            "batch": self.case.batch,
            length: self.case.tokens,
            "device": self.device,
            "by": self.by,
            "weights": self.weights,
            "dtype": self.dtype,
            "page": self.page,
            "flops": self.cost.flops,
            "weight_bytes": self.cost.weight_bytes,
            "kv_bytes": self.cost.kv_bytes,
            "floor_ms": self.floor.seconds * 1e3,
            "bound": self.floor.bound.name(),
        });
        let more = match &self.seconds {
            Err(error) => json!({ "error": error }),
            Ok(seconds) => {
                let step = seconds.median();
                let (least, most) = seconds.range();
                json!({
                    "ms": step * 1e3,
                    "ms_min": least * 1e3,
                    "ms_max": most * 1e3,
                    "windows": seconds.windows.len(),
                    "steps": seconds.steps,
                    "tokens_per_s": self.tokens() as f64 / step,
                    "tflops": self.cost.flops / step / 1e12,
                    "gbps": self.cost.bytes() / step / 1e9,
                    "fraction": self.floor.seconds / step,
                    "host_us": self.host_us.map(|parts| {
                        let parts = PARTS.iter().zip(parts);
                        parts.map(|(name, us)| ((*name).to_owned(), json!(us))).collect::<Map<_, _>>()
                    }),
                })
            }
        };
        if let (Value::Object(row), Value::Object(more)) = (&mut row, more) {
            row.extend(more);
        }
        row
    }

    fn table_line(&self) -> String {
        let name = Self::name(self.kind, &self.model, self.case, self.by);
        let (device, dtype) = (&self.device, &self.dtype);
        let seconds = match &self.seconds {
            Ok(seconds) => seconds,
            Err(error) => {
                return format!("| {name} | {device} | {dtype} | not measured: {error} |");
            }
        };
        let step = seconds.median();
        let (least, most) = seconds.range();
        let host = self.host_us.map_or("-".to_owned(), |parts| {
            let parts: Vec<String> = parts.iter().map(|us| format!("{us:.0}")).collect();
            parts.join(" ")
        });
        format!(
            "| {name} | {device} | {dtype} | {:.1} | {:.3} | {:.0}% | {:.3} | {:.2} | {} | {host} |",
            self.tokens() as f64 / step,
            step * 1e3,
            100.0 * (most - least) / step,
            self.floor.seconds * 1e3,
            self.floor.seconds / step,
            self.floor.bound.name(),
        )
    }
}

/// Parts of a step of an engine.
const PARTS: [&str; 5] = ["schedule", "build", "forward", "sample", "update"];

/// All rows of a run, and what it ran on.
#[derive(Debug, Clone, Default)]
pub struct ModelReport {
    /// Facts about the run: bench, date, commit, command, devices.
    pub header: Map<String, Value>,
    /// Lines that say what ran where.
    pub notes: Vec<String>,
    /// The rows.
    pub rows: Vec<ModelRow>,
}

impl ModelReport {
    /// The report for other programs.
    pub fn to_json(&self) -> Value {
        let rows: Vec<Value> = self.rows.iter().map(ModelRow::to_json).collect();
        json!({ "header": self.header, "notes": self.notes, "rows": rows })
    }
}

impl fmt::Display for ModelReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for note in &self.notes {
            writeln!(f, "{note}")?;
        }
        let parts = PARTS.join(" ");
        writeln!(
            f,
            "\n| case | device | dtype | tok/s | ms | spread | floor ms | fraction | bound by | host us: {parts} |"
        )?;
        writeln!(f, "|---|---|---|---|---|---|---|---|---|---|")?;
        for row in &self.rows {
            writeln!(f, "{}", row.table_line())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Bound;

    fn row(kind: Kind, seconds: Result<StepSeconds, String>) -> ModelRow {
        ModelRow {
            kind,
            model: "llama3-8b".into(),
            case: ModelCase {
                batch: 8,
                tokens: 1024,
            },
            device: "cuda".into(),
            by: "engine",
            weights: "random",
            dtype: "bf16".into(),
            page: 16,
            cost: Cost {
                flops: 4e12,
                weight_bytes: 1e9,
                kv_bytes: 1e9,
            },
            floor: Floor {
                seconds: 1e-3,
                bound: Bound::Bytes,
            },
            host_us: Some([1.0, 2.0, 3.0, 4.0, 5.0]),
            seconds,
        }
    }

    #[test]
    fn a_row_has_the_keys_of_the_peers() {
        let seconds = StepSeconds {
            windows: vec![2e-3, 4e-3, 1e-3],
            steps: 32,
        };
        let json = row(Kind::Decode, Ok(seconds.clone())).to_json();
        assert_eq!(json["context"], 1024);
        assert_eq!(json["ms"], 2.0);
        assert_eq!(json["tokens_per_s"], 4000.0);
        assert_eq!(json["fraction"], 0.5);
        assert_eq!(json["gbps"], 1000.0);
        assert_eq!(json["host_us"]["sample"], 4.0);
        let json = row(Kind::Prefill, Ok(seconds)).to_json();
        assert_eq!(json["tokens"], 1024);
        assert_eq!(json["tokens_per_s"], 8.0 * 1024.0 / 2e-3);
    }

    #[test]
    fn a_case_without_times_says_why() {
        let row = row(Kind::Decode, Err("no memory".into()));
        assert_eq!(row.to_json()["error"], "no memory");
        assert!(row.table_line().ends_with("not measured: no memory |"));
    }
}
