//! Handler processes that die, stop, or are asked for much at once.

use super::*;
use rustix::process::{Pid, Signal, kill_process};

const ADD: &str = "export const commands = {
    add: { creates: 'if-missing', handle(state, request) { state.n = (state.n ?? 0) + request; return state.n; } },
    work: { creates: 'if-missing', handle(state, request) { let x = 0; for (let i = 0; i < request; i++) x += i % 7; return x; } },
    spin: { handle() { 'a'.repeat(4e5).indexOf('a'.repeat(2e5) + 'b'); } },
};";

/// The living handler processes of a folder, by what they are called in the list of processes.
fn processes(folder: &Folder) -> Vec<Pid> {
    let label = folder.path().display().to_string();
    let entries = std::fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let is_ours = |pid: &i32| std::fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.split('\0').nth(2) == Some(&label));
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(is_ours).filter_map(Pid::from_raw).collect()
}

fn signal(pids: &[Pid], signal: Signal) {
    for pid in pids {
        // One may have come to its end by itself.
        let _ = kill_process(*pid, signal);
    }
}

/// Kills the handler processes of a folder.
pub fn kill_all(folder: &Folder) {
    signal(&processes(folder), Signal::KILL);
}

async fn until(condition: impl Fn() -> bool) {
    while !condition() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The CPU time that a process has used, in the system's ticks of 10 ms; none where it is gone.
fn cpu_ticks(pid: Pid) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    stat.rsplit(')').next()?.split_whitespace().nth(11)?.parse().ok()
}

/// Waits until a process of the folder is busy, beyond what it used to load.
async fn until_busy(pid: Pid, before: Option<u64>) {
    until(|| cpu_ticks(pid) >= before.map(|before| before + 3)).await;
}

/// A batch that takes some tenths of a second, as `work`, with `add` before and after.
fn long_batch() -> Work {
    let mut commands = vec![("add", "1")];
    commands.extend([("work", "100000"); 200]);
    commands.push(("add", "1"));
    work(None, &commands)
}

fn assert_long_batch(outcomes: &[Outcome]) {
    assert_eq!(outcomes.len(), 202);
    assert_eq!((show(&outcomes[0]).as_str(), show(&outcomes[201]).as_str()), (r#"1 {"n":1}"#, r#"2 {"n":2}"#));
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Accepted { .. })), "{outcomes:?}");
}

async fn generous(source: &str) -> Module {
    Module::with(source, &Options { time_limit: Duration::from_secs(10), stall_limit: Duration::from_secs(3), ..options() }).await
}

