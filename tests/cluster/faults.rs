//! Nodes that die, hang, leave and come back, networks and databases that are away, under clients that try again elsewhere: nothing that was
//! answered is lost, nothing happens twice, and nodes that are well serve on.

use super::load::{Clients, judge};
use crate::e2e::load::check;
use crate::support::cluster::{HEARTBEAT_TIMEOUT, Nodes};
use crate::support::place::Place;
use crate::support::proxy::{Fault, Proxy};
use crate::support::server::Engine;
use crate::support::wire::Network;
use rustix::process::Signal;
use std::time::Duration;

/// The parts that a node can play.
#[derive(Debug, Clone, Copy)]
enum Part {
    Owner,
    Leader,
    Bystander,
}

const PARTS: [Part; 3] = [Part::Owner, Part::Leader, Part::Bystander];

/// The node that plays a part with respect to an entity.
async fn playing(nodes: &Nodes, part: Part, entity: &str) -> usize {
    let (owner, leader) = (nodes.owner(entity, 0).await, nodes.leader(0).await);
    match part {
        Part::Owner => owner,
        Part::Leader => leader,
        Part::Bystander => nodes.all().into_iter().find(|node| *node != owner && *node != leader).unwrap(),
    }
}

/// Shards have new owners within two heartbeat time-outs; how long it takes is printed, and only a far larger time fails: the machine is shared.
fn show(what: &str, part: Part, reowned: Duration, slowest: Duration) {
    println!("{what} {part:?}: shards re-owned after {reowned:?} (two time-outs: {:?}), slowest call to the others {slowest:?}", 2 * HEARTBEAT_TIMEOUT);
    assert!(reowned < 6 * HEARTBEAT_TIMEOUT, "{reowned:?}");
}

