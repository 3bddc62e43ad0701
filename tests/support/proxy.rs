//! A TCP proxy in front of a MySQL or MariaDB server that knows the packets of their protocol, and so can break a connection at a chosen
//! point of a chosen statement. It runs in the runtime of the test that starts it, and ends with it.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

/// What goes wrong. A statement is chosen by a part of its text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    PassThrough,
    /// New connections are closed at once, those that exist as soon as they send something.
    RefuseConnections,
    /// Connections stay open, but nothing arrives any more in either direction.
    BlackHole,
    /// The connection is closed before the statement reaches the server.
    CutBeforeRequest(&'static str),
    /// The connection is closed when half of the statement has reached the server.
    CutInsideRequest(&'static str),
    /// The server gets the statement and answers, and the connection is closed before the answer arrives.
    CutReply(&'static str),
}

/// Listens on a port of 127.0.0.1.
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
    stop: CancellationToken,
}

struct Shared {
    target: SocketAddr,
    fault: Mutex<Fault>,
    connections: AtomicUsize,
    cuts: AtomicUsize,
}

impl Proxy {
    /// Starts in front of a port of 127.0.0.1.
    pub async fn start(target: u16) -> Proxy {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared {
            target: (Ipv4Addr::LOCALHOST, target).into(),
            fault: Mutex::new(Fault::PassThrough),
            connections: AtomicUsize::new(0),
            cuts: AtomicUsize::new(0),
        });
        let stop = CancellationToken::new();
        tokio::spawn(stop.clone().run_until_cancelled_owned(accept(listener, shared.clone(), stop.clone())));
        Proxy { port, shared, stop }
    }

    /// Where it listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// What goes wrong from now on, also on connections that exist.
    pub fn set(&self, fault: Fault) {
        *self.shared.fault.lock().unwrap_or_else(PoisonError::into_inner) = fault;
    }

    /// How many connections were asked for so far.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// How many connections a fault has closed, or refused, so far.
    pub fn cuts(&self) -> usize {
        self.shared.cuts.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Shared {
    fn fault(&self) -> Fault {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count_cut(&self) {
        self.cuts.fetch_add(1, Ordering::SeqCst);
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>, stop: CancellationToken) {
    while let Ok((client, _)) = listener.accept().await {
        shared.connections.fetch_add(1, Ordering::SeqCst);
        if shared.fault() == Fault::RefuseConnections {
            shared.count_cut();
            continue;
        }
        let shared = shared.clone();
        let closed = stop.child_token();
        tokio::spawn(async move {
            let Ok(server) = TcpStream::connect(shared.target).await else { return };
            let _ = (client.set_nodelay(true), server.set_nodelay(true));
            let (from_client, to_client) = client.into_split();
            let (from_server, to_server) = server.into_split();
            let cut_reply = AtomicBool::new(false);
            // Whichever direction ends first takes the other one along: both sockets close.
            tokio::select! {
                () = requests(from_client, to_server, &shared, &cut_reply) => {}
                () = replies(from_server, to_client, &shared, &cut_reply) => {}
                () = closed.cancelled() => {}
            }
        });
    }
}

/// Passes on one packet after another: three bytes of length, one of sequence, the content.
async fn requests(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, shared: &Shared, cut_reply: &AtomicBool) {
    loop {
        let mut packet = vec![0; 4];
        if from.read_exact(&mut packet).await.is_err() {
            return;
        }
        let length = usize::from(packet[0]) | usize::from(packet[1]) << 8 | usize::from(packet[2]) << 16;
        packet.resize(4 + length, 0);
        if from.read_exact(&mut packet[4..]).await.is_err() {
            return;
        }
        let has = |text: &str| memchr::memmem::find(&packet, text.as_bytes()).is_some();
        match shared.fault() {
            Fault::RefuseConnections => return shared.count_cut(),
            Fault::BlackHole => continue,
            Fault::CutBeforeRequest(text) if has(text) => return shared.count_cut(),
            Fault::CutInsideRequest(text) if has(text) => {
                let _ = to.write_all(&packet[..packet.len() / 2]).await;
                return shared.count_cut();
            }
            Fault::CutReply(text) if has(text) => cut_reply.store(true, Ordering::SeqCst),
            Fault::PassThrough | Fault::CutBeforeRequest(_) | Fault::CutInsideRequest(_) | Fault::CutReply(_) => {}
        }
        if to.write_all(&packet).await.is_err() {
            return;
        }
    }
}

async fn replies(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, shared: &Shared, cut_reply: &AtomicBool) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(length @ 1..) = from.read(&mut bytes).await {
        if cut_reply.load(Ordering::SeqCst) {
            return shared.count_cut();
        }
        if shared.fault() == Fault::BlackHole {
            continue;
        }
        if to.write_all(&bytes[..length]).await.is_err() {
            return;
        }
    }
}
