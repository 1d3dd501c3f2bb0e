//! Links the benches, and the tests of the library, so that kernels compiled at run time find `__truncsfbf2` in them.
//!
//! On hosts without bf16 instructions the CPU runtime calls that conversion by name, and older C runtimes do not export
//! it. `src/kernel/bf16.rs` defines it.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo::rustc-link-arg=-Wl,--export-dynamic-symbol=__truncsfbf2");
    }
}
