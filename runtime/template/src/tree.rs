//! What a template is once parsed: statements and expressions.
//!
//! Strings and names stand in a table, once each, and the tree has their numbers: comparing names
//! is comparing numbers, and a rendering can read a string of the template in no other way than to
//! pay for it.

use std::collections::HashMap;
use std::sync::Arc;

use crate::error::Position;
use crate::paid::Literal;
use crate::value::Symbol;

/// The variable that holds what a block wrote, for its filters.
pub(crate) const BLOCK: Symbol = 0;
/// The variable that says where a loop stands.
pub(crate) const LOOP: Symbol = 1;
/// The variable that holds the block of a `call`.
pub(crate) const CALLER: Symbol = 2;

pub(crate) struct Expr {
    pub(crate) kind: Kind,
    pub(crate) at: Position,
    /// Nodes from here to its deepest leaf.
    pub(crate) height: u16,
}

pub(crate) enum Kind {
    Name(Symbol),
    Str(Symbol),
    Int(i128),
    Float(f64),
    Bool(bool),
    None,
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Map(Vec<(Expr, Expr)>),
    Attr(Box<Expr>, Symbol),
    Item(Box<Expr>, Box<Expr>),
    /// Start, stop, step.
    Slice(Box<Expr>, [Option<Box<Expr>>; 3]),
    Call(Box<Expr>, Args),
    Filter(Box<Expr>, Symbol, Args),
    Test(Box<Expr>, Symbol, Vec<Expr>),
    Not(Box<Expr>),
    Neg(Box<Expr>),
    And(Box<Expr>, Box<Expr>),
    Or(Box<Expr>, Box<Expr>),
    Binary(&'static str, Box<Expr>, Box<Expr>),
    /// `a < b <= c`: all of them hold.
    Compare(Box<Expr>, Vec<(&'static str, Expr)>),
    /// Condition, then, else.
    Cond(Box<Expr>, Box<Expr>, Option<Box<Expr>>),
}

impl Kind {
    pub(crate) fn children<'a>(&'a self, see: &mut dyn FnMut(&'a Expr)) {
        match self {
            Kind::Name(_) | Kind::Str(_) | Kind::Int(_) | Kind::Float(_) | Kind::Bool(_) | Kind::None => {}
            Kind::List(list) | Kind::Tuple(list) => list.iter().for_each(see),
            Kind::Map(pairs) => pairs.iter().flat_map(|(k, v)| [k, v]).for_each(see),
            Kind::Attr(a, _) | Kind::Not(a) | Kind::Neg(a) => see(a),
            Kind::Item(a, b) | Kind::And(a, b) | Kind::Or(a, b) | Kind::Binary(_, a, b) => {
                see(a);
                see(b);
            }
            Kind::Slice(a, parts) => {
                see(a);
                parts.iter().flatten().for_each(|e| see(e));
            }
            Kind::Call(a, args) | Kind::Filter(a, _, args) => {
                see(a);
                args.positional
                    .iter()
                    .chain(args.spread.as_deref())
                    .chain(args.named.iter().map(|(_, e)| e))
                    .for_each(see);
            }
            Kind::Test(a, _, args) => {
                see(a);
                args.iter().for_each(see);
            }
            Kind::Compare(a, rest) => {
                see(a);
                rest.iter().for_each(|(_, e)| see(e));
            }
            Kind::Cond(a, b, c) => {
                see(a);
                see(b);
                c.iter().for_each(|e| see(e));
            }
        }
    }
}

#[derive(Default)]
pub(crate) struct Args {
    pub(crate) positional: Vec<Expr>,
    /// What stands after `*`: more positional ones.
    pub(crate) spread: Option<Box<Expr>>,
    pub(crate) named: Vec<(Symbol, Expr)>,
}

pub(crate) struct Macro {
    pub(crate) id: usize,
    pub(crate) name: Symbol,
    pub(crate) params: Vec<(Symbol, Option<Expr>)>,
    pub(crate) body: Vec<Stmt>,
}

pub(crate) enum Target {
    Name(Symbol),
    Attr(Symbol, Symbol),
    Names(Vec<Symbol>),
}

pub(crate) struct For {
    pub(crate) target: Target,
    pub(crate) over: Expr,
    pub(crate) only: Option<Expr>,
    pub(crate) body: Vec<Stmt>,
    pub(crate) otherwise: Vec<Stmt>,
}

pub(crate) enum Stmt {
    Raw(Symbol),
    Emit(Expr),
    If(Vec<(Expr, Vec<Stmt>)>, Vec<Stmt>),
    For(Box<For>),
    Set(Target, Expr),
    /// The body's text is the variable `""` ([`BLOCK`]) of the expression.
    SetBlock(Target, Expr, Vec<Stmt>),
    Filter(Expr, Vec<Stmt>),
    With(Vec<(Symbol, Expr)>, Vec<Stmt>),
    Macro(Macro),
    /// A call, and what its macro knows as `caller`.
    Call(Expr, Macro),
    Break,
    Continue,
}

/// A parsed template.
pub(crate) struct Tree {
    pub(crate) body: Vec<Stmt>,
    /// How many macros there are.
    pub(crate) macros: usize,
    /// The strings in it, by number.
    pub(crate) literals: Vec<Literal>,
    /// Their numbers.
    symbols: HashMap<Arc<str>, Symbol>,
}

impl Tree {
    /// A tree of nothing, which knows the strings that have fixed numbers.
    pub(crate) fn new() -> Tree {
        let mut tree = Tree { body: Vec::new(), macros: 0, literals: Vec::new(), symbols: HashMap::new() };
        for (text, symbol) in [("", BLOCK), ("loop", LOOP), ("caller", CALLER)] {
            assert_eq!(tree.intern(text), symbol);
        }
        tree
    }

    /// The number of a string, which is a new one unless it is there already.
    pub(crate) fn intern(&mut self, text: &str) -> Symbol {
        if let Some(symbol) = self.symbols.get(text) {
            return *symbol;
        }
        // Fewer than 2^32: the parser counts parts.
        let (text, symbol) = (Arc::from(text), self.literals.len() as Symbol);
        self.literals.push(Literal::new(&text));
        self.symbols.insert(text, symbol);
        symbol
    }

    /// The number of a string, if the template has it.
    pub(crate) fn symbol(&self, text: &str) -> Option<Symbol> {
        self.symbols.get(text).copied()
    }
}
