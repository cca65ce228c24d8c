//! The CUDA layer below the operations, against the emulated device: the same code, calls and libraries' names as on a
//! card. Each case runs in a process of its own, since a process can load one driver only.
//!
//! A main function of its own: `cargo test --features cuda --test cuda_driver -- [FILTER]`.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a test program")]

#[path = "cuda_driver/finding.rs"]
mod finding;
#[path = "cuda_driver/memory.rs"]
mod memory;
mod stand_in;
#[path = "cuda_driver/sweep.rs"]
mod sweep;
#[path = "cuda_driver/work.rs"]
mod work;

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use manylora_kernels::cuda::{BLAS_VARIABLE, DRIVER_VARIABLE};
use stand_in::Build;

/// Says to a child which case it is.
const CASE_VARIABLE: &str = "MANYLORA_CUDA_CASE";

/// A case that takes longer hangs. The longest takes seconds.
const LIMIT: Duration = Duration::from_secs(300);

type Environment = &'static [(&'static str, &'static str)];

/// One function, in one kind of process.
struct Case {
    name: &'static str,
    run: fn(),
    /// `None`: without stand-ins.
    build: Option<Build>,
    environment: Environment,
}

/// The kinds of device that ordinary cases run on.
const KINDS: &[(&str, Build, Environment)] = &[
    ("deferred", Build::Plain, &[("EMU_SCHEDULE", "deferred")]),
    ("eager", Build::Plain, &[("EMU_SCHEDULE", "eager")]),
    ("background", Build::Plain, &[("EMU_SCHEDULE", "background")]),
    ("without-pools", Build::Plain, &[("EMU_ATTRIBUTE_115", "0")]),
    ("protected", Build::Plain, &[("EMU_PROTECT", "1")]),
    ("checked", Build::Checked, &[("EMU_SCHEDULE", "deferred")]),
];

const ON_EVERY_KIND: &[(&str, fn())] = &[
    ("memory::values_come_back", memory::values_come_back),
    ("memory::every_byte_is_counted", memory::every_byte_is_counted),
    ("memory::ranges_outside_are_errors", memory::ranges_outside_are_errors),
    ("memory::uploads_are_whole_and_wait_for_readers", memory::uploads_are_whole_and_wait_for_readers),
    ("memory::loader_threads_share_an_uploader", memory::loader_threads_share_an_uploader),
    ("memory::steps_follow_each_other", memory::steps_follow_each_other),
    ("work::kernels_take_their_arguments", work::kernels_take_their_arguments),
    ("work::every_kernel_has_its_list", work::every_kernel_has_its_list),
    ("work::time_is_measured", work::time_is_measured),
    ("work::recorded_steps_replay", work::recorded_steps_replay),
    ("work::recording_always_ends", work::recording_always_ends),
    ("work::products_are_right", work::products_are_right),
    ("work::threads_bind_themselves", work::threads_bind_themselves),
    ("work::any_order_of_dropping", work::any_order_of_dropping),
];

#[rustfmt::skip]
const ON_ONE_KIND: &[Case] = &[
    Case { name: "finding::no_driver", run: finding::no_driver, build: None, environment: &[] },
    Case { name: "finding::no_such_file", run: finding::no_such_file, build: None, environment: &[(DRIVER_VARIABLE, "/no/such/libcuda.so")] },
    Case { name: "finding::not_a_library", run: finding::not_a_library, build: None, environment: &[(DRIVER_VARIABLE, file!())] },
    Case { name: "finding::the_stand_in", run: finding::the_stand_in, build: Some(Build::Plain), environment: &[] },
    Case { name: "finding::no_card", run: finding::no_card, build: Some(Build::Plain), environment: &[("EMU_DEVICES", "0")] },
    Case { name: "finding::a_card_too_old", run: finding::a_card_too_old, build: Some(Build::Plain), environment: &[("EMU_ATTRIBUTE_75", "7"), ("EMU_ATTRIBUTE_76", "5")] },
    Case { name: "finding::a_driver_too_old", run: finding::a_driver_too_old, build: Some(Build::Plain), environment: &[("EMU_DRIVER_VERSION", "11080")] },
    Case { name: "finding::no_blas_there", run: finding::no_blas_there, build: Some(Build::Plain), environment: &[(BLAS_VARIABLE, "/no/such/libcublasLt.so")] },
    Case { name: "finding::blas_in_a_folder", run: finding::blas_in_a_folder, build: Some(Build::Plain), environment: &[(BLAS_VARIABLE, "")] },
    Case { name: "memory::out_of_memory", run: memory::out_of_memory, build: Some(Build::Plain), environment: &[("EMU_MEMORY", "16777216")] },
    Case { name: "work::a_lost_context_says_so", run: work::a_lost_context_says_so, build: Some(Build::Plain), environment: &[] },
    Case { name: "sweep::every_call_may_fail", run: sweep::every_call_may_fail, build: Some(Build::Plain), environment: &[("EMU_QUIET", "1")] },
    Case { name: "sweep::every_call_may_fail_at_once", run: sweep::every_call_may_fail, build: Some(Build::Plain), environment: &[("EMU_QUIET", "1"), ("EMU_SCHEDULE", "eager")] },
];

