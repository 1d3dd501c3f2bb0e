//! The conversion from f32 to bf16 that compiled kernels may call by name; see `build.rs`.

/// Rounds to nearest, ties to even; the bits of the result are the low half of the register.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[unsafe(no_mangle)]
extern "C" fn __truncsfbf2(x: f32) -> f32 {
    f32::from_bits(u32::from(half::bf16::from_f32(x).to_bits()))
}

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[used]
static KEEP: extern "C" fn(f32) -> f32 = __truncsfbf2;
