//! The tokens of a source text: as much of JavaScript's grammar as it takes to tell code from comments, strings, templates and
//! regular expressions.
//!
//! It is made for texts that the engine has accepted as modules, so it finds no errors. What it cannot tell for certain it
//! refuses: a wrong guess would change what a program means.

/// What a token is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A name or a keyword.
    Word,
    /// A string, with its quotes.
    Text,
    /// A number, a private name, a regular expression, or a piece of a template.
    Other,
    /// An operator or a bracket. Those of `${` and its end are no tokens.
    Mark,
}

/// A token.
#[derive(Debug, Clone, Copy)]
pub struct Token {
    /// What it is.
    pub kind: Kind,
    /// Where it starts, in bytes.
    pub start: usize,
    /// Where it ends.
    pub end: usize,
    /// How many brackets are open around it.
    pub depth: usize,
    /// Whether it is the first of its line.
    pub is_first: bool,
    /// Of a closing bracket, the place of the opening one among the tokens; of all others, its own.
    pub opener: usize,
}

/// The tokens of a text, with the text.
#[derive(Debug)]
pub struct Tokens<'a> {
    /// The text.
    pub source: &'a str,
    /// All its tokens.
    pub list: Vec<Token>,
}

impl<'a> Tokens<'a> {
    /// What a token says; empty where there is none.
    pub fn text(&self, at: usize) -> &'a str {
        self.list.get(at).map_or("", |token| &self.source[token.start..token.end])
    }

    /// Whether a token is this name or keyword.
    pub fn is_word(&self, at: usize, word: &str) -> bool {
        self.is(at, Kind::Word) && self.text(at) == word
    }

    /// Whether a token is this operator or bracket.
    pub fn is_mark(&self, at: usize, mark: &str) -> bool {
        self.is(at, Kind::Mark) && self.text(at) == mark
    }

    /// Whether a token is of this kind.
    pub fn is(&self, at: usize, kind: Kind) -> bool {
        self.list.get(at).is_some_and(|token| token.kind == kind)
    }

    /// Whether a token is the name of a member, as in `a.name`.
    pub fn is_member(&self, at: usize) -> bool {
        at.checked_sub(1).is_some_and(|before| self.is_mark(before, ".") || self.is_mark(before, "?."))
    }
}

/// Operators of more than one character, the longest first.
const MARKS: &[&str] = &[
    ">>>=", "...", "===", "!==", "**=", "<<=", ">>=", ">>>", "&&=", "||=", "??=", "=>", "==", "!=", "<=", ">=", "&&", "||", "??", "?.", "++", "--", "+=", "-=",
    "*=", "/=", "%=", "&=", "|=", "^=", "<<", ">>", "**",
];

/// Keywords after which an expression begins, so that a slash begins a regular expression.
const BEFORE_EXPRESSION: &[&str] =
    &["return", "typeof", "case", "do", "else", "in", "instanceof", "new", "void", "delete", "throw", "yield", "await", "extends", "default"];

/// An open bracket.
enum Open {
    /// `(`, `[` or `{`, by its place among the tokens.
    Mark(usize),
    /// `${`.
    Template,
}

struct Lexer<'a> {
    tokens: Tokens<'a>,
    at: usize,
    open: Vec<Open>,
    is_first: bool,
}

/// The tokens of a module, or what is not understood.
pub fn read(source: &str) -> Result<Tokens<'_>, String> {
    let mut lexer = Lexer { tokens: Tokens { source, list: Vec::new() }, at: 0, open: Vec::new(), is_first: true };
    if source.starts_with("#!") {
        lexer.skip_line();
    }
    while let Some(first) = lexer.rest().chars().next() {
        lexer.step(first)?;
    }
    if lexer.open.is_empty() { Ok(lexer.tokens) } else { Err("a bracket is not closed".into()) }
}

