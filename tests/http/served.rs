//! The rules of the parent module, tried on the real server.

use super::*;
use crate::support::place::Place;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bounded_odd_requests_and_slow_clients_disturb_nobody() {
    let place = Place::sqlite().unwrap();
    let server = place.setup().set("limits.header_timeout", "1s").start();
    odd_bodies_are_told_apart(&server.base).await;
    slow_heads_are_closed(&server.base).await;
    pipelined_requests_are_answered(&server.base).await;
    http2_is_spoken(&server.base).await;
    http2_keeps_commands_in_order(&server.base).await;
    early_refusals_are_heard(&server.base).await;
    empty_bodies_are_no_requests(&server.base).await;
    assert!(server.stop().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_idle_connections_are_fine() {
    quokka::http::raise_open_files();
    let place = Place::sqlite().unwrap();
    let server = place.setup().start();
    idle_connections_are_fine(&server.base, 10_000).await;
}
