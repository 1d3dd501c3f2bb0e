//! Results of kernels, as a Markdown table and as JSON.

use std::fmt;

use serde_json::{Map, Value, json};

use super::Times;

/// What a case is called, in the words of the peers' results.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaseName {
    /// Group of cases: prefill, prefix, mixed, decode, store, gather, layer.
    pub kind: &'static str,
    /// The model whose heads or sizes are used.
    pub head: String,
    /// The case in its group.
    pub case: String,
    /// The function that is timed.
    pub op: &'static str,
    /// Where keys lie: paged or packed; empty where that is no question.
    pub layout: &'static str,
    /// Tokens or rows, where the case is one number.
    pub tokens: Option<usize>,
}

impl fmt::Display for CaseName {
    /// The name that filters look at.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kind,
            head,
            case,
            op,
            layout,
            ..
        } = self;
        write!(f, "{kind} {head} {case} {op}")?;
        match layout.is_empty() {
            true => Ok(()),
            false => write!(f, " {layout}"),
        }
    }
}

/// Which ceiling a case is compared to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound {
    /// The rate of a large matrix product.
    Operations,
    /// The bandwidth of a copy.
    Bytes,
}

impl Bound {
    /// The name in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Operations => "operations",
            Self::Bytes => "bytes",
        }
    }
}

/// One case on one device.
#[derive(Debug, Clone)]
pub struct KernelRow {
    /// What was run.
    pub name: CaseName,
    /// On what.
    pub device: String,
    /// The kernel that was chosen.
    pub path: String,
    /// Dtype of the float tensors.
    pub dtype: &'static str,
    /// Tokens of a block of the cache.
    pub page: usize,
    /// Sets of inputs that took turns.
    pub sets: usize,
    /// Operations of one launch.
    pub flops: f64,
    /// Bytes of one launch, each input read once and each output written once.
    pub bytes: f64,
    /// The ceiling that counts.
    pub bound: Bound,
    /// Relative error on sampled rows; `None` if it was not asked for.
    pub error: Option<f64>,
    /// Relative error of the same rows against what a cache of eight bits was filled from.
    pub quantisation_error: Option<f64>,
    /// Part of the ceiling that was reached, where the ceiling is known.
    pub fraction: Option<f64>,
    /// Speed relative to the first device: above 1 is faster. `None` on the first, and where it ran no such case.
    pub ratio: Option<f64>,
    /// The times, or why there are none.
    pub times: Result<Times, String>,
}

impl KernelRow {
    fn rate(&self, work: f64) -> Option<f64> {
        let times = self.times.as_ref().ok()?;
        Some(work / (times.us * 1e-6))
    }

    /// Operations per second.
    pub fn flops_per_second(&self) -> Option<f64> {
        self.rate(self.flops)
    }

    /// Bytes per second.
    pub fn bytes_per_second(&self) -> Option<f64> {
        self.rate(self.bytes)
    }

    /// The row for other programs; peers use the same keys.
    pub fn to_json(&self) -> Value {
        let mut row = json!({
            "kind": self.name.kind,
            "head": self.name.head,
            "case": self.name.case,
            "op": self.name.op,
            "layout": self.name.layout,
            "tokens": self.name.tokens,
            "page": self.page,
            "dtype": self.dtype,
            "device": self.device,
            "path": self.path,
            "sets": self.sets,
            "flops": self.flops,
            "bytes": self.bytes,
            "bound": self.bound.name(),
            "err": self.error,
            "quantisation_err": self.quantisation_error,
            "tflops": self.flops_per_second().map(|rate| rate / 1e12),
            "gbps": self.bytes_per_second().map(|rate| rate / 1e9),
            "fraction": self.fraction,
            "ratio_to_first": self.ratio,
        });
        let more = match &self.times {
            Ok(times) => times.to_json(),
            Err(error) => json!({ "error": error }),
        };
        if let (Value::Object(row), Value::Object(more)) = (&mut row, more) {
            row.extend(more);
        }
        row
    }
}

/// All rows of a run, and what it ran on.
#[derive(Debug, Clone, Default)]
pub struct KernelReport {
    /// Facts about the run: bench, date, commit, command, devices.
    pub header: Map<String, Value>,
    /// Lines that say what ran where.
    pub notes: Vec<String>,
    /// The rows.
    pub rows: Vec<KernelRow>,
}

impl KernelReport {
    /// The report for other programs.
    pub fn to_json(&self) -> Value {
        let rows: Vec<Value> = self.rows.iter().map(KernelRow::to_json).collect();
        json!({ "header": self.header, "notes": self.notes, "rows": rows })
    }
}

impl fmt::Display for KernelReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for note in &self.notes {
            writeln!(f, "{note}")?;
        }
        writeln!(
            f,
            "\n| case | device | path | us | spread | queued us | host us | caller us | rate | fraction | error | to first |"
        )?;
        writeln!(f, "|---|---|---|---|---|---|---|---|---|---|---|---|")?;
        for row in &self.rows {
            writeln!(f, "{}", table_row(row))?;
        }
        let host_bound = |row: &&KernelRow| row.times.as_ref().is_ok_and(Times::is_host_bound);
        let count = self.rows.iter().filter(host_bound).count();
        if count > 0 {
            writeln!(
                f,
                "\n(h) {count} rows are as slow as the host queues launches; the device may need less."
            )?;
        }
        Ok(())
    }
}

fn table_row(row: &KernelRow) -> String {
    let (name, device, path) = (&row.name, &row.device, &row.path);
    let times = match &row.times {
        Ok(times) => times,
        Err(error) => return format!("| {name} | {device} | {path} | not measured: {error} |"),
    };
    let rate = match row.bound {
        Bound::Operations => format!(
            "{:.4} TFLOP/s",
            row.flops_per_second().unwrap_or(0.0) / 1e12
        ),
        Bound::Bytes => format!("{:.1} GB/s", row.bytes_per_second().unwrap_or(0.0) / 1e9),
    };
    let optional = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2}"));
    let mut error = row
        .error
        .map_or("-".to_owned(), |error| format!("{error:.0e}"));
    if let Some(quantisation) = row.quantisation_error {
        error += &format!(" (of eight bits {quantisation:.1e})");
    }
    let mark = if times.is_host_bound() { " (h)" } else { "" };
    format!(
        "| {name} | {device} | {path} | {:.1}{mark} | {:.0}% | {:.1} | {:.1} | {} | {rate} | {} | {error} | {} |",
        times.us,
        100.0 * times.spread(),
        times.us_queued,
        times.us_host,
        times
            .us_caller
            .map_or("-".to_owned(), |us| format!("{us:.1}")),
        optional(row.fraction),
        optional(row.ratio),
    )
}
