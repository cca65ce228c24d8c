//! The cases.

use std::sync::Arc;

use manylora_kernels::cpu::{CpuBackend, CpuOptions};
use manylora_kernels::cuda::{
    AlgorithmChoice, BlasLibrary, CudaBackend, CudaError, CudaOptions, ProductChoice, ProductSource, kv_cache_bytes,
};
use manylora_kernels::{
    AdapterTable, Backend, BufferKind, LargestValues, LinearOutput, LinearPart, Module, PackedAdapter, RowAdapterPlan,
    RowSource, Site, SiteShape, StepBatch, StorageType,
};

use crate::stand_in::StandIn;
use crate::toy::{
    BLOCKS, HEAD_DIM, HEADS, KV_HEADS, LAYERS, Matrix, Numbers, Part, ROWS, Toy, VOCABULARY, adapters, batch, kv_shape,
    pack_adapter,
};

pub(crate) fn options(dtype: StorageType, graphs: bool) -> CudaOptions {
    CudaOptions {
        ordinal: 0,
        dtype,
        layers: LAYERS,
        heads: HEADS,
        kv_heads: KV_HEADS,
        head_dim: HEAD_DIM,
        memory_bytes: 48 << 20,
        shared_bytes: kv_cache_bytes(&kv_shape(dtype)) + (4 << 20),
        products: ProductChoice::Auto,
        algorithms: AlgorithmChoice::OnePerWeight { rows: ROWS },
        workspace_bytes: Some(1 << 20),
        library_folders: Vec::new(),
        graphs,
    }
}

/// With products by our own kernels.
fn own(dtype: StorageType, graphs: bool) -> Arc<CudaBackend> {
    let options = CudaOptions { products: ProductChoice::Own, workspace_bytes: None, ..options(dtype, graphs) };
    Arc::new(CudaBackend::open(options).unwrap())
}

fn cuda(dtype: StorageType, graphs: bool) -> Arc<CudaBackend> {
    Arc::new(CudaBackend::open(options(dtype, graphs)).unwrap())
}

fn toy(dtype: StorageType, graphs: bool) -> Toy<CudaBackend> {
    Toy::new(cuda(dtype, graphs), dtype, 1)
}

/// Prompts of four sequences (two long enough for several partitions), then steps of decoding, with adapters mixed,
/// composed and scaled.
fn script() -> Vec<StepBatch> {
    let chosen: [&[(u32, f32)]; 4] = [&[(0, 1.0)], &[], &[(1, 1.0), (2, 0.5)], &[(2, -0.5), (0, 0.25), (1, 1.0)]];
    let mut steps = Vec::new();
    // Sequences of 70, 290, 19 and 300 tokens, in chunks.
    for (sequence, length) in [(0, 70), (1, 290), (2, 19), (3, 300)] {
        for first in (0..length).step_by(77) {
            let rows = 77.min(length - first);
            steps.push(batch(&[Part::new(sequence, first, rows, chosen[sequence])], 20));
        }
    }
    for step in 0..4 {
        let parts: Vec<Part> = [(0, 70), (1, 290), (2, 19), (3, 300)]
            .into_iter()
            .map(|(sequence, length)| Part::new(sequence, length + step, 1, chosen[sequence]))
            .collect();
        steps.push(batch(&parts, 20));
    }
    // A chunk of a prompt beside rows that decode.
    let mixed = [Part::new(2, 23, 9, chosen[2]), Part::new(0, 74, 1, chosen[0]), Part::new(3, 304, 1, chosen[3])];
    steps.push(batch(&mixed, 20));
    steps
}

