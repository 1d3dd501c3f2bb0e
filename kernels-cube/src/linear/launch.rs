use super::plan::{Epilogue, LARGE_OUT_COLUMNS, LinearPlan, LinearProblem};
use super::portable::{TOKENS_PER_UNIT, linear_kernel};
use crate::check::Check;
use crate::error::KernelError;
use crate::grid::Grid;
use crate::launcher::Launcher;
use crate::tensor::TensorRef;

/// Multiplies rows with stored weights: `out = x · weightᵀ + bias`, and what `epilogue` says.
///
/// # Shapes
/// - `x`: `[num_tokens, in_features]`, f32 | f16 | bf16, last axis contiguous
/// - `weight`: `[weight_rows, in_features]`, same dtype, last axis contiguous
/// - `bias`: `[weight_rows]`, same dtype, contiguous
/// - `out`: `[num_tokens, out_features]`, same dtype, last axis contiguous; `out_features` is `weight_rows`, or half of it
///   with [`Epilogue::SiluAndMul`], which takes multiples of 128 `weight_rows`
///
/// # Numerics
/// Sums, bias and epilogue in f32, one cast on write.
///
/// # Errors
/// [`KernelError::Invalid`] if shapes, strides, dtypes or buffers disagree,
/// [`KernelError::Unsupported`] and [`KernelError::Launch`] if the device cannot serve them: the portable kernel has no
/// epilogue.
pub fn linear(
    launcher: &Launcher,
    x: &TensorRef,
    weight: &TensorRef,
    bias: Option<&TensorRef>,
    epilogue: Epilogue,
    out: &TensorRef,
) -> Result<(), KernelError> {
    multiply(launcher, x, weight, bias, epilogue, out, None)
}

/// As [`linear`] with a plan of the caller's choice, for tests and benches.
///
/// # Errors
/// As [`linear`], and [`KernelError::Unsupported`] if the kernel does not run on the device or does not take the problem.
pub fn linear_with(
    launcher: &Launcher,
    plan: LinearPlan,
    x: &TensorRef,
    weight: &TensorRef,
    bias: Option<&TensorRef>,
    epilogue: Epilogue,
    out: &TensorRef,
) -> Result<(), KernelError> {
    multiply(launcher, x, weight, bias, epilogue, out, Some(plan))
}

/// The tensors of a launch, checked.
struct Operands<'a> {
    x: &'a TensorRef,
    weight: &'a TensorRef,
    bias: Option<&'a TensorRef>,
    out: &'a TensorRef,
    epilogue: Epilogue,
}

fn multiply(
    launcher: &Launcher,
    x: &TensorRef,
    weight: &TensorRef,
    bias: Option<&TensorRef>,
    epilogue: Epilogue,
    out: &TensorRef,
    plan: Option<LinearPlan>,
) -> Result<(), KernelError> {
    let check = Check::new("linear");
    let [num_tokens, in_features] = check.sizes("x", x)?;
    let dtype = check.float(launcher.facts(), "x", x)?;
    let [weight_rows, _] = check.sizes("weight", weight)?;
    check.rows("x", x, &[num_tokens, in_features], dtype)?;
    check.rows("weight", weight, &[weight_rows, in_features], dtype)?;
    let gated = matches!(epilogue, Epilogue::SiluAndMul);
    if gated && !weight_rows.is_multiple_of(2 * LARGE_OUT_COLUMNS) {
        return check.invalid(format!(
            "weight has {weight_rows} rows, expected turns of {LARGE_OUT_COLUMNS} and {LARGE_OUT_COLUMNS}"
        ));
    }
    let out_features = epilogue.out_features(weight_rows);
    check.rows("out", out, &[num_tokens, out_features], dtype)?;
    if let Some(bias) = bias {
        check.contiguous("bias", bias, &[weight_rows], dtype)?;
    }
    // Without a bias, x stands for it.
    let inputs = [("x", x), ("weight", weight), ("bias", bias.unwrap_or(x))];
    check.output("out", out, &inputs)?;
    if out.num_elements() == 0 {
        return Ok(());
    }

    let aligned = |tensor: &TensorRef| tensor.row_alignment().is_multiple_of(8);
    let inputs_aligned = inputs.iter().all(|(_, input)| aligned(input));
    let problem = LinearProblem {
        num_tokens,
        in_features,
        weight_rows,
        dtype,
        epilogue,
        aligned: out_features.is_multiple_of(8) && aligned(out) && inputs_aligned,
    };
    let planned = LinearPlan::new(launcher.facts(), &problem);
    let plan = plan.unwrap_or(planned);
    let is_taken = plan == LinearPlan::Portable || planned != LinearPlan::Portable;
    if !is_taken || !plan.is_legal(&problem) {
        return check.unsupported(format!("{plan:?} for {problem:?}"));
    }
    let operands = Operands {
        x,
        weight,
        bias,
        out,
        epilogue,
    };
    match plan {
        LinearPlan::Portable if gated => check.unsupported(format!("{epilogue:?} for {problem:?}")),
        LinearPlan::Portable => portable(check, launcher, &problem, &operands),
        #[cfg(feature = "hopper")]
        LinearPlan::Skinny {
            tokens,
            features,
            stages,
            parts,
            shares,
        } => hopper::skinny(
            check,
            launcher,
            &problem,
            &operands,
            [tokens, features, stages, parts as usize, shares as usize],
        ),
        #[cfg(feature = "hopper")]
        LinearPlan::Large {
            columns,
            stages,
            band,
            cubes,
        } => hopper::large(
            check,
            launcher,
            &problem,
            &operands,
            [columns, stages, band as usize, cubes as usize],
        ),
        #[cfg(not(feature = "hopper"))]
        LinearPlan::Skinny { .. } | LinearPlan::Large { .. } => {
            check.unsupported(format!("{plan:?} without the feature hopper"))
        }
    }
}

