//! Cosines and sines of the rotary embedding.

use burn::tensor::{DType, Device, Tensor, TensorData};

/// `cos` and `sin` of every position, `[max_positions, rotary_dim]` f32: the first half of a row holds the cosines,
/// the second the sines, of `position * inv_freq[i]` times the attention factor.
#[derive(Debug, Clone)]
pub struct RotaryTable {
    table: Tensor<2>,
}

impl RotaryTable {
    /// Computes the table in f64 and rounds it once.
    ///
    /// # Shapes
    /// - `inv_freq`: `rotary_dim / 2` inverse frequencies in radians per position
    ///
    /// # Panics
    /// If `inv_freq` is empty or `max_positions` is 0.
    pub fn new(
        inv_freq: &[f64],
        attention_factor: f64,
        max_positions: usize,
        device: &Device,
    ) -> Self {
        assert!(
            !inv_freq.is_empty(),
            "a rotary table needs at least one frequency"
        );
        assert!(
            max_positions > 0,
            "a rotary table needs at least one position"
        );
        let half = inv_freq.len();
        let mut values = Vec::with_capacity(max_positions * 2 * half);
        for position in 0..max_positions {
            let angles = || inv_freq.iter().map(|freq| position as f64 * freq);
            values.extend(angles().map(|angle| (angle.cos() * attention_factor) as f32));
            values.extend(angles().map(|angle| (angle.sin() * attention_factor) as f32));
        }
        let data = TensorData::new(values, [max_positions, 2 * half]);
        Self {
            table: Tensor::from_data(data, (device, DType::F32)),
        }
    }

    /// The values, `[max_positions, rotary_dim]` f32.
    pub fn tensor(&self) -> &Tensor<2> {
        &self.table
    }

    /// Number of positions.
    pub fn max_positions(&self) -> usize {
        self.table.dims()[0]
    }

    /// Leading elements of a head that are rotated; even.
    pub fn rotary_dim(&self) -> usize {
        self.table.dims()[1]
    }
}
