//! Large states, which stay in handler processes: what commands are answered and leave is what it would be had each read its state anew.

use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// How many commands the interpreter has, all of them the same: one that recording is not for runs without it for a while.
const NAMES: usize = 400;

/// Runs a list of operations on the state. Numbers in them choose among what is there.
const INTERPRETER: &str = r#"
const names = ["a", "b", "c", "10", "9", "~/", "é", "\ue000", "😀", "__proto__", "toString", "zz", "length", "k1", "k2", "k3"];
const isObject = (value) => typeof value === "object" && value !== null;
const at = (state, path) => {
  let here = state;
  for (const number of path) {
    const keys = Object.keys(here);
    const next = here[keys[number % keys.length]];
    if (!isObject(next)) break;
    here = next;
  }
  return here;
};
const key = (container, number) => (Array.isArray(container) ? String(number % (container.length + 1)) : names[number % names.length]);
class Point { x = 1; #y = 2; get z() { return this.#y; } }
const odd = (c, n) => [
  () => () => 1, () => new Map([[1, c]]), () => new Set([c]), () => new Date(0), () => undefined, () => NaN, () => Symbol("s"), () => new Point(),
  () => ({ toJSON() { return c; } }), () => ({ get x() { return c; } }), () => new Number(3), () => new Proxy({}, {}), () => 10n ** 18n, () => -0,
  () => ({ toJSON() { c.late = 1; return 1; } }), () => "\ud800", () => [undefined, c, , 2], () => 2n ** 70n, () => Object.create({ inherited: 1 }),
  () => new Error("x"), () => new Uint8Array(2), () => JSON.parse(JSON.stringify(c)), () => /x/g, () => ({ toJSON: 1 }), () => ({ ["\udc00"]: 1 }),
][n % 25]();
const looks = [
  (c) => Object.keys(c), (c) => Object.entries(c), (c) => Object.values(c), (c) => { const all = []; for (const k in c) all.push(k); return all; },
  (c) => JSON.stringify(c, (_, v) => (typeof v === "bigint" ? `${v}n` : v)), (c) => Object.getOwnPropertyDescriptors(c), (c) => Reflect.ownKeys(c),
  (c) => ({ ...c }), (c) => Array.isArray(c), (c) => (Array.isArray(c) ? [...c] : Object.assign({}, c)), (c) => names.map((k) => k in c),
  (c) => names.map((k) => Object.hasOwn(c, k)), (c) => Object.prototype.toString.call(c), (c) => [Object.isFrozen(c), Object.isExtensible(c)],
  (c) => (Array.isArray(c) ? [c.indexOf(c[1]), c.includes(c[0]), c.length, c.at(-1)] : c.a === c.a), (c) => { const { a, ...rest } = c; return rest; },
  (c) => c, (c) => [c, c], (c) => Object.getPrototypeOf(c) === (Array.isArray(c) ? Array.prototype : Object.prototype), (c) => typeof c.b,
  (c) => (Array.isArray(c) ? c.concat([1], c) : Object.fromEntries(Object.entries(c))), (c) => (Array.isArray(c) ? c.flat() : c instanceof Object),
];
const arrays = [
  (a, n, v) => a.push(v), (a) => a.pop(), (a) => a.shift(), (a, n, v) => a.unshift(v), (a, n, v) => a.splice(n % (a.length + 1), n % 3, v),
  (a, n) => a.splice(n % (a.length + 1), 2), (a) => a.sort(), (a) => a.reverse(), (a, n, v) => a.fill(v, n % 5, 3), (a, n) => a.copyWithin(n % 3, 1),
  (a, n) => { a.length = n % 7; }, (a) => a.sort((x, y) => (JSON.stringify(x) < JSON.stringify(y) ? -1 : 1)), (a, n, v) => a.unshift(v, v), (a, n, v) => a.push(v, a[0], v),
  (a) => { [a[0], a[1]] = [a[1], a[0]]; }, (a, n, v) => { a[a.length + (n % 3)] = v; }, (a, n) => { delete a[n % 3]; }, (a, n, v) => { a.other = v; },
  (a) => { a.push(a.shift()); }, (a, n) => { if (isObject(a[n % 3])) a[n % 3].touched = n; a.shift(); },
];
const operations = {
  set: (c, d, n, v) => { c[key(c, n)] = v; },
  delete: (c, d, n) => { if (!Array.isArray(c)) delete c[key(c, n)]; },
  erase: (c, d, n) => { const keys = Object.keys(c); if (!Array.isArray(c)) delete c[keys[n % keys.length]]; },
  again: (c, d, n) => { const k = Object.keys(c)[0]; if (!Array.isArray(c)) { const v = c[k]; delete c[k]; c[k] = v; } return Object.keys(c); },
  array: (c, d, n, v) => { if (Array.isArray(c)) return arrays[n % arrays.length](c, n, v); c.list ??= [{ x: 1 }, 2, [3]]; },
  move: (c, d, n) => { const k = Object.keys(c)[0]; const x = c[k]; if (!Array.isArray(c)) delete c[k]; d[key(d, n)] = x; },
  alias: (c, d, n) => { if (c !== d) d[key(d, n)] = c; },
  back: (c, d, n) => { const k = key(c, n); const had = Object.hasOwn(c, k); const old = c[k]; c[k] = 7; if (had) c[k] = old; else if (!Array.isArray(c)) delete c[k]; },
  mark: (c, d, n) => { c[Array.isArray(c) ? 0 : "mark"] = n; d[Array.isArray(d) ? 0 : "mark"] = n; },
  assign: (c, d, n, v) => { Object.assign(c, v); },
  spread: (c, d, n) => { d[key(d, n)] = Array.isArray(c) ? [...c] : { ...c }; },
  filter: (c, d, n) => { if (Array.isArray(c)) d[key(d, n)] = [c.filter(Boolean), c.slice(1), c.map((x) => x), c.toReversed()][n % 4]; },
  define: (c, d, n, v) => { Object.defineProperty(c, key(c, n), { value: v, writable: n % 8 > 0, enumerable: true, configurable: true }); },
  accessor: (c, d, n) => { Object.defineProperty(c, "got", { get: () => 5, enumerable: true, configurable: true }); },
  freeze: (c, d, n) => { [Object.freeze, Object.seal, Object.preventExtensions, (x) => Object.setPrototypeOf(x, null), (x) => { x[Symbol.iterator] = null; }][n % 5](c); },
  odd: (c, d, n) => { c[key(c, n)] = odd(d, n); },
  give: (c, d, n) => odd(d, n),
  look: (c, d, n) => looks[n % looks.length](c),
  same: (c, d) => [c === d, c.a === d.a, new Set([c, d]).size],
  count: (c, d, n) => { if (!Array.isArray(c)) c.n = (typeof c.n === "number" ? c.n : 0) + 1; },
  big: (c, d, n) => { if (typeof c.big === "bigint") c.big += 1n; else if (!Array.isArray(c)) c.big = 2n ** 60n + BigInt(n); },
  nested: (c, d, n, v) => { const made = { inner: c, v }; d[key(d, n)] = made; made.later = n; if (isObject(made.inner)) made.inner[key(made.inner, n)] = n; },
  json: (c) => { if (!Array.isArray(c)) c.toJSON = () => 1; },
  inherit: (c, d, n) => { const child = Object.create(c); child.a = n; return [child.a, c.a]; },
  replace: (c, d, n, v, context) => { context.replaceState([c, v, { ...c }, [c, d]][n % 4]); },
  keep: (c, d, n, v, context, state) => { context.replaceState(state); },
  throw: () => { throw new Error("thrown"); },
  reject: (c) => { throw reject("no", "because", c); },
  random: (c, d, n, v, context) => [Math.random(), context.random(), Date.now()],
  log: (c) => console.log(c),
};
const handle = (state, request, context) => {
  const said = [];
  for (const [name, path, other, number, value] of request) {
    try {
      said.push(operations[name](at(state, path), at(state, other), number, value, context, state));
    } catch (error) {
      if (name === "throw" || name === "reject") throw error;
      said.push(String(error));
    }
  }
  return said;
};
export const state = { type: ["object", "array"], properties: { k1: { type: "object", properties: { n: { maximum: 3 } } }, k2: { not: { type: "boolean" } } } };
export const commands = Object.fromEntries(Array.from({ length: 400 }, (_, number) => [`run${number}`, { handle }]));
"#;

const OPERATIONS: &[&str] = &[
    "set", "set", "set", "delete", "erase", "again", "array", "array", "array", "move", "alias", "alias", "back", "mark", "mark", "assign", "spread", "filter", "define", "look",
    "look", "look", "same", "count", "count", "big", "nested", "random", "keep", "set", "array", "erase",
];
/// What recording is not for, or what fails: one of them among a few makes the command run again.
const RARE: &[&str] = &["accessor", "freeze", "odd", "odd", "odd", "odd", "give", "json", "inherit", "replace", "throw", "reject", "log"];

fn leaf() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (0..100_i64).prop_map(Value::from),
        Just(json!(9_007_199_254_740_993_i64)),
        Just(json!(18_446_744_073_709_551_615_u64)),
        Just(json!(1.5)),
        "[a-c\"\\\\é😀\\n]{0,6}".prop_map(Value::from),
    ]
}

