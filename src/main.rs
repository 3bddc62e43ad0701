//! The `quokka` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    if std::env::args_os().nth(1).is_some_and(|argument| argument == quokka::handler::js::SUBCOMMAND) {
        return quokka::handler::js::child_main();
    }
    ExitCode::SUCCESS
}
