//! How long a launch takes on the device, and on the host.
//!
//! A sample is a window around many launches, whose inputs take turns. On a GPU the device's own clock times the window;
//! where it can, the launches are also recorded once and replayed, which shows what the device needs when no host is in
//! the way. On a processor the window is wall-clock time up to a sync.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cubecl::future::block_on;
use serde_json::{Value, json};

use super::CubeDevice;
use super::device::one_line;
use crate::median;

/// A launch on the inputs of one set.
pub(super) type Launch<'a> = dyn Fn(usize) -> Result<(), String> + Sync + 'a;

/// Launches of one recording, at most.
const MAX_RECORDED: usize = 256;
/// Calls of a burst on an idle device: one is at most six tasks, scratch memory and a second launch included, and the runtime's queue
/// takes 32, so that the caller never waits.
const BURST: usize = 5;
/// Bursts, of which the median counts.
const BURSTS: usize = 9;
/// Seconds per launch from which on no gap between launches shows, so that nothing is recorded.
const LONG_LAUNCH: f64 = 30e-3;

/// How much is measured.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Windows, of which the median counts.
    pub samples: usize,
    /// Seconds of one window, at least; a launch that takes longer makes a window of its own.
    pub window: f64,
    /// Seconds of all windows of a case; at least three are taken, however long they are.
    pub budget: f64,
    /// Whether launches are also recorded and replayed, where the device can.
    pub graphs: bool,
}

/// The times of one launch, in microseconds.
#[derive(Debug, Clone, PartialEq)]
pub struct Times {
    /// The figure that counts: replayed, if there is such a time, else queued.
    pub us: f64,
    /// The fastest window of that kind.
    pub us_min: f64,
    /// The slowest window of that kind.
    pub us_max: f64,
    /// Window around queued launches over their number: the device, or the host if that is slower.
    pub us_queued: f64,
    /// Window around recorded launches over their number.
    pub us_graph: Option<f64>,
    /// Host time to queue one launch. On a GPU one thread does all of it: checks, plan, the runtime's and the driver's part.
    pub us_host: f64,
    /// Host time of who calls a launch: checks, plan, what the kernel needs to know, and handing it over to the runtime's
    /// thread. `None` where a launch returns when its work is done.
    pub us_caller: Option<f64>,
    /// Whether a launch returns when its work is done, so that the host's time is that of the work.
    pub synchronous: bool,
    /// Launches of one window.
    pub launches: usize,
    /// Windows.
    pub samples: usize,
    /// Why there is no replayed time, where there could be.
    pub graph_error: Option<String>,
}

impl Times {
    /// The spread of the windows: the slowest less the fastest, over the median.
    pub fn spread(&self) -> f64 {
        (self.us_max - self.us_min) / self.us
    }

    /// Whether `us` shows how fast the host queues rather than how fast the device is.
    pub fn is_host_bound(&self) -> bool {
        !self.synchronous && self.us_graph.is_none() && self.us_host > 0.8 * self.us_queued
    }

    /// The times for other programs.
    pub fn to_json(&self) -> Value {
        json!({
            "us": self.us,
            "us_min": self.us_min,
            "us_max": self.us_max,
            "spread": self.spread(),
            "us_queued": self.us_queued,
            "us_graph": self.us_graph,
            "us_host": self.us_host,
            "us_caller": self.us_caller,
            "host_bound": self.is_host_bound(),
            "launches": self.launches,
            "samples": self.samples,
            "graph_error": self.graph_error,
        })
    }
}

/// One window: seconds per launch on the device, and on the host until all were queued.
struct Window {
    device: f64,
    host: f64,
}

