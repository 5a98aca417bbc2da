//! Products of one activation row on vectors of 32 bytes: packed codes against rearranged
//! activations, all in registers.
//!
//! Two ways of unpacking, both without a shuffle per code:
//! - *Planes* (2 and 4 bits): plane `k` of 32 packed bytes is bits `k * bits ..` of every byte, so
//!   byte `b` gives code `b * 8 / bits + k`. `maddubs` multiplies it with activations in that
//!   order; sums stay i16.
//! - *Pairs* (3, 5, 6 and 8 bits): two neighbouring codes lie in two neighbouring bytes, which one
//!   shuffle per 32 codes brings to a 16-bit lane. The lower code starts at a bit that depends on
//!   the lane alone. It stays there, and the activation is shifted instead, so that every product
//!   has the same factor: a power of two that the exact sum is divided by at the end. `madd` gives
//!   i32 sums.
//!
//! Eight rows' sums are then added down to one vector, in i16 as long as nothing can overflow.
//!
//! With dot instructions all sums are i32, and 8 bits are one plane. Products of a table's values,
//! which are signed, are i32 too. With VBMI 5 and 6 bits are unpacked to one plane as well, in
//! three operations for 32 codes.

use std::arch::x86_64::*;

use loaf_formats::block::TABLE;

use super::super::rows::{CodeRows, PlaneRows};
use super::super::simd::{Ahead, Simd, TABLE_LUT, layout};
use super::products::{MADD, VBMI, bytes, in_order, words};
use super::{Avx2, E2M1_LUT, EVENS_ODDS, both, permute32, transpose8};

/// Groups that [`dots`] takes at once: those that share 32 packed bytes.
#[inline(always)]
pub(super) const fn parts<const DOT: u8>(kind: u8, group: usize) -> usize {
    let bytes = group * layout::bits(kind) / 8;
    match layout::bits(kind) {
        2 | 4 if bytes < 32 => 32 / bytes,
        // The halves of 32 codes.
        3 | 5 | 6 if group == 16 => 2,
        _ => 1,
    }
}

/// Whether products are made by planes, not by pairs.
#[inline(always)]
const fn is_planes<const DOT: u8>(kind: u8) -> bool {
    matches!(layout::bits(kind), 2 | 4) || kind == layout::Q8 && DOT != MADD || is_picked::<DOT>(kind)
}

/// Whether VBMI unpacks a plane of its own.
#[inline(always)]
const fn is_picked<const DOT: u8>(kind: u8) -> bool {
    DOT == VBMI && matches!(layout::bits(kind), 5 | 6)
}

/// How VBMI unpacks 32 codes: every eight lanes get the bytes of eight codes, and each then the
/// bits of its own.
struct Picked {
    /// `[0]` of bytes that were loaded where they begin, `[1]` of bytes that end where theirs do.
    bytes: [[u8; 32]; 2],
    bits: [u8; 32],
}

impl Picked {
    const fn new(bits: usize) -> Picked {
        let mut out = Picked { bytes: [[0; 32]; 2], bits: [0; 32] };
        let mut lane = 0;
        while lane < 32 {
            let (eight, i) = (lane / 8, lane % 8);
            if i < bits {
                out.bytes[0][lane] = (eight * bits + i) as u8;
                out.bytes[1][lane] = (32 - 4 * bits + eight * bits + i) as u8;
            }
            out.bits[lane] = (i * bits) as u8;
            lane += 1;
        }
        out
    }

    #[inline(always)]
    const fn of(kind: u8) -> &'static Picked {
        if layout::bits(kind) == 5 { &PICKED_5 } else { &PICKED_6 }
    }
}

static PICKED_5: Picked = Picked::new(5);
static PICKED_6: Picked = Picked::new(6);

/// Bytes of an arranged activation code: pairs have them in 16 bits, and the signed products of a
/// table want magnitudes beside them.
#[inline(always)]
pub(super) const fn arranged_bytes<const DOT: u8>(kind: u8) -> usize {
    if is_planes::<DOT>(kind) && !has_magnitudes::<DOT>(kind) { 1 } else { 2 }
}

/// Whether 32 arranged codes are followed by their magnitudes.
#[inline(always)]
const fn has_magnitudes<const DOT: u8>(kind: u8) -> bool {
    kind == layout::TABLE && DOT == MADD
}

