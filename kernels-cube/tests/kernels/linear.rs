//! `linear`: every kernel that runs here, on sizes that fill no tile.

use burn_paged_kernels::{
    Epilogue, KernelError, Launcher, LinearPlan, LinearProblem, linear, linear_with,
};

use crate::arith::{Arith, Dtype};
use crate::compare::{assert_close, assert_same};
use crate::place::{Layout, Placed, launcher, launchers, runs};
use crate::random::Random;
use crate::share::Share;

/// Rows of a gate, and then of what it lets through, in weights for [`Epilogue::SiluAndMul`].
const TURN: usize = 64;

/// One product.
#[derive(Clone, Copy, Debug)]
struct Case {
    tokens: usize,
    inner: usize,
    /// Rows of the weights.
    rows: usize,
    dtype: Dtype,
    layout: Layout,
    bias: bool,
    epilogue: Epilogue,
}

impl Case {
    fn columns(&self) -> usize {
        match self.epilogue {
            Epilogue::None => self.rows,
            Epilogue::SiluAndMul => self.rows / 2,
        }
    }

    /// The sums, then the epilogue, in `arith`.
    fn host(&self, arith: Arith, x: &[f64], weight: &[f64], bias: Option<&[f64]>) -> Vec<f64> {
        let sum = |token: usize, row: usize| {
            let x = &x[token * self.inner..][..self.inner];
            let weight = &weight[row * self.inner..][..self.inner];
            let products = x.iter().zip(weight);
            let sum = products.fold(0.0, |sum, (x, w)| arith.acc(sum + x * w));
            bias.map_or(sum, |bias| arith.acc(sum + bias[row]))
        };
        let mut out = Vec::with_capacity(self.tokens * self.columns());
        for token in 0..self.tokens {
            for column in 0..self.columns() {
                out.push(arith.op(match self.epilogue {
                    Epilogue::None => sum(token, column),
                    Epilogue::SiluAndMul => {
                        let gate_row = column / TURN * 2 * TURN + column % TURN;
                        let gate = sum(token, gate_row);
                        let gate = arith.acc(gate / arith.acc(1.0 + (-gate).exp()));
                        arith.acc(gate * sum(token, gate_row + TURN))
                    }
                }));
            }
        }
        out
    }

    /// Runs the case with each of `plans`, or as planned, against the host, whose loops take longer than the kernels: once for all.
    fn check(&self, launcher: &Launcher, plans: &[Option<LinearPlan>]) {
        let seed = self.tokens * 31 + self.inner * 7 + self.rows;
        let mut random = Random::new(seed as u64);
        let x = random.values(self.dtype, 2.0, self.tokens * self.inner);
        let weight = random.values(self.dtype, 0.5, self.rows * self.inner);
        let bias = self.bias.then(|| random.values(self.dtype, 3.0, self.rows));
        let bias = bias.as_deref();
        let placed = |shape: [usize; 2], values: &[f64]| {
            Placed::new(launcher, self.dtype, &shape, self.layout, values)
        };
        let placed_bias = bias.map(|bias| Placed::dense(launcher, self.dtype, &[self.rows], bias));
        let x_placed = placed([self.tokens, self.inner], &x);
        let weight_placed = placed([self.rows, self.inner], &weight);
        let bias_tensor = placed_bias.as_ref().map(|bias| &bias.tensor);
        let (x_tensor, weight_tensor) = (&x_placed.tensor, &weight_placed.tensor);
        let exact = self.host(Arith::Exact, &x, &weight, bias);
        let plain = self.host(Arith::Plain(self.dtype), &x, &weight, bias);
        for plan in plans {
            let out_shape = [self.tokens, self.columns()];
            let out = Placed::poison(launcher, self.dtype, &out_shape, self.layout.other());
            match *plan {
                None => linear(
                    launcher,
                    x_tensor,
                    weight_tensor,
                    bias_tensor,
                    self.epilogue,
                    &out.tensor,
                ),
                Some(plan) => linear_with(
                    launcher,
                    plan,
                    x_tensor,
                    weight_tensor,
                    bias_tensor,
                    self.epilogue,
                    &out.tensor,
                ),
            }
            .unwrap_or_else(|error| panic!("{self:?} {plan:?}: {error}"));
            assert_close(
                &format!("linear {self:?} {plan:?}"),
                self.dtype,
                &out.read(launcher),
                &exact,
                &plain,
            );
        }
    }

