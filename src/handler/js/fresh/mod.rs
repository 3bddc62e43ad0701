//! A module afresh for every command, at the price of a function call.
//!
//! A module's variables last as long as the module, and the engine keeps a module as long as its realm. So that no command sees
//! what an earlier one left in them, commands do not run on the module itself: its text is rewritten into a function whose call
//! evaluates it anew, with all that it imports, and everything made by the call is garbage after the command.
//!
//! The rewriting must not change what a program means. Whatever it is not certain of is an error here, found while the module
//! loads; commands of such a module get a realm of their own each, which is slower and just as right.

mod lexer;
mod rewrite;

use super::sources::resolve;
use rewrite::{Form, Origin, Parsed, parse};
use std::collections::{BTreeMap, BTreeSet};

/// The functions of a module and all that it imports.
#[derive(Debug)]
pub struct Forms {
    /// The functions, each after those of its imports; an import is asked for by its place here.
    pub list: Vec<(String, Form)>,
}

impl Forms {
    /// Rewrites a module and its imports. `names` tells what the engine found that each of these files exports.
    pub fn make(files: &BTreeMap<String, String>, file: &str, names: &BTreeMap<String, BTreeSet<String>>) -> Result<Forms, (String, String)> {
        let mut making = Making { files, names, done: Vec::new(), open: Vec::new() };
        making.file(file)?;
        let list = making.done.into_iter().map(|done| (done.file, done.form)).collect();
        Ok(Forms { list })
    }

    /// How many characters were put before the first line of a file.
    pub fn shift(&self, file: &str) -> u32 {
        self.list.iter().find(|(name, _)| name == file).map_or(0, |(_, form)| form.shift)
    }
}

struct Done {
    file: String,
    form: Form,
    /// The exports that keep their value.
    constants: BTreeSet<String>,
}

struct Making<'a> {
    files: &'a BTreeMap<String, String>,
    names: &'a BTreeMap<String, BTreeSet<String>>,
    done: Vec<Done>,
    /// The files on the way from the module to this one.
    open: Vec<String>,
}

impl Making<'_> {
    /// Makes the function of a file, after those of its imports; its place.
    fn file(&mut self, file: &str) -> Result<usize, (String, String)> {
        if let Some(place) = self.done.iter().position(|done| done.file == file) {
            return Ok(place);
        }
        let wrong = |message: String| (file.to_owned(), message);
        if self.open.iter().any(|open| open == file) {
            return Err(wrong("its imports form a ring".into()));
        }
        let (Some(source), Some(names)) = (self.files.get(file), self.names.get(file)) else { return Err(wrong("the file was not loaded".into())) };
        let mut parsed = parse(source).map_err(wrong)?;
        self.open.push(file.to_owned());
        let mut places = Vec::new();
        for import in &parsed.imports {
            let import = resolve(self.files, file, import).map_err(wrong)?;
            places.push(self.file(&import)?);
        }
        self.open.pop();
        let others: Vec<&BTreeSet<String>> = places.iter().filter_map(|place| self.names.get(&self.done[*place].file)).collect();
        parsed.complete(names, &others).map_err(wrong)?;
        let constants = self.constants(&parsed, &places).map_err(wrong)?;
        let form = parsed.form(&places, &constants).map_err(wrong)?;
        self.done.push(Done { file: file.to_owned(), form, constants });
        Ok(self.done.len() - 1)
    }

    /// The exports that keep their value. An import that does not cannot be told by a variable of its own.
    fn constants(&self, parsed: &Parsed, places: &[usize]) -> Result<BTreeSet<String>, String> {
        let is_constant = |number: usize, name: &str| self.done[places[number]].constants.contains(name);
        for (number, name, _) in &parsed.names {
            if !is_constant(*number, name) {
                let from = &self.done[places[*number]].file;
                return Err(format!("it imports `{name}`, which {from} may assign to after its export"));
            }
        }
        let constants = parsed.exports.iter().filter(|(_, origin)| match origin {
            Origin::Local(local) => parsed.is_constant(local),
            Origin::From(number, name) => is_constant(*number, name),
            Origin::All(_) => true,
        });
        Ok(constants.map(|(name, _)| name.clone()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The files whose functions are made for `a.js`, or why there are none. What each file exports stands before its text.
    fn made(sources: &[(&str, &str, &str)]) -> String {
        let files = sources.iter().map(|(file, _, text)| ((*file).to_owned(), (*text).to_owned())).collect();
        let names = |names: &str| names.split_whitespace().map(str::to_owned).collect();
        let names = sources.iter().map(|(file, exported, _)| ((*file).to_owned(), names(exported))).collect();
        match Forms::make(&files, "a.js", &names) {
            Ok(forms) => forms.list.iter().map(|(file, _)| file.as_str()).collect::<Vec<_>>().join(" "),
            Err((file, reason)) => format!("{file}: {reason}"),
        }
    }

    #[test]
    fn imports_come_before_their_importers() {
        let a = ("a.js", "x", "import './b.js'; import { z } from './c.js'; export const x = z;");
        let c = ("c.js", "z", "let z = 1; export { z };");
        for (sources, expected) in [
            (&[a, ("b.js", "", "import './c.js'"), c][..], "c.js b.js a.js"),
            (&[a, ("b.js", "", ""), c], "b.js c.js a.js"),
            (&[a, ("b.js", "", "import './a.js'"), c], "a.js: its imports form a ring"),
            (&[a, ("b.js", "", "{} / 2"), c], "b.js: a slash after `}` may be a division or a regular expression"),
            (&[a, ("b.js", "", ""), ("c.js", "z", "export let z = 1; z++;")], "a.js: it imports `z`, which c.js may assign to after its export"),
            (&[a, ("b.js", "", ""), ("c.js", "z", "export * from './d.js'"), ("d.js", "z", "export const z = 1")], "b.js d.js c.js a.js"),
            (&[a, ("b.js", "", ""), ("c.js", "", "export const z = 1")], "c.js: the export `z` is not understood"),
        ] {
            assert_eq!(made(sources), expected, "{sources:?}");
        }
    }
}
