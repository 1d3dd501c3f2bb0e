//! Numbers in eight bits: e4m3, a sign, four bits of exponent and three of mantissa, four codes in a word.
//!
//! The largest number is 448, there is no infinity, and 0x7f and 0xff are NaN. Every number is exact in f16 and in bf16.
//!
//! Where instructions of NVIDIA GPUs may be used, those convert; elsewhere integer arithmetic, which gives the same codes.
//!
//! # Source
//! Micikevicius et al. 2022, arXiv:2209.05433; "OCP 8-bit Floating Point Specification", 2023.

#![allow(
    clippy::identity_op,
    reason = "what is added makes a value of a variable: see the rules of `hopper`"
)]

use cubecl::prelude::*;

/// Codes in a word.
pub(crate) const WORD: usize = 4;

/// The numbers of some codes.
#[cube]
fn decode<N: Size>(codes: Vector<u32, N>) -> Vector<f32, N> {
    let low = codes & Vector::new(0x7fu32);
    // Exponents are counted from 7, those of f32 from 127.
    let normal = (low << Vector::new(20u32)) + Vector::new(0x3c00_0000u32);
    // Below the smallest exponent come multiples of 2⁻⁹. Not by way of small numbers in f32, which some devices take for 0.
    let small = Vector::<f32, N>::cast_from(low) * Vector::new(0.001_953_125f32);
    let small = Vector::<u32, N>::reinterpret(small);
    let size = select_many(low.less_than(&Vector::new(8u32)), small, normal);
    let nan = Vector::new(0x7fc0_0000u32);
    let size = select_many(low.equal(&Vector::new(0x7fu32)), nan, size);
    let sign = (codes & Vector::new(0x80u32)) << Vector::new(24u32);
    Vector::<f32, N>::reinterpret(size | sign)
}

/// The codes nearest to some numbers, of two that are as near the even one; the largest of their sign past that. 0x7f for NaN.
#[cube]
fn encode<N: Size>(numbers: Vector<f32, N>) -> Vector<u32, N> {
    let bits = Vector::<u32, N>::reinterpret(numbers);
    let size = bits & Vector::new(0x7fff_ffffu32);
    let odd = (size >> Vector::new(20u32)) & Vector::new(1u32);
    let normal =
        ((size + Vector::new(0x7_ffffu32) + odd) >> Vector::new(20u32)) - Vector::new(960u32);
    // The last bit of what lies between 2¹⁴ and 2¹⁵ in f32 is 2⁻⁹.
    let small = Vector::<f32, N>::reinterpret(size) + Vector::new(16_384.0f32);
    let small = Vector::<u32, N>::reinterpret(small) - Vector::new(0x4680_0000u32);
    let code = select_many(size.less_than(&Vector::new(0x3c80_0000u32)), small, normal);
    let is_large = size.greater_equal(&Vector::new(0x43e0_0000u32));
    let code = select_many(is_large, Vector::new(0x7eu32), code);
    let code = code | ((bits >> Vector::new(24u32)) & Vector::new(0x80u32));
    let is_nan = size.greater_than(&Vector::new(0x7f80_0000u32));
    select_many(is_nan, Vector::new(0x7fu32), code)
}

/// `count` words as numbers.
#[cube]
pub(crate) fn decode_words<M: Size, N: Size>(
    words: Vector<u32, M>,
    #[comptime] count: usize,
    #[comptime] inline_ptx: bool,
) -> Vector<f32, N> {
    if comptime!(inline_ptx) {
        let mut numbers = Vector::<f32, N>::empty();
        #[unroll]
        for at in 0..count {
            let word = words.extract(at);
            let low = decode_pair(word, false);
            let high = decode_pair(word, true);
            numbers.insert(comptime!(WORD * at), low.extract(0usize));
            numbers.insert(comptime!(WORD * at + 1), low.extract(1usize));
            numbers.insert(comptime!(WORD * at + 2), high.extract(0usize));
            numbers.insert(comptime!(WORD * at + 3), high.extract(1usize));
        }
        numbers
    } else {
        let mut codes = Vector::<u32, N>::empty();
        #[unroll]
        for at in 0..count {
            let word = words.extract(at);
            #[unroll]
            for nth in 0..WORD {
                let code = (word >> comptime!(8 * nth as u32)) & 0xff;
                codes.insert(comptime!(WORD * at + nth), code);
            }
        }
        decode::<N>(codes)
    }
}

