//! `cargo xtask test`: the stages of CI, one after the other, with their times.

mod stages;

use std::time::{Duration, Instant};

use crate::Failure;
use stages::{STAGES, Stage};

/// Runs all stages, or those named by `--only`; stops at the first that fails.
pub(crate) fn run(args: &[String]) -> Result<(), Failure> {
    let Some(chosen) = parse(args)? else {
        for stage in STAGES {
            println!("{:<14} {}", stage.name, stage.what);
        }
        return Ok(());
    };
    let start = Instant::now();
    let mut times = Vec::new();
    for (i, stage) in chosen.iter().enumerate() {
        eprintln!(
            "\n━━ {} of {}: {} ━ {}",
            i + 1,
            chosen.len(),
            stage.name,
            stage.what
        );
        let stage_start = Instant::now();
        let result = (stage.run)();
        times.push((stage.name, stage_start.elapsed()));
        if let Err(failure) = result {
            summary(&times, start.elapsed(), Some(stage.name));
            return Err(format!("stage {} failed: {failure}", stage.name).into());
        }
        eprintln!("━━ {}: {}", stage.name, minutes(stage_start.elapsed()));
    }
    summary(&times, start.elapsed(), None);
    Ok(())
}

/// Stages that the arguments ask for; `None` for `--list`.
fn parse(args: &[String]) -> Result<Option<Vec<&'static Stage>>, Failure> {
    let mut chosen = Vec::new();
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--list" => return Ok(None),
            "--only" => {
                let name = args.next().ok_or("--only needs the name of a stage")?;
                let stage = STAGES.iter().find(|stage| stage.name == name);
                chosen.push(stage.ok_or_else(|| {
                    let names: Vec<_> = STAGES.iter().map(|stage| stage.name).collect();
                    format!("no stage {name:?}; stages: {}", names.join(", "))
                })?);
            }
            other => {
                return Err(format!("unknown argument {other:?}; see `cargo xtask help`").into());
            }
        }
    }
    Ok(Some(if chosen.is_empty() {
        STAGES.iter().collect()
    } else {
        chosen
    }))
}

fn summary(times: &[(&str, Duration)], total: Duration, failed: Option<&str>) {
    eprintln!();
    for (name, time) in times {
        let mark = if failed == Some(name) { "FAILED" } else { "ok" };
        eprintln!("{name:<14} {:>8}  {mark}", minutes(*time));
    }
    eprintln!("{:<14} {:>8}", "total", minutes(total));
}

fn minutes(time: Duration) -> String {
    let seconds = time.as_secs();
    format!("{}m {:02}s", seconds / 60, seconds % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(args: &[&str]) -> Result<Vec<&'static str>, String> {
        let args: Vec<_> = args.iter().map(|arg| arg.to_string()).collect();
        match parse(&args) {
            Ok(stages) => Ok(stages
                .unwrap_or_default()
                .iter()
                .map(|stage| stage.name)
                .collect()),
            Err(failure) => Err(failure.to_string()),
        }
    }

    #[test]
    fn without_arguments_every_stage_runs_in_order() {
        let all: Vec<_> = STAGES.iter().map(|stage| stage.name).collect();
        assert_eq!(names(&[]), Ok(all));
    }

    #[test]
    fn only_names_stages_and_refuses_unknown_ones() {
        assert_eq!(
            names(&["--only", "model", "--only", "fmt"]),
            Ok(vec!["model", "fmt"])
        );
        assert!(
            names(&["--only", "nothing"])
                .unwrap_err()
                .contains("clippy-flex")
        );
        assert!(names(&["--only"]).is_err());
        assert!(names(&["--fast"]).is_err());
    }

    #[test]
    fn times_read_in_minutes_and_seconds() {
        assert_eq!(minutes(Duration::from_secs(605)), "10m 05s");
    }
}
