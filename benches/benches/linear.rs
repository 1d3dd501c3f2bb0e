//! Products with the weights of a decoder: few rows against the bandwidth, many against the rate.
//!
//! Run with: cargo bench -p burn-paged-benches --no-default-features --features cuda-hopper --bench linear --
//! --device cuda [--all-plans] [--json OUT.json]; see benches/README.md.

use burn_paged_benches::kernel::{
    Bound, CaseName, CubeDevice, Dtype, Filled, Model, Session, Target, Work, relative_error,
};
use burn_paged_kernels::{Epilogue, LinearPlan, LinearProblem, linear_with};

/// Rows from which on a product is held against the rate of the matrix units.
const MANY_ROWS: usize = 512;

/// Rows of a gate, and then of what it lets through.
const TURN: usize = 64;

/// Tokens of the widest tile of the kernel for few.
const MAX_TILE: usize = 256;

/// Tiles of tokens beside which it is tried.
const MAX_TILES: usize = 32;

/// Sets of weights, at most.
const MAX_SETS: usize = 16;

fn main() -> Result<(), String> {
    Session::run("linear", |session, target, shapes| {
        let square = Product::square(shapes.square);
        run(session, target, "square", square);
        for model in &shapes.models {
            for &rows in &shapes.linear_rows {
                for product in Product::of(model, rows) {
                    run(session, target, &model.name, product);
                }
            }
        }
        Ok(())
    })
}

/// A product of rows with weights.
#[derive(Debug, Clone, Copy)]
struct Product {
    /// Which one of a decoder.
    name: &'static str,
    rows: usize,
    inner: usize,
    weight_rows: usize,
    epilogue: Epilogue,
}

impl Product {
    fn square(size: usize) -> Self {
        Self {
            name: "square",
            rows: size,
            inner: size,
            weight_rows: size,
            epilogue: Epilogue::None,
        }
    }

    /// The products of a layer, and the one that makes logits, which prompts run on few rows only.
    fn of(model: &Model, rows: usize) -> Vec<Self> {
        let Model {
            hidden,
            q_heads,
            kv_heads,
            head_dim,
            ffn,
            vocab,
            ..
        } = *model;
        let product = |name, weight_rows, inner, epilogue| Self {
            name,
            rows,
            inner,
            weight_rows,
            epilogue,
        };
        let mut products = vec![
            product(
                "qkv",
                (q_heads + 2 * kv_heads) * head_dim,
                hidden,
                Epilogue::None,
            ),
            product("o", hidden, q_heads * head_dim, Epilogue::None),
            product("gate_up", 2 * ffn, hidden, Epilogue::None),
            product("gate_up+silu", 2 * ffn, hidden, Epilogue::SiluAndMul),
            product("down", hidden, ffn, Epilogue::None),
        ];
        if rows < MANY_ROWS {
            products.push(product("lm_head", vocab, hidden, Epilogue::None));
        }
        products
    }

    fn columns(&self) -> usize {
        match self.epilogue {
            Epilogue::None => self.weight_rows,
            Epilogue::SiluAndMul => self.weight_rows / 2,
        }
    }

    fn flops(&self) -> f64 {
        2.0 * self.rows as f64 * self.inner as f64 * self.weight_rows as f64
    }

    /// Every tensor once.
    fn bytes(&self, dtype: Dtype) -> f64 {
        let elements = self.rows * (self.inner + self.columns()) + self.weight_rows * self.inner;
        (elements * dtype.size()) as f64
    }

    fn kind(&self) -> &'static str {
        match self.rows >= MANY_ROWS {
            true => "linear_many_rows",
            false => "linear",
        }
    }

    fn problem(&self, dtype: Dtype) -> LinearProblem {
        LinearProblem {
            num_tokens: self.rows,
            in_features: self.inner,
            weight_rows: self.weight_rows,
            dtype: dtype.elem(),
            epilogue: self.epilogue,
            aligned: self.inner.is_multiple_of(8) && self.columns().is_multiple_of(8),
        }
    }

    /// The plan that is chosen, and others to hold it against.
    fn plans(&self, device: &CubeDevice, dtype: Dtype, all: bool) -> Vec<LinearPlan> {
        let chosen = LinearPlan::new(device.launcher().facts(), &self.problem(dtype));
        let mut plans = vec![chosen];
        if !all {
            return plans;
        }
        let planned = match chosen {
            LinearPlan::Portable => return plans,
            LinearPlan::Skinny { tokens, .. } => Some(tokens),
            LinearPlan::Large { .. } => None,
        };
        let smaller = [64, 128, MAX_TILE].map(|tokens| {
            let tiles = self.rows.div_ceil(tokens);
            (2..=MAX_TILES).contains(&tiles).then_some(tokens)
        });
        let cuts = [
            (64, 1, 1),
            (64, 1, 4),
            (64, 2, 1),
            (64, 2, 2),
            (64, 4, 1),
            (128, 1, 1),
            (128, 1, 2),
            (128, 2, 1),
            (128, 4, 1),
        ];
        for tokens in smaller.into_iter().chain([planned]).flatten() {
            for (features, parts, shares) in cuts {
                for bytes in [113_000, 226_000] {
                    plans.push(LinearPlan::Skinny {
                        tokens,
                        features,
                        stages: (bytes / (128 * (features + tokens))).clamp(2, 12),
                        parts,
                        shares,
                    });
                }
            }
        }
        if self.rows > 64 {
            for (columns, stages) in [(256, 4), (128, 6)] {
                for band in [4, 8, 16, 32] {
                    for cubes in [1, 2] {
                        plans.push(LinearPlan::Large {
                            columns,
                            stages,
                            band,
                            cubes,
                        });
                    }
                }
            }
        }
        plans.retain(|plan| plan.is_legal(&self.problem(dtype)));
        let mut seen = Vec::new();
        plans.retain(|plan| {
            let new = !seen.contains(plan);
            seen.push(*plan);
            new
        });
        plans
    }
}