/// `count` codes of a word, from code `first` on.
#[cube]
fn decode_part<N: Size>(word: u32, first: usize, #[comptime] count: usize) -> Vector<f32, N> {
    let rest = word >> (8 * first as u32);
    let mut codes = Vector::<u32, N>::empty();
    #[unroll]
    for nth in 0..count {
        codes.insert(nth, (rest >> comptime!(8 * nth as u32)) & 0xff);
    }
    decode::<N>(codes)
}

/// Numbers as `count` words.
#[cube]
pub(crate) fn encode_words<N: Size, M: Size>(
    numbers: Vector<f32, N>,
    #[comptime] count: usize,
    #[comptime] inline_ptx: bool,
) -> Vector<u32, M> {
    let mut words = Vector::<u32, M>::empty();
    if comptime!(inline_ptx) {
        #[unroll]
        for at in 0..count {
            let word = encode_four(
                numbers.extract(comptime!(WORD * at)),
                numbers.extract(comptime!(WORD * at + 1)),
                numbers.extract(comptime!(WORD * at + 2)),
                numbers.extract(comptime!(WORD * at + 3)),
            );
            words.insert(at, word);
        }
    } else {
        let codes = encode::<N>(numbers);
        #[unroll]
        for at in 0..count {
            let mut word = codes.extract(comptime!(WORD * at));
            #[unroll]
            for nth in 1..WORD {
                let code = codes.extract(comptime!(WORD * at + nth));
                word |= code << comptime!(8 * nth as u32);
            }
            words.insert(at, word);
        }
    }
    words
}

/// What numbers are multiplied with before they become codes. A scale without a finite inverse stores zeros.
#[cube]
pub(crate) fn inverse_scale(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    let bits = u32::reinterpret(inverse);
    select((bits & 0x7fff_ffff) == 0x7f80_0000, 0.0f32, inverse)
}

/// The codes in half a word as two numbers.
#[cube]
fn decode_pair(word: u32, #[comptime] high: bool) -> Vector<f32, Const<2>> {
    // As a value, not as the address of a variable.
    let word = word + 0;
    let half = comptime!(if high { "high" } else { "low" });
    let numbers: Vector<f32, Const<2>>;
    gpu_asm!(
        "{{ .reg .b16 low, high, a, b; .reg .b32 pair; .reg .f32 x, y; .reg .b64 both; mov.b32 {{low, high}}, {word}; cvt.rn.f16x2.e4m3x2 pair, {half}; mov.b32 {{a, b}}, pair; cvt.f32.f16 x, a; cvt.f32.f16 y, b; mov.b64 both, {{x, y}}; mov.b64 {numbers}, both; }}",
        word = in(_) word,
        numbers = out(_) numbers,
        options(pure, nomem)
    );
    numbers
}

/// The codes in half a word as two elements of f16 in a register.
#[cube]
pub(crate) fn code_pair(word: u32, #[comptime] high: bool) -> u32 {
    // As a value, not as the address of a variable.
    let word = word + 0;
    let half = comptime!(if high { "high" } else { "low" });
    let pair: u32;
    gpu_asm!(
        "{{ .reg .b16 low, high; mov.b32 {{low, high}}, {word}; cvt.rn.f16x2.e4m3x2 {pair}, {half}; }}",
        word = in(_) word,
        pair = out(_) pair,
        options(pure, nomem)
    );
    pair + 0
}

