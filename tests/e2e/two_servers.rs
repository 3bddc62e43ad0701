//! Two servers on one database that know nothing of each other, all clients on one entity.

use super::load::{Load, check};
use crate::support::place::{Place, on_each_engine};
use std::sync::Arc;

async fn one_entity(place: Place) {
    both_own_everything(place, 1).await;
}

/// Batches that hold several entities, in whatever order their commands came.
async fn ten_entities(place: Place) {
    both_own_everything(place, 10).await;
}

async fn both_own_everything(place: Place, entities: usize) {
    let servers = [place.setup().start(), place.setup().start()];
    let targets = Arc::new(servers.iter().map(|server| server.base.clone()).collect());
    let load = Load::start("both", &targets, 16, entities);
    load.until(1500).await;
    let deposits = load.finish().await;
    check(&servers[0].base, &deposits).await;
    check(&servers[1].base, &deposits).await;
    let client = crate::support::quokka::client();
    let mut conflicts = 0.0;
    for server in &servers {
        let metrics = crate::support::quokka::get(&client, &server.base, "/metrics").await.unwrap().body;
        let counts = metrics.lines().filter(|line| line.starts_with("quokka_conflicts_total{"));
        conflicts += counts.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum::<f64>();
    }
    assert!(conflicts > 0.0, "the cost of two owners shows in quokka_conflicts_total");
}

on_each_engine!(unique_truth_two_servers_write_one_entity_without_an_error, one_entity);
on_each_engine!(unique_truth_two_servers_write_ten_entities_without_an_error, ten_entities);
