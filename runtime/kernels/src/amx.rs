//! Integer matmuls of many activation rows on AMX's tiles.
//!
//! A tile product takes sixteen activation rows, sixteen weight rows and up to 64 codes of each:
//! just what a group has, so the sums of a group are as exact as those of any other set, and what
//! is made of them is the contract's sequence of fused multiply-adds. The second operand of the
//! product is a panel as [`super::quant`] lays it out: four codes of each of sixteen weight rows,
//! then the next four.
//!
//! A product takes sixteen cycles, and what follows it in f32 rather more. So both are issued in
//! turns: while the sums of one block of activation rows are scaled and added up, the products of
//! the next one are made.
//!
//! Instructions are written as text, which the oldest compiler that is supported knows. It uses no
//! tiles of its own, so what they are configured as stays from [`begin`] to [`end`].

use std::arch::asm;
use std::arch::x86_64::*;

use super::unit::{CODES, Product, ROWS, SUMS, Unit};

/// Bytes of a tile of sums, or of codes.
const TILE: usize = 1024;
/// Groups whose products are made before they are scaled.
const GROUPS: usize = 6;
/// Activation rows that are scaled together.
const R: usize = 4;
const _: () = assert!(2 * GROUPS * TILE <= SUMS);

/// How a call is multiplied on tiles.
pub(super) static AMX: Unit = Unit { begin, multiply, end };

/// Codes of a tile product.
fn step(group: usize) -> usize {
    group.min(CODES)
}

/// Configures this thread's tiles for groups of such a size.
///
/// # Safety
/// The CPU has AMX and the process may use it; the unit takes them.
unsafe fn begin(group: usize) {
    let step = step(group);
    let mut config = [0u8; 64];
    config[0] = 1;
    // Twice the sums of two panels, activations, two panels.
    let (sums, panel) = ((ROWS, 64), (step / 4, 64));
    for (tile, (rows, bytes)) in [sums, sums, sums, sums, (ROWS, step), panel, panel].into_iter().enumerate() {
        config[16 + 2 * tile] = bytes as u8;
        config[48 + tile] = rows as u8;
    }
    // SAFETY: 64 bytes, a valid configuration.
    unsafe { asm!("ldtilecfg [{}]", in(reg) config.as_ptr(), options(nostack, readonly)) }
}

/// Gives tiles back, so that nobody saves them when threads change.
///
/// # Safety
/// As [`begin`].
unsafe fn end() {
    // SAFETY: the condition above.
    unsafe { asm!("tilerelease", options(nostack, nomem)) }
}

/// All products of the panels with all rows.
///
/// # Safety
/// [`begin`] was called on this thread; AVX-512 F; all that is pointed to is there.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn multiply(p: &Product<'_>) {
    // SAFETY: the same condition.
    unsafe {
        match (p.panels.len(), p.is_affine) {
            (1, true) => passes::<1, true>(p),
            (1, false) => passes::<1, false>(p),
            (_, true) => passes::<2, true>(p),
            (_, false) => passes::<2, false>(p),
        }
    }
}

/// Blocks of groups, and of each, blocks of rows: all products, then what is made of them.
#[inline(always)]
unsafe fn passes<const P: usize, const AFFINE: bool>(p: &Product<'_>) {
    // SAFETY: the same condition; each index is below what there is.
    unsafe {
        let blocks = p.n.div_ceil(ROWS);
        // Lines are asked for a few at a time: a core can wait for some sixteen.
        let turns = p.groups.div_ceil(GROUPS) * blocks;
        let lines = p.next.1.div_ceil(64).div_ceil(turns);
        let mut next = p.next.0;
        for from in (0..p.groups).step_by(GROUPS) {
            let groups = from..p.groups.min(from + GROUPS);
            for rows in 0..blocks {
                let mut made = Made { to: None, odd: false };
                for g in groups.clone() {
                    made.products::<P>(p, sums_at(g - from), g, rows);
                }
                made.store::<P>();
                for _ in 0..lines {
                    _mm_prefetch::<_MM_HINT_T1>(next.cast());
                    next = next.wrapping_add(64);
                }
                for part in 0..(p.n - rows * ROWS).div_ceil(R).min(ROWS / R) {
                    scale::<P, AFFINE>(p, groups.clone(), rows, part);
                }
            }
        }
    }
}