fn agree_with_the_cpu(mut tested: Toy<CudaBackend>, tolerance: f32) {
    let options = CpuOptions { num_threads: Some(1), ..CpuOptions::default() };
    // Weights and adapters are exact in every format, so the reference computes with the same numbers in f32.
    let mut reference = Toy::new(Arc::new(CpuBackend::new(options).unwrap()), StorageType::F32, 1);
    let (mut compared, mut greedy_equal) = (0, 0);
    for (number, step) in script().iter().enumerate() {
        let (got, got_greedy) = tested.step(step);
        let (want, want_greedy) = reference.step(step);
        for (row, (got, want)) in got.iter().zip(&want).enumerate() {
            let most = want.iter().fold(0.0f32, |most, value| most.max(value.abs()));
            let off = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max);
            assert!(off.is_finite() && off <= tolerance * most, "step {number} row {row}: {off} of {most}");
            let best = |values: &[f32]| (0..VOCABULARY).rev().max_by(|&a, &b| values[a].total_cmp(&values[b])).unwrap();
            assert_eq!(got_greedy[row] as usize, best(got), "step {number} row {row}");
            greedy_equal += usize::from(got_greedy[row] == want_greedy[row]);
            compared += 1;
        }
    }
    assert!(greedy_equal * 100 >= compared * 93, "{greedy_equal} of {compared} greedy tokens agree");
}

pub(crate) fn steps_agree_with_the_cpu() {
    agree_with_the_cpu(toy(StorageType::Bf16, true), 0.04);
}

pub(crate) fn half_precision_agrees_with_the_cpu() {
    agree_with_the_cpu(toy(StorageType::F16, true), 0.006);
}

pub(crate) fn linear_agrees_with_float64() {
    for dtype in [StorageType::Bf16, StorageType::F16] {
        linear_agrees(&cuda(dtype, false), dtype, 70, "cublasLtMatmul");
    }
    linear_agrees(&own(StorageType::Bf16, false), StorageType::Bf16, 70, "matmul_bf16");
    linear_agrees(&own(StorageType::F16, false), StorageType::F16, 19, "matmul_few_rows_f16");
}