/// How pairs of codes come to 16-bit lanes.
struct Pairs {
    /// The bytes of a lane, for each vector of two pieces: sixteen codes in each half. Indices are
    /// into what is loaded.
    bytes: [[u8; 32]; 2],
    /// Where the lower code of each lane is.
    mask: [u16; 16],
    /// What activations are multiplied by.
    factor: [i16; 16],
    /// The binary logarithm of every product's factor.
    shift: i32,
    /// The pieces of each vector, of the four that 64 codes are.
    pieces: [[usize; 2]; 2],
}

impl Pairs {
    /// `from[v][half]` is the byte of 64 codes' packed ones at which that half of vector `v` was
    /// loaded.
    const fn new(bits: usize, pieces: [[usize; 2]; 2], from: [[usize; 2]; 2]) -> Pairs {
        let mut out = Pairs { bytes: [[0x80; 32]; 2], mask: [0; 16], factor: [0; 16], shift: 0, pieces };
        let mut lane = 0;
        while lane < 16 {
            let bit = 2 * bits * (lane % 8);
            let mut v = 0;
            while v < 2 {
                let byte = pieces[v][lane / 8] * 2 * bits + bit / 8 - from[v][lane / 8];
                out.bytes[v][2 * lane] = byte as u8;
                // Where the codes end in their first byte, the second is masked off.
                out.bytes[v][2 * lane + 1] = if byte + 1 < 16 { byte as u8 + 1 } else { 0x80 };
                v += 1;
            }
            out.mask[lane] = ((1 << bits) - 1) << (bit % 8);
            // The greatest of `bit % 8`.
            let most = match bits {
                8 => 0,
                6 => 4,
                _ => 6,
            };
            out.factor[lane] = 1 << (most - bit % 8);
            out.shift = most as i32;
            lane += 1;
        }
        out
    }

    #[inline(always)]
    const fn of(kind: u8) -> &'static Pairs {
        match layout::bits(kind) {
            3 => &PAIRS_3,
            5 => &PAIRS_5,
            6 => &PAIRS_6,
            _ => &PAIRS_8,
        }
    }
}

static PAIRS_3: Pairs = Pairs::new(3, [[0, 1], [2, 3]], [[0, 0], [8, 8]]);
static PAIRS_5: Pairs = Pairs::new(5, [[0, 2], [1, 3]], [[0, 16], [8, 24]]);
static PAIRS_6: Pairs = Pairs::new(6, [[0, 3], [1, 2]], [[0, 32], [8, 24]]);
/// Not loaded by shuffles: the bytes are not looked at.
static PAIRS_8: Pairs = Pairs::new(8, [[0, 1], [2, 3]], [[0, 16], [32, 48]]);
/// Groups of 32 are two pieces.
static HALF_5: Pairs = Pairs::new(5, [[0, 1], [0, 1]], [[0, 4], [0, 4]]);
static HALF_6: Pairs = Pairs::new(6, [[0, 1], [0, 1]], [[0, 8], [0, 8]]);

#[inline(always)]
unsafe fn load(p: *const u8) -> __m256i {
    // SAFETY: 32 valid bytes.
    unsafe { _mm256_loadu_si256(p.cast()) }
}

/// Sixteen bytes from each of two places.
#[inline(always)]
unsafe fn load_two(low: *const u8, high: *const u8) -> __m256i {
    // SAFETY: sixteen valid bytes each.
    unsafe {
        let low = _mm256_castsi128_si256(_mm_loadu_si128(low.cast()));
        _mm256_inserti128_si256::<1>(low, _mm_loadu_si128(high.cast()))
    }
}

#[inline(always)]
unsafe fn shift_right(v: __m256i, bits: usize) -> __m256i {
    // SAFETY: a register operation.
    unsafe { _mm256_srl_epi16(v, _mm_cvtsi32_si128(bits as i32)) }
}

