//! Opening on a server, and what its settings are allowed to change.

use super::until;
use crate::support::server::{Database, Engine, PASSWORD};
use mysql_async::prelude::Queryable;
use quokka::core::{CommandId, EntityId, EntityType, Event, EventOutcome};
use quokka::store::conformance::{account, event, id, options, partition, store};
use quokka::store::{AppendError, OpenError, StoreError, open};
use std::collections::HashMap;

super::on_both_servers! { database:
    a_missing_database_is_made_where_that_is_allowed
    errors_of_opening_never_show_the_password
    a_newer_schema_is_refused
    a_strangers_table_is_refused
    values_that_do_not_fit_are_refused_and_never_cut
    a_table_that_is_gone_means_not_done
    a_server_without_tls_is_refused_where_tls_is_wanted
}

async fn refused(url: &str) -> String {
    open(&options(url)).await.map(|_| ()).unwrap_err().to_string()
}

async fn a_missing_database_is_made_where_that_is_allowed(database: Database) {
    let new = format!("{}-new`", database.name());
    let url = database.server().url(database.name(), &new.replace('`', "%60"));
    let error = refused(&url).await;
    assert!(error.contains("server error 1044"), "{error}");
    let mut admin = database.admin().await;
    admin.query_drop(format!("GRANT ALL ON `{}`.* TO {}@'%'", new.replace('`', "``"), database.name())).await.unwrap();
    store(&url).await.append(&partition(7), &[event(1, "a", 1, "k")]).await.unwrap();
    assert_eq!(store(&url).await.head(&partition(7)).await.unwrap(), 1);
    admin.query_drop(format!("DROP DATABASE `{}`", new.replace('`', "``"))).await.unwrap();
}

async fn errors_of_opening_never_show_the_password(database: Database) {
    let url = database.url();
    let wrong = url.replace("S3cret", "S3cretWRONG");
    let error = refused(&wrong).await;
    assert!(error.contains("server error 1045"), "{error}");
    let port = format!(":{}/", database.server().port());
    let cases = [
        wrong,
        url.replace(&port, ":1/"),
        url.replace(&port, ":notaport/"),
        url.replace(database.name(), "nobody"),
        format!("{url}?no_such_parameter=1"),
        format!("{url}?pool_min=S3cret"),
        url.replace(&format!("/{}", database.name()), "/"),
        url.replace("mysql://", "mysql:"),
        url.replace("mysql://", "postgres://"),
    ];
    for url in cases {
        let error = open(&options(&url)).await.map(|_| ()).unwrap_err();
        for text in [error.to_string(), format!("{error:?}"), format!("{:?}", options(&url))] {
            assert!(!text.contains("S3cret") && !text.contains(PASSWORD), "{text}");
        }
    }
}

async fn a_newer_schema_is_refused(database: Database) {
    drop(store(database.url()).await);
    database.admin().await.query_drop("UPDATE quokka_meta SET schema_version = 99").await.unwrap();
    assert!(matches!(open(&options(database.url())).await.map(|_| ()), Err(OpenError::Newer { stored: 99, known: 2 })));
}

async fn a_strangers_table_is_refused(database: Database) {
    let store = store(database.url()).await;
    let table = "CREATE TABLE person (shard INT, event_id INT, entity_id VARCHAR(64), version INT, command_id VARCHAR(9), PRIMARY KEY (shard, event_id))";
    database.admin().await.query_drop(table).await.unwrap();
    let outcome = store.create_type(&EntityType::new("person").unwrap()).await;
    assert!(matches!(outcome, Err(StoreError::Corrupt(_))), "{outcome:?}");
}

/// The server's own `sql_mode` would cut them to what fits.
async fn values_that_do_not_fit_are_refused_and_never_cut(database: Database) {
    let store = store(database.url()).await;
    let long = EntityId::trusted(&"x".repeat(65));
    for broken in [
        Event { entity_id: long, ..event(1, "a", 1, "k") },
        Event { command_id: CommandId::trusted(&"k".repeat(257)), ..event(1, "a", 1, "k") },
        Event { command_id: CommandId::trusted("ключ"), ..event(1, "a", 1, "k") },
    ] {
        let outcome = store.append(&partition(7), &[broken]).await;
        assert!(matches!(outcome, Err(AppendError::Refused(_))), "{outcome:?}");
    }
    assert_eq!(store.head(&partition(7)).await.unwrap(), 0);
}

