//! Two nodes on one simulated database that loses, delays and refuses appends: whatever happens, the log is right.
//!
//! Guards unique-truth, durable-before-answer, first-answer, dense-log and no-trace. Time is simulated, so that a run takes
//! milliseconds; a failing seed is named in the panic and can be run alone.

use super::*;
use crate::core::batch::{Call, Decision, HandlerFault, HandlerFaultKind, SchemaError};
use crate::core::patch::Draft;
use crate::core::{Change, Creates, Event, HandlerVersion, LogIdentity, Outcome, ShardCount, StatePatch, StoredEvent, Work};
use crate::handler::{HandlersUnavailable, Ran};
use crate::store::{AppendError, Content, Lease, Listed, Order, StoreError};
use async_trait::async_trait;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Mutex, Weak};

/// How often, in a thousand, the database does something unkind.
#[derive(Debug, Clone, Copy)]
struct Faults {
    interrupted: u32,
    unavailable: u32,
    lost_before: u32,
    lost_after: u32,
    lands_late: u32,
    /// An append of unknown outcome that landed, after which nothing can be read for a while.
    lost_and_away: u32,
}

const NO_FAULTS: Faults = Faults { interrupted: 0, unavailable: 0, lost_before: 0, lost_after: 0, lands_late: 0, lost_and_away: 0 };
const MANY_FAULTS: Faults = Faults { interrupted: 50, unavailable: 30, lost_before: 60, lost_after: 60, lands_late: 60, lost_and_away: 30 };

/// A table with the three keys, in memory.
struct FakeStore {
    this: Weak<FakeStore>,
    rows: Mutex<Vec<StoredEvent>>,
    rng: Mutex<StdRng>,
    faults: Faults,
    /// Until when reads fail.
    away_until: Mutex<Option<Instant>>,
    identity: LogIdentity,
}

impl FakeStore {
    fn new(seed: u64, faults: Faults) -> Arc<FakeStore> {
        Arc::new_cyclic(|this| FakeStore {
            this: this.clone(),
            rows: Mutex::default(),
            rng: Mutex::new(StdRng::seed_from_u64(seed)),
            faults,
            away_until: Mutex::default(),
            identity: LogIdentity::new([0; 32]),
        })
    }

    fn draw(&self, range: std::ops::Range<u32>) -> u32 {
        self.rng.lock().unwrap().random_range(range)
    }

    async fn pause(&self) {
        let wait = u64::from(self.draw(0..4));
        tokio::time::sleep(Duration::from_millis(wait)).await;
    }

    /// What every read does first.
    async fn read(&self) -> Result<(), StoreError> {
        self.pause().await;
        let is_away = self.away_until.lock().unwrap().is_some_and(|until| Instant::now() < until);
        if is_away { Err(StoreError::Unavailable("away".into())) } else { Ok(()) }
    }

    fn insert(&self, events: &[Event]) -> Result<(), AppendError> {
        let mut rows = self.rows.lock().unwrap();
        for event in events {
            if rows.iter().any(|row| row.event.event_id == event.event_id) {
                return Err(AppendError::PositionTaken);
            }
            let same = rows.iter().filter(|row| row.event.entity_id == event.entity_id);
            if same.into_iter().any(|row| row.event.version == event.version || row.event.command_id == event.command_id) {
                return Err(AppendError::KeyTaken);
            }
        }
        for event in events {
            let mut event = event.clone();
            if let Some(StatePatch { base, patch }) = event.patch.take() {
                let before = rows.iter().find(|row| row.event.entity_id == event.entity_id && row.event.version + 1 == event.version).unwrap();
                assert!(base < event.version && rows.iter().any(|row| row.event.entity_id == event.entity_id && row.event.version == base));
                let mut draft = Draft::new(before.event.state.as_ref().unwrap()).unwrap();
                draft.apply(&patch).unwrap();
                event.state = Some(draft.text().unwrap());
            }
            rows.push(StoredEvent { event, committed_at: 0 });
        }
        Ok(())
    }

