//! A decoder of two layers, over any backend: every operation, in the order in which the real one calls them.

use std::sync::Arc;

use half::bf16;
use manylora_kernels::{
    AdapterTable, AttentionShape, Backend, BufferKind, HeadInputs, KernelError, KvShape, LinearOutput, LinearPart,
    Module, RowAdapterPlan, RowSource, SequenceRows, Site, SiteShape, StepBatch, StorageType,
};

pub(crate) const LAYERS: usize = 2;
pub(crate) const HEADS: usize = 4;
pub(crate) const KV_HEADS: usize = 2;
pub(crate) const HEAD_DIM: usize = 24;
/// Not a multiple of 64.
pub(crate) const HIDDEN: usize = 104;
pub(crate) const INTERMEDIATE: usize = 136;
/// Odd, so that rows of logits are padded.
pub(crate) const VOCABULARY: usize = 203;
pub(crate) const BLOCK_SIZE: usize = 16;
pub(crate) const BLOCKS: usize = 96;
pub(crate) const POSITIONS: usize = 1024;
pub(crate) const ROWS: usize = 80;
const EPSILON: f32 = 1e-5;
const Q: usize = HEADS * HEAD_DIM;
const KV: usize = KV_HEADS * HEAD_DIM;

/// Numbers in -1..1 that look random and are always the same.
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    }

    /// Values that bf16 and f16 both hold exactly.
    pub(crate) fn exact(&mut self, length: usize, scale: f32) -> Vec<f32> {
        (0..length).map(|_| bf16::from_f32((self.next() * 64.0).round() / 64.0).to_f32() * scale).collect()
    }
}

pub(crate) struct Matrix {
    pub(crate) columns: usize,
    pub(crate) values: Vec<f32>,
}

impl RowSource for Matrix {
    fn rows(&self) -> usize {
        self.values.len() / self.columns
    }

    fn columns(&self) -> usize {
        self.columns
    }

    fn read(&self, first: usize, out: &mut [f32]) -> Result<(), KernelError> {
        out.copy_from_slice(&self.values[first * self.columns..][..out.len()]);
        Ok(())
    }
}

/// Sites with their ranks, of each adapter.
pub(crate) fn adapters() -> Vec<Vec<SiteShape>> {
    let shape = |site: Site, rank: u32, input: usize, output: usize, scale: f32| SiteShape {
        site,
        rank,
        input: input as u32,
        output: output as u32,
        scale,
    };
    let module = |layer: u32, module: Module, rank: u32, scale: f32| {
        let (input, output) = match module {
            Module::Q => (HIDDEN, Q),
            Module::K | Module::V => (HIDDEN, KV),
            Module::O => (Q, HIDDEN),
            Module::Down => (INTERMEDIATE, HIDDEN),
            _ => (HIDDEN, INTERMEDIATE),
        };
        shape(Site::layer(layer, module), rank, input, output, scale)
    };
    let layers = 0..LAYERS as u32;
    let mut everywhere: Vec<SiteShape> =
        layers.clone().flat_map(|layer| Module::LINEAR.map(|it| module(layer, it, 3, 0.5))).collect();
    everywhere.push(shape(Site::EMBED, 5, VOCABULARY, HIDDEN, 0.5));
    everywhere.push(shape(Site::HEAD, 4, HIDDEN, VOCABULARY, 0.25));
    let attention = layers.clone().flat_map(|layer| [Module::Q, Module::V].map(|it| module(layer, it, 16, 0.25)));
    let mlp = layers.flat_map(|layer| [Module::Gate, Module::Up, Module::Down].map(|it| module(layer, it, 40, 0.125)));
    vec![everywhere, attention.collect(), mlp.collect()]
}

struct Layer<B: Backend> {
    norms: [B::Vector; 2],
    qkv: Vec<B::Weight>,
    biases: [B::Vector; 3],
    head_norms: [B::Vector; 2],
    o: B::Weight,
    gate_up: Vec<B::Weight>,
    down: B::Weight,
    down_bias: B::Vector,
}

pub(crate) struct Toy<B: Backend> {
    pub(crate) backend: Arc<B>,
    pub(crate) adapters: AdapterTable<B::Adapter>,
    embedding: B::Weight,
    head: B::Weight,
    final_norm: B::Vector,
    layers: Vec<Layer<B>>,
    cos: B::Vector,
    sin: B::Vector,
    pub(crate) cache: B::KvCache,
    /// hidden, normed, q, k, v, attended, gate, up, activated
    buffers: Vec<B::Buffer>,
    /// sampled, sampled_normed, logits
    samples: Vec<B::Buffer>,
    walk: u64,
    windows: [Option<usize>; LAYERS],
}