async fn a_table_that_is_gone_means_not_done(database: Database) {
    let store = store(database.url()).await;
    database.admin().await.query_drop("DROP TABLE account").await.unwrap();
    let outcome = store.append(&partition(7), &[event(1, "a", 1, "k")]).await;
    assert!(matches!(outcome, Err(AppendError::Unavailable(_))), "{outcome:?}");
    assert!(matches!(store.head(&partition(7)).await, Err(StoreError::Unavailable(_))));
}

/// MySQL comes with a certificate of its own making, MariaDB with none; nobody falls back to plain text.
async fn a_server_without_tls_is_refused_where_tls_is_wanted(database: Database) {
    let unverified = format!("{}?require_ssl=true&verify_ca=false&verify_identity=false", database.url());
    match database.server().engine() {
        Engine::MySql => {
            store(&unverified).await.append(&partition(7), &[event(1, "a", 1, "k")]).await.unwrap();
            let error = refused(&format!("{}?require_ssl=true", database.url())).await;
            assert!(error.to_lowercase().contains("certificate"), "{error}");
        }
        Engine::MariaDb => {
            let error = refused(&unverified).await;
            assert!(error.contains("SSL"), "{error}");
        }
    }
}

mod alone {
    use super::*;

    crate::store::on_both_servers! { database_alone:
        a_server_that_turns_read_only_is_noticed_and_forgiven
        a_server_that_crashes_and_comes_back_is_used_again
        reads_touch_few_rows
        settings_that_endanger_commits_are_told_aloud
        the_barrier_writes_only_where_rows_can_be_seen_too_early
    }

    async fn a_server_that_turns_read_only_is_noticed_and_forgiven(database: Database) {
        let store = store(database.url()).await;
        let mut admin = database.admin().await;
        store.append(&partition(7), &[event(1, "a", 1, "k")]).await.unwrap();
        admin.query_drop("SET GLOBAL read_only = 1").await.unwrap();
        let append = store.append(&partition(7), &[event(2, "b", 1, "k")]).await;
        let (ready, head) = (store.ready().await, store.head(&partition(7)).await);
        let opened = open(&options(database.url())).await.map(|_| ());
        admin.query_drop("SET GLOBAL read_only = 0").await.unwrap();
        assert!(matches!(append, Err(AppendError::Unavailable(_))), "{append:?}");
        assert!(matches!(ready, Err(StoreError::Unavailable(_))), "{ready:?}");
        assert!(matches!(opened, Err(OpenError::Unavailable(_))), "{opened:?}");
        assert_eq!(head.unwrap(), 1, "reads go on");
        store.ready().await.unwrap();
        store.append(&partition(7), &[event(2, "b", 1, "k")]).await.unwrap();
    }

    async fn a_server_that_crashes_and_comes_back_is_used_again(database: Database) {
        let store = store(database.url()).await;
        store.append(&partition(7), &[event(1, "a", 1, "k")]).await.unwrap();
        database.server().kill();
        let second = [event(2, "a", 2, "l")];
        let first_try = store.append(&partition(7), &second).await;
        assert!(matches!(first_try, Err(AppendError::Unknown(_))), "it went to a connection that was thought alive: {first_try:?}");
        let second_try = store.append(&partition(7), &second).await;
        assert!(matches!(second_try, Err(AppendError::Unavailable(_))), "{second_try:?}");
        assert!(store.ready().await.is_err());
        assert!(matches!(open(&options(database.url())).await.map(|_| ()), Err(OpenError::Unavailable(_))));
        database.server().start().await;
        until("the store is ready again", async || store.ready().await.is_ok()).await;
        assert_eq!(store.head(&partition(7)).await.unwrap(), 1, "what was acknowledged is there, what never arrived is not");
        store.append(&partition(7), &second).await.unwrap();
    }

    /// How many rows and index entries all sessions have touched.
    async fn touched(admin: &mut mysql_async::Conn) -> u64 {
        let rows: Vec<(String, u64)> = admin.query("SHOW GLOBAL STATUS LIKE 'Handler_read%'").await.unwrap();
        let counts: HashMap<_, _> = rows.into_iter().filter(|(name, _)| name != "Handler_read_rnd_deleted").collect();
        counts.values().sum()
    }