fn value(size: u32) -> impl Strategy<Value = Value> {
    let key = prop_oneof![
        Just("a"), Just("b"), Just("c"), Just("10"), Just("9"), Just("~/"), Just("\u{e000}"), Just("😀"), Just("__proto__"), Just("k1"), Just("k2"), Just("n"), Just("list")
    ];
    leaf().prop_recursive(4, size, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::vec((key.clone(), inner), 0..6)
                .prop_map(|members| Value::Object(members.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())),
        ]
    })
}

fn operation() -> impl Strategy<Value = Value> {
    let path = prop::collection::vec(0..12_u32, 0..4);
    let name = prop_oneof![14 => prop::sample::select(OPERATIONS), 1 => prop::sample::select(RARE)];
    (name, path.clone(), path, 0..200_u32, value(6)).prop_map(|(name, path, other, number, value)| json!([name, path, other, number, value]))
}

/// What comes between two batches.
#[derive(Debug, Clone, Copy)]
enum Between {
    /// The next one runs on what the last one left.
    Nothing,
    /// The last one is rolled back: the next one runs on what it found.
    RolledBack,
    /// The state was read back: an equal text elsewhere.
    ReadAgain,
}

fn batches() -> impl Strategy<Value = Vec<(Between, Vec<Value>)>> {
    let between = prop_oneof![4 => Just(Between::Nothing), 1 => Just(Between::RolledBack), 1 => Just(Between::ReadAgain)];
    let command = prop::collection::vec(operation(), 1..5).prop_map(Value::from);
    prop::collection::vec((between, prop::collection::vec(command, 1..8)), 1..6)
}

