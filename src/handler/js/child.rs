//! The handler process: what runs when the server's own program is started again with [`SUBCOMMAND`].
//!
//! Two threads. One reads messages and runs JavaScript; the other, [`watch`], looks at the first one from outside: it asks the
//! engine to stop a command that has used up its CPU time, ends the whole process where the engine does not stop (a native
//! loop), tells of outcomes every second, and ends the process when the server is gone. Between batches both sleep.
//!
//! The process keeps nothing that matters. Whenever it ends, the server knows which outcomes it had told of, and has the rest
//! run elsewhere.

use super::engine::Engine;
use super::protocol::{End, HEADER, Message};
use super::sandbox;
use rustix::process::{Pid, Signal, getpid, getppid, kill_process};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// The first argument that makes the program a handler process.
pub const SUBCOMMAND: &str = "handler-process";

/// CPU time after the limit in which the engine may still stop a command by itself.
const GRACE: Duration = Duration::from_millis(50);
/// How often outcomes are told of while a batch runs.
const BEAT: Duration = Duration::from_secs(1);
/// How many quiet looks until the watching thread goes to sleep.
const QUIET_LOOKS: u32 = 50;
/// The stack of the JavaScript thread: what JavaScript may use, and as much again for native code under it.
const THREAD_STACK: usize = 4 << 20;
/// No command is running.
const IDLE: u64 = 0;

/// Runs the handler process; returns only on errors. Call it before anything else where the first argument is [`SUBCOMMAND`].
pub fn child_main() -> ExitCode {
    match start() {
        Ok(never) => match never {},
        Err(error) => {
            eprintln!("the handler process cannot start: {error}");
            ExitCode::FAILURE
        }
    }
}

fn start() -> Result<std::convert::Infallible, String> {
    let text = |error: std::io::Error| error.to_string();
    let pipe = File::from(std::io::stdout().as_fd().try_clone_to_owned().map_err(text)?);
    let output = Output { frame: vec![0; HEADER], items: 0, pipe };
    let shared = Arc::new(Shared {
        current: AtomicU64::new(IDLE),
        overrun: AtomicU64::new(IDLE),
        started: AtomicU64::new(IDLE),
        limit_ns: AtomicU64::new(u64::MAX),
        is_watcher_asleep: AtomicBool::new(false),
        watcher: std::thread::current(),
        output: Mutex::new(output),
    });
    let for_script = shared.clone();
    let script = move || {
        let served = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| serve(&for_script)));
        if let Ok(Err(error)) = &served {
            eprintln!("{error}");
        }
        // The server closed the pipe, or something is broken beyond repair here.
        end_process()
    };
    let first = std::thread::Builder::new().name("handlers".into()).stack_size(THREAD_STACK).spawn(script);
    first.map_err(text)?;
    watch(&shared)
}

/// What both threads know.
pub struct Shared {
    /// The number of the command that runs, or [`IDLE`].
    current: AtomicU64,
    /// The number of a command that has used up its time.
    overrun: AtomicU64,
    /// How many commands were started.
    started: AtomicU64,
    limit_ns: AtomicU64,
    is_watcher_asleep: AtomicBool,
    watcher: Thread,
    output: Mutex<Output>,
}

impl Shared {
    /// Sets the CPU time that each command has from now on.
    pub fn limit(&self, limit: Duration) {
        self.limit_ns.store(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX), SeqCst);
    }

    /// A command begins: its time is measured until the next one begins, or [`Shared::idle`].
    pub fn begin(&self) {
        self.current.store(self.started.fetch_add(1, SeqCst) + 1, SeqCst);
        if self.is_watcher_asleep.load(SeqCst) && self.is_watcher_asleep.swap(false, SeqCst) {
            self.watcher.unpark();
        }
    }

    /// Whether the command that runs has used up its time.
    pub fn is_overrun(&self) -> bool {
        let current = self.current.load(SeqCst);
        current != IDLE && self.overrun.load(SeqCst) == current
    }

    /// No command runs any more.
    pub fn idle(&self) {
        self.current.store(IDLE, SeqCst);
    }

    /// What is to be told to the server.
    pub fn output(&self) -> MutexGuard<'_, Output> {
        self.output.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Items for the server that it has not been told of yet.
pub struct Output {
    frame: Vec<u8>,
    items: u32,
    pipe: File,
}

