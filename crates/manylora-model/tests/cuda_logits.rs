//! The oracle's models on the emulated device, end to end: every base, every adapter, adapters composed and in turn, and
//! sequences alone and together. Each case runs in a process of its own, which names the device.
//!
//! A main function of its own: `cargo test --features cuda --test cuda_logits -- [FILTER] [--nocapture]`; `--deep` adds
//! the checker of memory accesses and other orders of threads.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a test program")]

#[path = "cuda_logits/cases.rs"]
mod cases;
mod harness;
#[path = "../../manylora-kernels/tests/stand_in/mod.rs"]
mod stand_in;
#[path = "cuda_logits/together.rs"]
mod together;

use std::process::ExitCode;

use harness::BASES;
use manylora_kernels::StorageType;
use manylora_kernels::cuda::ProductChoice;
use stand_in::cases::{Case, Environment};
use stand_in::{Build, StandIn, on_card};

/// The base that cards cannot take.
const ODD: &str = "llama-odd";

const DEFERRED: (Build, Environment) = (Build::Plain, &[("EMU_SCHEDULE", "deferred")]);
const EAGER: (Build, Environment) = (Build::Plain, &[("EMU_SCHEDULE", "eager"), ("EMU_ORDER", "1")]);
const CHECKED: (Build, Environment) =
    (Build::Checked, &[("EMU_SCHEDULE", "background"), ("EMU_ORDER", "2"), ("EMU_SEED", "5")]);

fn case(name: String, (build, environment): (Build, Environment), run: impl Fn() + Sync + 'static) -> Case {
    let run = move || {
        run();
        StandIn::get().assert_nothing_held();
    };
    Case { name, run: Box::new(run), build: Some(build), environment }
}

fn main() -> ExitCode {
    let regular = || BASES.into_iter().filter(|base| *base != ODD);
    let mut all = vec![case(format!("what_does_not_fit_is_refused::{ODD}"), DEFERRED, || cases::refused(ODD))];
    for base in regular() {
        all.push(case(format!("a_43_error_is_within_twice_that_of_peft::{base}"), DEFERRED, || {
            cases::base_and_alpha(base, cases::library());
        }));
        all.push(case(format!("a_43_error_with_own_products::{base}"), EAGER, || {
            cases::base_and_alpha(base, ProductChoice::Own);
        }));
        all.push(case(format!("every_adapter_equals_the_oracle::{base}"), EAGER, || cases::every_adapter(base)));
        all.push(case(format!("solo_equals_batched::{base}"), DEFERRED, || {
            together::solo_equals_batched(base, StorageType::Bf16, ProductChoice::Library);
        }));
        all.push(case(format!("solo_equals_batched_with_own_products::{base}"), DEFERRED, || {
            together::solo_equals_batched(base, StorageType::Bf16, ProductChoice::Own);
        }));
    }
    all.push(case("composition_equals_the_sum_of_deltas".to_owned(), DEFERRED, cases::composition));
    all.push(case("a_29_slots_keep_nothing".to_owned(), DEFERRED, cases::slots_keep_nothing));
    all.push(case("solo_equals_batched_in_half_precision".to_owned(), EAGER, || {
        let products = if on_card() { ProductChoice::Own } else { ProductChoice::Library };
        together::solo_equals_batched("qwen2", StorageType::F16, products);
    }));
    if stand_in::cases::deep() {
        for base in regular() {
            for (kind, device) in [("eager", EAGER), ("checked", CHECKED)] {
                all.push(case(format!("solo_equals_batched::{base}::{kind}"), device, || {
                    together::solo_equals_batched(base, StorageType::Bf16, ProductChoice::Own);
                }));
            }
        }
    }
    stand_in::cases::run_on_cards(all, |name| {
        if name.ends_with("::eager") || name.ends_with("::checked") {
            Err("is of the emulated device")
        } else if name.starts_with("solo_equals_batched::") {
            Err("compares bits, of which cuBLASLt promises none; it runs with own products")
        } else {
            Ok(())
        }
    })
}