fn run(session: &mut Session, target: &Target, model: &str, product: Product) {
    let name = CaseName {
        kind: product.kind(),
        head: model.to_owned(),
        case: match product.name {
            "square" => format!("{0}x{0}x{0}", product.rows),
            name => format!("{name} rows={}", product.rows),
        },
        op: "linear",
        layout: "",
        tokens: Some(product.rows),
    };
    let dtype = session.args().dtype;
    match target {
        Target::Cube(device) => {
            for plan in product.plans(device, dtype, session.args().all_plans) {
                if plan == LinearPlan::Portable && product.epilogue != Epilogue::None {
                    session.leave_out(&name, "the portable kernel has no epilogue");
                    continue;
                }
                session.case(target, name.clone(), |session| {
                    let sets = session.sets(target, product.bytes(dtype), MAX_SETS);
                    Ok(work(device, product, plan, dtype, sets))
                });
            }
        }
        #[cfg(feature = "flex")]
        Target::Flex(_) => session.leave_out(&name, "Flex multiplies on its own"),
    }
}

fn work(
    device: &CubeDevice,
    product: Product,
    plan: LinearPlan,
    dtype: Dtype,
    sets: usize,
) -> Work<'_> {
    let Product {
        rows,
        inner,
        weight_rows,
        epilogue,
        ..
    } = product;
    let inputs: Vec<(Filled, Filled)> = (0..sets)
        .map(|set| {
            let x = device.filled(&[rows, inner], dtype, 2 * set);
            let weight = device.filled(&[weight_rows, inner], dtype, 2 * set + 1);
            (x, weight)
        })
        .collect();
    let (x, weight) = (inputs[0].0.values, inputs[0].1.values);
    let out = device.poisoned(&[rows, product.columns()], dtype);
    let to = out.clone();
    Work {
        quantisation: None,
        path: format!("{plan:?}"),
        flops: product.flops(),
        bytes: product.bytes(dtype),
        bound: match rows >= MANY_ROWS {
            true => Bound::Operations,
            false => Bound::Bytes,
        },
        sets,
        outputs: vec![out.clone()],
        launch: Box::new(move |set| {
            let (x, weight) = &inputs[set];
            let (x, weight) = (&x.tensor, &weight.tensor);
            linear_with(device.launcher(), plan, x, weight, None, epilogue, &to)
                .map_err(|error| error.to_string())
        }),
        check: Box::new(move || {
            let columns = product.columns();
            let mut error = 0.0;
            for row in [0, rows / 2, rows - 1] {
                // A few hundred columns at both ends and in the middle: a whole row of sums takes long on the host.
                let len = columns.min(192);
                for from in [0, (columns - len) / 2, columns - len] {
                    let x = x.range(row * inner, inner);
                    let sum = |weight_row: usize| {
                        let weight = weight.range(weight_row * inner, inner);
                        x.iter().zip(weight).map(|(x, w)| x * w).sum::<f64>()
                    };
                    let expected: Vec<f64> = (from..from + len)
                        .map(|column| match epilogue {
                            Epilogue::None => sum(column),
                            Epilogue::SiluAndMul => {
                                let gate_row = column / TURN * 2 * TURN + column % TURN;
                                let gate = sum(gate_row);
                                gate / (1.0 + (-gate).exp()) * sum(gate_row + TURN)
                            }
                        })
                        .collect();
                    let found = device.read(&out, dtype, row * columns + from, len)?;
                    let here = relative_error(&found, &expected);
                    if here > error || here.is_nan() {
                        error = here;
                    }
                }
            }
            Ok(error)
        }),
    }
}
