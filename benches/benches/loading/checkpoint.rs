//! A checkpoint until the engine is ready, in turns with reading its files and copying their bytes to huge pages, on as
//! many threads.

use std::error::Error;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::time::Instant;

use manylora::Engine;
use manylora_benches::decode::Turns;
use manylora_kernels::Backend;
use manylora_kernels::cpu::{AlignedVec, CpuBackend};

use super::setup::{Bench, Layout, backend, config};

/// Bytes that are read at a time: they stay in a second-level cache until they are copied.
const READ_BYTES: usize = 256 << 10;
/// Bytes that a thread takes at a time.
const SHARE_BYTES: usize = 4 << 20;

pub(crate) fn run(bench: &mut Bench) -> Result<(), Box<dyn Error>> {
    let (rounds, threads) = (bench.options.rounds, bench.options.threads);
    for layout in std::mem::take(&mut bench.layouts) {
        let mut copied = |_| copy(&backend(threads).expect("a backend"), &layout, Copying::Twice).expect("a copy");
        let mut started = |_| {
            let begin = Instant::now();
            let engine = Engine::start(config(&layout.folder, threads)).expect("the engine starts");
            let seconds = begin.elapsed().as_secs_f64();
            drop(engine);
            seconds
        };
        let mut read = |_| copy(&backend(threads).expect("a backend"), &layout, Copying::Once).expect("a copy");
        let turns = Turns::take(rounds, &mut [&mut copied, &mut started, &mut read]);
        let name = layout.name;
        bench.result(&format!("{name}: reading and copying its bytes, ms"), 1e3 * turns.median(0));
        bench.result(&format!("{name}: until the engine is ready, ms"), 1e3 * turns.median(1));
        bench.compare(&format!("{name}: until the engine is ready / reading and copying its bytes"), &turns, 1, 0);
        bench.compare(&format!("{name}: until the engine is ready / reading its bytes to their place"), &turns, 1, 2);
        bench.layouts.push(layout);
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Copying {
    /// Read to a buffer, then copied to its place.
    Twice,
    /// Read to its place.
    Once,
}

/// Seconds until the bytes of all files are in fresh memory.
fn copy(backend: &CpuBackend, layout: &Layout, copying: Copying) -> Result<f64, Box<dyn Error>> {
    let begin = Instant::now();
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
    let seconds = begin.elapsed().as_secs_f64();
    drop(std::hint::black_box(copies));
    Ok(seconds)
}
