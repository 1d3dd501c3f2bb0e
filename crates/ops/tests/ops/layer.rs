//! Norms, rotary, SiLU, linear and embedding against loops in f64 and against the reference.

use burn::tensor::{DType, Tensor};
use burn_paged::*;

use crate::{
    compare::assert_close,
    devices::{Random, devices, dtypes, host, is_jit},
    refusals::refused,
};

/// Rows and widths that no vector width divides, and one that fills several vectors.
const SHAPES: [[usize; 2]; 5] = [[1, 7], [3, 64], [5, 33], [17, 576], [70, 640]];

fn shapes(name: &str) -> &'static [[usize; 2]] {
    if is_jit(name) { &SHAPES[1..3] } else { &SHAPES }
}

#[test]
fn norms_follow_the_formula() {
    for (name, device) in devices() {
        for dtype in dtypes(name, &device) {
            for &shape in shapes(name) {
                let mut random = Random::new(4);
                let x = random.tensor(shape, 3.0, dtype, &device);
                let residual = random.tensor(shape, 3.0, dtype, &device);
                let weight = random.tensor([shape[1]], 2.0, dtype, &device);
                let what = format!("{name}, {shape:?}");
                let formula = |x: &[f32], weight: &[f32]| -> Vec<f32> {
                    let rows = x.chunks(weight.len()).flat_map(|row| {
                        let squares: f64 = row.iter().map(|x| f64::from(*x).powi(2)).sum();
                        let scale = 1.0 / (squares / weight.len() as f64 + 1e-5).sqrt();
                        row.iter()
                            .zip(weight)
                            .map(move |(x, w)| (f64::from(*x) * scale) as f32 * w)
                    });
                    rows.collect()
                };
                let exact = formula(&host(&x), &host(&weight));
                let found = rms_norm(x.clone(), weight.clone(), 1e-5);
                let plain = reference::rms_norm(x.clone(), weight.clone(), 1e-5);
                assert_close(&what, &host(&found), &exact, Some(&host(&plain)), dtype);

                let (normed, sum) = add_rms_norm(x.clone(), residual.clone(), weight.clone(), 1e-5);
                assert_eq!(host(&sum), host(&(x + residual)), "{what}: the sum");
                let exact = formula(&host(&sum), &host(&weight));
                let plain = reference::rms_norm(sum, weight, 1e-5);
                assert_close(&what, &host(&normed), &exact, Some(&host(&plain)), dtype);
            }
        }
    }
}

#[test]
fn rows_of_large_magnitude_stay_finite() {
    for (name, device) in devices() {
        let x = Tensor::<2>::full([2, 40], 1e9, &device);
        let found = host(&rms_norm(x, Tensor::ones([40], &device), 1e-6));
        assert_close(name, &found, &[1.0; 80], None, DType::F32);
    }
}

#[test]
fn rotary_rotates_half_split_pairs() {
    for (name, device) in devices() {
        for dtype in dtypes(name, &device) {
            for (head_dim, rotary_dim) in [(8, 8), (64, 64), (80, 32), (6, 2)] {
                let half = rotary_dim / 2;
                let inv_freq: Vec<f64> = (0..half)
                    .map(|i| 100f64.powf(-(i as f64) / half as f64))
                    .collect();
                let table = RotaryTable::new(&inv_freq, 1.25, 50, &device);
                let positions = [0, 49, 7, 7, 12];
                let mut random = Random::new(6);
                let q = random.tensor([5, 3, head_dim], 2.0, dtype, &device);
                let k = random.tensor([5, 1, head_dim], 2.0, dtype, &device);
                let formula = |x: &[f32], heads: usize| -> Vec<f32> {
                    let mut out = x.to_vec();
                    for (row, values) in out.chunks_mut(head_dim).enumerate() {
                        let position = f64::from(positions[row / heads]);
                        let original: Vec<f64> = values.iter().map(|x| f64::from(*x)).collect();
                        for i in 0..half {
                            let (sin, cos) = (position * inv_freq[i]).sin_cos();
                            let (a, b) = (original[i], original[i + half]);
                            values[i] = (1.25 * (a * cos - b * sin)) as f32;
                            values[i + half] = (1.25 * (b * cos + a * sin)) as f32;
                        }
                    }
                    out
                };
                let (exact_q, exact_k) = (formula(&host(&q), 3), formula(&host(&k), 1));
                let positions = Tensor::from_data(positions, (&device, DType::I32));
                let what = format!("{name}, head_dim {head_dim}, rotary_dim {rotary_dim}");
                let both = [
                    rotary(q.clone(), k.clone(), &positions, &table),
                    reference::rotary(q, k, &positions, &table),
                ];
                for (q, k) in both {
                    assert_close(&what, &host(&q), &exact_q, None, dtype);
                    assert_close(&what, &host(&k), &exact_k, None, dtype);
                }
            }
        }
    }
}