    fn problem(&self) -> LinearProblem {
        LinearProblem {
            num_tokens: self.tokens,
            in_features: self.inner,
            weight_rows: self.rows,
            dtype: self.dtype.elem(),
            epilogue: self.epilogue,
            aligned: true,
        }
    }
}

#[test]
fn products_of_any_size_and_layout() {
    let mut count = 0;
    for (tokens, inner, rows) in [
        (1, 1, 1),
        (1, 576, 33),
        (3, 33, 7),
        (4, 64, 96),
        (5, 100, 40),
        (9, 72, 200),
        (130, 24, 8),
    ] {
        for dtype in Dtype::ALL {
            for layout in [
                Layout::Dense,
                Layout::Pitched,
                Layout::Slice,
                Layout::OddSlice,
            ] {
                for launcher in launchers() {
                    if runs(&launcher, dtype) {
                        let case = Case {
                            tokens,
                            inner,
                            rows,
                            dtype,
                            layout,
                            bias: (tokens + rows).is_multiple_of(2),
                            epilogue: Epilogue::None,
                        };
                        case.check(&launcher, &[None]);
                        count += 1;
                    }
                }
            }
        }
    }
    println!("linear: {count} cases");
}

/// Plans for a case on a Hopper GPU: the planner's choice, and ring and cluster sizes beside it.
fn hopper_plans(launcher: &Launcher, case: &Case) -> Vec<LinearPlan> {
    let planned = LinearPlan::new(launcher.facts(), &case.problem());
    let steps = case.inner.div_ceil(64);
    let mut plans = vec![planned];
    let mut skinny = |tile: usize, cuts: &[(usize, usize, u32, u32)]| {
        for &(features, stages, parts, shares) in cuts {
            let narrow = features == 64 && case.epilogue != Epilogue::None;
            let tokens = case.tokens.next_multiple_of(8 * shares as usize).min(tile);
            let stages = stages.min(232_000 / (128 * (features + tokens)));
            if parts as usize <= steps && !narrow {
                plans.push(LinearPlan::Skinny {
                    tokens,
                    features,
                    stages,
                    parts,
                    shares,
                });
            }
        }
    };
    skinny(
        256,
        &[
            (128, 2, 1, 1),
            (64, 3, 2, 1),
            (128, 4, 4, 1),
            (64, 12, 1, 1),
            (128, 3, 8, 1),
            (128, 3, 1, 2),
            (64, 4, 2, 2),
            (128, 2, 2, 4),
            (64, 9, 1, 4),
        ],
    );
    // Tiles of which the last begins where another one has not ended.
    if case.tokens > 32 {
        skinny(32, &[(128, 3, 1, 1), (64, 4, 2, 2), (128, 3, 1, 4)]);
    }
    for (columns, stages, band, cubes) in [
        (256, 4, 16, 1),
        (256, 2, 1, 1),
        (128, 6, 3, 1),
        (256, 4, 16, 2),
        (256, 2, 2, 2),
        (128, 6, 4, 2),
    ] {
        if columns <= case.rows {
            plans.push(LinearPlan::Large {
                columns,
                stages,
                band,
                cubes,
            });
        }
    }
    plans
}

