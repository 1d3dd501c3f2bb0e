//! Sampling on tensors gives what the host definition gives.

use burn::tensor::DType;
use burn_paged::{SamplingOptions, greedy, sample, sampling::sample_row};

use crate::devices::{Random, devices, dtypes, host, tensor};

#[test]
fn rows_are_sampled_as_if_alone() {
    for (name, device) in devices() {
        for dtype in dtypes(name, &device) {
            let logits = Random::new(12).tensor([6, 301], 4.0, dtype, &device);
            let hot = SamplingOptions {
                temperature: 0.8,
                seed: 5,
                draw: 3,
                ..Default::default()
            };
            let options = [
                SamplingOptions::default(),
                SamplingOptions { top_k: 2, ..hot },
                SamplingOptions { top_p: 0.5, ..hot },
                SamplingOptions { min_p: 0.2, ..hot },
                hot,
                SamplingOptions { draw: 4, ..hot },
            ];
            let found = sample(logits.clone(), &options).into_data();
            let rows = host(&logits);
            let expected: Vec<i32> = (rows.chunks(301).zip(&options))
                .map(|(row, options)| sample_row(row, options).unwrap() as i32)
                .collect();
            assert_eq!(
                found.iter::<i32>().collect::<Vec<_>>(),
                expected,
                "{name}, {dtype:?}"
            );
        }
    }
}

#[test]
fn greedy_takes_the_lowest_of_equals_and_marks_broken_rows() {
    for (name, device) in devices() {
        let none = f32::NEG_INFINITY;
        let rows = vec![
            1.0,
            3.0,
            3.0, // a tie
            f32::NAN,
            9.0,
            1.0, // a broken row
            none,
            none,
            none, // nothing to take
            none,
            -7.0,
            none, // one left
        ];
        let found = greedy(tensor(rows, [4, 3], DType::F32, &device)).into_data();
        assert_eq!(
            found.iter::<i32>().collect::<Vec<_>>(),
            [1, -1, -1, 1],
            "{name}"
        );
    }
}