fn linear_agrees(backend: &CudaBackend, dtype: StorageType, rows: usize, product: &str) {
    let (inputs, widths) = (136, [96, 48, 48]);
    let mut numbers = Numbers(3);
    let weights: Vec<Matrix> =
        widths.iter().map(|width| Matrix { columns: inputs, values: numbers.exact(width * inputs, 1.0) }).collect();
    let parts: Vec<(&str, &dyn RowSource)> = weights.iter().map(|it| ("w", it as _)).collect();
    let packed = backend.pack_weights(&parts, dtype).unwrap();
    let biases = widths.map(|width| numbers.exact(width, 1.0));
    // q and v, of different ranks.
    let sites: Vec<SiteShape> = [(Module::Q, 9, widths[0]), (Module::V, 33, widths[2])]
        .map(|(module, rank, output)| SiteShape {
            site: Site::layer(1, module),
            rank,
            input: inputs as u32,
            output: output as u32,
            scale: 0.5,
        })
        .into();
    let mut table = AdapterTable::new(0);
    for slot in 0..3u32 {
        table.install(slot, Arc::new(pack_adapter(backend, &sites, dtype, u64::from(slot))));
    }
    // A and B of every site of every adapter, as `pack_adapter` makes them.
    let factors: Vec<Vec<(Vec<f32>, Vec<f32>)>> = (0..3u32)
        .map(|slot| {
            let mut made = Numbers(u64::from(slot));
            let mut factor = |len: u32| made.exact(len as usize, 0.25);
            sites.iter().map(|site| (factor(site.rank * site.input), factor(site.output * site.rank))).collect()
        })
        .collect();
    let mut step = StepBatch { tokens: vec![0; rows], ..StepBatch::default() };
    step.positions = vec![0; rows];
    step.slot_mapping = vec![0; rows];
    let chosen = |row: usize| -> Vec<(u32, f32)> {
        match row % 5 {
            0 => vec![],
            1 => vec![(2, 0.5)],
            2 => vec![(1, 1.0), (0, -2.0)],
            _ => vec![(0, 1.0)],
        }
    };
    for row in 0..rows {
        for (slot, scale) in chosen(row) {
            step.adapters.push(row as u32, slot, scale);
        }
    }
    step.adapters.finish(rows);
    let mut input = backend.one_buffer(rows, inputs, BufferKind::INPUTS).unwrap();
    let values = numbers.exact(rows * inputs, 1.0);
    backend.write(&mut input, &values).unwrap();
    let mut outs = backend.buffers(rows, &widths, BufferKind::SUMS).unwrap();
    for mode in [LinearOutput::Store, LinearOutput::Add] {
        let before: Vec<Vec<f32>> = widths.iter().map(|width| numbers.exact(rows * width, 1.0)).collect();
        for (out, before) in outs.iter_mut().zip(&before) {
            backend.write(out, before).unwrap();
        }
        let vectors: Vec<_> = biases.iter().map(|bias| backend.vector(bias).unwrap()).collect();
        backend.begin_step(&step, &table).unwrap();
        let mut parts: Vec<LinearPart<'_, CudaBackend>> = packed
            .iter()
            .zip(&mut outs)
            .zip([Module::Q, Module::K, Module::V].iter().zip(&vectors))
            .map(|((weight, out), (module, bias))| LinearPart {
                weight,
                bias: Some(bias),
                site: Site::layer(1, *module),
                out,
                mode,
            })
            .collect();
        if let Some(device) = StandIn::counting() {
            device.reset_counts();
        }
        backend.linear(rows, &step.adapters, &table, &input, &mut parts);
        backend.end_step().unwrap();
        for (part, out) in outs.iter_mut().enumerate() {
            let got = backend.read(out, rows).unwrap();
            let width = widths[part];
            for row in 0..rows {
                let x: Vec<f64> = values[row * inputs..][..inputs].iter().map(|&x| f64::from(x)).collect();
                let dot = |row: &[f32]| row.iter().zip(&x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
                // What the row's adapters make of it: B, and how much of each of its columns.
                let mut deltas: Vec<(&[f32], Vec<f64>)> = Vec::new();
                for (slot, scale) in chosen(row) {
                    let touched = [0, 2].iter().position(|&touched| touched == part);
                    if let Some((a, b)) = touched.map(|site| &factors[slot as usize][site]) {
                        let shrunk = a.chunks(inputs).map(|a| 0.5 * f64::from(scale) * dot(a)).collect();
                        deltas.push((b, shrunk));
                    }
                }
                for column in 0..width {
                    let mut want = dot(&weights[part].values[column * inputs..][..inputs]);
                    want += f64::from(biases[part][column]);
                    if mode == LinearOutput::Add {
                        want += f64::from(before[part][row * width + column]);
                    }
                    for (b, shrunk) in &deltas {
                        let b = &b[column * shrunk.len()..][..shrunk.len()];
                        want += b.iter().zip(shrunk).map(|(&b, s)| f64::from(b) * s).sum::<f64>();
                    }
                    let got = f64::from(got[row * width + column]);
                    assert!((got - want).abs() <= 2e-2, "{dtype:?} part {part} row {row}: {got} for {want}");
                }
            }
        }
        if let Some(device) = StandIn::counting() {
            // One product for three parts that lie side by side.
            assert_eq!(device.launches(product), 1);
            assert_eq!(device.launches(""), 4, "product, shrink, expand, bias");
        }
    }
}

pub(crate) fn bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    rows.iter().map(|row| row.iter().map(|value| value.to_bits()).collect()).collect()
}

/// A sequence alone, in other chunks, without recording, gives the bits that it gives in the mixed script.
pub(crate) fn rows_do_not_depend_on_their_neighbours() {
    rows_keep_their_bits(toy(StorageType::Bf16, true), toy(StorageType::Bf16, false));
}

/// The same where no library that promises nothing has a part in it.
pub(crate) fn rows_do_not_depend_on_their_neighbours_with_own_products() {
    let toy = |graphs| Toy::new(own(StorageType::Bf16, graphs), StorageType::Bf16, 1);
    if let Some(device) = StandIn::counting() {
        device.reset_counts();
    }
    rows_keep_their_bits(toy(true), toy(false));
    if let Some(device) = StandIn::counting() {
        assert_eq!(device.launches("cublasLtMatmul"), 0);
        assert!(device.launches("matmul_bf16") > 0 && device.launches("matmul_few_rows_bf16") > 0);
    }
}