/// Where the sums of the `i`-th group of a block are.
#[inline(always)]
fn sums_at(i: usize) -> usize {
    i * 2 * TILE / 4
}

/// Products that are being made: they are stored after the next ones have begun, which do not wait
/// for them then.
struct Made {
    to: Option<*mut i32>,
    /// Which pair of tiles has them.
    odd: bool,
}

/// The products of group `$g` in tiles `$c` and `$d`.
macro_rules! products {
    ($P:ident, $p:ident, $g:ident, $codes:ident, $c:literal, $d:literal) => {{
        let step = step($p.group);
        asm!(concat!("tilezero ", $c), concat!("tilezero ", $d), options(nostack, nomem));
        for at in ($g * $p.group..($g + 1) * $p.group).step_by(step) {
            let a = $codes.add(at / CODES * TILE + at % CODES);
            let b = $p.panels[0].add(at * ROWS);
            if $P == 2 {
                asm!(
                    "tileloadd tmm4, [{a} + {stride}]",
                    "tileloadd tmm5, [{b} + {stride}]",
                    "tileloadd tmm6, [{c} + {stride}]",
                    concat!("tdpbsud ", $c, ", tmm4, tmm5"),
                    concat!("tdpbsud ", $d, ", tmm4, tmm6"),
                    a = in(reg) a, b = in(reg) b, c = in(reg) $p.panels[1].add(at * ROWS), stride = in(reg) 64usize,
                    options(nostack, readonly),
                );
            } else {
                asm!(
                    "tileloadd tmm4, [{a} + {stride}]",
                    "tileloadd tmm5, [{b} + {stride}]",
                    concat!("tdpbsud ", $c, ", tmm4, tmm5"),
                    a = in(reg) a, b = in(reg) b, stride = in(reg) 64usize,
                    options(nostack, readonly),
                );
            }
        }
    }};
}

/// Tiles `$c` and `$d` to memory.
macro_rules! stored {
    ($P:ident, $to:ident, $c:literal, $d:literal) => {{
        asm!(concat!("tilestored [{to} + {stride}], ", $c), to = in(reg) $to, stride = in(reg) 64usize, options(nostack));
        if $P == 2 {
            let to = $to.add(TILE / 4);
            asm!(concat!("tilestored [{to} + {stride}], ", $d), to = in(reg) to, stride = in(reg) 64usize, options(nostack));
        }
    }};
}

impl Made {
    /// Begins the exact sums of group `g` for a block of rows, which go to `sums`.
    #[inline(always)]
    unsafe fn products<const P: usize>(&mut self, p: &Product<'_>, sums: usize, g: usize, rows: usize) {
        let codes = p.stage.codes.wrapping_add(rows * ROWS * p.stage.padded);
        // SAFETY: whole tiles of codes and panels.
        unsafe {
            if self.odd {
                products!(P, p, g, codes, "tmm0", "tmm1");
            } else {
                products!(P, p, g, codes, "tmm2", "tmm3");
            }
            self.store::<P>();
            self.odd = !self.odd;
            self.to = Some(p.stage.sums.add(sums));
        }
    }

    /// Stores those that are not stored yet.
    #[inline(always)]
    unsafe fn store<const P: usize>(&mut self) {
        // SAFETY: room for whole tiles.
        unsafe {
            let Some(to) = self.to.take() else { return };
            if self.odd {
                stored!(P, to, "tmm2", "tmm3");
            } else {
                stored!(P, to, "tmm0", "tmm1");
            }
        }
    }
}

