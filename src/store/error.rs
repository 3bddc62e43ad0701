//! Errors of stores. They say whether it happened: that is all that callers need to know, and they must never guess it.

/// Why a store cannot be opened. The text never holds a password.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The URL cannot be used.
    #[error("storage.url: {0}")]
    Url(String),
    /// The database was first used with another number of shards.
    #[error("storage.shards is {configured}, but this database was first used with {stored}: the number is fixed")]
    Shards {
        /// In the configuration.
        configured: u16,
        /// In the database.
        stored: u16,
    },
    /// The database was written by a newer quokka.
    #[error("the database has schema version {stored}, newer than the {known} that this quokka knows")]
    Newer {
        /// In the database.
        stored: u32,
        /// In this program.
        known: u32,
    },
    /// The server lacks what quokka stands on.
    #[error("the database cannot be used: {0}")]
    Unsuitable(String),
    /// It does not answer, or refuses.
    #[error("the database is not available: {0}")]
    Unavailable(String),
}

/// Why a read, or a write that may safely be repeated, failed. It changed nothing that anybody relies on.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// The database is away, refuses, is read-only or too slow; trying again later may help.
    #[error("the database is not available: {0}")]
    Unavailable(String),
    /// What was read breaks a rule of quokka; trying again will not help.
    #[error("the database holds what quokka cannot have written: {0}")]
    Corrupt(String),
}

/// Why an append did not surely succeed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum AppendError {
    /// Surely not there: another writer took one of the event ids. Read the head again.
    #[error("an event id is taken")]
    PositionTaken,
    /// Surely not there: a version or a command id of an entity is taken (an event id may be, too). Look all of them up.
    #[error("a version or a command id is taken")]
    KeyTaken,
    /// Surely not there: a deadlock, a lock wait timeout or a killed query. The same append may succeed at once.
    #[error("the database gave up on the statement: {0}")]
    Interrupted(String),
    /// Surely not there: the database is away before the statement was sent, or is read-only.
    #[error("the database is not available: {0}")]
    Unavailable(String),
    /// Surely not there: the events are more than one statement may hold. Send fewer.
    #[error("the events are too large for one statement")]
    TooLarge,
    /// Surely not there: the database refuses what an event holds. Should not happen; send the events one by one to find it.
    #[error("the database refuses an event: {0}")]
    Refused(String),
    /// It may be there, or may still come. Only appending the same events again decides: until it succeeds, or a key is taken.
    #[error("the outcome is unknown: {0}")]
    Unknown(String),
}

impl StoreError {
    /// A stored value that does not fit its column's meaning.
    pub(super) fn unreadable(column: &str) -> StoreError {
        StoreError::Corrupt(format!("column {column} holds a value of another kind"))
    }
}

/// Error numbers of MySQL and MariaDB. Only those named here as definite mean that an INSERT surely left nothing behind.
mod mysql_code {
    pub const DUPLICATE_KEY: u16 = 1062;
    pub const UNKNOWN_DATABASE: u16 = 1049;
    /// Gave up on a statement that may succeed at once: record changed, lock wait timeout, deadlock, killed query.
    pub const INTERRUPTED: [u16; 4] = [1020, 1205, 1213, 1317];
    /// The server, or the transaction, takes no writes.
    pub const READ_ONLY: [u16; 3] = [1290, 1792, 1836];
    /// Refused before any row was touched: privilege missing, table missing.
    pub const NO_ACCESS: [u16; 2] = [1142, 1146];
    /// There is no such procedure; and this user may not run it.
    pub const UNKNOWN_PROCEDURE: u16 = 1305;
    pub const PROCEDURE_DENIED: u16 = 1370;
    /// The statement was killed.
    pub const KILLED: u16 = 1317;
    /// What a row holds is refused: NULL, out of range, wrong value, too long, invalid JSON, failed CHECK.
    pub const DATA: [u16; 6] = [1048, 1264, 1366, 1406, 3140, 4025];
}

/// What the server said, without its text: that quotes values and statements, which are user data.
fn mysql_text(error: &mysql_async::ServerError) -> String {
    format!("server error {} ({})", error.code, error.state)
}

/// What a failed connection attempt tells; the server's text is wanted here, and never holds a password.
pub(super) fn mysql_connect_text(error: &mysql_async::Error) -> String {
    match error {
        mysql_async::Error::Server(error) => format!("{}: {}", mysql_text(error), error.message),
        mysql_async::Error::Io(error) => error.to_string(),
        mysql_async::Error::Driver(mysql_async::DriverError::UnexpectedPacket { .. }) => "it does not speak the protocol of MySQL".into(),
        error => error.to_string(),
    }
}

