//! The CUDA backend on the emulated device: right against the CPU backend, the same bits however steps are cut and mixed,
//! recorded or not, and as few launches as promised. Each case runs in a process of its own, which names the device.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a test program")]

#[path = "cuda_backend/cases.rs"]
mod cases;
mod stand_in;
#[path = "cuda_backend/toy.rs"]
mod toy;

use std::process::{Command, ExitCode};

use manylora_kernels::cuda::{BLAS_VARIABLE, DRIVER_VARIABLE};
use stand_in::Build;

/// Says to a child which case it is.
const CASE_VARIABLE: &str = "MANYLORA_CUDA_CASE";

type Environment = &'static [(&'static str, &'static str)];

/// The kinds of device that cases run on.
const KINDS: &[(&str, Build, Environment)] = &[
    ("deferred", Build::Plain, &[("EMU_SCHEDULE", "deferred")]),
    ("eager", Build::Plain, &[("EMU_SCHEDULE", "eager"), ("EMU_ORDER", "1")]),
    ("checked", Build::Checked, &[("EMU_SCHEDULE", "background"), ("EMU_ORDER", "2"), ("EMU_SEED", "5")]),
];

const CASES: &[(&str, fn())] = &[
    ("linear_agrees_with_float64", cases::linear_agrees_with_float64),
    ("steps_agree_with_the_cpu", cases::steps_agree_with_the_cpu),
    ("half_precision_agrees_with_the_cpu", cases::half_precision_agrees_with_the_cpu),
    ("rows_do_not_depend_on_their_neighbours", cases::rows_do_not_depend_on_their_neighbours),
    ("recorded_steps_are_the_same", cases::recorded_steps_are_the_same),
    ("launches_do_not_grow_with_adapters", cases::launches_do_not_grow_with_adapters),
    ("adapters_come_and_go", cases::adapters_come_and_go),
    ("bytes_are_what_was_said", cases::bytes_are_what_was_said),
    ("failures_come_out", cases::failures_come_out),
    ("what_does_not_fit_is_refused", cases::what_does_not_fit_is_refused),
];

fn main() -> ExitCode {
    let all = || {
        let kinds = |(name, run): &(&'static str, fn())| {
            let (name, run) = (*name, *run);
            KINDS.iter().map(move |&(kind, build, environment)| (format!("{name}::{kind}"), run, build, environment))
        };
        CASES.iter().flat_map(kinds)
    };
    if let Ok(wanted) = std::env::var(CASE_VARIABLE) {
        let case = all().find(|case| case.0 == wanted);
        (case.unwrap().1)();
        return ExitCode::SUCCESS;
    }
    if std::env::args().any(|argument| argument == "--list") {
        all().for_each(|case| println!("{}: test", case.0));
        return ExitCode::SUCCESS;
    }
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    let required = std::env::var(stand_in::REQUIRE_VARIABLE).is_ok_and(|value| value == "1");
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    let mut folders = Vec::new();
    for (name, _, build, environment) in all().filter(|case| case.0.contains(&filter)) {
        let known = folders.iter().find(|(kind, _)| *kind == build).map(|(_, folder)| Result::clone(folder));
        let folder = known.unwrap_or_else(|| {
            let built = stand_in::build(build);
            folders.push((build, built.clone()));
            built
        });
        let folder = match folder {
            Ok(folder) => folder,
            Err(reason) if required => {
                println!("test {name} ... FAILED: no emulated device: {reason}");
                failed += 1;
                continue;
            }
            Err(reason) => {
                println!("test {name} ... skipped: no emulated device: {reason}");
                skipped += 1;
                continue;
            }
        };
        let output = Command::new(std::env::current_exe().unwrap())
            .env(DRIVER_VARIABLE, folder.join("libcuda.so"))
            .env(BLAS_VARIABLE, folder.join("libcublasLt.so"))
            .env(CASE_VARIABLE, &name)
            .envs(environment.iter().copied())
            .output()
            .unwrap();
        if output.status.success() {
            println!("test {name} ... ok");
            passed += 1;
        } else {
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            println!("test {name} ... FAILED ({})\n{}{}", output.status, text(&output.stdout), text(&output.stderr));
            failed += 1;
        }
    }
    println!("\ntest result: {passed} passed; {failed} failed; {skipped} skipped");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
