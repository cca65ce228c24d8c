//! The engine on the emulated device, or on a card: what it generates, what it holds, how adapters come and go under running requests,
//! and what becomes of failures. Each case runs in a process of its own, since a process can load one driver only.
//!
//! A main function of its own: `cargo test --features manylora/cuda --test cuda_engine -- [FILTER]`.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a test program")]

#[path = "cuda_engine/choosing.rs"]
mod choosing;
mod common;
#[path = "cuda_engine/failing.rs"]
mod failing;
#[path = "cuda_engine/sampling.rs"]
mod sampling;
#[path = "cuda_engine/serving.rs"]
mod serving;
#[path = "../../manylora-kernels/tests/stand_in/mod.rs"]
mod stand_in;

use std::process::ExitCode;

use manylora::EngineConfig;
use stand_in::Build;
use stand_in::cases::{Case, Environment};

/// Work is done when somebody waits for it, or at once.
const DEFERRED: Environment = &[("EMU_SCHEDULE", "deferred")];
const EAGER: Environment = &[("EMU_SCHEDULE", "eager")];
/// By a thread of its own, as on a card.
const BACKGROUND: Environment = &[("EMU_SCHEDULE", "background")];

/// A card is shared with the other cases' processes, and with whatever else runs on it: of a small part of it, each takes what
/// its engine is told to. (The emulated device is each process's own.)
fn leave_room_for_others(config: &mut EngineConfig) {
    if stand_in::on_card() {
        config.gpu_memory_utilization = 0.25;
    }
}

type Row = (&'static str, fn(), Option<Build>, Environment);

#[rustfmt::skip]
const CASES: &[Row] = &[
    ("choosing::no_driver", choosing::no_driver, None, &[]),
    ("choosing::automatic", choosing::automatic, Some(Build::Plain), EAGER),
    ("choosing::no_card", choosing::no_card, Some(Build::Plain), &[("EMU_DEVICES", "0")]),
    ("choosing::a_card_too_old", choosing::a_card_too_old, Some(Build::Plain), &[("EMU_ATTRIBUTE_75", "7"), ("EMU_ATTRIBUTE_76", "5")]),
    ("choosing::a_driver_too_old", choosing::a_driver_too_old, Some(Build::Plain), &[("EMU_DRIVER_VERSION", "11080")]),
    ("choosing::too_little_memory", choosing::too_little_memory, Some(Build::Plain), &[("EMU_MEMORY", "4194304")]),
    ("choosing::memory_of_others", choosing::memory_of_others, Some(Build::Plain), &[]),
    ("choosing::all_of_the_memory", choosing::all_of_the_memory, Some(Build::Plain), &[("EMU_MEMORY", "134217728")]),
    ("choosing::float16_stays_float16", choosing::float16_stays_float16, Some(Build::Plain), &[]),
    ("choosing::what_a_card_does_not_do", choosing::what_a_card_does_not_do, Some(Build::Plain), &[]),
    ("serving::greedy_agrees_with_the_processor", serving::greedy_agrees_with_the_processor, Some(Build::Plain), EAGER),
    ("serving::solo_equals_batched", serving::solo_equals_batched, Some(Build::Plain), DEFERRED),
    ("serving::one_algorithm_for_each_weight", serving::one_algorithm_for_each_weight, Some(Build::Plain), DEFERRED),
    ("serving::held_bytes_are_those_told", serving::held_bytes_are_those_told, Some(Build::Plain), EAGER),
    ("serving::default_sizes", serving::default_sizes, Some(Build::Plain), EAGER),
    ("serving::a_29_slots_are_clean", serving::a_29_slots_are_clean, Some(Build::Plain), BACKGROUND),
    ("serving::a_36_every_ordering_of_one_batch", serving::a_36_every_ordering_of_one_batch, Some(Build::Plain), DEFERRED),
    ("serving::a_37_base_is_neutral", serving::a_37_base_is_neutral, Some(Build::Plain), EAGER),
    ("serving::adapters_come_and_go_under_running_requests", serving::adapters_come_and_go_under_running_requests, Some(Build::Plain), BACKGROUND),
    ("serving::holes_keep_nothing_out", serving::holes_keep_nothing_out, Some(Build::Plain), BACKGROUND),
    ("serving::a_fleet_and_long_sequences_share_memory", serving::a_fleet_and_long_sequences_share_memory, Some(Build::Plain), BACKGROUND),
    ("serving::adapters_from_memory", serving::adapters_from_memory, Some(Build::Plain), BACKGROUND),
    ("sampling::lists_give_the_tokens_of_rows", sampling::lists_give_the_tokens_of_rows, Some(Build::Plain), BACKGROUND),
    ("sampling::ties_that_fill_a_list_are_read_from_rows", sampling::ties_that_fill_a_list_are_read_from_rows, Some(Build::Plain), DEFERRED),
    ("sampling::structured_output_is_masked_on_the_host", sampling::structured_output_is_masked_on_the_host, Some(Build::Plain), BACKGROUND),
    ("failing::every_function_in_turn", failing::every_function_in_turn, Some(Build::Plain), &[("EMU_QUIET", "1"), ("EMU_SCHEDULE", "background")]),
    ("failing::aborts_and_shutdown", failing::aborts_and_shutdown, Some(Build::Plain), BACKGROUND),
];

fn main() -> ExitCode {
    let case = |&(name, run, build, environment): &Row| {
        let (name, run) = (name.to_owned(), Box::new(run));
        Case { name, run, build, environment }
    };
    stand_in::cases::run_on_cards(CASES.iter().map(case).collect(), |name| match name {
        "choosing::no_driver" => Err("is about a machine without a driver"),
        "choosing::no_card"
        | "choosing::a_card_too_old"
        | "choosing::a_driver_too_old"
        | "choosing::too_little_memory" => Err("is about what the emulated device is told to lack"),
        "choosing::memory_of_others" => Err("takes a third of the device's memory"),
        "choosing::all_of_the_memory" => Err("is about all of the emulated device's memory"),
        "serving::default_sizes" => Err("measures memory that the other cases' processes take from a card"),
        "failing::every_function_in_turn" => Err("makes calls of the driver fail"),
        _ => Ok(()),
    })
}