pub(crate) fn kv_shape(dtype: StorageType) -> KvShape {
    let (kv_heads, head_dim) = (KV_HEADS, HEAD_DIM);
    KvShape { layers: LAYERS, kv_heads, head_dim, block_size: BLOCK_SIZE, blocks: BLOCKS, dtype }
}

impl<B: Backend> Toy<B> {
    pub(crate) fn new(backend: Arc<B>, dtype: StorageType, walk: u64) -> Self {
        let mut toy = Self::without_adapters(backend, dtype, walk);
        for (slot, sites) in adapters().iter().enumerate() {
            let adapter = pack_adapter(&*toy.backend, sites, dtype, 100 + slot as u64);
            toy.adapters.install(slot as u32, Arc::new(adapter));
        }
        toy
    }

    pub(crate) fn without_adapters(backend: Arc<B>, dtype: StorageType, walk: u64) -> Self {
        let mut numbers = Numbers(7);
        let matrix = |numbers: &mut Numbers, rows: usize, columns: usize| {
            let scale = [1.0, 0.5, 0.25, 0.125, 0.0625][(columns as f32).log(4.0) as usize];
            Matrix { columns, values: numbers.exact(rows * columns, scale) }
        };
        let near_one = |numbers: &mut Numbers, width: usize| -> Vec<f32> {
            numbers.exact(width, 0.25).iter().map(|value| 1.0 + value).collect()
        };
        let b = &*backend;
        let embedding = b.pack_weight("embedding", &matrix(&mut numbers, VOCABULARY, HIDDEN), dtype).unwrap();
        let head = b.pack_weight("head", &matrix(&mut numbers, VOCABULARY, HIDDEN), dtype).unwrap();
        let final_norm = b.vector(&near_one(&mut numbers, HIDDEN)).unwrap();
        let layers = (0..LAYERS).map(|_| {
            let mut group = |widths: &[usize]| {
                let parts: Vec<Matrix> = widths.iter().map(|&rows| matrix(&mut numbers, rows, HIDDEN)).collect();
                let parts: Vec<(&str, &dyn RowSource)> = parts.iter().map(|part| ("w", part as _)).collect();
                b.pack_weights(&parts, dtype).unwrap()
            };
            let (qkv, gate_up) = (group(&[Q, KV, KV]), group(&[INTERMEDIATE, INTERMEDIATE]));
            Layer {
                norms: [0, 1].map(|_| b.vector(&near_one(&mut numbers, HIDDEN)).unwrap()),
                qkv,
                biases: [Q, KV, KV].map(|width| b.vector(&numbers.exact(width, 0.5)).unwrap()),
                head_norms: [0, 1].map(|_| b.vector(&near_one(&mut numbers, HEAD_DIM)).unwrap()),
                o: b.pack_weight("o", &matrix(&mut numbers, HIDDEN, Q), dtype).unwrap(),
                gate_up,
                down: b.pack_weight("down", &matrix(&mut numbers, HIDDEN, INTERMEDIATE), dtype).unwrap(),
                down_bias: b.vector(&numbers.exact(HIDDEN, 0.5)).unwrap(),
            }
        });
        let layers = layers.collect();
        let angle = |index: usize| {
            let (position, pair) = (index / (HEAD_DIM / 2), index % (HEAD_DIM / 2));
            position as f64 / 1000_f64.powf(pair as f64 / (HEAD_DIM / 2) as f64)
        };
        let table = |f: fn(f64) -> f64| -> Vec<f32> {
            (0..POSITIONS * HEAD_DIM / 2).map(|index| f(angle(index)) as f32).collect()
        };
        let mut buffers = b.buffers(ROWS, &[HIDDEN], BufferKind::SUMS).unwrap();
        buffers.extend(b.buffers(ROWS, &[HIDDEN], BufferKind::INPUTS).unwrap());
        buffers.extend(b.buffers(ROWS, &[Q, KV, KV], BufferKind::SUMS).unwrap());
        buffers.extend(b.buffers(ROWS, &[Q], BufferKind::INPUTS).unwrap());
        buffers.extend(b.buffers(ROWS, &[INTERMEDIATE, INTERMEDIATE], BufferKind::SUMS).unwrap());
        buffers.extend(b.buffers(ROWS, &[INTERMEDIATE], BufferKind::INPUTS).unwrap());
        let mut samples = b.buffers(ROWS, &[HIDDEN], BufferKind::SAMPLE_SUMS).unwrap();
        samples.extend(b.buffers(ROWS, &[HIDDEN], BufferKind::SAMPLE_INPUTS).unwrap());
        samples.extend(b.buffers(ROWS, &[VOCABULARY], BufferKind::SAMPLE_SUMS).unwrap());
        b.reserve(ROWS, ROWS, 40, INTERMEDIATE).unwrap();
        Self {
            adapters: AdapterTable::new(0),
            embedding,
            head,
            final_norm,
            layers,
            cos: b.vector(&table(f64::cos)).unwrap(),
            sin: b.vector(&table(f64::sin)).unwrap(),
            cache: b.kv_cache(kv_shape(dtype)).unwrap(),
            buffers,
            samples,
            backend,
            walk,
            windows: [None, Some(300)],
        }
    }

