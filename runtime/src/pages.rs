//! Pages of a mapped file, ready before they are read.
//!
//! A page that the system holds in memory still costs a fault when this process reads it first, and
//! most pages of a mixture of experts are read first by some token in mid-answer. Two ways around
//! that, neither of which changes a result:
//!
//! - [`PagePrefetch`]: a thread maps what the page cache has, matrix by matrix in the order of use.
//!   What the cache has not is left alone, so a file larger than memory is not read for nothing.
//! - [`Asked`]: once a router has chosen, the system is told at once which experts will be read,
//!   each the first time. What is on disk is then read side by side and not a page at a time.

use std::ops::Range;

use loaf_formats::op::{OpAttrs, OpKind, expert_linear, expert_linear_dense, expert_linear_quant};

use loaf_kernels::{OpCall, RawOperand};

#[cfg(target_os = "linux")]
pub(crate) use linux::PagePrefetch;

/// The experts that an op has read so far, a bit each.
pub(crate) struct Asked {
    bits: Vec<u64>,
    /// How many it has not read yet.
    left: usize,
}

impl Asked {
    /// For an op with experts; `None` for others.
    pub fn of(call: &OpCall<'_>) -> Option<Asked> {
        let (experts, ..) = chosen(call)?;
        Some(Asked { bits: vec![0; experts.div_ceil(64)], left: experts })
    }

    /// Tells the system which experts this op is about to read, unless it was told before.
    ///
    /// # Safety
    /// The operands of `call` lie in memory, the weights in a mapping.
    pub unsafe fn ask(&mut self, call: &OpCall<'_>) {
        if self.left == 0 {
            return;
        }
        let Some((experts, starts, weight)) = chosen(call) else { return };
        // A single expert's stride is not bounded by anything.
        let bytes = weight.row_stride.wrapping_mul(weight.dtype.bytes() as usize);
        // SAFETY: the operand has a word for every expert and one more.
        let starts = unsafe { std::slice::from_raw_parts(starts.ptr.cast::<u32>().cast_const(), experts + 1) };
        for e in (0..experts).filter(|e| starts[*e] < starts[e + 1]) {
            let (word, bit) = (&mut self.bits[e / 64], 1 << (e % 64));
            if *word & bit == 0 {
                *word |= bit;
                self.left -= 1;
                // The record of an expert is as long as the way to the next one's.
                let at = weight.ptr.addr().wrapping_add(e.wrapping_mul(bytes));
                advise(at..at.saturating_add(bytes));
            }
        }
    }
}

/// Number of experts, where each one's slots start, and the first plane of the matrices, of an op
/// that has experts.
fn chosen(call: &OpCall<'_>) -> Option<(usize, RawOperand, RawOperand)> {
    match call.kind {
        OpKind::ExpertLinearQuant => {
            let o = expert_linear_quant::Operands::of(call.operands);
            Some((expert_linear::Attrs::of(call.attrs).experts, o.starts, o.weight[0]))
        }
        OpKind::ExpertLinearDense => {
            let o = expert_linear_dense::Operands::of(call.operands);
            Some((expert_linear::Attrs::of(call.attrs).experts, o.starts, o.weight[0]))
        }
        _ => None,
    }
}

/// Has the system read addresses of a mapping soon. Nothing depends on the answer.
fn advise(range: Range<usize>) {
    #[cfg(unix)]
    {
        let start = range.start / PAGE * PAGE;
        // SAFETY: advice changes no byte; pages that are not mapped are an error, which is left
        // alone.
        unsafe { libc::madvise(std::ptr::without_provenance_mut(start), range.end - start, libc::MADV_WILLNEED) };
    }
    #[cfg(not(unix))]
    let _ = range;
}

/// Advice is given in whole pages of at least this size; a system with larger ones rejects it, and
/// nothing is lost.
const PAGE: usize = 4096;

