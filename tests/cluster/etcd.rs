//! Election through a real etcd, and all that can become of it: traffic never notices.

use super::load::{Clients, judge};
use crate::e2e::load::check;
use crate::support::cluster::{HEARTBEAT_TIMEOUT, Nodes};
use crate::support::etcd::Etcd;
use crate::support::place::Place;
use crate::support::quokka::Setup;
use crate::support::server::Engine;
use etcd_client::GetOptions;
use rustix::process::Signal;
use std::time::Duration;
use tokio::time::Instant;

/// etcd grants no shorter lease.
const LEASE: Duration = Duration::from_secs(2);

fn setup(place: &Place, etcd: &Etcd) -> Setup {
    place.setup().set("cluster.topology", "elected").set("cluster.election", "etcd").set("cluster.etcd", &etcd.url())
}

async fn three(place: &Place, etcd: &Etcd) -> Nodes {
    let nodes = Nodes::start(vec![setup(place, etcd), setup(place, etcd), setup(place, etcd)]).await;
    nodes.agree(&nodes.all()).await;
    nodes
}

/// The leader's key and its lease; none where nobody leads.
async fn key(etcd: &Etcd) -> Option<(String, i64)> {
    let found = etcd.client().await.get("quokka/", Some(GetOptions::new().with_prefix())).await.unwrap();
    let kv = found.kvs().first()?;
    Some((kv.value_str().unwrap().to_owned(), kv.lease()))
}

/// Waits until the leader that the nodes see is the one that etcd names.
async fn one_leader(nodes: &Nodes, etcd: &Etcd, numbers: &[usize]) -> usize {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        nodes.agree(numbers).await;
        let leader = nodes.leader(numbers[0]).await;
        if key(etcd).await.is_some_and(|(member, _)| member.contains(&format!("\"n{leader}\""))) {
            return leader;
        }
        assert!(Instant::now() < deadline, "no leader holds the key:\n{}", nodes.logs());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaders_follow_one_another() {
    let (Some(place), Some(etcd)) = (Place::on(Engine::MariaDb).await, Etcd::start().await) else { return };
    let mut nodes = three(&place, &etcd).await;
    let clients = Clients::start("etcd", &nodes.bases(), 8, 6);
    clients.more(50).await;

    // The leader is killed.
    let first = one_leader(&nodes, &etcd, &nodes.all()).await;
    let since = Instant::now();
    nodes.kill(first);
    let second = one_leader(&nodes, &etcd, &nodes.others(first)).await;
    println!("the leader was killed: another one, and its shards re-owned, after {:?}", since.elapsed());
    assert_ne!(first, second);
    nodes.restart(first).await;
    nodes.agree(&nodes.all()).await;

    // The leader's lease is revoked: somebody leads again, with a key.
    let (_, lease) = key(&etcd).await.unwrap();
    etcd.client().await.lease_revoke(lease).await.unwrap();
    let third = one_leader(&nodes, &etcd, &nodes.all()).await;

    // All other leases are revoked, and then the leader is killed: nobody waits for an office that it can no longer take.
    let (_, kept) = key(&etcd).await.unwrap();
    for lease in etcd.client().await.leases().await.unwrap().leases() {
        if lease.id() != kept {
            etcd.client().await.lease_revoke(lease.id()).await.unwrap();
        }
    }
    nodes.kill(third);
    one_leader(&nodes, &etcd, &nodes.others(third)).await;
    nodes.restart(third).await;
    nodes.agree(&nodes.all()).await;

    // A leader that leaves lays its office down.
    let fourth = one_leader(&nodes, &etcd, &nodes.all()).await;
    assert!(nodes.stop(fourth).await.0.success());
    assert!(key(&etcd).await.is_none_or(|(member, _)| !member.contains(&format!("\"n{fourth}\""))));
    one_leader(&nodes, &etcd, &nodes.others(fourth)).await;

    clients.more(50).await;
    let (deposits, calls) = clients.finish().await;
    judge(&calls, &[first, third, fourth]);
    check(&nodes.bases()[second_alive(&nodes)], &deposits).await;
}

fn second_alive(nodes: &Nodes) -> usize {
    nodes.nodes.iter().position(|node| node.server.is_some()).unwrap()
}

/// Lines of the log that are about the leader or etcd.
fn told(nodes: &Nodes) -> usize {
    nodes.logs().lines().filter(|line| line.contains("etcd") || line.contains("heartbeat") || line.contains("leads")).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn traffic_never_notices_what_becomes_of_etcd() {
    let (Some(place), Some(mut etcd)) = (Place::on(Engine::MySql).await, Etcd::start().await) else { return };
    let nodes = three(&place, &etcd).await;
    let clients = Clients::start("gone", &nodes.bases(), 8, 6);
    clients.more(50).await;
    let before = told(&nodes);

    // Paused for three leases.
    etcd.signal(Signal::STOP);
    tokio::time::sleep(3 * LEASE).await;
    clients.more(50).await;
    let status = nodes.status(0).await.unwrap();
    assert!(status.map_age_ms.unwrap() > HEARTBEAT_TIMEOUT.as_millis() as u64 && status.shards.iter().all(Option::is_some), "{status:?}");
    etcd.signal(Signal::CONT);
    one_leader(&nodes, &etcd, &nodes.all()).await;

    // Killed, away for two leases, and started again on its data.
    etcd.kill();
    tokio::time::sleep(2 * LEASE).await;
    clients.more(50).await;
    etcd.restart().await;
    one_leader(&nodes, &etcd, &nodes.all()).await;

    // Killed and wiped.
    let epoch = nodes.status(0).await.unwrap().epoch;
    etcd.kill();
    etcd.wipe();
    etcd.restart().await;
    one_leader(&nodes, &etcd, &nodes.all()).await;
    assert!(nodes.status(0).await.unwrap().epoch >= epoch, "maps never go back");

    clients.more(50).await;
    let (deposits, calls) = clients.finish().await;
    assert!(calls.iter().all(|call| call.status == Some(200)), "{:?}", calls.iter().find(|call| call.status != Some(200)));
    println!("slowest call: {:?}", judge(&calls, &[]));
    check(&nodes.bases()[0], &deposits).await;
    let lines = told(&nodes) - before;
    assert!(lines <= 60, "{lines} lines for three outages on three nodes:\n{}", nodes.logs());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_may_ask_for_a_password() {
    let (Some(place), Some(etcd)) = (Place::on(Engine::MariaDb).await, Etcd::start().await) else { return };
    etcd.require_password("correct-horse").await;
    let with = |password: &str| setup(&place, &etcd).set("cluster.etcd_user", "root").set("cluster.etcd_password", password);
    let nodes = Nodes::start(vec![with("correct-horse"), with("correct-horse"), with("battery-staple")]).await;
    nodes.agree(&[0, 1]).await;
    let deadline = Instant::now() + Duration::from_secs(30);
    while !nodes.server(2).log().contains("etcd elects no leader now") {
        assert!(Instant::now() < deadline, "{}", nodes.logs());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(!nodes.logs().contains("battery-staple") && !nodes.logs().contains("correct-horse"));
    let reply = crate::support::quokka::post(&crate::support::quokka::client(), &nodes.bases()[2], "account/a/deposit", "d", "{\"amount\":1}").await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
}
