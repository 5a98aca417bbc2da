//! Tokens to a tree.
//!
//! The tree has limited size and height, so building, walking and dropping it take limited memory
//! and stack. Macros are numbered, so that values need not point into it.
//! What this does not do: inheritance, imports and includes (a template is one file), `do`, `raw`,
//! recursive loops. Chat templates use none.

use std::borrow::Cow;
use std::fmt;

use crate::error::{Error, ErrorKind, Position, Result};
use crate::lex::{Lexer, Token};
use crate::tree::{Args, BLOCK, CALLER, Expr, For, Kind, Macro, Stmt, Target, Tree};
use crate::value::Symbol;

/// Nodes of a tree.
const MAX_NODES: u32 = 100_000;
/// Bytes of the source that an error repeats.
const MAX_QUOTED_BYTES: usize = 500;
/// Nodes from the root of an expression to its deepest leaf, and statements within statements.
const MAX_HEIGHT: u16 = 100;

/// Parses a whole template.
pub(crate) fn parse(source: &str) -> Result<Tree> {
    // As Jinja does: every line ends with a line feed.
    let source = match source.contains('\r') {
        true => Cow::Owned(source.replace("\r\n", "\n").replace('\r', "\n")),
        false => Cow::Borrowed(source),
    };
    let lexer = Lexer::new(&source);
    let mut parser = Parser { at: lexer.here, lexer, token: Token::End, nodes: 0, depth: 0, tree: Tree::new() };
    parser.advance()?;
    let (body, _) = parser.body(&[])?;
    if parser.token != Token::End {
        return Err(parser.unexpected("the end of the template"));
    }
    parser.tree.body = body;
    Ok(parser.tree)
}

struct Parser<'a> {
    lexer: Lexer<'a>,
    token: Token<'a>,
    /// Where the token starts.
    at: Position,
    nodes: u32,
    depth: u16,
    tree: Tree,
}

impl<'a> Parser<'a> {
    fn error(&self, what: impl fmt::Display) -> Error {
        Error::new(ErrorKind::Syntax, self.at, what)
    }

    fn unexpected(&self, expected: &str) -> Error {
        self.error(format_args!("expected {expected}, found {}", describe(&self.token)))
    }

