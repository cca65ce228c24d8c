//! KV blocks and adapters share memory: each takes what the other leaves, and neither sees anything of it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use manylora_kernels::cuda::{CudaAdapter, CudaBackend, CudaOptions, kv_cache_bytes};
use manylora_kernels::{Backend, KvShape, Module, PackedAdapter, Site, SiteShape, StorageType};

use crate::cases::{bits, options};
use crate::stand_in::StandIn;
use crate::toy::{BLOCK_SIZE, BLOCKS, Numbers, Part, Toy, adapters, batch, batch_in, kv_shape, pack_adapter};

const DTYPE: StorageType = StorageType::Bf16;
const SEQUENCES: usize = 4;
/// Positions of the longest sequence.
const LONGEST: usize = 400;

/// A backend whose KV blocks take all that they share with adapters, while there are none.
fn elastic(graphs: bool) -> Arc<CudaBackend> {
    let shared_bytes = kv_cache_bytes(&kv_shape(DTYPE));
    Arc::new(CudaBackend::open(CudaOptions { shared_bytes, ..options(DTYPE, graphs) }).unwrap())
}

/// What an adapter that no row uses is made of.
fn filler_sites(rank: u32) -> [SiteShape; 1] {
    [SiteShape { site: Site::layer(0, Module::Gate), rank, input: 104, output: 136, scale: 1.0 }]
}

/// An adapter of NaN.
fn filler(backend: &CudaBackend, rank: u32) -> CudaAdapter {
    let fill = &mut |_: usize, a: &mut Vec<f32>, b: &mut Vec<f32>| {
        *a = vec![f32::NAN; rank as usize * 104];
        *b = vec![f32::NAN; rank as usize * 136];
        Ok(())
    };
    backend.pack_adapter(&filler_sites(rank), DTYPE, fill).unwrap()
}

/// Who has the bytes: what an engine's control plane would keep.
struct World {
    numbers: Numbers,
    toy: Toy<CudaBackend>,
    bytes: usize,
    block_bytes: usize,
    free: Vec<u32>,
    retired: Vec<u32>,
    /// Of each sequence.
    blocks: Vec<Vec<u32>>,
    lengths: [usize; SEQUENCES],
    /// The adapters of rows that are resident, by their slots.
    residents: BTreeMap<u32, usize>,
    fillers: Vec<Arc<CudaAdapter>>,
    leaving: Vec<JoinHandle<()>>,
    loads: usize,
    evictions: usize,
}

impl World {
    fn new(seed: u64) -> Self {
        let toy = Toy::without_adapters(elastic(true), DTYPE, 1);
        Self {
            numbers: Numbers(seed),
            toy,
            bytes: kv_cache_bytes(&kv_shape(DTYPE)),
            block_bytes: kv_cache_bytes(&kv_shape(DTYPE)) / BLOCKS,
            free: (0..BLOCKS as u32).collect(),
            retired: Vec::new(),
            blocks: vec![Vec::new(); SEQUENCES],
            lengths: [0; SEQUENCES],
            residents: BTreeMap::new(),
            fillers: Vec::new(),
            leaving: Vec::new(),
            loads: 0,
            evictions: 0,
        }
    }

    fn below(&mut self, end: usize) -> usize {
        (f32::midpoint(self.numbers.next(), 1.0) * end as f32) as usize % end
    }

    fn adapter_bytes(&self) -> usize {
        let fillers: usize = self.fillers.iter().map(|adapter| PackedAdapter::bytes(&**adapter)).sum();
        fillers + self.residents.values().sum::<usize>()
    }

    /// Makes the blocks as many as fit beside `adapters` bytes of adapters; false if too many are held.
    fn balance(&mut self, adapters: usize) -> bool {
        let held: usize = self.blocks.iter().map(Vec::len).sum();
        let wanted = self.bytes.saturating_sub(adapters) / self.block_bytes;
        if adapters > self.bytes || wanted < held {
            return false;
        }
        while held + self.free.len() < wanted {
            let index = self.below(self.retired.len());
            self.free.push(self.retired.swap_remove(index));
        }
        let mut given_up = Vec::new();
        while held + self.free.len() > wanted {
            let index = self.below(self.free.len());
            given_up.push(self.free.swap_remove(index));
        }
        if !given_up.is_empty() {
            let backend = Arc::clone(&self.toy.backend);
            backend.release_blocks(&mut self.toy.cache, &given_up);
            self.retired.extend(given_up);
        }
        true
    }

