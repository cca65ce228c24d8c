//! One linear map with its adapters, over shapes, ranks, rows and popularities: microseconds, and the fraction of what the
//! machine's measured limits allow. It is timed in turns with the map's base alone, warm (everything in the caches that
//! it fits in) and flushed (every call finds its weights and adapters in memory, as the layers of a model do). With feature
//! `cuda` on the first card too, whose limit is the bandwidth of a copy within its memory.
//!
//! `cargo bench --bench kernels [--features cuda] -- [--json FILE] [--device cpu|cuda] [--shape 896x4864]... [--rank N]...
//! [--rows N]... [--mix identical|uniform|skewed|distinct]... [--only warm|flushed] [--rounds N] [--threads N]
//! [--products own|library|auto]... [--describe]`: who computes the base's products on a card (our own kernels, cuBLASLt, or
//! what an engine takes there), one after the other; the last only says what the devices are.

#[cfg(feature = "cuda")]
mod card;
mod case;
mod material;
mod popularity;
mod processor;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use case::{Case, Result as CaseResult};
use popularity::Popularity;
use serde_json::{Value, json};

/// Inputs and outputs of a map.
type Shape = (usize, usize);

/// The maps of models with 0.5, 7 and 8 billion parameters: gate of the first two, down of the third.
const SHAPES: [Shape; 4] = [(896, 4864), (3584, 3584), (4096, 14336), (14336, 4096)];
const RANKS: [usize; 4] = [8, 16, 64, 128];
const ROWS: [usize; 4] = [1, 8, 32, 64];

/// Who computes the base's products on a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Products {
    /// What an engine takes: cuBLASLt where it is found.
    Auto,
    Own,
    Library,
}

impl Products {
    const ALL: [Self; 3] = [Self::Auto, Self::Own, Self::Library];

    const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Own => "own",
            Self::Library => "library",
        }
    }
}

/// A device, and on a card who computes products.
type Where = (&'static str, Option<Products>);

/// What a device does with a case.
type Measure<'a> = dyn Fn(&Case) -> Result<Vec<CaseResult>, Box<dyn Error>> + 'a;

struct Options {
    json: Option<PathBuf>,
    shapes: Vec<Shape>,
    ranks: Vec<usize>,
    rows: Vec<usize>,
    mixes: Vec<Popularity>,
    caches: Vec<bool>,
    rounds: usize,
    threads: Option<usize>,
    /// `cpu`, `cuda`, or (None) both, the card where there is one.
    device: Option<String>,
    /// Who computes the base's products on a card.
    products: Vec<Products>,
    /// Only say what the devices are.
    describe: bool,
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
            device: None,
            products: vec![],
            describe: false,
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
                "--products" => {
                    let products = value()?;
                    let known = Products::ALL.into_iter().find(|known| known.name() == products);
                    options.products.push(known.ok_or(format!("`{products}` is not `own`, `library` or `auto`"))?);
                }
                "--describe" => options.describe = true,
                "--device" => match value()?.as_str() {
                    device @ ("cpu" | "cuda") => options.device = Some(device.to_owned()),
                    other => return Err(format!("`{other}` is neither `cpu` nor `cuda`").into()),
                },
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
        if options.products.is_empty() {
            options.products = vec![Products::Auto];
        }
        if options.rounds == 0 {
            return Err("a median needs one round at least".into());
        }
        Ok(options)
    }
}

fn row_of(result: &CaseResult, case: &Case, (device, products): Where) -> Value {
    json!({
        "device": device, "products": products.map(Products::name), "inputs": case.shape.0, "outputs": case.shape.1, "rank": case.rank, "rows": case.rows,
        "popularity": result.popularity.map(Popularity::name), "caches": if case.warm { "warm" } else { "flushed" },
        "microseconds": result.seconds * 1e6, "fraction_of_limit": result.fraction,
        "times_base": result.times_base, "extra_over_its_limit": result.extra,
    })
}

#[expect(clippy::print_stdout, reason = "a bench prints its results")]
fn print(result: &CaseResult, case: &Case, (device, products): Where) {
    let popularity = result.popularity.map_or("base", Popularity::name);
    let (rank, caches) =
        (if result.popularity.is_some() { case.rank } else { 0 }, if case.warm { "warm" } else { "flushed" });
    print!(
        "{device:<4} {:<7} {:>6} x {:<6} {:>3} rows  rank {rank:>3} {popularity:<10} {caches:<8} {:>9.1} us  {:>5.2} of the limit",
        products.map_or("", Products::name),
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

impl Options {
    /// Takes every case through `measure`.
    fn run(&self, place: Where, rows: &mut Vec<Value>, measure: &Measure<'_>) -> Result<(), Box<dyn Error>> {
        if self.describe {
            return Ok(());
        }
        for &shape in &self.shapes {
            for &warm in &self.caches {
                for &rank in &self.ranks {
                    for &count in &self.rows {
                        let case = Case { shape, rank, rows: count, warm };
                        for result in measure(&case)? {
                            print(&result, &case, place);
                            rows.push(row_of(&result, &case, place));
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn wants(&self, device: &str) -> bool {
        self.device.as_deref().is_none_or(|wanted| wanted == device)
    }
}

/// The cases on a card; what card it is, or None where it was skipped.
#[cfg(feature = "cuda")]
#[expect(clippy::print_stdout, reason = "a bench prints its results")]
fn on_card(options: &Options, rows: &mut Vec<Value>) -> Result<Option<String>, Box<dyn Error>> {
    let card = match card::Card::new() {
        Ok(card) => card,
        Err(error) if options.device.is_some() => return Err(error.into()),
        Err(error) => {
            println!("no card, its cases are skipped: {error}");
            return Ok(None);
        }
    };
    println!("{}", card.describe());
    for &products in &options.products {
        let measure = |case: &Case| card.measure(case, products, &options.mixes, options.rounds);
        options.run(("cuda", Some(products)), rows, &measure)?;
    }
    Ok(Some(card.describe().to_owned()))
}

#[cfg(not(feature = "cuda"))]
#[expect(clippy::print_stdout, reason = "a bench prints its results")]
fn on_card(options: &Options, _rows: &mut Vec<Value>) -> Result<Option<String>, Box<dyn Error>> {
    let why = "this bench was built without feature `cuda`";
    if options.device.is_some() {
        return Err(why.into());
    }
    println!("no card, its cases are skipped: {why}");
    Ok(None)
}

fn main() -> ExitCode {
    manylora_benches::exit_code(run())
}

#[expect(clippy::print_stdout, reason = "a bench prints its results")]
fn run() -> Result<(), Box<dyn Error>> {
    let options = Options::parse()?;
    let mut rows = Vec::new();
    let mut report = json!({});
    if options.wants("cpu") {
        let processor = processor::Processor::new(options.threads)?;
        println!("{}", processor.describe()?);
        options.run(("cpu", None), &mut rows, &|case| processor.measure(case, &options.mixes, options.rounds))?;
        report["machine"] = processor.describe()?.into();
    }
    if options.wants("cuda") {
        report["card"] = on_card(&options, &mut rows)?.into();
    }
    report["cases"] = rows.into();
    if let Some(path) = &options.json {
        std::fs::write(path, serde_json::to_string_pretty(&report)? + "\n")?;
    }
    Ok(())
}