/// What a failure after sending a statement tells.
fn mysql_sent_text(error: &mysql_async::Error) -> String {
    match error {
        mysql_async::Error::Server(error) => mysql_text(error),
        mysql_async::Error::Io(error) => format!("connection lost: {error}"),
        // Some texts of the driver show rows or packets.
        mysql_async::Error::Driver(_) | mysql_async::Error::Other(_) | mysql_async::Error::Url(_) => "connection lost: unexpected bytes".into(),
    }
}

fn mysql_code_of(error: &mysql_async::Error) -> Option<u16> {
    match error {
        mysql_async::Error::Server(error) => Some(error.code),
        _ => None,
    }
}

/// Whether the connection failed because the database named in the URL does not exist.
pub(super) fn mysql_is_unknown_database(error: &mysql_async::Error) -> bool {
    mysql_code_of(error) == Some(mysql_code::UNKNOWN_DATABASE)
}

/// Whether a key was taken: an answer rather than a failure, after which the connection is as good as before.
pub(super) fn mysql_is_duplicate_key(error: &mysql_async::Error) -> bool {
    mysql_code_of(error) == Some(mysql_code::DUPLICATE_KEY)
}

/// Whether the server takes no writes, as after a failover: every connection to it is then stale.
pub(super) fn mysql_is_read_only(error: &mysql_async::Error) -> bool {
    mysql_code_of(error).is_some_and(|code| mysql_code::READ_ONLY.contains(&code))
}

/// What an INSERT that was sent, and then failed, means.
pub(super) fn mysql_append_error(error: &mysql_async::Error) -> AppendError {
    let mysql_async::Error::Server(server) = error else { return AppendError::Unknown(mysql_sent_text(error)) };
    let text = mysql_text(server);
    match server.code {
        // The key's name stands last: 'PRIMARY' on MariaDB, 'account.PRIMARY' on MySQL. The value before it is not looked at.
        mysql_code::DUPLICATE_KEY if server.message.ends_with("PRIMARY'") => AppendError::PositionTaken,
        mysql_code::DUPLICATE_KEY => AppendError::KeyTaken,
        code if mysql_code::INTERRUPTED.contains(&code) => AppendError::Interrupted(text),
        code if mysql_code::READ_ONLY.contains(&code) || mysql_code::NO_ACCESS.contains(&code) => AppendError::Unavailable(text),
        code if mysql_code::DATA.contains(&code) => AppendError::Refused(text),
        _ => AppendError::Unknown(text),
    }
}

/// What it means where a procedure that runs appends in a transaction has failed. It undoes everything; but a kill may meet it after its commit.
pub(super) fn mysql_call_error(error: &mysql_async::Error) -> AppendError {
    match error {
        mysql_async::Error::Server(server) if server.code == mysql_code::KILLED => AppendError::Unknown(mysql_text(server)),
        mysql_async::Error::Server(server) if server.code == mysql_code::PROCEDURE_DENIED => AppendError::Refused(mysql_text(server)),
        error => mysql_append_error(error),
    }
}

/// Whether a procedure is missing, so that nothing of it was run.
pub(super) fn mysql_is_unknown_procedure(error: &mysql_async::Error) -> bool {
    matches!(error, mysql_async::Error::Server(server) if server.code == mysql_code::UNKNOWN_PROCEDURE)
}

/// What a failed read means.
pub(super) fn mysql_read_error(error: &mysql_async::Error) -> StoreError {
    StoreError::Unavailable(mysql_sent_text(error))
}

/// What SQLite said, without its text where that may quote values.
fn sqlite_text(error: &rusqlite::Error) -> String {
    match error {
        rusqlite::Error::SqliteFailure(code, _) => code.to_string(),
        error => error.to_string(),
    }
}

fn sqlite_code_of(error: &rusqlite::Error) -> Option<rusqlite::ffi::Error> {
    match error {
        rusqlite::Error::SqliteFailure(code, _) => Some(*code),
        _ => None,
    }
}

/// Whether another process holds the lock that was wanted.
pub(super) fn sqlite_is_busy(error: &rusqlite::Error) -> bool {
    use rusqlite::ErrorCode::{DatabaseBusy, DatabaseLocked};
    sqlite_code_of(error).is_some_and(|code| matches!(code.code, DatabaseBusy | DatabaseLocked))
}

/// What a failed BEGIN or INSERT means; its transaction is rolled back, so nothing is ever unknown.
pub(super) fn sqlite_append_error(error: &rusqlite::Error) -> AppendError {
    use rusqlite::ErrorCode as Code;
    let Some(code) = sqlite_code_of(error) else { return AppendError::Refused(sqlite_text(error)) };
    match (code.code, code.extended_code) {
        (_, rusqlite::ffi::SQLITE_CONSTRAINT_PRIMARYKEY) => AppendError::PositionTaken,
        (_, rusqlite::ffi::SQLITE_CONSTRAINT_UNIQUE) => AppendError::KeyTaken,
        (Code::ConstraintViolation | Code::TypeMismatch | Code::TooBig | Code::ParameterOutOfRange, _) => AppendError::Refused(sqlite_text(error)),
        (Code::DatabaseBusy | Code::DatabaseLocked | Code::OperationInterrupted, _) => AppendError::Interrupted(sqlite_text(error)),
        _ => AppendError::Unavailable(sqlite_text(error)),
    }
}

