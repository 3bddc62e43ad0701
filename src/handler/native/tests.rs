use super::*;
use crate::core::{LoadedEntity, LogIdentity, Outcome, State, Task};
use serde::Deserialize;
use serde_json::json;

#[derive(Debug, Default, Serialize, Deserialize)]
struct Account {
    balance: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    charges: Vec<u64>,
}

#[derive(Deserialize)]
struct Charge {
    amounts: Vec<u64>,
}

fn open(balance: u64, account: &mut Account) -> Result<(), Rejection> {
    account.balance = balance;
    Ok(())
}

fn charge(request: Charge, account: &mut Account) -> Result<u64, Rejection> {
    for amount in request.amounts {
        account.charges.push(amount);
        let balance = account.balance;
        let too_low = || Rejection::new("insufficient_funds", "balance too low").details(json!({ "balance": balance }));
        account.balance = balance.checked_sub(amount).ok_or_else(too_low)?;
    }
    Ok(account.balance)
}

/// A state that has no default.
#[derive(Serialize, Deserialize)]
struct Balance {
    balance: u64,
}

fn explode(text: String, state: &mut Balance) -> Result<(), Rejection> {
    state.balance = 0;
    panic!("bang: {text}")
}

fn bad_code((): (), _: &mut Balance) -> Result<(), Rejection> {
    Err(Rejection::new("no code", ""))
}

fn random(_: Option<u64>, state: &mut Balance, context: &Context<'_>) -> Result<(f64, String, u64), Rejection> {
    state.balance += context.now() as u64;
    Ok((context.random(), format!("{}/{}", context.entity_id(), context.command_id()), context.version()))
}

fn account() -> Entity {
    Entity::new("account")
        .creates("open", open)
        .creates_if_missing("put", open)
        .command("charge", charge)
        .command("explode", explode)
        .command("bad_code", bad_code)
        .command("random", random)
        .command("closure", |by: u64, state: &mut Balance| {
            state.balance *= by;
            Ok(())
        })
}

async fn run(entity: Entity, state: Option<&str>, commands: &[(&str, &str)]) -> Vec<String> {
    let handlers = entity.build(RandomKey::of(&LogIdentity::new([7; 32]))).unwrap();
    let json = |text: &str| Json::canonical(text.as_bytes()).unwrap();
    let tasks = commands.iter().enumerate().map(|(number, (command, request))| Task {
        entity: 0,
        command_id: CommandId::new(&format!("c-{number}")).unwrap(),
        command: CommandName::new(command).unwrap(),
        request: json(request),
        precondition: None,
        now: 5,
    });
    let entities = vec![LoadedEntity { id: EntityId::new("a", 20).unwrap(), version: state.map_or(0, |_| 3), state: state.map(json).map(State::Whole) }];
    let work = Work { entities, tasks: tasks.collect(), done: 0, bytes_left: 1 << 20, row_bytes_max: 1 << 20 };
    let outcomes = handlers.run(work).await.unwrap().outcomes;
    let show = |outcome| match outcome {
        Outcome::Accepted { response, state: Change::Whole(state) } => format!("{response} {state}"),
        Outcome::Rejected { rejection } => format!("rejected {rejection}"),
        Outcome::Failed(Failure::HandlerFailed(fault)) => format!("{:?} {}", fault.kind, fault.message),
        Outcome::Failed(Failure::InvalidRequest(errors)) => format!("request {}", errors[0].pointer),
        Outcome::Failed(Failure::StateInvalid(errors)) => format!("state {}", errors[0].pointer),
        other => format!("{other:?}"),
    };
    outcomes.into_iter().map(show).collect()
}