/// The sums of a block of groups for a part of a block of activation rows, scaled and added to what
/// earlier groups left; to the output after the last.
#[inline(always)]
unsafe fn scale<const P: usize, const AFFINE: bool>(
    p: &Product<'_>,
    groups: std::ops::Range<usize>,
    block: usize,
    part: usize,
) {
    // SAFETY: room for whole blocks of rows; lanes past the outputs and rows past the last are not
    // written.
    unsafe {
        let left = p.stage.left.add((block * ROWS + part * R) * 2 * 16);
        let sums = p.stage.sums.add(part * R * 16);
        let params = p.stage.params.add(block * p.stage.groups).cast::<f32>().add(part * R);
        let mut acc = [[_mm512_setzero_ps(); R]; P];
        if groups.start > 0 {
            for i in 0..P {
                for r in 0..R {
                    acc[i][r] = _mm512_loadu_ps(left.add((2 * r + i) * 16));
                }
            }
        }
        for g in groups.clone() {
            let sums = sums.add(sums_at(g - groups.start));
            let (scale, sum) = (params.add(g * 2 * ROWS), params.add((g * 2 + 1) * ROWS));
            let mut scales = [_mm512_setzero_ps(); P];
            let mut biases = [_mm512_setzero_ps(); P];
            for i in 0..P {
                scales[i] = _mm512_loadu_ps(p.scales[i].add(g * 16));
                if AFFINE {
                    biases[i] = _mm512_loadu_ps(p.biases[i].add(g * 16));
                }
            }
            for r in 0..R {
                let x = _mm512_set1_ps(*scale.add(r));
                for i in 0..P {
                    let mut d = _mm512_loadu_si512(sums.add(i * TILE / 4 + r * 16).cast());
                    if !AFFINE {
                        d = _mm512_add_epi32(d, _mm512_set1_epi32((*sum.add(r)).to_bits() as i32));
                    }
                    acc[i][r] = _mm512_fmadd_ps(_mm512_mul_ps(scales[i], x), _mm512_cvtepi32_ps(d), acc[i][r]);
                }
                if AFFINE {
                    let x = _mm512_set1_ps(*sum.add(r));
                    for i in 0..P {
                        acc[i][r] = _mm512_fmadd_ps(biases[i], x, acc[i][r]);
                    }
                }
            }
        }
        if groups.end < p.groups {
            for i in 0..P {
                for r in 0..R {
                    _mm512_storeu_ps(left.add((2 * r + i) * 16), acc[i][r]);
                }
            }
            return;
        }
        for i in 0..P {
            let mask = ((1u32 << (p.outputs - i * 16).min(16)) - 1) as u16;
            for r in 0..R {
                let row = block * ROWS + part * R + r;
                if row < p.n {
                    _mm512_mask_storeu_ps((*p.stage.out.add(row)).add(p.first + i * 16), mask, acc[i][r]);
                }
            }
        }
    }
}

/// Whether this CPU has AMX with products of bytes, and this process may use it.
pub(super) fn is_there() -> bool {
    #[cfg(target_os = "linux")]
    {
        use std::sync::OnceLock;
        static THERE: OnceLock<bool> = OnceLock::new();
        *THERE.get_or_init(|| {
            // SAFETY: CPUs with AVX-512 have the leaf. (Later compilers know that it needs no such
            // promise.)
            #[allow(unused_unsafe)]
            let features = unsafe { __cpuid_count(7, 0) }.edx;
            // AMX-TILE and AMX-INT8.
            if features >> 24 & 3 != 3 {
                return false;
            }
            // The kernel hands out the state of tiles on request: arch_prctl(ARCH_REQ_XCOMP_PERM,
            // XFEATURE_XTILEDATA).
            let answer: i64;
            // SAFETY: asks for a permission.
            unsafe {
                asm!("syscall", inlateout("rax") 158i64 => answer, in("rdi") 0x1023, in("rsi") 18,
                    out("rcx") _, out("r11") _, options(nostack));
            }
            answer == 0
        })
    }
    #[cfg(not(target_os = "linux"))]
    false
}
