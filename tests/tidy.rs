//! Holds the layout: what may import what, how long a file may be, that nothing is dead, that documents tell the truth about
//! commands and files. Each rule lists everything that breaks it.
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The layers, lowest first. A module imports from lower layers only; modules that stand in no layer are on top.
const LAYERS: &[&[&str]] = &[&["core"], &["metrics", "logging"], &["store", "handler"], &["partition"], &["cluster", "view", "feed", "archive"], &["http"]];
const LINES_MAX: usize = 700;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The files below a folder that end so, as paths from the repository's root; none where there is no such folder.
fn files(folder: &str, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.to_str().unwrap().ends_with(ending) {
                found.push(path.strip_prefix(root()).unwrap().to_path_buf());
            }
        }
    }
    found.sort();
    found
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(root().join(path)).unwrap()
}

/// Source text without the lines that are comments.
fn code(path: &Path) -> String {
    let is_comment = |line: &str| line.starts_with("//") || line.starts_with("--");
    read(path).lines().filter(|line| !is_comment(line.trim_start())).map(|line| format!("{line}\n")).collect()
}

#[track_caller]
fn none(problems: Vec<String>) {
    assert!(problems.is_empty(), "\n{}\n", problems.join("\n"));
}

/// The module of the crate that a source file belongs to, such as `store`.
fn module(path: &Path) -> String {
    path.components().nth(1).unwrap().as_os_str().to_str().unwrap().trim_end_matches(".rs").to_string()
}

fn layer(module: &str) -> usize {
    LAYERS.iter().position(|layer| layer.contains(&module)).unwrap_or(LAYERS.len())
}

/// The crate's modules that a text names as `crate::module` or `crate::{module, module}`.
fn imports(text: &str) -> BTreeSet<String> {
    let name = |text: &str| text.trim_start().chars().take_while(|character| character.is_ascii_lowercase() || *character == '_').collect::<String>();
    let mut found = BTreeSet::new();
    for (at, marker) in text.match_indices("crate::") {
        let rest = &text[at + marker.len()..];
        let Some(group) = rest.strip_prefix('{') else {
            found.insert(name(rest));
            continue;
        };
        let mut depth = 0;
        let mut start = 0;
        for (at, character) in group.char_indices() {
            match character {
                '{' => depth += 1,
                '}' if depth > 0 => depth -= 1,
                ',' | '}' if depth == 0 => {
                    found.insert(name(&group[start..at]));
                    start = at + 1;
                    if character == '}' {
                        break;
                    }
                }
                _ => {}
            }
        }
    }
    found
}

#[test]
fn imports_are_found_in_every_form() {
    let text = "use crate::core::ids::EntityId;\nuse crate::{http, store::{self, mysql}, config};\nlet x = crate::handler::x();";
    assert_eq!(imports(text).iter().map(String::as_str).collect::<Vec<_>>(), ["config", "core", "handler", "http", "store"]);
}

#[test]
fn imports_go_one_way() {
    let sources = files("src", ".rs");
    let modules: BTreeSet<String> = sources.iter().map(|path| module(path)).collect();
    assert!(["core", "store", "handler", "partition", "http"].iter().all(|name| modules.contains(*name) && layer(name) < LAYERS.len()), "{modules:?}");
    let mut problems = Vec::new();
    for path in &sources {
        let own = module(path);
        let is_top = layer(&own) == LAYERS.len();
        for import in imports(&code(path)).intersection(&modules) {
            if !is_top && *import != own && layer(import) >= layer(&own) {
                problems.push(format!("{}: {own} must not import {import}, which is not below it", path.display()));
            }
        }
    }
    none(problems);
}

#[test]
fn files_can_be_read_in_one_sitting() {
    let mut problems = Vec::new();
    for path in ["src", "tests", "examples"].into_iter().flat_map(|folder| files(folder, ".rs")) {
        let lines = read(&path).lines().count();
        if lines > LINES_MAX {
            problems.push(format!("{} has {lines} lines; at most {LINES_MAX} are allowed", path.display()));
        }
    }
    none(problems);
}