/// Whether a character ends a line.
pub fn is_line_end(character: char) -> bool {
    matches!(character, '\n' | '\r' | '\u{2028}' | '\u{2029}')
}

fn is_word_part(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '_' | '$' | '\u{200c}' | '\u{200d}') || (!character.is_ascii() && !is_space(character))
}

fn is_space(character: char) -> bool {
    character.is_whitespace() || matches!(character, '\u{feff}' | '\u{2028}' | '\u{2029}')
}

impl<'a> Lexer<'a> {
    fn rest(&self) -> &'a str {
        &self.tokens.source[self.at..]
    }

    fn skip_line(&mut self) {
        self.at += self.rest().find(is_line_end).unwrap_or(self.rest().len());
    }

    fn push(&mut self, kind: Kind, end: usize) {
        let place = self.tokens.list.len();
        self.tokens.list.push(Token { kind, start: self.at, end, depth: self.open.len(), is_first: self.is_first, opener: place });
        self.at = end;
        self.is_first = false;
    }

    fn step(&mut self, first: char) -> Result<(), String> {
        let rest = self.rest();
        if is_space(first) {
            self.is_first |= is_line_end(first);
            self.at += first.len_utf8();
            return Ok(());
        }
        if rest.starts_with("//") {
            self.skip_line();
            return Ok(());
        }
        if rest.starts_with("/*") {
            let length = rest.find("*/").ok_or("a comment has no end")? + 2;
            self.is_first |= rest[..length].contains(is_line_end);
            self.at += length;
            return Ok(());
        }
        match first {
            '"' | '\'' => self.text(first),
            '`' => {
                self.at += 1;
                self.template(self.at - 1)
            }
            '/' => self.slash(),
            // A letter in disguise.
            '\\' => Err("a name is written with a backslash".into()),
            '#' => {
                let length = 1 + word_length(&rest[1..]);
                self.push(Kind::Other, self.at + length);
                Ok(())
            }
            '.' if rest[1..].starts_with(|next: char| next.is_ascii_digit()) => self.number(),
            '0'..='9' => self.number(),
            _ if is_word_part(first) => {
                self.push(Kind::Word, self.at + word_length(rest));
                Ok(())
            }
            _ => self.mark(first),
        }
    }

    fn text(&mut self, quote: char) -> Result<(), String> {
        let end = self.until(self.at + 1, |character| character == quote).ok_or("a string has no end")?;
        self.push(Kind::Text, end + 1);
        Ok(())
    }

    /// The next character, from a place on, that is looked for and has no backslash before it.
    fn until(&self, from: usize, is_end: impl Fn(char) -> bool) -> Option<usize> {
        let mut characters = self.tokens.source[from..].char_indices();
        while let Some((at, character)) = characters.next() {
            if is_end(character) {
                return Some(from + at);
            }
            if character == '\\' {
                characters.next();
            }
        }
        None
    }

    /// A piece of a template, from `start` to the next `${` or to its end.
    fn template(&mut self, start: usize) -> Result<(), String> {
        let mut from = self.at;
        loop {
            let at = self.until(from, |character| matches!(character, '`' | '$')).ok_or("a template has no end")?;
            let rest = &self.tokens.source[at..];
            if rest.starts_with('`') {
                self.at = start;
                self.push(Kind::Other, at + 1);
                return Ok(());
            }
            if rest.starts_with("${") {
                self.at = start;
                self.push(Kind::Mark, at + 2);
                self.open.push(Open::Template);
                return Ok(());
            }
            from = at + 1;
        }
    }

    fn number(&mut self) -> Result<(), String> {
        let length = self.rest().find(|character| !is_word_part(character) && character != '.').unwrap_or(self.rest().len());
        self.push(Kind::Other, self.at + length);
        Ok(())
    }

    /// A division or a regular expression.
    fn slash(&mut self) -> Result<(), String> {
        if !self.expects_expression()? {
            return self.mark('/');
        }
        let mut is_class = false;
        let mut characters = self.rest().char_indices().skip(1);
        while let Some((at, character)) = characters.next() {
            match character {
                '\\' => {
                    characters.next();
                }
                '[' => is_class = true,
                ']' => is_class = false,
                '/' if !is_class => {
                    let flags = word_length(&self.rest()[at + 1..]);
                    self.push(Kind::Other, self.at + at + 1 + flags);
                    return Ok(());
                }
                _ if is_line_end(character) => break,
                _ => {}
            }
        }
        Err("a regular expression has no end".into())
    }

    /// Whether an expression can begin here. Where only a whole parser could tell, an error.
    fn expects_expression(&self) -> Result<bool, String> {
        let Some(last) = self.tokens.list.len().checked_sub(1) else { return Ok(true) };
        let token = self.tokens.list[last];
        let text = self.tokens.text(last);
        let unsure = || Err(format!("a slash after `{text}` may be a division or a regular expression"));
        match token.kind {
            Kind::Word if self.tokens.is_member(last) => Ok(false),
            Kind::Word if text == "of" => unsure(),
            Kind::Word => Ok(BEFORE_EXPRESSION.contains(&text)),
            Kind::Text | Kind::Other => Ok(false),
            Kind::Mark => match text {
                "]" => Ok(false),
                ")" => {
                    let Some(before) = token.opener.checked_sub(1) else { return Ok(false) };
                    let mut word = before;
                    if self.tokens.is_word(word, "await") {
                        word = word.saturating_sub(1);
                    }
                    let is_head = ["if", "while", "for", "with"].iter().any(|head| self.tokens.is_word(word, head));
                    Ok(is_head && !self.tokens.is_member(word))
                }
                // After a block, or after an object, a function or a class.
                "}" => unsure(),
                "++" | "--" => {
                    let is_value = |at: usize| matches!(self.tokens.list[at].kind, Kind::Word) || matches!(self.tokens.text(at), ")" | "]");
                    if !token.is_first && last.checked_sub(1).is_some_and(is_value) { Ok(false) } else { unsure() }
                }
                _ => Ok(true),
            },
        }
    }

    fn mark(&mut self, first: char) -> Result<(), String> {
        let rest = self.rest();
        // Comments in scripts, operators in modules.
        if rest.starts_with("<!--") || (self.is_first && rest.starts_with("-->")) {
            return Err("a comment of HTML".into());
        }
        let place = self.tokens.list.len();
        match first {
            '(' | '[' | '{' => {
                self.push(Kind::Mark, self.at + 1);
                self.open.push(Open::Mark(place));
            }
            ')' | ']' | '}' => match self.open.pop() {
                Some(Open::Mark(opener)) if matches!((self.tokens.text(opener), first), ("(", ')') | ("[", ']') | ("{", '}')) => {
                    self.push(Kind::Mark, self.at + 1);
                    self.tokens.list[place].opener = opener;
                }
                Some(Open::Template) if first == '}' => {
                    let start = self.at;
                    self.at += 1;
                    return self.template(start);
                }
                _ => return Err("a bracket is not closed".into()),
            },
            _ => {
                let length = match MARKS.iter().find(|mark| rest.starts_with(**mark)) {
                    // A condition and a fraction: `a?.5:1`.
                    Some(&"?.") if rest[2..].starts_with(|next: char| next.is_ascii_digit()) => 1,
                    Some(mark) => mark.len(),
                    None => first.len_utf8(),
                };
                self.push(Kind::Mark, self.at + length);
            }
        }
        Ok(())
    }
}