#[tokio::test]
async fn a_process_that_is_killed_between_batches_is_not_missed() {
    let module = Module::new(ADD).await;
    for _ in 0..3 {
        assert_eq!(show(&module.run(&[("add", "1")]).await[0]), r#"1 {"n":1}"#);
        signal(&processes(&module.folder), Signal::KILL);
    }
}

#[tokio::test]
async fn a_batch_outlives_its_process() {
    let module = generous(ADD).await;
    let first = processes(&module.folder);
    let before = cpu_ticks(first[0]);
    let handlers = module.handlers.clone();
    let batch = tokio::spawn(async move { handlers.run(long_batch()).await.unwrap().outcomes });
    until_busy(first[0], before).await;
    signal(&first, Signal::KILL);
    assert_long_batch(&batch.await.unwrap());
    assert!(processes(&module.folder).iter().all(|pid| !first.contains(pid)));
}

#[tokio::test]
async fn a_batch_outlives_a_process_that_is_stopped() {
    let module = generous(ADD).await;
    let first = processes(&module.folder);
    let before = cpu_ticks(first[0]);
    let handlers = module.handlers.clone();
    let batch = tokio::spawn(async move { handlers.run(long_batch()).await.unwrap().outcomes });
    until_busy(first[0], before).await;
    signal(&first, Signal::STOP);
    assert_long_batch(&batch.await.unwrap());
}

#[tokio::test]
async fn a_command_that_crashes_its_process_is_found_out() {
    // What no handler can do by itself here: die. A command that works until someone kills its process stands for it.
    let module = generous(&ADD.replace("let x = 0;", "let x = 0; if (request === 0) while (true) {}")).await;
    let handlers = module.handlers.clone();
    let commands = [("add", "1"), ("add", "1"), ("work", "0"), ("add", "1")];
    let batch = tokio::spawn(async move { handlers.run(work(None, &commands)).await.unwrap().outcomes });
    while !batch.is_finished() {
        // Far more than loading takes: the endless command runs.
        let running: Vec<Pid> = processes(&module.folder).into_iter().filter(|pid| cpu_ticks(*pid) > Some(30)).collect();
        signal(&running, Signal::KILL);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let outcomes = batch.await.unwrap();
    let shown: Vec<String> = outcomes.iter().map(show).collect();
    assert_eq!(fault_kind(&outcomes[2]), Some(HandlerFaultKind::Crash), "{shown:?}");
    assert_eq!([&shown[0], &shown[1], &shown[3]], [r#"1 {"n":1}"#, r#"2 {"n":2}"#, r#"3 {"n":3}"#]);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_batches_at_once_keep_apart() {
    let module = Module::new(ADD).await;
    let batches = (0..64_u64).map(|number| {
        let handlers = module.handlers.clone();
        tokio::spawn(async move {
            let request = number.to_string();
            let mut commands = vec![("add", request.as_str()); 20];
            // Some of them lose their process on the way.
            if number % 16 == 5 {
                commands[10].0 = "spin";
            }
            (number, handlers.run(work(None, &commands)).await.unwrap().outcomes)
        })
    });
    for batch in batches.collect::<Vec<_>>() {
        let (number, outcomes) = batch.await.unwrap();
        let good: Vec<String> = outcomes.iter().filter(|outcome| fault_kind(outcome).is_none()).map(show).collect();
        let expected: Vec<String> = (1..=good.len() as u64).map(|times| format!(r#"{0} {{"n":{0}}}"#, times * number)).collect();
        assert_eq!(good, expected);
        assert_eq!(outcomes.len() - good.len(), usize::from(number % 16 == 5));
    }
}

#[tokio::test]
async fn a_large_batch_goes_through() {
    let module = Module::with(
        "export const commands = { put: { creates: 'if-missing', handle(state, request) { state.text = request; return request; } } };",
        &Options { time_limit: Duration::from_secs(5), ..options() },
    )
    .await;
    let text = format!("\"{}\"", "é".repeat(20_000));
    let outcomes = module.run(&vec![("put", text.as_str()); 200]).await;
    assert_eq!(outcomes.len(), 200);
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Accepted { response, .. } if response.as_str() == text)));
}

#[tokio::test]
async fn a_batch_that_is_given_up_leaves_no_confusion() {
    let module = generous(ADD).await;
    let first = processes(&module.folder)[0];
    let before = cpu_ticks(first);
    tokio::select! {
        _ = module.handlers.run(long_batch()) => panic!("the batch is too short for this test"),
        () = until_busy(first, before) => {}
    }
    assert_eq!(show(&module.run(&[("add", "5")]).await[0]), r#"5 {"n":5}"#);
}

#[tokio::test]
async fn processes_end_with_their_handlers() {
    let module = Module::new(ADD).await;
    assert_eq!(show(&module.run(&[("add", "5")]).await[0]), r#"5 {"n":5}"#);
    assert_eq!(processes(&module.folder).len(), 1);
    let Module { folder, handlers } = module;
    drop(handlers);
    until(|| processes(&folder).is_empty()).await;
}

#[tokio::test]
async fn a_process_can_open_nothing() {
    let module = Module::new(ADD).await;
    let pid = processes(&module.folder)[0].as_raw_nonzero();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    assert!(status.contains("Seccomp:\t2") && status.contains("NoNewPrivs:\t1"), "{status}");
    let environment = std::fs::read_to_string(format!("/proc/{pid}/environ")).unwrap();
    assert_eq!(environment, "TZ=UTC\0");
    assert_eq!(std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap(), Path::new("/"));
}