    /// Loads the adapter of a slot, or one that no row uses; false if there is no room.
    fn load(&mut self, slot: Option<u32>) -> bool {
        let backend = Arc::clone(&self.toy.backend);
        let rank = 1 + self.below(300) as u32;
        let bytes = match slot {
            Some(slot) => backend.adapter_bytes(&adapters()[slot as usize], DTYPE),
            None => backend.adapter_bytes(&filler_sites(rank), DTYPE),
        };
        if !self.balance(self.adapter_bytes() + bytes) {
            return false;
        }
        self.loads += 1;
        // As the engine does it: on another thread than that of the steps.
        let pack = |slot: Option<u32>| match slot {
            Some(slot) => pack_adapter(&*backend, &adapters()[slot as usize], DTYPE, 100 + u64::from(slot)),
            None => filler(&backend, rank),
        };
        let adapter = Arc::new(std::thread::scope(|scope| scope.spawn(|| pack(slot)).join()).unwrap());
        match slot {
            Some(slot) => {
                self.residents.insert(slot, bytes);
                drop(self.toy.adapters.install(slot, adapter));
            }
            None => self.fillers.push(adapter),
        }
        true
    }

    /// Evicts an adapter, which is given back a little later, by another thread; false if there is none.
    fn evict(&mut self) -> bool {
        let index = self.below(self.fillers.len() + self.residents.len() + 1);
        let gone = if index < self.fillers.len() {
            Some(self.fillers.swap_remove(index))
        } else if let Some((slot, _)) = self.residents.pop_first() {
            self.toy.adapters.remove(slot)
        } else {
            self.fillers.pop()
        };
        let Some(gone) = gone else { return false };
        self.evictions += 1;
        self.leaving.push(std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(2));
            drop(gone);
        }));
        assert!(self.balance(self.adapter_bytes()));
        true
    }

    /// Gives a sequence blocks for so many positions, at the cost of adapters; false if that is not enough.
    fn extend(&mut self, sequence: usize, positions: usize) -> bool {
        while self.blocks[sequence].len() * BLOCK_SIZE < positions {
            if self.free.is_empty() && !self.evict() {
                return false;
            }
            if !self.free.is_empty() {
                let index = self.below(self.free.len());
                let block = self.free.swap_remove(index);
                self.blocks[sequence].push(block);
            }
        }
        true
    }

    fn finish(&mut self, sequence: usize) {
        self.lengths[sequence] = 0;
        self.free.append(&mut self.blocks[sequence]);
    }

    /// Some rows of some sequences.
    fn parts(&mut self, chosen: &[&[(u32, f32)]; SEQUENCES]) -> Vec<Part> {
        let mut parts = Vec::new();
        let first = self.below(SEQUENCES);
        for sequence in (0..SEQUENCES).map(|index| (first + index) % SEQUENCES).take(1 + self.below(3)) {
            let rows = if self.below(2) == 0 { 1 } else { 1 + self.below(25) };
            if self.lengths[sequence] + rows > LONGEST {
                self.finish(sequence);
            }
            let start = self.lengths[sequence];
            let mut slots = chosen[sequence].iter().map(|(slot, _)| *slot);
            let ready = slots.all(|slot| self.residents.contains_key(&slot) || self.load(Some(slot)));
            if !ready || !self.extend(sequence, start + rows) {
                self.finish(sequence);
                continue;
            }
            parts.push(Part::new(sequence, start, rows, chosen[sequence]));
            self.lengths[sequence] += rows;
        }
        // Blocks of one may have cost another its adapter.
        parts.retain(|part| {
            let there = part.adapters.iter().all(|(slot, _)| self.residents.contains_key(slot));
            let kept = there && self.lengths[part.sequence] > 0;
            if !kept {
                self.lengths[part.sequence] = 0;
                self.free.append(&mut self.blocks[part.sequence]);
            }
            kept
        });
        parts
    }
}

