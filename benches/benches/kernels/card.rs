//! The cases on a card. Calls are recorded and replayed, as the layers of a decode step are, so that what is timed is the
//! card and not the launches.

use std::error::Error;
use std::time::{Duration, Instant};

use manylora_benches::card::{copied_per_second, describe};
use manylora_benches::decode::Turns;
use manylora_benches::roofline::Limits;
use manylora_kernels::cuda::{
    AlgorithmChoice, CudaAdapter, CudaBackend, CudaBuffer, CudaError, CudaOptions, CudaWeight, Device, ProductChoice,
};
use manylora_kernels::{
    AdapterTable, Backend, BufferKind, KernelError, LinearOutput, LinearPart, StepBatch, StorageType,
};

use crate::Products;
use crate::case::{Case, Result as CaseResult};
use crate::material::{Ramp, adapters, plan, site};
use crate::popularity::Popularity;

/// More than the caches of a card hold: copies of weights and adapters until there are so many bytes.
const FLUSHED_BYTES: usize = 384 << 20;
const MOST_LAYERS: usize = 64;
/// Calls of a recording, at least.
const CALLS: usize = 32;
/// Shortest time of one sample; the host's part in it is some ten microseconds.
const SAMPLE: Duration = Duration::from_millis(4);
/// Beside what a case counts: tables, blocks of steps, rounding.
const SPARE_BYTES: usize = 64 << 20;
const WORKSPACE_BYTES: usize = 32 << 20;

pub(crate) struct Card {
    described: String,
    emulated: bool,
    limits: Limits,
}

/// What calls of a case run over, one after the other.
struct Material {
    backend: CudaBackend,
    weights: Vec<CudaWeight>,
    adapters: AdapterTable<CudaAdapter>,
    layers: usize,
    input: CudaBuffer,
    out: CudaBuffer,
    /// Calls of a recording: all weights and layers come round in it.
    calls: usize,
}

impl Card {
    /// The first card, or the error that says why there is none.
    pub(crate) fn new() -> Result<Self, CudaError> {
        let device = Device::open(0)?;
        let emulated = device.context().library().is_emulated();
        let bandwidth = copied_per_second(&device)?;
        let described = format!("{}, copies {:.1} GB/s", describe(&device)?, bandwidth / 1e9);
        // Bytes are what these cases are made of: arithmetic has no limit here.
        Ok(Self { described, emulated, limits: Limits { bandwidth, peak: f64::INFINITY } })
    }

    pub(crate) fn describe(&self) -> &str {
        &self.described
    }

    fn material(&self, case: &Case, products: Products) -> Result<Material, KernelError> {
        let (inputs, outputs) = case.shape;
        // What an emulated device is slow at need not be more than exercised.
        let flushed = if self.emulated { 3 * 2 * inputs * outputs } else { FLUSHED_BYTES };
        let copies = |bytes: usize| if case.warm { 1 } else { flushed.div_ceil(bytes) };
        let count = copies(2 * inputs * outputs);
        let layers = copies(2 * case.rank * (inputs + outputs) * case.rows.min(8)).min(MOST_LAYERS);
        let padded = case.rank.next_multiple_of(8) * (inputs + outputs);
        let adapter_bytes = case.rows * layers * (2 * padded + 4096);
        let buffers = case.rows.next_multiple_of(16) * 4 * (inputs + outputs);
        let backend = CudaBackend::open(CudaOptions {
            ordinal: 0,
            dtype: StorageType::Bf16,
            layers,
            heads: 1,
            kv_heads: 1,
            head_dim: 64,
            memory_bytes: count * (2 * inputs * outputs + 4096)
                + adapter_bytes
                + buffers
                + WORKSPACE_BYTES
                + SPARE_BYTES,
            shared_bytes: adapter_bytes,
            products: match products {
                Products::Auto => ProductChoice::Auto,
                Products::Own => ProductChoice::Own,
                Products::Library => ProductChoice::Library,
            },
            algorithms: AlgorithmChoice::Fastest,
            workspace_bytes: Some(WORKSPACE_BYTES),
            library_folders: Vec::new(),
            graphs: true,
        })?;
        let source = Ramp { rows: outputs, columns: inputs };
        let weights = (0..count)
            .map(|_| backend.pack_weight("the bench", &source, StorageType::Bf16))
            .collect::<Result<_, _>>()?;
        let adapters = adapters(&backend, case, layers)?;
        backend.reserve(case.rows, case.rows, case.rank, inputs)?;
        let input = backend.one_buffer(case.rows, inputs, BufferKind::INPUTS)?;
        let out = backend.one_buffer(case.rows, outputs, BufferKind::SUMS)?;
        let calls = if self.emulated { 2 } else { CALLS.max(count).max(layers) };
        Ok(Material { backend, weights, adapters, layers, input, out, calls })
    }

