//! The folder of JavaScript sources, as it is read before any of it runs.
//!
//! Each `*.js` file of the folder is the module of one entity type, named after it. `*.js` files in folders below are helpers,
//! there to be imported by relative path. Names that start with a dot are left alone.

use super::protocol::Problem;
use crate::core::EntityType;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The most bytes of source text in a folder.
const BYTES_MAX: u64 = 8 << 20;
/// How deep folders with helpers may nest.
const FOLDERS_MAX: usize = 16;

/// The sources of a folder. Two are equal where loading them would give the same handlers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sources {
    /// The text of every file, by its path below the folder.
    pub files: BTreeMap<String, String>,
    /// The entity types that have a module.
    pub modules: Vec<EntityType>,
}

impl Sources {
    /// Reads a folder. Blocks on the file system.
    pub fn read(folder: &Path) -> Result<Sources, Vec<Problem>> {
        let mut reading = Reading { sources: Sources::default(), problems: Vec::new(), bytes_left: BYTES_MAX };
        reading.folder(folder, "", 0);
        let Reading { mut sources, mut problems, .. } = reading;
        for file in sources.files.keys().filter(|file| !file.contains('/')) {
            match EntityType::new(file.trim_end_matches(".js")) {
                Ok(entity_type) => sources.modules.push(entity_type),
                Err(error) => problems.push(problem(file, format!("the file is named after its entity type, and {error}"))),
            }
        }
        if sources.modules.is_empty() && problems.is_empty() {
            problems.push(problem("", format!("{} holds no module (a file such as account.js)", folder.display())));
        }
        if problems.is_empty() { Ok(sources) } else { Err(problems) }
    }

    /// Names the code of a module: the first 16 hexadecimal digits of a hash over it and all it imports.
    pub fn version(&self, entity_type: &EntityType, imports: &BTreeSet<String>) -> String {
        let mut hash = Sha256::new();
        let own = format!("{entity_type}.js");
        for file in std::iter::once(&own).chain(imports.iter().filter(|import| **import != own)) {
            for part in [file.as_str(), self.files.get(file).map(String::as_str).unwrap_or_default()] {
                hash.update((part.len() as u64).to_be_bytes());
                hash.update(part);
            }
        }
        let mut version = data_encoding::HEXLOWER.encode(&hash.finalize());
        version.truncate(16);
        version
    }
}

fn problem(file: &str, message: String) -> Problem {
    Problem { file: file.to_owned(), place: None, message }
}

struct Reading {
    sources: Sources,
    problems: Vec<Problem>,
    bytes_left: u64,
}

impl Reading {
    fn folder(&mut self, folder: &Path, below: &str, depth: usize) {
        let entries = std::fs::read_dir(folder).and_then(|entries| entries.collect::<Result<Vec<_>, _>>());
        let entries = match entries {
            Ok(entries) => entries,
            Err(error) if below.is_empty() => return self.problems.push(problem("", format!("{} cannot be read: {error}", folder.display()))),
            Err(error) => return self.problems.push(problem(below, format!("the folder cannot be read: {error}"))),
        };
        for entry in entries {
            let Some(name) = entry.file_name().to_str().map(str::to_owned) else { continue };
            if name.starts_with('.') {
                continue;
            }
            let path = if below.is_empty() { name } else { format!("{below}/{name}") };
            // Links to files are followed, for they are how files get into containers; links to folders are not, for they may form a ring.
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if depth == FOLDERS_MAX {
                    self.problems.push(problem(&path, format!("folders nest deeper than {FOLDERS_MAX} levels")));
                } else {
                    self.folder(&entry.path(), &path, depth + 1);
                }
            } else if path.ends_with(".js") {
                self.file(&entry.path(), path);
            }
        }
    }

    fn file(&mut self, file: &Path, path: String) {
        let text = match std::fs::metadata(file) {
            Ok(metadata) if !metadata.is_file() => return,
            Ok(metadata) if metadata.len() > self.bytes_left => Err(format!("the sources take more than {BYTES_MAX} bytes")),
            Ok(_) => std::fs::read(file).map_err(|error| format!("the file cannot be read: {error}")),
            Err(error) => Err(format!("the file cannot be read: {error}")),
        };
        let text = text.and_then(|bytes| String::from_utf8(bytes).map_err(|error| error.utf8_error().to_string()));
        match text {
            Ok(text) if text.contains('\0') => self.problems.push(problem(&path, "the file holds a zero byte".to_owned())),
            Ok(text) => {
                self.bytes_left = self.bytes_left.saturating_sub(text.len() as u64);
                self.sources.files.insert(path, text);
            }
            Err(message) => self.problems.push(problem(&path, message)),
        }
    }
}

/// Which file an import in `base` means.
pub fn resolve(files: &BTreeMap<String, String>, base: &str, name: &str) -> Result<String, String> {
    if !name.starts_with("./") && !name.starts_with("../") {
        return Err(format!("cannot import \"{name}\": only files of this folder can be imported, by a path that starts with ./ or ../"));
    }
    let mut path: Vec<&str> = base.split('/').collect();
    path.pop();
    for step in name.split('/') {
        match step {
            "" | "." => {}
            ".." if path.pop().is_none() => return Err(format!("cannot import \"{name}\": it is outside the folder")),
            ".." => {}
            step => path.push(step),
        }
    }
    let path = path.join("/");
    if files.contains_key(&path) { Ok(path) } else { Err(format!("cannot import \"{name}\": there is no file {path}")) }
}