/// Adapters come and go and sequences grow and end in any order, with all memory in use: every row gets the bits that it gets
/// where memory is plenty.
pub(crate) fn blocks_and_adapters_share_memory() {
    let chosen: [&[(u32, f32)]; SEQUENCES] = [&[(0, 1.0)], &[], &[(1, 1.0), (2, 0.5)], &[(2, -0.5)]];
    let rounds = if StandIn::counting().is_some() { 60 } else { 200 };
    for seed in 1..=2 {
        let plenty = Arc::new(CudaBackend::open(options(DTYPE, false)).unwrap());
        let (mut reference, mut world) = (Toy::new(plenty, DTYPE, 1), World::new(seed));
        let (mut steps, mut compared) = (0, 0);
        for round in 0..rounds {
            match world.below(5) {
                0 => drop(world.load(None)),
                1 => drop(world.evict()),
                _ => {}
            }
            let parts = world.parts(&chosen);
            if parts.is_empty() {
                continue;
            }
            let step = batch_in(&parts, &|sequence, index| world.blocks[sequence][index]);
            let (got, got_greedy) = world.toy.step(&step);
            let (want, want_greedy) = reference.step(&step);
            assert!(bits(&got) == bits(&want), "seed {seed} round {round}: {parts:?}");
            assert_eq!(got_greedy, want_greedy);
            (steps, compared) = (steps + 1, compared + got.len());
            let (room, used) = (world.toy.backend.adapter_usage(), world.toy.backend.memory_use().unwrap());
            assert!(room.capacity >= world.adapter_bytes());
            assert_eq!((used.kv_cache + used.adapter_room) as usize, world.bytes);
        }
        println!("{steps} steps, {compared} rows, {} loads, {} evictions", world.loads, world.evictions);
        assert!(steps > rounds / 2 && world.loads > rounds / 5 && world.evictions > rounds / 10);
        for leaving in world.leaving.drain(..) {
            leaving.join().unwrap();
        }
        assert_eq!(world.toy.backend.memory_use().unwrap().adapters as usize, world.adapter_bytes());
    }
}

/// A block's memory is zeroed before it is the cache's, whatever was there: nothing at all, or an adapter.
pub(crate) fn blocks_hold_nothing_of_adapters() {
    let mut toy = Toy::without_adapters(elastic(false), DTYPE, 1);
    let backend = Arc::clone(&toy.backend);
    let read = |block: u32| backend.read_block(block).unwrap();
    // Rows of the first position of their block only: the others stay as they were.
    let first = batch(&[Part::new(0, 0, 1, &[])], BLOCKS);
    let last = BLOCKS as u32 - 1;
    let mut kept = Vec::new();
    for round in 0..3 {
        assert_eq!(read(0), None);
        // All but two blocks go.
        backend.release_blocks(&mut toy.cache, &(0..last - 1).collect::<Vec<u32>>());
        let room = backend.adapter_usage().capacity;
        assert!(room >= 2 * backend.adapter_bytes(&filler_sites(300), DTYPE), "{room}");
        let adapters = [filler(&backend, 300), filler(&backend, 250)];
        toy.step(&first);
        let content = read(last).unwrap();
        let part = content.len() / 4;
        let row = part / BLOCK_SIZE;
        for (index, part) in content.chunks(part).enumerate() {
            assert!(part[..row].iter().any(|&byte| byte != 0), "round {round}: part {index} has no row");
            assert!(part[row..].iter().all(|&byte| byte == 0), "round {round}: part {index} is not zeroed");
        }
        assert!(kept.is_empty() || kept == content, "round {round}");
        kept = content;
        drop(adapters);
        // Blocks come back, one row in each.
        let parts: Vec<Part> = (0..40).map(|sequence| Part::new(sequence, 0, 1, &[])).collect();
        toy.step(&batch(&parts, 2));
        for sequence in 1..40 {
            let content = read((BLOCKS - 1 - 2 * sequence) as u32).unwrap();
            assert!(content.chunks(part).all(|part| part[row..].iter().all(|&byte| byte == 0)), "round {round}");
        }
        assert_eq!(read(last), Some(kept.clone()), "round {round}");
    }
}

/// Copies on the card, and waits for it, so far.
fn moves() -> (u64, u64) {
    StandIn::counting()
        .map_or((0, 0), |device| (device.calls("cuMemcpyDtoDAsync_v2"), device.calls("cuStreamSynchronize")))
}

