//! The row kernels of a decoder layer: norms, rotary embedding with store, gated activation.
//!
//! Run with: cargo bench -p burn-paged-benches --no-default-features --features cuda-hopper --bench layer --
//! --device cuda [--json OUT.json]; see benches/README.md.

use burn_paged_benches::kernel::{
    Bound, CaseName, CubeDevice, Dtype, Filled, Model, Session, Target, Values, Work, ints,
    relative_error, shuffled,
};
use burn_paged_kernels::{
    KernelError, Launcher, RotaryTable, TensorRef, add_rms_norm, rms_norm, rotary_and_store,
    silu_and_mul,
};

/// Sets of inputs, at most.
const MAX_SETS: usize = 64;

fn main() -> Result<(), String> {
    Session::run("layer", |session, target, shapes| {
        for op in Op::ALL {
            for model in &shapes.models {
                for &rows in &shapes.layer_rows {
                    let page = shapes.page_size;
                    run(session, target, op, model, rows, page);
                }
            }
        }
        Ok(())
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Op {
    RmsNorm,
    AddRmsNorm,
    RotaryAndStore,
    SiluAndMul,
}

impl Op {
    const ALL: [Self; 4] = [
        Self::RmsNorm,
        Self::AddRmsNorm,
        Self::RotaryAndStore,
        Self::SiluAndMul,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::RmsNorm => "rms_norm",
            Self::AddRmsNorm => "add_rms_norm",
            Self::RotaryAndStore => "rotary_and_store",
            Self::SiluAndMul => "silu_and_mul",
        }
    }
}

fn run(session: &mut Session, target: &Target, op: Op, model: &Model, rows: usize, page: usize) {
    let name = CaseName {
        kind: "layer",
        head: model.name.clone(),
        case: format!("rows={rows}"),
        op: op.name(),
        layout: "",
        tokens: Some(rows),
    };
    let layer = Layer {
        op,
        model: model.clone(),
        rows,
        page,
        dtype: session.args().dtype,
    };
    session.case(target, name, |session| match target {
        Target::Cube(device) => {
            let sets = session.sets(target, layer.bytes(), MAX_SETS);
            Ok(match op {
                Op::RotaryAndStore => rotary(device, layer, sets),
                _ => row_op(device, layer, sets),
            })
        }
        #[cfg(feature = "flex")]
        Target::Flex(device) => match op {
            Op::RotaryAndStore => flex::rotary(device, layer),
            _ => Ok(flex::row_op(device, layer)),
        },
    });
}

/// An op on the rows of a model's layer.
struct Layer {
    op: Op,
    model: Model,
    rows: usize,
    page: usize,
    dtype: Dtype,
}

impl Layer {
    /// Columns of the inputs and of the outputs of ops on rows.
    fn columns(&self) -> (usize, usize) {
        match self.op {
            Op::SiluAndMul => (2 * self.model.ffn, self.model.ffn),
            _ => (self.model.hidden, self.model.hidden),
        }
    }

    /// Bytes that a launch must read and write.
    fn bytes(&self) -> f64 {
        let Model {
            hidden,
            q_heads,
            kv_heads,
            head_dim,
            ffn,
            ..
        } = self.model;
        let elements = match self.op {
            Op::RmsNorm => 2 * self.rows * hidden + hidden,
            Op::AddRmsNorm => 4 * self.rows * hidden + hidden,
            Op::SiluAndMul => 3 * self.rows * ffn,
            Op::RotaryAndStore => 2 * self.rows * (q_heads + 2 * kv_heads) * head_dim,
        };
        // A row of angles, a position and a slot for each token.
        let indices = match self.op {
            Op::RotaryAndStore => 4 * self.rows * (head_dim + 2),
            _ => 0,
        };
        (elements * self.dtype.size() + indices) as f64
    }

    /// The first, a middle and the last row.
    fn samples(&self) -> Vec<usize> {
        let mut samples = vec![0, self.rows / 2, self.rows - 1];
        samples.dedup();
        samples
    }

    /// The result of ops on rows, in f64: one row of each output.
    fn row_in_f64(&self, x: &[f64], residual: &[f64], weight: &[f64]) -> Vec<Vec<f64>> {
        let normalized = |x: &[f64]| -> Vec<f64> {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
            let factor = 1.0 / (mean + f64::from(self.model.norm_eps)).sqrt();
            x.iter().zip(weight).map(|(x, w)| x * factor * w).collect()
        };
        match self.op {
            Op::RmsNorm => vec![normalized(x)],
            Op::AddRmsNorm => {
                let sum: Vec<f64> = x.iter().zip(residual).map(|(a, b)| a + b).collect();
                vec![normalized(&sum), sum]
            }
            Op::SiluAndMul => {
                let (gate, up) = x.split_at(x.len() / 2);
                let out = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u);
                vec![out.collect()]
            }
            Op::RotaryAndStore => Vec::new(),
        }
    }

    /// The worst relative error of the sampled rows of ops on rows; `read` reads elements of an output.
    fn row_error(
        &self,
        [x, residual, weight]: [Values; 3],
        read: &dyn Fn(usize, usize, usize) -> Result<Vec<f64>, String>,
    ) -> Result<f64, String> {
        let (columns, out_columns) = self.columns();
        let mut error = 0.0;
        for row in self.samples() {
            let input = |values: Values| values.range(row * columns, columns);
            let weight = weight.range(0, columns);
            let outputs = self.row_in_f64(&input(x), &input(residual), &weight);
            for (output, expected) in outputs.iter().enumerate() {
                let found = read(output, row * out_columns, out_columns)?;
                error = worse(relative_error(&found, expected), error);
            }
        }
        Ok(error)
    }

    /// Positions of angles, cosines first, then sines, as models store them.
    fn angles(&self) -> Vec<f32> {
        let half = self.model.head_dim / 2;
        let mut angles = Vec::with_capacity(self.rows * 2 * half);
        for position in 0..self.rows {
            let angle = |i: usize| {
                let exponent = 2.0 * i as f64 / self.model.head_dim as f64;
                position as f64 / self.model.rope_theta.powf(exponent)
            };
            angles.extend((0..half).map(|i| angle(i).cos() as f32));
            angles.extend((0..half).map(|i| angle(i).sin() as f32));
        }
        angles
    }

    fn num_blocks(&self) -> usize {
        self.rows.div_ceil(self.page)
    }

    fn cache_shape(&self) -> [usize; 4] {
        let Model {
            kv_heads, head_dim, ..
        } = self.model;
        [self.num_blocks(), self.page, kv_heads, head_dim]
    }

    fn slots(&self, set: usize) -> Vec<i32> {
        let mut slots = shuffled(self.num_blocks() * self.page, set);
        slots.truncate(self.rows);
        slots
    }

    /// `heads` heads of a token rotated by its position.
    fn rotated(&self, x: &[f64], row: usize, angles: &[f32]) -> Vec<f64> {
        let (dim, half) = (self.model.head_dim, self.model.head_dim / 2);
        let angles = &angles[row * dim..][..dim];
        let mut out = Vec::with_capacity(x.len());
        for head in x.chunks_exact(dim) {
            for i in 0..dim {
                let (cos, sin) = (
                    f64::from(angles[i % half]),
                    f64::from(angles[half + i % half]),
                );
                out.push(match i < half {
                    true => head[i] * cos - head[i + half] * sin,
                    false => head[i] * cos + head[i - half] * sin,
                });
            }
        }
        out
    }

    /// The worst relative error of the sampled tokens of `rotary_and_store`; `read` reads elements of the queries, of
    /// the cached keys and of the cached values.
    fn rotary_error(
        &self,
        [q, k, v]: [Values; 3],
        angles: &[f32],
        slots: &[i32],
        read: &dyn Fn(usize, usize, usize) -> Result<Vec<f64>, String>,
    ) -> Result<f64, String> {
        let q_row = self.model.q_heads * self.model.head_dim;
        let kv_row = self.model.kv_heads * self.model.head_dim;
        let mut error = 0.0;
        for row in self.samples() {
            let slot = slots[row] as usize;
            let q = self.rotated(&q.range(row * q_row, q_row), row, angles);
            let k = self.rotated(&k.range(row * kv_row, kv_row), row, angles);
            let v = v.range(row * kv_row, kv_row);
            for (output, at, expected) in [(0, row, q), (1, slot, k), (2, slot, v)] {
                let len = expected.len();
                let found = read(output, at * len, len)?;
                error = worse(relative_error(&found, &expected), error);
            }
        }
        Ok(error)
    }
}

/// The larger of two errors; NaN if one is.
fn worse(a: f64, b: f64) -> f64 {
    if a > b || a.is_nan() { a } else { b }
}

/// Rows that take turns with others.
struct Rows {
    x: Filled,
    residual: Filled,
    weight: Filled,
}

fn row_op(device: &CubeDevice, layer: Layer, sets: usize) -> Work<'_> {
    let dtype = layer.dtype;
    let (columns, out_columns) = layer.columns();
    let inputs: Vec<Rows> = (0..sets)
        .map(|set| {
            let rows = |seed| device.filled(&[layer.rows, columns], dtype, 3 * set + seed);
            let x = rows(0);
            Rows {
                residual: match layer.op {
                    Op::AddRmsNorm => rows(1),
                    _ => x.clone(),
                },
                x,
                weight: device.filled(&[columns], dtype, 3 * set + 2),
            }
        })
        .collect();
    let values = [&inputs[0].x, &inputs[0].residual, &inputs[0].weight].map(|part| part.values);
    let shape = [layer.rows, out_columns];
    let outs = match layer.op {
        Op::AddRmsNorm => vec![
            device.poisoned(&shape, dtype),
            device.poisoned(&shape, dtype),
        ],
        _ => vec![device.poisoned(&shape, dtype)],
    };
    let (op, epsilon, bytes) = (layer.op, layer.model.norm_eps, layer.bytes());
    let to = outs.clone();
    Work {
        quantisation: None,
        path: "Portable".into(),
        flops: 0.0,
        bytes,
        bound: Bound::Bytes,
        sets,
        outputs: outs.clone(),
        launch: Box::new(move |set| {
            let launched = launch(device.launcher(), op, &inputs[set], epsilon, &to);
            launched.map_err(|error| error.to_string())
        }),
        check: Box::new(move || {
            let read = |output: usize, from, len| device.read(&outs[output], dtype, from, len);
            layer.row_error(values, &read)
        }),
    }
}

