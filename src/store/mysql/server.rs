//! What a server says about itself, and what quokka makes of it.

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Row};

/// The two families of servers, with the oldest version of each that quokka stands on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    MySql,
    MariaDb,
}

/// Settings of a server that bear on quokka's promises.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Server {
    version: String,
    max_allowed_packet: usize,
    is_read_only: bool,
    flush_log_at_commit: String,
    has_binlog: bool,
    sync_binlog: String,
}

const SETTINGS: &str = "SELECT VERSION(), @@max_allowed_packet, @@global.read_only, @@innodb_read_only, \
    @@global.innodb_flush_log_at_trx_commit, @@global.log_bin, @@global.sync_binlog";

impl Server {
    pub(super) async fn read(conn: &mut Conn) -> Result<Server, mysql_async::Error> {
        let row: Option<Row> = conn.query_first(SETTINGS).await?;
        let mut row = row.ok_or_else(|| mysql_async::Error::Other("the server shows no settings".into()))?;
        let mut next = (0..).map(|at| row.take_opt::<String, _>(at).and_then(Result::ok).unwrap_or_default());
        let mut text = || next.next().unwrap_or_default();
        Ok(Server {
            version: text(),
            max_allowed_packet: text().parse().unwrap_or(0),
            is_read_only: is_on(&text()) | is_on(&text()),
            flush_log_at_commit: text(),
            has_binlog: is_on(&text()),
            sync_binlog: text(),
        })
    }

    /// What people call it.
    pub(super) fn name(&self) -> String {
        match self.family() {
            Family::MySql => format!("MySQL {}", self.version),
            Family::MariaDb => format!("MariaDB {}", self.version.replace("-MariaDB", "")),
        }
    }

    /// The longest statement it takes, in bytes.
    pub(super) fn max_allowed_packet(&self) -> usize {
        self.max_allowed_packet
    }

    /// Whether it takes no writes.
    pub(super) fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    /// Whether a row that can be read is durable already: the binary log is synced before a commit becomes visible.
    pub(super) fn shows_only_durable_rows(&self) -> bool {
        self.has_binlog && self.sync_binlog == "1" && self.flush_log_at_commit == "1"
    }

    /// Why quokka cannot use it.
    pub(super) fn unsuitable(&self) -> Option<String> {
        let oldest = match self.family() {
            Family::MySql => (8, 4),
            Family::MariaDb => (10, 11),
        };
        let mut numbers = self.version.split(|character: char| !character.is_ascii_digit()).map(|number| number.parse::<u32>().unwrap_or(0));
        let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        (version < oldest).then(|| format!("it is {}, but MySQL 8.4 or MariaDB 10.11 is the oldest that quokka supports", self.name()))
    }

    /// Says aloud which settings break the promise of durability.
    pub(super) fn warn(&self) {
        if self.flush_log_at_commit != "1" {
            tracing::warn!(innodb_flush_log_at_trx_commit = %self.flush_log_at_commit, "answered commands can be lost in a crash of the database: set it to 1");
        }
        if self.has_binlog && self.sync_binlog != "1" {
            tracing::warn!(sync_binlog = %self.sync_binlog, "answered commands can be lost in a crash of the database: set it to 1");
        }
    }

    fn family(&self) -> Family {
        if self.version.contains("MariaDB") { Family::MariaDb } else { Family::MySql }
    }
}

/// Some versions show a switch as a number, others as a word.
pub(super) fn is_on(value: &str) -> bool {
    !matches!(value, "0" | "OFF" | "")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(version: &str) -> Server {
        Server {
            version: version.into(),
            max_allowed_packet: 1,
            is_read_only: false,
            flush_log_at_commit: "1".into(),
            has_binlog: true,
            sync_binlog: "1".into(),
        }
    }

    #[test]
    fn old_servers_are_refused() {
        for (version, fine) in [
            ("8.0.44", false),
            ("8.3.0", false),
            ("8.4.0", true),
            ("9.7.4-2", true),
            ("5.7.44-log", false),
            ("10.6.18-MariaDB", false),
            ("10.11.19-MariaDB-0+deb12u1", true),
            ("11.4.2-MariaDB-log", true),
            ("", false),
        ] {
            assert_eq!(server(version).unsuitable().is_none(), fine, "{version}");
        }
    }

    #[test]
    fn rows_count_as_durable_only_where_the_binary_log_is_synced_first() {
        assert!(server("9.7.4").shows_only_durable_rows());
        assert!(!Server { has_binlog: false, ..server("9.7.4") }.shows_only_durable_rows());
        assert!(!Server { sync_binlog: "0".into(), ..server("9.7.4") }.shows_only_durable_rows());
        assert!(!Server { flush_log_at_commit: "2".into(), ..server("9.7.4") }.shows_only_durable_rows());
    }
}
