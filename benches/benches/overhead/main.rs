//! What the engine itself takes of a step: all that its thread does between the backend's calls, by phase, as the engine's
//! own clock tells it, with 256 streams that are read meanwhile.
//!
//! `cargo bench --bench overhead -- [--json FILE] [--tokenizer PATH] [--rounds N] [--windows N] [--only WORDS]`. The model is
//! next to nothing. Where its vocabulary is a real one, 50 MB of logits are written between two steps, so that bookkeeping
//! finds the caches as full of other things as it does beside a real model.

mod cases;
mod measure;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use manylora::Phase;
use manylora_benches::decode::median;
use serde_json::{Value, json};

use cases::{CASES, Case};
use measure::Windows;

pub(crate) struct Options {
    pub(crate) tokenizer: PathBuf,
    json: Option<PathBuf>,
    rounds: usize,
    pub(crate) windows: usize,
    only: Option<String>,
}

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, Box<dyn Error>> {
        let mut tokenizer = std::env::var_os("MANYLORA_SMOLLM2").map(PathBuf::from);
        let (mut json, mut rounds, mut windows, mut only) = (None, 3, 12, None);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("`{argument}` needs a value"));
            match argument.as_str() {
                "--json" => json = Some(value()?.into()),
                "--tokenizer" => tokenizer = Some(value()?.into()),
                "--rounds" => rounds = value()?.parse()?,
                "--windows" => windows = value()?.parse()?,
                "--only" => only = Some(value()?),
                // What cargo passes.
                "--bench" | "--test" => {}
                other => return Err(format!("unknown argument `{other}`").into()),
            }
        }
        if rounds < 1 || windows < 1 {
            return Err("`--rounds` and `--windows` must be at least 1".into());
        }
        let tokenizer = tokenizer
            .ok_or("give SmolLM2's `--tokenizer` (a GGUF file), or set MANYLORA_SMOLLM2 (`make data` prints it)")?;
        Ok(Self { tokenizer, json, rounds, windows, only })
    }
}

/// The phases that do not grow with the vocabulary: all of the engine's own but sampling.
fn is_bookkeeping(phase: Phase) -> bool {
    !matches!(phase, Phase::Forward | Phase::Sample)
}

fn bookkeeping(microseconds: &dyn Fn(Phase) -> f64) -> f64 {
    Phase::ALL.into_iter().filter(|&phase| is_bookkeeping(phase)).map(microseconds).sum()
}

/// One case over all rounds.
struct Outcome {
    case: &'static Case,
    windows: Windows,
    /// Bookkeeping of each round: its least disturbed windows.
    rounds: Vec<f64>,
}

fn main() -> ExitCode {
    manylora_benches::exit_code(run())
}

#[expect(clippy::print_stdout, reason = "a bench prints its results")]
fn run() -> Result<(), Box<dyn Error>> {
    let options = Options::parse(std::env::args().skip(1))?;
    let wanted = |case: &&Case| options.only.as_ref().is_none_or(|only| case.name.contains(only.as_str()));
    let mut results: Vec<Outcome> = CASES
        .iter()
        .filter(wanted)
        .map(|case| Outcome { case, windows: Windows::default(), rounds: Vec::new() })
        .collect();
    let mut machine = String::new();
    for _ in 0..options.rounds {
        for result in &mut results {
            let (described, windows) = measure::run(result.case, &options)?;
            machine = described;
            result.rounds.push(bookkeeping(&|phase| windows.undisturbed(phase)));
            result.windows.extend(windows);
        }
    }
    println!("{machine}; 256 running; microseconds per step, undisturbed (median)");
    print!("{:<44}", "");
    for phase in Phase::ALL {
        print!("{:>18}", phase.name());
    }
    println!("{:>12}", "own work");
    let mut told = Vec::new();
    for result in &results {
        print!("{:<44}", result.case.name);
        let windows = &result.windows;
        for phase in Phase::ALL {
            print!("{:>18}", format!("{:.1} ({:.1})", windows.undisturbed(phase), windows.median(phase)));
        }
        let own = median(&result.rounds);
        println!("{own:>12.1}");
        let phases = |of: &dyn Fn(Phase) -> f64| -> Value {
            Phase::ALL
                .into_iter()
                .map(|phase| (phase.name().to_owned(), json!(of(phase))))
                .collect::<serde_json::Map<_, _>>()
                .into()
        };
        told.push(json!({
            "case": result.case.name, "own_work_us": own, "own_work_us_of_rounds": result.rounds,
            "undisturbed_us": phases(&|phase| windows.undisturbed(phase)),
            "median_us": phases(&|phase| windows.median(phase)),
        }));
    }
    let mut ratios = Vec::new();
    if let Some((reference, others)) = results.split_first() {
        for other in others {
            let of_rounds: Vec<f64> =
                other.rounds.iter().zip(&reference.rounds).map(|(other, reference)| other / reference).collect();
            let ratio = median(&of_rounds);
            println!("{:<44} x{ratio:.2} of `{}`", other.case.name, reference.case.name);
            ratios.push(
                json!({ "case": other.case.name, "of": reference.case.name, "ratio": ratio, "rounds": of_rounds }),
            );
        }
    }
    if let Some(path) = &options.json {
        let all = json!({ "machine": machine, "running": cases::RUNNING, "cases": told, "ratios": ratios });
        std::fs::write(path, format!("{all:#}\n"))?;
    }
    Ok(())
}
