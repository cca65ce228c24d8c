//! Cases for the tests of `linear`: matrices, adapters and plans from a seed, and the float64 reference.
#![allow(dead_code, reason = "every test file uses a part of it")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use half::bf16;
use manylora_kernels::cpu::{Buffer, CpuAdapter, CpuBackend, CpuOptions, PackedWeight, SimdLevel};
use manylora_kernels::{
    AdapterTable, Backend, KernelError, LinearOutput, LinearPart, RowAdapterPlan, RowSource, Site, SiteShape,
    StorageType,
};

/// A small generator of repeatable numbers (splitmix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// In -1..1.
    pub(crate) fn value(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn values(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.value()).collect()
    }
}

pub(crate) struct Matrix {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) values: Vec<f32>,
}

impl Matrix {
    pub(crate) fn random(random: &mut Random, rows: usize, columns: usize) -> Self {
        Self { rows, columns, values: random.values(rows * columns) }
    }
}

impl RowSource for Matrix {
    fn rows(&self) -> usize {
        self.rows
    }
    fn columns(&self) -> usize {
        self.columns
    }
    fn read(&self, first: usize, out: &mut [f32]) -> Result<(), KernelError> {
        out.copy_from_slice(&self.values[first * self.columns..][..out.len()]);
        Ok(())
    }
}

/// One part of a call; its site is its index after the embedding's.
pub(crate) struct PartCase {
    pub(crate) weight: Matrix,
    pub(crate) bias: Option<Vec<f32>>,
    pub(crate) mode: LinearOutput,
    /// What the output holds before the call, `[rows, outputs]`.
    pub(crate) before: Vec<f32>,
}

/// Factors of one site, or None where the adapter does not touch it.
pub(crate) struct SiteCase {
    pub(crate) rank: usize,
    pub(crate) scale: f32,
    pub(crate) a: Vec<f32>,
    pub(crate) b: Vec<f32>,
}

pub(crate) struct Case {
    pub(crate) rows: usize,
    pub(crate) inputs: usize,
    pub(crate) input: Vec<f32>,
    pub(crate) parts: Vec<PartCase>,
    /// `[adapter][part]`
    pub(crate) adapters: Vec<Vec<Option<SiteCase>>>,
    pub(crate) adapter_dtype: StorageType,
    pub(crate) weight_dtype: StorageType,
    /// Per row, the (adapter, scale) in request order.
    pub(crate) plan: Vec<Vec<(u32, f32)>>,
}

pub(crate) fn site(part: usize) -> Site {
    Site(3 + part as u32)
}

impl Case {
    pub(crate) fn random(
        seed: u64,
        rows: usize,
        inputs: usize,
        outputs: &[usize],
        dtype: StorageType,
        ranks: &[usize],
    ) -> Self {
        let mut random = Random(seed);
        let parts = outputs
            .iter()
            .enumerate()
            .map(|(index, &outputs)| PartCase {
                weight: Matrix::random(&mut random, outputs, inputs),
                bias: (index % 2 == 0).then(|| random.values(outputs)),
                mode: if index == 1 { LinearOutput::Add } else { LinearOutput::Store },
                before: random.values(rows * outputs),
            })
            .collect();
        let adapters = ranks
            .iter()
            .enumerate()
            .map(|(adapter, &rank)| {
                outputs
                    .iter()
                    .enumerate()
                    .map(|(part, &outputs)| {
                        // A partial group: the second adapter leaves the third part alone.
                        let absent = adapter == 1 && part == 2;
                        (!absent).then(|| SiteCase {
                            rank,
                            scale: 0.25 + adapter as f32,
                            a: random.values(rank * inputs),
                            b: random.values(outputs * rank),
                        })
                    })
                    .collect()
            })
            .collect();
        Self {
            rows,
            inputs,
            input: random.values(rows * inputs),
            parts,
            adapters,
            adapter_dtype: dtype,
            weight_dtype: dtype,
            plan: vec![Vec::new(); rows],
        }
    }

    /// The call's results, one vector per part.
    pub(crate) fn run(&self, backend: &CpuBackend) -> Vec<Vec<f32>> {
        let packed = Packed::new(self, backend);
        packed.run(self, backend)
    }

    /// The same call for one row alone, or any selection of rows.
    pub(crate) fn select(&self, packed: &Packed, backend: &CpuBackend, rows: &[usize]) -> Vec<Vec<f32>> {
        packed.run_rows(self, backend, rows)
    }