async fn nodes_are_killed(place: Place) {
    let mut nodes = Nodes::elected(&place, 3).await;
    nodes.agree(&nodes.all()).await;
    for (number, part) in PARTS.into_iter().enumerate() {
        let name = format!("k{number}-");
        let victim = playing(&nodes, part, &format!("{name}0")).await;
        let clients = Clients::start(&name, &nodes.bases(), 12, 3);
        clients.more(100).await;
        nodes.kill(victim);
        let reowned = nodes.agree(&nodes.others(victim)).await;
        clients.more(200).await;
        nodes.restart(victim).await;
        nodes.agree(&nodes.all()).await;
        clients.more(100).await;
        let (deposits, calls) = clients.finish().await;
        show("kill -9 of the", part, reowned, judge(&calls, &[victim]));
        check(&nodes.nodes[0].base, &deposits).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_node_costs_no_answer() {
    if let Some(place) = Place::on(Engine::MariaDb).await {
        nodes_are_killed(place).await;
    }
}

async fn nodes_are_paused(place: Place) {
    let nodes = Nodes::elected(&place, 3).await;
    nodes.agree(&nodes.all()).await;
    for (number, part) in PARTS.into_iter().enumerate() {
        let name = format!("p{number}-");
        let victim = playing(&nodes, part, &format!("{name}0")).await;
        let clients = Clients::start(&name, &nodes.bases(), 12, 3);
        clients.more(100).await;
        nodes.signal(victim, Signal::STOP);
        let reowned = nodes.agree(&nodes.others(victim)).await;
        clients.more(100).await;
        nodes.signal(victim, Signal::CONT);
        nodes.agree(&nodes.all()).await;
        clients.more(200).await;
        let (deposits, calls) = clients.finish().await;
        show("pause of the", part, reowned, judge(&calls, &[victim]));
        check(&nodes.nodes[victim].base, &deposits).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_node_costs_no_answer_and_wakes_up_to_the_truth() {
    if let Some(place) = Place::on(Engine::MySql).await {
        nodes_are_paused(place).await;
    }
}

/// All nodes are started anew, one after another, while clients send: only connections to the node that is down fail.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_restart_fails_no_request() {
    let Some(place) = Place::on(Engine::MariaDb).await else { return };
    let mut nodes = Nodes::elected(&place, 3).await;
    nodes.agree(&nodes.all()).await;
    let clients = Clients::start("roll", &nodes.bases(), 12, 6);
    clients.more(100).await;
    for victim in nodes.all() {
        let (status, took) = nodes.stop(victim).await;
        println!("n{victim} left within {took:?}");
        assert!(status.success() && took < Duration::from_secs(10), "{status} after {took:?}");
        clients.more(50).await;
        nodes.agree(&nodes.others(victim)).await;
        nodes.restart(victim).await;
        nodes.agree(&nodes.all()).await;
        clients.more(50).await;
    }
    let (deposits, calls) = clients.finish().await;
    let told: Vec<_> = calls.iter().filter(|call| !matches!(call.status, Some(200) | None)).collect();
    assert!(told.iter().all(|call| call.status == Some(503) && call.has_retry_after), "{told:?}");
    println!(
        "{} calls, {} of them told to try again, {} met a node that was down",
        calls.len(),
        told.len(),
        calls.iter().filter(|call| call.status.is_none()).count()
    );
    check(&nodes.nodes[0].base, &deposits).await;
}

/// The network between two nodes is cut, in both directions, one way only, by refusal and by silence; both still reach the database.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cut_between_nodes_costs_no_answer() {
    let Some(place) = Place::on(Engine::MariaDb).await else { return };
    let nodes = Nodes::elected(&place, 2).await;
    nodes.agree(&nodes.all()).await;
    for (number, (network, cut)) in
        [(Network::Silent, &[0, 1][..]), (Network::Refused, &[0, 1]), (Network::Silent, &[0]), (Network::Silent, &[1])].into_iter().enumerate()
    {
        let clients = Clients::start(&format!("c{number}-"), &nodes.bases(), 8, 8);
        clients.more(100).await;
        cut.iter().for_each(|node| nodes.nodes[*node].wire.set(network));
        clients.more(150).await;
        // Long enough for the leader to miss the other one.
        tokio::time::sleep(2 * HEARTBEAT_TIMEOUT).await;
        clients.more(150).await;
        cut.iter().for_each(|node| nodes.nodes[*node].wire.set(Network::Whole));
        nodes.agree(&nodes.all()).await;
        clients.more(100).await;
        let (deposits, calls) = clients.finish().await;
        let slowest = judge(&calls, &[]);
        println!("{network:?} towards {cut:?}: slowest call {slowest:?}");
        check(&nodes.nodes[1].base, &deposits).await;
    }
}

/// One node is cut off from the database: the others serve on, and take its shards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_without_its_database_costs_no_answer_of_the_others() {
    let Some(place) = Place::on(Engine::MariaDb).await else { return };
    let Place::Server(database) = &place else { return };
    let proxy = Proxy::start(database.server().port()).await;
    let setup = |url: &str| crate::support::quokka::Setup::on(url).set("cluster.topology", "elected").set("storage.statement_timeout", "2s");
    let through = database.url_through(proxy.port());
    let nodes = Nodes::start(vec![setup(database.url()), setup(database.url()), setup(&through)]).await;
    nodes.agree(&nodes.all()).await;
    for (number, fault) in [Fault::BlackHole, Fault::RefuseConnections].into_iter().enumerate() {
        let clients = Clients::start(&format!("d{number}-"), &nodes.bases()[..2], 8, 12);
        clients.more(100).await;
        proxy.set(fault);
        let reowned = nodes.agree(&[0, 1]).await;
        clients.more(200).await;
        proxy.set(Fault::PassThrough);
        nodes.agree(&nodes.all()).await;
        clients.more(100).await;
        let (deposits, calls) = clients.finish().await;
        let slowest = judge(&calls, &[]);
        println!("{fault:?}: shards re-owned after {reowned:?}, slowest call to the others {slowest:?}");
        check(&nodes.nodes[2].base, &deposits).await;
    }
}

/// Clocks decide nothing: nodes whose clocks are ten minutes apart elect, hand out shards and serve as others do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shifted_clocks_change_nothing() {
    const LIBRARY: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1";
    let Some(place) = Place::on(Engine::MySql).await else { return };
    if !std::path::Path::new(LIBRARY).is_file() {
        assert!(std::env::var_os("TEST_REQUIRE_SERVERS").is_none_or(|value| value != "1"), "libfaketime is not installed");
        eprintln!("not tested: libfaketime is not installed");
        return;
    }
    let setup = |shift: &str| {
        let mut setup = place.setup().set("cluster.topology", "elected");
        setup.settings.extend([("LD_PRELOAD".into(), LIBRARY.into()), ("FAKETIME".into(), shift.into()), ("FAKETIME_DONT_FAKE_MONOTONIC".into(), "1".into())]);
        setup
    };
    let mut nodes = Nodes::start(vec![setup("+5m"), setup("-5m"), setup("+0")]).await;
    nodes.agree(&nodes.all()).await;
    let clients = Clients::start("clock", &nodes.bases(), 8, 8);
    clients.more(200).await;
    let leader = nodes.leader(0).await;
    nodes.kill(leader);
    nodes.agree(&nodes.others(leader)).await;
    nodes.restart(leader).await;
    nodes.agree(&nodes.all()).await;
    clients.more(100).await;
    let (deposits, calls) = clients.finish().await;
    judge(&calls, &[leader]);
    check(&nodes.nodes[0].base, &deposits).await;
}
