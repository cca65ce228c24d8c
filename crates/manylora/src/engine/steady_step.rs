//! A steady decode step (plan, forward, greedy sampling, commit) allocates nothing and makes no system call.

#![expect(unsafe_code, reason = "an allocator that counts, and a filter that the kernel applies to system calls")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;

use manylora_core::SamplingParams;

use super::command::{Command, Order};
use super::handle::EngineHandle;
use super::startup::{Assembled, assemble};
use super::worker::Worker;
use crate::config::{DType, EngineConfig};
use crate::registry::AdapterSource;
use crate::request::GenerateRequest;
use crate::stream::RequestStream;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A worker driven by this thread, with six sequences on three adapters and the base, all decoding.
fn decoding(park_threads: bool) -> (Worker, EngineHandle, Vec<RequestStream>) {
    let oracle = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/oracle/llama");
    let mut config = EngineConfig::new(oracle.join("base"));
    config.dtype = DType::Float32;
    config.max_num_seqs = 8;
    config.kv_cache_memory_bytes = Some(8 << 20);
    config.num_threads = Some(2);
    config.park_threads = park_threads;
    let Assembled { shared, mut worker, jobs, .. } = assemble(config, &mut |_| {}).expect("the engine");
    let handle = EngineHandle { shared: Arc::new(shared) };
    let names = ["alpha", "beta", "rank5"];
    for name in names {
        let source = AdapterSource::directory(name, oracle.join("adapters").join(name));
        let (reply, answer) = sync_channel(1);
        let order = handle.shared.reader().expect("a reader").inspect(&source).expect("an adapter");
        worker.handle(Command::Shelve(vec![Order { replies: vec![reply], ..order }]));
        // This thread is the loader, too.
        let job = jobs.try_recv().expect("the read is ordered");
        worker.handle(handle.shared.reader().expect("a reader").carry_out(job));
        answer.try_recv().expect("an answer").expect("registered");
    }
    let params = SamplingParams {
        temperature: 0.0,
        max_tokens: Some(400),
        ignore_eos: true,
        detokenize: false,
        ..SamplingParams::default()
    };
    let requests = (0..6)
        .map(|row| {
            let request = GenerateRequest::tokens(vec![5 + row as u32; 9]).params(params.clone());
            if row < 4 { request.adapter(names[row % 3]) } else { request }
        })
        .collect();
    let streams = handle.submit_all(requests, false).expect("queued");
    assert!(worker.take_commands());
    for _ in 0..40 {
        assert!(worker.step().expect("a step"));
    }
    (worker, handle, streams)
}

#[test]
fn a_steady_step_allocates_nothing() {
    let (mut worker, _handle, streams) = decoding(true);
    let before = ALLOCATIONS.get();
    for _ in 0..200 {
        assert!(worker.step().expect("a step"));
    }
    assert_eq!(ALLOCATIONS.get() - before, 0, "allocations in 200 steady steps");
    drop(streams);
}

/// Runs the steps in a child process under a seccomp filter that kills it at the first system call, clocks (which are none
/// where the kernel offers them to user space) and the exit excepted. Parking is off: a thread that waits spins.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[test]
fn a_steady_step_makes_no_system_call() {
    const CHILD: &str = "MANYLORA_TEST_FILTERED_CHILD";
    if std::env::var_os(CHILD).is_some() {
        let (mut worker, _handle, _streams) = decoding(false);
        // The threads that loaded the model are not the engine's; they need a moment to fall asleep.
        std::thread::sleep(std::time::Duration::from_millis(500));
        filter_system_calls();
        let ran = (0..200).all(|_| worker.step().unwrap_or(false));
        // SAFETY: ends the process at once, which the filter allows.
        unsafe { libc::_exit(if ran { 42 } else { 1 }) };
    }
    let this = std::env::current_exe().expect("this test");
    let name = "engine::steady_step::a_steady_step_makes_no_system_call";
    let status = std::process::Command::new(this)
        .args([name, "--exact", "--nocapture"])
        .env(CHILD, "1")
        .stdout(std::process::Stdio::null())
        .status()
        .expect("the child runs");
    assert_eq!(status.code(), Some(42), "the child ended with {status}: SIGSYS is a system call in a step");
}

/// From here on every thread of this process is killed at any system call but clock_gettime and exit_group.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn filter_system_calls() {
    const LOAD_NUMBER: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JUMP_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let mut program = [
        libc::sock_filter { code: LOAD_NUMBER, jt: 0, jf: 0, k: 0 },
        libc::sock_filter { code: JUMP_EQUAL, jt: 2, jf: 0, k: libc::SYS_exit_group as u32 },
        libc::sock_filter { code: JUMP_EQUAL, jt: 1, jf: 0, k: libc::SYS_clock_gettime as u32 },
        libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: libc::SECCOMP_RET_KILL_PROCESS },
        libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW },
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: plain integer arguments.
    let privileges = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(privileges, 0);
    // SAFETY: `filter` points to a program that lives until the call returns; the kernel copies it.
    let installed = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_TSYNC,
            std::ptr::from_ref(&filter),
        )
    };
    assert_eq!(installed, 0, "seccomp filters can be set for all threads");
}