#[tokio::test]
async fn functions_handle_commands() {
    let commands = [
        ("charge", r#"{"amounts":[1]}"#),
        ("open", "10"),
        ("open", "10"),
        ("charge", r#"{"amounts":[1,2]}"#),
        ("charge", r#"{"amounts":[1,20]}"#),
        ("charge", r#"{"amounts":[1,"x"]}"#),
        ("charge", r#"{}"#),
        ("explode", r#""now""#),
        ("bad_code", "null"),
        ("closure", "2"),
        ("nothing", "null"),
    ];
    assert_eq!(
        run(account(), None, &commands).await,
        [
            "Failed(EntityNotFound)",
            r#"null {"balance":10}"#,
            "Failed(EntityExists { version: 1 })",
            r#"7 {"balance":7,"charges":[1,2]}"#,
            r#"rejected {"code":"insufficient_funds","details":{"balance":6},"message":"balance too low"}"#,
            "request /amounts/1",
            "request ",
            "Exception the handler panicked: bang: now",
            r#"Exception "no code" is no code of a rejection"#,
            r#"null {"balance":14,"charges":[1,2]}"#,
            "Failed(UnknownCommand)",
        ]
    );
}

#[tokio::test]
async fn what_a_type_does_not_know_is_kept() {
    let state = r#"{"balance":7,"charges":[1],"new":{"by":"a newer release"}}"#;
    assert_eq!(
        run(account(), Some(state), &[("closure", "2"), ("put", "1")]).await,
        [r#"null {"balance":14,"charges":[1],"new":{"by":"a newer release"}}"#, r#"null {"balance":1,"charges":[1],"new":{"by":"a newer release"}}"#,]
    );
    assert_eq!(run(account(), Some(r#"{"balance":"x"}"#), &[("closure", "2")]).await, ["state /balance"]);
}

#[tokio::test]
async fn the_context_is_that_of_the_command() {
    let commands = [("random", "null"), ("random", "1")];
    let first = run(account(), Some(r#"{"balance":1}"#), &commands).await;
    assert_eq!(run(account(), Some(r#"{"balance":1}"#), &commands).await, first);
    assert!(first[0].ends_with(r#","a/c-0",3] {"balance":6}"#), "{first:?}");
    assert!(first[1].ends_with(r#","a/c-1",4] {"balance":11}"#), "{first:?}");
    let number = |text: &str| text[1..].split(',').next().unwrap().parse::<f64>().unwrap();
    assert_ne!(number(&first[0]), number(&first[1]));
}

#[tokio::test]
async fn schemas_are_kept() {
    let entity = account().state_schema(&json!({ "properties": { "balance": { "maximum": 100 } } })).request_schema("open", &json!({ "minimum": 5 }));
    assert_eq!(
        run(entity, None, &[("open", "4"), ("open", "101"), ("open", "100"), ("closure", "2")]).await,
        ["request ", "state /balance", r#"null {"balance":100}"#, "state /balance",]
    );
}

#[test]
fn all_that_is_wrong_is_told() {
    let key = RandomKey::of(&LogIdentity::new([7; 32]));
    let errors = |entity: Entity| entity.build(key).err().map_or(Vec::new(), |error| error.errors);
    assert_eq!(errors(account()), Vec::<String>::new());
    assert_eq!(errors(Entity::new("account")), ["there is no command"]);
    let entity = Entity::new("Account")
        .creates("open", open)
        .creates("open", open)
        .command("Bad", charge)
        .version("")
        .entity_id_max(65)
        .state_schema(&json!({ "type": 1 }))
        .request_schema("missing", &json!({}));
    assert_eq!(errors(entity).len(), 7);
}

#[test]
fn the_version_is_given_or_made_from_the_commands() {
    let key = RandomKey::of(&LogIdentity::new([7; 32]));
    let version = |entity: Entity| entity.build(key).unwrap().version().to_string();
    assert_eq!(version(account().version("7f3a")), "7f3a");
    assert_eq!(version(account()).len(), 16);
    assert_eq!(version(account()), version(account()));
    assert_ne!(version(account()), version(account().command("more", charge)));
}
