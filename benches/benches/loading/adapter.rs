//! Packing an adapter that was read and checked, in turns with copying its bytes on the same one thread.

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use manylora::model::AdapterPacker;
use manylora::model::adapter::{AdapterPolicy, NoBaseTensors, inspect};
use manylora::model::checkpoint::Checkpoint;
use manylora::model::decoder::BackendPacker;
use manylora_benches::decode::Turns;
use manylora_benches::synthetic;
use manylora_kernels::StorageType;
use manylora_kernels::cpu::AlignedVec;

use super::setup::{Bench, SHAPE, backend, folder};

const RANKS: [usize; 2] = [16, 64];
/// Rounds for each of the bench's: one takes milliseconds.
const ROUNDS: usize = 8;

pub(crate) fn run(bench: &mut Bench) -> Result<(), Box<dyn Error>> {
    let spec = Checkpoint::open(&bench.layouts[0].folder)?.spec;
    let policy = AdapterPolicy { max_rank: RANKS[1], ..AdapterPolicy::new(spec, Arc::new(NoBaseTensors)) };
    let packer = BackendPacker::new(Arc::new(backend(bench.options.threads)?), StorageType::Bf16, RANKS[1]);
    for rank in RANKS {
        let name = format!("adapter-0-r{rank}");
        let folder = folder().join(&name);
        synthetic::adapter(&folder, &SHAPE, rank, 1)?;
        let adapter = inspect(&name, &folder, &policy)?.read()?;
        let mut stored = Vec::with_capacity(adapter.host_bytes());
        adapter.feed(&mut |_, a, b| {
            stored.extend_from_slice(a.bytes);
            stored.extend_from_slice(b.bytes);
            Ok(())
        })?;
        let mut copied = |_| {
            let begin = Instant::now();
            let mut copy = AlignedVec::<u8>::zeroed_apart("a copy", stored.len()).expect("memory");
            copy.copy_from_slice(&stored);
            let seconds = begin.elapsed().as_secs_f64();
            drop(std::hint::black_box(copy));
            seconds
        };
        let mut packed = |_| {
            let begin = Instant::now();
            let packed = packer.pack(&adapter).expect("the adapter is good");
            let seconds = begin.elapsed().as_secs_f64();
            drop(packed);
            seconds
        };
        let mut place = AlignedVec::<u8>::zeroed_apart("a copy", stored.len())?;
        let mut copied_again = |_| {
            let begin = Instant::now();
            place.copy_from_slice(&stored);
            std::hint::black_box(&mut place);
            begin.elapsed().as_secs_f64()
        };
        let rounds = ROUNDS * bench.options.rounds;
        let turns = Turns::take(rounds, &mut [&mut copied, &mut packed, &mut copied_again]);
        bench.result(&format!("rank {rank}: copying its bytes to fresh memory, ms"), 1e3 * turns.median(0));
        bench.result(&format!("rank {rank}: packing it, ms"), 1e3 * turns.median(1));
        bench.compare(&format!("rank {rank}: packing / copying its bytes to fresh memory"), &turns, 1, 0);
        bench.compare(&format!("rank {rank}: packing / copying its bytes to memory that is there"), &turns, 1, 2);
    }
    Ok(())
}