#[test]
fn silu_and_mul_follows_the_formula() {
    for (name, device) in devices() {
        for dtype in dtypes(name, &device) {
            for &[rows, width] in shapes(name) {
                let x = Random::new(3).tensor([rows, 2 * width], 12.0, dtype, &device);
                let exact: Vec<f32> = (host(&x).chunks(2 * width))
                    .flat_map(|row| {
                        let (gate, up) = row.split_at(width);
                        let silu = |x: f64| x / (1.0 + (-x).exp());
                        let pairs = gate.iter().zip(up);
                        let row: Vec<f32> = pairs
                            .map(|(gate, up)| (silu(f64::from(*gate)) * f64::from(*up)) as f32)
                            .collect();
                        row
                    })
                    .collect();
                let what = format!("{name}, {rows} x {width}");
                for found in [silu_and_mul(x.clone()), reference::silu_and_mul(x)] {
                    assert_eq!(found.dims(), [rows, width]);
                    assert_close(&what, &host(&found), &exact, None, dtype);
                }
            }
        }
    }
}

#[test]
fn a_gated_product_is_two_products_and_a_gate() {
    for (name, device) in devices() {
        for dtype in dtypes(name, &device) {
            for [rows, inner, width] in [[1, 64, 64], [3, 72, 128], [9, 40, 192], [0, 8, 64]] {
                let mut random = Random::new(4);
                let stacked = random.tensor([2 * width, inner], 0.5, dtype, &device);
                let x = random.tensor([rows, inner], 1.0, dtype, &device);
                let (host_x, host_weight) = (host(&x), host(&stacked));
                let weights: Vec<&[f32]> = host_weight.chunks(inner).collect();
                let exact: Vec<f32> = (host_x.chunks(inner))
                    .flat_map(|x| {
                        let dot = |w: &[f32]| -> f64 {
                            let pairs = x.iter().zip(w);
                            pairs.map(|(x, w)| f64::from(*x) * f64::from(*w)).sum()
                        };
                        let (gate, up) = weights.split_at(width);
                        let gated = gate.iter().zip(up).map(move |(gate, up)| {
                            let gate = dot(gate);
                            (gate / (1.0 + (-gate).exp()) * dot(up)) as f32
                        });
                        gated.collect::<Vec<_>>()
                    })
                    .collect();
                // Products are rounded before the gate where there is no kernel for all of it.
                let product = linear(x.clone(), &stacked, None);
                let plain = host(&silu_and_mul(product));
                let weight = in_turns(stacked);
                let found = gated_linear(x, &weight);
                let what = format!("{name}, {rows} x {inner} x {width}");
                assert_eq!(found.dims(), [rows, width], "{what}");
                assert_close(&what, &host(&found), &exact, Some(&plain), dtype);
            }
        }
    }
}

#[test]
fn linear_is_right_for_every_number_of_rows() {
    for (name, device) in devices() {
        for dtype in dtypes(name, &device) {
            for [in_features, out_features] in [[33, 70], [64, 65], [576, 3], [1, 1]] {
                let mut random = Random::new(9);
                let weight = random.tensor([out_features, in_features], 1.0, dtype, &device);
                let bias = random.tensor([out_features], 1.0, dtype, &device);
                let (host_weight, host_bias) = (host(&weight), host(&bias));
                for rows in (0..=19)
                    .chain([40])
                    .filter(|rows| !is_jit(name) || rows % 5 == 0)
                {
                    let x = random.tensor([rows, in_features], 1.0, dtype, &device);
                    let exact: Vec<f32> = (host(&x).chunks(in_features))
                        .flat_map(|x| {
                            let dot = |w: &[f32]| -> f64 {
                                x.iter().zip(w).map(|(x, w)| f64::from(x * w)).sum()
                            };
                            let rows = host_weight.chunks(in_features).zip(&host_bias);
                            rows.map(|(w, b)| (dot(w) + f64::from(*b)) as f32)
                                .collect::<Vec<_>>()
                        })
                        .collect();
                    // Burn's own matrix product finds no kernel on the CPU runtime without tuning. On CUDA it is what runs, and
                    // rounds f32 to TF32.
                    let plain = (name != "cpu")
                        .then(|| host(&reference::linear(x.clone(), &weight, Some(&bias))));
                    let found = linear(x.clone(), &weight, Some(&bias));
                    let what = format!("{name}, {rows} x {in_features} x {out_features}");
                    assert_eq!(found.dims(), [rows, out_features], "{what}");
                    assert_close(&what, &host(&found), &exact, plain.as_deref(), dtype);
                    if rows == 0 {
                        // Burn's concatenation of no rows overflows in its own checks on some devices.
                        continue;
                    }
                    // A view of a larger tensor, as a slice of a fused projection is.
                    let wide = Tensor::cat(vec![x.full_like(f32::NAN), x], 1);
                    let view = wide.narrow(1, in_features, in_features);
                    let found = linear(view, &weight, Some(&bias));
                    assert_close(&what, &host(&found), &exact, plain.as_deref(), dtype);
                }
            }
        }
    }
}

