//! A checkpoint until the engine is ready, in turns with reading its files and copying their bytes to huge pages, on as
//! many threads; and the processor time of both, which a busy machine changes less.

use std::error::Error;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::time::Instant;

use manylora::Engine;
use manylora_benches::decode::Turns;
use manylora_kernels::Backend;
use manylora_kernels::cpu::AlignedVec;

use super::setup::{Bench, Layout, backend, config};

/// Bytes that are read at a time: they stay in a second-level cache until they are copied.
const READ_BYTES: usize = 256 << 10;
/// More than a way takes.
const COMMITTED_BYTES: usize = 1200 << 20;
/// Bytes that a thread takes at a time.
const SHARE_BYTES: usize = 4 << 20;

pub(crate) fn run(bench: &mut Bench) -> Result<(), Box<dyn Error>> {
    let (rounds, threads) = (bench.options.rounds, bench.options.threads);
    for layout in std::mem::take(&mut bench.layouts) {
        // Whatever is wrong with the files is told here, as it reads.
        copy(threads, &layout, Copying::Once)?;
        let mut copied = Timed::new(|| copy(threads, &layout, Copying::Twice));
        let mut started = Timed::new(|| {
            let start = Spent::now()?;
            let engine = Engine::start(config(&layout.folder, threads))?;
            let spent = start.until_now()?;
            drop(engine);
            Ok(spent)
        });
        let mut read = Timed::new(|| copy(threads, &layout, Copying::Once));
        let ways: &mut [&mut dyn FnMut(usize) -> f64] =
            &mut [&mut |_| copied.take(), &mut |_| started.take(), &mut |_| read.take()];
        let turns = Turns::take(rounds, ways);
        let processor = Turns { values: vec![copied.processor, started.processor, read.processor] };
        let name = layout.name;
        for (time, turns) in [("time", &turns), ("processor time", &processor)] {
            bench.result(&format!("{name}: {time} for reading and copying its bytes, ms"), 1e3 * turns.median(0));
            bench.result(&format!("{name}: {time} until the engine is ready, ms"), 1e3 * turns.median(1));
            bench.compare(&format!("{name}: {time} until ready / reading and copying its bytes"), turns, 1, 0);
            bench.compare(&format!("{name}: {time} until ready / reading its bytes to their place"), turns, 1, 2);
        }
        bench.layouts.push(layout);
    }
    Ok(())
}

/// Time, and this process's processor time, in seconds.
struct Spent {
    begin: Instant,
    time: f64,
    processor: f64,
}

impl Spent {
    fn now() -> Result<Self, Box<dyn Error>> {
        Ok(Self { begin: Instant::now(), time: 0.0, processor: processor_seconds()? })
    }

    fn until_now(self) -> Result<Self, Box<dyn Error>> {
        let (time, processor) = (self.begin.elapsed().as_secs_f64(), processor_seconds()? - self.processor);
        Ok(Self { time, processor, ..self })
    }
}

/// Of all threads, those that have ended included.
fn processor_seconds() -> Result<f64, Box<dyn Error>> {
    /// Ticks in a second: what Linux tells programs on every machine that this runs on.
    const TICKS: f64 = 100.0;
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let fields = stat.rsplit(')').next().ok_or("no name in /proc/self/stat")?;
    // The 14th and 15th field, of which the name is the second.
    let ticks = fields.split_whitespace().skip(11).take(2).map(str::parse).collect::<Result<Vec<f64>, _>>()?;
    Ok(ticks.iter().sum::<f64>() / TICKS)
}

/// Has the system back as much memory as a way is going to take. A virtual machine's host takes back what has been free for a
/// while, and giving it again costs several times what all ways together do.
fn commit_memory() -> Result<(), Box<dyn Error>> {
    let mut memory = AlignedVec::<u8>::zeroed("memory to come", COMMITTED_BYTES)?;
    for page in memory.chunks_mut(4096) {
        page[0] = 1;
    }
    drop(std::hint::black_box(memory));
    Ok(())
}

/// A way whose processor time is kept beside the time that [`Turns`] keeps.
struct Timed<F> {
    way: F,
    processor: Vec<f64>,
}

impl<F: FnMut() -> Result<Spent, Box<dyn Error>>> Timed<F> {
    const fn new(way: F) -> Self {
        Self { way, processor: Vec::new() }
    }

    fn take(&mut self) -> f64 {
        commit_memory().expect("there is memory for a copy");
        let spent = (self.way)().expect("the model can be read");
        self.processor.push(spent.processor);
        spent.time
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Copying {
    /// Read to a buffer, then copied to its place.
    Twice,
    /// Read to its place.
    Once,
}

/// What it takes until the bytes of all files are in fresh memory.
fn copy(threads: Option<usize>, layout: &Layout, copying: Copying) -> Result<Spent, Box<dyn Error>> {
    let backend = backend(threads)?;
    let start = Spent::now()?;
    let mut copies = Vec::new();
    for path in &layout.files {
        let file = File::open(path)?;
        let mut bytes = AlignedVec::<u8>::zeroed("a copy", file.metadata()?.len() as usize)?;
        let shares: Vec<_> = bytes.chunks_mut(SHARE_BYTES).map(Mutex::new).collect();
        backend.run_parts(&|part, parts| {
            let mut buffer = vec![0; READ_BYTES];
            for (index, share) in shares.iter().enumerate().skip(part).step_by(parts) {
                let mut share = share.lock().expect("nobody fails");
                for (piece, out) in share.chunks_mut(READ_BYTES).enumerate() {
                    let offset = (index * SHARE_BYTES + piece * READ_BYTES) as u64;
                    let target = if copying == Copying::Once { &mut *out } else { &mut buffer[..out.len()] };
                    file.read_exact_at(target, offset).expect("the file is whole");
                    if copying == Copying::Twice {
                        out.copy_from_slice(&buffer[..out.len()]);
                    }
                }
            }
        });
        drop(shares);
        copies.push(bytes);
    }
    let spent = start.until_now()?;
    drop(std::hint::black_box(copies));
    Ok(spent)
}
