//! What the operating system forbids a handler process.
//!
//! After [`enter`] the process computes and talks over the pipes it already has: no file, socket, program or process can be
//! opened or started, whatever a fault of the JavaScript engine might let a handler do.

use rustix::process::{Resource, Rlimit, setrlimit};
use seccompiler::{SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch};
use std::collections::BTreeMap;

/// Address space besides JavaScript memory: program, libraries, stacks, allocator arenas, documents in transit.
const ADDRESS_SPACE: u64 = 1 << 30;

/// Bounds memory and leaves no core dumps.
pub fn limit_memory(memory_limit: usize) {
    let both = |limit: u64| Rlimit { current: Some(limit), maximum: Some(limit) };
    // A lower limit that is already in force stays: it cannot be raised, and needs not.
    let _ = setrlimit(Resource::Core, both(0));
    let _ = setrlimit(Resource::As, both(ADDRESS_SPACE + 4 * memory_limit as u64));
}

/// Forbids every system call that computing, waiting and talking over open pipes do not need.
///
/// They fail with `EPERM` instead of killing the process: a C library may try some and do without.
pub fn enter() -> Result<(), String> {
    let Ok(architecture) = TargetArch::try_from(std::env::consts::ARCH) else {
        return Err(format!("no system call filter for {}", std::env::consts::ARCH));
    };
    let program = program(architecture).map_err(|error| error.to_string())?;
    seccompiler::apply_filter_all_threads(&program).map_err(|error| error.to_string())
}

fn program(architecture: TargetArch) -> Result<seccompiler::BpfProgram, seccompiler::BackendError> {
    let mut rules = ALLOWED.iter().map(|call| (*call, Vec::new())).collect::<BTreeMap<_, _>>();
    // The process ends itself by a signal, and may send one to nobody else.
    let own = u64::from(std::process::id());
    for call in [libc::SYS_kill, libc::SYS_tgkill] {
        let to_itself = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, own)?;
        rules.insert(call, vec![SeccompRule::new(vec![to_itself])?]);
    }
    SeccompFilter::new(rules, SeccompAction::Errno(libc::EPERM as u32), SeccompAction::Allow, architecture)?.try_into()
}

/// What is allowed to everybody; no call here opens anything.
const ALLOWED: &[i64] = &[
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_lseek,
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_futex,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_getrandom,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_gettid,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_membarrier,
    libc::SYS_rseq,
    libc::SYS_set_robust_list,
    libc::SYS_exit,
    libc::SYS_exit_group,
];
