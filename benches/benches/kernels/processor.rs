//! The cases on the processor.

use std::cell::RefCell;
use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant};

use manylora_benches::decode::Turns;
use manylora_benches::roofline::Limits;
use manylora_kernels::cpu::{Buffer, CpuAdapter, CpuBackend, CpuOptions, PackedWeight};
use manylora_kernels::{AdapterTable, Backend, KernelError, LinearOutput, LinearPart, RowAdapterPlan, StorageType};

use crate::case::{Case, Result as CaseResult};
use crate::material::{Ramp, adapters, plan, site};
use crate::popularity::Popularity;

/// More than the caches of a processor hold: copies of weights and adapters until there are so many bytes.
const FLUSHED_BYTES: usize = 192 << 20;
const MOST_LAYERS: usize = 64;
/// Shortest time of one sample.
const SAMPLE: Duration = Duration::from_millis(4);
const LIMIT_TIME: Duration = Duration::from_millis(200);

pub(crate) struct Processor {
    backend: CpuBackend,
}

/// What calls of a case run over, one after the other.
struct Material {
    weights: Vec<PackedWeight>,
    /// They touch the map in every one of `layers` layers, of which each call takes the next.
    adapters: AdapterTable<CpuAdapter>,
    layers: usize,
    input: Buffer,
    out: Buffer,
}

impl Processor {
    pub(crate) fn new(threads: Option<usize>) -> Result<Self, KernelError> {
        let backend = CpuBackend::new(CpuOptions { num_threads: threads, ..CpuOptions::default() })?;
        Ok(Self { backend })
    }

    pub(crate) fn describe(&self) -> Result<String, KernelError> {
        let limits = Limits::measure(&self.backend, LIMIT_TIME)?;
        let (bandwidth, peak) = (limits.bandwidth / 1e9, limits.peak / 1e9);
        Ok(format!("{}, reads {bandwidth:.1} GB/s, computes {peak:.0} GFLOP/s", self.backend.describe()))
    }

    fn material(&self, case: &Case) -> Result<Material, KernelError> {
        let (inputs, outputs) = case.shape;
        let copies = |bytes: usize| if case.warm { 1 } else { FLUSHED_BYTES.div_ceil(bytes) };
        let source = Ramp { rows: outputs, columns: inputs };
        let weights = (0..copies(2 * inputs * outputs))
            .map(|_| self.backend.pack_weight("the bench", &source, StorageType::Bf16))
            .collect::<Result<_, _>>()?;
        // Few distinct adapters come round sooner than many: enough layers for a few of them, within reason.
        let layers = copies(2 * case.rank * (inputs + outputs) * case.rows.min(8)).min(MOST_LAYERS);
        let adapters = adapters(&self.backend, case, layers)?;
        Ok(Material {
            weights,
            adapters,
            layers,
            input: self.backend.buffer(case.rows, inputs)?,
            out: self.backend.buffer(case.rows, outputs)?,
        })
    }

    /// The base, then these mixes of adapters. They take turns, `rounds` times.
    pub(crate) fn measure(
        &self,
        case: &Case,
        mixes: &[Popularity],
        rounds: usize,
    ) -> Result<Vec<CaseResult>, Box<dyn Error>> {
        let mut material = self.material(case)?;
        let mixes: Vec<Option<Popularity>> = std::iter::once(None).chain(mixes.iter().copied().map(Some)).collect();
        let plans: Vec<RowAdapterPlan> = mixes.iter().map(|mix| plan(*mix, case.rows)).collect();
        let mut at = 0;
        let mut calls = 1;
        loop {
            let taken = self.sample(&mut material, &plans[0], calls, &mut at);
            if taken >= SAMPLE.as_secs_f64() {
                break;
            }
            calls *= 2;
        }
        let material = RefCell::new((material, at));
        let mut ways: Vec<_> = plans
            .iter()
            .map(|plan| {
                let material = &material;
                move |_: usize| {
                    let (material, at) = &mut *material.borrow_mut();
                    self.sample(material, plan, calls, at) / calls as f64
                }
            })
            .collect();
        let mut ways: Vec<&mut dyn FnMut(usize) -> f64> = ways.iter_mut().map(|way| way as _).collect();
        let turns = Turns::take(rounds, &mut ways);
        let limits = Limits::measure(&self.backend, LIMIT_TIME)?;
        let base = turns.median(0);
        let results = mixes.iter().enumerate().map(|(way, mix)| case.result(&limits, *mix, base, turns.ratio(way, 0)));
        Ok(results.collect())
    }

    /// Seconds of `calls` calls, each on the next weights and adapters.
    fn sample(&self, material: &mut Material, plan: &RowAdapterPlan, calls: usize, at: &mut usize) -> f64 {
        let rows = material.input.rows;
        let start = Instant::now();
        for _ in 0..calls {
            let part = LinearPart {
                weight: &material.weights[*at % material.weights.len()],
                bias: None,
                site: site(*at % material.layers),
                out: &mut material.out,
                mode: LinearOutput::Store,
            };
            self.backend.linear(rows, plan, &material.adapters, black_box(&material.input), &mut [part]);
            *at += 1;
        }
        start.elapsed().as_secs_f64()
    }
}
