//! No memory between commands: whatever a module keeps, each command finds it as it was when the module was loaded.

use super::*;

/// Modules whose command `hit` counts its calls in some way that is no state, and answers with the count.
const COUNTERS: &[(&str, &str)] = &[
    ("a variable", "let n = 0; const hit = () => ++n;"),
    ("an object", "const memo = { n: 0 }; const hit = () => ++memo.n;"),
    ("an array", "const seen = []; const hit = () => seen.push(1);"),
    ("a map", "const seen = new Map(); const hit = () => seen.set(seen.size, 1).size;"),
    ("a weak map", "const key = {}; const seen = new WeakMap(); const hit = () => { seen.set(key, (seen.get(key) ?? 0) + 1); return seen.get(key) };"),
    ("a closure", "const hit = (() => { let n = 0; return () => ++n; })();"),
    ("a generator", "const numbers = (function* () { for (let n = 1; ; n++) yield n; })(); const hit = () => numbers.next().value;"),
    ("a static member", "class Counter { static n = 0; } const hit = () => ++Counter.n;"),
    ("a private static member", "class Counter { static #n = 0; static hit() { return ++Counter.#n; } } const hit = () => Counter.hit();"),
    ("a member of a function", "function hit() { hit.n = (hit.n ?? 0) + 1; return hit.n; }"),
    ("a default value", "const memo = { n: 0 }; const hit = (state, request, context, cache = memo) => ++cache.n;"),
    ("the command itself", "const hit = () => { commands.hit.n = (commands.hit.n ?? 0) + 1; return commands.hit.n; };"),
    ("a regular expression", "const all = /a/g; const hit = () => { all.test('aaa'); return all.lastIndex; };"),
    ("a typed array", "const bytes = new Uint8Array(1); const hit = () => ++bytes[0];"),
    ("an import", "import { count } from './lib/count.js'; const hit = () => count();"),
    ("an object of an import", "import { memo } from './lib/count.js'; const hit = () => ++memo.n;"),
    ("a default import", "import count from './lib/count.js'; const hit = () => count.hit();"),
    ("an import of everything", "import * as all from './lib/count.js'; const hit = () => { all.count(); return all.n; };"),
    ("an import of an import", "import { again } from './lib/again.js'; const hit = () => again();"),
    ("an export of an import", "import { count } from './lib/again.js'; const hit = () => count();"),
    // What cannot be evaluated anew in the same realm.
    ("an import that changes", "import { n, count } from './lib/count.js'; const hit = () => { count(); return n; };"),
    ("a ring of imports", "import { ring } from './lib/ring.js'; export const start = 0; const hit = () => ring();"),
    ("waiting at the top level", "let n = await 0; const hit = () => ++n;"),
    ("a promise at the top level", "let n = 7; Promise.resolve().then(() => { n = 0; }); const hit = () => ++n;"),
    ("a slash that may be two things", "const f = {} / 2; let n = 0; const hit = () => ++n;"),
    ("import.meta", "import.meta.n = 0; const hit = () => ++import.meta.n;"),
    ("async commands in between", "let n = 0; const hit = () => { Promise.resolve(); return ++n; };"),
];

const COUNT: &str = "export let n = 0; export const memo = { n: 0 }; export function count() { return ++n; }
    export default class { static n = 0; static hit() { return ++this.n; } }";
const AGAIN: &str = "import { count } from './count.js'; export * from './count.js'; export const again = () => count();";
const RING: &str = "import './other.js'; let n = 0; export const ring = () => ++n;";

fn counter(source: &str) -> Folder {
    let commands = "
        const fail = (how) => ({ creates: 'if-missing', handle(state, request, context) { hit(state, request, context); how(); } });
        export const commands = {
            hit: { creates: 'if-missing', handle: (state, request, context) => hit(state, request, context) },
            throws: fail(() => { throw new Error('no'); }),
            rejects: fail(() => { throw reject('no', ''); }),
            loops: fail(() => { for (;;); }),
        };";
    let source = source.replace("export const start = 0;", "const start = 0;") + commands;
    Folder::new(&[("thing.js", &source), ("lib/count.js", COUNT), ("lib/again.js", AGAIN), ("lib/ring.js", RING), ("lib/other.js", "import './ring.js';")])
}

