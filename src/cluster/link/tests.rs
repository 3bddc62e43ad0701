//! A link against owners that fall silent, talk nonsense, stop, come back or never answer.

use super::client::{Handled, Waiting};
use super::wire::FromOwner;
use super::{Link, Sent};
use crate::cluster::tests_support::{Here, Owner, PATIENCE, SILENCE_MAX, account, at_version, command, frame, handle, note, told};
use crate::core::{Member, NodeId};
use crate::partition::{Command, CommandError, Kept, WhenFull};
use std::sync::{Arc, Weak};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(10);

/// Something to be kept, and how to see whether it still is.
fn kept() -> (Kept, Weak<()>) {
    let held = Arc::new(());
    let seen = Arc::downgrade(&held);
    (Some(Box::new(held)), seen)
}

async fn try_send(link: &Link, command: Command, timeout: Duration) -> Sent<Waiting> {
    link.send(&account(), command, WhenFull::Wait, timeout, None, None).await.unwrap()
}

async fn send(link: &Link, command: Command) -> Waiting {
    match try_send(link, command, LONG).await {
        Sent::Passed(waiting) => waiting,
        Sent::Back { command, .. } => panic!("{} is not passed on", command.command_id),
    }
}

async fn answers(waiting: Vec<Waiting>) -> Vec<(String, Option<String>)> {
    let mut answers = Vec::new();
    for waiting in waiting {
        let Handled { result, by } = waiting.answer().await;
        answers.push((told(&result), by.map(|by| by.to_string())));
    }
    answers
}

/// How `a`, `b`, `c` … noted one after another are answered, by whom, where every one is the first of its id.
fn noted(by: Option<&str>, texts: &[&str]) -> Vec<(String, Option<String>)> {
    texts.iter().enumerate().map(|(before, text)| (format!("{} \"{text}\" First", before + 1), by.map(str::to_owned))).collect()
}

#[tokio::test]
async fn answers_come_in_any_order() {
    let (here, mut owner) = (Here::new(LONG).await, Owner::listen("owner").await);
    let link = Link::start(owner.member.clone(), here.shared.clone());
    let mut session = owner.session().await;
    let waiting = vec![send(&link, note("e", "a")).await, send(&link, note("e", "b")).await, send(&link, note("e", "c")).await];
    let there = here.another_node();
    let mut done = Vec::new();
    for _ in 0..3 {
        let ask = session.command().await;
        done.push((handle(&there, &ask).await, ask));
    }
    for (result, ask) in done.into_iter().rev() {
        session.answer(&ask, result).await;
    }
    assert_eq!(answers(waiting).await, noted(Some("owner"), &["a", "ab", "abc"]));
}

