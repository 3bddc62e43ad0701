//! What handlers see and what becomes of what they do.

use super::*;

#[tokio::test]
async fn a_command_gets_state_request_and_context() {
    let module = Module::new(
        r#"export const commands = {
            open: { creates: true, handle(state, request) { state.balance = request.amount; return {}; } },
            charge: { handle(state, request, context) {
                if (state.balance < request.amount) throw reject("insufficient_funds", "balance too low", { balance: state.balance });
                state.balance -= request.amount;
                return { balance: state.balance, context };
            } },
            set: { handle(state, request, { replaceState }) { replaceState(request); } },
        };"#,
    )
    .await;
    let commands = [
        ("charge", "{}"),
        ("open", r#"{"amount":10}"#),
        ("charge", r#"{"amount":3}"#),
        ("charge", r#"{"amount":8}"#),
        ("set", "[1]"),
        ("open", "1"),
        ("nothing", "1"),
    ];
    let outcomes = module.run(&commands).await;
    assert_eq!(
        outcomes.iter().map(show).collect::<Vec<_>>(),
        [
            "EntityNotFound",
            r#"{} {"balance":10}"#,
            r#"{"balance":7,"context":{"commandId":"c-2","entityId":"e-1","now":1700000000123,"version":1}} {"balance":7}"#,
            r#"rejected {"code":"insufficient_funds","details":{"balance":7},"message":"balance too low"}"#,
            "null [1]",
            "EntityExists { version: 4 }",
            "UnknownCommand",
        ]
    );
}

/// Bodies that run on the state `{"a":1}` with the request `{"name":"__proto__"}`, and their outcome.
const BODIES: &[(&str, &str)] = &[
    // Rejections.
    ("throw reject('no', 'because')", r#"rejected {"code":"no","message":"because"}"#),
    ("throw reject('no', 'because', null)", r#"rejected {"code":"no","message":"because"}"#),
    ("throw reject('a.b-c:d_1', '', [0])", r#"rejected {"code":"a.b-c:d_1","details":[0],"message":""}"#),
    ("reject('no', 'because'); return 1", r#"1 {"a":1}"#),
    ("return reject('no', 'because').code", r#""no" {"a":1}"#),
    ("throw { code: 'no', message: 'x', details: null }", r#"Exception thing.js: threw {"code":"no","message":"x","details":null}"#),
    ("return reject('no', 'because')", "Exception thing.js: TypeError: the handler returned reject(...) instead of throwing it"),
    ("throw Object.create(Object.getPrototypeOf(reject('no', '')))", "Exception thing.js: threw {}"),
    ("throw reject('no', 'x', { b: NaN })", "response /details/b: NaN is no JSON"),
    ("throw reject('two words', '')", "Exception thing.js:2: TypeError: reject: the code must be a letter followed by at most 63 letters, digits and _ . : -"),
    ("throw reject(7, '')", "Exception thing.js:2: TypeError: reject: the code must be a letter followed by at most 63 letters, digits and _ . : -"),
    ("throw reject('no')", "Exception thing.js:2: TypeError: reject: the message must be a string"),
    ("try { throw reject('no', '') } catch (error) { error.code = 'yes' }", "Exception thing.js:2: TypeError: 'code' is read-only"),
    // Exceptions.
    ("state.a = 2; throw new Error('oh')", "Exception thing.js:2: Error: oh"),
    ("state.a.b.c", "Exception thing.js:2: TypeError: cannot read property 'c' of undefined"),
    ("throw 'text'", "Exception thing.js: threw \"text\""),
    ("throw null", "Exception thing.js: threw a value of type null"),
    ("throw undefined", "Exception thing.js: threw a value of type undefined"),
    ("null.x", "Exception thing.js:2: TypeError: cannot read property 'x' of null"),
    // Waiting.
    ("return (async () => 1)()", "Exception thing.js: the handler gave a promise (is it async?); handlers run to their end without waiting"),
    ("return { p: Promise.resolve(1) }", "response /p: a promise is no JSON; handlers run to their end without waiting"),
    ("Promise.resolve().then(() => { state.a = 9 }); return 1", r#"1 {"a":1}"#),
    ("import('./thing.js').then(() => {}); return 1", r#"1 {"a":1}"#),
    // Keys that mean something to JavaScript are data.
    ("state[request.name] = { admin: true }; return state.admin === undefined", r#"true {"__proto__":{"admin":true},"a":1}"#),
    ("state.constructor = 1; state.toString = 2; state.hasOwnProperty = 3", r#"null {"a":1,"constructor":1,"hasOwnProperty":3,"toString":2}"#),
    ("state.users = {}; state.users.constructor ??= 1; state.users.constructor = 1; return `${{}}`", r#""[object Object]" {"a":1,"users":{"constructor":1}}"#),
    ("class Mine extends Error { constructor(m) { super(m); this.name = 'Mine' } } throw new Mine('x')", "Exception thing.js:2: Mine: x"),
    ("const e = new TypeError('x'); e.message = 'y'; throw e", "Exception thing.js:2: TypeError: y"),
    // Nothing shared can be changed.
    ("Array.prototype.map = null", "Exception thing.js:2: TypeError: 'map' is read-only"),
    ("Object.prototype.toString = null", "Exception thing.js:2: TypeError: 'toString' is read-only"),
    ("Object.prototype.leak = 1", "Exception thing.js:2: TypeError: object is not extensible"),
    ("globalThis.leak = 1", "Exception thing.js:2: TypeError: object is not extensible"),
    ("leak = 1", "Exception thing.js:2: ReferenceError: leak is not defined"),
    ("Math.random = () => 4", "Exception thing.js:2: TypeError: 'random' is read-only"),
    ("commands.run.handle = null", r#"null {"a":1}"#),
    ("context.now = 1", "Exception thing.js:2: TypeError: 'now' is read-only"),
    ("[].values().__proto__ = 1; return Object.getPrototypeOf([].values()).next.x = 1", "Exception thing.js:2: TypeError: object is not extensible"),
    // Nothing of the outside is there.
    (
        "return ['eval', 'Atomics', 'SharedArrayBuffer', 'WeakRef', 'FinalizationRegistry', 'queueMicrotask', 'performance', 'setTimeout', 'fetch', 'process', 'require', 'std', 'os'].filter((name) => name in globalThis)",
        r#"[] {"a":1}"#,
    ),
    ("return new Function('return 1')()", "Exception thing.js:2: TypeError: code cannot be made from strings here"),
    ("return (function* () {}).constructor('yield 1')", "Exception thing.js:2: TypeError: code cannot be made from strings here"),
    ("return (async () => {}).constructor('1')", "Exception thing.js:2: TypeError: code cannot be made from strings here"),
    ("return (() => {}) instanceof Function", r#"true {"a":1}"#),
    // Time.
    ("return [Date.now(), +new Date(), context.now].every((now) => now === 1700000000123)", r#"true {"a":1}"#),
    ("return new Date()", r#""2023-11-14T22:13:20.123Z" {"a":1}"#),
    ("return Date()", r#""Tue Nov 14 2023 22:13:20 GMT+0000" {"a":1}"#),
    (
        "return [new Date(0), Date.UTC(1970), Date.parse('1970-01-01'), new Date() instanceof Date, new (class extends Date {})(0)]",
        r#"["1970-01-01T00:00:00.000Z",0,0,true,"1970-01-01T00:00:00.000Z"] {"a":1}"#,
    ),
    ("return [new Date(2020, 0).getTime(), new Date().constructor === Date, Date.length, Date.name]", r#"[1577836800000,true,7,"Date"] {"a":1}"#),
    // Values on their way out.
    ("state.n = NaN", "state /n: NaN is no JSON"),
    ("return [1, { b: [Infinity] }]", "response /1/b/0: Infinity is no JSON"),
    ("state.s = '😀'[0]", "state /s: a string holds half of a surrogate pair"),
    ("state['😀'[0]] = 1", "state : a key holds half of a surrogate pair"),
    ("return { 'a/b': { '~': '😀'[1] } }", "response /a~1b/~0: a string holds half of a surrogate pair"),
    ("return { u: undefined, f() {}, s: Symbol(), l: [undefined, () => 1, Symbol(), , 5] }", r#"{"l":[null,null,null,null,5]} {"a":1}"#),
    ("context.replaceState(undefined)", "state : undefined, functions and symbols are no JSON"),
    ("return () => 1", "response : undefined, functions and symbols are no JSON"),
    ("return [new Number(1), new String('x'), new Boolean(false), Object(5n)]", r#"[1,"x",false,5] {"a":1}"#),
    ("return new Map()", "response : a Map or Set holds nothing that JSON shows; use a plain object or an array"),
    ("return { b: [new Set([1])] }", "response /b/0: a Map or Set holds nothing that JSON shows; use a plain object or an array"),
    ("return new (class { constructor() { this.x = 1 } get y() { return 2 } })()", r#"{"x":1} {"a":1}"#),
    ("return Object.assign(Object.create(null), { z: 1 })", r#"{"z":1} {"a":1}"#),
    ("return { toJSON(key) { return { key, nested: { toJSON: (key) => key } } } }", r#"{"key":"","nested":"nested"} {"a":1}"#),
    ("return [{ toJSON: (key) => key }]", r#"["0"] {"a":1}"#),
    ("return { get x() { throw new Error('got') } }", "Exception thing.js:2: Error: got"),
    ("return { get x() { state.a = 5; return 1 } }", r#"{"x":1} {"a":5}"#),
    ("return new Proxy({ x: 1 }, {})", "response : a Proxy is no JSON; copy it into a plain object or an array"),
    ("return { ...new Proxy({ x: 1 }, {}) }", r#"{"x":1} {"a":1}"#),
    ("return Object.assign([1], { x: 1 })", r#"[1] {"a":1}"#),
    ("return new Uint8Array([7, 8])", r#"{"0":7,"1":8} {"a":1}"#),
    ("return { 10: 1, 9: 2, b: 3, a: 4, é: 5, '😀': 6, '\u{ffff}': 7 }", "{\"10\":1,\"9\":2,\"a\":4,\"b\":3,\"é\":5,\"\u{ffff}\":7,\"😀\":6} {\"a\":1}"),
    ("state.self = state", "state /self"),
    ("let x = {}; for (let i = 0; i < 100; i++) x = { x }; return x", "response /x"),
    ("let x = []; for (let i = 0; i < 99; i++) x = [x]; return JSON.stringify(x).length", r#"200 {"a":1}"#),
    ("return new Array(1e9)", "response : the document takes more than"),
    ("return 'a\\u0000\\n\\u001f\"\\\\'", r#""a\u0000\n\u001f\"\\" {"a":1}"#),
    // Numbers.
    (
        "return [1e20, -0, 0.1 + 0.2, 2 ** 53, 2 ** 53 - 1, 5e-324, 1e308, 100, 1e2]",
        r#"[1e20,0,0.30000000000000004,9007199254740992.0,9007199254740991,5e-324,1e308,100,100] {"a":1}"#,
    ),
    ("return [2n ** 64n - 1n, -(2n ** 63n), 5n]", r#"[18446744073709551615,-9223372036854775808,5] {"a":1}"#),
    ("return [2n ** 64n]", "response /0: an integer beyond 64 bits is no JSON here"),
    ("state.b = -(2n ** 63n) - 1n", "state /b: an integer beyond 64 bits is no JSON here"),
    // The log.
    ("console.log('a', { b: 1n }, [undefined], new Error('x'), Symbol('s')); for (let i = 0; i < 1e3; i++) console.error('again'); return 1", r#"1 {"a":1}"#),
    ("return context.replaceState.call(null, { b: 1 })", r#"null {"b":1}"#),
    ("return Object.values(commands).includes(this)", r#"true {"a":1}"#),
];

#[tokio::test]
async fn handlers_do_what_they_may_and_nothing_else() {
    let commands: Vec<String> =
        BODIES.iter().enumerate().map(|(number, (body, _))| format!("run{number}: {{ handle(state, request, context) {{\n{body}\n}} }}")).collect();
    let source = format!("export const commands = {{ run: {{ handle() {{ return 'fine' }} }}, {} }};", commands.join(","));
    for options in small_and_large() {
        outcomes_are_as_expected(&Module::with(&source, &options).await).await;
    }
}

async fn outcomes_are_as_expected(module: &Module) {
    let mut wrong = Vec::new();
    for (number, (body, expected)) in BODIES.iter().enumerate() {
        // Each among two others, which must not notice.
        let name = format!("run{number}");
        let outcomes = module.run_on(Some(r#"{"a":1}"#), &[("run", "0"), (&name, r#"{"name":"__proto__"}"#), ("run", "0")]).await;
        let shown: Vec<String> = outcomes.iter().map(show).collect();
        let line = BODIES[..number].iter().map(|(body, _)| body.matches('\n').count() + 2).sum::<usize>();
        let place = |text: &str| text.replace("thing.js:2:", &format!("thing.js:{}:", line + 2));
        let shown: Vec<String> = shown.iter().map(|shown| without_column(shown)).collect();
        let is_prefix = expected.starts_with("state /self") || expected.starts_with("response") || expected.starts_with("response :");
        let is_right = if is_prefix { shown[1].starts_with(&place(expected)) } else { shown[1] == place(expected) };
        if !is_right || !shown[0].starts_with("\"fine\"") || !shown[2].starts_with("\"fine\"") {
            wrong.push(format!("{body}\n   expected {}\n   got      {shown:?}", place(expected)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A text that starts with a place in a file, without the column: it is the engine's choice which part of an expression is to blame.
fn without_column(shown: &str) -> String {
    let parts: Vec<&str> = shown.splitn(4, ':').collect();
    match parts[..] {
        [file, line, column, message] if file.ends_with(".js") && column.parse::<u32>().is_ok() => format!("{file}:{line}:{message}"),
        _ => shown.to_owned(),
    }
}

#[tokio::test]
async fn what_failed_leaves_no_trace() {
    for options in small_and_large() {
        check_no_trace(&options).await;
    }
}

async fn check_no_trace(options: &Options) {
    let module = Module::with(
        r#"let held = [];
        export const state = { properties: { a: { type: "integer" } } };
        export const commands = {
            look: { handle(state) { return state; } },
            spoil: { handle(state, request) { state.a += 1; state.extra = 1; state.list.push(2); throw new Error("no"); } },
            refuse: { handle(state, request) { state.a += 1; state.list.push(2); throw reject("no", ""); } },
            bad_state: { handle(state) { state.list.push(2); state.a = "text"; } },
            bad_response: { response: { type: "string" }, handle(state) { state.list.push(2); state.a = 7; return 1; } },
            no_json: { handle(state) { state.list.push(2); return { n: NaN }; } },
            bad_request: { request: { type: "object", required: ["x"], properties: { y: { type: "integer" } } }, handle(state) { state.a = 7; } },
            asynchronous: { async handle(state) { state.list.push(2); await null; state.a = 9; } },
            hold: { handle(state, request, context) { held = [state, context]; } },
            touch: { handle(state) { held[0].a = 100; held[0].list.push(100); return held[0].a; } },
            replace: { handle(state, request, context) { return { get late() { context.replaceState(1); } }; } },
        };"#,
        options,
    )
    .await;
    let names = ["spoil", "refuse", "bad_state", "bad_response", "no_json", "bad_request", "asynchronous", "hold", "touch"];
    let request = r#"{"y":"1"}"#;
    let mut commands = Vec::new();
    for name in names {
        commands.extend([(name, request), ("look", "null")]);
    }
    let outcomes = module.run_on(Some(r#"{"a":1,"list":[1]}"#), &commands).await;
    let shown: Vec<String> = outcomes.iter().map(|outcome| without_column(&show(outcome))).collect();
    for look in shown.iter().skip(1).step_by(2) {
        assert_eq!(look, r#"{"a":1,"list":[1]} {"a":1,"list":[1]}"#, "{shown:#?}");
    }
    let others: Vec<&str> = shown.iter().step_by(2).map(String::as_str).collect();
    assert_eq!(
        others,
        [
            "Exception thing.js:5: Error: no",
            r#"rejected {"code":"no","message":""}"#,
            r#"state /a: "text" is not of type "integer""#,
            r#"response : 1 is not of type "string""#,
            "response /n: NaN is no JSON",
            r#"request : "x" is a required property; /y: "1" is not of type "integer""#,
            "Exception thing.js: the handler gave a promise (is it async?); handlers run to their end without waiting",
            r#"null {"a":1,"list":[1]}"#,
            "Exception thing.js:13: TypeError: cannot set property 'a' of undefined",
        ]
    );
    let outcomes = module.run_on(Some(r#"{"list":[]}"#), &[("replace", "0")]).await;
    assert_eq!(without_column(&show(&outcomes[0])), "Exception thing.js:14: TypeError: replaceState: the command is over");
}

#[tokio::test]
async fn numbers_keep_their_digits() {
    let state = r#"{"big":9007199254740993,"f":1.5777777777770001,"g":117.63331139400017,"huge":18446744073709551615,"int":9007199254740991,"low":-9223372036854775808,"wide":9007199254740992.0,"x":1e20}"#;
    for (body, response) in [
        ("", "null"),
        ("return [typeof state.big, typeof state.int, typeof state.wide, typeof state.x]", r#"["bigint","number","number","number"]"#),
        ("return [state.big + 1n, state.huge - 1n, state.low + 1n, state.x]", "[9007199254740994,18446744073709551614,-9223372036854775807,1e20]"),
        ("return [request, request + 1n]", "[9007199254740993,9007199254740994]"),
    ] {
        assert_eq!(run_body(body, state, "9007199254740993").await, format!("{response} {state}"), "{body}");
    }
    let huge = r#"{"__proto__":{"constructor":18446744073709551615},"toString":"1234567890123456789"}"#;
    assert_eq!(run_body("return [Object.keys(state), state instanceof Object]", huge, "1").await, format!(r#"[["__proto__","toString"],true] {huge}"#));
}

#[tokio::test]
async fn random_numbers_depend_on_the_command_alone() {
    let module = Module::of_body("return [Math.random(), context.random(), Math.random()]").await;
    let same = module.run(&[("run", "1"), ("run", "1")]).await;
    let other_process = Module::of_body("return [context.random(), context.random(), context.random()]").await.run(&[("run", "2"), ("run", "2")]).await;
    assert_eq!(same, other_process);
    assert_ne!(same[0], same[1]);
    let other_secret = Options { random: RandomKey::of(&LogIdentity::new([8; 32])), ..options() };
    let source = "export const commands = { run: { creates: true, handle() { return [Math.random(), Math.random(), Math.random()]; } } };";
    assert_ne!(Module::with(source, &other_secret).await.run(&[("run", "1")]).await[0], same[0]);
}

#[tokio::test]
async fn a_full_batch_says_so() {
    let module = Module::of_body("return 'x'.repeat(request)").await;
    let mut work = work(Some("{}"), &[("run", "10"), ("run", "20000"), ("run", "10"), ("run", "10")]);
    (work.row_bytes_max, work.bytes_left) = (10_000, 300);
    let shown: Vec<String> = module.handlers.run(work).await.unwrap().outcomes.iter().map(show).collect();
    assert_eq!(shown, [r#""xxxxxxxxxx" {}"#, "state : the event would take 20268 bytes; at most 10000 are allowed", r#""xxxxxxxxxx" {}"#, "no room"]);
}