#[tokio::test]
async fn no_command_sees_what_another_kept() {
    for (options, (name, source)) in small_and_large().iter().flat_map(|options| COUNTERS.iter().map(move |counter| (options, counter))) {
        let folder = counter(source);
        let set = load(folder.path(), options).await.unwrap_or_else(|error| panic!("{name}: {error}"));
        let names = ["hit", "hit", "throws", "hit", "rejects", "hit", "loops", "hit"];
        let commands: Vec<(&str, &str)> = names.iter().map(|name| (*name, "0")).collect();
        for _ in 0..2 {
            let outcomes: Vec<String> = run_whole(&set["thing"], work(None, &commands)).await.outcomes.iter().map(show).collect();
            for (command, outcome) in names.iter().zip(&outcomes) {
                let expected = match *command {
                    "hit" => "1 {}",
                    "throws" => "Exception thing.js:",
                    "rejects" => "rejected",
                    _ => "TimeLimit",
                };
                assert!(outcome.starts_with(expected), "{name}: {outcomes:?}");
            }
        }
    }
}

#[tokio::test]
async fn the_engine_keeps_nothing_either() {
    for (body, expected) in [
        ("Error.prepareStackTrace = () => 1", "Exception thing.js:2: TypeError: object is not extensible"),
        ("Error.stackTraceLimit = 0", "Exception thing.js:2: TypeError: object is not extensible"),
        ("const site = ((s) => s)`x`; site.n = 1", "Exception thing.js:2: TypeError: object is not extensible"),
        ("const site = ((s) => s)`x`; site[0] = 1", "Exception thing.js:2: TypeError: '0' is read-only"),
    ] {
        let shown = run_body(body, "{}", "0").await;
        let parts: Vec<&str> = shown.splitn(4, ':').collect();
        assert_eq!(format!("{}:{}:{}", parts[0], parts[1], parts[3]), expected, "{body}");
    }
}

#[tokio::test]
async fn places_of_errors_are_those_of_the_files() {
    let folder = Folder::new(&[
        (
            "thing.js",
            "import { fail } from './lib/fail.js'; import * as all from './lib/fail.js'; const early = () => { throw new Error('early') };\nexport const commands = {\n\
             far: { creates: true, handle() {\n return fail(); } },\n near: { creates: true, handle() {\n\n   throw new Error('near'); } },\n \
             early: { creates: true, handle: () => early() } };",
        ),
        ("lib/fail.js", "#!/usr/bin/env js\n/* A comment\n of lines. */ export { fail };\nfunction fail() {\n  throw new Error('far');\n}"),
    ]);
    let set = folder.load().await.unwrap();
    for (command, expected) in [
        ("far", "Exception lib/fail.js:5:13: Error: far"),
        ("near", "Exception thing.js:7:14: Error: near"),
        ("early", "Exception thing.js:1:109: Error: early"),
    ] {
        let outcomes = run_whole(&set["thing"], work(None, &[(command, "0")])).await.outcomes;
        assert_eq!(show(&outcomes[0]), expected);
    }
}

#[tokio::test]
async fn the_top_level_knows_neither_time_nor_dice() {
    let source = "const tried = (f) => { try { return f(); } catch { return 'unknown'; } };
        const early = [tried(() => Date.now()), tried(() => Math.random()), tried(() => new Date())];
        export const commands = { run: { creates: 'if-missing', handle() { Math.random(); return [...early, Date.now()]; } } };";
    let outcomes = Module::new(source).await.run(&[("run", "0"), ("run", "0")]).await;
    for outcome in &outcomes {
        assert_eq!(show(outcome), r#"["unknown","unknown","unknown",1700000000123] {}"#);
    }
}

#[tokio::test]
async fn every_way_of_importing_and_exporting_works() {
    let folder = Folder::new(&[
        (
            "thing.js",
            "import a, { b as c, 'd e' as f } from './lib/a.js'\nimport g, * as all from './lib/b.js'\nimport './lib/c.js'\n[1].map(String)
             const run = { creates: true, handle() { return [a(), c, f, new g().x, Object.keys(all), all.ns.b, all.made()]; } }
             const commands = { run }
             export { commands, schema as state }
             var schema = { type: 'object' }",
        ),
        ("lib/a.js", "export default () => 'a'\nconst b = 'b', d = 'd'; export { b, d as 'd e' }"),
        (
            "lib/b.js",
            "export * from './a.js'; export * as ns from './a.js'; export default class { x = 'x' } export async function later() {} export { default as made } from './a.js'",
        ),
        ("lib/c.js", "export const { x, y: [z] } = { x: 1, y: [2] };"),
    ]);
    let set = folder.load().await.unwrap();
    let outcomes = run_whole(&set["thing"], work(None, &[("run", "0")])).await.outcomes;
    assert_eq!(show(&outcomes[0]), r#"["a","b","d","x",["b","d e","default","later","made","ns"],"b","a"] {}"#);
}
