//! Rows of results, as a Markdown table and as JSON.

use std::fmt;

use serde_json::{Value, json};

/// One measured case.
#[derive(Debug, Clone)]
pub struct Row {
    /// Name of the case, as in `benches/README.md`.
    pub case: String,
    /// Who ran it: a device, or another engine.
    pub by: String,
    /// What was reached.
    pub rate: f64,
    /// Unit of `rate`.
    pub unit: &'static str,
    /// The rate that the device's own ceiling allows, in the same unit.
    pub floor_rate: f64,
    /// Which ceiling that is.
    pub bound: &'static str,
}

impl Row {
    /// Part of the ceiling that was reached.
    pub fn fraction(&self) -> f64 {
        self.rate / self.floor_rate
    }
}

/// All rows of a run.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Lines that say what ran where.
    pub notes: Vec<String>,
    /// The rows.
    pub rows: Vec<Row>,
}

impl Report {
    /// The report for other programs.
    pub fn to_json(&self) -> Value {
        let rows = self.rows.iter().map(|row| {
            json!({
                "case": row.case,
                "by": row.by,
                "rate": row.rate,
                "unit": row.unit,
                "ceiling": row.floor_rate,
                "bound": row.bound,
                "fraction": row.fraction(),
            })
        });
        json!({ "notes": self.notes, "rows": rows.collect::<Vec<_>>() })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for note in &self.notes {
            writeln!(f, "{note}")?;
        }
        writeln!(
            f,
            "\n| case | by | rate | ceiling allows | fraction | bound by |"
        )?;
        writeln!(f, "|---|---|---|---|---|---|")?;
        for row in &self.rows {
            writeln!(
                f,
                "| {} | {} | {:.1} {} | {:.1} | {:.2} | {} |",
                row.case,
                row.by,
                row.rate,
                row.unit,
                row.floor_rate,
                row.fraction(),
                row.bound
            )?;
        }
        Ok(())
    }
}

/// The middle value, the mean of the two middle ones for an even count; NaN for none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        len if len.is_multiple_of(2) => (sorted[middle - 1] + sorted[middle]) / 2.0,
        _ => sorted[middle],
    }
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }
}
