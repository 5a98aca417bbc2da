//! Strings and lists that cannot be read or grown without paying.
//!
//! A rendering has a [`Budget`] of steps and of bytes held. The bytes of a [`Text`] and the items
//! of an [`Items`] are private to this folder, and every function here that reads or writes them
//! charges the budget first, in proportion to what it is about to touch. So a filter, test or
//! method that reads for free cannot be written outside of this folder: it does not compile
//! (`tests/paid.rs` tries). Three things are free, all of constant cost: cloning, which shares;
//! lengths in bytes or items; and dropping, which was paid for when the parts were made.
//!
//! The other account is memory: [`Buf`] and `Items` are the only ways to make a string or list,
//! they charge for capacity before they allocate it, and give it back when the last owner drops it.
//!
//! Texts also remember which of their bytes came from the caller, see [`Text`].
//! What this does not do: it knows no values and no operators.

mod budget;
mod items;
mod text;

pub(crate) use budget::Budget;
pub use budget::Limits;
pub(crate) use items::Items;
pub(crate) use text::{Buf, Literal, Text};
