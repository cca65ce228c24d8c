//! The engine on the emulated device: what it generates, what it holds, how adapters come and go under running requests,
//! and what becomes of failures. Each case runs in a process of its own, since a process can load one driver only.
//!
//! A main function of its own: `cargo test --features manylora/cuda --test cuda_engine -- [FILTER]`.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a test program")]

#[path = "cuda_engine/choosing.rs"]
mod choosing;
mod common;
#[path = "cuda_engine/failing.rs"]
mod failing;
#[path = "cuda_engine/serving.rs"]
mod serving;
#[path = "../../manylora-kernels/tests/stand_in/mod.rs"]
mod stand_in;

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use manylora_kernels::cuda::{BLAS_VARIABLE, DRIVER_VARIABLE};
use stand_in::Build;

/// Says to a child which case it is.
const CASE_VARIABLE: &str = "MANYLORA_CUDA_CASE";
/// A case that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(300);

type Environment = &'static [(&'static str, &'static str)];

/// One function, in a process with a driver or without.
struct Case {
    name: &'static str,
    run: fn(),
    device: bool,
    environment: Environment,
}

/// Work is done when somebody waits for it, or at once.
const DEFERRED: Environment = &[("EMU_SCHEDULE", "deferred")];
const EAGER: Environment = &[("EMU_SCHEDULE", "eager")];
/// By a thread of its own, as on a card.
const BACKGROUND: Environment = &[("EMU_SCHEDULE", "background")];

#[rustfmt::skip]
const CASES: &[Case] = &[
    Case { name: "choosing::no_driver", run: choosing::no_driver, device: false, environment: &[] },
    Case { name: "choosing::automatic", run: choosing::automatic, device: true, environment: EAGER },
    Case { name: "choosing::no_card", run: choosing::no_card, device: true, environment: &[("EMU_DEVICES", "0")] },
    Case { name: "choosing::a_card_too_old", run: choosing::a_card_too_old, device: true, environment: &[("EMU_ATTRIBUTE_75", "7"), ("EMU_ATTRIBUTE_76", "5")] },
    Case { name: "choosing::a_driver_too_old", run: choosing::a_driver_too_old, device: true, environment: &[("EMU_DRIVER_VERSION", "11080")] },
    Case { name: "choosing::too_little_memory", run: choosing::too_little_memory, device: true, environment: &[("EMU_MEMORY", "4194304")] },
    Case { name: "choosing::memory_of_others", run: choosing::memory_of_others, device: true, environment: &[] },
    Case { name: "choosing::what_a_card_does_not_do", run: choosing::what_a_card_does_not_do, device: true, environment: &[] },
    Case { name: "serving::greedy_agrees_with_the_processor", run: serving::greedy_agrees_with_the_processor, device: true, environment: EAGER },
    Case { name: "serving::solo_equals_batched", run: serving::solo_equals_batched, device: true, environment: DEFERRED },
    Case { name: "serving::held_bytes_are_those_told", run: serving::held_bytes_are_those_told, device: true, environment: EAGER },
    Case { name: "serving::default_division", run: serving::default_division, device: true, environment: EAGER },
    Case { name: "serving::a_29_slots_are_clean", run: serving::a_29_slots_are_clean, device: true, environment: BACKGROUND },
    Case { name: "serving::a_36_every_ordering_of_one_batch", run: serving::a_36_every_ordering_of_one_batch, device: true, environment: DEFERRED },
    Case { name: "serving::a_37_base_is_neutral", run: serving::a_37_base_is_neutral, device: true, environment: EAGER },
    Case { name: "serving::adapters_come_and_go_under_running_requests", run: serving::adapters_come_and_go_under_running_requests, device: true, environment: BACKGROUND },
    Case { name: "serving::adapters_from_memory", run: serving::adapters_from_memory, device: true, environment: BACKGROUND },
    Case { name: "failing::every_function_in_turn", run: failing::every_function_in_turn, device: true, environment: &[("EMU_QUIET", "1"), ("EMU_SCHEDULE", "background")] },
    Case { name: "failing::aborts_and_shutdown", run: failing::aborts_and_shutdown, device: true, environment: BACKGROUND },
];

fn main() -> ExitCode {
    if let Ok(wanted) = std::env::var(CASE_VARIABLE) {
        let case = CASES.iter().find(|case| case.name == wanted);
        (case.unwrap().run)();
        return ExitCode::SUCCESS;
    }
    if std::env::args().any(|argument| argument == "--list") {
        CASES.iter().for_each(|case| println!("{}: test", case.name));
        return ExitCode::SUCCESS;
    }
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    let required = std::env::var(stand_in::REQUIRE_VARIABLE).is_ok_and(|value| value == "1");
    let folder = match stand_in::build(Build::Plain) {
        Ok(folder) => folder,
        Err(reason) => {
            println!("test result: all skipped: no emulated device: {reason}");
            return if required { ExitCode::FAILURE } else { ExitCode::SUCCESS };
        }
    };
    let (mut passed, mut failed) = (0, 0);
    for case in CASES.iter().filter(|case| case.name.contains(&filter)) {
        let started = Instant::now();
        let result = run(case, &folder);
        let seconds = started.elapsed().as_secs_f64();
        match result {
            Ok(said) => {
                println!("{said}test {} ... ok ({seconds:.1} s)", case.name);
                passed += 1;
            }
            Err(output) => {
                println!("test {} ... FAILED ({seconds:.1} s)\n{output}", case.name);
                failed += 1;
            }
        }
    }
    println!("\ntest result: {passed} passed; {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs a case in a process of its own; what it said.
fn run(case: &Case, folder: &Path) -> Result<String, String> {
    let said = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}.log", case.name.replace("::", "-")));
    let start = || -> std::io::Result<Child> {
        let log = File::create(&said)?;
        let mut child = Command::new(std::env::current_exe()?);
        child.env_remove(DRIVER_VARIABLE).env_remove(BLAS_VARIABLE);
        if case.device {
            child.env(DRIVER_VARIABLE, folder.join("libcuda.so")).env(BLAS_VARIABLE, folder.join("libcublasLt.so"));
        }
        child.env(CASE_VARIABLE, case.name).envs(case.environment.iter().copied());
        child.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn()
    };
    let text = || std::fs::read_to_string(&said).unwrap_or_default();
    let mut child = start().map_err(|error| format!("it could not be started: {error}"))?;
    let started = Instant::now();
    loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) if status.success() => return Ok(text()),
            Some(status) => return Err(format!("{status}\n{}", text())),
            None if started.elapsed() > LIMIT => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("it hung: no end after {} s\n{}", LIMIT.as_secs(), text()));
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}
