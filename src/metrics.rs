//! Metrics: where they go, what they mean, and which ones are distributions with fixed buckets.
//!
//! They are counted where things happen; workers count commands and batches, HTTP its connections.

use metrics::{Gauge, Unit, describe_counter, describe_gauge, describe_histogram, gauge};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use std::time::Duration;

const COMMANDS_TOTAL: &str = "quokka_commands_total";
const COMMAND_SECONDS: &str = "quokka_command_seconds";
const BATCH_ROWS: &str = "quokka_batch_rows";
const COMMIT_SECONDS: &str = "quokka_commit_seconds";
const CONFLICTS_TOTAL: &str = "quokka_conflicts_total";
const QUEUE_DEPTH: &str = "quokka_queue_depth";
const CONNECTIONS: &str = "quokka_http_connections";

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
    describe_gauge!(CONNECTIONS, "Open HTTP connections.");
}

/// Runs for ever; see [`UPKEEP`].
pub async fn upkeep(handle: PrometheusHandle) {
    let mut interval = tokio::time::interval(UPKEEP);
    loop {
        interval.tick().await;
        handle.run_upkeep();
    }
}

/// Commands waiting in all queues; set whenever the metrics are read.
pub fn queue_depth() -> Gauge {
    gauge!(QUEUE_DEPTH)
}

/// Open HTTP connections.
pub fn connections() -> Gauge {
    gauge!(CONNECTIONS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use metrics::{counter, histogram};

    #[test]
    fn metrics_are_shown_with_their_meaning_and_distributions_as_histograms() {
        let recorder = builder().unwrap().build_recorder();
        let handle = recorder.handle();
        metrics::with_local_recorder(&recorder, || {
            describe();
            counter!(COMMANDS_TOTAL, "type" => "account", "command" => "charge", "outcome" => "accepted").increment(1);
            histogram!(COMMAND_SECONDS).record(0.003);
            histogram!(COMMIT_SECONDS).record(0.004);
            histogram!(BATCH_ROWS).record(7.0);
            queue_depth().set(4.0);
        });
        let text = handle.render();
        for line in [
            r#"quokka_commands_total{type="account",command="charge",outcome="accepted"} 1"#,
            r#"quokka_command_seconds_bucket{le="0.005"} 1"#,
            "quokka_command_seconds_count 1",
            r#"quokka_commit_seconds_bucket{le="0.002"} 0"#,
            r#"quokka_batch_rows_bucket{le="10"} 1"#,
            "quokka_queue_depth 4",
            "# TYPE quokka_command_seconds histogram",
            "# HELP quokka_queue_depth Commands waiting in all queues.",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line} is not in\n{text}");
        }
    }
}
