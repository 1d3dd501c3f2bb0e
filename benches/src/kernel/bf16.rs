//! The conversion from f32 to bf16 that kernels compiled for the CPU runtime may call by name; see `build.rs`.

/// Rounds to nearest, ties to even; the bits of the result are the low half of the register.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[unsafe(no_mangle)]
extern "C" fn __truncsfbf2(x: f32) -> f32 {
    f32::from_bits(u32::from(half::bf16::from_f32(x).to_bits()))
}

/// Keeps the conversion in the binary, which nothing calls before a kernel does.
pub(super) fn keep() {
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    std::hint::black_box(__truncsfbf2 as extern "C" fn(f32) -> f32);
}
