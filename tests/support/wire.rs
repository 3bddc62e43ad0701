//! A TCP proxy that knows no protocol: a network between two processes that can be cut. It ends with the runtime of the test that starts it.

use std::net::{Ipv4Addr, SocketAddr};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// How the network is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network {
    Whole,
    /// Connections are closed, and new ones at once.
    Refused,
    /// Connections stay open, and nothing arrives any more.
    Silent,
}

/// A stretch of network that leads to one port.
pub struct Wire {
    port: u16,
    network: watch::Sender<Network>,
}

impl Wire {
    /// Leads to a port of 127.0.0.1, where nothing need listen yet.
    pub async fn to(target: u16) -> Wire {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (network, seen) = watch::channel(Network::Whole);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(carry(client, (Ipv4Addr::LOCALHOST, target).into(), seen.clone()));
            }
        });
        Wire { port, network }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn set(&self, network: Network) {
        self.network.send_replace(network);
    }
}

async fn carry(client: TcpStream, target: SocketAddr, mut network: watch::Receiver<Network>) {
    if *network.borrow() == Network::Refused {
        return;
    }
    let Ok(server) = TcpStream::connect(target).await else { return };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) = (client.into_split(), server.into_split());
    let (there, back) = (network.clone(), network.clone());
    tokio::select! {
        () = copy(&mut from_client, &mut to_server, there) => {}
        () = copy(&mut from_server, &mut to_client, back) => {}
        _ = network.wait_for(|network| *network == Network::Refused) => {}
    }
}

async fn copy(from: &mut (impl AsyncReadExt + Unpin), to: &mut (impl AsyncWriteExt + Unpin), mut network: watch::Receiver<Network>) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(length @ 1..) = from.read(&mut bytes).await {
        // What was on its way when the network fell silent arrives when it comes back, as TCP does it.
        if network.wait_for(|network| *network != Network::Silent).await.is_err() || to.write_all(&bytes[..length]).await.is_err() {
            return;
        }
    }
}