/// The files that `mod name;` lines lead to, from a file on; `#[path]` is not used.
fn reach(path: &Path, reached: &mut BTreeSet<PathBuf>) {
    if !root().join(path).is_file() || !reached.insert(path.to_path_buf()) {
        return;
    }
    let stem = path.file_stem().unwrap().to_str().unwrap();
    let parent = path.parent().unwrap();
    let folder = if ["lib", "main", "mod"].contains(&stem) || parent == Path::new("tests") { parent.to_path_buf() } else { parent.join(stem) };
    for line in code(path).lines() {
        let declaration = line.trim().trim_end_matches(';');
        let Some((before, name)) = declaration.rsplit_once("mod ").filter(|_| line.trim_end().ends_with(';')) else { continue };
        if before.is_empty() || before.ends_with(' ') {
            reach(&folder.join(format!("{name}.rs")), reached);
            reach(&folder.join(name).join("mod.rs"), reached);
        }
    }
}

#[test]
fn no_file_is_dead() {
    let mut reached = BTreeSet::new();
    reach(Path::new("src/lib.rs"), &mut reached);
    reach(Path::new("src/main.rs"), &mut reached);
    for entry in std::fs::read_dir(root().join("tests")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|ending| ending == "rs") {
            reach(path.strip_prefix(root()).unwrap(), &mut reached);
        }
    }
    let all = files("src", ".rs").into_iter().chain(files("tests", ".rs"));
    none(all.filter(|path| !reached.contains(path)).map(|path| format!("{} is part of no crate", path.display())).collect());
}

/// The statements in a text that would hide the conflict of a key, on tables other than quokka's own bookkeeping.
fn hidden_conflicts(text: &str) -> Vec<String> {
    let text = text.to_ascii_uppercase().split_whitespace().collect::<Vec<_>>().join(" ");
    let mut found = Vec::new();
    for form in ["INSERT IGNORE", "INSERT OR IGNORE", "INSERT OR REPLACE", "REPLACE INTO", "ON DUPLICATE KEY", "ON CONFLICT"] {
        for (at, _) in text.match_indices(form) {
            let start = text[..at + form.len()].rfind("INSERT").unwrap_or(at);
            let table = text[start..].split_once("INTO ").map_or("", |(_, table)| table);
            if !table.trim_start_matches('`').starts_with("QUOKKA_") {
                found.push(format!("{form} on {}", table.split([' ', '(']).next().unwrap()));
            }
        }
    }
    found
}

#[test]
fn hidden_conflicts_are_found() {
    for (statement, is_fine) in [
        ("INSERT IGNORE INTO `account` (shard) VALUES (1)", false),
        ("insert into account (shard) values (1)\n on duplicate key update shard = 1", false),
        ("REPLACE INTO account VALUES (1)", false),
        ("\"INSERT INTO {table} VALUES\", \" ON CONFLICT DO NOTHING\"", false),
        ("INSERT INTO quokka_barrier (slot) VALUES (\" . sql(\") ON DUPLICATE KEY UPDATE writes = writes + 1", true),
        ("INSERT INTO `account` VALUES (1)", true),
    ] {
        assert_eq!(hidden_conflicts(statement).is_empty(), is_fine, "{statement}");
    }
}

#[test]
fn event_tables_never_hide_a_conflict() {
    let sources = files("src", ".rs").into_iter().chain(files("schema", ".sql"));
    none(sources.flat_map(|path| hidden_conflicts(&code(&path)).into_iter().map(move |what| format!("{}: {what}", path.display()))).collect());
}

#[test]
fn no_test_is_switched_off() {
    let mark = concat!("#[", "ignore");
    let sources = ["src", "tests", "examples"].into_iter().flat_map(|folder| files(folder, ".rs"));
    none(sources.filter(|path| read(path).contains(mark)).map(|path| format!("{} has a test that does not run", path.display())).collect());
}

fn documents() -> Vec<PathBuf> {
    let mut documents = vec![PathBuf::from("README.md")];
    documents.extend([PathBuf::from("ARCHITECTURE.md")].into_iter().filter(|path| root().join(path).exists()));
    documents.extend(files("docs", ".md"));
    documents.extend(files("examples", ".md"));
    documents
}

