//! What a row of the op table is made of, and the macro that writes one.

use crate::dtype::{DType, WEIGHT_PLANES, WeightFormat};
use crate::op::OpKind;

/// What an op does with an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Read only.
    In,
    /// Written entirely, never read.
    Out,
    /// Updated in place (caches, recurrent state).
    InOut,
}

/// Admissible element types of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Types {
    /// Exactly this one.
    Is(DType),
    /// Any float type.
    Float,
    /// `f32` or `f16`: what a KV cache holds.
    Cache,
    /// Plane `i` of the weight format in the op's `format` attribute; absent if the format has
    /// fewer planes.
    Plane(u8),
}

/// One extent of an operand, computed from the op's attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dim {
    /// 1.
    One,
    /// The attribute with this index.
    Attr(u8),
    /// The product of two attributes.
    Mul(u8, u8),
    /// Attribute plus one.
    Inc(u8),
    /// Attribute minus one.
    Dec(u8),
    /// Twice an attribute.
    Twice(u8),
    /// The quotient of two attributes, which must be exact.
    Div(u8, u8),
    /// Elements of a plane in one stored row: attribute (inputs), attribute (format), plane.
    Plane(u8, u8, u8),
    /// Activation groups of a row for a weight format: attribute (inputs), attribute (format).
    Groups(u8, u8),
}

impl Dim {
    /// The extent for these attribute words; `None` if an attribute is missing, a division is not
    /// exact, a format does not divide its row, or the result overflows.
    #[inline]
    pub fn value(self, attrs: &[u64]) -> Option<u64> {
        let at = |i: u8| attrs.get(usize::from(i)).copied();
        match self {
            Dim::One => Some(1),
            Dim::Attr(i) => at(i),
            Dim::Mul(i, j) => at(i)?.checked_mul(at(j)?),
            Dim::Inc(i) => at(i)?.checked_add(1),
            Dim::Dec(i) => at(i)?.checked_sub(1),
            Dim::Twice(i) => at(i)?.checked_mul(2),
            Dim::Div(i, j) => {
                let (n, d) = (at(i)?, at(j)?);
                (d != 0 && n % d == 0).then(|| n / d)
            }
            Dim::Plane(i, f, plane) => WeightFormat::from_code(at(f)?)?.plane(usize::from(plane))?.row_elems(at(i)?),
            Dim::Groups(i, f) => {
                let (n, group) = (at(i)?, WeightFormat::from_code(at(f)?)?.activation_group()?);
                (n % group == 0).then(|| n / group)
            }
        }
    }
}

/// One operand of an op.
#[derive(Clone, Copy, Debug)]
pub struct OperandSpec {
    /// Name in dumps and errors; the planes of a weight share one.
    pub name: &'static str,
    /// Direction.
    pub mode: Mode,
    /// Element types.
    pub types: Types,
    /// `[rows, heads, dim]`.
    pub dims: [Dim; 3],
    /// The inputs whose very view (address, strides, extent) this output may be.
    pub over: &'static [&'static str],
}

impl OperandSpec {
    /// Whether the operand is a plane of a weight.
    pub const fn is_plane(&self) -> bool {
        matches!(self.types, Types::Plane(_))
    }

    /// Whether a graph has a value for it: a weight is one value there, whatever its planes.
    pub const fn is_graph_operand(&self) -> bool {
        !matches!(self.types, Types::Plane(1..))
    }

    /// An operand of one tensor.
    pub(super) const fn one(
        name: &'static str,
        mode: Mode,
        types: Types,
        dims: [Dim; 3],
        over: &'static [&'static str],
    ) -> [Self; 1] {
        [OperandSpec { name, mode, types, dims, over }]
    }

    /// The planes of a weight whose rows, `[rows, heads]` of them, have `inputs` weights in
    /// `format` (attributes).
    pub(super) const fn planes(
        name: &'static str,
        rows: Dim,
        heads: Dim,
        inputs: u8,
        format: u8,
    ) -> [Self; WEIGHT_PLANES] {
        let none = OperandSpec { name, mode: Mode::In, types: Types::Plane(0), dims: [Dim::One; 3], over: &[] };
        let mut out = [none; WEIGHT_PLANES];
        let mut i = 0;
        while i < WEIGHT_PLANES {
            out[i].types = Types::Plane(i as u8);
            out[i].dims = [rows, heads, Dim::Plane(inputs, format, i as u8)];
            i += 1;
        }
        out
    }
}