    /// Runs a step; logits and greedy tokens of its sample rows.
    pub(crate) fn step(&mut self, batch: &StepBatch) -> (Vec<Vec<f32>>, Vec<u32>) {
        let Self { backend, adapters, layers, cos, sin, cache, buffers, samples, windows, .. } = self;
        let b = &**backend;
        let rows = batch.rows();
        b.begin_step(batch, adapters).unwrap();
        let [hidden, normed, q, k, v, attended, gate, up, activated] = &mut buffers[..] else { unreachable!() };
        b.embed(batch, adapters, &self.embedding, Site::EMBED, hidden);
        b.run_layers(self.walk, batch, &mut || {
            for (index, layer) in layers.iter().enumerate() {
                let site = |module| Site::layer(index as u32, module);
                let plan = &batch.adapters;
                let shape = AttentionShape {
                    heads: HEADS,
                    kv_heads: KV_HEADS,
                    head_dim: HEAD_DIM,
                    scale: 0.2,
                    window: windows[index],
                };
                b.rms_norm(rows, hidden, &layer.norms[0], EPSILON, site(Module::InputNorm), normed);
                let mut parts: Vec<LinearPart<'_, B>> = layer
                    .qkv
                    .iter()
                    .zip([&mut *q, &mut *k, &mut *v])
                    .zip([Module::Q, Module::K, Module::V])
                    .map(|((weight, out), module)| LinearPart {
                        weight,
                        bias: None,
                        site: site(module),
                        out,
                        mode: LinearOutput::Store,
                    })
                    .collect();
                b.linear(rows, plan, adapters, normed, &mut parts);
                let [q_bias, k_bias, v_bias] = &layer.biases;
                let [q_norm, k_norm] = &layer.head_norms;
                // One layer as Qwen2 has it, one as Qwen3.
                let heads = if index == 0 {
                    let (q_bias, k_bias, v_bias) = (Some(q_bias), Some(k_bias), Some(v_bias));
                    HeadInputs { q_bias, k_bias, v_bias, ..HeadInputs::NONE }
                } else {
                    HeadInputs { q_norm: Some(q_norm), k_norm: Some(k_norm), epsilon: EPSILON, ..HeadInputs::NONE }
                };
                b.rope_kv_write(batch, index, &shape, &heads, cos, sin, q, k, v, cache);
                b.attention(batch, index, &shape, q, cache, attended);
                let mut part = [LinearPart {
                    weight: &layer.o,
                    bias: None,
                    site: site(Module::O),
                    out: &mut *hidden,
                    mode: LinearOutput::Add,
                }];
                b.linear(rows, plan, adapters, attended, &mut part);
                b.rms_norm(rows, hidden, &layer.norms[1], EPSILON, site(Module::PostNorm), normed);
                let [first, second] = &layer.gate_up[..] else { unreachable!() };
                let mode = LinearOutput::Store;
                let mut parts = [
                    LinearPart { weight: first, bias: None, site: site(Module::Gate), out: &mut *gate, mode },
                    LinearPart { weight: second, bias: None, site: site(Module::Up), out: &mut *up, mode },
                ];
                b.linear(rows, plan, adapters, normed, &mut parts);
                b.gated_activation(rows, gate, up, activated);
                let mut part = [LinearPart {
                    weight: &layer.down,
                    bias: Some(&layer.down_bias),
                    site: site(Module::Down),
                    out: &mut *hidden,
                    mode: LinearOutput::Add,
                }];
                b.linear(rows, plan, adapters, activated, &mut part);
            }
        });
        b.end_step().unwrap();
        let count = batch.sample_rows.len();
        let mut plan = RowAdapterPlan::default();
        for (index, &row) in batch.sample_rows.iter().enumerate() {
            if !batch.adapters.is_empty() {
                for &entry in batch.adapters.row(row as usize) {
                    let entry = batch.adapters.entries()[entry as usize];
                    plan.push(index as u32, entry.slot, entry.scale);
                }
            }
        }
        plan.finish(count);
        let [sampled, sampled_normed, logits] = &mut samples[..] else { unreachable!() };
        b.begin_samples(&batch.sample_rows, &plan, adapters).unwrap();
        b.gather_rows(&batch.sample_rows, hidden, sampled);
        b.rms_norm(count, sampled, &self.final_norm, EPSILON, Site::FINAL_NORM, sampled_normed);
        let mut part = [LinearPart {
            weight: &self.head,
            bias: None,
            site: Site::HEAD,
            out: &mut *logits,
            mode: LinearOutput::Store,
        }];
        b.linear(count, &plan, adapters, sampled_normed, &mut part);
        b.end_step().unwrap();
        let mut greedy = vec![u32::MAX; count];
        b.argmax(count, logits, &mut greedy).unwrap();
        let rows = b.read(logits, count).unwrap().chunks_exact(VOCABULARY).map(<[f32]>::to_vec).collect();
        (rows, greedy)
    }
}

