//! The `quokka` program: arguments, configuration, log, and which function to call.

use anyhow::Context;
use clap::Parser;
use quokka::cli::{BenchArgs, Cli, ClusterArgs, Command, Settings};
use quokka::cluster::{self, Status};
use quokka::config::{self, Config};
use quokka::handler::js;
use quokka::{bench, logging, server};
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

/// How long a node is given to answer a question about its cluster.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    if std::env::args_os().nth(1).is_some_and(|argument| argument == js::SUBCOMMAND) {
        return js::child_main();
    }
    let outcome = match Cli::parse().command {
        Command::Serve(settings) => serve(&settings),
        Command::Check(settings) => check(&settings),
        Command::Config(settings) => print_config(&settings),
        Command::Bench(args) => run_bench(&args),
        Command::Cluster(args) => show_cluster(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("quokka: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn load(settings: &Settings) -> anyhow::Result<Config> {
    Ok(config::load(settings.config.as_deref(), &settings.overrides())?)
}

fn serve(settings: &Settings) -> anyhow::Result<()> {
    let config = load(settings)?;
    start_log(&config)?;
    Ok(runtime()?.block_on(server::serve(config))?)
}

fn check(settings: &Settings) -> anyhow::Result<()> {
    let config = load(settings)?;
    let found = runtime()?.block_on(server::check(config))?;
    print(&found)
}

fn print_config(settings: &Settings) -> anyhow::Result<()> {
    print(load(settings)?.to_toml()?.trim_end())
}

fn run_bench(args: &BenchArgs) -> anyhow::Result<()> {
    let outcome = bench::run(&args.options())?;
    if args.json {
        print(&serde_json::to_string(&outcome.report)?)?;
    } else {
        print(&outcome.to_string())?;
    }
    match outcome.failure() {
        Some(failure) => anyhow::bail!(failure),
        None => Ok(()),
    }
}

fn show_cluster(args: &ClusterArgs) -> anyhow::Result<()> {
    let asked = async { tokio::time::timeout(ANSWER_WITHIN, cluster::peer::get::<Status>(&args.url, "/v1/cluster")).await };
    let status = runtime()?.block_on(asked).context("the node gave no answer in time")?.with_context(|| format!("cannot ask {}", args.url))?;
    print(if args.json { serde_json::to_string(&status)? } else { status.to_string() }.trim_end())
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()
}

fn start_log(config: &Config) -> anyhow::Result<()> {
    Ok(logging::init(&logging::Options { format: config.log.format, level: config.log.level.clone() })?)
}

/// A reader that left early, such as `head`, is no error.
fn print(text: &str) -> anyhow::Result<()> {
    match writeln!(std::io::stdout(), "{text}") {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}
