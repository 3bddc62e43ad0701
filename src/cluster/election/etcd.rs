//! Election through etcd: the leader's key lives as long as the lease of whoever made it.
//!
//! Every node looks several times in the time of a lease: it renews its lease, and in one transaction makes the key where there is none, else reads
//! whose it is. So a lease that was lost, a key that was wiped and a stream that was closed are all met by the same step, and nobody waits in a
//! queue for an office that it could no longer take. Whatever fails ends the session, and the next step begins a new one.

use super::{Election, Leadership};
use crate::core::{LogIdentity, Member, Term};
use async_trait::async_trait;
use etcd_client::{Client, Compare, CompareOp, ConnectOptions, Error, LeaseKeepAliveStream, LeaseKeeper, PutOptions, Txn, TxnOp, TxnOpResponse};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// The shortest lease that etcd grants with its default settings.
const TTL_MIN: Duration = Duration::from_secs(2);
/// How many steps there are in the time of a lease.
const STEPS: u32 = 8;
/// How long the pause grows between steps that fail.
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// How long to lay the office down may take.
const FAREWELL: Duration = Duration::from_millis(500);

/// How to take part.
#[derive(Clone)]
pub struct Options {
    /// `http://host:port`, one or several.
    pub endpoints: Vec<String>,
    /// Name and password, where etcd asks for them.
    pub user: Option<(String, String)>,
    /// This node.
    pub own: Member,
    /// How long the office outlives its holder; whole seconds, at least two.
    pub ttl: Duration,
    /// The database, whose nodes elect a leader among themselves; others on the same etcd do not meet them.
    pub log: LogIdentity,
}

/// Elects through etcd.
pub struct EtcdElection {
    options: Options,
    ttl: Duration,
    key: String,
}

/// A connection and a lease on it.
struct Session {
    client: Client,
    lease: i64,
    keeper: LeaseKeeper,
    kept: LeaseKeepAliveStream,
}

/// Why a step failed. Shows neither name nor password.
#[derive(Debug, thiserror::Error)]
enum StepError {
    #[error("{0}")]
    Etcd(#[from] Error),
    #[error("no answer in time")]
    Silent,
    #[error("the lease is gone")]
    LeaseLost,
    #[error("the leader's key holds something else")]
    Unreadable,
}

impl EtcdElection {
    /// Takes no part yet.
    pub fn new(options: Options) -> EtcdElection {
        let cluster = options.log.derive("etcd", &[]);
        let key = format!("quokka/{}/leader", data_encoding::HEXLOWER.encode(&cluster[..8]));
        let ttl = Duration::from_secs(options.ttl.max(TTL_MIN).as_secs());
        EtcdElection { options, ttl, key }
    }

    async fn begin(&self) -> Result<Session, StepError> {
        let mut connect = ConnectOptions::new().with_connect_timeout(self.ttl / 2).with_timeout(self.ttl);
        if let Some((name, password)) = &self.options.user {
            connect = connect.with_user(name, password);
        }
        let mut client = Client::connect(&self.options.endpoints, Some(connect)).await?;
        let seconds = i64::try_from(self.ttl.as_secs()).unwrap_or(i64::MAX);
        let lease = client.lease_grant(seconds, None).await?.id();
        let (keeper, kept) = client.lease_keep_alive(lease).await?;
        Ok(Session { client, lease, keeper, kept })
    }

    async fn step(&self, session: &mut Option<Session>) -> Result<Leadership, StepError> {
        let session = match session {
            Some(session) => session,
            None => session.insert(self.begin().await?),
        };
        session.keeper.keep_alive().await?;
        match session.kept.message().await? {
            Some(kept) if kept.ttl() > 0 => {}
            Some(_) | None => return Err(StepError::LeaseLost),
        }
        let own = serde_json::to_string(&self.options.own).map_err(|_| StepError::Unreadable)?;
        let take = TxnOp::put(self.key.as_str(), own, Some(PutOptions::new().with_lease(session.lease)));
        let look = TxnOp::get(self.key.as_str(), None);
        let is_free = Compare::create_revision(self.key.as_str(), CompareOp::Equal, 0);
        let answered = session.client.txn(Txn::new().when([is_free]).and_then([take, look.clone()]).or_else([look])).await?;
        let found = answered.op_responses().into_iter().find_map(|response| match response {
            TxnOpResponse::Get(mut found) => found.take_kvs().into_iter().next(),
            _ => None,
        });
        let found = found.ok_or(StepError::Unreadable)?;
        if found.lease() == session.lease {
            // Grows with every change of leader, until etcd loses its data; maps are ordered by their epochs first, so that does no harm.
            return Ok(Leadership::Mine(Term(found.create_revision().unsigned_abs())));
        }
        serde_json::from_slice(found.value()).map(Leadership::Other).map_err(|_| StepError::Unreadable)
    }
}

#[async_trait]
impl Election for EtcdElection {
    async fn take_part(&self, told: watch::Sender<Leadership>, stop: CancellationToken) {
        let tell = |now: Leadership| told.send_if_modified(|told| std::mem::replace(told, now.clone()) != now);
        let mut session: Option<Session> = None;
        let (mut is_away, mut confirmed, mut pause) = (false, Instant::now(), self.ttl / STEPS);
        loop {
            let asked = Instant::now();
            let step = tokio::time::timeout(self.ttl, self.step(&mut session));
            let Some(step) = stop.run_until_cancelled(step).await else { break };
            match step.unwrap_or(Err(StepError::Silent)) {
                Ok(leadership) => {
                    if is_away {
                        tracing::info!("etcd elects leaders again");
                    }
                    // The lease was renewed after this, not before.
                    (is_away, confirmed, pause) = (false, asked, self.ttl / STEPS);
                    tell(leadership);
                }
                Err(error) => {
                    // A lease may be lost while etcd is well; then the next step takes a new one.
                    let is_outage = !matches!(error, StepError::LeaseLost);
                    if is_outage && !is_away {
                        tracing::warn!(%error, "etcd elects no leader now; traffic goes on");
                    }
                    is_away |= is_outage;
                    session = None;
                    if confirmed.elapsed() >= self.ttl || !is_outage {
                        tell(Leadership::Unknown);
                    }
                    pause = (pause * 2).min(PAUSE_MAX);
                }
            }
            if stop.run_until_cancelled(tokio::time::sleep(pause.mul_f64(rand::random_range(0.75..1.0)))).await.is_none() {
                break;
            }
        }
        if let Some(mut session) = session {
            // The key goes with the lease; where this fails, both run out by themselves.
            let _ = tokio::time::timeout(FAREWELL, session.client.lease_revoke(session.lease)).await;
        }
    }
}
