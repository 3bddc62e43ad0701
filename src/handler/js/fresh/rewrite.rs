//! A module as a function: `import` and `export` are taken out of its text, everything else stays where it is.
//!
//! The function takes a function that gives the exports of another file, evaluates what the module evaluates, and returns the
//! exports. What is taken out leaves spaces, and the semicolon that an `import` or `export` stands for where the statement before
//! has none; so lines keep their numbers, and all but the first their columns.

use super::lexer::{Kind, Tokens, is_line_end, read};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// How all names start that the function adds to those of the module.
const OWN: &str = "quok$";
/// What an export without a name is called; as long as `export`, so that columns stay.
const DEFAULT: &str = "quok$d";

/// Where an export comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// A variable of the module.
    Local(String),
    /// An export of another file.
    From(usize, String),
    /// All exports of another file.
    All(usize),
}

/// What the `import` and `export` of a module say.
#[derive(Debug, Default)]
pub struct Parsed {
    /// What other files are imported as, in order, as it is written.
    pub imports: Vec<String>,
    /// Imported names: the import, the name there, the name here.
    pub names: Vec<(usize, String, String)>,
    /// Imports as a whole: the import, the name here.
    namespaces: Vec<(usize, String)>,
    /// Exports by their names. Those of patterns and of later variables of one statement are missing.
    pub exports: BTreeMap<String, Origin>,
    /// The imports of which everything is exported.
    pub stars: Vec<usize>,
    /// Names that a statement after the first comma may declare.
    maybe_declared: BTreeSet<String>,
    /// Names that may be given another value after the module was evaluated.
    assigned: BTreeSet<String>,
    /// The text without `import` and `export`.
    body: String,
}

/// A module's function.
#[derive(Debug)]
pub struct Form {
    /// The function, in parentheses.
    pub text: String,
    /// How many characters stand before the module's first line.
    pub shift: u32,
}

struct Parser<'a> {
    tokens: Tokens<'a>,
    parsed: Parsed,
    /// What replaces parts of the text: start, end, replacement.
    edits: Vec<(usize, usize, String)>,
}

/// Reads a module; an error where it is not understood for certain.
pub fn parse(source: &str) -> Result<Parsed, String> {
    let mut parser = Parser { tokens: read(source)?, parsed: Parsed::default(), edits: Vec::new() };
    let mut at = 0;
    while at < parser.tokens.list.len() {
        at = parser.statement(at)?;
    }
    parser.parsed.assigned = assigned(&parser.tokens);
    parser.parsed.body = parser.body();
    Ok(parser.parsed)
}

