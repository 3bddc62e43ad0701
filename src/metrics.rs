//! Metrics: their names, what they mean, and handles to them.
//!
//! Handles are made once and kept by whoever counts, since looking a metric up by its labels costs more than counting.
//! Labels come from fixed sets: entity types and commands of the handlers in force, never what a caller sent.

use crate::core::{CommandName, EntityType};
use metrics::{Counter, Gauge, Histogram, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use std::collections::HashMap;
use std::time::Duration;

const COMMANDS_TOTAL: &str = "quokka_commands_total";
const COMMAND_SECONDS: &str = "quokka_command_seconds";
const BATCH_ROWS: &str = "quokka_batch_rows";
const COMMIT_SECONDS: &str = "quokka_commit_seconds";
const CONFLICTS_TOTAL: &str = "quokka_conflicts_total";
const QUEUE_DEPTH: &str = "quokka_queue_depth";
const OLDEST_APPEND: &str = "quokka_oldest_append_seconds";
const FEED_FOLLOWERS: &str = "quokka_feed_followers";
const FEED_EVENTS: &str = "quokka_feed_events_total";
const FEED_FAULTS: &str = "quokka_feed_faults_total";
const FEED_MEMORY: &str = "quokka_feed_memory_bytes";
const CONNECTIONS: &str = "quokka_http_connections";
const FORWARDED_TOTAL: &str = "quokka_forwarded_total";
const FALLBACKS_TOTAL: &str = "quokka_forward_fallbacks_total";
const SHARDS_OWNED: &str = "quokka_shards_owned";
const IS_LEADER: &str = "quokka_is_leader";
const MAP_EPOCH: &str = "quokka_map_epoch";
const MAP_AGE: &str = "quokka_map_age_seconds";

const SECONDS_BUCKETS: &[f64] = &[0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0];
const ROWS_BUCKETS: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0];

/// How often what histograms gathered is summed up, so that it takes no memory where nobody reads the metrics.
const UPKEEP: Duration = Duration::from_secs(5);

/// Takes all metrics of this process from now on. Fails the second time.
pub fn install() -> Result<PrometheusHandle, BuildError> {
    let handle = builder()?.install_recorder()?;
    describe();
    Ok(handle)
}

fn builder() -> Result<PrometheusBuilder, BuildError> {
    PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), SECONDS_BUCKETS)?
        .set_buckets_for_metric(Matcher::Full(BATCH_ROWS.into()), ROWS_BUCKETS)
}

fn describe() {
    describe_counter!(COMMANDS_TOTAL, "Commands that were answered, by entity type, command and outcome.");
    describe_histogram!(COMMAND_SECONDS, Unit::Seconds, "Time from taking a command to its answer.");
    describe_histogram!(BATCH_ROWS, "Events written by one statement.");
    describe_histogram!(COMMIT_SECONDS, Unit::Seconds, "Time that one statement took to become durable.");
    describe_counter!(CONFLICTS_TOTAL, "Statements that were refused because another writer was first, by reason.");
    describe_gauge!(QUEUE_DEPTH, "Commands waiting in all queues.");
    describe_gauge!(OLDEST_APPEND, Unit::Seconds, "Age of the oldest append that has not come back; grows while something else holds locks on its rows.");
    describe_gauge!(FEED_FOLLOWERS, "Requests for the feed that are being answered or wait for events.");
    describe_counter!(FEED_EVENTS, "Events that the feed gave out.");
    describe_counter!(FEED_FAULTS, "Looks at the log that failed, or found what it cannot hold; they are made again.");
    describe_gauge!(FEED_MEMORY, Unit::Bytes, "What newest events take that are kept for the feed.");
    describe_gauge!(CONNECTIONS, "Open HTTP connections.");
    describe_counter!(FORWARDED_TOTAL, "Commands that the owner of their shard answered for this node.");
    describe_counter!(FALLBACKS_TOTAL, "Commands of another node's shards that were handled here, by reason.");
    describe_gauge!(SHARDS_OWNED, "Shards that this node owns.");
    describe_gauge!(IS_LEADER, "1 where this node leads the cluster, else 0.");
    describe_gauge!(MAP_EPOCH, "The number of the shard map that this node follows.");
    describe_gauge!(MAP_AGE, Unit::Seconds, "Time since a leader last confirmed the shard map.");
}

/// Runs for ever; see [`UPKEEP`].
pub async fn upkeep(handle: PrometheusHandle) {
    let mut interval = tokio::time::interval(UPKEEP);
    loop {
        interval.tick().await;
        handle.run_upkeep();
    }
}

/// Why a node handled what another one owns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fallback {
    /// The owner could not be reached.
    Unreachable,
    /// It was on its way to the owner, who broke off, stopped, or had no database.
    HandedBack,
}