/// Many small adapters with a hole after each: only as many are moved as a new one needs, 16 at a time, so that
/// whoever needs the step's state meanwhile can have it between.
pub(crate) fn small_holes_are_closed_piece_by_piece() {
    const ADAPTERS: usize = 240;
    const PIECE: usize = 16;
    let options = options(DTYPE, false);
    let sites = filler_sites(1);
    let small = CudaBackend::open(CudaOptions { shared_bytes: 1 << 20, ..options.clone() }).unwrap();
    let small = small.adapter_bytes(&sites, DTYPE);
    let backend = CudaBackend::open(CudaOptions { shared_bytes: ADAPTERS * small, ..options }).unwrap();
    let mut fillers: Vec<Option<CudaAdapter>> = (0..ADAPTERS).map(|_| Some(filler(&backend, 1))).collect();
    let usage = backend.adapter_usage();
    assert_eq!((usage.free, usage.largest), (0, 0));
    for index in (1..ADAPTERS).step_by(2) {
        fillers[index] = None;
    }
    let usage = backend.adapter_usage();
    assert_eq!((usage.free, usage.largest), (ADAPTERS / 2 * small, small));
    // So many holes make one that is large enough for it.
    let rank = |holes: usize| {
        (1..=512).take_while(|&rank| backend.adapter_bytes(&filler_sites(rank), DTYPE) <= holes * small).last()
    };
    let before = moves();
    let some = filler(&backend, rank(40).unwrap());
    let after = moves();
    let holes = PackedAdapter::bytes(&some).div_ceil(small);
    assert!((36..=40).contains(&holes), "{holes}");
    let counted = StandIn::counting().is_some();
    if counted {
        // Each through the room between, since the way is short. The first hole is no blob's to close.
        assert_eq!((after.0 - before.0) as usize, 2 * (holes - 1));
        // The last wait is for the upload's slot, if for anything.
        assert!((after.1 - before.1) as usize >= holes.div_ceil(PIECE), "{before:?} {after:?}");
    }
    // All that is left, while a step asks for its state again and again.
    let left = ADAPTERS / 2 - holes;
    let rank = rank(left).unwrap();
    let (done, mut asked) = (AtomicBool::new(false), 0);
    let before = moves();
    let last = std::thread::scope(|scope| {
        let placing = scope.spawn(|| {
            let placed = filler(&backend, rank);
            done.store(true, Ordering::Relaxed);
            placed
        });
        while !done.load(Ordering::Relaxed) {
            backend.end_step().unwrap();
            asked += 1;
        }
        placing.join().unwrap()
    });
    let after = moves();
    let (copies, waits) = ((after.0 - before.0) as usize, (after.1 - before.1) as usize);
    println!("{copies} copies in {waits} pieces, asked for {asked} times meanwhile");
    if counted {
        assert!(copies >= 2 * (left - 4) && waits >= copies / 2 / PIECE, "{copies} {waits}");
    }
    drop((some, last, fillers));
    assert_eq!(backend.adapter_usage().largest, ADAPTERS * small);
}

/// Blocks are moved together, and that fails: nobody knows where their content lies, so no step begins any more.
pub(crate) fn blocks_that_cannot_be_moved_end_the_step() {
    let device = StandIn::get();
    let mut toy = Toy::without_adapters(elastic(false), DTYPE, 1);
    let backend = Arc::clone(&toy.backend);
    let step = batch(&[Part::new(0, 0, 40, &[])], BLOCKS);
    toy.step(&step);
    // It has three blocks; the first two of them go.
    let stays = BLOCKS as u32 - 3;
    device.fail("cuMemcpyDtoDAsync_v2", 1, 1);
    backend.release_blocks(&mut toy.cache, &(0..BLOCKS as u32).filter(|&block| block != stays).collect::<Vec<_>>());
    device.forget_failures();
    for end in [backend.end_step(), backend.begin_step(&step, &toy.adapters)] {
        assert!(end.unwrap_err().to_string().contains("cuMemcpyDtoDAsync"));
    }
}

/// What a cache cannot have is refused before anything is taken.
pub(crate) fn caches_that_do_not_fit_are_refused() {
    let backend = elastic(false);
    let shape = kv_shape(DTYPE);
    let more = backend.kv_cache(KvShape { blocks: BLOCKS + 1, ..shape }).unwrap_err();
    assert!(more.to_string().contains("97 KV blocks"), "{more}");
    let uncounted = KvShape { kv_heads: 0, blocks: 1 << 26, ..shape };
    let error = backend.kv_cache(uncounted).unwrap_err().to_string();
    assert!(error.contains("`67108864` KV blocks") && error.contains("33554431"), "{error}");
    let cache = backend.kv_cache(shape).unwrap();
    let second = backend.kv_cache(shape).unwrap_err().to_string();
    assert!(second.contains("one KV cache at a time"), "{second}");
    assert_eq!(backend.adapter_usage().capacity, 0);
    drop(cache);
    // A smaller one after it leaves the rest to adapters.
    let cache = backend.kv_cache(KvShape { blocks: 10, ..shape }).unwrap();
    assert_eq!(backend.adapter_usage().capacity, kv_cache_bytes(&shape) / BLOCKS * (BLOCKS - 10));
    // Which they have, wherever they lie: then there is no room for more blocks.
    let adapter = filler(&backend, 300);
    drop(cache);
    drop(backend.kv_cache(KvShape { blocks: 70, ..shape }).unwrap());
    drop(adapter);
    drop(backend.kv_cache(shape).unwrap());
}