impl Output {
    /// Adds one item.
    pub fn push(&mut self, item: &impl Serialize) -> Result<(), String> {
        let frame = std::mem::take(&mut self.frame);
        self.frame = postcard::to_extend(item, frame).map_err(|error| error.to_string())?;
        self.items += 1;
        Ok(())
    }

    /// Tells the server of all items. Ends the process where nobody listens.
    pub fn flush(&mut self, end: End) {
        let header = end.header(self.items, self.frame.len() - 4);
        self.frame[..HEADER].copy_from_slice(&header);
        if self.pipe.write_all(&self.frame).is_err() {
            end_process();
        }
        self.frame.truncate(HEADER);
        self.frame.shrink_to(1 << 20);
        self.items = 0;
    }
}

/// Looks after the JavaScript thread, for ever.
fn watch(shared: &Shared) -> ! {
    let parent = getppid();
    let mut seen = IDLE;
    let mut since = Duration::ZERO;
    let mut beat = Instant::now();
    let mut quiet = 0;
    loop {
        let limit = Duration::from_nanos(shared.limit_ns.load(SeqCst));
        let current = shared.current.load(SeqCst);
        if current == IDLE {
            quiet += 1;
            seen = IDLE;
            if quiet > QUIET_LOOKS {
                shared.is_watcher_asleep.store(true, SeqCst);
                if shared.current.load(SeqCst) == IDLE {
                    std::thread::park();
                }
                shared.is_watcher_asleep.store(false, SeqCst);
                quiet = 0;
                beat = Instant::now();
                continue;
            }
        } else {
            quiet = 0;
            let now = cpu_time();
            if current != seen {
                (seen, since) = (current, now);
            } else if now.saturating_sub(since) >= limit {
                shared.overrun.store(current, SeqCst);
                if now.saturating_sub(since) >= limit + GRACE {
                    end_if_still_running(shared, current);
                }
            }
            if getppid() != parent {
                end_process();
            }
            if beat.elapsed() >= BEAT {
                shared.output().flush(End::More);
                beat = Instant::now();
            }
        }
        std::thread::sleep((limit / 10).clamp(Duration::from_millis(1), Duration::from_millis(10)));
    }
}

/// Ends the process unless the command has come to its end in the meantime. Under the lock, its outcome cannot be told of any more.
fn end_if_still_running(shared: &Shared, command: u64) {
    let mut output = shared.output();
    if shared.current.load(SeqCst) == command {
        output.flush(End::Overran);
        end_process();
    }
}

/// The CPU time that the process has used.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or_default(), u32::try_from(time.tv_nsec).unwrap_or_default())
}

/// Ends the process at once, whatever its threads are doing.
fn end_process() -> ! {
    let _ = kill_process(getpid(), Signal::KILL);
    std::process::abort()
}

/// Answers messages until the server closes the pipe.
fn serve(shared: &Arc<Shared>) -> Result<(), String> {
    let mut input = std::io::stdin().lock();
    let mut buffer = Vec::new();
    let Some(Message::Load(load)) = read(&mut input, &mut buffer)? else { return Err("the first message loads nothing".into()) };
    if getppid().map(Pid::as_raw_nonzero).map(|pid| pid.get().unsigned_abs()) != Some(load.parent) {
        return Ok(());
    }
    sandbox::limit_memory(load.memory_limit);
    if let Err(error) = sandbox::enter() {
        eprintln!("handlers run without a system call filter: {error}");
    }
    let mut engine = Engine::load(load, shared)?;
    while let Some(message) = read(&mut input, &mut buffer)? {
        let Message::Run { module, flush, keep, work } = message else { return Err("modules are loaded only once".into()) };
        engine.run(module, flush, keep, work.into_owned())?;
    }
    Ok(())
}

/// Reads a message; none where the server has closed the pipe.
fn read(input: &mut impl Read, buffer: &mut Vec<u8>) -> Result<Option<Message<'static>>, String> {
    let mut length = [0; 4];
    if let Err(error) = input.read_exact(&mut length) {
        return if error.kind() == std::io::ErrorKind::UnexpectedEof { Ok(None) } else { Err(error.to_string()) };
    }
    buffer.resize(u32::from_le_bytes(length) as usize, 0);
    input.read_exact(buffer).map_err(|error| error.to_string())?;
    let message = postcard::from_bytes(buffer).map_err(|error| error.to_string())?;
    buffer.clear();
    buffer.shrink_to(1 << 20);
    Ok(Some(message))
}
