//! Runs cases on the emulated device, each in a process of its own, as many at a time as there are cores.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use manylora_kernels::cuda::{BLAS_VARIABLE, DRIVER_VARIABLE};

use super::{Build, REQUIRE_VARIABLE, build, on_card};

/// Says to a child which case it is.
const CASE_VARIABLE: &str = "MANYLORA_CUDA_CASE";
/// Tells a case where the stand-ins lie.
pub(crate) const CASE_FOLDER_VARIABLE: &str = "MANYLORA_CUDA_TEST_FOLDER";

/// Names the folder of the cases' logs, where it is not where the tests were built.
const LOG_VARIABLE: &str = "MANYLORA_TEST_LOGS";
/// Cases at a time on a card, where each holds a context.
const ON_CARD_AT_ONCE: usize = 4;

/// A case that takes longer hangs. The longest takes a minute or two.
const LIMIT: Duration = Duration::from_secs(600);

/// What a case's process finds in its environment.
pub(crate) type Environment = &'static [(&'static str, &'static str)];

/// One function, in one kind of process.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) run: Box<dyn Fn() + Sync>,
    /// `None`: without stand-ins.
    pub(crate) build: Option<Build>,
    pub(crate) environment: Environment,
}

/// Whether what takes long is to run too. (A child knows all cases.)
pub(crate) fn deep() -> bool {
    std::env::var_os(CASE_VARIABLE).is_some() || std::env::args().any(|argument| argument == "--deep")
}

enum Outcome {
    Passed(String),
    Failed(String),
    Skipped(String),
}

/// The main function of a test program: runs what its arguments name, or the one case that a parent asked for. On a card
/// everything is skipped.
pub(crate) fn run(cases: Vec<Case>) -> ExitCode {
    run_on_cards(cases, |_| Err("needs the emulated device"))
}

/// As [`run`], and cases run on a card too, unless `on_cards` says of their name why they cannot.
pub(crate) fn run_on_cards(cases: Vec<Case>, on_cards: impl Fn(&str) -> Result<(), &'static str> + Sync) -> ExitCode {
    if let Ok(wanted) = std::env::var(CASE_VARIABLE) {
        let case = cases.iter().find(|case| case.name == wanted);
        (case.unwrap().run)();
        return ExitCode::SUCCESS;
    }
    if std::env::args().any(|argument| argument == "--list") {
        for case in &cases {
            println!("{}: test", case.name);
        }
        return ExitCode::SUCCESS;
    }
    let told = std::env::args().any(|argument| argument == "--nocapture");
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    let cases: Vec<Case> = cases.into_iter().filter(|case| case.name.contains(&filter)).collect();
    let unfit = |case: &Case| if on_card() { on_cards(&case.name).err() } else { None };
    let wanted = |kind: Build| !on_card() && cases.iter().any(|case| case.build == Some(kind));
    let folder = |kind: Build| wanted(kind).then(|| build(kind));
    let folders = [Build::Plain, Build::Checked].map(|kind| (kind, folder(kind)));
    let folder = |kind: Build| {
        let known = folders.iter().find(|(known, _)| *known == kind).and_then(|(_, folder)| folder.clone());
        known.expect("built for the cases that need it")
    };
    let (next, outcomes) = (AtomicUsize::new(0), Mutex::new([0; 3]));
    let work = || {
        while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
            let started = Instant::now();
            let outcome = match unfit(case) {
                Some(reason) => Outcome::Skipped(reason.to_owned()),
                None if on_card() => outcome(case, Ok(None)),
                None => outcome(case, case.build.map(folder).transpose()),
            };
            let took = started.elapsed().as_secs_f32();
            let mut counts = outcomes.lock().unwrap();
            match outcome {
                Outcome::Passed(said) => {
                    counts[0] += 1;
                    let said = if told { said.as_str() } else { "" };
                    println!("{said}test {} ... ok ({took:.1} s)", case.name);
                }
                Outcome::Failed(why) => {
                    counts[1] += 1;
                    println!("test {} ... FAILED: {why}", case.name);
                }
                Outcome::Skipped(why) => {
                    counts[2] += 1;
                    println!("test {} ... skipped: {why}", case.name);
                }
            }
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = if on_card() { cores.min(ON_CARD_AT_ONCE) } else { cores };
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    let [passed, failed, skipped] = outcomes.into_inner().unwrap();
    println!("\ntest result: {passed} passed; {failed} failed; {skipped} skipped");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn outcome(case: &Case, folder: Result<Option<PathBuf>, String>) -> Outcome {
    let folder = match folder {
        Ok(folder) => folder,
        Err(reason) => {
            let why = format!("no emulated device: {reason}");
            let required = std::env::var(REQUIRE_VARIABLE).is_ok_and(|value| value == "1");
            return if required { Outcome::Failed(why) } else { Outcome::Skipped(why) };
        }
    };
    let name = format!("{}-{}.log", env!("CARGO_CRATE_NAME"), case.name.replace("::", "-"));
    let logs = std::env::var_os(LOG_VARIABLE).unwrap_or_else(|| env!("CARGO_TARGET_TMPDIR").into());
    let said = Path::new(&logs).join(name);
    let ended = process(case, folder.as_deref(), &said);
    let text = std::fs::read_to_string(&said).unwrap_or_default();
    match ended {
        Ok(()) => Outcome::Passed(text),
        Err(why) => Outcome::Failed(format!("{why}\n{text}")),
    }
}

/// Runs a case in a process of its own.
fn process(case: &Case, folder: Option<&Path>, said: &Path) -> Result<(), String> {
    let start = || -> std::io::Result<Child> {
        let log = File::create(said)?;
        let mut child = Command::new(std::env::current_exe()?);
        if !on_card() {
            child.env_remove(DRIVER_VARIABLE).env_remove(BLAS_VARIABLE);
        }
        if let Some(folder) = folder {
            child.env(DRIVER_VARIABLE, folder.join("libcuda.so")).env(BLAS_VARIABLE, folder.join("libcublasLt.so"));
            child.env(CASE_FOLDER_VARIABLE, folder);
        }
        child.env(CASE_VARIABLE, &case.name).envs(case.environment.iter().copied());
        child.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn()
    };
    let mut child = start().map_err(|error| format!("it could not be started: {error}"))?;
    let started = Instant::now();
    loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(status.to_string()),
            None if started.elapsed() > LIMIT => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("it hung: no end after {} s", LIMIT.as_secs()));
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}