fn document() -> impl Strategy<Value = Json> {
    (prop::collection::vec(value(24), 4..10), 0..6000_usize, any::<bool>()).prop_map(|(parts, filler, is_array)| {
        let filler = Value::from("x".repeat(filler));
        let whole = if is_array {
            Value::Array(parts.into_iter().chain([filler]).collect())
        } else {
            let keys = ["a", "b", "c", "10", "9", "k1", "list", "😀", "\u{e000}", "zz"].map(str::to_owned);
            Value::Object(keys.into_iter().zip(parts).chain([("filler".to_owned(), filler)]).collect())
        };
        Json::from_serialize(&whole).unwrap()
    })
}

fn batch(state: &Json, commands: &[Value], names: &AtomicUsize) -> Work {
    let commands: Vec<(String, String)> =
        commands.iter().map(|request| (format!("run{}", names.fetch_add(1, Relaxed) % NAMES), request.to_string())).collect();
    let commands: Vec<(&str, &str)> = commands.iter().map(|(name, request)| (name.as_str(), request.as_str())).collect();
    Work { entities: vec![LoadedEntity { state: Some(state.clone().into()), ..work(Some("0"), &[]).entities.remove(0) }], ..work(None, &commands) }
}

fn patches(outcomes: &[Outcome]) -> usize {
    outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Accepted { state: Change::Patch { .. }, .. })).count()
}

async fn plain_and_recorded(source: &str) -> [Module; 2] {
    let with = |resident_min| Options { resident_min, time_limit: Duration::from_secs(10), processes: NonZeroUsize::MIN, ..options() };
    [Module::with(source, &with(usize::MAX)).await, Module::with(source, &with(1)).await]
}

#[test]
fn recorded_commands_are_indistinguishable_from_plain_ones() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let [plain, recorded] = runtime.block_on(plain_and_recorded(INTERPRETER));
    let (names, patched, total) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    let cases = std::env::var("LARGE_STATE_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(96);
    let config = ProptestConfig { cases, max_shrink_iters: 2000, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(document in document(), batches in batches())| {
        let mut before = document.clone();
        let mut state = document;
        for (between, commands) in batches {
            match between {
                Between::Nothing => {}
                Between::RolledBack => state = before.clone(),
                Between::ReadAgain => state = Json::trusted(state.as_str().to_owned()),
            }
            before = state.clone();
            let work = batch(&state, &commands, &names);
            let (expected, found) = runtime.block_on(async {
                let raw = recorded.handlers.run(work.clone()).await.unwrap();
                patched.fetch_add(patches(&raw.outcomes), Relaxed);
                total.fetch_add(raw.outcomes.len(), Relaxed);
                (run_whole(&plain.handlers, work.clone()).await, whole(&work, raw))
            });
            for (at, (expected, found)) in expected.outcomes.iter().zip(&found.outcomes).enumerate() {
                prop_assert_eq!(show(found), show(expected), "command {} of the batch: {}", at, &commands[at]);
            }
            prop_assert_eq!(&found.states, &expected.states);
            state = found.states[0].clone().unwrap();
        }
    });
    let (patched, total) = (patched.into_inner(), total.into_inner());
    assert!(patched * 3 > total, "only {patched} of {total} commands told their changes");
}
