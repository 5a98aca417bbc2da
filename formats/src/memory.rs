//! Memory that is asked for: sizes that come from a file or an option are reserved fallibly, and
//! refused by name.

use std::fmt;

/// The system did not give the memory that something needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoMemory {
    /// What needs it.
    pub what: &'static str,
    /// How much, in bytes.
    pub bytes: u64,
}

impl fmt::Display for NoMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: expected {} bytes of memory, found fewer", self.what, self.bytes)
    }
}

impl std::error::Error for NoMemory {}

/// An empty vector with room for `n`.
///
/// # Errors
/// [`NoMemory`] where an ordinary vector would end the process.
pub fn reserved<T>(what: &'static str, n: u64) -> Result<Vec<T>, NoMemory> {
    let bytes = n.saturating_mul(size_of::<T>() as u64);
    let mut out = Vec::new();
    let len = usize::try_from(n).map_err(|_| NoMemory { what, bytes })?;
    out.try_reserve_exact(len).map_err(|_| NoMemory { what, bytes })?;
    Ok(out)
}

/// `n` copies of `value`.
///
/// # Errors
/// [`NoMemory`] where an ordinary vector would end the process.
pub fn filled<T: Clone>(what: &'static str, n: u64, value: T) -> Result<Vec<T>, NoMemory> {
    let mut out = reserved(what, n)?;
    // Whatever was reserved fits.
    out.resize(n as usize, value);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_does_not_give_is_named_with_its_size() {
        assert_eq!(filled("ones", 3, 1u16), Ok(vec![1, 1, 1]));
        for n in [1 << 60, u64::MAX] {
            let error = filled("rows", n, 0f32).unwrap_err().to_string();
            assert_eq!(error, format!("rows: expected {} bytes of memory, found fewer", n.saturating_mul(4)));
        }
    }
}