/// The pairs of 32 codes, number `i` of a group of `group` codes packed at `p`, in 16-bit lanes;
/// reads nothing past the group.
#[inline(always)]
unsafe fn pairs(kind: u8, group: usize, p: *const u8, i: usize) -> __m256i {
    let bits = layout::bits(kind);
    // SAFETY: of the group's `group * bits / 8` bytes.
    unsafe {
        if kind == layout::Q8 {
            return load(p.add(32 * i));
        }
        if group <= 32 {
            let (v, bytes) = match bits {
                3 => {
                    let v = _mm_loadl_epi64(p.cast());
                    let v = _mm_insert_epi32::<2>(v, p.add(8).cast::<i32>().read_unaligned());
                    (_mm256_broadcastsi128_si256(v), &PAIRS_3.bytes[0])
                }
                5 => (load_two(p, p.add(4)), &HALF_5.bytes[0]),
                _ => (load_two(p, p.add(8)), &HALF_6.bytes[0]),
            };
            return _mm256_shuffle_epi8(v, load(bytes.as_ptr()));
        }
        let (p, v) = (p.add(i / 2 * 8 * bits), i % 2);
        let loaded = match (bits, v) {
            (3, _) => _mm256_broadcastsi128_si256(_mm_loadu_si128(p.add(8 * v).cast())),
            (6, 0) => load_two(p, p.add(32)),
            _ => load(p.add(8 * v)),
        };
        _mm256_shuffle_epi8(loaded, load(Pairs::of(kind).bytes[v].as_ptr()))
    }
}

/// The products of a row's next groups with arranged `x`, not yet added up: i16 if made by planes
/// without dot instructions, else i32.
#[inline(always)]
unsafe fn row<const DOT: u8>(kind: u8, group: usize, w: *const u8, x: *const i8) -> __m256i {
    let bits = layout::bits(kind);
    // SAFETY: of the groups' bytes, and as many activations.
    unsafe {
        let mut sum = _mm256_setzero_si256();
        if is_picked::<DOT>(kind) {
            let all = parts::<DOT>(kind, group) * group * bits / 8;
            let (picked, mask) = (Picked::of(kind), _mm256_set1_epi8(((1 << bits) - 1) as i8));
            for i in 0..all / (4 * bits) {
                // Nothing past the group is read, nor before it.
                let ends = (i + 1) * 4 * bits;
                let (loaded, which) = if all < 32 {
                    (_mm256_maskz_loadu_epi8((1 << all) - 1, w.cast()), 0)
                } else if i == 0 {
                    (load(w), 0)
                } else {
                    (load(w.add(ends - 32)), 1)
                };
                let eights = _mm256_permutexvar_epi8(load(picked.bytes[which].as_ptr()), loaded);
                let codes = _mm256_multishift_epi64_epi8(load(picked.bits.as_ptr()), eights);
                sum = bytes::<DOT>(sum, _mm256_and_si256(codes, mask), load(x.add(32 * i).cast()));
            }
            return sum;
        }
        if is_planes::<DOT>(kind) {
            let planes = 8 / bits;
            for v in 0..parts::<DOT>(kind, group) * group * bits / 256 {
                let packed = load(w.add(32 * v));
                for k in 0..planes {
                    let mask = _mm256_set1_epi8((0xff >> (8 - bits)) as i8);
                    let codes = _mm256_and_si256(shift_right(packed, k * bits), mask);
                    let codes = match kind {
                        layout::E2M1 | layout::E2M1_HALVES => _mm256_shuffle_epi8(both(&E2M1_LUT), codes),
                        _ => codes,
                    };
                    if has_magnitudes::<DOT>(kind) {
                        let x = x.add(64 * (v * planes + k));
                        sum = table_products(sum, codes, load(x.cast()), load(x.add(32).cast()));
                        continue;
                    }
                    let codes =
                        if kind == layout::TABLE { _mm256_shuffle_epi8(both(&TABLE_LUT), codes) } else { codes };
                    let x = load(x.add(32 * (v * planes + k)).cast());
                    sum = if DOT == MADD {
                        _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, x))
                    } else {
                        bytes::<DOT>(sum, codes, x)
                    };
                }
            }
            return sum;
        }
        let mask = _mm256_loadu_si256(Pairs::of(kind).mask.as_ptr().cast());
        for i in 0..(parts::<DOT>(kind, group) * group) / 32 {
            let pairs = pairs(kind, group, w, i);
            let low = _mm256_and_si256(pairs, mask);
            let high = shift_right(pairs, bits);
            let high = if kind == layout::Q8 { high } else { _mm256_and_si256(high, mask) };
            sum = words::<DOT>(sum, low, load(x.add(64 * i).cast()));
            sum = words::<DOT>(sum, high, load(x.add(64 * i + 32).cast()));
        }
        sum
    }
}