/// Where words stand in a source, each after the one before: line and column of the last one that was found.
///
/// The engine does not tell where a member of an object was written; looking for its name is right nearly always.
pub fn locate(source: &str, words: &[&str]) -> Option<(u32, u32)> {
    let mut found = None;
    let mut from = 0;
    for word in words {
        let is_part = |byte: Option<&u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$'));
        let bytes = source.as_bytes();
        let at = source[from..]
            .match_indices(word)
            .map(|(at, _)| from + at)
            .find(|at| !word.is_empty() && !is_part(at.checked_sub(1).and_then(|before| bytes.get(before))) && !is_part(bytes.get(at + word.len())));
        let Some(at) = at else { break };
        found = Some(at);
        from = at + word.len();
    }
    let before = &source[..found?];
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().map_or(0, |line| line.chars().count()) + 1;
    Some((u32::try_from(line).ok()?, u32::try_from(column).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &[&str]) -> BTreeMap<String, String> {
        names.iter().map(|name| ((*name).to_owned(), String::new())).collect()
    }

    #[test]
    fn imports_stay_inside_the_folder() {
        let files = files(&["account.js", "lib/money.js", "lib/deep/round.js"]);
        for (base, name, expected) in [
            ("account.js", "./lib/money.js", Ok("lib/money.js")),
            ("lib/money.js", "./deep/round.js", Ok("lib/deep/round.js")),
            ("lib/deep/round.js", "../money.js", Ok("lib/money.js")),
            ("lib/deep/round.js", "../../account.js", Ok("account.js")),
            ("account.js", "./lib/../lib//./money.js", Ok("lib/money.js")),
            ("account.js", "../account.js", Err("outside")),
            ("lib/money.js", "../../etc/passwd", Err("outside")),
            ("account.js", "/etc/passwd", Err("only files of this folder")),
            ("account.js", "fs", Err("only files of this folder")),
            ("account.js", "https://example.com/a.js", Err("only files of this folder")),
            ("account.js", "./lib/other.js", Err("there is no file lib/other.js")),
            ("account.js", "./lib/money", Err("there is no file")),
        ] {
            let resolved = resolve(&files, base, name);
            match expected {
                Ok(path) => assert_eq!(resolved.as_deref(), Ok(path), "{name}"),
                Err(part) => assert!(resolved.as_ref().is_err_and(|error| error.contains(part)), "{name}: {resolved:?}"),
            }
        }
    }

    #[test]
    fn words_are_located() {
        let source = "export const commands = {\n  reopen: {},\n  open: { handel() {} },\n};\n";
        for (words, place) in [
            (&["commands"][..], Some((1, 14))),
            (&["commands", "open"], Some((3, 3))),
            (&["commands", "open", "handel"], Some((3, 11))),
            (&["commands", "open", "missing"], Some((3, 3))),
            (&["missing"], None),
            (&[""], None),
        ] {
            assert_eq!(locate(source, words), place, "{words:?}");
        }
    }

    #[test]
    fn a_folder_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &[u8]| std::fs::write(folder.path().join(name), text).unwrap();
        let messages = || Sources::read(folder.path()).unwrap_err().iter().map(ToString::to_string).collect::<Vec<_>>();
        assert!(messages()[0].contains("holds no module"), "{:?}", messages());
        write("account.js", b"a");
        write("readme.md", b"b");
        write(".hidden.js", b"c");
        std::fs::create_dir(folder.path().join("lib")).unwrap();
        write("lib/money.js", b"d");
        let sources = Sources::read(folder.path()).unwrap();
        assert_eq!(sources.files.keys().collect::<Vec<_>>(), ["account.js", "lib/money.js"]);
        assert_eq!(sources.modules, [EntityType::trusted("account")]);
        write("Bad-Name.js", b"");
        write("binary.js", b"\xff");
        write("zero.js", b"\0");
        assert_eq!(messages().len(), 3, "{:?}", messages());
        assert!(Sources::read(&folder.path().join("missing")).unwrap_err()[0].message.contains("cannot be read"));
    }

    #[test]
    fn the_version_names_the_code() {
        let mut sources = Sources { files: files(&["a.js", "lib/b.js", "lib/c.js"]), modules: Vec::new() };
        let imports: BTreeSet<String> = ["lib/b.js".to_owned()].into();
        let version = |sources: &Sources| sources.version(&EntityType::trusted("a"), &imports);
        let first = version(&sources);
        assert_eq!(first.len(), 16);
        sources.files.insert("lib/c.js".into(), "not imported".into());
        assert_eq!(version(&sources), first);
        sources.files.insert("lib/b.js".into(), "imported".into());
        let second = version(&sources);
        assert_ne!(second, first);
        sources.files.insert("a.js".into(), "own".into());
        assert_ne!(version(&sources), second);
    }
}