/// Without cuBLASLt nothing but it is missing.
pub(crate) fn steps_run_without_cublaslt() {
    let wanted = |products| CudaOptions { products, ..options(StorageType::Bf16, true) };
    // A machine may have one of its own: then only that it is not needed can be tried.
    if BlasLibrary::load(&[]).is_err() {
        let refused = CudaBackend::open(wanted(ProductChoice::Library)).unwrap_err().to_string();
        assert!(refused.contains("cuBLASLt was not found"), "{refused}");
        assert!(matches!(ProductChoice::Auto.source(&[]), Ok(ProductSource::Own(Some(CudaError::NoBlas { .. })))));
        let backend = CudaBackend::open(wanted(ProductChoice::Auto)).unwrap();
        assert!(
            backend.describe().contains("products by own kernels: cuBLASLt was not found"),
            "{}",
            backend.describe()
        );
    }
    let backend = own(StorageType::Bf16, true);
    assert!(backend.describe().ends_with("products by own kernels"), "{}", backend.describe());
    agree_with_the_cpu(Toy::new(backend, StorageType::Bf16, 1), 0.04);
}

fn rows_keep_their_bits(mut together: Toy<CudaBackend>, mut alone: Toy<CudaBackend>) {
    let mut by_position: Vec<Vec<(u32, Vec<u32>)>> = vec![Vec::new(); 4];
    for step in script() {
        let (rows, _) = together.step(&step);
        let rows = bits(&rows);
        for sequence in &step.sequences {
            // The table's first block tells which sequence it is.
            let number = (BLOCKS - 1 - step.block_tables[sequence.table_first as usize] as usize) / 20;
            for row in 0..sequence.rows {
                let position = sequence.first_position + row;
                by_position[number].push((position, rows[(sequence.first_row + row) as usize].clone()));
            }
        }
    }
    let chosen: [&[(u32, f32)]; 4] = [&[(0, 1.0)], &[], &[(1, 1.0), (2, 0.5)], &[(2, -0.5), (0, 0.25), (1, 1.0)]];
    for (sequence, expected) in by_position.iter().enumerate() {
        for chunk in [1, 23] {
            let total = expected.len();
            // One by one only for the first and the last rows: it takes long.
            let mut first = 0;
            while first < total {
                let rows = if chunk == 1 && first < total - 5 { (total - 5 - first).min(64) } else { chunk };
                let rows = rows.min(total - first);
                let (got, _) = alone.step(&batch(&[Part::new(sequence, first, rows, chosen[sequence])], 20));
                for (row, got) in bits(&got).iter().enumerate() {
                    let (position, want) = &expected[first + row];
                    assert_eq!(*position as usize, first + row);
                    assert!(got == want, "sequence {sequence}, chunks of {chunk}, position {}", first + row);
                }
                first += rows;
            }
        }
    }
}

pub(crate) fn recorded_steps_are_the_same() {
    let (mut recorded, mut eager) = (toy(StorageType::Bf16, true), toy(StorageType::Bf16, false));
    for round in 0..3 {
        for (number, step) in script().iter().enumerate() {
            let (got, got_greedy) = recorded.step(step);
            let (want, want_greedy) = eager.step(step);
            assert!(bits(&got) == bits(&want), "round {round} step {number}");
            assert_eq!(got_greedy, want_greedy);
        }
    }
    assert!(recorded.backend.recorded_steps() > 3, "{}", recorded.backend.recorded_steps());
    assert_eq!(eager.backend.recorded_steps(), 0);
    let before = recorded.backend.recorded_steps();
    if let Some(device) = StandIn::counting() {
        device.reset_counts();
    }
    for step in script() {
        recorded.step(&step);
    }
    assert_eq!(recorded.backend.recorded_steps(), before);
    if let Some(device) = StandIn::counting() {
        assert_eq!(device.calls("cuStreamBeginCapture_v2"), 0);
        assert_eq!(device.calls("cuGraphLaunch"), script().len() as u64);
    }
}