/// The values of the table.
static SIGNED_LUT: [u8; 16] = {
    let mut out = [0; 16];
    let mut i = 0;
    while i < 16 {
        out[i] = TABLE[i] as u8;
        i += 1;
    }
    out
};

/// Adds products of the table's values with activations, of which the magnitudes are given, too.
#[inline(always)]
unsafe fn table_products(sum: __m256i, codes: __m256i, x: __m256i, magnitudes: __m256i) -> __m256i {
    // SAFETY: register operations.
    unsafe {
        let values = _mm256_sign_epi8(_mm256_shuffle_epi8(both(&SIGNED_LUT), codes), x);
        // Both are at most 127, so a pair is at most 32258.
        let pairs = _mm256_maddubs_epi16(magnitudes, values);
        _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
    }
}

/// Levels of addition, of [`fold`]'s, that [`row`]'s i16 sums have room for.
#[inline(always)]
const fn levels<const DOT: u8>(kind: u8, group: usize) -> usize {
    let largest = match kind {
        2 | layout::HALVES_2 => 3,
        layout::E2M1 | layout::E2M1_HALVES => 24,
        _ => 15,
    };
    let products = parts::<DOT>(kind, group) * group / 16;
    match i16::MAX as usize / (products * largest * 127) {
        0 => panic!("sums of products do not fit"),
        1 => 0,
        2 | 3 => 1,
        _ => 2,
    }
}

/// Two vectors' lanes added, one level of a tree: from each, neighbours within what belongs to one
/// group.
#[inline(always)]
unsafe fn fold(a: __m256i, b: __m256i, level: usize, parts: usize, narrow: bool) -> __m256i {
    // SAFETY: register operations.
    unsafe {
        let (x, y) = if parts == 4 {
            let (a, b) = (_mm256_castsi256_ps(a), _mm256_castsi256_ps(b));
            let (x, y) = (_mm256_shuffle_ps::<0x88>(a, b), _mm256_shuffle_ps::<0xdd>(a, b));
            (_mm256_castps_si256(x), _mm256_castps_si256(y))
        } else if level == 0 {
            (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b))
        } else {
            (_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b))
        };
        if narrow { _mm256_add_epi16(x, y) } else { _mm256_add_epi32(x, y) }
    }
}

/// `p`, of which the compiler shall not know where it comes from. With two such addresses eight
/// rows are four registers, since an address has room for a step and for twice a step; the
/// compiler, which knows that all of them move on with the loop, would keep eight on the stack.
#[inline(always)]
fn opaque(mut p: *const u8) -> *const u8 {
    #[expect(clippy::pointers_in_nomem_asm_block, reason = "nothing is read or written")]
    // SAFETY: no instruction at all.
    unsafe {
        std::arch::asm!("/* {0} */", inout(reg) p, options(pure, nomem, nostack, preserves_flags))
    };
    p
}