    /// The base, then these mixes of adapters. They take turns, `rounds` times.
    pub(crate) fn measure(
        &self,
        case: &Case,
        products: Products,
        mixes: &[Popularity],
        rounds: usize,
    ) -> Result<Vec<CaseResult>, Box<dyn Error>> {
        let mut material = self.material(case, products)?;
        let mixes: Vec<Option<Popularity>> = std::iter::once(None).chain(mixes.iter().copied().map(Some)).collect();
        let batches: Vec<StepBatch> = mixes.iter().map(|mix| batch(*mix, case.rows)).collect();
        // Once as it is, once to be recorded; then as often as a sample needs.
        let mut replays = 1;
        for (walk, batch) in batches.iter().enumerate() {
            material.sample(walk as u64, batch, 2)?;
        }
        while !self.emulated && material.sample(0, &batches[0], replays)? < SAMPLE.as_secs_f64() {
            replays *= 2;
        }
        let calls = (replays * material.calls) as f64;
        let (material, failure) = (std::cell::RefCell::new(material), std::cell::RefCell::new(None));
        let mut ways: Vec<_> = batches
            .iter()
            .enumerate()
            .map(|(walk, batch)| {
                let (material, failure) = (&material, &failure);
                move |_: usize| match material.borrow_mut().sample(walk as u64, batch, replays) {
                    Ok(seconds) => seconds / calls,
                    Err(error) => {
                        failure.borrow_mut().get_or_insert(error);
                        f64::NAN
                    }
                }
            })
            .collect();
        let mut ways: Vec<&mut dyn FnMut(usize) -> f64> = ways.iter_mut().map(|way| way as _).collect();
        let turns = Turns::take(rounds, &mut ways);
        if let Some(error) = failure.take() {
            return Err(error);
        }
        let base = turns.median(0);
        let results =
            mixes.iter().enumerate().map(|(way, mix)| case.result(&self.limits, *mix, base, turns.ratio(way, 0)));
        Ok(results.collect())
    }
}

impl Material {
    /// Seconds of `replays` runs of the recorded calls, the wait for the last one included.
    fn sample(&mut self, walk: u64, batch: &StepBatch, replays: usize) -> Result<f64, Box<dyn Error>> {
        let Self { backend, weights, adapters, layers, input, out, calls } = self;
        let rows = batch.rows();
        backend.begin_step(batch, adapters)?;
        backend.device().compute().synchronize()?;
        let start = Instant::now();
        for _ in 0..replays {
            backend.run_layers(walk, batch, &mut || {
                for at in 0..*calls {
                    let part = LinearPart {
                        weight: &weights[at % weights.len()],
                        bias: None,
                        site: site(at % *layers),
                        out: &mut *out,
                        mode: LinearOutput::Store,
                    };
                    backend.linear(rows, &batch.adapters, adapters, input, &mut [part]);
                }
            });
        }
        backend.device().compute().synchronize()?;
        let seconds = start.elapsed().as_secs_f64();
        backend.end_step()?;
        Ok(seconds)
    }
}

/// A step whose rows have the adapters of a mix.
fn batch(mix: Option<Popularity>, rows: usize) -> StepBatch {
    StepBatch {
        tokens: vec![0; rows],
        positions: vec![0; rows],
        slot_mapping: vec![0; rows],
        adapters: plan(mix, rows),
        ..StepBatch::default()
    }
}
