//! Blocks and adapters take memory from each other, and one call of one function fails meanwhile, each in turn: a clean error,
//! no panic, no hang, nothing left behind.

use std::collections::BTreeSet;
use std::sync::Arc;

use manylora_kernels::cuda::{CudaAdapter, CudaBackend, CudaOptions, kv_cache_bytes};
use manylora_kernels::{AdapterTable, Backend, KernelError, Module, PackedAdapter, Site, SiteShape, StorageType};

use crate::cases::options;
use crate::stand_in::StandIn;
use crate::stand_in::sweep::sweep;
use crate::toy::{BLOCKS, Part, ROWS, batch_in, kv_shape};

const DTYPE: StorageType = StorageType::Bf16;
/// Blocks that stay where adapters take the others' memory, and those of them that the last step gets back.
const STAY: u32 = 8;
const BACK: u32 = 24;

/// An adapter of at most so many bytes, as large as it can be.
fn adapter(backend: &CudaBackend, bytes: usize) -> Result<CudaAdapter, KernelError> {
    let sites = |rank: u32| {
        let shape = |module| SiteShape { site: Site::layer(0, module), rank, input: 104, output: 136, scale: 1.0 };
        [shape(Module::Gate), shape(Module::Up)]
    };
    let rank = (1..=4096).take_while(|&rank| backend.adapter_bytes(&sites(rank), DTYPE) <= bytes).last();
    let sites = sites(rank.expect("room for rank 1"));
    let fill = &mut |site: usize, a: &mut Vec<f32>, b: &mut Vec<f32>| {
        let shape = &sites[site];
        *a = vec![0.5; (shape.rank * shape.input) as usize];
        *b = vec![0.25; (shape.rank * shape.output) as usize];
        Ok(())
    };
    backend.pack_adapter(&sites, DTYPE, fill)
}

/// A step of one row with the adapter of slot 0 in each of these blocks.
fn step(backend: &CudaBackend, blocks: &[u32], adapters: &AdapterTable<CudaAdapter>) -> Result<(), KernelError> {
    let parts: Vec<Part> = (0..blocks.len()).map(|row| Part::new(row, 0, 1, &[(0, 1.0)])).collect();
    let batch = batch_in(&parts, &|sequence, _| blocks[sequence]);
    backend.begin_step(&batch, adapters)?;
    backend.end_step()
}

/// Blocks go for adapters and are moved together, adapters are moved together for another one and then for blocks.
fn session() -> Result<(), KernelError> {
    let shape = kv_shape(DTYPE);
    let shared_bytes = kv_cache_bytes(&shape);
    let backend = CudaBackend::open(CudaOptions { shared_bytes, memory_bytes: 5 << 20, ..options(DTYPE, false) })?;
    backend.reserve(ROWS, ROWS, 64, 0)?;
    let mut cache = backend.kv_cache(shape)?;
    let mut adapters = AdapterTable::new(1);
    backend.release_blocks(&mut cache, &(STAY..BLOCKS as u32).collect::<Vec<_>>());
    let room = backend.adapter_usage().capacity;
    assert!(room >= shared_bytes / BLOCKS * (BLOCKS - STAY as usize) - 256);
    // Three, the second of which leaves a hole, and the third of which is in use.
    let [first, second, third] = [(); 3].map(|()| adapter(&backend, room / 4));
    let (first, second) = (first?, second?);
    adapters.install(0, Arc::new(third?));
    let stay: Vec<u32> = (0..STAY).collect();
    step(&backend, &stay, &adapters)?;
    assert!(backend.read_block(STAY - 1)?.is_some_and(|content| content.iter().all(|&byte| byte == 0)));
    // Those that lie highest go: the others move.
    backend.release_blocks(&mut cache, &stay[..STAY as usize / 2]);
    step(&backend, &stay[STAY as usize / 2..], &adapters)?;
    drop(second);
    // More than either hole: the third moves.
    let usage = backend.adapter_usage();
    let large = adapter(&backend, usage.free - usage.free / 16)?;
    assert!(large.bytes() > usage.largest, "{} {usage:?}", large.bytes());
    drop(first);
    // Blocks come back, whose memory has adapters in it.
    step(&backend, &(0..BACK).collect::<Vec<_>>(), &adapters)?;
    assert!(backend.read_block(BACK - 1)?.is_some_and(|content| content.iter().all(|&byte| byte == 0)));
    backend.device().context().synchronize()?;
    Ok(())
}

pub(crate) fn every_call_of_moving_may_fail() {
    let device = StandIn::get();
    device.reset_counts();
    session().unwrap();
    for (function, least) in [("cuMemcpyDtoDAsync_v2", 20), ("cuMemsetD8Async", 7), ("cuMemcpyHtoDAsync_v2", 6)] {
        let calls = device.calls(function);
        assert!(calls >= least, "{function}: {calls}");
    }
    let codes = |function: &str| -> &'static [i32] { if function.starts_with("cublas") { &[14] } else { &[2, 999] } };
    // All of the calls that move, some of the others.
    let chosen = |count: u64| -> Vec<u64> {
        let step = (count / 40).max(1) as usize;
        (1..=count).step_by(step).chain([count]).collect::<BTreeSet<_>>().into_iter().collect()
    };
    let swept = sweep(session, chosen, codes, |what, text| assert!(!text.is_empty(), "{what}"));
    assert!(swept.functions > 30 && swept.noticed > swept.runs / 2, "{} {}", swept.functions, swept.noticed);
    // Only what is tried for the sake of a release may fail without anybody noticing.
    for name in &swept.unnoticed {
        assert!(
            ["cuCtxSetCurrent", "cuCtxSynchronize", "cuEventSynchronize", "cuStreamSynchronize"]
                .contains(&name.as_str()),
            "failures of `{name}` go unnoticed"
        );
    }
}

/// Adapters that never go hold what a step's blocks need: the step fails after a while, says of what there was too little, and
/// the next one runs once they have gone.
pub(crate) fn adapters_that_stay_end_the_step() {
    let shape = kv_shape(DTYPE);
    let backend =
        CudaBackend::open(CudaOptions { shared_bytes: kv_cache_bytes(&shape), ..options(DTYPE, false) }).unwrap();
    backend.reserve(ROWS, ROWS, 64, 0).unwrap();
    let mut cache = backend.kv_cache(shape).unwrap();
    backend.release_blocks(&mut cache, &(STAY..BLOCKS as u32).collect::<Vec<_>>());
    let room = backend.adapter_usage().capacity;
    let mut adapters = AdapterTable::new(1);
    adapters.install(0, Arc::new(adapter(&backend, room).unwrap()));
    let blocks: Vec<u32> = (0..BACK).collect();
    let error = step(&backend, &blocks, &adapters).unwrap_err().to_string();
    assert!(error.contains("KV blocks in place of adapters"), "{error}");
    drop(adapters.remove(0));
    // What was reached for in vain is not the cache's: the same blocks are provided anew.
    let none = AdapterTable::new(1);
    let parts: Vec<Part> = (0..blocks.len()).map(|row| Part::new(row, 0, 1, &[])).collect();
    let batch = batch_in(&parts, &|sequence, _| blocks[sequence]);
    backend.begin_step(&batch, &none).unwrap();
    backend.end_step().unwrap();
    assert!(backend.read_block(BACK - 1).unwrap().is_some_and(|content| content.iter().all(|&byte| byte == 0)));
}