/// [`super::super::rows::Rows::dots`].
#[inline(always)]
pub(super) unsafe fn dots<const DOT: u8>(
    kind: u8,
    group: usize,
    rows: CodeRows,
    x: *const i8,
    next: Ahead,
) -> [__m256i; 8] {
    let parts = parts::<DOT>(kind, group);
    // Eight rows' codes, eight bits to a byte.
    let bytes = parts * group * layout::bits(kind);
    // None are left to i32 sums.
    let narrow = DOT == MADD && is_planes::<DOT>(kind) && kind != layout::TABLE;
    let levels = if narrow { levels::<DOT>(kind, group) } else { usize::MAX };
    let (low, high) = (opaque(rows.row(0)), opaque(rows.row(4)));
    macro_rules! at {
        ($i:expr) => {
            if $i < 4 { low.wrapping_add($i * rows.step) } else { high.wrapping_add(($i - 4) * rows.step) }
        };
    }
    // SAFETY: of the rows' bytes, and as many activations.
    unsafe {
        macro_rules! widen {
            ($sums:expr, $level:literal) => {
                if levels == $level { _mm256_madd_epi16($sums, _mm256_set1_epi16(1)) } else { $sums }
            };
        }
        macro_rules! one {
            ($i:expr) => {{
                next.ask_share::<Avx2>(bytes, $i);
                in_order(row::<DOT>(kind, group, at!($i), x))
            }};
        }
        // Sums of two rows: a lane for each, in each half; or a lane for each group of each.
        macro_rules! two {
            ($i:literal) => {{
                let a = widen!(one!($i), 0);
                let b = widen!(one!($i + 1), 0);
                widen!(fold(a, b, 0, parts, narrow && levels > 0), 1)
            }};
        }
        // Sums of four rows: a lane for each, in each half.
        macro_rules! four {
            ($a:expr, $b:expr) => {
                widen!(fold($a, $b, 1, parts, narrow && levels > 1), 2)
            };
        }
        let mut out = [_mm256_setzero_si256(); 8];
        if parts == 8 {
            // An i32 for each group.
            for i in 0..8 {
                out[i] = one!(i);
                if narrow {
                    out[i] = _mm256_madd_epi16(out[i], _mm256_set1_epi16(1));
                }
            }
            return transpose8(out);
        }
        if parts == 4 {
            let mut two = [two!(0), two!(2), two!(4), two!(6)];
            if levels == 2 {
                for i in 0..4 {
                    two[i] = _mm256_madd_epi16(two[i], _mm256_set1_epi16(1));
                }
            }
            macro_rules! pick {
                ($i:literal, $which:literal) => {
                    _mm256_castps_si256(_mm256_shuffle_ps::<$which>(
                        _mm256_castsi256_ps(two[$i]),
                        _mm256_castsi256_ps(two[$i + 1]),
                    ))
                };
            }
            let (low, high) = ([pick!(0, 0x88), pick!(2, 0x88)], [pick!(0, 0xdd), pick!(2, 0xdd)]);
            out[0] = _mm256_permute2x128_si256::<0x20>(low[0], low[1]);
            out[1] = _mm256_permute2x128_si256::<0x20>(high[0], high[1]);
            out[2] = _mm256_permute2x128_si256::<0x31>(low[0], low[1]);
            out[3] = _mm256_permute2x128_si256::<0x31>(high[0], high[1]);
            return out;
        }
        let (low, high) = (four!(two!(0), two!(2)), four!(two!(4), two!(6)));
        out[0] = _mm256_permute2x128_si256::<0x20>(low, high);
        out[1] = _mm256_permute2x128_si256::<0x31>(low, high);
        if parts == 1 {
            out[0] = _mm256_add_epi32(out[0], out[1]);
        }
        if !is_planes::<DOT>(kind) {
            for i in 0..parts {
                out[i] = _mm256_sra_epi32(out[i], _mm_cvtsi32_si128(Pairs::of(kind).shift));
            }
        }
        out
    }
}