fn launch(
    launcher: &Launcher,
    op: Op,
    inputs: &Rows,
    epsilon: f32,
    outs: &[TensorRef],
) -> Result<(), KernelError> {
    let (x, weight) = (&inputs.x.tensor, &inputs.weight.tensor);
    match op {
        Op::SiluAndMul => silu_and_mul(launcher, x, &outs[0]),
        Op::AddRmsNorm => {
            let residual = &inputs.residual.tensor;
            add_rms_norm(launcher, x, residual, weight, epsilon, &outs[1], &outs[0])
        }
        Op::RmsNorm | Op::RotaryAndStore => rms_norm(launcher, x, weight, epsilon, &outs[0]),
    }
}

/// Queries, keys and values of new tokens, and where the latter go.
struct Tokens {
    q: Filled,
    k: Filled,
    v: Filled,
    slots: TensorRef,
}

fn rotary(device: &CubeDevice, layer: Layer, sets: usize) -> Work<'_> {
    let dtype = layer.dtype;
    let Model {
        q_heads,
        kv_heads,
        head_dim,
        ..
    } = layer.model;
    let inputs: Vec<Tokens> = (0..sets)
        .map(|set| {
            let part =
                |heads, seed| device.filled(&[layer.rows, heads, head_dim], dtype, 3 * set + seed);
            Tokens {
                q: part(q_heads, 0),
                k: part(kv_heads, 1),
                v: part(kv_heads, 2),
                slots: ints(device, &[layer.rows], &layer.slots(set)),
            }
        })
        .collect();
    let values = [&inputs[0].q, &inputs[0].k, &inputs[0].v].map(|part| part.values);
    let angles = layer.angles();
    let bits: Vec<i32> = angles.iter().map(|angle| angle.to_bits() as i32).collect();
    let table = ints(device, &[layer.rows, head_dim], &bits);
    let table = TensorRef::contiguous(
        table.handle().clone(),
        [layer.rows, head_dim],
        Dtype::F32.elem(),
    );
    let positions: Vec<i32> = (0..layer.rows as i32).collect();
    let positions = ints(device, &[layer.rows], &positions);
    let outs = [
        device.poisoned(&[layer.rows, q_heads, head_dim], dtype),
        device.poisoned(&layer.cache_shape(), dtype),
        device.poisoned(&layer.cache_shape(), dtype),
    ];
    let bytes = layer.bytes();
    let [q_out, k_cache, v_cache] = outs.clone();
    Work {
        quantisation: None,
        path: "Portable".into(),
        flops: 0.0,
        bytes,
        bound: Bound::Bytes,
        sets,
        outputs: outs.to_vec(),
        launch: Box::new(move |set| {
            let Tokens { q, k, v, slots } = &inputs[set];
            let rope = RotaryTable {
                positions: &positions,
                table: &table,
            };
            rotary_and_store(
                device.launcher(),
                &q.tensor,
                &k.tensor,
                &v.tensor,
                rope,
                slots,
                &q_out,
                &k_cache,
                &v_cache,
                None,
            )
            .map_err(|error| error.to_string())
        }),
        check: Box::new(move || {
            let read = |output: usize, from, len| device.read(&outs[output], dtype, from, len);
            layer.rotary_error(values, &angles, &layer.slots(0), &read)
        }),
    }
}

