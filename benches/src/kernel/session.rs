//! One run of a bench: check, then time, then report, case by case.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{SystemTime, UNIX_EPOCH};

use burn_paged_kernels::TensorRef;
use serde_json::{Map, Value, json};

use super::{
    Bound, CaseName, KernelArgs, KernelReport, KernelRow, Shapes, Sizes, Target, Times,
    compiled_name, timing,
};

/// Bytes that inputs must pass, so that no cache keeps them from one launch to its turn again: the 60 MB that an H200
/// has, thrice.
const ROTATED_BYTES: f64 = 3.0 * 60.0 * (1 << 20) as f64;

/// A case on a device, ready to run.
pub struct Work<'a> {
    /// The kernel that is chosen.
    pub path: String,
    /// Operations of one launch.
    pub flops: f64,
    /// Bytes of one launch.
    pub bytes: f64,
    /// The ceiling that counts.
    pub bound: Bound,
    /// Sets of inputs.
    pub sets: usize,
    /// Queues one launch on the inputs of a set.
    pub launch: Box<dyn Fn(usize) -> Result<(), String> + Sync + 'a>,
    /// The relative error of what launches left behind, after one on set 0.
    pub check: Box<dyn Fn() -> Result<f64, String> + 'a>,
    /// The relative error of the same against what a cache of eight bits was filled from, where there is one.
    pub quantisation: Option<Box<dyn Fn() -> Result<f64, String> + 'a>>,
    /// What launches write, to be asked for faults after the timing.
    pub outputs: Vec<TensorRef>,
}

/// The ceilings of one device.
struct Ceilings {
    copy_bytes_per_second: Option<f64>,
    matmul_flops_per_second: Option<f64>,
}

/// A run of one bench on all its devices.
pub struct Session {
    args: KernelArgs,
    report: KernelReport,
    devices: Vec<Value>,
    ceilings: Ceilings,
    device: String,
}