pub(crate) fn launches_do_not_grow_with_adapters() {
    let mut toy = toy(StorageType::Bf16, true);
    let per_step = |toy: &mut Toy<CudaBackend>, parts: &[Part]| {
        let step = batch(parts, 2);
        StandIn::get().reset_counts();
        toy.step(&step);
        StandIn::get().launches("")
    };
    // Beside the layers: embedding, gathering, norm, head, greedy. The toy has a bias more than any model, on `down`.
    let outside = 5;
    let biases = LAYERS as u64;
    for round in 0..3 {
        let base = per_step(&mut toy, &[Part::new(0, 0, 1, &[]), Part::new(1, 0, 1, &[])]);
        assert_eq!(base, outside + biases + 9 * LAYERS as u64, "base, round {round}");
        let all = [(0, 1.0), (1, 0.5), (2, 2.0)];
        let one = per_step(&mut toy, &[Part::new(0, 0, 1, &all[..1]), Part::new(1, 0, 1, &[])]);
        // Two more for the embedding, and two for the head, which this adapter touches.
        assert_eq!(one, outside + 4 + biases + 17 * LAYERS as u64, "one adapter, round {round}");
        let parts: Vec<Part> = (0..12).map(|index| Part::new(index, 0, 1, &all[index % 3..])).collect();
        assert_eq!(per_step(&mut toy, &parts), one, "many adapters, round {round}");
        let attention: Vec<Part> = (0..3).map(|index| Part::new(index, 0, 1, &all[1..2])).collect();
        assert_eq!(per_step(&mut toy, &attention), base + 2 * LAYERS as u64, "only q and v, round {round}");
    }
    assert!(toy.backend.recorded_steps() >= 4);
}

/// What is recorded is launches and nothing else: a steady step that is replayed copies, waits and allocates as often as one
/// that is launched piece by piece, and that is one copy to the card for its rows, one for its samples, and no allocation.
pub(crate) fn nothing_but_launches_is_recorded() {
    let steady = |graphs: bool| {
        let mut toy = toy(StorageType::Bf16, graphs);
        let parts: Vec<Part> = (0..3).map(|index| Part::new(index, 0, 1, &[(index as u32, 1.0)])).collect();
        let step = batch(&parts, 2);
        for _ in 0..3 {
            toy.step(&step);
        }
        StandIn::get().reset_counts();
        toy.step(&step);
        StandIn::get().all_calls()
    };
    let (launched, replayed) = (steady(false), steady(true));
    let count = |calls: &[(String, u64)], part: &str| -> u64 {
        calls.iter().filter(|(name, _)| name.contains(part)).map(|(_, count)| count).sum()
    };
    // The layers are one call in place of many.
    assert_eq!((count(&launched, "cuGraphLaunch"), count(&replayed, "cuGraphLaunch")), (0, 1));
    let launches = |calls: &[(String, u64)]| count(calls, "cuLaunchKernel") + count(calls, "cublasLtMatmul");
    assert!(launches(&replayed) + 17 * LAYERS as u64 <= launches(&launched), "{launched:?} {replayed:?}");
    for part in ["cuMemcpy", "cuMemset", "Synchronize", "Alloc", "Free", "Create", "Destroy"] {
        assert_eq!(count(&launched, part), count(&replayed, part), "{part}: {launched:?} {replayed:?}");
    }
    assert_eq!(count(&replayed, "cuMemcpyHtoDAsync"), 2, "{replayed:?}");
    assert_eq!(count(&replayed, "Alloc") + count(&replayed, "cuMemset"), 0, "{replayed:?}");
}

