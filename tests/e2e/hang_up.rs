//! Clients that hang up in the middle: what they sent happens once or not at all, and nobody else notices.

use crate::support::place::{Place, on_each_engine};
use crate::support::quokka::{client, get, post};
use std::io::Write;
use std::net::TcpStream;

/// How many clients hang up.
const CLIENTS: usize = 100;

async fn hang_up(place: Place) {
    let server = place.setup().start();
    let client = client();
    let address = server.base.trim_start_matches("http://").to_owned();
    let steady = tokio::spawn({
        let (client, base) = (client.clone(), server.base.clone());
        async move {
            for number in 0..CLIENTS {
                let reply = post(&client, &base, "account/a/deposit", &format!("steady-{number}"), r#"{"amount":1}"#).await.unwrap();
                assert_eq!(reply.status, 200, "{}", reply.body);
            }
        }
    });
    tokio::task::spawn_blocking(move || {
        for number in 0..CLIENTS {
            let mut stream = TcpStream::connect(&address).unwrap();
            let body = r#"{"amount":1}"#;
            let head = "POST /v1/entities/account/a/deposit HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n";
            let request = format!("{head}idempotency-key: gone-{number}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
            // Some go away before the whole command is there.
            let sent = if number % 4 == 0 { request.len() - 3 } else { request.len() };
            stream.write_all(&request.as_bytes()[..sent]).unwrap();
            rustix::net::sockopt::set_socket_linger(&stream, Some(std::time::Duration::ZERO)).unwrap();
        }
    })
    .await
    .unwrap();
    steady.await.unwrap();
    for number in 0..CLIENTS {
        let reply = post(&client, &server.base, "account/a/deposit", &format!("gone-{number}"), r#"{"amount":1}"#).await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
    }
    let state = get(&client, &server.base, "/v1/entities/account/a").await.unwrap().json();
    let expected = 2 * CLIENTS as u64;
    assert_eq!((state["state"]["balance"].as_u64(), state["version"].as_u64()), (Some(expected), Some(expected)));
}

on_each_engine!(a_client_that_hangs_up_changes_nothing_for_others, hang_up);