pub(crate) fn pack_adapter<B: Backend>(backend: &B, sites: &[SiteShape], dtype: StorageType, seed: u64) -> B::Adapter {
    let mut numbers = Numbers(seed);
    let fill = &mut |index: usize, a: &mut Vec<f32>, b: &mut Vec<f32>| {
        let SiteShape { rank, input, output, .. } = sites[index];
        *a = numbers.exact((rank * input) as usize, 0.25);
        *b = numbers.exact((output * rank) as usize, 0.25);
        Ok(())
    };
    backend.pack_adapter(sites, dtype, fill).unwrap()
}

/// One sequence of a step: its number (which gives it its blocks and tokens), where its rows start, how many there are,
/// and its adapters.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) sequence: usize,
    pub(crate) first: usize,
    pub(crate) rows: usize,
    pub(crate) adapters: Vec<(u32, f32)>,
}

impl Part {
    pub(crate) fn new(sequence: usize, first: usize, rows: usize, adapters: &[(u32, f32)]) -> Self {
        Self { sequence, first, rows, adapters: adapters.to_vec() }
    }
}

/// The token of a sequence at a position.
fn token(sequence: usize, position: usize) -> u32 {
    ((sequence * 31 + position * 17 + position / 5) % VOCABULARY) as u32
}

/// A step over these parts; logits of every row are wanted.
pub(crate) fn batch(parts: &[Part], blocks_each: usize) -> StepBatch {
    // Blocks from the back, so that ids and positions do not agree by accident.
    batch_in(parts, &|sequence, index| {
        assert!(index < blocks_each && (sequence + 1) * blocks_each <= BLOCKS);
        (BLOCKS - 1 - (sequence * blocks_each + index)) as u32
    })
}

/// As [`batch`], where the blocks of each sequence are given.
pub(crate) fn batch_in(parts: &[Part], block_of: &dyn Fn(usize, usize) -> u32) -> StepBatch {
    let mut batch = StepBatch::default();
    for part in parts {
        let (first_row, table_first) = (batch.rows() as u32, batch.block_tables.len() as u32);
        let block = |index: usize| block_of(part.sequence, index);
        let blocks = (part.first + part.rows).div_ceil(BLOCK_SIZE);
        batch.block_tables.extend((0..blocks).map(block));
        batch.sequences.push(SequenceRows {
            first_row,
            rows: part.rows as u32,
            first_position: part.first as u32,
            table_first,
            table_len: blocks as u32,
        });
        for position in part.first..part.first + part.rows {
            let row = batch.rows() as u32;
            batch.tokens.push(token(part.sequence, position));
            batch.positions.push(position as u32);
            batch.slot_mapping.push(block(position / BLOCK_SIZE) * BLOCK_SIZE as u32 + (position % BLOCK_SIZE) as u32);
            batch.sample_rows.push(row);
            for &(slot, scale) in &part.adapters {
                batch.adapters.push(row, slot, scale);
            }
        }
    }
    let rows = batch.rows();
    batch.adapters.finish(rows);
    batch
}
