//! Placeholder until the oracle lands.
use super::OpCall;
use std::ops::Range;
pub(super) unsafe fn run(_: &OpCall<'_>, _: Range<usize>, _: &mut [u8]) {}