    fn select<T>(&self, read: impl FnOnce(&[StoredEvent]) -> T) -> T {
        read(&self.rows.lock().unwrap())
    }
}

#[async_trait]
impl Store for FakeStore {
    fn identity(&self) -> &LogIdentity {
        &self.identity
    }

    fn shards(&self) -> ShardCount {
        ShardCount::new(1).unwrap()
    }

    fn append_bytes_max(&self) -> usize {
        1 << 20
    }

    async fn create_type(&self, _: &EntityType) -> Result<(), StoreError> {
        Ok(())
    }

    async fn head(&self, _: &Partition) -> Result<u64, StoreError> {
        self.read().await?;
        Ok(self.select(|rows| rows.iter().map(|row| row.event.event_id).max().unwrap_or(0)))
    }

    async fn append(&self, _: &Partition, events: &[Event]) -> Result<(), AppendError> {
        self.pause().await;
        let Faults { interrupted, unavailable, lost_before, lost_after, lands_late, lost_and_away } = self.faults;
        let fate = self.draw(0..1000);
        let bounds = [interrupted, unavailable, lost_before, lost_after, lands_late, lost_and_away].into_iter().scan(0, |sum, share| {
            *sum += share;
            Some(*sum)
        });
        match bounds.into_iter().position(|bound| fate < bound) {
            Some(0) => Err(AppendError::Interrupted("deadlock".into())),
            Some(1) => Err(AppendError::Unavailable("read-only".into())),
            Some(2) => Err(AppendError::Unknown("lost before".into())),
            Some(3) => {
                let _ = self.insert(events);
                Err(AppendError::Unknown("lost after".into()))
            }
            Some(4) => {
                let (this, events, wait) = (self.this.clone(), events.to_vec(), u64::from(self.draw(0..300)));
                tokio::spawn(async move {
                    tokio::time::sleep(Duration::from_millis(wait)).await;
                    let _ = this.upgrade().map(|this| this.insert(&events));
                });
                Err(AppendError::Unknown("lands late".into()))
            }
            Some(5) => {
                let _ = self.insert(events);
                *self.away_until.lock().unwrap() = Some(Instant::now() + Duration::from_millis(self.draw(0..1000).into()));
                Err(AppendError::Unknown("lost after, and away".into()))
            }
            _ => self.insert(events),
        }
    }

    async fn append_all(&self, appends: &[(Partition, Vec<Event>)]) -> Result<(), AppendError> {
        match appends {
            [(partition, events)] => self.append(partition, events).await,
            _ => Err(AppendError::Refused("there is one partition here".into())),
        }
    }

    async fn newest(&self, _: &EntityType, ids: &[EntityId]) -> Result<Vec<Option<StoredEvent>>, StoreError> {
        self.read().await?;
        let newest = |rows: &[StoredEvent], id: &EntityId| rows.iter().filter(|row| row.event.entity_id == *id).max_by_key(|row| row.event.version).cloned();
        Ok(self.select(|rows| ids.iter().map(|id| newest(rows, id)).collect()))
    }

    async fn find(&self, _: &EntityType, commands: &[(EntityId, CommandId)]) -> Result<Vec<Option<StoredEvent>>, StoreError> {
        self.read().await?;
        let find = |rows: &[StoredEvent], id: &EntityId, command: &CommandId| {
            let row = rows.iter().find(|row| row.event.entity_id == *id && row.event.command_id == *command)?;
            Some(StoredEvent { event: Event { state: None, ..row.event.clone() }, ..row.clone() })
        };
        Ok(self.select(|rows| commands.iter().map(|(id, command)| find(rows, id, command)).collect()))
    }

    async fn at_version(&self, _: &EntityType, _: &EntityId, _: Version) -> Result<Option<StoredEvent>, StoreError> {
        Ok(None)
    }

    async fn at_time(&self, _: &EntityType, _: &EntityId, _: i64) -> Result<Option<StoredEvent>, StoreError> {
        Ok(None)
    }

