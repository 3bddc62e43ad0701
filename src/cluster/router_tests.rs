//! Routers whose maps change under them, with an owner in the hands of the test.

use super::link::client::Handled;
use super::link::wire::FromOwner;
use super::router::{Asker, Pending, Router};
use super::tests_support::{Here, Owner, PATIENCE, SILENCE_MAX, Session, account, handle, note, told};
use crate::core::{Epoch, Member, NodeId, ShardMap, Term};
use crate::partition::{Command, CommandError, WhenFull};
use std::sync::Arc;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(10);
const CLIENT: Asker<'static> = Asker::Client { trace_id: None };

struct Net {
    here: Here,
    router: Arc<Router>,
    owner: Owner,
}

impl Net {
    /// A node called `here`, and another one that owns everything.
    async fn new(timeout: Duration) -> (Net, Session) {
        let (here, mut owner) = (Here::new(timeout).await, Owner::listen("there").await);
        let router = Arc::new(Router::among_others(NodeId::trusted("here"), here.shared.clone()));
        router.follow(&map(&owner.member, 1, "there"));
        let session = owner.session().await;
        (Net { here, router, owner }, session)
    }

    async fn submit(&self, id: &str) -> Pending {
        self.router.submit(&account(), note("e", id), WhenFull::Refuse, CLIENT).await.unwrap()
    }

    /// Submits beside the test.
    fn submit_later(&self, id: &str) -> tokio::task::JoinHandle<Result<Pending, CommandError>> {
        let (router, command): (_, Command) = (self.router.clone(), note("e", id));
        tokio::spawn(async move { router.submit(&account(), command, WhenFull::Refuse, CLIENT).await })
    }
}

/// Both nodes are there, and one of them owns everything.
fn map(there: &Member, epoch: u64, owner: &str) -> ShardMap {
    let here = Member { id: NodeId::trusted("here"), url: "http://127.0.0.1:1".into() };
    let index = u16::from(owner == "there");
    ShardMap { epoch: Epoch(epoch), term: Term(1), members: vec![here, there.clone()], owners: vec![Some(index); 2] }
}

async fn answer(pending: Pending) -> (String, Option<String>) {
    let Handled { result, by } = pending.answer().await;
    (told(&result), by.map(|by| by.to_string()))
}

fn is(told: &str, by: Option<&str>) -> (String, Option<String>) {
    (told.into(), by.map(str::to_owned))
}

/// A command that comes after a new map waits for those that went the old way, and is handled after them: in both directions.
#[tokio::test]
async fn commands_keep_their_order_when_their_way_changes() {
    let (net, mut session) = Net::new(LONG).await;
    let there = net.here.another_node();
    let first = net.submit("a").await;
    let ask = session.command().await;
    net.router.follow(&map(&net.owner.member, 2, "here"));
    let mut second = net.submit_later("b");
    assert!(tokio::time::timeout(SILENCE_MAX / 3, &mut second).await.is_err(), "a command overtakes one that went the old way");
    session.answer(&ask, handle(&there, &ask).await).await;
    // That the answer has come is enough; nobody has to have read it.
    let second = tokio::time::timeout(PATIENCE, second).await.unwrap().unwrap().unwrap();
    assert_eq!(answer(second).await, is("2 \"ab\" First", None));
    assert_eq!(answer(first).await, is("1 \"a\" First", Some("there")));

    net.router.follow(&map(&net.owner.member, 3, "there"));
    let third = net.submit("c").await;
    let ask = session.command().await;
    session.answer(&ask, handle(&there, &ask).await).await;
    assert_eq!(answer(third).await, is("3 \"abc\" First", Some("there")));
}