/// Counts what is passed on.
#[derive(Debug)]
pub struct ForwardMetrics {
    forwarded: Counter,
    unreachable: Counter,
    handed_back: Counter,
}

impl ForwardMetrics {
    /// All of them, from 0.
    pub fn new() -> ForwardMetrics {
        let fallback = |reason: &'static str| counter!(FALLBACKS_TOTAL, "reason" => reason);
        ForwardMetrics { forwarded: counter!(FORWARDED_TOTAL), unreachable: fallback("unreachable"), handed_back: fallback("handed_back") }
    }

    /// The owner has answered one.
    pub fn forwarded(&self) {
        self.forwarded.increment(1);
    }

    /// One is handled here instead.
    pub fn fell_back(&self, reason: Fallback) {
        match reason {
            Fallback::Unreachable => self.unreachable.increment(1),
            Fallback::HandedBack => self.handed_back.increment(1),
        }
    }
}

impl Default for ForwardMetrics {
    fn default() -> ForwardMetrics {
        ForwardMetrics::new()
    }
}

/// Shows a node's part in its cluster.
#[derive(Debug)]
pub struct ClusterMetrics {
    shards_owned: Gauge,
    is_leader: Gauge,
    map_epoch: Gauge,
    map_age: Gauge,
}

impl ClusterMetrics {
    /// All of them, at 0.
    pub fn new() -> ClusterMetrics {
        ClusterMetrics { shards_owned: gauge!(SHARDS_OWNED), is_leader: gauge!(IS_LEADER), map_epoch: gauge!(MAP_EPOCH), map_age: gauge!(MAP_AGE) }
    }

    /// The node follows this map, in which it owns so many shards.
    pub fn follow(&self, epoch: u64, shards_owned: usize) {
        self.map_epoch.set(epoch as f64);
        self.shards_owned.set(shards_owned as f64);
    }

    /// Whether the node leads.
    pub fn lead(&self, leads: bool) {
        self.is_leader.set(if leads { 1.0 } else { 0.0 });
    }

    /// How old the map is.
    pub fn age(&self, age: Duration) {
        self.map_age.set(age.as_secs_f64());
    }
}

impl Default for ClusterMetrics {
    fn default() -> ClusterMetrics {
        ClusterMetrics::new()
    }
}

/// What became of a command, as it is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandOutcome {
    /// Committed.
    Accepted,
    /// Committed as a rejection.
    Rejected,
    /// Answered with what an earlier try made.
    Replayed,
    /// Refused before it ran: unknown, not valid, the wrong version, a full queue.
    Refused,
    /// The handler failed, or what it made is not valid.
    HandlerFailed,
    /// The database is away, the node is stopping, or quokka has a fault.
    Unavailable,
    /// It may have happened.
    Unknown,
}

impl CommandOutcome {
    const ALL: [CommandOutcome; 7] = [
        CommandOutcome::Accepted,
        CommandOutcome::Rejected,
        CommandOutcome::Replayed,
        CommandOutcome::Refused,
        CommandOutcome::HandlerFailed,
        CommandOutcome::Unavailable,
        CommandOutcome::Unknown,
    ];

    fn label(self) -> &'static str {
        match self {
            CommandOutcome::Accepted => "accepted",
            CommandOutcome::Rejected => "rejected",
            CommandOutcome::Replayed => "replayed",
            CommandOutcome::Refused => "refused",
            CommandOutcome::HandlerFailed => "handler_failed",
            CommandOutcome::Unavailable => "unavailable",
            CommandOutcome::Unknown => "unknown",
        }
    }
}

/// The counters of one entity type's commands. Make them again when its handlers change; counts go on.
#[derive(Debug)]
pub struct CommandCounters {
    known: HashMap<CommandName, Outcomes>,
    /// Of all commands that the handlers do not know, under the label `(unknown)`.
    unknown: Outcomes,
    seconds: Histogram,
}

type Outcomes = [Counter; CommandOutcome::ALL.len()];

impl CommandCounters {
    /// For the commands that the handlers know.
    pub fn new<'a>(entity_type: &EntityType, commands: impl IntoIterator<Item = &'a CommandName>) -> CommandCounters {
        let outcomes = |command: &str| {
            CommandOutcome::ALL.map(
                |outcome| counter!(COMMANDS_TOTAL, "type" => entity_type.as_str().to_owned(), "command" => command.to_owned(), "outcome" => outcome.label()),
            )
        };
        let known = commands.into_iter().map(|command| (command.clone(), outcomes(command.as_str()))).collect();
        CommandCounters { known, unknown: outcomes("(unknown)"), seconds: histogram!(COMMAND_SECONDS) }
    }

    /// Counts an answered command and the time since it was taken.
    pub fn count(&self, command: &CommandName, outcome: CommandOutcome, time: Duration) {
        self.known.get(command).unwrap_or(&self.unknown)[outcome as usize].increment(1);
        self.seconds.record(time);
    }
}

