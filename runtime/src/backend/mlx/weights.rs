//! Weights as MLX wants them, made once per weight and use.
//!
//! A weight is handed over where it lies in the mapped file ([`Array::borrow`]). What must differ
//! from the file is made at load and kept: parameters in the type of the activations where theirs
//! is another, norm weights with their offset added, transposed convolution taps. Each is evaluated
//! at once, so that compiled graphs hold it as a finished constant.
//!
//! Metal takes a tensor without a copy if it begins and ends on a page (bakes put tensors of 64 KiB
//! and more on 16 KiB boundaries); the CPU build and CUDA copy every one.
//!
//! MLX wants the matrices of all experts end to end: its products of a prompt's many slots copy a
//! stack that is not at every call, or take it for one that is. In a loaf an expert's parts lie
//! together, so stacks are put together once, at load, on every device.

use std::cell::RefCell;
use std::collections::HashMap;

use loaf_formats::dtype::{DType, WeightFormat};
use loaf_formats::plan::{Operand, Plan, records};

use super::super::DeviceError;
use super::array::{Array, MlxError, Result, Type};
use super::ops::{Mlx, Packing};

/// What a weight is prepared for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Use {
    Stored,
    As(Type),
    /// Plus an offset (its bits), as the type.
    Norm(u32, Type),
    Taps,
    Transposed(Type),
}

type Key = (u64, u64, u64, Use);

/// The weights region and what was made of it.
pub struct Weights {
    data: *const u8,
    len: usize,
    made: RefCell<HashMap<Key, Array>>,
    copied: RefCell<u64>,
    mapped: RefCell<u64>,
}

// SAFETY: the bytes behind the pointer are never written; `Weights::new` has its owner promise that
// they stay.
unsafe impl Send for Weights {}

/// A matrix to multiply with.
pub enum Matrix {
    /// `[in, out]`, or `[experts, in, out]`.
    Dense(Array),
    /// MLX's packed form, rows of outputs.
    Packed {
        /// Codes.
        codes: Array,
        /// A scale per group.
        scales: Array,
        /// A bias per group (affine).
        biases: Option<Array>,
        /// How to read it.
        packing: Packing,
    },
}

fn type_of(dtype: DType) -> Type {
    match dtype {
        DType::F32 => Type::F32,
        DType::F16 => Type::F16,
        DType::BF16 => Type::Bf16,
        DType::U32 => Type::U32,
        DType::I8 | DType::U8 => Type::U8,
    }
}

/// How MLX names a format; `None` for dense ones.
pub fn packing(format: WeightFormat) -> Option<Packing> {
    let group = format.group()? as i32;
    let mode = match format {
        // Refused before it is asked for.
        WeightFormat::Dense(_) | WeightFormat::Block(_) => return None,
        WeightFormat::Affine { .. } => c"affine",
        WeightFormat::Mxfp4 => c"mxfp4",
        WeightFormat::Nvfp4 => c"nvfp4",
        WeightFormat::Mxfp8 => c"mxfp8",
    };
    Some(Packing { mode, bits: format.bits() as i32, group })
}

/// Refuses a plan with weights in formats that MLX has no form of.
///
/// # Errors
/// The format.
pub fn check_formats(plan: &Plan) -> std::result::Result<(), DeviceError> {
    for record in plan.templates.iter().flat_map(|t| records(&t.words)).flatten() {
        let code = record.kind.spec().format_attr().map(|i| record.attrs[i]);
        if let Some(format @ WeightFormat::Block(_)) = code.and_then(WeightFormat::from_code) {
            return Err(DeviceError::Format(format));
        }
    }
    Ok(())
}

/// The array, evaluated: while a graph is traced, what is not would become part of it.
fn finished(mlx: &Mlx, array: Array) -> Result<Array> {
    mlx.eval([&array])?;
    Ok(array)
}

impl Weights {
    /// The weights in `data`.
    ///
    /// # Safety
    /// `data` is not written and stays where it is until everything computed from the weights is
    /// gone.
    pub unsafe fn new(data: &[u8]) -> Weights {
        Weights {
            data: data.as_ptr(),
            len: data.len(),
            made: RefCell::default(),
            copied: RefCell::new(0),
            mapped: RefCell::new(0),
        }
    }

    /// Bytes used where they lie in the file, and bytes MLX copied.
    pub fn bytes(&self) -> (u64, u64) {
        (*self.mapped.borrow(), *self.copied.borrow())
    }

    /// `experts` matrices of `rows` rows together, as one.
    fn stacked(&self, mlx: &Mlx, o: Operand, experts: u64, rows: u64, dim: u64) -> Result<Array> {
        let each = rows / experts.max(1);
        if experts == 1 || Some(o.row_stride) == each.checked_mul(dim) {
            return self.stored(o, rows, dim);
        }
        let step = o.row_stride.checked_mul(o.dtype.bytes());
        let one = |e: u64| match step.and_then(|step| e.checked_mul(step)?.checked_add(o.offset)) {
            Some(offset) => self.stored(Operand { offset, ..o }, each, dim),
            None => Err(MlxError(format!("expected experts within {} bytes, found {o:?}", self.len))),
        };
        let parts = (0..experts).map(one).collect::<Result<Vec<_>>>()?;
        finished(mlx, mlx.concat(&parts.iter().collect::<Vec<_>>(), 0)?)
    }

