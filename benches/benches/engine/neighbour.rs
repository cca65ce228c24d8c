//! What it costs that another process keeps a core busy, against having one thread less.

use std::error::Error;
use std::process::{Child, Command};
use std::time::Duration;

use manylora_benches::decode::{Batch, Turns};

use super::setup::{Bench, base, start_engine};

/// Another process that keeps a core busy whenever it is told to.
struct Neighbour(Child);

impl Neighbour {
    fn start() -> Result<Self, Box<dyn Error>> {
        let neighbour = Self(Command::new("sh").args(["-c", "while :; do :; done"]).spawn()?);
        neighbour.signal("STOP")?;
        Ok(neighbour)
    }

    fn signal(&self, signal: &str) -> Result<(), Box<dyn Error>> {
        let done = Command::new("kill").args([&format!("-{signal}"), &self.0.id().to_string()]).status()?;
        if done.success() { Ok(()) } else { Err(format!("`kill -{signal}` failed").into()) }
    }

    fn during<T>(&self, what: impl FnOnce() -> T) -> T {
        self.signal("CONT").expect("the neighbour is ours");
        // The scheduler needs a moment to see that there is one more.
        std::thread::sleep(Duration::from_millis(50));
        let result = what();
        self.signal("STOP").expect("the neighbour is ours");
        result
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn run(bench: &mut Bench) -> Result<(), Box<dyn Error>> {
    if !bench.options.wants("another process") {
        return Ok(());
    }
    let single = start_engine(false, Some(1))?;
    let neighbour = Neighbour::start()?;
    let tokens = bench.options.tokens;
    for rows in [1, 8] {
        let team = bench.batch(rows, &base);
        let alone = Batch { engine: &single, ..team };
        let turns = Turns::take(
            bench.options.rounds,
            &mut [
                &mut |round| team.step(round, tokens),
                &mut |round| neighbour.during(|| team.step(round, tokens)),
                &mut |round| alone.step(round, tokens),
            ],
        );
        bench.compare(&format!("{rows} base rows: another process busy on one core / quiet"), &turns, 1, 0);
        bench.compare(&format!("{rows} base rows: one thread / all threads, quiet"), &turns, 2, 0);
        bench.compare(&format!("{rows} base rows: another process busy / one thread less"), &turns, 1, 2);
    }
    Ok(())
}