/// [`super::super::rows::Rows::arrange`].
#[inline(always)]
pub(super) unsafe fn arrange<const DOT: u8>(kind: u8, group: usize, from: *const i8, to: *mut i8) {
    // SAFETY: 128 valid codes, and room for as many.
    unsafe {
        match layout::bits(kind) {
            5 | 6 | 8 if is_planes::<DOT>(kind) => std::ptr::copy_nonoverlapping(from, to, 128),
            2 => {
                // Eight codes of each residue modulo 4, of every 32 codes.
                let mut residues = [0u64; 16];
                for i in 0..4 {
                    let codes = permute32(2, load(from.add(32 * i).cast()));
                    _mm256_storeu_si256(residues.as_mut_ptr().add(4 * i).cast(), codes);
                }
                for (i, eight) in residues.into_iter().enumerate() {
                    to.cast::<u64>().add(i % 4 * 4 + i / 4).write_unaligned(eight);
                }
            }
            4 if has_magnitudes::<DOT>(kind) => {
                let mut codes = [0i8; 64];
                for i in [0, 64] {
                    Avx2::permute(layout::Q4_WIDE, from.add(i), codes.as_mut_ptr());
                    for j in [0, 32] {
                        let (x, to) = (load(codes.as_ptr().add(j).cast()), to.add(2 * (i + j)));
                        _mm256_storeu_si256(to.cast(), x);
                        _mm256_storeu_si256(to.add(32).cast(), _mm256_abs_epi8(x));
                    }
                }
            }
            4 => {
                for i in [0, 64] {
                    Avx2::permute(layout::Q4_WIDE, from.add(i), to.add(i));
                }
            }
            _ => {
                let pairs = Pairs::of(kind);
                let factor = _mm256_loadu_si256(pairs.factor.as_ptr().cast());
                for vector in 0..4 {
                    let (block, v) = (vector / 2 * 64, vector % 2);
                    let pieces = if group <= 32 { [2 * v, 2 * v + 1] } else { pairs.pieces[v] };
                    let codes =
                        load_two(from.add(block + 16 * pieces[0]).cast(), from.add(block + 16 * pieces[1]).cast());
                    // Per half: the even ones, then the odd ones; then all even ones, all odd ones.
                    let codes = _mm256_shuffle_epi8(codes, both(&EVENS_ODDS));
                    let codes = _mm256_permute4x64_epi64::<0b11_01_10_00>(codes);
                    let even = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(codes));
                    let odd = _mm256_cvtepi8_epi16(_mm256_extracti128_si256::<1>(codes));
                    let to = to.add(64 * vector);
                    _mm256_storeu_si256(to.cast(), _mm256_mullo_epi16(even, factor));
                    _mm256_storeu_si256(to.add(32).cast(), _mm256_mullo_epi16(odd, factor));
                }
            }
        }
    }
}

/// Scales or biases in bf16 of eight rows, a vector of f32 for every group, sixteen groups at a
/// time.
#[inline(always)]
pub(super) unsafe fn fill_bf16(rows: &PlaneRows, groups: usize, to: *mut u8) {
    // SAFETY: rows of `groups` elements, and room for whole sixteens of vectors.
    unsafe {
        for g in (0..groups).step_by(16) {
            let n = groups - g;
            let mut two = [_mm256_setzero_si256(); 8];
            for i in 0..8 {
                let p = rows.row(i).add(2 * g);
                two[i] = if n >= 16 {
                    load(p)
                } else if n == 8 {
                    _mm256_zextsi128_si256(_mm_loadu_si128(p.cast()))
                } else {
                    let mut buffer = [0u8; 32];
                    std::ptr::copy_nonoverlapping(p, buffer.as_mut_ptr(), 2 * n);
                    load(buffer.as_ptr())
                };
            }
            // A lane is a row; in each, group 2i and 2i + 1.
            let two = transpose8(two);
            for i in 0..8 {
                let to = to.add(32 * (g + 2 * i));
                _mm256_storeu_si256(to.cast(), _mm256_slli_epi32::<16>(two[i]));
                let odd = _mm256_and_si256(two[i], _mm256_set1_epi32(0xffff_0000u32 as i32));
                _mm256_storeu_si256(to.add(32).cast(), odd);
            }
        }
    }
}

/// Parameters in f16 of eight rows, a vector of f32 for every group.
#[inline(always)]
pub(super) unsafe fn fill_f16(rows: &PlaneRows, groups: usize, to: *mut u8) {
    // SAFETY: rows of `groups` elements, and room for whole eights of vectors.
    unsafe {
        for g in (0..groups).step_by(8) {
            let n = groups - g;
            let mut floats = [_mm256_setzero_si256(); 8];
            for i in 0..8 {
                let p = rows.row(i).add(2 * g);
                let halves = match n {
                    8.. => _mm_loadu_si128(p.cast()),
                    4 => _mm_loadl_epi64(p.cast()),
                    _ => {
                        let mut buffer = [0u16; 8];
                        for j in 0..n {
                            buffer[j] = p.cast::<u16>().add(j).read_unaligned();
                        }
                        _mm_loadu_si128(buffer.as_ptr().cast())
                    }
                };
                floats[i] = _mm256_castps_si256(_mm256_cvtph_ps(halves));
            }
            let by_group = transpose8(floats);
            for i in 0..8 {
                _mm256_storeu_si256(to.add(32 * (g + i)).cast(), by_group[i]);
            }
        }
    }
}