#[cfg(target_os = "linux")]
mod linux {
    use std::ops::Range;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU8, Ordering};
    use std::thread::JoinHandle;

    use crate::model::Model;

    use super::PAGE;

    /// Bytes that are looked at, and mapped, together.
    const PIECE: usize = 2 << 20;

    /// A thread that maps weights once it is told to begin; it ends when it is done or dropped.
    pub(crate) struct PagePrefetch {
        stage: Arc<AtomicU8>,
        thread: Option<JoinHandle<usize>>,
    }

    const WAIT: u8 = 0;
    const WORK: u8 = 1;
    const STOP: u8 = 2;

    impl PagePrefetch {
        /// For operands in the order of use, of which those within the model's data are weights.
        /// `None` if there is no such thread to be had.
        pub fn new(model: &Model, operands: impl Iterator<Item = usize>) -> Option<PagePrefetch> {
            let stage = Arc::new(AtomicU8::new(WAIT));
            let (model, told) = (model.clone(), Arc::clone(&stage));
            let (base, len) = (model.data().as_ptr().addr(), model.data().len());
            let starts: Vec<usize> = operands.map(|at| at.wrapping_sub(base)).filter(|at| *at < len).collect();
            let ranges = ranges(&starts, len);
            let work = move || {
                while told.load(Ordering::Acquire) == WAIT {
                    std::thread::park();
                }
                let data = model.data();
                let pieces =
                    ranges.into_iter().flat_map(|r| r.clone().step_by(PIECE).map(move |at| at..r.end.min(at + PIECE)));
                pieces
                    .take_while(|_| told.load(Ordering::Relaxed) == WORK)
                    .filter(|piece| map(&data[piece.clone()]))
                    .count()
            };
            let thread = std::thread::Builder::new().name("loaf-pages".to_owned()).spawn(work).ok()?;
            Some(PagePrefetch { stage, thread: Some(thread) })
        }

        /// Lets it work; may be said again.
        pub fn begin(&self) {
            if self.stage.load(Ordering::Relaxed) == WAIT {
                self.say(WORK);
            }
        }

        fn say(&self, stage: u8) {
            self.stage.store(stage, Ordering::Release);
            if let Some(thread) = &self.thread {
                thread.thread().unpark();
            }
        }

        /// Waits until it is done; pieces that were mapped.
        #[cfg(test)]
        pub fn finish(mut self) -> usize {
            self.begin();
            self.thread.take().map_or(0, |t| t.join().expect("no panic"))
        }
    }

    impl Drop for PagePrefetch {
        fn drop(&mut self) {
            self.say(STOP);
            if let Some(thread) = self.thread.take() {
                // It looks at the flag between two pieces, and cannot panic.
                let _ = thread.join();
            }
        }
    }

    /// From each start, in their order, to where the next higher one is, so that together they are
    /// everything from the lowest on.
    fn ranges(starts: &[usize], end: usize) -> Vec<Range<usize>> {
        let mut rising = starts.to_vec();
        rising.push(end);
        rising.sort_unstable();
        rising.dedup();
        let mut taken = vec![false; rising.len()];
        let mut out = Vec::with_capacity(rising.len());
        for start in starts {
            if let Ok(i) = rising.binary_search(start)
                && i + 1 < rising.len()
                && !std::mem::replace(&mut taken[i], true)
            {
                out.push(*start..rising[i + 1]);
            }
        }
        out
    }

    /// Maps the pages of `bytes` if all of them are in memory; whether it did.
    fn map(bytes: &[u8]) -> bool {
        let start = bytes.as_ptr().addr() / PAGE * PAGE;
        let (at, len) = (std::ptr::without_provenance_mut(start), bytes.as_ptr().addr() + bytes.len() - start);
        let mut there = [0u8; PIECE / PAGE + 1];
        // SAFETY: `there` has a byte for every page of a piece, whose first may begin before it;
        // the mapping lives as long as `bytes`. Neither call writes to it.
        unsafe {
            libc::mincore(at, len, there.as_mut_ptr()) == 0
                && there[..len.div_ceil(PAGE)].iter().all(|page| page & 1 == 1)
                && libc::madvise(at, len, libc::MADV_POPULATE_READ) == 0
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn ranges_cover_everything_once_in_the_order_of_use() {
            assert_eq!(ranges(&[40, 0, 10, 40, 10], 50), [40..50, 0..10, 10..40]);
            assert_eq!(ranges(&[7], 7), []);
            assert_eq!(ranges(&[], 7), []);
        }

        #[test]
        fn what_is_in_memory_is_mapped_and_a_dropped_thread_ends() {
            let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../artifacts/default.loaf");
            let model = Model::open(path.as_ref()).expect("the default model");
            // Reads it all, so that it is there.
            let sum: u64 = model.data().iter().map(|b| u64::from(*b)).sum();
            assert!(sum > 0);
            let pieces = model.data().len().div_ceil(PIECE);
            let mapped =
                PagePrefetch::new(&model, [model.data().as_ptr().addr()].into_iter()).expect("a thread").finish();
            // A kernel before 5.14 cannot map pages before they are read.
            let page = model.data().as_ptr().addr() / PAGE * PAGE;
            // SAFETY: a page of the mapping, which the call does not write to.
            let can =
                unsafe { libc::madvise(std::ptr::without_provenance_mut(page), PAGE, libc::MADV_POPULATE_READ) } == 0;
            assert_eq!(mapped, if can { pieces } else { 0 });
            drop(PagePrefetch::new(&model, std::iter::empty()));
        }
    }
}

/// Elsewhere no page is mapped before it is read.
#[cfg(not(target_os = "linux"))]
pub(crate) struct PagePrefetch;

#[cfg(not(target_os = "linux"))]
impl PagePrefetch {
    pub fn new(_: &crate::model::Model, _: impl Iterator<Item = usize>) -> Option<PagePrefetch> {
        None
    }

    pub fn begin(&self) {}
}

#[cfg(test)]
mod tests {
    use loaf_formats::dtype::DType;

    use super::*;
    use loaf_kernels::Run;

    #[test]
    fn an_expert_is_asked_for_once() {
        let spec = OpKind::ExpertLinearDense.spec();
        let mut starts = [0u32, 0, 2, 2, 3];
        let weights = [0u8; 64];
        let mut operands = vec![RawOperand::ABSENT; spec.operands.len()];
        let index = |name| spec.operands.iter().position(|o| o.name == name).expect("an operand");
        let to = |ptr: *mut u8, dtype| RawOperand { ptr, dtype, row_stride: 4, head_stride: 4 };
        operands[index("starts")] = to(starts.as_mut_ptr().cast(), DType::U32);
        operands[index("weight")] = to(weights.as_ptr().cast_mut(), DType::F32);
        let attrs = [3u64, 1, 4, 1, 1, 0, 1];
        let call = OpCall {
            kind: OpKind::ExpertLinearDense,
            operands: &operands,
            attrs: &attrs,
            runs: &[Run::ONE],
            again: false,
        };
        let mut asked = Asked::of(&call).expect("experts");
        assert_eq!(asked.bits, [0]);
        // SAFETY: the operands are the arrays above; advice about memory that is no file's changes
        // nothing.
        unsafe { asked.ask(&call) };
        assert_eq!(asked.bits, [0b1010]);
        let none = OpCall { kind: OpKind::LinearDense, ..call };
        assert!(Asked::of(&none).is_none());
    }
}
