//! Folders of modules: what loads, and what is said of those that do not.

use super::*;
use quokka::core::Creates;

const FINE: &str = "export const commands = { open: { creates: true, handle() {} } };";

#[tokio::test]
async fn a_folder_of_modules_loads() {
    let folder = Folder::new(&[
        (
            "account.js",
            "import { fee } from './lib/money.js';
             export const id = { maxLength: 64 };
             export const state = { type: 'object' };
             export const commands = {
                open: { creates: true, handle(state, request) { state.fee = fee(request); } },
                put: { creates: 'if-missing', request: true, handle: (state) => state },
                close: { creates: false, handle() {} },
             };",
        ),
        ("lib/money.js", "import { percent } from './../lib/deep/percent.js'; export const fee = (amount) => percent(amount, 5);"),
        ("lib/deep/percent.js", "export function percent(amount, by) { return amount * by / 100 }"),
        ("lib/unused.js", "this is not read"),
        ("transfer.js", FINE),
        ("readme.md", "no module"),
    ]);
    let set = folder.load().await.unwrap();
    assert_eq!(set.keys().map(EntityType::as_str).collect::<Vec<_>>(), ["account", "transfer"]);
    let account = &set["account"];
    assert_eq!((account.entity_type().as_str(), account.entity_id_max(), set["transfer"].entity_id_max()), ("account", 64, 20));
    let commands: Vec<_> = account.commands().iter().map(|(name, creates)| (name.as_str(), *creates)).collect();
    assert_eq!(commands, [("close", Creates::Never), ("open", Creates::Always), ("put", Creates::IfMissing)]);
    let version = account.version().to_string();
    assert!(version.len() == 16 && version.bytes().all(|byte| byte.is_ascii_hexdigit()), "{version}");
    assert_ne!(version, set["transfer"].version().to_string());
    let outcomes = account.run(work(None, &[("open", "200")])).await.unwrap().outcomes;
    assert_eq!(show(&outcomes[0]), r#"null {"fee":10}"#);
}

#[tokio::test]
async fn a_reload_sees_what_changed_and_refuses_what_is_broken() {
    let folder = Folder::new(&[
        ("account.js", "import { rate } from './lib/rate.js'; export const commands = { open: { creates: true, handle: () => rate } };"),
        ("lib/rate.js", "export const rate = 1;"),
    ]);
    let first = folder.load().await.unwrap();
    let answer = async |set: &HandlerSet| show(&set["account"].run(work(None, &[("open", "0")])).await.unwrap().outcomes[0]);
    assert_eq!(answer(&first).await, "1 {}");
    folder.write("lib/rate.js", "export const rate = 2;");
    let second = folder.load().await.unwrap();
    assert_eq!((answer(&first).await, answer(&second).await), ("1 {}".into(), "2 {}".into()));
    assert_ne!(first["account"].version(), second["account"].version());
    folder.write("lib/rate.js", "export const rate = ;");
    assert_eq!(folder.problems().await, "lib/rate.js:1:21: SyntaxError: unexpected token in expression: ';'");
    assert_eq!(answer(&second).await, "2 {}");
    folder.write("lib/rate.js", "export const rate = 1;");
    assert_eq!(folder.load().await.unwrap()["account"].version(), first["account"].version());
}

#[tokio::test]
async fn a_folder_without_modules_says_so() {
    assert!(Folder::new(&[]).problems().await.contains("holds no module"));
    assert!(Folder::new(&[("lib/money.js", FINE)]).problems().await.contains("holds no module"));
    let folder = Folder::new(&[]);
    let missing = load(&folder.path().join("missing"), &options()).await.err().unwrap().to_string();
    assert!(missing.contains("missing cannot be read"), "{missing}");
    let program = Options { program: "/nonexistent".into(), ..options() };
    let folder = Folder::new(&[("account.js", FINE)]);
    assert!(matches!(load(folder.path(), &program).await, Err(LoadError::Process(_))));
}

/// Modules, and all that is said of them.
const BROKEN: &[(&str, &[&str])] = &[
    ("", &["the module exports nothing"]),
    ("export const state = {};", &["the module exports no `commands`"]),
    ("export const commands = {};", &["1:14: commands: there is no command"]),
    ("export const commands = [];", &["1:14: commands: must be an object of commands"]),
    ("export default {};", &["1:8: default: unknown export", "the module exports no `commands`"]),
    ("export const command = {}; ", &["1:14: command: unknown export; there are `commands`, `state`, `id`", "exports no `commands`"]),
    (
        "export const commands = {\n  open: { handel() {} },\n  close: { handle: 1 },\n};",
        &["2:11: commands.open.handel: unknown key; there are `handle`, `creates`, `request`, `response`", "3:12: commands.close.handle: must be a function"],
    ),
    ("export const commands = {\n  open() {},\n};", &["2:3: commands.open: must be an object with `handle(state, request, context)`"]),
    ("export const commands = { open: {} };", &["1:27: commands.open: has no `handle(state, request, context)`"]),
    ("export const commands = { Open: { handle() {} } };", &["1:27: commands.Open: the command name may hold only"]),
    ("export const commands = { quokka_x: { handle() {} } };", &["commands.quokka_x: the command name starts with \"quokka\""]),
    ("export const commands = { open: { creates: 'always', handle() {} } };", &["1:35: commands.open.creates: must be true, false or \"if-missing\""]),
    (
        "export const commands = { open: { handle() {},\n  request: { properties: {\n    a: { type: 'whole' } } } } };",
        &["3:10: commands.open.request: the JSON Schema is wrong at /properties/a/type"],
    ),
    ("export const state = 5; export const commands = { open: { handle() {} } };", &["1:14: state: must be a JSON Schema"]),
    ("export const state = { $ref: 'https://example.com/x' }; export const commands = { open: { handle() {} } };", &["1:14: state: the JSON Schema is wrong"]),
    ("export const state = { pattern: '(?=x)' }; export const commands = { open: { handle() {} } };", &["1:24: state: the JSON Schema is wrong at /pattern"]),
    ("export const id = { maxLength: 65 }; export const commands = { open: { handle() {} } };", &["1:21: id.maxLength: must be a whole number from 1 to 64"]),
    ("export const id = { max: 5 }; export const commands = { open: { handle() {} } };", &["1:21: id.max: unknown key"]),
    ("const a = 1;\nexport const b = a +;", &["2:21: SyntaxError: unexpected token in expression: ';'"]),
    ("\n\nnull.x;", &["3:1: TypeError: cannot read property 'x' of null"]),
    ("throw 'a fit'", &["threw \"a fit\""]),
    ("Array.prototype.map = 1;", &["1:1: TypeError: 'map' is read-only"]),
    ("Object.prototype.x = 1;", &["1:1: TypeError: object is not extensible"]),
    ("globalThis.x = 1;", &["1:1: TypeError: object is not extensible"]),
    ("const started = Date.now();", &["1:21: TypeError: the time is known only while a command runs"]),
    ("const started = new Date();", &["TypeError: the time is known only while a command runs"]),
    ("const dice = Math.random();", &["1:18: TypeError: random numbers are known only while a command runs"]),
    ("await new Promise(() => {});", &["the module waits at its top level for something that never comes"]),
    ("await Promise.reject(new Error('later'));", &["Error: later"]),
    ("\nimport x from 'fs';", &["2:16: cannot import \"fs\": only files of this folder"]),
    ("import x from '../other.js';", &["1:16: cannot import \"../other.js\": it is outside the folder"]),
    ("import x from './lib/missing.js';", &["1:16: cannot import \"./lib/missing.js\": there is no file lib/missing.js"]),
    ("import { nothing } from './lib/fine.js';", &["SyntaxError: Could not find export 'nothing' in module 'lib/fine.js'"]),
    ("import x from './lib/fine.js' with { type: 'json' };", &["imports take no attributes here"]),
    ("while (true) {}", &["loading the module takes more than"]),
    ("'a'.repeat(4e6).indexOf('a'.repeat(2e6) + 'b');", &["loading the module takes more than"]),
];

#[tokio::test]
async fn all_that_is_wrong_is_told_with_its_place() {
    let checks = BROKEN.iter().map(|(source, expected)| async move {
        let folder = Folder::new(&[("thing.js", source), ("lib/fine.js", "export const fine = 1;")]);
        let problems = folder.problems().await;
        let is_expected = |line: &str| line.starts_with("thing.js:") && expected.iter().any(|part| line.contains(part));
        let is_right = problems.lines().count() == expected.len() && problems.lines().all(is_expected);
        (!is_right).then(|| format!("{source}\n   expected {expected:?}\n   got      {problems}"))
    });
    let wrong: Vec<String> = futures_util::future::join_all(checks).await.into_iter().flatten().collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test]
async fn the_problems_of_all_modules_are_told() {
    let folder = Folder::new(&[
        ("first.js", "export const commands = {"),
        ("fine.js", FINE),
        ("third.js", "import './lib/broken.js';"),
        ("fourth.js", "import './lib/broken.js';"),
        ("lib/broken.js", "\nnew;"),
        ("fifth.js", "export const commands = { open: { handel() {} } };"),
    ]);
    let problems = folder.problems().await;
    let files: Vec<&str> = problems.lines().filter_map(|line| line.split(':').next()).collect();
    assert_eq!(files, ["fifth.js", "first.js", "lib/broken.js"], "{problems}");
    let folder = Folder::new(&[("Bad.js", FINE), ("quokka_x.js", FINE), ("fine.js", FINE)]);
    let problems = folder.problems().await;
    assert_eq!(problems.lines().count(), 2, "{problems}");
}

#[tokio::test]
async fn imported_values_cannot_carry_anything_over() {
    let folder = Folder::new(&[
        (
            "thing.js",
            "import { cache } from './lib/cache.js'; export const commands = { put: { creates: true, handle() { const before = cache.x; cache.x = 1; return before ?? null; } } };",
        ),
        ("lib/cache.js", "export const cache = {};"),
    ]);
    let set = folder.load().await.unwrap();
    for _ in 0..2 {
        let outcomes = run_whole(&set["thing"], work(None, &[("put", "0")])).await.outcomes;
        assert_eq!(show(&outcomes[0]), "null {}");
    }
}