/// How an attribute word is to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttrKind {
    /// A count; at least 1, at most [`MAX_COUNT`].
    Count,
    /// A flag or a count that may be 0.
    Flag,
    /// The bits of an `f32`, finite.
    Real,
    /// [`WeightFormat::code`].
    Format,
}

/// One attribute of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttrSpec {
    /// Name in dumps and errors.
    pub name: &'static str,
    /// Reading.
    pub kind: AttrKind,
}

/// A row of the op table.
#[derive(Clone, Copy, Debug)]
pub struct OpSpec {
    /// Which op.
    pub kind: OpKind,
    /// Name in dumps.
    pub name: &'static str,
    /// Whether the op may stand in a plan (graph-only ops may not).
    pub in_plan: bool,
    /// Operands in record order: inputs, then in-out, then outputs.
    pub operands: &'static [OperandSpec],
    /// Attributes in record order; the first is `rows`.
    pub attrs: &'static [AttrSpec],
    check: fn(&[u64]) -> Result<(), &'static str>,
    macs: fn(&[u64], u64) -> u64,
    effort: fn(&[u64]) -> u64,
    touched: fn(&[u64], &str, u64) -> Option<Touched>,
}

/// Rows of an operand that an op reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touched {
    /// Rows read.
    pub read: u64,
    /// Rows written.
    pub written: u64,
}

impl OpSpec {
    /// Index of the attribute that holds the weight format, if the op has one.
    pub fn format_attr(&self) -> Option<usize> {
        self.attrs.iter().position(|a| a.kind == AttrKind::Format)
    }

    /// Index of the first operand with this name.
    pub fn operand_index(&self, name: &str) -> Option<usize> {
        self.operands.iter().position(|o| o.name == name)
    }

    /// Proves attribute words: each in its range, and together what the op's file demands.
    ///
    /// # Errors
    /// Which attribute, and what was expected of it.
    pub fn check(&self, attrs: &[u64]) -> Result<(), (&'static str, &'static str)> {
        if attrs.len() != self.attrs.len() {
            return Err(("attributes", "as many as the op has"));
        }
        for (rule, &v) in self.attrs.iter().zip(attrs) {
            let (ok, expected) = match rule.kind {
                AttrKind::Count => ((1..=MAX_COUNT).contains(&v), "a count from 1 to 2^31"),
                AttrKind::Flag => (v <= MAX_COUNT, "a flag or a count up to 2^31"),
                AttrKind::Real => (u32::try_from(v).is_ok_and(|b| f32::from_bits(b).is_finite()), "a finite f32"),
                AttrKind::Format => (WeightFormat::from_code(v).is_some(), "a weight format"),
            };
            if !ok {
                return Err((rule.name, expected));
            }
        }
        (self.check)(attrs).map_err(|expected| ("attributes", expected))
    }

    /// Multiply-adds with rows from position `pos` on, for checked attributes.
    pub fn macs(&self, attrs: &[u64], pos: u64) -> u64 {
        (self.macs)(attrs, pos)
    }

    /// How many times as long it takes as to touch what it touches, roughly.
    pub fn effort(&self, attrs: &[u64]) -> u64 {
        (self.effort)(attrs)
    }

    /// Rows of operand `i` that are read and written, for checked attributes and rows from position
    /// `pos` on.
    pub fn touched(&self, attrs: &[u64], i: usize, pos: u64) -> Touched {
        let Some(operand) = self.operands.get(i) else { return Touched { read: 0, written: 0 } };
        (self.touched)(attrs, operand.name, pos).unwrap_or_else(|| {
            let rows = operand.dims[0].value(attrs).unwrap_or(0);
            match operand.mode {
                Mode::In => Touched { read: rows, written: 0 },
                Mode::Out => Touched { read: 0, written: rows },
                Mode::InOut => Touched { read: rows, written: rows },
            }
        })
    }
}