fn word_length(text: &str) -> usize {
    text.find(|character| !is_word_part(character)).unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tokens of a text, or what is said of it.
    fn shown(source: &str) -> String {
        match read(source) {
            Ok(tokens) => (0..tokens.list.len()).map(|at| tokens.text(at)).collect::<Vec<_>>().join(" "),
            Err(error) => format!("error: {error}"),
        }
    }

    #[test]
    fn texts_become_tokens() {
        for (source, expected) in [
            ("", ""),
            ("#!/usr/bin/env js\na", "a"),
            ("a // b\n/* c\n */ d /**/", "a d"),
            (r#"'it\'s' "a\"b" 'a\\' b"#, r#"'it\'s' "a\"b" 'a\\' b"#),
            ("'a\\\nb' c", "'a\\\nb' c"),
            ("`a ${b + `c ${d} e`} f` g", "`a ${ b + `c ${ d } e` } f` g"),
            ("`\\` \\${ $ {` a", "`\\` \\${ $ {` a"),
            ("`${{ a: `}` }}`", "`${ { a : `}` } }`"),
            ("a / b / c", "a / b / c"),
            ("(a) / b / c", "( a ) / b / c"),
            ("a[0] / b / c", "a [ 0 ] / b / c"),
            ("1 / 2 / 3", "1 / 2 / 3"),
            ("`a` / b / c", "`a` / b / c"),
            ("i++ / 2 / 3", "i ++ / 2 / 3"),
            ("a.return / b / c", "a . return / b / c"),
            ("x.if(a) / b / c", "x . if ( a ) / b / c"),
            ("a /= b / c", "a /= b / c"),
            ("a = /b'/g", "a = /b'/g"),
            ("a(/[/'\"`]/, /\\/'/u)", "a ( /[/'\"`]/ , /\\/'/u )"),
            ("return /'/.test(a)", "return /'/ . test ( a )"),
            ("typeof /'/", "typeof /'/"),
            ("if (a) /'/.test(b)", "if ( a ) /'/ . test ( b )"),
            ("for await (a of b) /'/.test(b)", "for await ( a of b ) /'/ . test ( b )"),
            ("a => /=>'/", "a => /=>'/"),
            ("!/a'/ && /b'/", "! /a'/ && /b'/"),
            ("a ? /b'/ : /c'/", "a ? /b'/ : /c'/"),
            ("a?.b?.5:1", "a ?. b ? .5 : 1"),
            ("1.5e3 .5 1..toString() 0xFFn", "1.5e3 .5 1..toString ( ) 0xFFn"),
            ("#a in b; this.#a", "#a in b ; this . #a"),
            ("a >>>= b ?? c ||= [...d] ** 2", "a >>>= b ?? c ||= [ ... d ] ** 2"),
            ("größe = 'é'", "größe = 'é'"),
            ("\u{feff}a\u{a0}b\u{2028}c", "a b c"),
            ("n --> 0", "n -- > 0"),
            ("{} / 2", "error: a slash after `}` may be a division or a regular expression"),
            ("++ / 2", "error: a slash after `++` may be a division or a regular expression"),
            ("of / 2", "error: a slash after `of` may be a division or a regular expression"),
            ("a <!-- b", "error: a comment of HTML"),
            ("a\n --> b", "error: a comment of HTML"),
            ("\\u0061", "error: a name is written with a backslash"),
            ("(a]", "error: a bracket is not closed"),
            ("(a", "error: a bracket is not closed"),
            ("`a", "error: a template has no end"),
            ("'a", "error: a string has no end"),
            ("/* a", "error: a comment has no end"),
            ("= /a\n/", "error: a regular expression has no end"),
        ] {
            assert_eq!(shown(source), expected, "{source}");
        }
    }

    #[test]
    fn brackets_are_counted() {
        let tokens = read("a { b ( `c ${ d }` [ e ] ) } f").unwrap();
        let depths: Vec<String> = tokens.list.iter().enumerate().map(|(at, token)| format!("{}{}", tokens.text(at), token.depth)).collect();
        assert_eq!(depths.join(" "), "a0 {0 b1 (1 `c ${2 d3 }`2 [2 e3 ]2 )1 }0 f0");
        assert_eq!(tokens.text(tokens.list[10].opener), "(");
    }
}