/// Times `launch`, whose argument counts through `sets`.
pub(super) fn measure(
    device: &CubeDevice,
    sets: usize,
    launch: &Launch<'_>,
    effort: &Effort,
) -> Result<Times, String> {
    let next = AtomicUsize::new(0);
    let queue = |count: usize| -> Result<Duration, String> {
        let begin = Instant::now();
        for _ in 0..count {
            launch(next.fetch_add(1, Ordering::Relaxed) % sets)?;
        }
        Ok(begin.elapsed())
    };
    let window = |count: usize| match device.is_cpu() {
        true => wall(&|| queue(count), || device.sync(), count),
        false => profiled(device, &|| queue(count), count),
    };
    let mut times = sample(effort, window, || {
        queue(sets.min(4))?;
        device.sync()
    })?;
    let bursts = (0..BURSTS)
        .map(|_| {
            device.sync()?;
            Ok(queue(BURST)?.as_secs_f64() / BURST as f64)
        })
        .collect::<Result<Vec<f64>, String>>()?;
    device.sync()?;
    times.us_caller = Some(1e6 * median(&bursts));
    if effort.graphs && device.has_graphs() && times.us_queued < LONG_LAUNCH * 1e6 {
        match replayed(device, sets, launch, &times, effort) {
            Ok(windows) => times.take_graph(&windows),
            Err(error) => times.graph_error = Some(error),
        }
    }
    Ok(times)
}

/// Times `launch`, which returns when its work is done, by the wall clock up to the return of `sync`.
#[cfg(feature = "flex")]
pub(super) fn measure_wall(
    sets: usize,
    launch: &Launch<'_>,
    sync: &dyn Fn() -> Result<(), String>,
    effort: &Effort,
) -> Result<Times, String> {
    let next = AtomicUsize::new(0);
    let queue = |count: usize| -> Result<Duration, String> {
        let begin = Instant::now();
        for _ in 0..count {
            launch(next.fetch_add(1, Ordering::Relaxed) % sets)?;
        }
        Ok(begin.elapsed())
    };
    let times = sample(
        effort,
        |count| wall(&|| queue(count), sync, count),
        || {
            queue(1)?;
            sync()
        },
    )?;
    Ok(Times {
        synchronous: true,
        ..times
    })
}

/// Warms up, finds how many launches make a window, and takes the windows.
fn sample(
    effort: &Effort,
    window: impl Fn(usize) -> Result<Window, String>,
    warm_up: impl Fn() -> Result<(), String>,
) -> Result<Times, String> {
    warm_up()?;
    let mut one = window(1)?.device.max(1e-6);
    if one < effort.window {
        // The first window alone knows mostly the latency of a launch.
        let count = (effort.window / one).ceil().clamp(3.0, 50.0);
        one = window(count as usize)?.device.max(1e-6);
    }
    let launches = (effort.window / one).ceil().clamp(1.0, 100.0) as usize;
    let fitting = effort.budget / (one * launches as f64);
    let samples = (fitting as usize).clamp(3.min(effort.samples), effort.samples);
    let windows = (0..samples)
        .map(|_| window(launches))
        .collect::<Result<Vec<_>, _>>()?;
    let device: Vec<f64> = windows.iter().map(|window| window.device * 1e6).collect();
    let host: Vec<f64> = windows.iter().map(|window| window.host * 1e6).collect();
    Ok(Times {
        us: median(&device),
        us_min: device.iter().copied().fold(f64::INFINITY, f64::min),
        us_max: device.iter().copied().fold(0.0, f64::max),
        us_queued: median(&device),
        us_graph: None,
        us_host: median(&host),
        us_caller: None,
        synchronous: false,
        launches,
        samples,
        graph_error: None,
    })
}

/// A window by the wall clock, up to a sync.
fn wall(
    queue: &dyn Fn() -> Result<Duration, String>,
    sync: impl Fn() -> Result<(), String>,
    count: usize,
) -> Result<Window, String> {
    let begin = Instant::now();
    let host = queue()?;
    sync()?;
    Ok(Window {
        device: begin.elapsed().as_secs_f64() / count as f64,
        host: host.as_secs_f64() / count as f64,
    })
}

/// A window by the device's clock. The closure runs on the thread that owns the device, so that every launch reaches the
/// driver as it is queued, and nothing waits in a buffer when the window closes.
fn profiled(
    device: &CubeDevice,
    queue: &(dyn Fn() -> Result<Duration, String> + Sync),
    count: usize,
) -> Result<Window, String> {
    let (host, duration) = device
        .client()
        .profile(queue, "bench")
        .map_err(|error| one_line(&error))?;
    let host = host?;
    let ticks = block_on(duration.resolve()).ok_or("the device timed nothing")?;
    Ok(Window {
        device: ticks.duration().as_secs_f64() / count as f64,
        host: host.as_secs_f64() / count as f64,
    })
}

