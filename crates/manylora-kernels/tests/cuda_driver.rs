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

use std::process::ExitCode;

use manylora_kernels::cuda::{BLAS_VARIABLE, BlasLibrary, DRIVER_VARIABLE};
use stand_in::cases::{Case, Environment};
use stand_in::{Build, on_card};

/// The kinds of device that ordinary cases run on.
const KINDS: &[(&str, Build, Environment)] = &[
    ("deferred", Build::Plain, &[("EMU_SCHEDULE", "deferred")]),
    ("eager", Build::Plain, &[("EMU_SCHEDULE", "eager")]),
    ("background", Build::Plain, &[("EMU_SCHEDULE", "background")]),
    ("without-pools", Build::Plain, &[("EMU_ATTRIBUTE_115", "0")]),
    ("protected", Build::Plain, &[("EMU_PROTECT", "1")]),
    ("checked", Build::Checked, &[("EMU_SCHEDULE", "deferred")]),
];

/// A card is of one kind.
const CARD: &[(&str, Build, Environment)] = &[("card", Build::Plain, &[])];

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

type OneKind = (&'static str, fn(), Option<Build>, Environment);

#[rustfmt::skip]
const ON_ONE_KIND: &[OneKind] = &[
    ("finding::no_driver", finding::no_driver, None, &[]),
    ("finding::no_such_file", finding::no_such_file, None, &[(DRIVER_VARIABLE, "/no/such/libcuda.so")]),
    ("finding::not_a_library", finding::not_a_library, None, &[(DRIVER_VARIABLE, file!())]),
    ("finding::the_stand_in", finding::the_stand_in, Some(Build::Plain), &[]),
    ("finding::no_card", finding::no_card, Some(Build::Plain), &[("EMU_DEVICES", "0")]),
    ("finding::a_card_too_old", finding::a_card_too_old, Some(Build::Plain), &[("EMU_ATTRIBUTE_75", "7"), ("EMU_ATTRIBUTE_76", "5")]),
    ("finding::the_last_driver_before", finding::the_last_driver_before, Some(Build::Plain), &[("EMU_DRIVER_VERSION", "12090")]),
    ("finding::the_first_driver_that_does", finding::the_first_driver_that_does, Some(Build::Plain), &[("EMU_DRIVER_VERSION", "13000")]),
    ("finding::a_driver_too_old", finding::a_driver_too_old, Some(Build::Plain), &[("EMU_DRIVER_VERSION", "11080")]),
    ("finding::no_blas_there", finding::no_blas_there, Some(Build::Plain), &[(BLAS_VARIABLE, "/no/such/libcublasLt.so")]),
    ("finding::blas_in_a_folder", finding::blas_in_a_folder, Some(Build::Plain), &[(BLAS_VARIABLE, "")]),
    ("memory::out_of_memory", memory::out_of_memory, Some(Build::Plain), &[("EMU_MEMORY", "16777216")]),
    ("work::a_lost_context_says_so", work::a_lost_context_says_so, Some(Build::Plain), &[]),
    ("sweep::every_call_may_fail", sweep::every_call_may_fail, Some(Build::Plain), &[("EMU_QUIET", "1")]),
    ("sweep::every_call_may_fail_at_once", sweep::every_call_may_fail, Some(Build::Plain), &[("EMU_QUIET", "1"), ("EMU_SCHEDULE", "eager")]),
];

fn main() -> ExitCode {
    let case = |name: String, run: fn(), build, environment| Case { name, run: Box::new(run), build, environment };
    let on_every_kind = ON_EVERY_KIND.iter().flat_map(|&(name, run)| {
        (if on_card() { CARD } else { KINDS })
            .iter()
            .map(move |&(kind, build, environment)| case(format!("{name}::{kind}"), run, Some(build), environment))
    });
    let on_one_kind =
        ON_ONE_KIND.iter().map(|&(name, run, build, environment)| case(name.to_owned(), run, build, environment));
    stand_in::cases::run_on_cards(on_every_kind.chain(on_one_kind).collect(), |name| match name {
        "work::recorded_steps_replay::card" => Err("counts launches"),
        "work::products_are_right::card" if BlasLibrary::load(&[]).is_err() => Err("cuBLASLt is not there"),
        "memory::every_byte_is_counted::card" => Err("compares free memory, which others use too"),
        name if name.ends_with("::card") => Ok(()),
        _ => Err("is about what the emulated device is told to lack"),
    })
}
