//! One linear map with and without adapters, over rows: the kernel that a step is made of.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use manylora_kernels::cpu::{CpuBackend, CpuOptions};
use manylora_kernels::{
    AdapterTable, Backend, KernelError, LinearOutput, LinearPart, Module, RowAdapterPlan, RowSource, Site, SiteShape,
    StorageType,
};

const WIDTH: usize = 896;
const OUTPUTS: usize = 4864;

/// Which adapter, if any, a row gets.
type Popularity = fn(u32) -> Option<u32>;

struct Ramp;

impl RowSource for Ramp {
    fn rows(&self) -> usize {
        OUTPUTS
    }

    fn columns(&self) -> usize {
        WIDTH
    }

    fn read(&self, first: usize, out: &mut [f32]) -> Result<(), KernelError> {
        for (index, value) in out.iter_mut().enumerate() {
            *value = ((first * WIDTH + index) % 251) as f32 / 2510.0 - 0.05;
        }
        Ok(())
    }
}

fn linear(c: &mut Criterion) {
    let backend = CpuBackend::new(CpuOptions::default()).expect("a backend");
    let site = Site::layer(0, Module::Up);
    let weight = backend.pack_weight("bench", &Ramp, StorageType::Bf16).expect("a weight");
    let mut group = c.benchmark_group(format!("linear {WIDTH}->{OUTPUTS} bf16, {}", backend.describe()));
    group.sample_size(20);
    for rank in [8_u32, 16, 64, 128] {
        let shape = SiteShape { site, rank, input: WIDTH as u32, output: OUTPUTS as u32, scale: 1.0 };
        let mut table = AdapterTable::new(64);
        for slot in 0..64 {
            let adapter = backend
                .pack_adapter(&[shape], StorageType::Bf16, &mut |_, a, b| {
                    a.resize(rank as usize * WIDTH, 0.01);
                    b.resize(rank as usize * OUTPUTS, 0.01);
                    Ok(())
                })
                .expect("an adapter");
            table.install(slot, Arc::new(adapter));
        }
        for rows in [1_usize, 8, 32, 64] {
            let input = backend.buffer(rows, WIDTH).expect("a buffer");
            let mut out = backend.buffer(rows, OUTPUTS).expect("a buffer");
            let popularity: [(&str, Popularity); 3] =
                [("base", |_| None), ("identical", |_| Some(0)), ("distinct", Some)];
            for (name, slot) in popularity {
                if name == "base" && rank != 8 {
                    continue;
                }
                let mut plan = RowAdapterPlan::default();
                for row in 0..rows as u32 {
                    if let Some(slot) = slot(row) {
                        plan.push(row, slot, 1.0);
                    }
                }
                plan.finish(rows);
                group.throughput(Throughput::Bytes((2 * WIDTH * OUTPUTS) as u64));
                let id = BenchmarkId::new(format!("{name}, rank {rank}"), rows);
                group.bench_function(id, |bencher| {
                    bencher.iter(|| {
                        let part =
                            LinearPart { weight: &weight, bias: None, site, out: &mut out, mode: LinearOutput::Store };
                        backend.linear(rows, &plan, &table, black_box(&input), &mut [part]);
                    });
                });
            }
        }
    }
    group.finish();
}

criterion_group!(benches, linear);
criterion_main!(benches);
