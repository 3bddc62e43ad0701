//! The server: what `quokka serve` and `quokka check` do once the configuration is read.

use crate::config::Config;

/// Serves until the process is told to stop.
pub async fn serve(_config: Config) -> anyhow::Result<()> {
    anyhow::bail!("this build has no server in it")
}

/// Loads and validates everything that [`serve`] would, and gives it back as text for people.
pub async fn check(_config: Config) -> anyhow::Result<String> {
    anyhow::bail!("this build has no server in it")
}
