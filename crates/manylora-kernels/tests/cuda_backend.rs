//! The CUDA backend on the emulated device: right against the CPU backend, the same bits however steps are cut and mixed,
//! recorded or not, and as few launches as promised. Each case runs in a process of its own, which names the device.
//!
//! A main function of its own: `cargo test --features cuda --test cuda_backend -- [FILTER] [--deep]`.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a test program")]

#[path = "cuda_backend/cases.rs"]
mod cases;
#[path = "cuda_backend/sharing.rs"]
mod sharing;
mod stand_in;
#[path = "cuda_backend/sweep.rs"]
mod sweep;
#[path = "cuda_backend/toy.rs"]
mod toy;

use std::process::ExitCode;

use manylora_kernels::cuda::BLAS_VARIABLE;
use stand_in::cases::{Case, Environment, deep};
use stand_in::{Build, StandIn, on_card};

/// The kinds of device that cases run on.
const KINDS: &[(&str, Build, Environment)] = &[
    ("deferred", Build::Plain, &[("EMU_SCHEDULE", "deferred")]),
    ("eager", Build::Plain, &[("EMU_SCHEDULE", "eager"), ("EMU_ORDER", "1")]),
    ("checked", Build::Checked, &[("EMU_SCHEDULE", "background"), ("EMU_ORDER", "2"), ("EMU_SEED", "5")]),
];

/// A card is of one kind.
const CARD: &[(&str, Build, Environment)] = &[("card", Build::Plain, &[])];

const CASES: &[(&str, fn())] = &[
    ("linear_agrees_with_float64", cases::linear_agrees_with_float64),
    ("steps_agree_with_the_cpu", cases::steps_agree_with_the_cpu),
    ("half_precision_agrees_with_the_cpu", cases::half_precision_agrees_with_the_cpu),
    ("rows_do_not_depend_on_their_neighbours", cases::rows_do_not_depend_on_their_neighbours),
    ("recorded_steps_are_the_same", cases::recorded_steps_are_the_same),
    ("launches_do_not_grow_with_adapters", cases::launches_do_not_grow_with_adapters),
    ("nothing_but_launches_is_recorded", cases::nothing_but_launches_is_recorded),
    ("the_largest_are_listed", cases::the_largest_are_listed),
    ("adapters_come_and_go", cases::adapters_come_and_go),
    ("bytes_are_what_was_said", cases::bytes_are_what_was_said),
    ("failures_come_out", cases::failures_come_out),
    ("steps_run_without_memory_for_graphs", cases::steps_run_without_memory_for_graphs),
    ("a_move_that_fails_ends_the_step", cases::a_move_that_fails_ends_the_step),
    ("blocks_and_adapters_share_memory", sharing::blocks_and_adapters_share_memory),
    ("blocks_hold_nothing_of_adapters", sharing::blocks_hold_nothing_of_adapters),
    ("small_holes_are_closed_piece_by_piece", sharing::small_holes_are_closed_piece_by_piece),
    ("blocks_that_cannot_be_moved_end_the_step", sharing::blocks_that_cannot_be_moved_end_the_step),
    ("caches_that_do_not_fit_are_refused", sharing::caches_that_do_not_fit_are_refused),
    ("what_does_not_fit_is_refused", cases::what_does_not_fit_is_refused),
];

/// Cases that take a minute under the checker, whose operations others check in seconds.
const LONG: &[&str] = &["recorded_steps_are_the_same::checked", "blocks_and_adapters_share_memory::checked"];

fn case(name: String, run: fn(), build: Build, environment: Environment) -> Case {
    let run = move || {
        run();
        StandIn::get().assert_nothing_held();
    };
    Case { name, run: Box::new(run), build: Some(build), environment }
}

fn main() -> ExitCode {
    let kinds = |&(name, run): &(&'static str, fn())| {
        let on = move |&(kind, build, environment): &_| case(format!("{name}::{kind}"), run, build, environment);
        (if on_card() { CARD } else { KINDS }).iter().map(on)
    };
    let mut all: Vec<Case> = CASES.iter().flat_map(kinds).collect();
    all.push(case(
        "rows_do_not_depend_on_their_neighbours_with_own_products".to_owned(),
        cases::rows_do_not_depend_on_their_neighbours_with_own_products,
        Build::Plain,
        &[("EMU_SCHEDULE", "eager"), ("EMU_ORDER", "1")],
    ));
    all.push(case(
        "steps_run_without_cublaslt".to_owned(),
        cases::steps_run_without_cublaslt,
        Build::Plain,
        &[(BLAS_VARIABLE, ""), ("EMU_SCHEDULE", "deferred")],
    ));
    // What is not given back because that was made to fail stays.
    all.push(Case {
        name: "every_call_of_moving_may_fail".to_owned(),
        run: Box::new(sweep::every_call_of_moving_may_fail),
        build: Some(Build::Plain),
        environment: &[("EMU_QUIET", "1"), ("EMU_SCHEDULE", "background")],
    });
    all.push(case(
        "adapters_that_stay_end_the_step".to_owned(),
        sweep::adapters_that_stay_end_the_step,
        Build::Plain,
        &[],
    ));
    let all = all.into_iter().filter(|case| deep() || !LONG.contains(&case.name.as_str()));
    stand_in::cases::run_on_cards(all.collect(), |name| match name {
        "failures_come_out::card"
        | "steps_run_without_memory_for_graphs::card"
        | "a_move_that_fails_ends_the_step::card"
        | "blocks_that_cannot_be_moved_end_the_step::card"
        | "every_call_of_moving_may_fail" => Err("makes calls of the driver fail"),
        "launches_do_not_grow_with_adapters::card" | "nothing_but_launches_is_recorded::card" => Err("counts launches"),
        "rows_do_not_depend_on_their_neighbours::card" => {
            Err("compares bits, of which cuBLASLt promises none; it runs with own products")
        }
        "steps_run_without_cublaslt" => Err("cuBLASLt may be there"),
        _ => Ok(()),
    })
}