    fn advance(&mut self) -> Result<Token<'a>> {
        let next = self.lexer.next()?;
        self.at = self.lexer.start;
        Ok(std::mem::replace(&mut self.token, next))
    }

    fn is_op(&self, op: &str) -> bool {
        matches!(self.token, Token::Op(o) if o == op)
    }

    fn is_name(&self, name: &str) -> bool {
        matches!(self.token, Token::Name(n) if n == name)
    }

    fn take_op(&mut self, op: &str) -> Result<bool> {
        let found = self.is_op(op);
        if found {
            self.advance()?;
        }
        Ok(found)
    }

    fn take_name(&mut self, name: &str) -> Result<bool> {
        let found = self.is_name(name);
        if found {
            self.advance()?;
        }
        Ok(found)
    }

    fn expect_op(&mut self, op: &str) -> Result<()> {
        if self.take_op(op)? { Ok(()) } else { Err(self.unexpected(op)) }
    }

    fn name(&mut self) -> Result<Symbol> {
        match self.token {
            Token::Name(name) => {
                self.advance()?;
                Ok(self.tree.intern(name))
            }
            _ => Err(self.unexpected("a name")),
        }
    }

    fn numbered(&mut self, name: Symbol, params: Vec<(Symbol, Option<Expr>)>, body: Vec<Stmt>) -> Macro {
        self.tree.macros += 1;
        Macro { id: self.tree.macros - 1, name, params, body }
    }

    fn block_end(&mut self) -> Result<()> {
        if self.token != Token::BlockEnd {
            return Err(self.unexpected("%}"));
        }
        self.advance().map(drop)
    }

    fn count(&mut self) -> Result<()> {
        self.nodes += 1;
        if self.nodes > MAX_NODES {
            return Err(self.error(format_args!("expected a template of at most {MAX_NODES} parts")));
        }
        Ok(())
    }

    fn node(&mut self, at: Position, kind: Kind) -> Result<Expr> {
        self.count()?;
        let mut height = 0;
        kind.children(&mut |e| height = height.max(e.height + 1));
        if height > MAX_HEIGHT {
            return Err(self.error(format_args!("expected expressions nested at most {MAX_HEIGHT} deep")));
        }
        Ok(Expr { kind, at, height })
    }

    /// Runs `inner` one level deeper.
    fn deeper<T>(&mut self, inner: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if self.depth >= MAX_HEIGHT {
            return Err(self.error(format_args!("expected a template nested at most {MAX_HEIGHT} deep")));
        }
        self.depth += 1;
        let result = inner(self);
        self.depth -= 1;
        result
    }

    /// Statements up to one of the tags `ends` (or the end of the source, if there are none), and
    /// which it was.
    fn body(&mut self, ends: &[&'static str]) -> Result<(Vec<Stmt>, &'static str)> {
        self.deeper(|p| p.statements(ends))
    }

    fn statements(&mut self, ends: &[&'static str]) -> Result<(Vec<Stmt>, &'static str)> {
        let mut body = Vec::new();
        loop {
            self.count()?;
            match self.token {
                Token::Raw(text) => {
                    self.advance()?;
                    let text = self.tree.intern(text);
                    body.push(Stmt::Raw(text));
                }
                Token::PrintStart => {
                    self.advance()?;
                    let expr = self.tuple()?;
                    if self.token != Token::PrintEnd {
                        return Err(self.unexpected("}}"));
                    }
                    self.advance()?;
                    body.push(Stmt::Emit(expr));
                }
                Token::BlockStart => {
                    self.advance()?;
                    let Token::Name(tag) = self.token else { return Err(self.unexpected("the name of a tag")) };
                    if let Some(end) = ends.iter().find(|e| **e == tag) {
                        self.advance()?;
                        return Ok((body, end));
                    }
                    body.push(self.statement(tag)?);
                }
                _ if ends.is_empty() => return Ok((body, "")),
                _ => return Err(self.unexpected(ends[0])),
            }
        }
    }

    fn until(&mut self, end: &'static str) -> Result<Vec<Stmt>> {
        self.block_end()?;
        let (body, _) = self.body(&[end])?;
        // Some like to repeat a macro's name.
        if end == "endmacro" && matches!(self.token, Token::Name(_)) {
            self.advance()?;
        }
        self.block_end()?;
        Ok(body)
    }

    fn statement(&mut self, tag: &str) -> Result<Stmt> {
        let at = self.at;
        self.advance()?;
        match tag {
            "if" => self.branches(),
            "for" => self.each(),
            "set" => self.set(),
            "macro" => {
                let name = self.name()?;
                let params = self.params()?;
                let body = self.until("endmacro")?;
                Ok(Stmt::Macro(self.numbered(name, params, body)))
            }
            "call" => {
                let params = if self.is_op("(") { self.params()? } else { Vec::new() };
                let call = self.expr()?;
                if !matches!(call.kind, Kind::Call(..)) {
                    return Err(self.error("expected a call"));
                }
                let body = self.until("endcall")?;
                Ok(Stmt::Call(call, self.numbered(CALLER, params, body)))
            }
            "filter" => {
                let at = self.at;
                let name = self.name()?;
                let args = self.maybe_args()?;
                let block = self.node(at, Kind::Name(BLOCK))?;
                let first = self.node(at, Kind::Filter(Box::new(block), name, args))?;
                let filters = self.filters(first)?;
                Ok(Stmt::Filter(filters, self.until("endfilter")?))
            }
            "with" => {
                let mut vars = Vec::new();
                while self.token != Token::BlockEnd {
                    let name = self.name()?;
                    self.expect_op("=")?;
                    vars.push((name, self.expr()?));
                    if !self.take_op(",")? {
                        break;
                    }
                }
                Ok(Stmt::With(vars, self.until("endwith")?))
            }
            // Marks what a model says, for training.
            "generation" => Ok(Stmt::With(Vec::new(), self.until("endgeneration")?)),
            "break" | "continue" => {
                self.block_end()?;
                Ok(if tag == "break" { Stmt::Break } else { Stmt::Continue })
            }
            _ => {
                let found = clipped(tag);
                Err(Error::new(ErrorKind::Syntax, at, format_args!("expected a tag of chat templates, found {found}")))
            }
        }
    }

    fn branches(&mut self) -> Result<Stmt> {
        let mut arms = Vec::new();
        let mut condition = self.tuple()?;
        loop {
            self.block_end()?;
            let (body, end) = self.body(&["endif", "else", "elif"])?;
            arms.push((condition, body));
            match end {
                "elif" => condition = self.tuple()?,
                "else" => return Ok(Stmt::If(arms, self.until("endif")?)),
                _ => {
                    self.block_end()?;
                    return Ok(Stmt::If(arms, Vec::new()));
                }
            }
        }
    }

    fn each(&mut self) -> Result<Stmt> {
        let target = self.target()?;
        if !self.take_name("in")? {
            return Err(self.unexpected("in"));
        }
        // Without a conditional expression, whose `if` would be the loop's.
        let over = self.or()?;
        let only = if self.take_name("if")? { Some(self.expr()?) } else { None };
        if self.is_name("recursive") {
            return Err(self.error("expected a loop that is not recursive"));
        }
        self.block_end()?;
        let (body, end) = self.body(&["endfor", "else"])?;
        let otherwise = if end == "else" {
            self.until("endfor")?
        } else {
            self.block_end()?;
            Vec::new()
        };
        Ok(Stmt::For(Box::new(For { target, over, only, body, otherwise })))
    }

    fn target(&mut self) -> Result<Target> {
        let open = self.take_op("(")?;
        let name = self.name()?;
        let target = if self.take_op(".")? {
            Target::Attr(name, self.name()?)
        } else if self.is_op(",") {
            let mut names = vec![name];
            while self.take_op(",")? {
                self.count()?;
                names.push(self.name()?);
            }
            Target::Names(names)
        } else {
            Target::Name(name)
        };
        if open {
            self.expect_op(")")?;
        }
        Ok(target)
    }

    fn set(&mut self) -> Result<Stmt> {
        let target = self.target()?;
        if self.take_op("=")? {
            let value = self.tuple()?;
            self.block_end()?;
            return Ok(Stmt::Set(target, value));
        }
        let block = self.node(self.at, Kind::Name(BLOCK))?;
        let filters = self.filters(block)?;
        Ok(Stmt::SetBlock(target, filters, self.until("endset")?))
    }

    fn params(&mut self) -> Result<Vec<(Symbol, Option<Expr>)>> {
        self.expect_op("(")?;
        let mut params = Vec::new();
        while !self.take_op(")")? {
            self.count()?;
            let name = self.name()?;
            let default = if self.take_op("=")? { Some(self.expr()?) } else { None };
            params.push((name, default));
            if !self.is_op(")") {
                self.expect_op(",")?;
            }
        }
        Ok(params)
    }

    /// An expression, or several with commas between them: a list.
    fn tuple(&mut self) -> Result<Expr> {
        let at = self.at;
        let first = self.expr()?;
        if !self.is_op(",") {
            return Ok(first);
        }
        let mut list = vec![first];
        while self.take_op(",")? {
            if matches!(self.token, Token::BlockEnd | Token::PrintEnd | Token::Op(")")) {
                break;
            }
            list.push(self.expr()?);
        }
        self.node(at, Kind::Tuple(list))
    }

    fn expr(&mut self) -> Result<Expr> {
        self.deeper(|p| {
            let at = p.at;
            let mut value = p.or()?;
            while p.take_name("if")? {
                let condition = p.or()?;
                let otherwise = if p.take_name("else")? { Some(Box::new(p.expr()?)) } else { None };
                value = p.node(at, Kind::Cond(Box::new(condition), Box::new(value), otherwise))?;
            }
            Ok(value)
        })
    }

    fn or(&mut self) -> Result<Expr> {
        let at = self.at;
        let mut left = self.and()?;
        while self.take_name("or")? {
            let right = self.and()?;
            left = self.node(at, Kind::Or(Box::new(left), Box::new(right)))?;
        }
        Ok(left)
    }

    fn and(&mut self) -> Result<Expr> {
        let at = self.at;
        let mut left = self.not()?;
        while self.take_name("and")? {
            let right = self.not()?;
            left = self.node(at, Kind::And(Box::new(left), Box::new(right)))?;
        }
        Ok(left)
    }

    fn not(&mut self) -> Result<Expr> {
        let at = self.at;
        if !self.take_name("not")? {
            return self.compare();
        }
        let inner = self.deeper(Self::not)?;
        self.node(at, Kind::Not(Box::new(inner)))
    }

    fn compare(&mut self) -> Result<Expr> {
        let at = self.at;
        let first = self.binary(0)?;
        let mut rest = Vec::new();
        loop {
            let op = match self.token {
                Token::Op(op @ ("==" | "!=" | "<" | ">" | "<=" | ">=")) => op,
                Token::Name("in") => "in",
                Token::Name("not") => "not in",
                _ => break,
            };
            self.advance()?;
            if op == "not in" && !self.take_name("in")? {
                return Err(self.unexpected("in"));
            }
            rest.push((op, self.binary(0)?));
        }
        if rest.is_empty() { Ok(first) } else { self.node(at, Kind::Compare(Box::new(first), rest)) }
    }

    /// Operators by how tightly they bind; all bind to the left.
    fn binary(&mut self, level: usize) -> Result<Expr> {
        const LEVELS: [&[&str]; 4] = [&["+", "-"], &["~"], &["*", "/", "//", "%"], &["**"]];
        let Some(ops) = LEVELS.get(level) else { return self.unary(true) };
        let at = self.at;
        let mut left = self.binary(level + 1)?;
        while let Token::Op(op) = self.token
            && ops.contains(&op)
        {
            self.advance()?;
            let right = self.binary(level + 1)?;
            left = self.node(at, Kind::Binary(op, Box::new(left), Box::new(right)))?;
        }
        Ok(left)
    }

    fn unary(&mut self, filters: bool) -> Result<Expr> {
        let at = self.at;
        let mut value = if self.take_op("-")? {
            let inner = self.deeper(|p| p.unary(false))?;
            self.node(at, Kind::Neg(Box::new(inner)))?
        } else if self.take_op("+")? {
            self.deeper(|p| p.unary(false))?
        } else {
            self.primary()?
        };
        value = self.postfix(value)?;
        if filters { self.filters(value) } else { Ok(value) }
    }

    fn primary(&mut self) -> Result<Expr> {
        let at = self.at;
        let kind = match self.advance()? {
            Token::Name("true" | "True") => Kind::Bool(true),
            Token::Name("false" | "False") => Kind::Bool(false),
            Token::Name("none" | "None") => Kind::None,
            Token::Name(name) => Kind::Name(self.tree.intern(name)),
            Token::Int(i) => Kind::Int(i),
            Token::Float(f) => Kind::Float(f),
            Token::Str(mut text) => {
                while let Token::Str(more) = &self.token {
                    text.push_str(more);
                    self.advance()?;
                }
                Kind::Str(self.tree.intern(&text))
            }
            Token::Op("(") => {
                if self.take_op(")")? {
                    Kind::Tuple(Vec::new())
                } else {
                    let inner = self.tuple()?;
                    self.expect_op(")")?;
                    return Ok(inner);
                }
            }
            Token::Op("[") => {
                let mut list = Vec::new();
                while !self.take_op("]")? {
                    list.push(self.expr()?);
                    if !self.is_op("]") {
                        self.expect_op(",")?;
                    }
                }
                Kind::List(list)
            }
            Token::Op("{") => {
                let mut pairs = Vec::new();
                while !self.take_op("}")? {
                    let key = self.expr()?;
                    self.expect_op(":")?;
                    pairs.push((key, self.expr()?));
                    if !self.is_op("}") {
                        self.expect_op(",")?;
                    }
                }
                Kind::Map(pairs)
            }
            other => return Err(self.error(format_args!("expected a value, found {}", describe(&other)))),
        };
        self.node(at, kind)
    }

    fn postfix(&mut self, mut value: Expr) -> Result<Expr> {
        loop {
            let at = self.at;
            let kind = if self.take_op(".")? {
                match self.advance()? {
                    Token::Name(name) => Kind::Attr(Box::new(value), self.tree.intern(name)),
                    Token::Int(i) => Kind::Item(Box::new(value), Box::new(self.node(at, Kind::Int(i))?)),
                    _ => return Err(self.unexpected("a name after a dot, before")),
                }
            } else if self.take_op("[")? {
                self.subscript(value)?
            } else if self.is_op("(") {
                Kind::Call(Box::new(value), self.maybe_args()?)
            } else {
                return Ok(value);
            };
            value = self.node(at, kind)?;
        }
    }

    fn subscript(&mut self, value: Expr) -> Result<Kind> {
        let mut parts = [const { None }; 3];
        let mut part = 0;
        loop {
            if self.take_op("]")? {
                break;
            }
            if self.take_op(":")? {
                part += 1;
                if part == 3 {
                    return Err(self.unexpected("]"));
                }
            } else if parts[part].is_none() {
                parts[part] = Some(Box::new(self.expr()?));
            } else {
                return Err(self.unexpected("]"));
            }
        }
        match (part, parts) {
            (0, [Some(index), ..]) => Ok(Kind::Item(Box::new(value), index)),
            (0, _) => Err(self.error("expected an index within [ ]")),
            (_, parts) => Ok(Kind::Slice(Box::new(value), parts)),
        }
    }

    fn maybe_args(&mut self) -> Result<Args> {
        let mut args = Args::default();
        if !self.take_op("(")? {
            return Ok(args);
        }
        while !self.take_op(")")? {
            if args.spread.is_none() && self.take_op("*")? {
                args.spread = Some(Box::new(self.expr()?));
                if !self.is_op(")") {
                    self.expect_op(",")?;
                }
                continue;
            }
            let value = self.expr()?;
            match value.kind {
                Kind::Name(name) if self.is_op("=") => {
                    self.advance()?;
                    args.named.push((name, self.expr()?));
                }
                _ => args.positional.push(value),
            }
            if !self.is_op(")") {
                self.expect_op(",")?;
            }
        }
        Ok(args)
    }

    /// Filters and tests after a value, and calls of what they give.
    fn filters(&mut self, mut value: Expr) -> Result<Expr> {
        loop {
            let at = self.at;
            if self.take_op("|")? {
                let name = self.name()?;
                let args = self.maybe_args()?;
                value = self.node(at, Kind::Filter(Box::new(value), name, args))?;
            } else if self.take_name("is")? {
                let negated = self.take_name("not")?;
                let name = match self.token {
                    Token::Op(op @ ("==" | "!=" | "<" | ">" | "<=" | ">=")) => {
                        self.advance()?;
                        self.tree.intern(op)
                    }
                    _ => self.name()?,
                };
                let args = self.test_args()?;
                value = self.node(at, Kind::Test(Box::new(value), name, args))?;
                if negated {
                    value = self.node(at, Kind::Not(Box::new(value)))?;
                }
            } else {
                return Ok(value);
            }
        }
    }

    fn test_args(&mut self) -> Result<Vec<Expr>> {
        match self.token {
            Token::Op("(") => Ok(self.maybe_args()?.positional),
            Token::Name("else" | "or" | "and" | "if" | "in" | "not" | "is") => Ok(Vec::new()),
            Token::Name(_) | Token::Str(_) | Token::Int(_) | Token::Float(_) | Token::Op("[" | "{") => {
                let value = self.primary()?;
                Ok(vec![self.postfix(value)?])
            }
            _ => Ok(Vec::new()),
        }
    }
}

/// As much of the source as an error should repeat.
fn clipped(text: &str) -> String {
    text[..text.floor_char_boundary(MAX_QUOTED_BYTES)].to_owned()
}

fn describe(token: &Token<'_>) -> String {
    match token {
        Token::Raw(_) => "text".into(),
        Token::BlockStart => "{%".into(),
        Token::BlockEnd => "%}".into(),
        Token::PrintStart => "{{".into(),
        Token::PrintEnd => "}}".into(),
        Token::Name(name) => clipped(name),
        Token::Str(text) => format!("the string {:?}", clipped(text)),
        Token::Int(i) => i.to_string(),
        Token::Float(f) => f.to_string(),
        Token::Op(op) => (*op).into(),
        Token::End => "the end of the template".into(),
    }
}