/// Lists hold what stands in the rows, bit for bit, and are had by one launch and one copy.
pub(crate) fn the_largest_are_listed() {
    let backend = cuda(StorageType::Bf16, false);
    let (width, rows) = (1003, 5);
    let mut logits = backend.one_buffer(128, width, BufferKind::SAMPLE_SUMS).unwrap();
    let mut values = Numbers(11).exact(rows * width, 4.0);
    // All equal; masked but for a few; numbers that are none.
    values[width..2 * width].fill(-0.5);
    values[2 * width + 9..3 * width].fill(f32::NEG_INFINITY);
    for (index, value) in values[3 * width..4 * width].iter_mut().enumerate() {
        *value = [f32::NAN, 0.0, -0.0, *value][index % 4];
    }
    backend.write(&mut logits, &values).unwrap();
    let table = AdapterTable::new(0);
    let step = batch(&[Part::new(0, 0, 1, &[])], 20);
    let samples = |rows: usize| {
        let mut plan = RowAdapterPlan::default();
        plan.finish(rows);
        backend.begin_samples(&vec![0; rows], &plan, &table).unwrap();
        backend.end_step().unwrap();
    };
    backend.begin_step(&step, &table).unwrap();
    backend.end_step().unwrap();
    samples(rows);
    let mut lists = LargestValues::default();
    for k in [1, 3, 20, LargestValues::MOST] {
        assert!(backend.largest(rows, k, &logits, &mut lists).unwrap());
        for (row, values) in values.chunks(width).enumerate() {
            let mut order: Vec<u32> = (0..width as u32).filter(|&it| values[it as usize] > f32::NEG_INFINITY).collect();
            order.sort_by(|&a, &b| values[b as usize].partial_cmp(&values[a as usize]).unwrap());
            if let Some(&last) = order.get(k - 1) {
                order.retain(|&it| values[it as usize] >= values[last as usize]);
            }
            order.sort_unstable();
            let list = lists.row(row);
            assert_eq!(list.is_some(), order.len() <= (2 * k).max(32), "{k} of row {row}: {} tie", order.len());
            let Some(list) = list else { continue };
            assert_eq!(list.tokens, order, "{k} of row {row}");
            let bits = |values: &[f32]| values.iter().map(|it| it.to_bits()).collect::<Vec<_>>();
            let wanted: Vec<f32> = order.iter().map(|&it| values[it as usize]).collect();
            assert_eq!(bits(list.values), bits(&wanted), "{k} of row {row}");
        }
        assert!(lists.row(1).is_none() && lists.row(0).is_some() && lists.row(rows).is_none());
    }
    if let Some(device) = StandIn::counting() {
        device.reset_counts();
        assert!(backend.largest(rows, 20, &logits, &mut lists).unwrap());
        let counts =
            ["cuLaunchKernel", "cuMemcpyDtoHAsync_v2", "cuMemAlloc_v2", "cuMemHostAlloc", "cuStreamSynchronize"];
        assert_eq!(counts.map(|it| device.calls(it)), [1, 1, 0, 0, 0]);
        for function in ["cuLaunchKernel", "cuMemcpyDtoHAsync_v2", "cuEventSynchronize"] {
            device.fail(function, 1, 1);
            let error = backend.largest(rows, 20, &logits, &mut lists).unwrap_err().to_string();
            assert!(error.contains(function.trim_end_matches("_v2")), "{error}");
            device.forget_failures();
            assert!(backend.largest(rows, 20, &logits, &mut lists).unwrap());
        }
    }
    // Room for lists does not grow with rows.
    samples(128);
    assert!(!backend.largest(128, LargestValues::MOST, &logits, &mut lists).unwrap());
    assert!(backend.largest(128, 20, &logits, &mut lists).unwrap());
    // The rest of the buffer is zeros.
    assert!(lists.row(0).is_some() && lists.row(127).is_none());
}

pub(crate) fn adapters_come_and_go() {
    let mut toy = toy(StorageType::Bf16, true);
    let step = batch(&[Part::new(0, 0, 4, &[(1, 1.0)]), Part::new(1, 0, 1, &[(0, 1.0)])], 4);
    let shapes = adapters();
    let reference = toy.step(&step);
    let backend = Arc::clone(&toy.backend);
    for round in 0..6u64 {
        // Another adapter in the slot changes what its rows get, and only that.
        let other = Arc::new(pack_adapter(&*backend, &shapes[2], StorageType::Bf16, 500 + round));
        drop(toy.adapters.install(1, other));
        let changed = toy.step(&step);
        assert!(bits(&changed.0)[0] != bits(&reference.0)[0]);
        assert_eq!(bits(&changed.0)[4], bits(&reference.0)[4]);
        // The first one again, packed anew, in memory that others had.
        drop(toy.adapters.install(1, Arc::new(pack_adapter(&*backend, &shapes[1], StorageType::Bf16, 101))));
        assert_eq!(bits(&toy.step(&step).0), bits(&reference.0), "round {round}");
    }
    // A slot far out: the table grows, and what was recorded is recorded anew.
    let far = Arc::new(pack_adapter(&*backend, &shapes[1], StorageType::Bf16, 101));
    toy.adapters.install(700, far);
    let step = batch(&[Part::new(0, 0, 4, &[(700, 1.0)]), Part::new(1, 0, 1, &[(0, 1.0)])], 4);
    for _ in 0..3 {
        assert_eq!(bits(&toy.step(&step).0), bits(&reference.0));
    }
    // An empty slot is the base.
    drop(toy.adapters.remove(700));
    let base = toy.step(&batch(&[Part::new(0, 0, 4, &[]), Part::new(1, 0, 1, &[(0, 1.0)])], 4));
    assert_eq!(bits(&toy.step(&step).0), bits(&base.0));
}