fn cases() -> Vec<(String, Case)> {
    let mut all = Vec::new();
    for &(name, run) in ON_EVERY_KIND {
        for &(kind, build, environment) in KINDS {
            all.push((format!("{name}::{kind}"), Case { name, run, build: Some(build), environment }));
        }
    }
    for case in ON_ONE_KIND {
        all.push((case.name.to_owned(), Case { ..*case }));
    }
    all
}

fn main() -> ExitCode {
    if let Ok(wanted) = std::env::var(CASE_VARIABLE) {
        let case = cases().into_iter().find(|(name, _)| *name == wanted);
        (case.unwrap().1.run)();
        return ExitCode::SUCCESS;
    }
    let mut arguments = std::env::args().skip(1);
    if std::env::args().any(|argument| argument == "--list") {
        for (name, _) in cases() {
            println!("{name}: test");
        }
        return ExitCode::SUCCESS;
    }
    let filter = arguments.find(|argument| !argument.starts_with('-')).unwrap_or_default();
    let required = std::env::var(stand_in::REQUIRE_VARIABLE).is_ok_and(|value| value == "1");
    let mut folders: Vec<(Build, Result<std::path::PathBuf, String>)> = Vec::new();
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for (name, case) in cases().into_iter().filter(|(name, _)| name.contains(&filter)) {
        let folder = case.build.map(|build| {
            if let Some((_, known)) = folders.iter().find(|(kind, _)| *kind == build) {
                return known.clone();
            }
            let built = stand_in::build(build);
            folders.push((build, built.clone()));
            built
        });
        match folder.transpose() {
            Err(reason) if required => {
                println!("test {name} ... FAILED: no emulated device: {reason}");
                failed += 1;
            }
            Err(reason) => {
                println!("test {name} ... skipped: no emulated device: {reason}");
                skipped += 1;
            }
            Ok(folder) => match run(&name, &case, folder.as_deref()) {
                Ok(()) => {
                    println!("test {name} ... ok");
                    passed += 1;
                }
                Err(output) => {
                    println!("test {name} ... FAILED\n{output}");
                    failed += 1;
                }
            },
        }
    }
    println!("\ntest result: {passed} passed; {failed} failed; {skipped} skipped");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs a case in a process of its own.
fn run(name: &str, case: &Case, folder: Option<&Path>) -> Result<(), String> {
    let said = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}.log", name.replace("::", "-")));
    let start = || -> std::io::Result<Child> {
        let log = File::create(&said)?;
        let mut child = Command::new(std::env::current_exe()?);
        child.env_remove(DRIVER_VARIABLE).env_remove(BLAS_VARIABLE);
        if let Some(folder) = folder {
            child.env(DRIVER_VARIABLE, folder.join("libcuda.so")).env(BLAS_VARIABLE, folder.join("libcublasLt.so"));
            child.env(finding::FOLDER_VARIABLE, folder);
        }
        child.env(CASE_VARIABLE, name).envs(case.environment.iter().copied());
        child.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn()
    };
    let mut child = start().map_err(|error| format!("it could not be started: {error}"))?;
    let started = Instant::now();
    let ended = loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => break status.to_string(),
            None if started.elapsed() > LIMIT => {
                let _ = child.kill();
                let _ = child.wait();
                break format!("it hung: no end after {} s", LIMIT.as_secs());
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    Err(format!("{ended}\n{}", std::fs::read_to_string(&said).unwrap_or_default()))
}
