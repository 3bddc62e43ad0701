//! Large states, which stay in handler processes: what commands are answered and leave is what it would be had each read its state anew.

use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

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
export const commands = { run: { handle } };
"#;

const OPERATIONS: &[&str] = &[
    "set", "set", "set", "delete", "erase", "again", "array", "array", "array", "move", "alias", "alias", "back", "mark", "mark", "assign", "spread", "filter",
    "define", "look", "look", "look", "same", "count", "count", "big", "nested", "random", "keep", "set", "array", "erase",
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
        Just("a"),
        Just("b"),
        Just("c"),
        Just("10"),
        Just("9"),
        Just("~/"),
        Just("\u{e000}"),
        Just("😀"),
        Just("__proto__"),
        Just("k1"),
        Just("k2"),
        Just("n"),
        Just("list")
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
    (prop::collection::vec(value(24), 4..10), 1000..8000_usize, any::<bool>()).prop_map(|(parts, filler, is_array)| {
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

fn batch(state: &Json, requests: &[Value]) -> Work {
    let requests: Vec<String> = requests.iter().map(Value::to_string).collect();
    let commands: Vec<(&str, &str)> = requests.iter().map(|request| ("run", request.as_str())).collect();
    on(state, &commands)
}

/// A batch on exactly this text of a state.
fn on(state: &Json, commands: &[(&str, &str)]) -> Work {
    Work { entities: vec![LoadedEntity { state: Some(state.clone().into()), ..work(Some("0"), &[]).entities.remove(0) }], ..work(None, commands) }
}

fn patches(outcomes: &[Outcome]) -> usize {
    outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Accepted { state: Change::Patch { .. }, .. })).count()
}

async fn plain_and_recorded(source: &str) -> [Module; 2] {
    let with = |resident_min| Options { resident_min, plain_after_useless: 0, time_limit: Duration::from_secs(10), processes: NonZeroUsize::MIN, ..options() };
    [Module::with(source, &with(usize::MAX)).await, Module::with(source, &with(1)).await]
}

#[test]
fn recorded_commands_are_indistinguishable_from_plain_ones() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let [plain, recorded] = runtime.block_on(plain_and_recorded(INTERPRETER));
    let (patched, total) = (AtomicUsize::new(0), AtomicUsize::new(0));
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
            let work = batch(&state, &commands);
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

/// A state of about so many bytes.
fn large(bytes: usize, n: i64) -> Json {
    let members: Vec<String> = (0..bytes / 100).map(|number| format!(r#""m{number:06}":{{"n":{n},"text":"{}"}}"#, "x".repeat(76))).collect();
    Json::canonical(format!("{{{}}}", members.join(",")).as_bytes()).unwrap()
}

const COUNT: &str = "export const commands = {
    count: { handle(state, request) { const member = state[request]; member.n += 1; return member.n; } },
    later: { async handle() {} },
    spin: { handle(state, request) { state[request].n = -1; for (;;); } },
    fill: { handle(state, request) { state[request].n = -1; const all = []; for (;;) all.push(new ArrayBuffer(1e6)); } },
    deep: { handle(state, request) { state[request].n = -1; (function deep() { return deep() + 1; })(); } },
    native: { handle(state, request) { state[request].n = -1; 'a'.repeat(4e5).indexOf('a'.repeat(2e5) + 'b'); } },
    sum: { handle(state) { let sum = 0; for (const key in state) sum += state[key].n; return sum; } },
};";

const COUNT_FIRST: (&str, &str) = ("count", "\"m000001\"");

async fn count(module: &Module, state: &Json, commands: &[(&str, &str)]) -> (Vec<String>, Json) {
    let Ran { outcomes, mut states } = module.handlers.run(on(state, commands)).await.unwrap();
    let shown = outcomes.iter().map(|outcome| match outcome {
        Outcome::Accepted { response, .. } => response.to_string(),
        other => fault_kind(other).map_or_else(|| show(other), |kind| format!("{kind:?}")),
    });
    (shown.collect(), states.remove(0).unwrap())
}

#[tokio::test]
async fn changes_are_told_from_the_first_command_on() {
    let module = Module::new(COUNT).await;
    let Ran { outcomes, .. } = module.handlers.run(on(&large(20_000, 0), &[COUNT_FIRST; 3])).await.unwrap();
    let patches: Vec<&str> =
        outcomes.iter().map(|outcome| if let Outcome::Accepted { state: Change::Patch { patch, .. }, .. } = outcome { patch.as_str() } else { "" }).collect();
    assert_eq!(patches, [1, 2, 3].map(|n| format!(r#"[{{"op":"replace","path":"/m000001/n","value":{n}}}]"#)));
}

#[tokio::test]
async fn a_state_that_its_process_has_lost_is_not_missed() {
    let module = Module::with(COUNT, &Options { processes: NonZeroUsize::MIN, ..options() }).await;
    let mut state = large(20_000, 0);
    for round in 0..4 {
        let (shown, after) = count(&module, &state, &[COUNT_FIRST, COUNT_FIRST]).await;
        assert_eq!(shown, [2 * round + 1, 2 * round + 2].map(|n| n.to_string()));
        state = after;
        if round % 2 == 0 {
            // A promise has the realm made anew, and with it goes what was kept; the server does not know.
            let mut other = on(&Json::trusted(r#"{"a":1}"#), &[("later", "0")]);
            other.entities[0].id = EntityId::new("e-2", 20).unwrap();
            module.handlers.run(other).await.unwrap();
        } else {
            processes::kill_all(&module.folder);
        }
    }
}

#[tokio::test]
async fn a_realm_that_is_made_anew_within_a_batch_loses_no_change() {
    let module = Module::new(COUNT).await;
    let (shown, state) = count(&module, &large(20_000, 0), &[COUNT_FIRST, COUNT_FIRST, ("later", "0"), COUNT_FIRST]).await;
    assert_eq!([&shown[0], &shown[1], &shown[2], &shown[3]], ["1", "2", "Exception", "3"]);
    assert_eq!(state.as_str(), large(20_000, 0).as_str().replacen(r#""m000001":{"n":0"#, r#""m000001":{"n":3"#, 1));
}

#[tokio::test]
async fn a_state_is_not_known_by_version_length_or_text() {
    let module = Module::with(COUNT, &Options { processes: NonZeroUsize::MIN, ..options() }).await;
    let (first, second) = (large(20_000, 1), large(20_000, 5));
    assert_eq!(first.len(), second.len());
    for (state, expected) in [(&first, "2"), (&second, "6"), (&first, "2"), (&first, "2"), (&second, "6")] {
        let (shown, after) = count(&module, state, &[COUNT_FIRST]).await;
        assert_eq!(shown, [expected]);
        // What one run left stays in the process; the next round runs on another state of the same version and length all the same.
        let again = Json::trusted(after.as_str().to_owned());
        assert_eq!(count(&module, &again, &[COUNT_FIRST]).await.0, [(expected.parse::<i32>().unwrap() + 1).to_string()]);
    }
}

#[tokio::test]
async fn commands_that_break_leave_large_states_alone() {
    let module = Module::new(COUNT).await;
    let breaks = [("spin", "TimeLimit"), ("deep", "StackLimit"), ("fill", "MemoryLimit"), ("native", "TimeLimit")];
    for (name, kind) in breaks {
        let (shown, state) = count(&module, &large(20_000, 0), &[COUNT_FIRST, (name, COUNT_FIRST.1), COUNT_FIRST]).await;
        assert_eq!(shown, ["1", kind, "2"], "{name}");
        assert_eq!(count(&module, &state, &[(name, COUNT_FIRST.1), COUNT_FIRST]).await.0, [kind, "3"], "{name}");
    }
}

#[tokio::test]
async fn what_stays_is_bounded() {
    let module = Module::with(COUNT, &Options { processes: NonZeroUsize::MIN, time_limit: Duration::from_secs(20), ..options() }).await;
    let mut work = on(&large(4_000_000, 0), &[COUNT_FIRST, COUNT_FIRST, COUNT_FIRST]);
    work.row_bytes_max = 16 << 20;
    let Ran { outcomes, .. } = module.handlers.run(work).await.unwrap();
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Accepted { state: Change::Whole(_), .. })), "a document too large to stay");

    // More and larger ones than may stay, in one batch and over several.
    for (entities, bytes) in [(80, 6_000), (9, 700_000)] {
        let mut work = on(&large(bytes, 0), &[]);
        work.bytes_left = 1 << 30;
        let entity = work.entities.remove(0);
        work.entities = (0..entities).map(|number| LoadedEntity { id: EntityId::new(&format!("e-{number}"), 20).unwrap(), ..entity.clone() }).collect();
        let task = on(&large(bytes, 0), &[COUNT_FIRST]).tasks.remove(0);
        work.tasks = (0..2 * entities).map(|number| Task { entity: number % entities, ..task.clone() }).collect();
        for round in 0..3 {
            let Ran { outcomes, states } = module.handlers.run(work.clone()).await.unwrap();
            for (number, outcome) in outcomes.iter().enumerate() {
                let Outcome::Accepted { response, .. } = outcome else { panic!("{outcome:?}") };
                assert_eq!(response.as_str(), (2 * round + number / entities + 1).to_string());
            }
            work.entities.iter_mut().zip(states).for_each(|(entity, state)| entity.state = state.map(State::Whole));
        }
    }
}

#[tokio::test]
async fn a_full_batch_still_makes_progress() {
    let module = Module::new(COUNT).await;
    let (_, state) = count(&module, &large(20_000, 0), &[COUNT_FIRST]).await;
    let mut work = on(&state, &[COUNT_FIRST; 5]);
    work.bytes_left = 1000;
    let (shown, _) = {
        let Ran { outcomes, states } = module.handlers.run(work).await.unwrap();
        (outcomes.iter().map(|outcome| matches!(outcome, Outcome::Accepted { .. })).collect::<Vec<_>>(), states)
    };
    assert_eq!(shown, [true, false, false, false, false]);
}

#[tokio::test]
async fn a_state_that_is_older_than_its_schema_is_refused_all_the_same() {
    let source = "export const state = { properties: { a: { type: 'integer' } } }; export const commands = { run: { handle(state, request) { Object.assign(state, request); } } };";
    for options in small_and_large() {
        let module = Module::with(source, &options).await;
        let state = Json::trusted(format!(r#"{{"a":"old","b":0,"filler":"{}"}}"#, "x".repeat(1000)));
        let Ran { outcomes, .. } =
            module.handlers.run(on(&state, &[("run", r#"{"b":1}"#), ("run", r#"{"a":2}"#), ("run", r#"{"b":2}"#), ("run", r#"{"a":"no"}"#)])).await.unwrap();
        let are_accepted: Vec<bool> = outcomes.iter().map(|outcome| matches!(outcome, Outcome::Accepted { .. })).collect();
        assert_eq!(are_accepted, [false, true, true, false]);
    }
}

/// What a command leaves in the state, and what the next one finds.
const LEAKS: &[(&str, &str, &str)] = &[
    ("state.f = () => 1; state.f.secret = 1", "typeof state.f", "\"undefined\""),
    ("state.list.secret = 1", "state.list.secret", "null"),
    ("state.list[Symbol.iterator] = 1", "typeof state.list[Symbol.iterator]", "\"function\""),
    ("state[Symbol.for('x')] = 1", "state[Symbol.for('x')]", "null"),
    ("state.a = Object.create({ secret: 1 })", "state.a.secret", "null"),
    ("Object.defineProperty(state, 'secret', { value: 1 })", "'secret' in state", "false"),
    ("Object.defineProperty(state, 'secret', { get: () => 1, enumerable: true })", "Object.getOwnPropertyDescriptor(state, 'secret').get", "null"),
    ("state.a = new (class { #x = 1; get y() { return 1 } })()", "[state.a.y, Object.getPrototypeOf(state.a) === Object.prototype]", "[null,true]"),
    ("state.a = { x: { y: 1 } }; state.b = state.a; state.c = state.a.x", "(state.a.x.y = 2, [state.b.x.y, state.c.y, state.a.x.y])", "[1,1,2]"),
    ("state.c = state.list", "(state.c.push(7), [state.list.length, state.c.length])", "[3,4]"),
    ("const kept = state.list; state.list = [...kept, kept]", "(state.list[3].push(7), state.list.length)", "4"),
    ("state.u = undefined; state.list.push(undefined)", "['u' in state, state.list[3]]", "[false,null]"),
    ("state.a = { toJSON() { state.zz = 5; return 1; } }", "[state.a, state.zz]", "[1,5]"),
    ("state.d = new Date(0)", "typeof state.d", "\"string\""),
    ("state.z = -0", "Object.is(state.z, 0)", "true"),
    ("state.a = Object.freeze({ x: 1 })", "(state.a.x = 2, state.a.x)", "2"),
    ("Object.freeze(state.list)", "state.list.push(1)", "4"),
    ("Object.setPrototypeOf(state.list, null)", "state.list.push(1)", "4"),
    ("state.inner.x = 1; throw reject('no', '')", "state.inner", "{\"k\":1}"),
    ("state.inner.x = 1; delete state.inner.k; throw new Error('no')", "state.inner", "{\"k\":1}"),
    ("delete state.inner; throw reject('no', '')", "Object.keys(state)", "[\"filler\",\"inner\",\"list\",\"zz\"]"),
    (
        "const { inner } = state; delete state.inner; state.inner = inner; throw reject('no', '')",
        "Object.keys(state)",
        "[\"filler\",\"inner\",\"list\",\"zz\"]",
    ),
    ("state.mm = 1; state.aa = 1; state['7'] = 1", "Object.keys(state)", "[\"7\",\"aa\",\"filler\",\"inner\",\"list\",\"mm\",\"zz\"]"),
    ("state.mm = 1", "(state.aa = 1, Object.keys(state))", "[\"filler\",\"inner\",\"list\",\"mm\",\"zz\",\"aa\"]"),
    ("state.mm = 1", "(delete state.inner, state.inner = 1, Object.keys(state))", "[\"filler\",\"list\",\"mm\",\"zz\",\"inner\"]"),
    ("state['\u{e000}'] = 1; state['😀'] = 2", "Object.keys(state).slice(-2)", "[\"\u{e000}\",\"😀\"]"),
    ("state.n = 2n ** 60n", "(state.n += 1n, typeof state.n)", "\"bigint\""),
    ("state.n = 9007199254740992n; state.m = 5n", "[typeof state.n, typeof state.m]", "[\"bigint\",\"number\"]"),
    ("commands.leave.kept = state", "commands.leave.kept", "null"),
    ("try { Object.prototype.kept = state } catch {} try { Array.prototype.push = 1 } catch {}", "typeof {}.kept", "\"undefined\""),
    ("state.w = new WeakMap([[state.inner, 1]])", "state.w", "{}"),
    ("state.inner = new Proxy(state.inner, {})", "state.inner", "{\"k\":1}"),
    ("console.log(state); for (const key in state) state[key]", "Object.keys(state).length", "4"),
];

#[tokio::test]
async fn nothing_but_the_document_passes_through_the_state() {
    let mut wrong = Vec::new();
    for (leave, find, expected) in LEAKS {
        let source = format!("export const commands = {{ leave: {{ handle(state) {{ {leave}\n }} }}, find: {{ handle(state) {{ return {find}; }} }} }};");
        for options in small_and_large() {
            let module = Module::with(&source, &options).await;
            let state = Json::trusted(format!(r#"{{"filler":"{}","inner":{{"k":1}},"list":[1,[2],{{"x":3}}],"zz":0}}"#, "x".repeat(2000)));
            let Ran { outcomes, .. } = module.handlers.run(on(&state, &[("leave", "0"), ("find", "0")])).await.unwrap();
            let found = if let Outcome::Accepted { response, .. } = &outcomes[1] { response.to_string() } else { show(&outcomes[1]) };
            // Over the border of two batches, too.
            let Ran { states, .. } = module.handlers.run(on(&state, &[("leave", "0")])).await.unwrap();
            let Ran { outcomes, .. } = module.handlers.run(on(states[0].as_ref().unwrap(), &[("find", "0")])).await.unwrap();
            let later = if let Outcome::Accepted { response, .. } = &outcomes[0] { response.to_string() } else { show(&outcomes[0]) };
            if found != *expected || later != *expected {
                wrong.push(format!("{leave}; {find} with {}\n   expected {expected}\n   got {found} and {later}", options.resident_min));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Values that show another text the second time they are written, and break the schema of the test below the first time.
const FICKLE: &[&str] = &[
    "let n = 0; state.a = { get x() { return n++; } }",
    "let n = 0; state.a.x = { toJSON() { return n++; } }",
    "let n = 0; class Fickle { toJSON() { return { x: n++ }; } } state.a = new Fickle()",
    "let n = 0; state.a.x = { toJSON() { return n++ === 0 ? undefined : 1; } }",
    "let n = 0; state.d = 1; state.c = { toJSON() { return n++ === 0 ? undefined : 1; } }",
    "let n = 0; state.list[1] = { toJSON() { return n++; } }",
    "let n = 0; state.list.shift(); state.list.push({ toJSON() { return n++; } })",
    // So many that the array is told as a whole, and so much that the state is.
    "let n = 0; for (let at = 0; at < 60; at += 1) state.list[at] = { toJSON() { return n++ < 60 ? 0 : 1; } }",
    "let n = 0; state.a = { get x() { return n++; } }; state.filler = 'y'.repeat(3000)",
];

#[tokio::test]
async fn the_state_that_is_kept_is_the_one_that_was_checked() {
    let schema =
        "{ properties: { a: { properties: { x: { minimum: 1 } }, required: ['x'] }, list: { items: { minimum: 1 } } }, dependentRequired: { d: ['c'] } }";
    let state = Json::trusted(format!(r#"{{"a":{{"x":1}},"filler":"{}","list":[1{}]}}"#, "x".repeat(2000), ",1".repeat(59)));
    for handle in FICKLE {
        let source = format!(
            "export const state = {schema};
             export const commands = {{ touch: {{ handle(state) {{ state.a.y = 0; }} }}, run: {{ handle(state) {{ {handle}\n }} }} }};"
        );
        let mut shown = Vec::new();
        for options in small_and_large() {
            let module = Module::with(&source, &options).await;
            // What stays of a state is checked as a whole by the first command, and by its changes from then on.
            for commands in [&[("run", "0"), ("touch", "0")][..], &[("touch", "0"), ("run", "0"), ("touch", "0")]] {
                let ran = run_whole(&module.handlers, on(&state, commands)).await;
                shown.push(ran.outcomes.iter().map(show).collect::<Vec<_>>());
            }
        }
        let (plain, recorded) = shown.split_at(2);
        assert!(plain.iter().all(|outcomes| outcomes.iter().any(|outcome| outcome.starts_with("state "))), "{handle}: {plain:?}");
        assert_eq!(recorded, plain, "{handle}");
    }
}