    fn stored(&self, o: Operand, rows: u64, dim: u64) -> Result<Array> {
        let bytes = rows.checked_mul(dim).and_then(|n| n.checked_mul(o.dtype.bytes()));
        let end = bytes.and_then(|b| o.offset.checked_add(b)).filter(|&e| e <= self.len as u64);
        let (Some(bytes), Some(_)) = (bytes, end) else {
            return Err(MlxError(format!("expected a weight within {} bytes, found {o:?}", self.len)));
        };
        let (Ok(r), Ok(d)) = (i32::try_from(rows), i32::try_from(dim)) else {
            return Err(MlxError(format!("expected fewer than 2^31 rows and columns, found {rows} x {dim}")));
        };
        // SAFETY: the end was compared; the bytes stay, by the promise at `new`. The verifier
        // aligned the offset to the type.
        let (array, at) = unsafe {
            let at = self.data.add(o.offset as usize);
            (Array::borrow(at, &[r, d], type_of(o.dtype)), at)
        };
        *if array.address() == at.addr() { self.mapped.borrow_mut() } else { self.copied.borrow_mut() } += bytes;
        Ok(array)
    }

    fn get(&self, mlx: &Mlx, o: Operand, rows: u64, dim: u64, purpose: Use) -> Result<Array> {
        self.get_stack(mlx, o, 1, rows, dim, purpose)
    }

    /// [`Weights::get`] of `experts` matrices.
    fn get_stack(&self, mlx: &Mlx, o: Operand, experts: u64, rows: u64, dim: u64, purpose: Use) -> Result<Array> {
        let key = (o.offset, rows, dim, purpose);
        if let Some(array) = self.made.borrow().get(&key) {
            return Ok(array.clone());
        }
        let own = type_of(o.dtype);
        let array = match purpose {
            Use::Stored => self.stacked(mlx, o, experts, rows, dim)?,
            Use::As(kind) if kind == own => self.get_stack(mlx, o, experts, rows, dim, Use::Stored)?,
            // Made from a temporary: what differs from the file is kept once.
            Use::As(kind) => mlx.astype(&self.stacked(mlx, o, experts, rows, dim)?, kind)?,
            Use::Norm(offset, kind) => {
                let w = mlx.astype(&self.stored(o, rows, dim)?, Type::F32)?;
                let w = mlx.add(&w, &Array::scalar(f32::from_bits(offset)))?;
                mlx.reshape(&mlx.astype(&w, kind)?, &[dim as i32])?
            }
            Use::Taps => {
                let w = mlx.astype(&self.stored(o, rows, dim)?, Type::F32)?;
                mlx.contiguous(&mlx.transpose(&w, &[1, 0])?)?
            }
            // A transposed view: products take it as it is.
            Use::Transposed(kind) => mlx.transpose(&self.get(mlx, o, rows, dim, Use::As(kind))?, &[1, 0])?,
        };
        mlx.eval([&array])?;
        self.made.borrow_mut().insert(key, array.clone());
        Ok(array)
    }

    /// A vector of `dim` numbers as `f32`.
    pub fn vector(&self, mlx: &Mlx, o: Operand, dim: u64) -> Result<Array> {
        finished(mlx, mlx.reshape(&self.get(mlx, o, 1, dim, Use::As(Type::F32))?, &[dim as i32])?)
    }

    /// A norm's weight plus its offset, in the type of activations.
    pub fn norm(&self, mlx: &Mlx, o: Operand, dim: u64, offset: f32, kind: Type) -> Result<Array> {
        self.get(mlx, o, 1, dim, Use::Norm(offset.to_bits(), kind))
    }

    /// Convolution taps, `[kernel, channels]` in `f32`.
    pub fn taps(&self, mlx: &Mlx, o: Operand, channels: u64, kernel: u64) -> Result<Array> {
        self.get(mlx, o, channels, kernel, Use::Taps)
    }

    /// A table to take rows of, for activations of type `kind`: rows as stored, or codes and
    /// parameters.
    pub fn table(
        &self,
        mlx: &Mlx,
        o: &[Operand],
        dims: &[[u64; 3]],
        format: WeightFormat,
        kind: Type,
    ) -> Result<Matrix> {
        match packing(format) {
            None => Ok(Matrix::Dense(self.get(mlx, o[0], dims[0][0], dims[0][2], Use::Stored)?)),
            Some(_) => self.matrix(mlx, o, dims, format, None, kind),
        }
    }

    /// A matrix to multiply activations of type `kind` with, or `experts` of them, each the
    /// operand's stride of a row from the next.
    pub fn matrix(
        &self,
        mlx: &Mlx,
        o: &[Operand],
        dims: &[[u64; 3]],
        format: WeightFormat,
        experts: Option<u64>,
        kind: Type,
    ) -> Result<Matrix> {
        let count = experts.unwrap_or(1);
        let stacked = |array: Array| match experts {
            None => Ok(array),
            Some(n) => {
                let shape = array.shape();
                finished(mlx, mlx.reshape(&array, &[n as i32, shape[0] / n as i32, shape[1]])?)
            }
        };
        let Some(packing) = packing(format) else {
            let (rows, dim) = (dims[0][0], dims[0][2]);
            return Ok(Matrix::Dense(match experts {
                None => self.get(mlx, o[0], rows, dim, Use::Transposed(kind))?,
                Some(_) => {
                    let all = stacked(self.get_stack(mlx, o[0], count, rows, dim, Use::As(kind))?)?;
                    finished(mlx, mlx.transpose(&all, &[0, 2, 1])?)?
                }
            }));
        };
        let part =
            |i: usize, purpose| self.get_stack(mlx, o[i], count, dims[i][0], dims[i][2], purpose).and_then(stacked);
        // Affine parameters are floats; MLX would convert them at every call.
        let (scales, biases) = match format.plane(2) {
            Some(_) => (part(1, Use::As(kind))?, Some(part(2, Use::As(kind))?)),
            None => (part(1, Use::Stored)?, None),
        };
        Ok(Matrix::Packed { codes: part(0, Use::Stored)?, scales, biases, packing })
    }
}
