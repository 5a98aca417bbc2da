//! Lowering record by record: each op in operations of MLX, or in a kernel that takes it alone.

use loaf_formats::dtype::WeightFormat;
use loaf_formats::op::{
    OpAttrs, OpKind, add, add_rms_norm, attention, embed, expert_linear_dense, expert_linear_quant, expert_sort,
    gather_rows, gdn_gates, l2_norm, linear_dense, linear_quant, mul, mul_rows, quantize, rms_norm, sigmoid, silu,
    silu_mul, softmax, top_k, weighted_sum,
};

use super::super::array::{Array, MlxError, Result, Type};
use super::super::device::Device;
use super::super::kernels::Act;
use super::super::values;
use super::super::weights::Matrix;
use super::{Op, Planes, Trace};
use crate::schedule::RecordId;

impl Trace<'_> {
    /// Lowers one record.
    pub(super) fn record(&mut self, record: RecordId) -> Result<()> {
        let r = self.ops[record];
        let name = r.kind.spec().name;
        self.op(&r).map_err(|e| MlxError(format!("{name}: {}", e.0)))
    }

    fn op(&mut self, r: &Op<'_>) -> Result<()> {
        use OpKind::*;
        let m = self.m;
        match r.kind {
            View | Linear | ExpertLinear => Err(MlxError("an op of graphs only".to_owned())),
            Embed => self.embed(r),
            RmsNorm => {
                let (a, o) = (rms_norm::Attrs::of(r.attrs), rms_norm::Operands::indices());
                let w = self.l.weights.norm(m, r.operand(o.weight), a.dim as u64, a.offset, self.l.kind)?;
                let y = m.rms_norm(&self.input(r, o.x)?, &w, a.eps)?;
                self.out(r, o.out, &y)
            }
            AddRmsNorm => {
                let (attrs, o) = (add_rms_norm::Attrs::of(r.attrs), add_rms_norm::Operands::indices());
                let (a, b) = (self.input(r, o.a)?, self.input(r, o.b)?);
                let w = self.l.weights.norm(m, r.operand(o.weight), attrs.dim as u64, attrs.offset, self.l.kind)?;
                let fused = if self.fused && attrs.heads == 1 {
                    self.l.kernels.add_norm(m, &a, &b, &w, attrs.eps, self.l.kind)?
                } else {
                    None
                };
                let [sum, y] = match fused {
                    Some(both) => both,
                    None => {
                        let sum = m.add(&a, &b)?;
                        let y = m.rms_norm(&sum, &w, attrs.eps)?;
                        [sum, y]
                    }
                };
                self.out(r, o.sum, &sum)?;
                self.out(r, o.out, &y)
            }
            Add => {
                let o = add::Operands::indices();
                let y = m.add(&self.input(r, o.a)?, &self.input(r, o.b)?)?;
                self.out(r, o.out, &y)
            }
            Mul => {
                let o = mul::Operands::indices();
                let y = m.mul(&self.input(r, o.a)?, &self.input(r, o.b)?)?;
                self.out(r, o.out, &y)
            }
            Silu => {
                let o = silu::Operands::indices();
                let x = self.input(r, o.x)?;
                let y = m.mul(&x, &m.sigmoid(&x)?)?;
                self.out(r, o.out, &y)
            }
            Sigmoid => {
                let o = sigmoid::Operands::indices();
                let y = m.sigmoid(&self.input(r, o.x)?)?;
                self.out(r, o.out, &y)
            }
            SiluMul | SigmoidMul => {
                // Both have the same operands.
                let o = silu_mul::Operands::indices();
                if self.fused {
                    let act = if r.kind == SiluMul { Act::Silu } else { Act::Sigmoid };
                    let (a, b) = (self.place(r, o.a)?, self.place(r, o.b)?);
                    if let Some(y) = self.l.kernels.gate(m, &a, &b, act, self.rows as i32, self.l.kind)? {
                        return self.out(r, o.out, &y);
                    }
                }
                let x = self.input(r, o.a)?;
                let open = m.sigmoid(&x)?;
                let open = if r.kind == SiluMul { m.mul(&x, &open)? } else { open };
                let y = m.mul(&open, &self.input(r, o.b)?)?;
                self.out(r, o.out, &y)
            }
            MulRows => {
                let o = mul_rows::Operands::indices();
                let x = self.input(r, o.x)?;
                let y = m.mul(&x, &self.input(r, o.s)?)?;
                self.out(r, o.out, &y)
            }
            // Products take the activations themselves; only the codes' place is ever read.
            Quantize => {
                let o = quantize::Operands::indices();
                let x = self.input(r, o.x)?;
                self.keep(r, o.codes, &x)
            }
            LinearDense => {
                let (a, o) = (linear_dense::Attrs::of(r.attrs), linear_dense::Operands::indices());
                let y = self.product(&self.input(r, o.x)?, &self.planes(r, o.weight)?, a.format)?;
                self.out(r, o.out, &y)
            }
            LinearQuant => {
                let (a, o) = (linear_quant::Attrs::of(r.attrs), linear_quant::Operands::indices());
                let y = self.product(&self.input(r, o.codes)?, &self.planes(r, o.weight)?, a.format)?;
                self.out(r, o.out, &y)
            }
            // The slots' experts themselves stand where the plan has their order.
            ExpertSort => {
                let o = expert_sort::Operands::indices();
                let ids = self.input(r, o.ids)?;
                self.keep(r, o.order, &ids)
            }
            ExpertLinearDense => {
                let o = expert_linear_dense::Operands::indices();
                self.experts(r, o.x, o.order, o.weight, o.out)
            }
            ExpertLinearQuant => {
                let o = expert_linear_quant::Operands::indices();
                self.experts(r, o.codes, o.order, o.weight, o.out)
            }
            WeightedSum => {
                let (a, o) = (weighted_sum::Attrs::of(r.attrs), weighted_sum::Operands::indices());
                let (rows, k) = (a.rows as i32, a.k as i32);
                let (slots, w) = (self.input(r, o.y)?, m.reshape(&self.input(r, o.w)?, &[rows, k, 1])?);
                let weights = m.reshape(&w, &[rows, k])?;
                let fused = if self.fused { self.l.kernels.mix(m, &slots, &weights, None, self.l.kind)? } else { None };
                let y = fused.map_or_else(|| m.sum(&m.mul(&slots, &w)?, 1), Ok)?;
                self.out(r, o.out, &y)
            }
            Softmax => {
                let o = softmax::Operands::indices();
                let y = m.softmax(&self.wide(r, o.x)?)?;
                self.keep(r, o.out, &y)
            }
            TopK => {
                let (a, o) = (top_k::Attrs::of(r.attrs), top_k::Operands::indices());
                let (rows, k, renorm) = (a.rows as i32, a.k as i32, a.renorm != 0);
                let p = m.reshape(&self.wide(r, o.probs)?, &[rows, a.experts as i32])?;
                let order = m.argsort(&m.neg(&p)?)?;
                let ids = m.slice(&order, 1, 0, k)?;
                let mut w = m.take_along(&p, &ids)?;
                if renorm {
                    let sum = m.reshape(&m.sum(&w, 1)?, &[rows, 1])?;
                    w = m.div(&w, &sum)?;
                }
                self.keep(r, o.ids, &ids)?;
                self.keep(r, o.weights, &w)
            }
            RopeTable => self.rope_table(r),
            Rope => self.rope(r),
            KvWrite => self.write(r),
            Attention => {
                let q = self.input(r, attention::Operands::indices().q)?;
                self.attention(r, &q)
            }
            Conv | ConvSilu => self.convolution(r),
            L2Norm => {
                let (a, o) = (l2_norm::Attrs::of(r.attrs), l2_norm::Operands::indices());
                let x = self.wide(r, o.x)?;
                let sum = m.reshape(&m.sum(&m.square(&x)?, -1)?, &[a.rows as i32, a.heads as i32, 1])?;
                let inv = m.rsqrt(&m.add(&sum, &Array::scalar(a.eps))?)?;
                let y = m.mul(&m.mul(&x, &inv)?, &Array::scalar(a.scale))?;
                // Recurrences stay in f32.
                self.keep(r, o.out, &y)
            }
            GdnGates => {
                let (attrs, o) = (gdn_gates::Attrs::of(r.attrs), gdn_gates::Operands::indices());
                let heads = attrs.heads * attrs.dim;
                let flat = |x: Array| m.reshape(&x, &[attrs.rows as i32, 1, heads as i32]);
                let (a, b) = (flat(self.wide(r, o.a)?)?, flat(self.wide(r, o.b)?)?);
                let a_log = self.l.weights.vector(m, r.operand(o.a_log), heads as u64)?;
                let dt = self.l.weights.vector(m, r.operand(o.dt_bias), heads as u64)?;
                let x = m.add(&a, &dt)?;
                let soft = m.select(&m.greater(&x, &Array::scalar(20.0))?, &x, &m.log1p(&m.exp(&x)?)?)?;
                let g = m.neg(&m.mul(&m.exp(&a_log)?, &soft)?)?;
                // The logarithm of the decay: the chunked rule adds it up.
                self.keep(r, o.decay, &g)?;
                self.keep(r, o.beta, &m.sigmoid(&b)?)
            }
            GdnScan => {
                let scan = self.plain_scan(r)?;
                self.scan(r, &scan)
            }
            GatherRows => {
                let (a, o) = (gather_rows::Attrs::of(r.attrs), gather_rows::Operands::indices());
                // Every hidden row there is: which one is chosen is known only when the graph runs.
                let rows = self.inputs.main.shape().first().copied().unwrap_or(0);
                let x = self.values.get(&values::View { dims: [rows as u64, 1, a.dim as u64], ..r.view(o.x)? })?;
                let x = m.reshape(&x, &[-1, a.dim as i32])?;
                let y = m.slice_at(&x, self.inputs.pos, 0, self.rows as i32)?;
                self.out(r, o.out, &y)
            }
        }
    }

    fn embed(&mut self, r: &Op<'_>) -> Result<()> {
        let m = self.m;
        let (a, o) = (embed::Attrs::of(r.attrs), embed::Operands::indices());
        let ids = m.reshape(&self.input(r, o.ids)?, &[-1])?;
        let Planes { operands, dims } = self.planes(r, o.table)?;
        let table = self.l.weights.table(m, &operands, &dims, a.format, self.l.kind)?;
        if let (true, Matrix::Packed { codes, scales, biases: Some(biases), packing }) = (self.fused, &table)
            && let Some(y) = self.l.kernels.embed(m, &ids, [codes, scales, biases], *packing, self.l.kind)?
        {
            return self.out(r, o.out, &y);
        }
        let rows = match table {
            Matrix::Dense(table) => m.take(&table, &ids)?,
            Matrix::Packed { codes, scales, biases, packing } => {
                let biases = biases.map(|b| m.take(&b, &ids)).transpose()?;
                let (codes, scales) = (m.take(&codes, &ids)?, m.take(&scales, &ids)?);
                m.dequantize(&codes, &scales, biases.as_ref(), packing, Type::F32)?
            }
        };
        self.out(r, o.out, &rows)
    }

    fn product(&self, x: &Array, Planes { operands, dims }: &Planes, format: WeightFormat) -> Result<Array> {
        let m = self.m;
        let x = m.reshape(x, &[self.rows as i32, -1])?;
        let cuda = self.l.kernels.device() == Device::Cuda;
        // One row times many: MLX's CUDA device takes a kernel that it first compiles for a minute,
        // but not if it gathers.
        let gathered = cuda && self.rows == 1 && dims[0][0] > QMV_ROWS && format.group().is_some();
        match self.l.weights.matrix(m, operands, dims, format, gathered.then_some(1), self.l.kind)? {
            Matrix::Dense(w) => m.matmul(&x, &w),
            Matrix::Packed { codes, scales, biases, packing } if gathered => {
                let x = m.reshape(&x, &[1, 1, -1])?;
                let only = Array::from_slice(&[0u32], &[1]);
                let y = m.gather_qmm(&x, &codes, &scales, biases.as_ref(), Some(&only), &only, packing, false)?;
                m.reshape(&y, &[1, -1])
            }
            // As does one of many rows; dense products of the decoded weights are faster anyway.
            Matrix::Packed { codes, scales, biases, packing } if cuda && self.rows > 1 => {
                let w = m.dequantize(&codes, &scales, biases.as_ref(), packing, self.l.kind)?;
                m.matmul(&x, &m.transpose(&w, &[1, 0])?)
            }
            Matrix::Packed { codes, scales, biases, packing } => {
                m.quantized_matmul(&x, &codes, &scales, biases.as_ref(), packing)
            }
        }
    }
}

/// Rows of a matrix up to which MLX's CUDA device multiplies a single vector with its kernel for
/// that.
const QMV_ROWS: u64 = 16384;