/// Four numbers as a word.
#[cube]
fn encode_four(first: f32, second: f32, third: f32, fourth: f32) -> u32 {
    // As values, not as addresses of variables.
    let first = first * 1.0;
    let second = second * 1.0;
    let third = third * 1.0;
    let fourth = fourth * 1.0;
    let word: u32;
    gpu_asm!(
        "{{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {second}, {first}; cvt.rn.satfinite.e4m3x2.f32 high, {fourth}, {third}; mov.b32 {word}, {{low, high}}; }}",
        first = in(_) first,
        second = in(_) second,
        third = in(_) third,
        fourth = in(_) fourth,
        word = out(_) word,
        options(pure, nomem)
    );
    word + 0
}

/// How elements of heads become codes: in pieces of whole words that a unit reads in some vectors.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(crate) struct Pieces {
    /// Elements of a vector that is read.
    pub(crate) vector: usize,
    /// Elements of a piece.
    pub(crate) elements: usize,
    /// Whether instructions of NVIDIA GPUs convert.
    pub(crate) inline_ptx: bool,
}

impl Pieces {
    /// The pieces of what is read in vectors of `vector` elements: one of them each, or as many as fill a word.
    pub(crate) fn new(vector: usize, inline_ptx: bool) -> Self {
        Self {
            vector,
            elements: vector.max(WORD),
            inline_ptx,
        }
    }

    /// Vectors of a piece.
    pub(crate) fn vectors(self) -> usize {
        self.elements / self.vector
    }

    /// Words of a piece.
    pub(crate) fn words(self) -> usize {
        self.elements / WORD
    }
}

/// The piece of a tensor that begins at vector `at`.
#[cube]
pub(crate) fn piece_at<F: Float, N: Size, P: Size>(
    source: &[Vector<F, N>],
    at: usize,
    #[comptime] pieces: Pieces,
) -> Vector<f32, P> {
    if comptime!(pieces.vectors() == 1) {
        Vector::<f32, P>::cast_from(source[at])
    } else {
        let mut numbers = Vector::<f32, P>::empty();
        #[unroll]
        for nth in 0..comptime!(pieces.vectors()) {
            let part = source[at + nth];
            #[unroll]
            for i in 0..comptime!(pieces.vector) {
                let number = f32::cast_from(part.extract(i));
                numbers.insert(comptime!(nth * pieces.vector + i), number);
            }
        }
        numbers
    }
}

/// How codes are read as elements of heads: in vectors of some words, or several vectors out of one word.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(crate) struct Codes {
    /// Elements of a vector.
    pub(crate) vector: usize,
    /// Whether instructions of NVIDIA GPUs convert.
    pub(crate) inline_ptx: bool,
}

impl Codes {
    /// Words of what is read at a time.
    pub(crate) fn words(self) -> usize {
        self.vector.div_ceil(WORD)
    }

    /// Codes of what is read at a time.
    pub(crate) fn per_read(self) -> usize {
        self.words() * WORD
    }

    /// Vectors of what is read at a time.
    fn vectors(self) -> usize {
        self.per_read() / self.vector
    }
}

/// Vector `nth` of the elements whose codes begin at `from`, in words of `E`, which is u32.
#[cube]
pub(crate) fn vector_at<E: Numeric, M: Size, N: Size>(
    source: &[Vector<E, M>],
    from: usize,
    nth: usize,
    #[comptime] codes: Codes,
) -> Vector<f32, N> {
    if comptime!(codes.vectors() == 1) {
        let words = Vector::<u32, M>::cast_from(source[from + nth]);
        decode_words::<M, N>(words, comptime!(codes.words()), comptime!(codes.inline_ptx))
    } else {
        let vectors = comptime!(codes.vectors());
        let word = u32::cast_from(source[from + nth / vectors].extract(0usize));
        let first = nth % vectors * comptime!(codes.vector);
        decode_part::<N>(word, first, comptime!(codes.vector))
    }
}