    async fn history(&self, _: &EntityType, _: &EntityId, _: Order, _: Version, _: usize, _: Content) -> Result<Vec<StoredEvent>, StoreError> {
        Ok(Vec::new())
    }

    async fn list(&self, _: &EntityType, _: Option<&EntityId>, _: usize) -> Result<Vec<Listed>, StoreError> {
        Ok(Vec::new())
    }

    async fn heads(&self, _: &[EntityType]) -> Result<Vec<(Partition, u64)>, StoreError> {
        Ok(Vec::new())
    }

    async fn read(&self, _: &Partition, _: Order, _: u64, _: usize, _: usize) -> Result<Vec<StoredEvent>, StoreError> {
        Ok(Vec::new())
    }

    async fn version_at(&self, _: &EntityType, _: &EntityId, _: u64) -> Result<Version, StoreError> {
        Ok(0)
    }

    fn epoch(&self) -> u64 {
        0
    }

    async fn barrier(&self) -> Result<(), StoreError> {
        Ok(())
    }

    async fn lease(&self) -> Result<Option<Lease>, StoreError> {
        Ok(None)
    }

    async fn swap_lease(&self, _: Option<&Lease>, _: &Lease) -> Result<bool, StoreError> {
        Ok(false)
    }

    async fn ready(&self) -> Result<(), StoreError> {
        Ok(())
    }

    fn engine(&self) -> String {
        "simulated".into()
    }
}

/// `add N` adds to the state and refuses to fall below zero, `open` creates, `break` fails.
struct Counter {
    entity_type: EntityType,
    version: HandlerVersion,
    commands: BTreeMap<CommandName, Creates>,
}

impl Counter {
    fn set() -> HandlerSet {
        let commands = [("add", Creates::IfMissing), ("open", Creates::Always), ("break", Creates::IfMissing)];
        let commands = commands.into_iter().map(|(name, creates)| (CommandName::trusted(name), creates)).collect();
        let counter = Counter { entity_type: account(), version: HandlerVersion("test".into()), commands };
        BTreeMap::from([(account(), Arc::new(counter) as Arc<dyn Handlers>)])
    }
}

struct Run<'a>(&'a Counter);

impl crate::core::batch::Execute for Run<'_> {
    fn creates(&self, command: &CommandName) -> Option<Creates> {
        self.0.commands.get(command).copied()
    }

    fn execute(&mut self, call: Call<'_>) -> Result<Decision, Failure> {
        if call.command.as_str() == "break" {
            return Err(Failure::HandlerFailed(HandlerFault { kind: HandlerFaultKind::Exception, message: "broken".into() }));
        }
        let amount: i64 =
            call.request.parse().map_err(|_| Failure::InvalidRequest(vec![SchemaError { pointer: String::new(), message: "no number".into() }]))?;
        let sum = call.state.text().and_then(|state| state.parse::<i64>().ok()).unwrap_or(0) + amount;
        if sum < 0 {
            return Ok(Decision::Reject { rejection: Json::trusted(format!("{{\"code\":\"low\",\"message\":\"{sum}\"}}")) });
        }
        let state = Json::trusted(sum.to_string());
        Ok(Decision::Accept { response: state.clone(), state: state.into() })
    }
}

#[async_trait]
impl Handlers for Counter {
    fn entity_type(&self) -> &EntityType {
        &self.entity_type
    }

    fn version(&self) -> &HandlerVersion {
        &self.version
    }

    fn commands(&self) -> &BTreeMap<CommandName, Creates> {
        &self.commands
    }

    fn entity_id_max(&self) -> usize {
        20
    }

