//! The command line: what can be asked of the program, and how it explains itself.

use crate::bench;
use crate::config::Overrides;
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;
use std::time::Duration;

/// A document database server: JSON commands in, versioned JSON documents out, every command handled once.
#[derive(Debug, Parser)]
#[command(name = "quokka", version, after_help = EXAMPLES, arg_required_else_help = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const EXAMPLES: &str = "\
Examples:
  quokka serve                                  on 127.0.0.1:9865, with SQLite in ./quokka-data and the example entity types
  quokka serve --storage mysql://app:secret@db:3306/quokka --entities ./entities
  quokka check --entities ./entities            are the modules fit to serve?
  quokka bench --duration 10s                   load a running server and check its answers

`quokka COMMAND --help` says more about each command.";

/// The commands of the program.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the server until SIGTERM or Ctrl-C
    #[command(after_help = SERVE_EXAMPLES)]
    Serve(Settings),
    /// Validate the configuration and the entity modules, without serving
    #[command(after_help = CHECK_EXAMPLES)]
    Check(Settings),
    /// Print the whole configuration in force, defaults included, without passwords
    #[command(after_help = CONFIG_EXAMPLES)]
    Config(Settings),
    /// Send load to a running server, measure it, and check that it kept its word
    #[command(after_help = BENCH_EXAMPLES)]
    Bench(BenchArgs),
    /// Show the nodes of a cluster, as one of them sees it
    #[command(after_help = CLUSTER_EXAMPLES)]
    Cluster(ClusterArgs),
}

const SERVE_EXAMPLES: &str = "\
Every setting can be given in the file (config/quokka.toml shows all), as an environment variable QUOKKA_SECTION__KEY, and some
as a flag; the flag wins. A password given as a flag is seen by all users of the machine: give it in the file, by
QUOKKA_STORAGE__URL or by storage.url_file.

Examples:
  quokka serve
  quokka serve --listen 0.0.0.0:9865 --storage sqlite:/var/lib/quokka/quokka.sqlite --entities ./entities
  QUOKKA_COMMANDS__TIMEOUT=5s quokka serve --config quokka.toml";

const CHECK_EXAMPLES: &str = "\
Exits with 1 and prints file and line where something is wrong.

Examples:
  quokka check --entities ./entities
  quokka check --config quokka.toml";

const CONFIG_EXAMPLES: &str = "\
Examples:
  quokka config > quokka.toml                   a file to start from
  quokka config --config quokka.toml            what the file, the environment and the defaults come to";

const BENCH_EXAMPLES: &str = "\
The commands go to fresh entities, so the command must create them where they are missing, as `deposit` of the example type `account` does. In the
end each entity's version is compared with the number of answers; where they disagree, bench exits with 1.

Examples:
  quokka bench                                  the built-in account.deposit on a local server
  quokka bench --entities 1 --connections 256   all load on one entity
  quokka bench --bulk --duration 30s --json     streamed, with the figures as one line of JSON
  quokka bench --type red_packet --command create --request '{\"amount\":100,\"count\":10}' --entities 1000000";

const CLUSTER_EXAMPLES: &str = "\
Each node tells what it knows: the map that it follows, its number (the epoch) and its age, and when the leader last heard each node. A map that
grows old means that there is no leader to confirm it; requests are served all the same.

Examples:
  quokka cluster
  quokka cluster --url http://10.0.0.2:9865 --json";

/// Which node to ask.
#[derive(Debug, Clone, Args)]
pub struct ClusterArgs {
    /// The node
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:9865")]
    pub url: String,
    /// Print what the node answers as one line of JSON
    #[arg(long)]
    pub json: bool,
}

/// Where settings come from.
#[derive(Debug, Clone, Default, Args)]
pub struct Settings {
    /// The configuration file (TOML)
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Where to listen [default: 127.0.0.1:9865]
    #[arg(long, value_name = "ADDR")]
    pub listen: Option<String>,
    /// The database: mysql://user:password@host:port/database or sqlite:PATH [default: sqlite:quokka-data/quokka.sqlite]
    #[arg(long, value_name = "URL")]
    pub storage: Option<String>,
    /// The folder of entity modules [default: the built-in examples]
    #[arg(long, value_name = "DIR")]
    pub entities: Option<PathBuf>,
}

impl Settings {
    /// What the flags set.
    pub fn overrides(&self) -> Overrides {
        Overrides { listen: self.listen.clone(), storage: self.storage.clone(), entities: self.entities.clone() }
    }
}

/// What to load, and how.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// The server
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:9865")]
    pub url: String,
    /// How many fresh entities the commands go to
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub entities: usize,
    /// How many connections send at the same time
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub connections: usize,
    /// For how long
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = humantime_serde::re::humantime::parse_duration)]
    pub duration: Duration,
    /// The entity type
    #[arg(long = "type", value_name = "TYPE", default_value = "account")]
    pub entity_type: String,
    /// The command
    #[arg(long, value_name = "COMMAND", default_value = "deposit")]
    pub command: String,
    /// The request of every command
    #[arg(long, value_name = "JSON", default_value = r#"{"amount":1}"#)]
    pub request: String,
    /// Stream the commands to POST /v1/commands instead of posting each
    #[arg(long)]
    pub bulk: bool,
    /// Print the figures as one line of JSON instead of a summary
    #[arg(long)]
    pub json: bool,
}

impl BenchArgs {
    /// What to run.
    pub fn options(&self) -> bench::Options {
        let BenchArgs { url, entities, connections, duration, entity_type, command, request, bulk, json: _ } = self.clone();
        bench::Options { url, entities, connections, duration, entity_type, command, request, bulk }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn flags_become_settings() {
        let cli = Cli::try_parse_from(["quokka", "serve", "--listen", "[::1]:80", "--storage", "sqlite:x", "--entities", "folder"]).unwrap();
        let Command::Serve(settings) = cli.command else { panic!("{cli:?}") };
        let expected = Overrides { listen: Some("[::1]:80".into()), storage: Some("sqlite:x".into()), entities: Some("folder".into()) };
        assert_eq!(settings.overrides(), expected);
    }

    #[test]
    fn bench_works_on_the_built_in_account_by_default() {
        let Command::Bench(bench) = Cli::try_parse_from(["quokka", "bench", "--duration", "1m 30s"]).unwrap().command else { panic!() };
        let options = bench.options();
        assert_eq!((options.entity_type.as_str(), options.command.as_str(), options.request.as_str()), ("account", "deposit", r#"{"amount":1}"#));
        assert_eq!(options.duration, Duration::from_secs(90));
        assert!(crate::examples::ENTITIES.iter().any(|(file, _)| *file == "account.js"));
    }
}
