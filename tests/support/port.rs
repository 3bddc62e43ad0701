//! Ports of 127.0.0.1 that stay free until they are used, and while what used them is started again.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};

/// Below the range from which the system gives out ports by itself, so that no connection takes one meanwhile.
const FIRST: u16 = 12_000;
const COUNT: u16 = 18_000;

/// A port that nobody listens on, and that is given to nobody else in this process for a long time.
pub fn free() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Processes that test at the same time begin in different places.
    let start = (u64::from(std::process::id()) * 997 % u64::from(COUNT)) as u16;
    for _ in 0..COUNT {
        let port = FIRST + (start + NEXT.fetch_add(1, Ordering::Relaxed) % COUNT) % COUNT;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("no port is free");
}
