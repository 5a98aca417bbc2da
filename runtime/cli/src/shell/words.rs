//! A command line as words, operators and redirections.

/// A part of a command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// A word, without its quotes.
    Word(String),
    /// `|` or `|&`.
    Pipe,
    /// What else ends a command: `;`, `&`, `&&`, `||`, a line break, a parenthesis.
    End,
    /// A redirection; the word after it is its file.
    Redirect(Redirect),
}

/// Where a redirection goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Redirect {
    /// `<`
    Input,
    /// `>>`
    Append,
    /// `>`, `>|`, `&>`
    Overwrite,
}

/// A command line in parts.
#[derive(Debug, Default)]
pub(super) struct Parsed {
    pub pieces: Vec<Piece>,
    /// Commands whose output stands in double quotes: `"$(...)"`.
    pub substitutions: Vec<String>,
}

struct Reader<'l> {
    rest: std::iter::Peekable<std::str::Chars<'l>>,
    parsed: Parsed,
    word: Option<String>,
}

/// Takes a line apart.
pub(super) fn pieces(line: &str) -> Parsed {
    let mut reader = Reader { rest: line.chars().peekable(), parsed: Parsed::default(), word: None };
    while let Some(c) = reader.rest.next() {
        reader.take(c);
    }
    reader.end_word();
    reader.parsed
}

impl Reader<'_> {
    fn take(&mut self, c: char) {
        match c {
            // `find -exec .. \;` ends in a word, not in an operator.
            '\\' => match self.rest.next() {
                Some('\n') | None => {}
                Some(c) => self.word.get_or_insert_default().push(c),
            },
            '\'' => {
                let word = self.word.get_or_insert_default();
                word.extend(self.rest.by_ref().take_while(|c| *c != '\''));
            }
            '"' => self.quoted(),
            '#' if self.word.is_none() => while self.rest.next_if(|c| *c != '\n').is_some() {},
            '|' => {
                let pipe = self.rest.next_if_eq(&'|').is_none();
                self.rest.next_if_eq(&'&');
                self.operator(if pipe { Piece::Pipe } else { Piece::End });
            }
            '&' if self.rest.next_if_eq(&'>').is_some() => self.redirect_out(),
            '>' => {
                // A number right before it is a file descriptor.
                self.word.take_if(|w| w.bytes().all(|b| b.is_ascii_digit()));
                self.redirect_out();
            }
            '<' => self.redirect_in(),
            ';' | '&' | '\n' | '(' | ')' | '`' => self.operator(Piece::End),
            // `${x}` is part of a word, `{ x; }` is not.
            '$' if self.rest.peek() == Some(&'{') => {
                let word = self.word.get_or_insert_default();
                word.push('$');
                word.extend(self.rest.by_ref().take_while(|c| *c != '}'));
            }
            '$' if self.rest.peek() == Some(&'(') => {}
            c if c.is_whitespace() => self.end_word(),
            c => self.word.get_or_insert_default().push(c),
        }
    }

    fn end_word(&mut self) {
        self.parsed.pieces.extend(self.word.take().map(Piece::Word));
    }

    fn operator(&mut self, piece: Piece) {
        self.end_word();
        self.parsed.pieces.push(piece);
    }

    fn redirect_out(&mut self) {
        let append = self.rest.next_if_eq(&'>').is_some();
        self.rest.next_if_eq(&'|');
        if self.rest.next_if_eq(&'&').is_some() && self.rest.peek().is_some_and(|c| c.is_ascii_digit() || *c == '-') {
            // `>&2` names a descriptor.
            self.rest.next();
            return self.end_word();
        }
        if self.rest.peek() == Some(&'(') {
            return self.end_word();
        }
        self.operator(Piece::Redirect(if append { Redirect::Append } else { Redirect::Overwrite }));
    }

    fn redirect_in(&mut self) {
        self.word.take_if(|w| w.bytes().all(|b| b.is_ascii_digit()));
        // What follows `<<` and `<<<` is no file, but no word of the command either.
        while self.rest.next_if_eq(&'<').is_some() {}
        if matches!(self.rest.peek(), Some('(' | '&')) {
            return self.end_word();
        }
        // `<>` opens for both; what is there stays.
        self.rest.next_if_eq(&'>');
        self.operator(Piece::Redirect(Redirect::Input));
    }

    /// The inside of double quotes.
    fn quoted(&mut self) {
        let mut text = String::new();
        while let Some(c) = self.rest.next() {
            match c {
                '"' => break,
                '\\' => text.extend(self.rest.next()),
                '`' => {
                    let line: String = self.rest.by_ref().take_while(|c| *c != '`').collect();
                    self.parsed.substitutions.push(line);
                }
                '$' if self.rest.next_if_eq(&'(').is_some() => {
                    let mut depth = 1;
                    let inside = |c: &char| {
                        depth += match c {
                            '(' => 1,
                            ')' => -1,
                            _ => 0,
                        };
                        depth > 0
                    };
                    let line: String = self.rest.by_ref().take_while(inside).collect();
                    self.parsed.substitutions.push(line);
                }
                c => text.push(c),
            }
        }
        self.word.get_or_insert_default().push_str(&text);
    }
}