    /// Rows touched are counted, not time: a plan that walks the table touches fifty thousand.
    async fn reads_touch_few_rows(database: Database) {
        let store = store(database.url()).await;
        let mut events = Vec::new();
        for number in 0..20_000 {
            let event_id = events.len() as u64 + 1;
            let mut event = event(event_id, &format!("e{number:05}"), 1, "k");
            if number % 2 == 1 {
                (event.outcome, event.state) = (EventOutcome::Rejected, None);
            }
            events.push(event);
        }
        for version in 1..=30_000 {
            events.push(event(events.len() as u64 + 1, "e10000-hot", version, &format!("k{version}")));
        }
        for chunk in events.chunks(2000) {
            store.append(&partition(7), chunk).await.unwrap();
        }
        let mut admin = database.admin().await;
        admin.query_drop("ANALYZE TABLE account").await.unwrap();
        let mut cost = HashMap::new();
        macro_rules! measure {
            ($what:literal, $read:expr) => {{
                let before = touched(&mut admin).await;
                let read = $read.await.unwrap();
                cost.insert($what, touched(&mut admin).await - before);
                read
            }};
        }
        assert_eq!(measure!("head", store.head(&partition(7))), 50_000);
        let ids: Vec<_> = (0..200).map(|number| id(&format!("e{number:05}"))).chain([id("e10000-hot")]).collect();
        let commands: Vec<_> = ids.iter().map(|id| (id.clone(), CommandId::trusted("k1"))).collect();
        assert_eq!(measure!("newest", store.newest(&account(), &ids)).len(), 201);
        assert_eq!(measure!("find", store.find(&account(), &commands)).len(), 201);
        assert!(measure!("at_version", store.at_version(&account(), &id("e10000-hot"), 15_000)).is_some());
        assert!(measure!("at_time", store.at_time(&account(), &id("e10000-hot"), i64::MAX)).is_some());
        assert_eq!(
            measure!("history", store.history(&account(), &id("e10000-hot"), quokka::store::Order::Descending, 0, 100, quokka::store::Content::Whole)).len(),
            100
        );
        for (what, after) in [("first page", None), ("page in the middle", Some(id("e15000"))), ("page over the hot one", Some(id("e09990")))] {
            let before = touched(&mut admin).await;
            assert_eq!(store.list(&account(), after.as_ref(), 100).await.unwrap().len(), 100);
            cost.insert(what, touched(&mut admin).await - before);
        }
        // Asking for the counts touches up to a few thousand rows itself.
        let idle = touched(&mut admin).await;
        let own = touched(&mut admin).await - idle;
        for (what, rows) in &cost {
            assert!(rows.saturating_sub(own) < 10_000, "{what} touched {rows} rows: {cost:?}, {own} of them by the count itself");
        }
    }

    /// Collects what is logged.
    #[derive(Clone, Default)]
    struct Log(std::sync::Arc<std::sync::Mutex<Vec<u8>>>);

    impl std::io::Write for Log {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    async fn settings_that_endanger_commits_are_told_aloud(database: Database) {
        use tracing::instrument::WithSubscriber;
        let mut admin = database.admin().await;
        let mut warnings = async |setting: &str| {
            admin.query_drop(format!("SET GLOBAL innodb_flush_log_at_trx_commit = {setting}")).await.unwrap();
            let log = Log::default();
            let writer = log.clone();
            let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).finish();
            open(&options(database.url())).with_subscriber(subscriber).await.unwrap();
            let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
            text.matches("WARN").count()
        };
        let (unsafe_setting, safe_setting) = (warnings("2").await, warnings("1").await);
        assert_eq!((unsafe_setting, safe_setting), (1, 0), "one warning, once");
    }

    async fn the_barrier_writes_only_where_rows_can_be_seen_too_early(database: Database) {
        let store = store(database.url()).await;
        for _ in 0..5 {
            futures_util::future::try_join_all((0..40).map(|_| store.barrier())).await.unwrap();
        }
        let writes: Option<u64> = database.admin().await.query_first("SELECT COALESCE(SUM(writes), 0) FROM quokka_barrier").await.unwrap();
        match database.server().engine() {
            Engine::MySql => assert_eq!(writes, Some(0), "the binary log is synced first"),
            Engine::MariaDb => assert!((5..=15).contains(&writes.unwrap()), "{writes:?} writes for 200 callers"),
        }
    }
}
