//! Logs: structured lines on standard error, for people or as JSON.

use serde::{Deserialize, Serialize};
use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::util::SubscriberInitExt;

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// For people.
    #[default]
    Human,
    /// One JSON object a line.
    Json,
}

/// Settings of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// How lines look.
    pub format: Format,
    /// `error`, `warn`, `info`, `debug` or `trace`, or a filter such as `info,quokka::store=debug`.
    pub level: String,
}

/// Why logging cannot start.
#[derive(Debug, thiserror::Error)]
pub enum LoggingError {
    /// The level cannot be used.
    #[error("log.level: {0}")]
    Level(#[from] tracing_subscriber::filter::ParseError),
    /// Something else takes the log lines of this process already.
    #[error("logging was started before")]
    Started(#[from] tracing_subscriber::util::TryInitError),
}

/// Takes all log lines of this process from now on.
pub fn init(options: &Options) -> Result<(), LoggingError> {
    subscriber(options, std::io::stderr, std::io::stderr().is_terminal())?.try_init()?;
    Ok(())
}

fn subscriber<W>(options: &Options, writer: W, is_terminal: bool) -> Result<Box<dyn tracing::Subscriber + Send + Sync>, LoggingError>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let filter = EnvFilter::builder().parse(&options.level)?;
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer);
    Ok(match options.format {
        Format::Human => Box::new(lines.with_ansi(is_terminal).finish()),
        Format::Json => Box::new(lines.json().flatten_event(true).with_span_list(false).finish()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn logged(format: Format, level: &str) -> String {
        let lines = Lines::default();
        let writer = lines.clone();
        let options = Options { format, level: level.into() };
        let subscriber = subscriber(&options, move || writer.clone(), false).unwrap();
        tracing::subscriber::with_default(subscriber, || {
            let _span = tracing::error_span!("request", trace_id = "abc").entered();
            tracing::info!(rows = 3, "batch written");
            tracing::debug!("not at info");
        });
        String::from_utf8(lines.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn json_lines_hold_fields_and_the_trace() {
        let text = logged(Format::Json, "info");
        let line: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&line["message"], &line["rows"], &line["level"]), (&"batch written".into(), &3.into(), &"INFO".into()));
        assert_eq!(line["span"]["trace_id"], "abc");
    }

    #[test]
    fn human_lines_have_no_colours_outside_a_terminal() {
        let text = logged(Format::Human, "debug");
        assert!(text.contains("batch written rows=3") && text.contains("not at info"), "{text}");
        assert!(!text.contains('\u{1b}'), "{text}");
    }

    #[test]
    fn a_level_that_cannot_be_used_is_named() {
        let error = init(&Options { format: Format::Human, level: "quokka=loud".into() }).unwrap_err();
        assert!(error.to_string().starts_with("log.level: "), "{error}");
    }
}