pub(crate) fn bytes_are_what_was_said() {
    let backend = cuda(StorageType::Bf16, false);
    let free = |backend: &CudaBackend| backend.usage().free;
    let before = free(&backend);
    for (rows, widths, kind) in [(7, &[104][..], BufferKind::SUMS), (80, &[96, 48, 48], BufferKind::INPUTS)] {
        let at = free(&backend);
        let made = backend.buffers(rows, widths, kind).unwrap();
        assert_eq!((at - free(&backend)) as u64, backend.buffer_bytes(rows, widths, kind));
        drop(made);
    }
    let start = free(&backend);
    assert_eq!(start, before);
    let said = backend.reserved_bytes(500, 600, 64, 0);
    backend.reserve(500, 600, 64, 0).unwrap();
    // What was there from the start for one row is given back.
    let taken = start - free(&backend);
    assert!(taken <= said && said - taken < 1 << 16, "{taken} of {said}");
    let at = free(&backend);
    backend.reserve(500, 600, 64, 0).unwrap();
    assert_eq!(free(&backend), at);
    for (slot, sites) in adapters().iter().enumerate() {
        let at = backend.adapter_usage().free;
        let adapter = pack_adapter(&*backend, sites, StorageType::Bf16, slot as u64);
        assert_eq!(at - backend.adapter_usage().free, adapter.bytes());
        assert_eq!(adapter.bytes(), backend.adapter_bytes(sites, StorageType::Bf16));
        drop(adapter);
        assert_eq!(backend.adapter_usage().free, at);
    }
}

pub(crate) fn failures_come_out() {
    let device = StandIn::get();
    let mut toy = toy(StorageType::Bf16, true);
    let step = batch(&[Part::new(0, 0, 2, &[(0, 1.0)])], 4);
    let reference = toy.step(&step);
    let backend = Arc::clone(&toy.backend);
    // The launch of the embedding fails: nothing after it is queued, and the end says so once.
    device.reset_counts();
    device.fail("cuLaunchKernel", 1, 1);
    backend.begin_step(&step, &toy.adapters).unwrap();
    let mut out = backend.buffer(4, crate::toy::HIDDEN).unwrap();
    let table = Matrix { columns: crate::toy::HIDDEN, values: vec![0.5; VOCABULARY * crate::toy::HIDDEN] };
    let weight = backend.pack_weight("w", &table, StorageType::Bf16).unwrap();
    backend.embed(&step, &toy.adapters, &weight, Site::EMBED, &mut out);
    backend.embed(&step, &toy.adapters, &weight, Site::EMBED, &mut out);
    assert_eq!(device.calls("cuLaunchKernel"), 1);
    let error = backend.end_step().unwrap_err().to_string();
    assert!(error.contains("cuLaunchKernel"), "{error}");
    backend.end_step().unwrap();
    device.forget_failures();
    // An algorithm that does not do for all numbers of rows is refused with the weight, before any step.
    device.fail("cublasLtMatmulAlgoCheck", 3, 15);
    let wide = Matrix { columns: 2 * crate::toy::HIDDEN, values: vec![0.5; 16 * crate::toy::HIDDEN] };
    let error = backend.pack_weight("w", &wide, StorageType::Bf16).unwrap_err().to_string();
    assert!(error.contains("[4 x 208] x [208 x 8]") && error.contains("for each number of rows"), "{error}");
    device.forget_failures();
    // A recording that fails leaves nothing behind.
    device.fail("cuGraphInstantiateWithFlags", 1, 999);
    let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| toy.step(&step)));
    assert!(failed.is_err());
    device.forget_failures();
    for _ in 0..3 {
        assert_eq!(bits(&toy.step(&step).0), bits(&reference.0));
    }
    assert!(toy.backend.recorded_steps() > 0);
}

