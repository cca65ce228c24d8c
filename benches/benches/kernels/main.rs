//! One linear map with its adapters, over shapes, ranks, rows and popularities: microseconds, and the fraction of what the
//! machine's measured limits allow. It is timed in turns with the map's base alone, warm (everything in the caches that
//! it fits in) and flushed (every call finds its weights and adapters in memory, as the layers of a model do).
//!
//! `cargo bench --bench kernels -- [--json FILE] [--shape 896x4864]... [--rank N]... [--rows N]...
//! [--mix identical|uniform|skewed|distinct]... [--only warm|flushed]`

mod case;
mod popularity;
mod processor;

use std::error::Error;
use std::path::PathBuf;

use case::{Case, Result as CaseResult};
use popularity::Popularity;
use serde_json::{Value, json};

/// Inputs and outputs of a map.
type Shape = (usize, usize);

/// The maps of models with 0.5, 7 and 8 billion parameters: gate of the first two, down of the third.
const SHAPES: [Shape; 4] = [(896, 4864), (3584, 3584), (4096, 14336), (14336, 4096)];
const RANKS: [usize; 4] = [8, 16, 64, 128];
const ROWS: [usize; 4] = [1, 8, 32, 64];

struct Options {
    json: Option<PathBuf>,
    shapes: Vec<Shape>,
    ranks: Vec<usize>,
    rows: Vec<usize>,
    mixes: Vec<Popularity>,
    caches: Vec<bool>,
    rounds: usize,
    threads: Option<usize>,
}

impl Options {
    fn parse() -> Result<Self, Box<dyn Error>> {
        let (mut shapes, mut ranks, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        let mut options = Self {
            json: None,
            shapes: vec![],
            ranks: vec![],
            rows: vec![],
            mixes: vec![],
            caches: vec![true, false],
            rounds: 9,
            threads: None,
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("`{argument}` needs a value"));
            match argument.as_str() {
                "--json" => options.json = Some(value()?.into()),
                "--shape" => {
                    let shape = value()?;
                    let (inputs, outputs) =
                        shape.split_once('x').ok_or(format!("`{shape}` is no shape; give INPUTSxOUTPUTS"))?;
                    shapes.push((inputs.parse()?, outputs.parse()?));
                }
                "--rank" => ranks.push(value()?.parse()?),
                "--mix" => {
                    let mix = value()?;
                    let known = Popularity::ALL.into_iter().find(|known| known.name() == mix);
                    options.mixes.push(known.ok_or(format!("`{mix}` is no mix of adapters"))?);
                }
                "--rows" => rows.push(value()?.parse()?),
                "--rounds" => options.rounds = value()?.parse()?,
                "--threads" => options.threads = Some(value()?.parse()?),
                "--only" => {
                    options.caches = match value()?.as_str() {
                        "warm" => vec![true],
                        "flushed" => vec![false],
                        other => return Err(format!("`{other}` is neither `warm` nor `flushed`").into()),
                    }
                }
                // What cargo passes.
                "--bench" | "--test" => {}
                other => return Err(format!("unknown argument `{other}`").into()),
            }
        }
        let or = |given: Vec<usize>, all: &[usize]| if given.is_empty() { all.to_vec() } else { given };
        options.shapes = if shapes.is_empty() { SHAPES.to_vec() } else { shapes };
        options.ranks = or(ranks, &RANKS);
        options.rows = or(rows, &ROWS);
        if options.mixes.is_empty() {
            options.mixes = Popularity::ALL.to_vec();
        }
        if options.rounds == 0 {
            return Err("a median needs one round at least".into());
        }
        Ok(options)
    }
}

fn row_of(result: &CaseResult, case: &Case, device: &str) -> Value {
    json!({
        "device": device, "inputs": case.shape.0, "outputs": case.shape.1, "rank": case.rank, "rows": case.rows,
        "popularity": result.popularity.map(Popularity::name), "caches": if case.warm { "warm" } else { "flushed" },
        "microseconds": result.seconds * 1e6, "fraction_of_limit": result.fraction,
        "times_base": result.times_base, "extra_over_its_limit": result.extra,
    })
}

#[expect(clippy::print_stdout, reason = "a bench prints its results")]
fn print(result: &CaseResult, case: &Case) {
    let popularity = result.popularity.map_or("base", Popularity::name);
    let (rank, caches) =
        (if result.popularity.is_some() { case.rank } else { 0 }, if case.warm { "warm" } else { "flushed" });
    print!(
        "{:>6} x {:<6} {:>3} rows  rank {rank:>3} {popularity:<10} {caches:<8} {:>9.1} us  {:>5.2} of the limit",
        case.shape.0,
        case.shape.1,
        case.rows,
        result.seconds * 1e6,
        result.fraction,
    );
    match result.extra {
        Some(extra) => println!(
            "   x{:.3} of the base, the difference x{extra:.2} of its bytes' or sums' own time",
            result.times_base
        ),
        None => println!(),
    }
}

#[expect(clippy::print_stdout, reason = "a bench prints its results")]
fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse()?;
    let processor = processor::Processor::new(options.threads)?;
    println!("{}", processor.describe()?);
    let mut rows = Vec::new();
    for &shape in &options.shapes {
        for &warm in &options.caches {
            for &rank in &options.ranks {
                for &count in &options.rows {
                    let case = Case { shape, rank, rows: count, warm };
                    for result in processor.measure(&case, &options.mixes, options.rounds)? {
                        print(&result, &case);
                        rows.push(row_of(&result, &case, "cpu"));
                    }
                }
            }
        }
    }
    if let Some(path) = &options.json {
        let report = json!({ "machine": processor.describe()?, "cases": rows });
        std::fs::write(path, serde_json::to_string_pretty(&report)? + "\n")?;
    }
    Ok(())
}