fn on_hopper(cases: &[(usize, usize, usize)], dtype: Dtype, epilogue: Epilogue) {
    let launcher = launcher();
    if !launcher.facts().hopper {
        println!("linear on matrix units: skipped, no Hopper GPU with its compiler");
        return;
    }
    let mut count = 0;
    let Share { first, step } = Share::of_this_process();
    let layouts = [Layout::Dense, Layout::Pitched].into_iter().enumerate();
    let cases = layouts.flat_map(|layout| cases.iter().map(move |case| (layout, case)));
    for ((at, layout), &(tokens, inner, rows)) in cases.skip(first).step_by(step) {
        let case = Case {
            tokens,
            inner,
            rows,
            dtype,
            layout,
            bias: (tokens + at).is_multiple_of(2),
            epilogue,
        };
        let plans = hopper_plans(&launcher, &case);
        assert!(!plans.contains(&LinearPlan::Portable), "{case:?}");
        let plans: Vec<_> = plans.into_iter().map(Some).collect();
        case.check(&launcher, &plans);
        count += plans.len();
    }
    println!("linear on matrix units, {dtype:?}, {epilogue:?}: {count} cases");
}

/// Tokens, length of the sums, rows of the weights.
const SIZES: [(usize, usize, usize); 13] = [
    (1, 8, 8),
    (1, 576, 136),
    (7, 72, 64),
    (8, 1000, 1016),
    (33, 512, 520),
    (100, 648, 264),
    (129, 64, 512),
    (256, 136, 128),
    (700, 200, 776),
    // Tokens that cubes share, fewer than their tile has.
    (70, 2048, 512),
    (130, 2048, 520),
    // Fewer rows than a tile, beside several tiles of tokens.
    (300, 136, 72),
    (600, 136, 8),
];

const GATED_SIZES: [(usize, usize, usize); 5] = [
    (1, 576, 128),
    (8, 1000, 1152),
    (61, 72, 256),
    (200, 136, 640),
    (300, 200, 896),
];

#[test]
fn hopper_bf16() {
    on_hopper(&SIZES, Dtype::Bf16, Epilogue::None);
}

#[test]
fn hopper_f16() {
    on_hopper(&SIZES, Dtype::F16, Epilogue::None);
}

#[test]
fn hopper_gated() {
    on_hopper(&GATED_SIZES, Dtype::Bf16, Epilogue::SiluAndMul);
    on_hopper(&GATED_SIZES, Dtype::F16, Epilogue::SiluAndMul);
}

/// The sums of a split product are added in one order, whichever cube is first.
#[test]
fn a_split_product_has_the_same_bits_every_time() {
    let launcher = launcher();
    if !launcher.facts().hopper {
        println!("linear on matrix units: skipped, no Hopper GPU with its compiler");
        return;
    }
    let (tokens, inner, rows) = (8, 4096, 4096);
    let mut random = Random::new(5);
    let dtype = Dtype::Bf16;
    let x = random.values(dtype, 2.0, tokens * inner);
    let weight = random.values(dtype, 0.5, rows * inner);
    let x = Placed::dense(&launcher, dtype, &[tokens, inner], &x);
    let weight = Placed::dense(&launcher, dtype, &[rows, inner], &weight);
    let run = || {
        let out = Placed::poison(&launcher, dtype, &[tokens, rows], Layout::Dense);
        let plan = LinearPlan::Skinny {
            tokens: 8,
            features: 128,
            stages: 4,
            parts: 8,
            shares: 1,
        };
        let none = Epilogue::None;
        linear_with(
            &launcher,
            plan,
            &x.tensor,
            &weight.tensor,
            None,
            none,
            &out.tensor,
        )
        .unwrap();
        out.read(&launcher)
    };
    let first = run();
    for _ in 0..20 {
        assert_same("the same product", &run(), &first);
    }
}

#[test]
fn an_epilogue_without_a_kernel_is_refused() {
    let launcher = launcher();
    let dtype = Dtype::F32;
    let tensor = |shape: [usize; 2]| Placed::poison(&launcher, dtype, &shape, Layout::Dense).tensor;
    let (x, out) = (tensor([2, 64]), tensor([2, 64]));
    let run = |rows: usize| {
        let weight = tensor([rows, 64]);
        linear(&launcher, &x, &weight, None, Epilogue::SiluAndMul, &out)
    };
    assert!(matches!(
        run(128),
        Err(KernelError::Unsupported { op: "linear", .. })
    ));
    assert!(matches!(
        run(100),
        Err(KernelError::Invalid { op: "linear", .. })
    ));
}
