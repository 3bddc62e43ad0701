//! Readers of the feed that check what they are given: nothing twice, nothing left out, each partition and each entity in order.

use crate::support::quokka::send;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

/// What names an event: type, shard, event id.
pub type Name = (String, u64, u64);

/// A chain of pages, each with the token of the one before.
pub struct Chain {
    client: reqwest::Client,
    pub base: String,
    pub query: String,
    pub since: Option<String>,
    /// All that was given so far.
    pub seen: BTreeMap<Name, Value>,
    heads: HashMap<(String, u64), u64>,
    versions: HashMap<String, u64>,
}

impl Chain {
    pub fn new(base: &str, query: &str) -> Chain {
        let client = reqwest::Client::builder().timeout(Duration::from_secs(60)).build().unwrap();
        Chain { client, base: base.into(), query: query.into(), since: None, seen: BTreeMap::new(), heads: HashMap::new(), versions: HashMap::new() }
    }

    /// Reads one page; how many events it held. While the node or its database is away, none.
    pub async fn try_step(&mut self) -> Option<usize> {
        let since = self.since.as_ref().map_or(String::new(), |since| format!("&since={since}"));
        let reply = send(self.client.get(format!("{}/v1/feed?{}{since}", self.base, self.query))).await.ok()?;
        if reply.status == 503 {
            return None;
        }
        assert_eq!(reply.status, 200, "{}", reply.body);
        let page = reply.json();
        let events = page["events"].as_array().unwrap();
        for event in events {
            self.take(event);
        }
        self.since = Some(page["next_batch"].as_str().unwrap().to_owned());
        Some(events.len())
    }

    pub async fn step(&mut self) -> usize {
        self.try_step().await.unwrap()
    }

    /// With `rejected=true` a partition has no gaps.
    fn take(&mut self, event: &Value) {
        let entity_type = event["entity_type"].as_str().unwrap().to_owned();
        let (shard, event_id) = (event["shard"].as_u64().unwrap(), event["event_id"].as_u64().unwrap());
        let head = self.heads.entry((entity_type.clone(), shard)).or_default();
        assert_eq!(event_id, *head + 1, "partition {entity_type}/{shard}");
        *head = event_id;
        let version = self.versions.entry(format!("{entity_type}/{}", event["entity_id"])).or_default();
        assert_eq!(event["version"].as_u64(), Some(*version + 1), "{}", event["entity_id"]);
        *version += 1;
        assert!(self.seen.insert((entity_type, shard, event_id), event.clone()).is_none());
    }
}

/// A stream of server-sent events.
pub struct Stream {
    response: reqwest::Response,
    buffer: Vec<u8>,
}

impl Stream {
    pub async fn open(base: &str, query: &str, last: Option<&str>) -> Stream {
        let client = reqwest::Client::builder().read_timeout(Duration::from_secs(60)).build().unwrap();
        let request = client.get(format!("{base}/v1/feed?{query}")).header("accept", "text/event-stream");
        let request = if let Some(last) = last { request.header("last-event-id", last) } else { request };
        let response = request.send().await.unwrap();
        assert_eq!((response.status().as_u16(), response.headers()["content-type"].to_str().unwrap()), (200, "text/event-stream"));
        Stream { response, buffer: Vec::new() }
    }

    /// The next event and its id; none where the stream came to its end.
    pub async fn event(&mut self) -> Option<(String, Value)> {
        let give_up = std::time::Instant::now() + Duration::from_secs(60);
        loop {
            assert!(std::time::Instant::now() < give_up, "no event within a minute");
            let block = self.block().await?;
            let field = |name: &str| block.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
            if let Some(data) = field("data: ") {
                return Some((field("id: ").unwrap(), serde_json::from_str(&data).unwrap()));
            }
        }
    }

    /// The next block of lines, comments included.
    pub async fn block(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|bytes| bytes == b"\n\n") {
                let block: Vec<u8> = self.buffer.drain(..end + 2).collect();
                return Some(String::from_utf8(block).unwrap());
            }
            let chunk = self.response.chunk().await.unwrap()?;
            self.buffer.extend_from_slice(&chunk);
        }
    }
}
