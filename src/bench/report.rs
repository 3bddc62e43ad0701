//! Figures: what one connection counts, how counts add up, what is shown.

use super::{Options, Outcome};
use hdrhistogram::Histogram;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

/// The figures of a run; its JSON form is the last line of `bench --json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Commands recorded a second.
    pub tps: f64,
    /// Half of the recorded commands were answered within this.
    pub p50_ms: f64,
    /// 99 of 100 were.
    pub p99_ms: f64,
    /// Commands recorded: accepted or rejected, each one version.
    pub committed: u64,
    /// Commands given up.
    pub errors: u64,
    /// From the first command to the last answer.
    pub seconds: f64,
    /// Connections that sent.
    pub connections: usize,
    /// Entities that were written.
    pub entities: usize,
}

/// What connections count.
pub(super) struct Tally {
    latency: Histogram<u64>,
    errors: BTreeMap<String, u64>,
    /// When the last answer came.
    pub ended: Instant,
}

impl Default for Tally {
    fn default() -> Tally {
        // Three digits from 1 µs up; it grows with what it is given.
        let latency = Histogram::new(3).unwrap_or_else(|_| unreachable!("three digits are allowed"));
        Tally { latency, errors: BTreeMap::new(), ended: Instant::now() }
    }
}

impl Tally {
    pub fn record(&mut self, latency: Duration) {
        // Refused only where the histogram could not grow, at centuries.
        let _ = self.latency.record(latency.as_micros().max(1) as u64);
        self.ended = Instant::now();
    }

    pub fn fail(&mut self, kind: String) {
        *self.errors.entry(kind).or_default() += 1;
        self.ended = Instant::now();
    }

    pub fn add(mut self, other: Tally) -> Tally {
        let _ = self.latency.add(&other.latency);
        for (kind, count) in other.errors {
            *self.errors.entry(kind).or_default() += count;
        }
        self.ended = self.ended.max(other.ended);
        self
    }

    /// Errors by kind, the most frequent first.
    pub fn errors(&self) -> Vec<(String, u64)> {
        let mut errors: Vec<_> = self.errors.clone().into_iter().collect();
        errors.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        errors
    }

    pub fn report(&self, started: Instant, options: &Options) -> Report {
        let seconds = self.ended.duration_since(started).as_secs_f64();
        let committed = self.latency.len();
        let quantile = |at: f64| round(self.latency.value_at_quantile(at) as f64 / 1000.0, 1000.0);
        Report {
            tps: if committed == 0 { 0.0 } else { round(committed as f64 / seconds, 10.0) },
            p50_ms: quantile(0.5),
            p99_ms: quantile(0.99),
            committed,
            errors: self.errors.values().sum(),
            seconds: round(seconds, 1000.0),
            connections: options.connections,
            entities: options.entities,
        }
    }
}

fn round(value: f64, parts: f64) -> f64 {
    (value * parts).round() / parts
}

/// The summary for people.
impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { tps, p50_ms, p99_ms, committed, errors, seconds, connections, entities } = &self.report;
        writeln!(f, "commands     {committed} recorded in {seconds:.1} s: {tps:.0} a second")?;
        writeln!(f, "sent by      {connections} connections to {entities} entities")?;
        writeln!(f, "answered     half within {p50_ms} ms, 99 of 100 within {p99_ms} ms")?;
        writeln!(f, "errors       {errors}")?;
        for (kind, count) in &self.errors {
            writeln!(f, "             {count} × {kind}")?;
        }
        let agree = self.checked - self.disagreements.len();
        write!(f, "checked      {agree} of {} entities are at the version that the answers add up to", self.checked)?;
        for disagreement in self.disagreements.iter().take(10) {
            write!(f, "\n             {disagreement}")?;
        }
        Ok(())
    }
}