/// Whatever an owner does instead of answering, its commands are handled here, each once, in the order in which they came.
#[tokio::test]
async fn unique_truth_an_owner_that_does_not_answer_is_given_up() {
    for fault in ["silent", "cut", "ends", "half a frame", "garbage", "too long", "no database"] {
        let (here, mut owner) = (Here::new(LONG).await, Owner::listen("owner").await);
        let link = Link::start(owner.member.clone(), here.shared.clone());
        let mut session = owner.session().await;
        let mut waiting = Vec::new();
        for id in ["a", "b", "c", "d"] {
            waiting.push(send(&link, note("e", id)).await);
        }
        let there = here.another_node();
        let asks = [session.command().await, session.command().await];
        // Two have happened there, and nobody here knows.
        for ask in &asks {
            handle(&there, ask).await.unwrap();
        }
        let answer = frame(&FromOwner::Answer { number: asks[0].number, result: Err(CommandError::OutcomeUnknown) });
        let silent = match fault {
            "silent" => Some(session),
            "ends" => None,
            "cut" => {
                session.cut().await;
                None
            }
            "half a frame" => {
                session.send(&answer[..answer.len() / 2]).await;
                session.cut().await;
                None
            }
            "garbage" => {
                session.send(&[0, 0, 0, 3, 0xff, 0xff, 0xff]).await;
                Some(session)
            }
            "too long" => {
                session.send(&[0xff; 64]).await;
                Some(session)
            }
            "no database" => {
                session.say(&FromOwner::NoStorage).await;
                Some(session)
            }
            other => panic!("{other}"),
        };
        let mut expected = noted(None, &["a", "ab", "abc", "abcd"]);
        for told in &mut expected[..2] {
            told.0 = told.0.replace("First", "Again");
        }
        assert_eq!(answers(waiting).await, expected, "{fault}");
        // The link is made again, and the owner's late answers to what it was asked before are nobody's.
        let mut again = owner.session().await;
        if let Some(mut session) = silent {
            session.answer(&asks[1], handle(&there, &asks[1]).await).await;
        }
        let next = loop {
            match try_send(&link, note("e", "e"), LONG).await {
                Sent::Passed(waiting) => break waiting,
                Sent::Back { .. } => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        };
        let ask = again.command().await;
        again.answer(&ask, handle(&there, &ask).await).await;
        assert_eq!(answers(vec![next]).await, [("5 \"abcde\" First".to_owned(), Some("owner".to_owned()))], "{fault}");
    }
}

/// An owner that stood still wakes up and handles all that it was asked: whatever was told as certain meanwhile stays true.
#[tokio::test]
async fn unique_truth_an_owner_that_wakes_up_makes_nothing_untrue() {
    let (here, mut owner) = (Here::new(LONG).await, Owner::listen("owner").await);
    let link = Link::start(owner.member.clone(), here.shared.clone());
    let mut session = owner.session().await;
    let waiting = [
        note("e", "a"),
        // The entity is past this version, and never returns to it.
        at_version(0, note("e", "past")),
        // It is not there yet.
        at_version(2, note("e", "early")),
        command("missing", "t", "tear"),
        command("e", "o", "open"),
    ];
    let mut sent = Vec::new();
    for command in waiting {
        sent.push(send(&link, command).await);
    }
    let mut asks = Vec::new();
    for _ in 0..5 {
        asks.push(session.command().await);
    }
    let told_here: Vec<String> = answers(sent).await.into_iter().map(|(told, _)| told).collect();
    assert_eq!(
        told_here,
        ["1 \"a\" First", "Failed(VersionMismatch { version: 1 })", "OutcomeUnknown", "OutcomeUnknown", "Failed(EntityExists { version: 1 })",]
    );
    // Meanwhile others go on; then it wakes up.
    let there = here.another_node();
    let mut others = asks[0].clone();
    others.command = note("e", "b");
    assert_eq!(told(&handle(&there, &others).await), "2 \"ab\" First");
    others.command = note("missing", "m");
    assert_eq!(told(&handle(&there, &others).await), "1 \"m\" First");
    let mut late = Vec::new();
    for ask in &asks {
        late.push(told(&handle(&there, ask).await));
    }
    assert_eq!(
        late,
        ["1 \"a\" Again", "Failed(VersionMismatch { version: 2 })", "3 \"abearly\" First", "2 null First", "Failed(EntityExists { version: 3 })",],
        "only what was told as unknown has happened after all"
    );
}

/// What the owner says that it did not take is handled here, and failures of that are certain.
#[tokio::test]
async fn what_a_stopping_owner_does_not_take_surely_did_not_happen_there() {
    let (here, mut owner) = (Here::new(LONG).await, Owner::listen("owner").await);
    let link = Link::start(owner.member.clone(), here.shared.clone());
    let mut session = owner.session().await;
    let waiting = vec![send(&link, note("e", "a")).await, send(&link, command("missing", "t", "tear")).await];
    for _ in 0..2 {
        let ask = session.command().await;
        session.answer(&ask, Err(CommandError::ShuttingDown)).await;
    }
    assert_eq!(answers(waiting).await, [("1 \"a\" First".into(), None), ("Failed(EntityNotFound)".into(), None)]);
}

/// An owner that leaves still answers what it has; only then do later commands go their own way.
#[tokio::test]
async fn an_owner_that_leaves_finishes_what_it_has() {
    let (here, mut owner) = (Here::new(LONG).await, Owner::listen("owner").await);
    let link = Arc::new(Link::start(owner.member.clone(), here.shared.clone()));
    let mut session = owner.session().await;
    let waiting = send(&link, note("e", "a")).await;
    let ask = session.command().await;
    session.say(&FromOwner::Leaving).await;
    let (later, sender) = (note("e", "b"), link.clone());
    let mut later = tokio::spawn(async move {
        loop {
            match try_send(&sender, later.clone(), LONG).await {
                Sent::Back { command, .. } => return command.command_id.to_string(),
                // It was on its way already when the word came.
                Sent::Passed(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    });
    let wait = tokio::time::timeout(SILENCE_MAX / 2, &mut later).await;
    assert!(wait.is_err(), "a later command overtakes one that the owner still has");
    let there = here.another_node();
    session.answer(&ask, handle(&there, &ask).await).await;
    // Those that were on their way when the word came are answered, too.
    let rest = tokio::spawn(async move {
        loop {
            let ask = session.command().await;
            session.answer(&ask, handle(&there, &ask).await).await;
        }
    });
    assert_eq!(answers(vec![waiting]).await, noted(Some("owner"), &["a"]));
    assert_eq!(tokio::time::timeout(PATIENCE, later).await.unwrap().unwrap(), "b");
    rest.abort();
}

/// An owner that is there but never answers costs its callers their time, and no more: nothing of it stays behind.
#[tokio::test]
async fn bounded_an_owner_that_never_answers_holds_nothing_for_ever() {
    let (here, mut owner) = (Here::new(LONG).await, Owner::listen("owner").await);
    let link = Link::start(owner.member.clone(), here.shared.clone());
    let session = owner.session().await;
    let gone = tokio::spawn(session.idle());
    let (held, seen) = kept();
    let sent = link.send(&account(), note("e", "a"), WhenFull::Wait, Duration::from_millis(100), None, held).await.unwrap();
    let Sent::Passed(waiting) = sent else { panic!("it is not passed on") };
    assert!(seen.upgrade().is_some());
    assert_eq!(answers(vec![waiting]).await, [("OutcomeUnknown".into(), None)]);
    drop(link);
    // The link closes once all that is on its way is answered, or given up.
    tokio::time::timeout(PATIENCE, gone).await.expect("the link closes").unwrap();
    assert!(seen.upgrade().is_none());
}

/// What a command keeps is let go with its answer, whether or not anybody reads that, and wherever it was handled.
#[tokio::test]
async fn what_is_kept_is_let_go_with_the_answer() {
    let (here, mut owner) = (Here::new(LONG).await, Owner::listen("owner").await);
    let link = Link::start(owner.member.clone(), here.shared.clone());
    let mut session = owner.session().await;
    let mut unread = Vec::new();
    for is_answered_there in [true, false] {
        let (held, seen) = kept();
        let id = if is_answered_there { "a" } else { "b" };
        unread.push(link.send(&account(), note("e", id), WhenFull::Wait, LONG, None, held).await.unwrap());
        let ask = session.command().await;
        assert!(seen.upgrade().is_some());
        match is_answered_there {
            true => session.answer(&ask, handle(&here.another_node(), &ask).await).await,
            false => session.say(&FromOwner::NoStorage).await,
        }
        let deadline = tokio::time::Instant::now() + PATIENCE;
        while seen.upgrade().is_some() {
            assert!(tokio::time::Instant::now() < deadline, "{id} is answered and still keeps something");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    assert_eq!(unread.len(), 2);
}

/// Nobody waits for an owner that could not be reached a moment ago.
#[tokio::test]
async fn an_owner_that_is_not_there_is_not_waited_for() {
    let here = Here::new(LONG).await;
    for url in ["http://127.0.0.1:1", "http://", "nothing"] {
        let link = Link::start(Member { id: NodeId::trusted("owner"), url: url.into() }, here.shared.clone());
        assert!(!link.is_usable().await, "{url}");
        let Sent::Back { command, .. } = try_send(&link, note("e", "a"), LONG).await else { panic!("it is passed on to {url}") };
        assert_eq!(command, note("e", "a"));
    }
}