impl Times {
    fn take_graph(&mut self, windows: &[f64]) {
        let us: Vec<f64> = windows.iter().map(|seconds| seconds * 1e6).collect();
        self.us = median(&us);
        self.us_graph = Some(self.us);
        self.us_min = us.iter().copied().fold(f64::INFINITY, f64::min);
        self.us_max = us.iter().copied().fold(0.0, f64::max);
        self.samples = us.len();
    }
}

/// Seconds per launch of windows around a replay of recorded launches.
fn replayed(
    device: &CubeDevice,
    sets: usize,
    launch: &Launch<'_>,
    queued: &Times,
    effort: &Effort,
) -> Result<Vec<f64>, String> {
    let client = device.client();
    let count = recorded_launches(sets, queued.us_queued * 1e-6);
    let failed = |what: &str, error: &dyn std::fmt::Debug| format!("{what}: {}", one_line(error));
    let record = || -> Result<(), String> {
        (0..sets.min(2)).try_for_each(launch)?;
        device.sync()?;
        client
            .start_capture()
            .map_err(|error| failed("start of capture", &error))?;
        (0..count).try_for_each(|i| launch(i % sets))
    };
    client
        .graph_prepare()
        .map_err(|error| failed("preparation", &error))?;
    let recorded = record();
    // Also ends a capture that was only prepared, and one whose launches were refused.
    let graph = client.stop_capture();
    recorded?;
    let graph = graph.map_err(|error| failed("capture", &error))?;
    let replay = || -> Result<f64, String> {
        let run = || {
            // SAFETY: the caller holds every tensor of the recorded launches, and nothing else runs.
            unsafe { graph.replay() }.map_err(|error| one_line(&error))
        };
        let (result, duration) = client
            .profile(run, "replay")
            .map_err(|error| one_line(&error))?;
        result?;
        let ticks = block_on(duration.resolve()).ok_or("the device timed no replay")?;
        Ok(ticks.duration().as_secs_f64() / count as f64)
    };
    replay()?;
    let one = replay()?;
    let fitting = effort.budget / (one * count as f64).max(1e-6);
    let samples = (fitting as usize).clamp(3.min(effort.samples), effort.samples);
    (0..samples).map(|_| replay()).collect()
}

/// Whole rounds of all sets, until a replay takes a millisecond.
fn recorded_launches(sets: usize, seconds: f64) -> usize {
    let mut count = sets;
    while count < MAX_RECORDED && count as f64 * seconds < 1e-3 {
        count += sets;
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    fn effort(samples: usize) -> Effort {
        Effort {
            samples,
            window: 2e-3,
            budget: 1.0,
            graphs: true,
        }
    }

    fn fixed(device: f64, host: f64) -> impl Fn(usize) -> Result<Window, String> {
        move |_| Ok(Window { device, host })
    }

    #[test]
    fn short_launches_share_a_window_and_long_ones_do_not() {
        let times = sample(&effort(9), fixed(100e-6, 1e-6), || Ok(())).unwrap();
        assert_eq!((times.launches, times.samples), (20, 9));
        assert!((times.us - 100.0).abs() < 1e-9 && !times.is_host_bound());
        let times = sample(&effort(9), fixed(0.3, 1e-6), || Ok(())).unwrap();
        assert_eq!((times.launches, times.samples), (1, 3));
    }

    #[test]
    fn a_host_that_queues_slower_than_the_device_runs_is_named() {
        let mut times = sample(&effort(9), fixed(10e-6, 9e-6), || Ok(())).unwrap();
        assert!(times.is_host_bound());
        let synchronous = Times {
            synchronous: true,
            ..times.clone()
        };
        assert!(!synchronous.is_host_bound());
        times.take_graph(&[4e-6, 2e-6, 3e-6]);
        assert!(!times.is_host_bound());
        assert!((times.us - 3.0).abs() < 1e-9 && (times.us_queued - 10.0).abs() < 1e-9);
        assert!((times.spread() - 2.0 / 3.0).abs() < 1e-9);
    }

    #[test]
    fn a_recording_holds_whole_rounds() {
        assert_eq!(recorded_launches(7, 1.0), 7);
        assert_eq!(recorded_launches(7, 100e-6), 14);
        assert_eq!(recorded_launches(7, 1e-9), 259);
        assert_eq!(recorded_launches(300, 1e-9), 300);
    }
}