impl Parser<'_> {
    /// Deals with what starts at a token; the token to go on at.
    fn statement(&mut self, at: usize) -> Result<usize, String> {
        let tokens = &self.tokens;
        if !tokens.is(at, Kind::Word) || tokens.is_member(at) {
            return Ok(at + 1);
        }
        let depth = tokens.list[at].depth;
        match tokens.text(at) {
            word if word.starts_with(OWN) => Err(format!("the name `{word}` starts with {OWN}")),
            "import" if tokens.is_mark(at + 1, ".") => Err("`import.meta` is used".into()),
            "arguments" if depth == 0 => Err("`arguments` is used outside of functions".into()),
            "import" if depth == 0 && !tokens.is_mark(at + 1, "(") => self.import(at),
            "export" if depth == 0 => self.export(at),
            word => {
                if depth == 0 && at > 0 && tokens.is_mark(at - 1, ",") {
                    self.parsed.maybe_declared.insert(word.to_owned());
                }
                Ok(at + 1)
            }
        }
    }

    fn import(&mut self, start: usize) -> Result<usize, String> {
        let number = self.parsed.imports.len();
        let mut at = start + 1;
        if !self.tokens.is(at, Kind::Text) {
            let mut has_more = true;
            if self.tokens.is(at, Kind::Word) {
                self.parsed.names.push((number, "default".into(), self.tokens.text(at).to_owned()));
                has_more = self.tokens.is_mark(at + 1, ",");
                at += if has_more { 2 } else { 1 };
            }
            if has_more && self.tokens.is_mark(at, "*") {
                self.parsed.namespaces.push((number, self.alias(at + 1)?));
                at += 3;
            } else if has_more && self.tokens.is_mark(at, "{") {
                let (names, after) = self.list(at)?;
                self.parsed.names.extend(names.into_iter().map(|(there, here)| (number, there, here)));
                at = after;
            }
            at = self.from(at)?;
        }
        self.file(at)?;
        self.blank(start, at, ";");
        Ok(at + 1)
    }

    fn export(&mut self, start: usize) -> Result<usize, String> {
        let at = start + 1;
        match self.tokens.text(at) {
            "default" => return self.export_default(start),
            "{" => {
                let (names, after) = self.list(at)?;
                let is_from = self.tokens.is_word(after, "from");
                let number = self.parsed.imports.len();
                let mut last = after - 1;
                if is_from {
                    last = after + 1;
                    self.file(last)?;
                }
                for (name, exported) in names {
                    let origin = if is_from { Origin::From(number, name) } else { Origin::Local(name) };
                    self.parsed.exports.insert(exported, origin);
                }
                self.blank(start, last, ";");
                return Ok(last + 1);
            }
            "*" => {
                let number = self.parsed.imports.len();
                let mut last = at + 1;
                if self.tokens.is_word(last, "as") {
                    self.parsed.exports.insert(self.alias(last)?, Origin::All(number));
                    last += 2;
                } else {
                    self.parsed.stars.push(number);
                }
                last = self.from(last)?;
                self.file(last)?;
                self.blank(start, last, ";");
                return Ok(last + 1);
            }
            "const" | "let" | "var" | "class" if self.tokens.is(at + 1, Kind::Word) => self.declared(at + 1),
            "const" | "let" | "var" => {}
            "function" | "async" => {
                let name = self.function_name(at).filter(|name| self.tokens.is(*name, Kind::Word)).ok_or("an export is not understood")?;
                self.declared(name);
            }
            _ => return Err("an export is not understood".into()),
        }
        self.blank(start, start, ";");
        Ok(at)
    }

    fn export_default(&mut self, start: usize) -> Result<usize, String> {
        let at = start + 2;
        let is_class = self.tokens.is_word(at, "class");
        let name = if is_class { Some(at + 1) } else { self.function_name(at) };
        let Some(name) = name else {
            // An expression.
            let (export, default) = (self.tokens.list[start], self.tokens.list[start + 1]);
            self.edits.push((export.start, export.end, ";const".into()));
            self.edits.push((default.start, default.end, format!("{DEFAULT}=")));
            self.parsed.exports.insert("default".into(), Origin::Local(DEFAULT.into()));
            return Ok(at);
        };
        self.blank(start, start + 1, ";");
        let is_named = self.tokens.is(name, Kind::Word) && !(is_class && self.tokens.is_word(name, "extends"));
        let local = if is_named { self.tokens.text(name) } else { DEFAULT };
        self.parsed.exports.insert("default".into(), Origin::Local(local.to_owned()));
        if !is_named {
            let before = self.tokens.list[name - 1].end;
            self.edits.push((before, before, format!(" {DEFAULT} ")));
        }
        Ok(at)
    }

    /// Of a declaration of a function, the token after `function` or `function*`: its name, if it has one.
    fn function_name(&self, at: usize) -> Option<usize> {
        let is_async = self.tokens.is_word(at, "async") && self.tokens.list.get(at + 1).is_some_and(|next| !next.is_first);
        let function = if is_async { at + 1 } else { at };
        let name = function + 1;
        self.tokens.is_word(function, "function").then(|| if self.tokens.is_mark(name, "*") { name + 1 } else { name })
    }

    fn declared(&mut self, at: usize) {
        let name = self.tokens.text(at).to_owned();
        self.parsed.exports.insert(name.clone(), Origin::Local(name));
    }

    /// The name after `as`, which is at this token.
    fn alias(&self, at: usize) -> Result<String, String> {
        if self.tokens.is_word(at, "as") { self.name(at + 1) } else { Err("an import or export is not understood".into()) }
    }

    /// The name at a token, which may be a string.
    fn name(&self, at: usize) -> Result<String, String> {
        let text = self.tokens.text(at);
        let name = match self.tokens.list.get(at).map(|token| token.kind) {
            Some(Kind::Word) => text,
            Some(Kind::Text) if !text.contains('\\') => &text[1..text.len() - 1],
            _ => return Err("an import or export is not understood".into()),
        };
        if name == "__proto__" { Err("a name is `__proto__`".into()) } else { Ok(name.to_owned()) }
    }

    /// The pairs of names in braces, and the token after them.
    fn list(&self, open: usize) -> Result<(Vec<(String, String)>, usize), String> {
        let mut names = Vec::new();
        let mut at = open + 1;
        while !self.tokens.is_mark(at, "}") {
            let first = self.name(at)?;
            at += 1;
            let mut second = first.clone();
            if self.tokens.is_word(at, "as") {
                second = self.name(at + 1)?;
                at += 2;
            }
            names.push((first, second));
            if self.tokens.is_mark(at, ",") {
                at += 1;
            }
        }
        Ok((names, at + 1))
    }

    /// The token after `from`, which is at this one.
    fn from(&self, at: usize) -> Result<usize, String> {
        if self.tokens.is_word(at, "from") { Ok(at + 1) } else { Err("an import or export is not understood".into()) }
    }

    /// Adds the file that is named at a token.
    fn file(&mut self, at: usize) -> Result<(), String> {
        let is_plain = self.tokens.is(at, Kind::Text) && !self.tokens.is_word(at + 1, "with");
        let name = if is_plain { self.name(at)? } else { return Err("an import is not understood".into()) };
        self.parsed.imports.push(name);
        Ok(())
    }

    /// Replaces tokens, with all between them, by spaces after some text.
    fn blank(&mut self, first: usize, last: usize, text: &str) {
        let (start, end) = (self.tokens.list[first].start, self.tokens.list[last].end);
        let spaces = self.tokens.source[start + text.len()..end].chars().map(|character| if is_line_end(character) { character } else { ' ' });
        let replacement = text.chars().chain(spaces).collect();
        self.edits.push((start, end, replacement));
    }

    fn body(&self) -> String {
        let source = self.tokens.source;
        let mut body = String::with_capacity(source.len() + 16);
        let mut from = 0;
        for (start, end, replacement) in &self.edits {
            body.push_str(&source[from..*start]);
            body.push_str(replacement);
            from = *end;
        }
        body.push_str(&source[from..]);
        if body.starts_with("#!") {
            body.replace_range(..2, "//");
        }
        body
    }
}