/// An owner falls silent with commands in its hands, and the map still names it: those are handled here first, then the ones that come.
#[tokio::test]
async fn commands_keep_their_order_when_their_owner_falls_silent() {
    let (net, session) = Net::new(LONG).await;
    let mut pending = Vec::new();
    for id in ["a", "b", "c"] {
        pending.push(net.submit(id).await);
    }
    // Those that come while it is given up, too.
    for id in ["d", "e", "f", "g", "h"] {
        tokio::time::sleep(SILENCE_MAX / 4).await;
        pending.push(net.submit(id).await);
    }
    let mut text = String::new();
    for (before, (pending, id)) in pending.into_iter().zip(["a", "b", "c", "d", "e", "f", "g", "h"]).enumerate() {
        text.push_str(id);
        assert_eq!(answer(pending).await, is(&format!("{} \"{text}\" First", before + 1), None));
    }
    drop(session);
}

/// What another node passed on is handled here, whatever the map says.
#[tokio::test]
async fn forward_once_what_was_passed_on_is_handled_here() {
    let (net, _session) = Net::new(LONG).await;
    let pending = net.router.submit(&account(), note("e", "a"), WhenFull::Refuse, Asker::Node).await.unwrap();
    assert_eq!(answer(pending).await, is("1 \"a\" First", None));
}

/// A client that has gone, or reads nothing, does not keep the way as it was.
#[tokio::test]
async fn nobody_waits_for_clients_who_read_nothing() {
    let (net, mut session) = Net::new(LONG).await;
    let there = net.here.another_node();
    let unread = [net.submit("a").await, net.submit("b").await];
    for _ in 0..2 {
        let ask = session.command().await;
        session.answer(&ask, handle(&there, &ask).await).await;
    }
    net.router.follow(&map(&net.owner.member, 2, "here"));
    let here = net.submit("c").await;
    net.router.follow(&map(&net.owner.member, 3, "there"));
    let back = net.submit_later("d");
    let ask = session.command().await;
    session.answer(&ask, handle(&there, &ask).await).await;
    assert_eq!(answer(back.await.unwrap().unwrap()).await, is("4 \"abcd\" First", Some("there")));
    assert_eq!(answer(here).await, is("3 \"abc\" First", None));
    assert_eq!(unread.len(), 2);
}

/// A command that waits for its way longer than its caller does surely did not happen.
#[tokio::test]
async fn bounded_a_command_does_not_wait_for_its_way_for_ever() {
    let (net, mut session) = Net::new(Duration::from_millis(400)).await;
    let first = net.submit("a").await;
    session.command().await;
    let alive = tokio::spawn(session.idle());
    net.router.follow(&map(&net.owner.member, 2, "here"));
    let second = net.submit_later("b").await.unwrap();
    assert!(matches!(second, Err(CommandError::Overloaded { .. })));
    assert_eq!(answer(first).await, is("OutcomeUnknown", None));
    // Once the owner's word is waited for no more, the way is free.
    let deadline = tokio::time::Instant::now() + PATIENCE;
    let third = loop {
        match net.submit_later("c").await.unwrap() {
            Ok(pending) => break pending,
            Err(_) => assert!(tokio::time::Instant::now() < deadline),
        }
    };
    assert_eq!(answer(third).await, is("1 \"c\" First", None));
    alive.abort();
}

/// A look-up asks the owner; where that gives no word, the database.
#[tokio::test]
async fn look_ups_go_to_the_owner_and_come_back() {
    let (net, mut session) = Net::new(LONG).await;
    let entity = crate::partition::EntityKey { entity_type: account(), entity_id: crate::core::EntityId::trusted("e") };
    let there = net.here.another_node();
    let first = net.submit("a").await;
    let ask = session.command().await;
    session.answer(&ask, handle(&there, &ask).await).await;
    assert_eq!(answer(first).await, is("1 \"a\" First", Some("there")));
    let (router, id) = (net.router.clone(), ask.command.command_id.clone());
    let looked = tokio::spawn(async move { router.look_up(&entity, &id, CLIENT).await });
    let number = session.look_up().await;
    session.say(&FromOwner::NoStorage).await;
    let found = tokio::time::timeout(PATIENCE, looked).await.unwrap().unwrap().unwrap().unwrap();
    assert_eq!((number > 0, found.version), (true, 1));
}
