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