/// All names that may be assigned to other than by their declaration: too many rather than too few.
fn assigned(tokens: &Tokens<'_>) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let is_assignment = |at: usize| {
        let text = tokens.text(at);
        tokens.is(at, Kind::Mark) && text.ends_with('=') && !["==", "===", "!=", "!==", "<=", ">="].contains(&text)
    };
    let is_step = |at: usize| tokens.is_mark(at, "++") || tokens.is_mark(at, "--");
    let is_loop = |at: usize| tokens.is_word(at, "of") || tokens.is_word(at, "in");
    for (at, token) in tokens.list.iter().enumerate() {
        let is_declared = token.opener.checked_sub(1).is_some_and(|before| {
            let is_once = tokens.is_word(before, "const") || tokens.is_word(before, "let") || (tokens.is_word(before, "var") && token.depth == 0);
            is_once && !tokens.is_member(before)
        });
        let is_target = is_assignment(at + 1) || is_step(at + 1) || is_loop(at + 1);
        match token.kind {
            Kind::Word if tokens.is_member(at) => {}
            Kind::Word if (is_target && !is_declared) || at.checked_sub(1).is_some_and(is_step) => {
                found.insert(tokens.text(at).to_owned());
            }
            // A pattern, or the like.
            Kind::Mark if token.opener < at && is_target && !is_declared => {
                found.extend((token.opener..at).filter(|part| tokens.is(*part, Kind::Word)).map(|part| tokens.text(part).to_owned()));
            }
            Kind::Word | Kind::Mark | Kind::Text | Kind::Other => {}
        }
    }
    found
}

