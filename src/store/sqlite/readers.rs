//! Connections that read, on threads where they may block.

use super::connection;
use crate::store::error::{StoreError, sqlite_read_error};
use rusqlite::{Connection, InterruptHandle};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Semaphore;

/// A bounded number of reading connections, opened when first needed.
pub(super) struct Readers {
    path: Arc<PathBuf>,
    idle: Arc<Mutex<Vec<Connection>>>,
    permits: Arc<Semaphore>,
    statement_timeout: Duration,
}

impl Readers {
    pub(super) fn new(path: PathBuf, size: usize, statement_timeout: Duration) -> Readers {
        Readers { path: Arc::new(path), idle: Arc::default(), permits: Arc::new(Semaphore::new(size)), statement_timeout }
    }

    /// Runs `read` on a connection; where it takes too long, it is interrupted.
    pub(super) async fn read<T: Send + 'static>(&self, read: impl FnOnce(&Connection) -> Result<T, StoreError> + Send + 'static) -> Result<T, StoreError> {
        let too_slow = || StoreError::Unavailable("no answer in time".into());
        let permit = tokio::time::timeout(self.statement_timeout, Arc::clone(&self.permits).acquire_owned()).await;
        let Ok(Ok(permit)) = permit else { return Err(too_slow()) };
        let (path, idle, busy_timeout) = (Arc::clone(&self.path), Arc::clone(&self.idle), self.statement_timeout);
        let interrupt: Arc<Mutex<Option<InterruptHandle>>> = Arc::default();
        let interrupted = Arc::clone(&interrupt);
        let mut running = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            let taken = lock(&idle).pop();
            let connection = match taken {
                Some(connection) => connection,
                None => connection::open(&path, busy_timeout).map_err(|error| sqlite_read_error(&error))?,
            };
            *lock(&interrupted) = Some(connection.get_interrupt_handle());
            let outcome = read(&connection);
            *lock(&interrupted) = None;
            if outcome.is_ok() {
                lock(&idle).push(connection);
            }
            outcome
        });
        match tokio::time::timeout(self.statement_timeout, &mut running).await {
            Ok(ended) => ended.unwrap_or_else(|error| Err(StoreError::Unavailable(error.to_string()))),
            Err(_) => {
                if let Some(handle) = lock(&interrupt).take() {
                    handle.interrupt();
                }
                Err(too_slow())
            }
        }
    }
}

/// The locks guard values that no panic can leave half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
