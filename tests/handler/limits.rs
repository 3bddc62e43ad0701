//! Limits of time, memory and stack, in script and in the engine's native loops.

use super::*;
use HandlerFaultKind::{Exception, MemoryLimit, StackLimit, TimeLimit};

/// Bodies that must end in one of these ways.
const BODIES: &[(&str, &[HandlerFaultKind])] = &[
    ("while (true) {}", &[TimeLimit]),
    ("for (;;) { try { for (;;); } catch {} finally { for (;;); } }", &[TimeLimit]),
    ("new Array(1e9) + ''", &[TimeLimit, MemoryLimit, Exception]),
    ("'a'.repeat(2 ** 30)", &[MemoryLimit, Exception]),
    ("(function deep() { return deep() + 1 })()", &[StackLimit]),
    ("JSON.parse('['.repeat(1e6))", &[StackLimit, Exception]),
    ("/(a+)+b/.test('a'.repeat(60))", &[TimeLimit]),
    ("/^(([a-z])+.)+[A-Z]([a-z])+$/.test('a'.repeat(60))", &[TimeLimit]),
    ("JSON.stringify(new Array(3e7).fill(1))", &[TimeLimit, MemoryLimit]),
    ("JSON.stringify(Array.from({ length: 4e5 }, () => ({ a: [1, 2, 3] })))", &[TimeLimit, MemoryLimit]),
    // Ran 198 s in the engine itself, under a limit of 100 ms.
    ("'a'.repeat(4e5).indexOf('a'.repeat(2e5) + 'b')", &[TimeLimit]),
    ("new Float64Array(4e6).map((_, i) => -i).sort().join()", &[TimeLimit, MemoryLimit]),
    ("const a = []; for (;;) a.push(new Array(1000).fill(a.length))", &[MemoryLimit, TimeLimit]),
    ("let s = 'x'; for (;;) s += s + s.length", &[MemoryLimit, TimeLimit, Exception]),
    ("const b = []; for (;;) b.push(new ArrayBuffer(1e6))", &[MemoryLimit]),
    ("return 2n ** 30000000n", &[TimeLimit, MemoryLimit, Exception]),
    ("return { get x() { while (true) {} } }", &[TimeLimit]),
    ("return { toJSON() { while (true) {} } }", &[TimeLimit]),
    ("state.x = { get y() { return 'a'.repeat(4e5).indexOf('a'.repeat(2e5) + 'b') } }", &[TimeLimit]),
    ("throw Object.defineProperty(new Error(''), 'message', { get() { while (true) {} } })", &[TimeLimit]),
    ("const f = () => Promise.resolve().then(f); f(); while (true) {}", &[TimeLimit]),
];

#[tokio::test]
async fn every_handler_ends_within_its_limits() {
    let commands: Vec<String> =
        BODIES.iter().enumerate().map(|(number, (body, _))| format!("run{number}: {{ handle(state) {{ state.n = -1; {body} }} }}")).collect();
    let source = format!("export const commands = {{ add: {{ handle(state) {{ return ++state.n; }} }}, {} }};", commands.join(",\n"));
    let module = Module::new(&source).await;
    for (number, (body, kinds)) in BODIES.iter().enumerate() {
        let outcomes = module.run_on(Some(r#"{"n":0}"#), &[("add", "0"), (&format!("run{number}"), "0"), ("add", "0")]).await;
        let shown: Vec<String> = outcomes.iter().map(show).collect();
        assert!(fault_kind(&outcomes[1]).is_some_and(|kind| kinds.contains(&kind)), "{body}: {shown:?}");
        assert_eq!((shown[0].as_str(), shown[2].as_str()), (r#"1 {"n":1}"#, r#"2 {"n":2}"#), "{body}");
    }
}

#[tokio::test]
async fn a_value_that_explodes_when_it_is_written_ends_too() {
    let outcome = Module::of_body("let x = [1]; for (let i = 0; i < 99; i++) x = [x, x]; return x").await.one("{}", "0").await;
    let is_too_large = matches!(&outcome, Outcome::Failed(Failure::ResponseInvalid(errors)) if errors[0].message.contains("more than"));
    assert!(is_too_large || fault_kind(&outcome) == Some(TimeLimit), "{outcome:?}");
}

#[tokio::test]
async fn memory_is_that_of_the_command() {
    let body = "if (request > 0) { state.x = new Array(request).fill('x'.repeat(10)).join('') ; return state.x.length } return 0";
    let options = Options { memory_limit: 8 << 20, time_limit: Duration::from_secs(20), ..options() };
    let module = Module::with(&format!("export const commands = {{ run: {{ handle(state, request) {{ {body} }} }} }};"), &options).await;
    let outcomes = module.run_on(Some("{}"), &[("run", "10"), ("run", "3000000"), ("run", "20"), ("run", "3000000"), ("run", "0")]).await;
    let kinds: Vec<_> = outcomes.iter().map(fault_kind).collect();
    assert_eq!(kinds, [None, Some(MemoryLimit), None, Some(MemoryLimit), None], "{outcomes:?}");
}

#[tokio::test]
async fn one_bad_command_among_a_hundred_is_alone() {
    let source = r#"export const commands = {
        add: { handle(state) { return ++state.n; } },
        spin: { handle(state) { state.n = -1; 'a'.repeat(4e5).indexOf('a'.repeat(2e5) + 'b'); } },
        fill: { handle(state) { state.n = -1; const b = []; for (;;) b.push(new ArrayBuffer(1e6)); } },
        slow: { handle(state) { state.n = -1; for (;;); } },
    };"#;
    let module = Module::new(source).await;
    for bad in ["spin", "fill", "slow"] {
        let commands: Vec<(&str, &str)> = (0..100).map(|number| (if number == 57 { bad } else { "add" }, "0")).collect();
        let outcomes = module.run_on(Some(r#"{"n":0}"#), &commands).await;
        assert_eq!(outcomes.len(), 100);
        let good: Vec<String> = outcomes.iter().filter(|outcome| fault_kind(outcome).is_none()).map(show).collect();
        let expected: Vec<String> = (1..100).map(|n| format!(r#"{n} {{"n":{n}}}"#)).collect();
        assert_eq!(good, expected, "{bad}");
        assert!(fault_kind(&outcomes[57]).is_some(), "{bad}: {:?}", outcomes[57]);
    }
}