impl Parsed {
    /// Finds where each export comes from; `names` are those that the engine has found, and `others` those of each import.
    pub fn complete(&mut self, names: &BTreeSet<String>, others: &[&BTreeSet<String>]) -> Result<(), String> {
        if let Some(name) = self.exports.keys().find(|name| !names.contains(*name)) {
            return Err(format!("the export `{name}` is not understood"));
        }
        for name in names {
            if self.exports.contains_key(name) {
                continue;
            }
            let star = self.stars.iter().find(|star| name != "default" && others[**star].contains(name));
            let origin = match star {
                Some(_) if self.maybe_declared.contains(name) => return Err(format!("the export `{name}` may come from two places")),
                Some(star) => Origin::From(*star, name.clone()),
                None => Origin::Local(name.clone()),
            };
            self.exports.insert(name.clone(), origin);
        }
        Ok(())
    }

    /// Whether a variable of the module keeps its value once the module has been evaluated.
    pub fn is_constant(&self, local: &str) -> bool {
        !self.assigned.contains(local)
    }

    /// Makes the function. `places` tells by which number each import is asked for, `constants` which exports keep their value.
    pub fn form(&self, places: &[usize], constants: &BTreeSet<String>) -> Result<Form, String> {
        let quoted = |text: &str| serde_json::to_string(text).map_err(|error| error.to_string());
        let mut text = format!("(function({OWN}i){{");
        for (number, place) in places.iter().enumerate() {
            let _ = write!(text, "const {OWN}{number}={OWN}i({place});");
        }
        for (number, name, local) in &self.names {
            let _ = write!(text, "const {{{}:{local}}}={OWN}{number};", quoted(name)?);
        }
        for (number, local) in &self.namespaces {
            let _ = write!(text, "const {local}={OWN}{number};");
        }
        let shift = u32::try_from(text.chars().count()).map_err(|error| error.to_string())?;
        text.push_str(&self.body);
        text.push_str("\n;return{__proto__:null");
        for (name, origin) in &self.exports {
            let value = match origin {
                Origin::Local(local) => local.clone(),
                Origin::From(number, name) => format!("{OWN}{number}[{}]", quoted(name)?),
                Origin::All(number) => format!("{OWN}{number}"),
            };
            let is_constant = constants.contains(name);
            let name = quoted(name)?;
            let _ = if is_constant { write!(text, ",{name}:{value}") } else { write!(text, ",get {name}(){{return {value}}}") };
        }
        text.push_str("}})");
        Ok(Form { text, shift })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text of a module without `import` and `export`.
    fn body(source: &str) -> String {
        parse(source).map_or_else(|error| format!("error: {error}"), |parsed| parsed.body)
    }

    #[test]
    fn imports_and_exports_leave_spaces() {
        for (source, expected) in [
            ("export const x = 1;", ";      const x = 1;"),
            ("export let x = 1, y", ";      let x = 1, y"),
            ("export const { a, b: [c] } = d", ";      const { a, b: [c] } = d"),
            ("export function f() {}", ";      function f() {}"),
            ("export async function* f() {}", ";      async function* f() {}"),
            ("export class A {}", ";      class A {}"),
            ("export default 1 + 1;", ";const quok$d= 1 + 1;"),
            ("export/*a*/default/*b*/[1]", ";const/*a*/quok$d=/*b*/[1]"),
            ("export default async () => 1", ";const quok$d= async () => 1"),
            ("export default function f() {}", ";              function f() {}"),
            ("export default function () {}", ";              function quok$d  () {}"),
            ("export default async function* () {}", ";              async function* quok$d  () {}"),
            ("export default class {}", ";              class quok$d  {}"),
            ("export default class extends A {}", ";              class quok$d  extends A {}"),
            ("export default class A extends B {}", ";              class A extends B {}"),
            ("export { a, b as c };", ";                   ;"),
            ("export {\n  a,\r\n  b\n} // c", ";       \n    \r\n   \n  // c"),
            ("export { a as 'b c' } from './x.js'\nd", ";                                  \nd"),
            ("export * from './x.js'", ";                     "),
            ("export * as ns from './x.js'", ";                           "),
            ("import './x.js'", ";              "),
            ("import d from './x.js'; d()", ";                     ; d()"),
            ("import d, { a as b, 'c d' as e } from \"./x.js\"", ";                                             "),
            ("import d, * as ns from './x.js'", ";                              "),
            ("import from from './x.js'", ";                        "),
            ("import { as as as, from, default as x } from './x.js'", ";                                                    "),
            // The semicolon that the next statement would not put in.
            ("const a = b\nimport './x.js'\n(c)()", "const a = b\n;              \n(c)()"),
            ("const a = b\nexport { a }\n[c].d()", "const a = b\n;           \n[c].d()"),
            // What only looks like it.
            ("import('./x.js')", "import('./x.js')"),
            ("const a = { export: 1, import: 2, default: 3 }", "const a = { export: 1, import: 2, default: 3 }"),
            ("a.export = a.import(b); a?.export", "a.export = a.import(b); a?.export"),
            ("class A { import() {} static export = 1 }", "class A { import() {} static export = 1 }"),
            ("// export const a\n/* import 'a' */ 'export const b'; \"import 'c'\"", "// export const a\n/* import 'a' */ 'export const b'; \"import 'c'\""),
            ("`export const a ${ b } import 'c'`\nexport { b }", "`export const a ${ b } import 'c'`\n;           "),
            ("a = /[/]export {/; b / export_ / c", "a = /[/]export {/; b / export_ / c"),
            ("a = `\nexport const b = 1\n`; export const c = a", "a = `\nexport const b = 1\n`; ;      const c = a"),
            ("#!/bin/js export\nexport const é = 'ß'", "///bin/js export\n;      const é = 'ß'"),
            // What is left to the engine.
            ("a = import.meta.url", "error: `import.meta` is used"),
            ("() => import.meta", "error: `import.meta` is used"),
            ("a = arguments", "error: `arguments` is used outside of functions"),
            ("const quok$i = 1", "error: the name `quok$i` starts with quok$"),
            ("export { a as 'b\\n' }", "error: an import or export is not understood"),
            ("export { a as __proto__ }", "error: a name is `__proto__`"),
            ("import a from './x.js' with { type: 'json' }", "error: an import is not understood"),
            ("import defer * as a from './x.js'", "error: an import or export is not understood"),
        ] {
            let found = body(source);
            assert_eq!(found, expected, "{source}");
            if !expected.starts_with("error") {
                assert_eq!(found.lines().count(), source.lines().count(), "{source}");
            }
        }
    }

    #[test]
    fn what_may_change_is_known() {
        for (source, expected) in [
            ("const a = 1; let b = 2; var c = 3; function d() { let e = 4; }", ""),
            ("const { a, b: [c] } = d", ""),
            ("let a; a = 1; b += 1; c ??= 1; d++; --e", "a b c d e"),
            ("var a; function f() { var a = 1 }", "a"),
            ("[a, b.c] = d; ({ e: f } = g)", "a b c e f"),
            ("for (a of b); for (const c of d); (e) = 1", "a e"),
            ("a.b = 1; a == b; a => b; a <= b; a === b", ""),
        ] {
            let parsed = parse(source).unwrap();
            let found: Vec<&str> = parsed.assigned.iter().map(String::as_str).collect();
            assert_eq!(found.join(" "), expected, "{source}");
        }
    }

    #[test]
    fn a_function_returns_the_exports() {
        let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<String>>();
        let source = "import d, { a as b } from './x.js'; import * as ns from './y.js'; export * from './y.js';\nexport const c = 1; export { b as z };\nexport let n = 0; // end";
        let mut parsed = parse(source).unwrap();
        assert_eq!(parsed.imports, ["./x.js", "./y.js", "./y.js"]);
        let (x, y) = (set(&["default", "a"]), set(&["s", "default"]));
        parsed.complete(&set(&["c", "n", "s"]), &[&x, &y, &y]).unwrap_err();
        parsed.complete(&set(&["c", "n", "s", "z"]), &[&x, &y, &y]).unwrap();
        let form = parsed.form(&[0, 1, 1], &set(&["c", "s", "z"])).unwrap();
        let (prefix, rest) = form.text.split_at(form.shift as usize);
        assert_eq!(
            prefix,
            "(function(quok$i){const quok$0=quok$i(0);const quok$1=quok$i(1);const quok$2=quok$i(1);\
             const {\"default\":d}=quok$0;const {\"a\":b}=quok$0;const ns=quok$1;"
        );
        assert_eq!(rest.lines().nth(1), Some(";      const c = 1; ;                ;"));
        assert_eq!(rest.lines().last(), Some(";return{__proto__:null,\"c\":c,get \"n\"(){return n},\"s\":quok$2[\"s\"],\"z\":b}})"));
    }
}