/// Without memory for what is recorded, steps run as they do the first time.
pub(crate) fn steps_run_without_memory_for_graphs() {
    let device = StandIn::get();
    let mut toy = toy(StorageType::Bf16, true);
    let step = batch(&[Part::new(0, 0, 2, &[(0, 1.0)])], 4);
    let reference = toy.step(&step);
    device.fail("cuGraphInstantiateWithFlags", 1, 2);
    assert_eq!(bits(&toy.step(&step).0), bits(&reference.0));
    device.forget_failures();
    for _ in 0..3 {
        assert_eq!(bits(&toy.step(&step).0), bits(&reference.0));
    }
    assert_eq!(toy.backend.recorded_steps(), 0);
}

/// Adapters are moved together while a step has begun, and that fails: nobody knows where they lie, so the step gives no
/// tokens, and none begins after it.
pub(crate) fn a_move_that_fails_ends_the_step() {
    let device = StandIn::get();
    let sites = |rank| [SiteShape { site: Site::layer(0, Module::Gate), rank, input: 64, output: 512, scale: 1.0 }];
    let dtype = StorageType::Bf16;
    let probe = cuda(dtype, false);
    let (small, large) = (probe.adapter_bytes(&sites(16), dtype), probe.adapter_bytes(&sites(24), dtype));
    assert!(small < large && large <= 2 * small, "{small} {large}");
    drop(probe);
    let backend = CudaBackend::open(CudaOptions { shared_bytes: 3 * small, ..options(dtype, false) }).unwrap();
    let mut stays = AdapterTable::new(1);
    let first = pack_adapter(&backend, &sites(16), dtype, 1);
    stays.install(0, Arc::new(pack_adapter(&backend, &sites(16), dtype, 2)));
    // What is free lies around it, in two holes.
    drop((first, pack_adapter(&backend, &sites(16), dtype, 3)));
    let step = batch(&[Part::new(0, 0, 2, &[(0, 1.0)])], 4);
    backend.begin_step(&step, &stays).unwrap();
    backend.end_step().unwrap();
    device.fail("cuMemcpyDtoDAsync_v2", 1, 1);
    let fill = &mut |_: usize, a: &mut Vec<f32>, b: &mut Vec<f32>| {
        a.resize(24 * 64, 0.0);
        b.resize(24 * 512, 0.0);
        Ok(())
    };
    let error = backend.pack_adapter(&sites(24), dtype, fill).unwrap_err().to_string();
    assert!(error.contains("cuMemcpyDtoDAsync"), "{error}");
    device.forget_failures();
    let ends =
        [backend.end_step(), backend.begin_samples(&[0], &step.adapters, &stays), backend.begin_step(&step, &stays)];
    for end in ends {
        assert!(end.unwrap_err().to_string().contains("cuMemcpyDtoDAsync"));
    }
}

pub(crate) fn what_does_not_fit_is_refused() {
    let refused = CudaBackend::open(options(StorageType::F32, true)).unwrap_err().to_string();
    assert!(refused.contains("float32") && refused.contains("bfloat16"), "{refused}");
    let wide = CudaOptions { head_dim: 264, ..options(StorageType::Bf16, true) };
    assert!(CudaBackend::open(wide).unwrap_err().to_string().contains("`264`"));
    let backend = cuda(StorageType::F16, true);
    let odd = Matrix { columns: 12, values: vec![1.0; 24] };
    let error = backend.pack_weight("layer 3's q", &odd, StorageType::F16).unwrap_err().to_string();
    assert!(error.contains("layer 3's q") && error.contains("`12`"), "{error}");
    let large = Matrix { columns: 8, values: vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 70000.0] };
    let error = backend.pack_weight("a weight", &large, StorageType::F16).unwrap_err().to_string();
    assert!(error.contains("70000"), "{error}");
    let fine = Matrix { columns: 8, values: vec![1.0; 8] };
    assert!(backend.pack_weight("a weight", &fine, StorageType::Bf16).is_err());
    let huge = backend.buffer(1 << 20, 4096).unwrap_err();
    assert!(matches!(huge, manylora_kernels::KernelError::OutOfMemory { .. }), "{huge}");
    let site = SiteShape { site: Site::layer(LAYERS as u32, Module::Q), rank: 4, input: 8, output: 8, scale: 1.0 };
    let beyond = backend.pack_adapter(&[site], StorageType::F16, &mut |_, a, b| {
        a.resize(32, 0.0);
        b.resize(32, 0.0);
        Ok(())
    });
    assert!(beyond.unwrap_err().to_string().contains("beyond"));
}