/// No count in a plan may exceed this; products of two stay far from overflow.
pub const MAX_COUNT: u64 = 1 << 31;
/// Most operands an op has.
pub const MAX_OPERANDS: usize = 12;
/// Numbers of operands, in record order.
pub(super) const INDICES: [usize; MAX_OPERANDS] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11];
/// Most attributes an op has.
pub const MAX_ATTRS: usize = 12;

/// What an op's file says of it beyond names and extents. Attributes have passed their ranges.
pub trait Rules {
    /// What must hold of the attributes together; what no kernel computes is refused here too, and
    /// so at bake.
    ///
    /// # Errors
    /// What was expected.
    fn check(&self) -> Result<(), &'static str> {
        Ok(())
    }

    /// Multiply-adds, the rows being at positions from `pos` on.
    fn macs(&self, pos: u64) -> u64 {
        let _ = pos;
        0
    }

    /// How many times as long it takes as to touch what it touches, where arithmetic outweighs
    /// that: a rough number, by which a runtime tells what is worth several threads.
    fn effort(&self) -> u64 {
        1
    }

    /// Rows of an operand that are read and written, where that is not all of them.
    fn touched(&self, operand: &str, pos: u64) -> Option<Touched> {
        let _ = (operand, pos);
        None
    }
}

/// A product of counts, `u64::MAX` where it is more.
pub(super) fn product(counts: [usize; 4]) -> u64 {
    counts.iter().fold(1, |n, &count| n.saturating_mul(count as u64))
}

/// An op's attributes, by name.
pub trait OpAttrs: Rules + Copy {
    /// The op.
    const KIND: OpKind;

    /// Reads attribute words; missing ones read as 0, an unknown weight format as dense f32.
    fn of(words: &[u64]) -> Self;

    /// The attribute words, in record order, and how many they are.
    fn words(&self) -> ([u64; MAX_ATTRS], usize);
}

/// The row of the op whose attributes are `A`.
pub(super) const fn spec_of<A: OpAttrs>(
    name: &'static str,
    in_plan: bool,
    operands: &'static [OperandSpec],
    attrs: &'static [AttrSpec],
) -> OpSpec {
    assert!(operands.len() <= MAX_OPERANDS && attrs.len() <= MAX_ATTRS);
    fn check<A: OpAttrs>(words: &[u64]) -> Result<(), &'static str> {
        A::of(words).check()
    }
    fn macs<A: OpAttrs>(words: &[u64], pos: u64) -> u64 {
        A::of(words).macs(pos)
    }
    fn effort<A: OpAttrs>(words: &[u64]) -> u64 {
        A::of(words).effort()
    }
    fn touched<A: OpAttrs>(words: &[u64], operand: &str, pos: u64) -> Option<Touched> {
        A::of(words).touched(operand, pos)
    }
    OpSpec {
        kind: A::KIND,
        name,
        in_plan,
        operands,
        attrs,
        check: check::<A>,
        macs: macs::<A>,
        effort: effort::<A>,
        touched: touched::<A>,
    }
}

/// Lays operand lists end to end.
pub(super) const fn concat<const N: usize>(lists: &[&[OperandSpec]]) -> [OperandSpec; N] {
    let none = OperandSpec { name: "", mode: Mode::In, types: Types::Float, dims: [Dim::One; 3], over: &[] };
    let mut out = [none; N];
    let (mut list, mut n) = (0, 0);
    while list < lists.len() {
        let mut i = 0;
        while i < lists[list].len() {
            out[n] = lists[list][i];
            (i, n) = (i + 1, n + 1);
        }
        list += 1;
    }
    assert!(n == N);
    out
}