fn portable(
    check: Check,
    launcher: &Launcher,
    problem: &LinearProblem,
    operands: &Operands<'_>,
) -> Result<(), KernelError> {
    let Operands {
        x,
        weight,
        bias,
        out,
        ..
    } = *operands;
    let in_features = problem.in_features;
    let n = launcher.vector_size(problem.dtype, &[in_features], &[x, weight]);
    let units = problem
        .num_tokens
        .div_ceil(TOKENS_PER_UNIT)
        .checked_mul(problem.weight_rows);
    let grid = units.and_then(|units| Grid::for_units(launcher.facts(), units));
    let (count, dim, address) = launcher.topology(check, grid, 1, &[x, weight, out])?;
    // SAFETY: every tensor lies in its buffer, the output overlaps nothing, tokens past the last
    // are read as the last and not written, and surplus units end first.
    unsafe {
        linear_kernel::launch_unchecked(
            launcher.client(),
            count,
            dim,
            address,
            n,
            x.buffer_arg(n),
            weight.buffer_arg(n),
            // Without a bias, nobody reads it.
            bias.unwrap_or(x).buffer_arg(1),
            out.buffer_arg(1),
            problem.num_tokens,
            problem.weight_rows,
            x.strides()[0] / n,
            weight.strides()[0] / n,
            out.strides()[0],
            in_features / n,
            bias.is_some(),
            problem.dtype,
        );
    }
    Ok(())
}

#[cfg(feature = "hopper")]
mod hopper {
    use cubecl::prelude::{CubeCount, CubeDim};

    use super::super::large::{self, LargeSpec, large_linear_kernel};
    use super::super::plan::{
        LARGE_OUT_COLUMNS, LARGE_TOKENS, large_data_bytes, skinny_data_bytes,
    };
    use super::super::skinny::{SkinnySpec, skinny_linear_kernel};
    use super::{LinearProblem, Operands};
    use crate::check::Check;
    use crate::error::KernelError;
    use crate::hopper::{HalfType, tma, wgmma};
    use crate::launcher::Launcher;

    /// A 32-bit count, which coordinates of the copy engine are.
    fn count(check: Check, what: &str, value: usize) -> Result<u32, KernelError> {
        match i32::try_from(value) {
            Ok(value) => Ok(value as u32),
            Err(_) => check.too_large(format!("{what} is {value}, more than an i32 counts")),
        }
    }

    fn half(check: Check, problem: &LinearProblem) -> Result<HalfType, KernelError> {
        match HalfType::of(problem.dtype) {
            Some(kind) => Ok(kind),
            None => check.unsupported(format!("products of {} on matrix units", problem.dtype)),
        }
    }

    fn fits(
        check: Check,
        launcher: &Launcher,
        data_bytes: usize,
        stages: usize,
    ) -> Result<(), KernelError> {
        let (bytes, limit) = (
            data_bytes + 16 * stages,
            launcher.facts().max_shared_memory_bytes,
        );
        match bytes <= limit && stages >= 2 {
            true => Ok(()),
            false => check.unsupported(format!(
                "{stages} stages in {bytes} bytes of shared memory, of {limit}"
            )),
        }
    }