impl Session {
    /// Runs `cases` on every device that was asked for, prints the table and writes the JSON.
    ///
    /// # Errors
    /// If a device cannot be opened, or a row was wrong or could not be measured. The report is complete even then.
    #[allow(clippy::print_stdout)] // A bench reports on the terminal.
    pub fn run(
        bench: &str,
        cases: impl Fn(&mut Self, &Target, &Shapes) -> Result<(), String>,
    ) -> Result<(), String> {
        crate::keep_compiled_kernels();
        let mut session = Self {
            args: KernelArgs::from_command_line(),
            report: KernelReport::default(),
            devices: Vec::new(),
            ceilings: Ceilings {
                copy_bytes_per_second: None,
                matmul_flops_per_second: None,
            },
            device: String::new(),
        };
        for name in session.args.device.clone() {
            let target = Target::open(&name)?;
            session.enter(compiled_name(&name), &target);
            let sizes = session.args.sizes(target.is_cpu());
            let shapes = session.shapes(sizes)?;
            cases(&mut session, &target, &shapes)?;
        }
        session.finish_header(bench);
        println!("{}", session.report);
        if let Some(path) = &session.args.json {
            let json = serde_json::to_vec_pretty(&session.report.to_json());
            let json = json.map_err(|error| error.to_string())?;
            std::fs::write(path, json).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        let failed = session.report.rows.iter().filter(|row| row.times.is_err());
        match failed.count() {
            0 => Ok(()),
            count => Err(format!("{count} rows were not measured")),
        }
    }

    /// What the command line asks for.
    pub fn args(&self) -> &KernelArgs {
        &self.args
    }

    /// Sets of inputs, so that `bytes` of each are not in a cache when their turn comes again; at most `most`.
    pub fn sets(&self, target: &Target, bytes: f64, most: usize) -> usize {
        match target.is_cpu() {
            // A processor's caches are not what is measured there; two sets show that inputs take turns.
            true => 2.min(most),
            false => ((ROTATED_BYTES / bytes.max(1.0)).ceil() as usize).clamp(1, most),
        }
    }

    /// Runs one case, if the command line wants it: `prepare` makes the inputs, or says why it cannot.
    #[allow(clippy::print_stderr)] // Long runs show where they are.
    pub fn case<'a>(
        &mut self,
        target: &'a Target,
        name: CaseName,
        prepare: impl FnOnce(&Self) -> Result<Work<'a>, String>,
    ) {
        if !self.args.wants(&name.to_string()) {
            return;
        }
        let begin = std::time::Instant::now();
        // A panic of one case, in a runtime or in a kernel's launch, must not cost the others.
        let outcome = catch_unwind(AssertUnwindSafe(|| -> Result<_, String> {
            let work = prepare(self)?;
            let error = self.checked(&work);
            let quantisation = match (&error, &work.quantisation) {
                (Ok(Some(_)), Some(quantisation)) => Some(quantisation()?),
                _ => None,
            };
            let times = match &error {
                Ok(_) => self.timed(target, &work),
                Err(reason) => Err(reason.clone()),
            };
            Ok((work, error.unwrap_or(None), quantisation, times))
        }));
        let outcome: Result<_, String> = outcome.unwrap_or_else(|_| Err("it panicked".into()));
        let row = KernelRow {
            name,
            device: self.device.clone(),
            path: String::new(),
            dtype: self.args.dtype.name(),
            page: self.page(),
            sets: 0,
            flops: 0.0,
            bytes: 0.0,
            bound: Bound::Bytes,
            error: None,
            quantisation_error: None,
            fraction: None,
            ratio: None,
            times: Err(String::new()),
        };
        let row = match outcome {
            Ok((work, error, quantisation_error, times)) => self.compared(KernelRow {
                path: work.path,
                sets: work.sets,
                flops: work.flops,
                bytes: work.bytes,
                bound: work.bound,
                error,
                quantisation_error,
                times,
                ..row
            }),
            Err(reason) => KernelRow {
                times: Err(reason),
                ..row
            },
        };
        #[allow(
            irrefutable_let_patterns,
            reason = "without Flex there is one kind of target"
        )]
        if let Target::Cube(device) = target {
            // The next case has other sizes; a cleanup that fails costs memory only.
            let _ = device.client().memory_cleanup();
        }
        let us = match &row.times {
            Ok(times) => format!("{:.1} us", times.us),
            Err(error) => error.clone(),
        };
        let seconds = begin.elapsed().as_secs_f64();
        eprintln!("{} on {}: {us} ({seconds:.1} s)", row.name, row.device);
        self.report.rows.push(row);
    }

    /// Says that a case is left out, and why; that is no failure.
    pub fn leave_out(&mut self, name: &CaseName, reason: &str) {
        if self.args.wants(&name.to_string()) {
            let note = format!("{name} left out on {}: {reason}", self.device);
            self.report.notes.push(note);
        }
    }

    /// Tokens of a block of the cache.
    pub fn page(&self) -> usize {
        // `shapes` has put the file's number here if there was none.
        self.args.page.unwrap_or(16)
    }

    fn shapes(&mut self, sizes: Sizes) -> Result<Shapes, String> {
        let mut shapes = Shapes::new(sizes)?;
        let page = *self.args.page.get_or_insert(shapes.page_size);
        if page == 0 {
            return Err("a block of 0 tokens".into());
        }
        shapes.page_size = page;
        if self.args.quick {
            shapes.heads.drain(..shapes.heads.len().saturating_sub(1));
            shapes.models.drain(..shapes.models.len().saturating_sub(1));
        }
        Ok(shapes)
    }

    /// Measures the ceilings of a device.
    fn enter(&mut self, name: &str, target: &Target) {
        let first = self.devices.is_empty();
        self.device = name.to_owned();
        let copy = match target {
            Target::Cube(device) => device.copy_bytes_per_second(&self.args.effort()),
            #[cfg(feature = "flex")]
            Target::Flex(_) => Err("the device has no copy of its own".into()),
        };
        let matmul = self.args.matmul_tflops.filter(|_| first);
        self.ceilings = Ceilings {
            copy_bytes_per_second: copy.as_ref().ok().copied(),
            matmul_flops_per_second: matmul.map(|rate| rate * 1e12),
        };
        let description = target.description();
        let copy_text = match &copy {
            Ok(rate) => format!("copy {:.1} GB/s read + written", rate / 1e9),
            Err(error) => format!("copy not measured: {error}"),
        };
        let matmul_text = matmul.map_or("no product's rate given".to_owned(), |rate| {
            format!("product {rate:.1} TFLOP/s, as given")
        });
        self.report
            .notes
            .push(format!("{name}: {description}; {copy_text}; {matmul_text}"));
        self.devices.push(json!({
            "name": name,
            "description": description,
            "copy_gbps": copy.ok().map(|rate| rate / 1e9),
            "matmul_tflops": matmul,
            "timing": match target {
                Target::Cube(device) if !device.is_cpu() => "device",
                _ => "wall",
            },
        }));
    }

    /// The relative error of a launch on set 0.
    fn checked(&self, work: &Work<'_>) -> Result<Option<f64>, String> {
        if self.args.no_check {
            return Ok(None);
        }
        (work.launch)(0)?;
        let error = (work.check)()?;
        let tolerance = self.args.dtype.tolerance();
        // NaN is no error below the tolerance.
        if error <= tolerance {
            return Ok(Some(error));
        }
        Err(format!(
            "wrong: relative error {error:.2e}, at most {tolerance:.0e}"
        ))
    }

    fn timed(&self, target: &Target, work: &Work<'_>) -> Result<Times, String> {
        let effort = self.args.effort();
        match target {
            Target::Cube(device) => {
                let times = timing::measure(device, work.sets, &work.launch, &effort)?;
                device.settle(&work.outputs)?;
                Ok(times)
            }
            #[cfg(feature = "flex")]
            Target::Flex(device) => {
                let sync = || device.sync().map_err(|error| format!("{error:?}"));
                timing::measure_wall(work.sets, &work.launch, &sync, &effort)
            }
        }
    }

    /// The row with its share of the ceiling and its ratio to the first device.
    fn compared(&self, mut row: KernelRow) -> KernelRow {
        let (reached, ceiling) = match row.bound {
            Bound::Operations => (
                row.flops_per_second(),
                self.ceilings.matmul_flops_per_second,
            ),
            Bound::Bytes => (row.bytes_per_second(), self.ceilings.copy_bytes_per_second),
        };
        row.fraction = reached
            .zip(ceiling)
            .map(|(reached, ceiling)| reached / ceiling);
        let first = self.args.device.first();
        if first != Some(&row.device) {
            let same = |other: &&KernelRow| Some(&other.device) == first && other.name == row.name;
            let other = self.report.rows.iter().find(same);
            let us = |row: &KernelRow| row.times.as_ref().ok().map(|times| times.us);
            row.ratio = other
                .and_then(us)
                .zip(us(&row))
                .map(|(first, this)| first / this);
        }
        row
    }

    fn finish_header(&mut self, bench: &str) {
        self.report.header = header(bench, &self.args.commit, &self.devices);
        let more = [
            ("dtype", json!(self.args.dtype.name())),
            ("page", json!(self.page())),
            ("quick", json!(self.args.quick)),
        ];
        for (key, value) in more {
            self.report.header.insert(key.to_owned(), value);
        }
    }
}

/// What every report says of its run: bench, date, commit, command, devices.
pub fn header(bench: &str, commit: &str, devices: &[Value]) -> Map<String, Value> {
    let command: Vec<String> = std::env::args().skip(1).collect();
    let facts = [
        ("bench", json!(bench)),
        ("date", json!(date(SystemTime::now()))),
        ("commit", json!(commit)),
        ("command", json!(format!("{bench} {}", command.join(" ")))),
        ("devices", json!(devices)),
    ];
    let facts = facts.into_iter();
    facts.map(|(key, value)| (key.to_owned(), value)).collect()
}

/// Year, month and day in UTC. Counts days from 1 March of the year 0, so that a leap day ends a year.
fn date(now: SystemTime) -> String {
    let seconds = now
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_secs());
    let days = seconds / 86_400 + 719_468;
    let era = days / 146_097;
    let day_of_era = days % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn dates_know_leap_years() {
        let at = |seconds| date(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01");
        assert_eq!(at(951_782_400), "2000-02-29");
        assert_eq!(at(1_709_251_199), "2024-02-29");
        assert_eq!(at(1_796_000_000), "2026-11-30");
    }
}