/// From any column on, at the alignment of vectors and not, of whole tensors and of what is a view itself; and kernels read the
/// result where it lies.
#[test]
fn columns_are_those_of_a_slice() {
    for (name, device) in devices() {
        for dtype in dtypes(name, &device) {
            let (rows, width) = (5, 48);
            let x = Random::new(4).tensor([rows, 2 * width], 1.0, dtype, &device);
            let values = host(&x);
            let weight = Random::new(5).tensor([7, 16], 1.0, dtype, &device);
            let view = columns(&x, width..2 * width);
            for (x, first) in [(&x, 0), (&view, width)] {
                for start in [0, 1, 7, 8, 13, 16, 24, 32] {
                    let what = format!("{name}, {dtype:?}, from {first} + {start}");
                    let expected = |count: usize| -> Vec<f32> {
                        let begin = |row: usize| row * 2 * width + first + start;
                        (0..rows)
                            .flat_map(|row| values[begin(row)..][..count].to_vec())
                            .collect()
                    };
                    let found = columns(x, start..start + 16);
                    assert_eq!(found.dims(), [rows, 16], "{what}");
                    assert_eq!(host(&found), expected(16), "{what}");
                    let heads = found.clone().reshape([rows, 2, 8]);
                    assert_eq!(host(&heads), expected(16), "{what}, as heads");
                    // On its own lines, and where it lies.
                    let own = Tensor::from_data(found.clone().into_data(), (&device, dtype));
                    let products = linear(found, &weight, None);
                    let expected = linear(own, &weight, None);
                    assert_eq!(host(&products), host(&expected), "{what}, multiplied");
                }
            }
            assert_eq!(columns(&x, 3..3).dims(), [rows, 0]);
            refused(|| drop(columns(&x, 90..97)), &["90..97", "of 96"]);
        }
    }
}

/// Where kernels take any offset, columns from a multiple of 16 bytes on are a view: they take no memory.
#[test]
#[cfg(feature = "cuda")]
#[allow(
    irrefutable_let_patterns,
    reason = "unless other backends are built in"
)]
fn columns_are_no_copy_on_cuda() {
    use burn::{backend::DispatchDevice, tensor::Device};
    use cubecl::MemoryScope;

    let device = Device::cuda(0);
    let DispatchDevice::Cube(cube) = device.as_dispatch() else {
        panic!("{device:?} is no CubeCL device");
    };
    let client = cube.client();
    let bytes = || {
        device.sync().unwrap();
        let report = client.memory_report(MemoryScope::CurrentStream);
        report.usage().bytes_in_use
    };
    let x = Tensor::<2>::zeros([4096, 960], (&device, DType::F16));
    let before = bytes();
    let parts = [0..576, 576..768, 768..960].map(|range| columns(&x, range));
    assert_eq!(bytes(), before);
    // From 2 bytes on, a copy.
    let odd = columns(&x, 1..577);
    assert!(bytes() > before);
    drop((parts, odd));
}

#[test]
fn embedding_takes_rows() {
    for (name, device) in devices() {
        let weight = Random::new(1).tensor([5, 3], 1.0, DType::F32, &device);
        let ids = Tensor::from_data([4, 0, 4], (&device, DType::I32));
        let rows = host(&weight);
        let expected = [&rows[12..15], &rows[0..3], &rows[12..15]].concat();
        assert_eq!(host(&embedding(&weight, &ids)), expected, "{name}");
    }
}