    /// Float64 results, the sum of magnitudes of what was added, and how far a level's rounding between A and B may take
    /// them, per part and element.
    pub(crate) fn reference(&self, level: SimdLevel) -> Vec<Vec<(f64, f64, f64)>> {
        let round = |dtype: StorageType, value: f32| match dtype {
            StorageType::F32 => f64::from(value),
            StorageType::Bf16 => bf16::from_f32(value).to_f64(),
            StorageType::F16 => half::f16::from_f32(value).to_f64(),
        };
        // The bf16 instructions of AVX-512 and AMX take their inputs rounded; everything else sees them as they are. With
        // AMX adapters do so, too, and what their A comes to is rounded before B.
        let pairs = level >= SimdLevel::Avx512Bf16 && self.weight_dtype == StorageType::Bf16;
        let input_dtype = if pairs { StorageType::Bf16 } else { StorageType::F32 };
        let tiles = level == SimdLevel::Amx && self.adapter_dtype == StorageType::Bf16;
        let adapter_input = if tiles { StorageType::Bf16 } else { StorageType::F32 };
        let half_unit = if tiles { f64::powi(2.0, -8) } else { 0.0 };
        self.parts
            .iter()
            .enumerate()
            .map(|(index, part)| {
                let outputs = part.weight.rows;
                let mut results = Vec::with_capacity(self.rows * outputs);
                for row in 0..self.rows {
                    let x = &self.input[row * self.inputs..][..self.inputs];
                    let entries: Vec<(&SiteCase, Vec<(f64, f64)>)> = self.plan[row]
                        .iter()
                        .filter_map(|&(adapter, strength)| {
                            let site = self.adapters[adapter as usize][index].as_ref()?;
                            let shrunk = site.a.chunks_exact(self.inputs).map(|a| {
                                let scale = f64::from(site.scale * strength);
                                a.iter().zip(x).fold((0.0, 0.0), |(sum, size), (&a, &x)| {
                                    let term = scale * round(self.adapter_dtype, a) * round(adapter_input, x);
                                    (sum + term, size + term.abs())
                                })
                            });
                            Some((site, shrunk.collect()))
                        })
                        .collect();
                    for output in 0..outputs {
                        let (mut sum, mut size, mut rounding) = (0.0, 0.0, 0.0);
                        let w = &part.weight.values[output * self.inputs..][..self.inputs];
                        for (&w, &x) in w.iter().zip(x) {
                            let term = round(self.weight_dtype, w) * round(input_dtype, x);
                            sum += term;
                            size += term.abs();
                        }
                        for (site, shrunk) in &entries {
                            for (rank, (value, magnitude)) in shrunk.iter().enumerate() {
                                let b = round(self.adapter_dtype, site.b[output * site.rank + rank]);
                                sum += b * value;
                                size += (b * magnitude).abs();
                                rounding += (b * value).abs() * half_unit;
                            }
                        }
                        if let Some(bias) = &part.bias {
                            sum += f64::from(bias[output]);
                            size += f64::from(bias[output]).abs();
                        }
                        if part.mode == LinearOutput::Add {
                            let before = f64::from(part.before[row * outputs + output]);
                            sum += before;
                            size += before.abs();
                        }
                        results.push((sum, size, rounding));
                    }
                }
                results
            })
            .collect()
    }

    /// Runs the case and compares with the reference within the rounding that its additions can make.
    pub(crate) fn check(&self, backend: &CpuBackend) {
        let results = self.run(backend);
        let longest = self.plan.iter().map(Vec::len).max().unwrap_or(0);
        let rank = self.adapters.iter().flatten().flatten().map(|site| site.rank).max().unwrap_or(0);
        let additions = 2 * self.inputs + longest * rank + 16;
        let relative = additions as f64 * f64::powi(2.0, -24);
        for (part, (got, wanted)) in results.iter().zip(self.reference(backend.level())).enumerate() {
            for (index, (&got, (wanted, size, rounding))) in got.iter().zip(wanted).enumerate() {
                let error = (f64::from(got) - wanted).abs();
                assert!(
                    error <= relative * size + rounding + 1e-30,
                    "{} {:?}, {} rows x {} inputs, part {part}, row {}: {got} is {error:e} from {wanted}",
                    backend.level(),
                    self.weight_dtype,
                    self.rows,
                    self.inputs,
                    index / self.parts[part].weight.rows,
                );
            }
        }
    }
}

/// A case's weights and adapters on a backend.
pub(crate) struct Packed {
    weights: Vec<PackedWeight>,
    biases: Vec<Option<<CpuBackend as Backend>::Vector>>,
    pub(crate) adapters: AdapterTable<CpuAdapter>,
}

impl Packed {
    pub(crate) fn new(case: &Case, backend: &CpuBackend) -> Self {
        let mut adapters = AdapterTable::new(case.adapters.len());
        for (slot, sites) in case.adapters.iter().enumerate() {
            let present: Vec<(usize, &SiteCase)> =
                sites.iter().enumerate().filter_map(|(part, site)| Some((part, site.as_ref()?))).collect();
            let shapes: Vec<SiteShape> = present
                .iter()
                .map(|&(part, factors)| SiteShape {
                    site: site(part),
                    rank: factors.rank as u32,
                    input: case.inputs as u32,
                    output: case.parts[part].weight.rows as u32,
                    scale: factors.scale,
                })
                .collect();
            let adapter = backend
                .pack_adapter(&shapes, case.adapter_dtype, &mut |index, a, b| {
                    a.clear();
                    b.clear();
                    a.extend_from_slice(&present[index].1.a);
                    b.extend_from_slice(&present[index].1.b);
                    Ok(())
                })
                .unwrap();
            adapters.install(slot as u32, Arc::new(adapter));
        }
        Self {
            weights: case
                .parts
                .iter()
                .map(|part| backend.pack_weight("w", &part.weight, case.weight_dtype).unwrap())
                .collect(),
            biases: case
                .parts
                .iter()
                .map(|part| part.bias.as_ref().map(|bias| backend.vector(bias).unwrap()))
                .collect(),
            adapters,
        }
    }