/// Takes the next operand, or the planes of the next weight, from a list in record order.
pub trait Take<T>: Sized {
    /// Takes it.
    fn take(operands: &mut std::slice::Iter<'_, T>) -> Self;
}

impl<T: Copy> Take<T> for T {
    fn take(operands: &mut std::slice::Iter<'_, T>) -> T {
        *operands.next().expect("as many operands as the op table says")
    }
}

impl<T: Copy> Take<T> for [T; WEIGHT_PLANES] {
    fn take(operands: &mut std::slice::Iter<'_, T>) -> [T; WEIGHT_PLANES] {
        std::array::from_fn(|_| T::take(operands))
    }
}

/// Writes an op down: its doc (the arithmetic), name, attributes and operands. Makes the op's
/// `SPEC`, its `Attrs` and its `Operands`, so that nobody counts either.
///
/// ```text
/// op! {
///     /// Arithmetic, order of every rounding.
///     KindName = "name", plan;                          // or `graph`: for graphs alone
///     attrs { rows: count, dim: count, eps: real, .. }  // count, flag, real, format
///     // or `attrs as other;`: those of op `other`, to the word, so that either may be read as the other's
///     operands {
///         x: reads F32 [rows, 1, dim],                  // reads, updates, writes; F32, U32, I8, Float, Cache
///         weight: reads Weight(dim, format) [out, 1],   // inputs of a row, format; then rows and heads
///         out: writes F32 [rows, 1, (2 * dim)] over x,  // 1, attr, (a * b), (a / b), (2 * a), (a + 1), (a - 1)
///     }
/// }
/// ```
macro_rules! op {
    (
        $(#[$doc:meta])*
        $kind:ident = $name:literal, $place:ident;
        attrs { $($attr:ident: $attr_kind:ident),* $(,)? }
        operands { $($operands:tt)* }
    ) => {
        #[allow(non_camel_case_types, dead_code, clippy::upper_case_acronyms)]
        #[derive(Clone, Copy)]
        #[repr(u8)]
        pub(super) enum At { $($attr),* }

        pub(super) static ATTRS: &[spec::AttrSpec] =
            &[ $( spec::AttrSpec { name: stringify!($attr), kind: op!(@kind $attr_kind) } ),* ];

        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq)]
        #[allow(missing_docs)]
        pub struct Attrs { $(pub $attr: op!(@attr $attr_kind)),* }

        impl OpAttrs for Attrs {
            const KIND: OpKind = OpKind::$kind;

            #[inline]
            fn of(words: &[u64]) -> Attrs {
                Attrs { $($attr: op!(@read $attr_kind words.get(At::$attr as usize).copied().unwrap_or(0))),* }
            }

            #[inline]
            fn words(&self) -> ([u64; spec::MAX_ATTRS], usize) {
                let mut out = [0; spec::MAX_ATTRS];
                $( out[At::$attr as usize] = op!(@write $attr_kind self.$attr); )*
                (out, ATTRS.len())
            }
        }

        op!(@table $name, $place; $($operands)*);
    };
    (
        $(#[$doc:meta])*
        $kind:ident = $name:literal, $place:ident;
        attrs as $base:ident;
        operands { $($operands:tt)* }
    ) => {
        use super::$base::{self, ATTRS, At};

        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub struct Attrs(
            #[doc = concat!("The attributes, which are those of `", stringify!($base), "`.")]
            pub $base::Attrs
        );

        impl std::ops::Deref for Attrs {
            type Target = $base::Attrs;

            #[inline(always)]
            fn deref(&self) -> &$base::Attrs {
                &self.0
            }
        }

        impl OpAttrs for Attrs {
            const KIND: OpKind = OpKind::$kind;

            #[inline]
            fn of(words: &[u64]) -> Attrs {
                Attrs($base::Attrs::of(words))
            }

            #[inline]
            fn words(&self) -> ([u64; spec::MAX_ATTRS], usize) {
                self.0.words()
            }
        }

        op!(@table $name, $place; $($operands)*);
    };

    (@table $name:literal, $place:ident;
        $(
            $operand:ident: $mode:ident $types:ident $(($inputs:ident, $format:ident))? [$($dim:tt),*]
            $(over $($over:ident),+ ;)?
        ),* $(,)?
    ) => {
        #[allow(unused_imports)]
        use $crate::op::spec::{self, OpAttrs, Rules, Touched};
        #[allow(unused_imports)]
        use $crate::{dtype::{DType, WeightFormat, WEIGHT_PLANES}, op::OpKind};

        const LISTS: &[&[spec::OperandSpec]] = &[ $(
            &op!(@operand $operand $mode $types $(($inputs, $format))? [$($dim),*] [$($($over),+)?])
        ),* ];
        const COUNT: usize = { let mut n = 0; let mut i = 0; while i < LISTS.len() { n += LISTS[i].len(); i += 1; } n };
        static OPERANDS: [spec::OperandSpec; COUNT] = spec::concat::<COUNT>(LISTS);

        /// The op's row of the table.
        pub static SPEC: spec::OpSpec = spec::spec_of::<Attrs>($name, op!(@place $place), &OPERANDS, ATTRS);

        /// The op's operands by name; a weight has its planes.
        #[allow(missing_docs, missing_debug_implementations)]
        pub struct Operands<T> { $(pub $operand: op!(@field $types T)),* }

        impl<T: Copy> Operands<T> {
            /// The operands of a list in record order.
            #[inline(always)]
            pub fn of(operands: &[T]) -> Operands<T> {
                let mut list = operands.iter();
                Operands { $($operand: <op!(@field $types T) as spec::Take<T>>::take(&mut list)),* }
            }
        }

        impl Operands<usize> {
            /// Where each operand stands in a record.
            pub fn indices() -> Operands<usize> {
                Operands::of(&spec::INDICES)
            }
        }
    };

    (@place plan) => { true };
    (@place graph) => { false };
    (@kind count) => { spec::AttrKind::Count };
    (@kind flag) => { spec::AttrKind::Flag };
    (@kind real) => { spec::AttrKind::Real };
    (@kind format) => { spec::AttrKind::Format };
    (@attr count) => { usize };
    (@attr flag) => { usize };
    (@attr real) => { f32 };
    (@attr format) => { WeightFormat };
    (@read count $word:expr) => { $word as usize };
    (@read flag $word:expr) => { $word as usize };
    (@read real $word:expr) => { f32::from_bits($word as u32) };
    (@read format $word:expr) => { WeightFormat::from_code($word).unwrap_or(WeightFormat::Dense(DType::F32)) };
    (@write count $value:expr) => { $value as u64 };
    (@write flag $value:expr) => { $value as u64 };
    (@write real $value:expr) => { u64::from($value.to_bits()) };
    (@write format $value:expr) => { $value.code() };
    (@field Weight $t:ident) => { [$t; WEIGHT_PLANES] };
    (@field $types:ident $t:ident) => { $t };
    (@mode reads) => { spec::Mode::In };
    (@mode updates) => { spec::Mode::InOut };
    (@mode writes) => { spec::Mode::Out };
    (@types Float) => { spec::Types::Float };
    (@types Cache) => { spec::Types::Cache };
    (@types $dtype:ident) => { spec::Types::Is(DType::$dtype) };
    (@operand $operand:ident reads Weight ($inputs:ident, $format:ident) [$rows:tt, $heads:tt] []) => {
        spec::OperandSpec::planes(stringify!($operand), op!(@dim $rows), op!(@dim $heads), At::$inputs as u8, At::$format as u8)
    };
    (@operand $operand:ident $mode:ident $types:ident [$rows:tt, $heads:tt, $dim:tt] [$($over:ident),*]) => {
        spec::OperandSpec::one(
            stringify!($operand),
            op!(@mode $mode),
            op!(@types $types),
            [op!(@dim $rows), op!(@dim $heads), op!(@dim $dim)],
            &[$(stringify!($over)),*],
        )
    };
    (@dim 1) => { spec::Dim::One };
    (@dim $a:ident) => { spec::Dim::Attr(At::$a as u8) };
    (@dim ($a:ident * $b:ident)) => { spec::Dim::Mul(At::$a as u8, At::$b as u8) };
    (@dim ($a:ident / $b:ident)) => { spec::Dim::Div(At::$a as u8, At::$b as u8) };
    (@dim (2 * $a:ident)) => { spec::Dim::Twice(At::$a as u8) };
    (@dim ($a:ident + 1)) => { spec::Dim::Inc(At::$a as u8) };
    (@dim ($a:ident - 1)) => { spec::Dim::Dec(At::$a as u8) };
    (@dim (groups of $a:ident in $f:ident)) => { spec::Dim::Groups(At::$a as u8, At::$f as u8) };
}
pub(super) use op;