    pub(super) fn skinny(
        check: Check,
        launcher: &Launcher,
        problem: &LinearProblem,
        operands: &Operands<'_>,
        [tokens, features, stages, parts, shares]: [usize; 5],
    ) -> Result<(), KernelError> {
        let steps = problem.in_features.div_ceil(tma::TILE_COLUMNS);
        let token_tiles = problem.num_tokens.div_ceil(tokens);
        fits(
            check,
            launcher,
            skinny_data_bytes(features, tokens, stages),
            stages,
        )?;
        let row_groups = problem.weight_rows.div_ceil(shares * features);
        let cubes = (row_groups * shares * parts).saturating_mul(token_tiles);
        // What a stage is filled with: no more than there is, in eights for each cube that asks for some.
        let filled_rows = features.min(problem.weight_rows.next_multiple_of(8));
        let filled_tokens = tokens.min(problem.num_tokens.next_multiple_of(8 * shares));
        let out_stride = match problem.num_tokens {
            1 => 0,
            _ => operands.out.strides()[0] / 4,
        };
        // Columns of a tile, and offsets in the kernel, are 32-bit.
        count(check, "in_features", problem.in_features)?;
        count(
            check,
            "out",
            problem.num_tokens.saturating_mul(out_stride.max(1)),
        )?;
        let spec = SkinnySpec {
            tokens,
            features,
            stages,
            parts: parts as u32,
            shares: shares as u32,
            kind: half(check, problem)?,
            epilogue: operands.epilogue,
            has_bias: operands.bias.is_some(),
        };
        // SAFETY: every tensor lies in its buffer; the copy engine stays in the tensors of its maps; rows and tokens
        // outside of the output are not written, and the output overlaps nothing.
        unsafe {
            skinny_linear_kernel::launch_unchecked(
                launcher.client(),
                CubeCount::Static(count(check, "cubes", cubes)?, 1, 1),
                CubeDim::new_1d(spec.units()),
                tma::matrix_map(operands.x, filled_tokens / shares, tma::Promotion::Row),
                tma::matrix_map(operands.weight, filled_rows, tma::Promotion::Row),
                // Without a bias, nobody reads it.
                operands.bias.unwrap_or(operands.x).buffer_arg(4),
                operands.out.buffer_arg(4),
                count(check, "num_tokens", problem.num_tokens)?,
                count(check, "groups of rows", row_groups)?,
                count(check, "weight_rows", problem.weight_rows)?,
                filled_rows as u32,
                filled_tokens as u32,
                count(check, "out_features", operands.out.shape()[1])?,
                count(check, "steps", steps)?,
                count(check, "out stride", out_stride)?,
                spec,
                problem.dtype,
            );
        }
        Ok(())
    }

    pub(super) fn large(
        check: Check,
        launcher: &Launcher,
        problem: &LinearProblem,
        operands: &Operands<'_>,
        [columns, stages, band, cubes]: [usize; 4],
    ) -> Result<(), KernelError> {
        fits(check, launcher, large_data_bytes(columns, stages), stages)?;
        // Columns of a tile are 32-bit.
        count(check, "in_features", problem.in_features)?;
        let rows = problem.num_tokens.div_ceil(cubes * LARGE_TOKENS);
        let tile_columns = problem.weight_rows.div_ceil(columns);
        // As for few tokens.
        let filled_tokens = LARGE_TOKENS.min(problem.num_tokens.next_multiple_of(8));
        let tiles = count(check, "tiles", rows.saturating_mul(tile_columns))?;
        let at_once = (launcher.facts().multiprocessors() / cubes).max(1) as u32;
        let (cubes, clusters) = (cubes as u32, tiles.min(at_once));
        let spec = LargeSpec {
            columns,
            stages,
            band: band as u32,
            cubes,
            kind: half(check, problem)?,
            epilogue: operands.epilogue,
            has_bias: operands.bias.is_some(),
        };
        // SAFETY: as above; the copy engine writes inside of the output alone.
        unsafe {
            large_linear_kernel::launch_unchecked(
                launcher.client(),
                CubeCount::Static(clusters * cubes, 1, 1),
                CubeDim::new_1d(large::UNITS),
                tma::matrix_map(operands.x, filled_tokens, tma::Promotion::Two),
                tma::matrix_map(
                    operands.weight,
                    columns / cubes as usize,
                    tma::Promotion::Two,
                ),
                tma::matrix_map(operands.out, wgmma::ROWS as usize, tma::Promotion::Row),
                // Without a bias, nobody reads it.
                operands.bias.unwrap_or(operands.x).buffer_arg(1),
                rows as u32,
                tile_columns as u32,
                count(
                    check,
                    "steps",
                    problem.in_features.div_ceil(LARGE_OUT_COLUMNS),
                )?,
                count(check, "num_tokens", problem.num_tokens)?,
                count(check, "weight_rows", problem.weight_rows)?,
                filled_tokens as u32,
                spec,
                problem.dtype,
            );
        }
        Ok(())
    }
}