/// Lines of code blocks, and code spans, each with its line number.
fn code_of(document: &str) -> Vec<(usize, String)> {
    let mut is_block = false;
    let mut found = Vec::new();
    for (at, line) in document.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            is_block = !is_block;
        } else if is_block {
            found.push((at + 1, line.trim_start_matches("$ ").to_string()));
        } else {
            found.extend(line.split('`').skip(1).step_by(2).map(|span| (at + 1, span.to_string())));
        }
    }
    found
}

/// The arguments that a line of shell gives to quokka, where it does.
fn quokka_arguments(line: &str) -> Option<Vec<&str>> {
    let line = line.split(" #").next().unwrap();
    let mut words = line.split_whitespace().skip_while(|word| word.contains('=') && !word.starts_with('-')).peekable();
    let program = words.next()?;
    match program {
        "cargo" if words.peek() == Some(&"run") && !line.contains("--example") => Some(words.skip_while(|word| *word != "--").skip(1).collect()),
        _ if program == "quokka" || program.ends_with("/quokka") => Some(words.collect()),
        _ => None,
    }
}

/// What the program, or a subcommand of it, says about itself; none where there is no such subcommand.
fn help(subcommand: &str) -> Option<String> {
    let arguments = subcommand.split_whitespace().chain(["--help"]);
    let output = Command::new(env!("CARGO_BIN_EXE_quokka")).args(arguments).output().unwrap();
    output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
}

#[test]
fn commands_in_documents_exist() {
    let mut known: BTreeMap<String, Option<String>> = BTreeMap::new();
    let (mut problems, mut seen) = (Vec::new(), 0);
    for path in documents() {
        for (line, text) in code_of(&read(&path)) {
            let Some(arguments) = quokka_arguments(&text) else { continue };
            let place = format!("{}:{line}", path.display());
            let subcommand = arguments.first().filter(|word| word.starts_with(|first: char| first.is_ascii_lowercase())).copied().unwrap_or_default();
            let Some(help) = known.entry(subcommand.to_string()).or_insert_with_key(|name| help(name)) else {
                problems.push(format!("{place}: there is no `quokka {subcommand}`"));
                continue;
            };
            seen += 1;
            for flag in arguments.iter().filter(|word| word.starts_with("--")).map(|word| word.split('=').next().unwrap()) {
                if !help.split(|character: char| character.is_whitespace() || character == ',').any(|word| word == flag) {
                    problems.push(format!("{place}: `quokka {subcommand}` has no {flag}"));
                }
            }
        }
    }
    assert!(seen > 0, "the documents show how to start quokka");
    none(problems);
}

#[test]
fn links_and_paths_in_documents_lead_somewhere() {
    let mut problems = Vec::new();
    for path in documents() {
        let text = read(&path);
        let folder = root().join(&path).parent().unwrap().to_path_buf();
        for link in text.split("](").skip(1).map(|rest| rest.split([')', '#', ' ']).next().unwrap()) {
            if !link.is_empty() && !link.contains("://") && !folder.join(link).exists() {
                problems.push(format!("{}: the link to {link} leads nowhere", path.display()));
            }
        }
        let is_path =
            |span: &str| ["src/", "tests/", "examples/", "config/", "schema/"].iter().any(|top| span.starts_with(top)) && !span.contains([' ', '*', '<', '{']);
        for (line, span) in code_of(&text) {
            if is_path(&span) && !root().join(&span).exists() {
                problems.push(format!("{}:{line}: there is no {span}", path.display()));
            }
        }
    }
    none(problems);
}

#[test]
fn scripts_can_be_run() {
    use std::os::unix::fs::PermissionsExt;
    let mut scripts = files("examples", "try.sh");
    scripts.extend(files("tests/tools", ""));
    scripts.extend(["tests/run", "tests/readme", ".ci/run"].map(PathBuf::from));
    let is_executable = |path: &PathBuf| std::fs::metadata(root().join(path)).unwrap().permissions().mode() & 0o111 != 0;
    let problem = |path: PathBuf| {
        let shell = if read(&path).starts_with("#!/bin/sh") { "sh" } else { "bash" };
        let check = Command::new(shell).arg("-n").arg(root().join(&path)).output().unwrap();
        if !is_executable(&path) {
            return Some(format!("{} is not executable", path.display()));
        }
        (!check.status.success()).then(|| String::from_utf8_lossy(&check.stderr).into_owned())
    };
    none(scripts.into_iter().filter_map(problem).collect());
}