/// What a failed COMMIT means, where its transaction could be rolled back afterwards.
///
/// A busy or full disk is noticed before the commit's last frame is whole in the write-ahead log; any other failure may leave a log that a
/// restart reads as committed.
pub(super) fn sqlite_commit_error(error: &rusqlite::Error) -> AppendError {
    use rusqlite::ErrorCode as Code;
    match sqlite_code_of(error).map(|code| code.code) {
        Some(Code::DatabaseBusy | Code::DatabaseLocked) => AppendError::Interrupted(sqlite_text(error)),
        Some(Code::DiskFull) => AppendError::Unavailable(sqlite_text(error)),
        _ => AppendError::Unknown(sqlite_text(error)),
    }
}

/// What a failed read means.
pub(super) fn sqlite_read_error(error: &rusqlite::Error) -> StoreError {
    use rusqlite::ErrorCode::{DatabaseCorrupt, NotADatabase};
    match sqlite_code_of(error).map(|code| code.code) {
        Some(DatabaseCorrupt | NotADatabase) => StoreError::Corrupt(sqlite_text(error)),
        _ => StoreError::Unavailable(sqlite_text(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(code: u16, message: &str) -> mysql_async::Error {
        mysql_async::Error::Server(mysql_async::ServerError { code, message: message.into(), state: "HY000".into() })
    }

    #[test]
    fn only_the_short_list_is_definite() {
        for (code, message, expected) in [
            (1062, "Duplicate entry '7-1' for key 'account.PRIMARY'", "an event id is taken"),
            (1062, "Duplicate entry '7-1' for key 'PRIMARY'", "an event id is taken"),
            (1062, "Duplicate entry 'a-1' for key 'account.unique_version'", "a version or a command id is taken"),
            (1062, "Duplicate entry 'a-PRIMARY'' for key 'unique_command'", "a version or a command id is taken"),
            (1205, "", "the database gave up on the statement: server error 1205 (HY000)"),
            (1213, "", "the database gave up on the statement: server error 1213 (HY000)"),
            (1317, "", "the database gave up on the statement: server error 1317 (HY000)"),
            (1020, "", "the database gave up on the statement: server error 1020 (HY000)"),
            (1290, "", "the database is not available: server error 1290 (HY000)"),
            (1792, "", "the database is not available: server error 1792 (HY000)"),
            (1836, "", "the database is not available: server error 1836 (HY000)"),
            (1146, "", "the database is not available: server error 1146 (HY000)"),
            (1406, "secret", "the database refuses an event: server error 1406 (HY000)"),
            (4025, "secret", "the database refuses an event: server error 4025 (HY000)"),
            (1053, "", "the outcome is unknown: server error 1053 (HY000)"),
            (4031, "", "the outcome is unknown: server error 4031 (HY000)"),
            (1047, "", "the outcome is unknown: server error 1047 (HY000)"),
            (3101, "", "the outcome is unknown: server error 3101 (HY000)"),
            (1153, "", "the outcome is unknown: server error 1153 (HY000)"),
            (9999, "", "the outcome is unknown: server error 9999 (HY000)"),
        ] {
            assert_eq!(mysql_append_error(&server(code, message)).to_string(), expected, "{code} {message}");
        }
        let lost = mysql_async::Error::from(std::io::Error::from(std::io::ErrorKind::UnexpectedEof));
        assert!(matches!(mysql_append_error(&lost), AppendError::Unknown(_)));
        assert!(matches!(mysql_append_error(&mysql_async::DriverError::PacketOutOfOrder.into()), AppendError::Unknown(_)));
    }

    #[test]
    fn a_commit_is_definite_only_where_its_log_cannot_be_whole() {
        let failed = |code| rusqlite::Error::SqliteFailure(rusqlite::ffi::Error::new(code), None);
        assert!(matches!(sqlite_commit_error(&failed(rusqlite::ffi::SQLITE_FULL)), AppendError::Unavailable(_)));
        assert!(matches!(sqlite_commit_error(&failed(rusqlite::ffi::SQLITE_BUSY)), AppendError::Interrupted(_)));
        assert!(matches!(sqlite_commit_error(&failed(rusqlite::ffi::SQLITE_IOERR_FSYNC)), AppendError::Unknown(_)));
    }
}
