//! How dense weights are quantised.

/// What the user asked for; weights the checkpoint holds quantised are copied whatever stands here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantOptions {
    /// Bits of a code (2, 3, 4, 5, 6, 8); `None` leaves everything as it is.
    pub bits: Option<u8>,
    /// Weights per scale: 32, 64 or 128.
    pub group: u64,
}

impl Default for QuantOptions {
    fn default() -> Self {
        QuantOptions { bits: None, group: 64 }
    }
}
