//! A server whose entity type is written in Rust.
//!
//! ```sh
//! cargo run --example rust_handlers
//! curl -sS -X POST http://127.0.0.1:9865/v1/entities/counter/clicks/add -H 'Content-Type: application/json' -d '{"by":2}'
//! ```
//!
//! Settings come from the environment, as for `quokka serve`: `QUOKKA_LISTEN`, `QUOKKA_STORAGE__URL` and so on.

use quokka::config::{self, Overrides};
use quokka::{Entity, Quokka, Rejection, logging};
use serde::{Deserialize, Serialize};

/// The state: what is stored of every counter.
#[derive(Default, Serialize, Deserialize)]
struct Counter {
    total: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Add {
    by: u64,
}

#[derive(Serialize)]
struct Total {
    total: u64,
}

/// The most that a counter counts to; far inside what every JSON reader keeps exactly.
const TOTAL_MAX: u64 = 1_000_000;

/// Counts up; a counter that would run over refuses, and the refusal is recorded like any answer.
fn add(request: Add, counter: &mut Counter) -> Result<Total, Rejection> {
    match counter.total.checked_add(request.by).filter(|total| *total <= TOTAL_MAX) {
        Some(total) => counter.total = total,
        None => return Err(Rejection::new("full", "the counter would run over").details(Total { total: counter.total })),
    }
    Ok(Total { total: counter.total })
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let config = config::load(None, &Overrides::default())?;
    logging::init(&logging::Options { format: config.log.format, level: config.log.level.clone() })?;
    Quokka::builder().entity(Entity::new("counter").creates_if_missing("add", add)).serve(config).await?;
    Ok(())
}