    async fn run(&self, work: Work) -> Result<Ran, HandlersUnavailable> {
        tokio::time::sleep(Duration::from_millis(1)).await;
        let mut ran = Ran::whole(work, &mut Run(self));
        // Some states are told as changes.
        for outcome in &mut ran.outcomes {
            if let Outcome::Accepted { state, .. } = outcome
                && let Change::Whole(text) = state
                && text.len() % 2 == 0
            {
                let patch = Json::trusted(format!("[{{\"op\":\"replace\",\"path\":\"\",\"value\":{text}}}]"));
                *state = Change::Patch { patch, len: text.len() };
            }
        }
        Ok(ran)
    }
}

fn account() -> EntityType {
    EntityType::trusted("account")
}

fn node(store: &Arc<FakeStore>) -> Partitions {
    let options = Options {
        timeout: Duration::from_secs(2),
        queue_max: 100,
        batch_rows_max: 16,
        batch_bytes_max: 4000,
        row_bytes_max: 1 << 20,
        refuse_reuse: false,
        cache_bytes_max: 1 << 20,
        retry_for: Duration::from_millis(200),
    };
    Partitions::new(options, store.clone(), Counter::set())
}

fn command(entity: &str, id: &str, line: &str) -> Command {
    let (name, request) = line.split_once(' ').unwrap_or((line, "null"));
    Command {
        entity_id: EntityId::trusted(entity),
        command_id: CommandId::trusted(id),
        is_fresh_id: false,
        name: CommandName::trusted(name),
        request: Json::trusted(request.to_owned()),
        precondition: None,
    }
}

async fn run(node: &Partitions, command: Command) -> CommandResult {
    node.submit(&account(), command, WhenFull::Refuse).await?.answer().await
}

/// The answer as text, for tables.
async fn tell(node: &Partitions, entity: &str, id: &str, line: &str) -> String {
    match run(node, command(entity, id, line)).await {
        Ok((answer, replay)) => format!("v{} {} {:?}", answer.version, answer.response, replay),
        Err(CommandError::Failed(failure)) => format!("{failure:?}").split([' ', '(']).next().unwrap().to_owned(),
        Err(error) => error.to_string(),
    }
}

#[tokio::test(start_paused = true)]
async fn first_answer_every_later_try_hears_it_whatever_it_asks() {
    let store = FakeStore::new(1, NO_FAULTS);
    let first = node(&store);
    let other = node(&store);
    for (node, id, line, expected) in [
        (&first, "1", "open 5", "v1 5 First"),
        (&first, "1", "open 5", "v1 5 Again"),
        (&other, "1", "open 5", "v1 5 Again"),
        (&other, "2", "open 5", "EntityExists"),
        (&first, "3", "add -9", "v2 {\"code\":\"low\",\"message\":\"-4\"} First"),
        (&other, "4", "add 10", "v3 15 First"),
        (&other, "3", "add -9", "v2 {\"code\":\"low\",\"message\":\"-4\"} Again"),
        (&first, "5", "add -9", "v4 6 First"),
        (&first, "1", "add 7", "v1 5 Mismatch"),
        (&first, "1", "break", "v1 5 Mismatch"),
        (&other, "1", "nothing", "v1 5 Mismatch"),
        (&first, "6", "nothing", "UnknownCommand"),
        (&first, "6", "break", "HandlerFailed"),
        (&first, "6", "add x", "InvalidRequest"),
        (&first, "6", "add 1", "v5 7 First"),
    ] {
        assert_eq!(tell(node, "a", id, line).await, expected, "{id} {line}");
    }
}

#[tokio::test(start_paused = true)]
async fn no_trace_a_stale_state_never_decides_a_failure() {
    let store = FakeStore::new(2, NO_FAULTS);
    let (first, other) = (node(&store), node(&store));
    assert_eq!(tell(&first, "a", "1", "open 5").await, "v1 5 First");
    assert_eq!(tell(&other, "a", "2", "add 1").await, "v2 6 First");
    let mut demanding = command("a", "3", "add 1");
    demanding.precondition = Some(Precondition::Version(2));
    let answer = run(&first, demanding).await.unwrap();
    assert_eq!((answer.0.version, answer.1), (3, Replay::First));
}

