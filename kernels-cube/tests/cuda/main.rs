//! The CUDA form of every kernel, compiled without a GPU.
//!
//! Each op is called as a user would, on a device that has the properties of an H200 and no
//! hardware. What it would launch is compiled to CUDA C++ by CubeCL, to PTX by NVRTC and to machine
//! code by ptxas, and the machine code is held against what is promised of it: registers, spills,
//! local memory, tensor cores.
//!
//! - `device.rs`: the device
//! - `calls.rs`: the calls and their promises
//! - `promise.rs`: what can be promised
//! - `tools.rs`: NVRTC, ptxas and nvdisasm
//!
//! NVIDIA's part runs where `BURN_PAGED_CUDA_TOOLS` names the folder of `cargo xtask cuda-tools`.
//! With `BURN_PAGED_CUDA_CODE` naming a folder, sources, PTX and assembly stay there; with
//! `BURN_PAGED_CUDA_ONLY`, only calls run whose name holds that text.
#![allow(clippy::print_stdout, reason = "the table of what was compiled")]

mod calls;
mod device;
mod promise;
mod tools;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use burn_paged_kernels::Launcher;

use calls::Call;
use device::Launched;
use tools::{Tools, Usage};

#[test]
fn every_kernel_keeps_its_promises_on_sm_90a() {
    let only = std::env::var("BURN_PAGED_CUDA_ONLY").unwrap_or_default();
    let mut calls = calls::all();
    calls.retain(|call| call.name.contains(&only));
    assert!(!calls.is_empty(), "no name of a call holds {only:?}");
    let (kernels, mut failures) = launch(&calls);
    println!("{} calls launch {} kernels", calls.len(), kernels.len());

    match std::env::var_os("BURN_PAGED_CUDA_TOOLS") {
        None => println!("skipped NVRTC and ptxas: BURN_PAGED_CUDA_TOOLS names no folder"),
        Some(folder) => {
            let tools = Tools::load(Path::new(&folder)).expect("tools that load");
            let usages = compile(&tools, &kernels, &calls);
            println!("{HEAD}");
            for (kernel, usage) in kernels.iter().zip(usages) {
                failures.extend(report(kernel, usage, &calls));
            }
        }
    }
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

/// A kernel, and the calls that launch it.
struct Kernel {
    launched: Launched,
    calls: Vec<usize>,
}

impl Kernel {
    /// Its name in the table: the first call that launches it.
    fn name<'a>(&self, calls: &'a [Call]) -> &'a str {
        &calls[self.calls[0]].name
    }

    /// Name of its files, without an extension: the call for readers, the instance to tell apart
    /// what one call launches.
    fn stem(&self, calls: &[Call]) -> String {
        let name = format!("{} {}", self.name(calls), self.launched.entry);
        let words = name.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
        words.join("-")
    }
}

/// Runs all calls. Gives the distinct kernels in order of launch, and what failed.
fn launch(calls: &[Call]) -> (Vec<Kernel>, Vec<String>) {
    let (client, launches) = device::client();
    let launcher = Launcher::new(client);
    let mut kernels: Vec<Kernel> = Vec::new();
    let mut known: HashMap<String, usize> = HashMap::new();
    let mut failures = Vec::new();
    for (index, call) in calls.iter().enumerate() {
        let mut fail = |what: String| failures.push(format!("{}: {what}", call.name));
        if let Err(error) = call.run(&launcher) {
            fail(error.to_string());
        }
        let mut launched_here = Vec::new();
        for launched in launches.take(launcher.client()) {
            match launched {
                Ok(launched) => {
                    launched_here.push(launched.clone());
                    let known = known
                        .entry(launched.source.clone())
                        .or_insert(kernels.len());
                    if *known == kernels.len() {
                        let calls = Vec::new();
                        kernels.push(Kernel { launched, calls });
                    }
                    kernels[*known].calls.push(index);
                }
                Err(error) => fail(error),
            }
        }
        let promised = call.promise.kernels;
        let as_promised = launched_here.len() == promised.len()
            && launched_here
                .iter()
                .zip(promised)
                .all(|(kernel, name)| kernel.is(name));
        if !as_promised {
            let names: Vec<&str> = launched_here.iter().map(Launched::kernel).collect();
            fail(format!("launched {names:?}, promised {promised:?}"));
        }
    }
    (kernels, failures)
}

/// Compiles all kernels, on as many threads as there are cores.
fn compile(tools: &Tools, kernels: &[Kernel], calls: &[Call]) -> Vec<Result<Usage, String>> {
    let folder = match std::env::var_os("BURN_PAGED_CUDA_CODE") {
        Some(folder) => PathBuf::from(folder),
        None => Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda"),
    };
    std::fs::create_dir_all(&folder).expect("a folder to write into");
    println!("sources, PTX and assembly in {}", folder.display());
    let mut usages = vec![Err("not compiled".to_owned()); kernels.len()];
    let todo = Mutex::new(kernels.iter().zip(&mut usages));
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let next = todo.lock().expect("no panic while taking").next();
                    let Some((kernel, usage)) = next else { break };
                    let stem = folder.join(kernel.stem(calls));
                    *usage = tools.usage(&kernel.launched.source, &stem);
                }
            });
        }
    });
    usages
}

const HEAD: &str = "\
regs  shared  local  spills  HMMA  HGMMA  units  kernel                        call";

/// One line of the table. Gives the promises that do not hold.
fn report(kernel: &Kernel, usage: Result<Usage, String>, calls: &[Call]) -> Vec<String> {
    let name = kernel.name(calls);
    let launched = &kernel.launched;
    let usage = match usage {
        Ok(usage) => usage,
        Err(error) => return vec![format!("{name}: {error}")],
    };
    println!(
        "{:>4}  {:>6}  {:>5}  {:>6}  {:>4}  {:>5}  {:>5}  {:<28}  {name}",
        usage.registers,
        launched.shared_bytes,
        usage.local_bytes,
        usage.spill_bytes,
        usage.hmma,
        usage.hgmma,
        launched.units,
        launched.kernel(),
    );
    let by_call = kernel.calls.iter().map(|&index| &calls[index]);
    by_call
        .flat_map(|call| {
            let broken = call.promise.broken(launched.kernel(), &usage);
            broken
                .into_iter()
                .map(|what| format!("{}: {what}", call.name))
        })
        .collect()
}
