//! Integer matmuls of many activation rows on a matrix unit: what is multiplied, and how activation
//! rows are laid out for it.
//!
//! A unit multiplies blocks of sixteen activation rows with panels of sixteen weight rows, up to 64
//! codes at a time. Its sums are exact, and from there on it does what the register tiles of
//! [`super::quant`] do, so the bits are the same.

use super::scratch::Scratch;

/// Activation rows, weight rows and codes of a row in a block.
pub(super) const ROWS: usize = 16;
pub(super) const CODES: usize = 64;
/// Activation rows from which on a unit is worth its preparation.
pub(super) const FROM: usize = 12;
/// Bytes that sums may take.
pub(super) const SUMS: usize = 32 << 10;

/// Something that multiplies blocks of rows.
pub(super) struct Unit {
    /// Before the products of a matrix with groups of such a size, on this thread.
    pub begin: unsafe fn(usize),
    pub multiply: unsafe fn(&Product<'_>),
    /// After them.
    pub end: unsafe fn(),
}

/// What [`Unit::multiply`] is given: one or two panels, and all activation rows.
pub(super) struct Product<'a> {
    /// Unpacked weights: four codes of each weight row, then the next four.
    pub panels: &'a [*mut u8],
    /// A vector of sixteen for every group, of every panel.
    pub scales: [*mut f32; 2],
    /// The same; not read if weights have none.
    pub biases: [*mut f32; 2],
    pub stage: &'a Stage,
    /// Activation rows.
    pub n: usize,
    /// Codes of a group, and groups.
    pub group: usize,
    pub groups: usize,
    /// Whether weights have biases; if not, there is something to add to every group's sum.
    pub is_affine: bool,
    /// Where outputs of the first panel begin, and how many there are in all.
    pub first: usize,
    pub outputs: usize,
    /// Bytes of memory that are wanted next, to be asked for meanwhile.
    pub next: (*const u8, usize),
}

/// Whether products of such groups gain. (Those of 16 codes would be right as well, but there are
/// as many sums to scale as products are saved.)
pub(super) fn takes(group: usize) -> bool {
    group == 32 || group.is_multiple_of(CODES)
}

/// Activation rows as a unit takes them, in scratch.
#[derive(Clone, Copy)]
pub(super) struct Stage {
    /// Of sixteen rows 64 codes each, then the next 64; then the next sixteen rows.
    pub codes: *mut i8,
    /// Of sixteen rows, for every group: sixteen scales; sixteen sums, or i32 that are added to the
    /// sums of products. Then of the next sixteen rows.
    pub params: *mut [[f32; ROWS]; 2],
    /// Where each row's products go.
    pub out: *mut *mut f32,
    /// [`SUMS`] bytes of room.
    pub sums: *mut i32,
    /// What is added up for each row: sixteen f32 of either panel.
    pub left: *mut f32,
    /// Rows there is room for, codes of each, groups.
    pub room: usize,
    pub padded: usize,
    pub groups: usize,
}

impl Stage {
    /// Bytes of scratch for `rows` activation rows of `padded` codes: none where they are too few.
    pub(super) fn bytes(rows: usize, padded: usize, groups: usize) -> Option<usize> {
        let rows = Self::room_for(rows);
        if rows == 0 {
            return Some(0);
        }
        let params = groups.checked_mul(2 * size_of::<f32>())?;
        let left = 2 * ROWS * size_of::<f32>();
        let row = padded.checked_add(params)?.checked_add(left + size_of::<*mut f32>())?;
        rows.checked_mul(row)?.checked_add(SUMS)
    }

    fn room_for(rows: usize) -> usize {
        if rows < FROM { 0 } else { rows.next_multiple_of(ROWS) }
    }

    /// Takes [`Stage::bytes`].
    pub(super) fn new(scratch: &mut Scratch<'_>, rows: usize, padded: usize, groups: usize) -> Stage {
        let room = Self::room_for(rows);
        let sums = if room == 0 { 0 } else { SUMS / size_of::<i32>() };
        Stage {
            codes: scratch.take(room * padded),
            params: scratch.take(room / ROWS * groups),
            out: scratch.take(room),
            sums: scratch.take(sums),
            left: scratch.take(2 * ROWS * room),
            room,
            padded,
            groups,
        }
    }

    /// Lays out the `i`-th row: its padded codes, scales, the bits of sums or of corrections, and
    /// where its products go.
    ///
    /// # Safety
    /// There is room for it; `codes` are as many as the stage was made for, the others as many as
    /// there are groups.
    pub(super) unsafe fn put(
        &self,
        i: usize,
        (codes, out): (*const i8, *mut f32),
        scales: *const f32,
        sums: *const u32,
    ) {
        // SAFETY: the condition above.
        unsafe {
            self.out.add(i).write(out);
            let to = self.codes.add(i / ROWS * ROWS * self.padded + i % ROWS * CODES);
            for at in (0..self.padded).step_by(CODES) {
                std::ptr::copy_nonoverlapping(codes.add(at), to.add(at * ROWS), CODES);
            }
            for g in 0..self.groups {
                let of_group = &mut *self.params.add(i / ROWS * self.groups + g);
                of_group[0][i % ROWS] = *scales.add(g);
                of_group[1][i % ROWS] = f32::from_bits(*sums.add(g));
            }
        }
    }

    /// Of rows after the `n`-th, what is multiplied with the rest of its block.
    ///
    /// # Safety
    /// There is room for a block.
    pub(super) unsafe fn fill_up(&self, n: usize) {
        for i in n..n.next_multiple_of(ROWS) {
            for g in 0..self.groups {
                // SAFETY: the condition above.
                let of_group = unsafe { &mut *self.params.add(i / ROWS * self.groups + g) };
                (of_group[0][i % ROWS], of_group[1][i % ROWS]) = (0.0, 0.0);
            }
        }
    }
}
