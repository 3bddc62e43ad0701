//! Opening: the URL, the database, quokka's own tables and the one row in them that the whole cluster agrees on.
//!
//! Every step may run in several processes at once: tables are made where they are missing, and of two that enter the row, one loses and reads the
//! other's. The steps from one version of the schema to the next may run twice, too.

use super::pool::{Failure, NotConnected, Pool};
use super::rows::Cells;
use super::statement::{self, Statement};
use crate::core::LogIdentity;
use crate::store::Options;
use crate::store::error::{OpenError, StoreError, mysql_is_duplicate_key};
use mysql_async::{Opts, OptsBuilder, Row};

/// Version 2 has the column `state_base` in the tables of events, which are brought up to date where they are made.
const SCHEMA_VERSION: u32 = 2;
const META: &str = include_str!("../../../schema/mysql/quokka_meta.sql");
const BARRIER: &str = include_str!("../../../schema/mysql/quokka_barrier.sql");
const LEASE: &str = include_str!("../../../schema/mysql/quokka_lease.sql");

/// Connects and prepares the database; returns what makes its log itself.
pub(super) async fn open(options: &Options) -> Result<(Pool, LogIdentity), OpenError> {
    let (opts, database) = parse(&options.url)?;
    let pool = Pool::new(opts.clone(), options.pool, options.statement_timeout);
    match pool.query(b"DO 0").await {
        Ok(_) => {}
        Err(Failure::NotSent(NotConnected::UnknownDatabase)) => {
            create_database(opts, &database, options).await?;
            query(&pool, b"DO 0").await?;
        }
        Err(failure) => return Err(unavailable(failure)),
    }
    let server = pool.server().ok_or_else(|| OpenError::Unavailable("the server shows no settings".into()))?;
    if let Some(reason) = server.unsuitable() {
        return Err(OpenError::Unsuitable(reason));
    }
    if server.is_read_only() {
        return Err(OpenError::Unavailable("the server is read-only".into()));
    }
    query(&pool, statement::create(META, "").as_bytes()).await?;
    query(&pool, statement::create(BARRIER, "").as_bytes()).await?;
    query(&pool, statement::create(LEASE, "").as_bytes()).await?;
    let identity = agree(&pool, options).await?;
    Ok((pool, identity))
}

/// The driver's options, and the database's name. What is wrong is told without quoting the URL, which holds a password.
pub(super) fn parse(url: &str) -> Result<(Opts, String), OpenError> {
    let opts = Opts::from_url(url).map_err(|error| {
        OpenError::Url(match error {
            mysql_async::UrlError::UnknownParameter { param } => format!("unknown parameter {param}"),
            mysql_async::UrlError::InvalidParamValue { param, .. } => format!("parameter {param} has an invalid value"),
            _ => "it is not of the form mysql://user:password@host:port/database".into(),
        })
    })?;
    match opts.db_name() {
        Some(name) if !name.is_empty() => {
            let name = name.to_owned();
            Ok((opts, name))
        }
        _ => Err(OpenError::Url("it names no database: mysql://user:password@host:port/database".into())),
    }
}

async fn create_database(opts: Opts, database: &str, options: &Options) -> Result<(), OpenError> {
    let server = Pool::new(OptsBuilder::from_opts(opts).db_name(None::<String>).into(), 1, options.statement_timeout);
    let quoted = database.replace('`', "``");
    let sql = format!("CREATE DATABASE IF NOT EXISTS `{quoted}` CHARACTER SET utf8mb4 COLLATE utf8mb4_bin");
    query(&server, sql.as_bytes()).await?;
    tracing::info!(database, "made the database");
    Ok(())
}

/// Enters this program's settings where the database has none, then compares.
async fn agree(pool: &Pool, options: &Options) -> Result<LogIdentity, OpenError> {
    let entry: Statement = statement::insert_meta(SCHEMA_VERSION, options.shards.get(), &rand::random());
    match pool.query(entry.as_bytes()).await {
        Ok(_) => {}
        // Not the first one here.
        Err(Failure::Sent(error)) if mysql_is_duplicate_key(&error) => {}
        Err(failure) => return Err(unavailable(failure)),
    }
    let rows = query(pool, b"SELECT schema_version, shards, log_secret FROM quokka_meta WHERE id = 1").await?;
    let unreadable = |error: StoreError| OpenError::Unsuitable(error.to_string());
    let row = rows.into_iter().next().ok_or_else(|| OpenError::Unsuitable("quokka_meta is empty".into()))?;
    let mut cells = Cells::new(row);
    let stored: u32 = cells.number("schema_version").map_err(unreadable)?;
    if stored > SCHEMA_VERSION {
        return Err(OpenError::Newer { stored, known: SCHEMA_VERSION });
    }
    let shards: u16 = cells.number("shards").map_err(unreadable)?;
    if shards != options.shards.get() {
        return Err(OpenError::Shards { configured: options.shards.get(), stored: shards });
    }
    // Last of the checks: a node that is refused must not shut out those of the earlier version.
    if stored < SCHEMA_VERSION {
        let raise = format!("UPDATE quokka_meta SET schema_version = {SCHEMA_VERSION} WHERE schema_version < {SCHEMA_VERSION}");
        query(pool, raise.as_bytes()).await?;
    }
    let secret = cells.bytes("log_secret").map_err(unreadable)?;
    let secret = secret.try_into().map_err(|_| unreadable(StoreError::unreadable("log_secret")))?;
    Ok(LogIdentity::new(secret))
}

async fn query(pool: &Pool, sql: &[u8]) -> Result<Vec<Row>, OpenError> {
    pool.query(sql).await.map_err(unavailable)
}

/// Nothing that opening sends holds a user's data or a password, so the server's own words are of use.
fn unavailable(failure: Failure) -> OpenError {
    OpenError::Unavailable(match failure {
        Failure::NotSent(reason) => reason.to_string(),
        Failure::Sent(error) => crate::store::error::mysql_connect_text(&error),
        Failure::TimedOut => "no answer in time".into(),
    })
}