#[cfg(feature = "flex")]
mod flex {
    use std::sync::{Arc, Mutex};

    use burn::tensor::{Device, Int, Tensor, TensorData};
    use burn_paged::{
        LayerKv, RotaryTable, SlotMapping, add_rms_norm, rms_norm, rotary_and_store, silu_and_mul,
    };
    use burn_paged_benches::kernel::{Values, Work, flex};

    use super::{Bound, Layer, Model, Op};

    pub(super) fn row_op(device: &Device, layer: Layer) -> Work<'_> {
        let values = [0, 1, 2].map(Values::new);
        let (columns, _) = layer.columns();
        let rows = |values| flex::filled(device, [layer.rows, columns], layer.dtype, values);
        let (x, residual) = (rows(values[0]), rows(values[1]));
        let weight = flex::filled(device, [columns], layer.dtype, values[2]);
        let (op, epsilon) = (layer.op, f64::from(layer.model.norm_eps));
        let outs: Arc<Mutex<Vec<Tensor<2>>>> = Arc::default();
        let results = outs.clone();
        let bytes = layer.bytes();
        Work {
            quantisation: None,
            path: "flex".into(),
            flops: 0.0,
            bytes,
            bound: Bound::Bytes,
            sets: 1,
            outputs: Vec::new(),
            launch: Box::new(move |_| {
                let (x, weight) = (x.clone(), weight.clone());
                let out = match op {
                    Op::SiluAndMul => vec![silu_and_mul(x)],
                    Op::AddRmsNorm => {
                        let (out, sum) = add_rms_norm(x, residual.clone(), weight, epsilon);
                        vec![out, sum]
                    }
                    Op::RmsNorm | Op::RotaryAndStore => vec![rms_norm(x, weight, epsilon)],
                };
                *outs.lock().map_err(|error| error.to_string())? = out;
                Ok(())
            }),
            check: Box::new(move || {
                let outs = results.lock().map_err(|error| error.to_string())?;
                let read = |output: usize, from, len| Ok(flex::elements(&outs[output], from, len));
                layer.row_error(values, &read)
            }),
        }
    }

    pub(super) fn rotary(device: &Device, layer: Layer) -> Result<Work<'_>, String> {
        let values = [0, 1, 2].map(Values::new);
        let Model {
            q_heads,
            kv_heads,
            head_dim,
            rope_theta,
            ..
        } = layer.model;
        let part = |heads, values| {
            flex::filled(device, [layer.rows, heads, head_dim], layer.dtype, values)
        };
        let q = part(q_heads, values[0]);
        let (k, v) = (part(kv_heads, values[1]), part(kv_heads, values[2]));
        let frequencies: Vec<f64> = (0..head_dim / 2)
            .map(|i| rope_theta.powf(-2.0 * i as f64 / head_dim as f64))
            .collect();
        let table = RotaryTable::new(&frequencies, 1.0, layer.rows, device);
        let positions: Vec<i32> = (0..layer.rows as i32).collect();
        let positions = TensorData::new(positions, [layer.rows]);
        let positions = Tensor::<1, Int>::from_data(positions, device);
        let slots = layer.slots(0);
        let slots = SlotMapping::new(slots, device).map_err(|error| error.to_string())?;
        let empty =
            |seed| flex::filled(device, layer.cache_shape(), layer.dtype, Values::new(seed));
        let cache = Arc::new(Mutex::new((LayerKv::new(empty(3), empty(4)), None)));
        let written = cache.clone();
        let bytes = layer.bytes();
        Ok(Work {
            quantisation: None,
            path: "flex".into(),
            flops: 0.0,
            bytes,
            bound: Bound::Bytes,
            sets: 1,
            outputs: Vec::new(),
            launch: Box::new(move |_| {
                let mut cache = cache.lock().map_err(|error| error.to_string())?;
                let (q, k, v) = (q.clone(), k.clone(), v.clone());
                let (cache, q_out) = &mut *cache;
                *q_out = Some(rotary_and_store(q, k, v, &positions, &table, cache, &slots));
                Ok(())
            }),
            check: Box::new(move || {
                let cache = written.lock().map_err(|error| error.to_string())?;
                let q_out = cache.1.as_ref().ok_or("nothing was computed")?;
                let read = |output: usize, from, len| {
                    Ok(match output {
                        0 => flex::elements(q_out, from, len),
                        1 => flex::elements(cache.0.k(), from, len),
                        _ => flex::elements(cache.0.v(), from, len),
                    })
                };
                layer.rotary_error(values, &layer.angles(), &layer.slots(0), &read)
            }),
        })
    }
}