#[tokio::test(start_paused = true)]
async fn duplicates_that_arrive_together_share_one_answer() {
    let store = FakeStore::new(3, NO_FAULTS);
    let node = node(&store);
    let mut tries = Vec::new();
    for number in 0..50 {
        let line = if number == 20 { "add 2" } else { "add 1" };
        tries.push(node.submit(&account(), command("a", "same", line), WhenFull::Refuse).await.unwrap());
    }
    let answers = futures_util::future::join_all(tries.into_iter().map(Pending::answer)).await;
    let replays: Vec<Replay> = answers.iter().map(|answer| answer.as_ref().unwrap().1).collect();
    assert_eq!(replays.iter().filter(|replay| **replay == Replay::First).count(), 1);
    assert_eq!(replays[20], Replay::Mismatch);
    assert_eq!(store.select(<[StoredEvent]>::len), 1);
}

#[tokio::test(start_paused = true)]
async fn a_duplicate_of_a_failed_try_runs_where_it_asks_for_something_else() {
    let node = node(&FakeStore::new(4, NO_FAULTS));
    let mut tries = Vec::new();
    for line in ["break", "break", "add 3", "add 3"] {
        tries.push(node.submit(&account(), command("a", "same", line), WhenFull::Refuse).await.unwrap());
    }
    let answers = futures_util::future::join_all(tries.into_iter().map(Pending::answer)).await;
    let told: Vec<String> =
        answers.iter().map(|answer| answer.as_ref().map_or("failed".into(), |(answer, replay)| format!("{} {replay:?}", answer.response))).collect();
    assert_eq!(told, ["failed", "failed", "3 First", "3 Again"]);
}

#[tokio::test(start_paused = true)]
async fn bounded_a_full_queue_refuses_and_an_abandoned_command_never_runs() {
    let store = FakeStore::new(5, NO_FAULTS);
    let node = node(&store);
    let mut waiting = Vec::new();
    let refused = loop {
        match node.submit(&account(), command("a", &waiting.len().to_string(), "add 1"), WhenFull::Refuse).await {
            Ok(pending) => waiting.push(pending),
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, CommandError::Overloaded { .. }), "{refused}");
    assert_eq!(waiting.len(), 100);
    waiting.truncate(40);
    for pending in waiting {
        pending.answer().await.unwrap();
    }
    node.shut_down().await;
    assert_eq!(store.select(<[StoredEvent]>::len), 40);
    assert!(matches!(run(&node, command("a", "late", "add 1")).await, Err(CommandError::ShuttingDown)));
}

#[tokio::test(start_paused = true)]
async fn a_look_up_is_answered_in_turn() {
    let node = node(&FakeStore::new(6, NO_FAULTS));
    let key = EntityKey { entity_type: account(), entity_id: EntityId::trusted("a") };
    assert!(node.look_up(&key, &CommandId::trusted("1")).await.unwrap().is_none());
    let pending = node.submit(&account(), command("a", "1", "add 1"), WhenFull::Refuse).await.unwrap();
    let found = node.look_up(&key, &CommandId::trusted("1")).await.unwrap();
    assert_eq!(found.map(|answer| answer.version), Some(1));
    pending.answer().await.unwrap();
}

/// What a client was told.
#[derive(Default)]
struct Told {
    answers: Vec<Arc<Answer>>,
    /// Commands that surely did not happen, and were given up.
    refused: Vec<(EntityId, CommandId)>,
}