/// Why a statement was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Conflict {
    /// Another writer took an event id.
    Position,
    /// Another writer took a version or a command id.
    Key,
    /// The database gave up on the statement: a deadlock or a lock wait timeout.
    Interrupted,
    /// The connection was lost, or no answer came in time; the statement is sent again to find out.
    Unknown,
}

/// The metrics of batches; make it once, it is the same for all partitions.
#[derive(Debug, Clone)]
pub struct BatchMetrics {
    /// Events in one statement.
    pub rows: Histogram,
    /// Seconds until they were durable.
    pub commit_seconds: Histogram,
    conflicts: [Counter; 4],
}

impl BatchMetrics {
    /// Handles to the metrics of batches.
    pub fn new() -> BatchMetrics {
        BatchMetrics {
            rows: histogram!(BATCH_ROWS),
            commit_seconds: histogram!(COMMIT_SECONDS),
            conflicts: ["position", "key", "interrupted", "unknown"].map(|reason| counter!(CONFLICTS_TOTAL, "reason" => reason)),
        }
    }

    /// Counts a refused statement.
    pub fn conflict(&self, reason: Conflict) {
        self.conflicts[reason as usize].increment(1);
    }
}

impl Default for BatchMetrics {
    fn default() -> BatchMetrics {
        BatchMetrics::new()
    }
}

/// Commands waiting in all queues; set whenever the metrics are read.
pub fn queue_depth() -> Gauge {
    gauge!(QUEUE_DEPTH)
}

/// Age of the oldest append that has not come back, in seconds; set whenever the metrics are read.
pub fn oldest_append() -> Gauge {
    gauge!(OLDEST_APPEND)
}

/// The metrics of the feed; make it once.
#[derive(Debug, Clone)]
pub struct FeedMetrics {
    /// Requests that are being answered or wait.
    pub followers: Gauge,
    /// Events given out.
    pub events: Counter,
    /// Looks at the log that failed.
    pub faults: Counter,
    /// Bytes of events kept in memory.
    pub memory: Gauge,
}

impl FeedMetrics {
    /// Handles to the metrics of the feed.
    pub fn new() -> FeedMetrics {
        FeedMetrics { followers: gauge!(FEED_FOLLOWERS), events: counter!(FEED_EVENTS), faults: counter!(FEED_FAULTS), memory: gauge!(FEED_MEMORY) }
    }
}

impl Default for FeedMetrics {
    fn default() -> FeedMetrics {
        FeedMetrics::new()
    }
}

/// Open HTTP connections.
pub fn connections() -> Gauge {
    gauge!(CONNECTIONS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_shown_with_their_names_and_unknown_commands_share_one_label() {
        let recorder = builder().unwrap().build_recorder();
        let handle = recorder.handle();
        metrics::with_local_recorder(&recorder, || {
            describe();
            let (charge, odd) = (CommandName::trusted("charge"), CommandName::trusted("odd"));
            let counters = CommandCounters::new(&EntityType::trusted("account"), [&charge]);
            counters.count(&charge, CommandOutcome::Accepted, Duration::from_millis(3));
            counters.count(&odd, CommandOutcome::Refused, Duration::from_millis(3));
            counters.count(&CommandName::trusted("odder"), CommandOutcome::Refused, Duration::from_millis(3));
            let batches = BatchMetrics::new();
            batches.rows.record(7.0);
            batches.commit_seconds.record(0.004);
            batches.conflict(Conflict::Key);
            queue_depth().set(4.0);
        });
        let text = handle.render();
        for line in [
            r#"quokka_commands_total{type="account",command="charge",outcome="accepted"} 1"#,
            r#"quokka_commands_total{type="account",command="(unknown)",outcome="refused"} 2"#,
            r#"quokka_command_seconds_bucket{le="0.005"} 3"#,
            r#"quokka_command_seconds_count 3"#,
            r#"quokka_batch_rows_bucket{le="10"} 1"#,
            r#"quokka_commit_seconds_bucket{le="0.002"} 0"#,
            r#"quokka_conflicts_total{reason="key"} 1"#,
            r#"quokka_conflicts_total{reason="position"} 0"#,
            "quokka_queue_depth 4",
            "# TYPE quokka_command_seconds histogram",
            "# HELP quokka_queue_depth Commands waiting in all queues.",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("odd"), "{text}");
    }

    #[test]
    fn outcomes_count_where_their_label_stands() {
        for (index, outcome) in CommandOutcome::ALL.into_iter().enumerate() {
            assert_eq!(index, outcome as usize);
        }
    }
}