    pub(crate) fn run(&self, case: &Case, backend: &CpuBackend) -> Vec<Vec<f32>> {
        self.run_rows(case, backend, &(0..case.rows).collect::<Vec<_>>())
    }

    pub(crate) fn run_rows(&self, case: &Case, backend: &CpuBackend, rows: &[usize]) -> Vec<Vec<f32>> {
        let mut input = backend.buffer(rows.len(), case.inputs).unwrap();
        let mut plan = RowAdapterPlan::default();
        let mut outs: Vec<Buffer> =
            case.parts.iter().map(|part| backend.buffer(rows.len(), part.weight.rows).unwrap()).collect();
        for (to, &from) in rows.iter().enumerate() {
            input.row_mut(to).copy_from_slice(&case.input[from * case.inputs..][..case.inputs]);
            for (out, part) in outs.iter_mut().zip(&case.parts) {
                let width = out.width;
                out.row_mut(to).copy_from_slice(&part.before[from * width..][..width]);
            }
            for &(slot, scale) in &case.plan[from] {
                plan.push(to as u32, slot, scale);
            }
        }
        plan.finish(rows.len());
        self.call(case, backend, rows.len(), &plan, &input, &mut outs);
        outs.iter_mut().map(|out| backend.read(out, rows.len()).unwrap().to_vec()).collect()
    }

    /// The gated activation of the case's two parts for a selection of rows.
    pub(crate) fn gated(&self, case: &Case, backend: &CpuBackend, rows: &[usize]) -> Vec<f32> {
        let width = case.parts[0].weight.rows;
        let (mut input, mut plan) = (backend.buffer(rows.len(), case.inputs).unwrap(), RowAdapterPlan::default());
        let [mut gate, mut up, mut out] = [(); 3].map(|()| backend.buffer(rows.len(), width).unwrap());
        for (to, &from) in rows.iter().enumerate() {
            input.row_mut(to).copy_from_slice(&case.input[from * case.inputs..][..case.inputs]);
            for &(slot, scale) in &case.plan[from] {
                plan.push(to as u32, slot, scale);
            }
        }
        plan.finish(rows.len());
        let mut parts = [(0, &mut gate), (1, &mut up)].map(|(index, out)| LinearPart {
            weight: &self.weights[index],
            bias: self.biases[index].as_ref(),
            site: site(index),
            out,
            mode: LinearOutput::Store,
        });
        backend.gated_linear(rows.len(), &plan, &self.adapters, &input, &mut parts, &mut out);
        backend.read(&mut out, rows.len()).unwrap().to_vec()
    }

    /// The call alone, which allocates nothing here for up to three parts.
    pub(crate) fn call(
        &self,
        case: &Case,
        backend: &CpuBackend,
        rows: usize,
        plan: &RowAdapterPlan,
        input: &Buffer,
        outs: &mut [Buffer],
    ) {
        let mut outs = outs.iter_mut();
        let mut part = |index: usize| LinearPart {
            weight: &self.weights[index],
            bias: self.biases[index].as_ref(),
            site: site(index),
            out: outs.next().unwrap(),
            mode: case.parts[index].mode,
        };
        match case.parts.len() {
            1 => backend.linear(rows, plan, &self.adapters, input, &mut [part(0)]),
            2 => backend.linear(rows, plan, &self.adapters, input, &mut [part(0), part(1)]),
            3 => backend.linear(rows, plan, &self.adapters, input, &mut [part(0), part(1), part(2)]),
            count => panic!("{count} parts"),
        }
    }
}

pub(crate) fn backend(level: SimdLevel, threads: usize) -> CpuBackend {
    CpuBackend::new(CpuOptions { num_threads: Some(threads), level: Some(level), ..CpuOptions::default() }).unwrap()
}

/// Every available level with every storage type.
pub(crate) fn variants() -> Vec<(SimdLevel, StorageType)> {
    SimdLevel::available()
        .into_iter()
        .flat_map(|level| [(level, StorageType::Bf16), (level, StorageType::F32)])
        .collect()
}

pub(crate) fn bits(results: &[Vec<f32>]) -> Vec<Vec<u32>> {
    results.iter().map(|part| part.iter().map(|value| value.to_bits()).collect()).collect()
}