/// One client: sends commands one after another, each try to a node drawn anew, until it is answered or, sometimes, surely did not happen.
async fn client(number: u32, seed: u64, nodes: Arc<[Partitions; 2]>) -> Told {
    let mut rng = StdRng::seed_from_u64(seed ^ u64::from(number) << 32);
    let mut told = Told::default();
    for step in 0..25 {
        let entity = ["a", "b", "c"][rng.random_range(0..3)];
        let id = if rng.random_range(0..10) == 0 { "shared".to_owned() } else { format!("{number}-{step}") };
        let amount = rng.random_range(-3..5).to_string();
        let line = match (id.as_str(), rng.random_range(0..12)) {
            ("shared", _) => "add 1".to_owned(),
            (_, 0) => "break".to_owned(),
            _ => format!("add {amount}"),
        };
        let mut is_doubtful = id == "shared";
        loop {
            match run(&nodes[rng.random_range(0..2)], command(entity, &id, &line)).await {
                Ok((answer, _)) => {
                    told.answers.push(answer);
                    break;
                }
                Err(CommandError::Failed(Failure::HandlerFailed(_))) if line == "break" => break,
                Err(CommandError::Overloaded { .. } | CommandError::Unavailable(_)) if !is_doubtful && rng.random_range(0..3) == 0 => {
                    told.refused.push((EntityId::trusted(entity), CommandId::trusted(&id)));
                    break;
                }
                Err(error @ (CommandError::Overloaded { .. } | CommandError::Unavailable(_) | CommandError::OutcomeUnknown)) => {
                    // A later "did not happen" speaks of that try alone.
                    is_doubtful |= matches!(error, CommandError::OutcomeUnknown);
                    tokio::time::sleep(Duration::from_millis(rng.random_range(1..50))).await;
                }
                Err(error) => panic!("seed {seed}: {error}"),
            }
        }
    }
    told
}

/// Everything that must hold of the table once all clients have their answers.
fn check_log(seed: u64, rows: &[StoredEvent], all: &Told) {
    let mut events: Vec<&Event> = rows.iter().map(|row| &row.event).collect();
    events.sort_by_key(|event| event.event_id);
    let mut entities: HashMap<&EntityId, (u64, i64)> = HashMap::new();
    for (at, event) in events.iter().enumerate() {
        assert_eq!(event.event_id, at as u64 + 1, "seed {seed}: event ids are dense");
        let (version, sum) = entities.entry(&event.entity_id).or_default();
        *version += 1;
        assert_eq!(event.version, *version, "seed {seed}: versions of {} are dense and rise with event ids", event.entity_id);
        let wanted = *sum + event.request.parse::<i64>().unwrap();
        *sum = if wanted < 0 { *sum } else { wanted };
        let state = event.state.as_ref().map_or("0".into(), Json::to_string);
        assert_eq!(state, sum.to_string(), "seed {seed}: {} v{version} follows from its predecessors", event.entity_id);
    }
    let recorded: HashMap<_, _> = events.iter().map(|event| ((&event.entity_id, &event.command_id), *event)).collect();
    let mut told = HashSet::new();
    for answer in &all.answers {
        let event = recorded.get(&(&answer.entity_id, &answer.command_id)).unwrap_or_else(|| panic!("seed {seed}: {answer:?} was told but is not there"));
        assert_eq!(**answer, Answer::of(&answer.position.partition, event), "seed {seed}: what was told is what is there");
        told.insert((answer.entity_id.clone(), answer.command_id.clone()));
    }
    assert_eq!(told.len(), events.len(), "seed {seed}: nothing is there that nobody was told");
    for (entity, command) in &all.refused {
        assert!(!recorded.contains_key(&(entity, command)), "seed {seed}: {command} on {entity} was told not to have happened");
    }
}

async fn simulate(seed: u64, faults: Faults) {
    let store = FakeStore::new(seed, faults);
    let nodes = Arc::new([node(&store), node(&store)]);
    let clients: Vec<_> = (0..8).map(|number| tokio::spawn(client(number, seed, nodes.clone()))).collect();
    let mut all = Told::default();
    for client in clients {
        let told = client.await.unwrap();
        all.answers.extend(told.answers);
        all.refused.extend(told.refused);
    }
    for node in nodes.iter() {
        node.shut_down().await;
    }
    // What may still land must not do harm either.
    tokio::time::sleep(Duration::from_secs(1)).await;
    store.select(|rows| check_log(seed, rows, &all));
}

#[tokio::test(start_paused = true)]
async fn unique_truth_two_owners_on_a_kind_database() {
    for seed in 0..20 {
        simulate(seed, NO_FAULTS).await;
    }
}

#[tokio::test(start_paused = true)]
async fn unique_truth_two_owners_on_an_unkind_database() {
    for seed in 0..60 {
        simulate(seed, MANY_FAULTS).await;
    }
}

/// Commands that arrive while others commit are run ahead on states that may never come to be; that must not show in their order.
#[tokio::test(start_paused = true)]
async fn commands_of_one_entity_are_run_in_the_order_in_which_they_were_taken() {
    for seed in 0..60 {
        let store = FakeStore::new(seed, if seed % 2 == 0 { NO_FAULTS } else { MANY_FAULTS });
        let node = node(&store);
        let mut rng = StdRng::seed_from_u64(seed);
        let mut pending = Vec::new();
        for number in 0..300 {
            let line = if rng.random_range(0..20) == 0 { "break".to_owned() } else { format!("add {}", rng.random_range(-2..5)) };
            let entity = ["a", "b"][rng.random_range(0..2)];
            let submitted = node.submit(&account(), command(entity, &format!("{number:03}"), &line), WhenFull::Wait).await.unwrap();
            // Some callers hang up, before or after their command was begun.
            if rng.random_range(0..20) > 0 {
                pending.push(submitted);
            }
            tokio::time::sleep(Duration::from_micros(rng.random_range(0..300))).await;
        }
        futures_util::future::join_all(pending.into_iter().map(Pending::answer)).await;
        node.shut_down().await;
        store.select(|rows| {
            let mut rows: Vec<&Event> = rows.iter().map(|row| &row.event).collect();
            rows.sort_by_key(|event| (&event.entity_id, event.version));
            for pair in rows.windows(2).filter(|pair| pair[0].entity_id == pair[1].entity_id) {
                assert!(pair[0].command_id.as_str() < pair[1].command_id.as_str(), "seed {seed}: {:?} before {:?}", pair[0], pair[1]);
            }
        });
    }
}

/// A further try that asks for something else than a failed one runs itself, and before what came after it.
#[tokio::test(start_paused = true)]
async fn a_try_that_runs_itself_keeps_its_place() {
    for seed in 0..30 {
        let node = node(&FakeStore::new(seed, NO_FAULTS));
        let mut pending = Vec::new();
        for (id, line) in [("first", "add 1"), ("same", "break"), ("same", "add 1")] {
            pending.push(node.submit(&account(), command("a", id, line), WhenFull::Refuse).await.unwrap());
        }
        // By now they are being run or committed.
        tokio::time::sleep(Duration::from_micros(500 + 100 * seed)).await;
        pending.push(node.submit(&account(), command("a", "younger", "add 1"), WhenFull::Refuse).await.unwrap());
        let answers = futures_util::future::join_all(pending.into_iter().map(Pending::answer)).await;
        let versions: Vec<u64> = answers.into_iter().flatten().map(|(answer, _)| answer.version).collect();
        assert_eq!(versions, [1, 2, 3], "seed {seed}");
    }
}

/// What was only run ahead has surely not happened, however long the batch before it is in doubt.
#[tokio::test(start_paused = true)]
async fn a_command_that_was_only_run_ahead_did_not_happen() {
    let node = node(&FakeStore::new(1, Faults { lost_before: 1000, ..NO_FAULTS }));
    let sent = node.submit(&account(), command("a", "1", "add 1"), WhenFull::Refuse).await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    let ahead = node.submit(&account(), command("a", "2", "add 1"), WhenFull::Refuse).await.unwrap();
    let (sent, ahead) = tokio::join!(sent.answer(), ahead.answer());
    assert!(matches!(sent, Err(CommandError::OutcomeUnknown)), "{sent:?}");
    assert!(matches!(ahead, Err(CommandError::Unavailable(_))), "{ahead:?}");
}
