//! Adapters on the card: one blob each, and the table by which kernels find them.
//!
//! A blob starts with the adapter's own rows of the table (addresses of A and B, ranks and scales of all sites of the
//! model), so that giving an adapter rows of the table is four small copies on the card that nobody waits for. Then come the factors:
//! A `[rank][input]` (the embedding's `[vocabulary][rank rounded up to 8]`), B `[output][rank rounded up to 8]`, each at
//! a multiple of 16 bytes.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::super::arena::{Arena, DeviceSlice, Holding};
use super::super::error::CudaError;
use super::super::free_list::granules;
use super::super::memory::DevicePointer;
use super::super::stream::Stream;
use super::CudaBackend;
use super::buffer::rounded;
use super::region::Blob;
use crate::backend::{AdapterTable, FactorFeed, FactorType, FillFactors, PackedAdapter, StorageType, StoredFactor};
use crate::error::KernelError;
use crate::site::{Module, Site, SiteShape};

/// Ranks of B, and of the embedding's A, are rounded up to this.
const RANKS: usize = 8;
const ALIGNMENT: usize = 16;
/// Bytes of a site in each of the four tables.
const ENTRY_BYTES: [usize; 4] = [8, 8, 4, 4];

/// Which kinds of sites an adapter touches, a bit each: the linear modules of a layer, the embedding, the head.
pub(super) fn touched(site: Site) -> u16 {
    match site {
        Site::EMBED => 1 << 9,
        Site::HEAD => 1 << 10,
        Site::FINAL_NORM => 0,
        Site(index) => 1 << ((index - 3) % Module::COUNT),
    }
}

/// Bytes of the adapter's rows of the table.
const fn table_bytes(sites: usize) -> usize {
    (sites * 24).next_multiple_of(ALIGNMENT)
}

fn factor_bytes(shape: &SiteShape) -> (usize, usize) {
    let (rank, input, output) = (shape.rank as usize, shape.input as usize, shape.output as usize);
    let padded = rank.next_multiple_of(RANKS);
    let a = input * if shape.site == Site::EMBED { padded } else { rank };
    let bytes = |elements: usize| (elements * size_of::<u16>()).next_multiple_of(ALIGNMENT);
    (bytes(a), bytes(output * padded))
}

/// Bytes of an adapter's blob on the card: what the arena takes for it.
pub(super) fn adapter_bytes(sites: &[SiteShape], all: usize) -> usize {
    let factors: usize = sites.iter().map(factor_bytes).map(|(a, b)| a + b).sum();
    granules(table_bytes(all) + factors)
}

/// An adapter as the kernels read it.
#[derive(Debug)]
pub struct CudaAdapter {
    blob: Arc<Blob>,
    pub(super) touched: u16,
    pub(super) largest_rank: usize,
}

impl PackedAdapter for CudaAdapter {
    fn bytes(&self) -> usize {
        self.blob.bytes()
    }
}

impl CudaAdapter {
    /// See [`crate::Backend::pack_adapter`].
    pub(super) fn pack(
        backend: &CudaBackend,
        sites: &[SiteShape],
        all: usize,
        dtype: StorageType,
        fill: &mut FillFactors<'_>,
    ) -> Result<Self, KernelError> {
        let (mut a, mut b) = (Vec::new(), Vec::new());
        Self::pack_stored(backend, sites, all, dtype, &mut |sink| {
            for index in 0..sites.len() {
                fill(index, &mut a, &mut b)?;
                let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
                let (a, b) = (bytes(&a), bytes(&b));
                let dtype = FactorType::F32;
                sink(index, StoredFactor { dtype, bytes: &a }, StoredFactor { dtype, bytes: &b })?;
            }
            Ok(())
        })
    }

    /// See [`crate::Backend::pack_stored_adapter`].
    pub(super) fn pack_stored(
        backend: &CudaBackend,
        sites: &[SiteShape],
        all: usize,
        dtype: StorageType,
        feed: &mut FactorFeed<'_>,
    ) -> Result<Self, KernelError> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        check(sites, all)?;
        let mut blob = vec![0u8; table_bytes(all) + sites.iter().map(factor_bytes).map(|(a, b)| a + b).sum::<usize>()];
        let mut places = Vec::with_capacity(sites.len());
        let mut next = table_bytes(all);
        for shape in sites {
            let (a, b) = factor_bytes(shape);
            places.push((next, next + a, next + a + b));
            next += a + b;
        }
        let mut packed = vec![false; sites.len()];
        let mut widened = Vec::new();
        feed(&mut |index, a, b| {
            let (Some(shape), Some(packed)) = (sites.get(index), packed.get_mut(index)) else {
                return Err(KernelError::Source(format!("an adapter of {} sites has no site `{index}`", sites.len())));
            };
            if std::mem::replace(packed, true) {
                return Err(KernelError::Source(format!("site `{}` got factors twice", shape.site.0)));
            }
            let (rank, input, output) = (shape.rank as usize, shape.input as usize, shape.output as usize);
            if a.len() != rank * input || b.len() != output * rank {
                return Err(KernelError::Source(format!(
                    "site `{}` got {} and {} values for factors of shapes [{rank}, {input}] and [{output}, {rank}]",
                    shape.site.0,
                    a.len(),
                    b.len(),
                )));
            }
            let (first, middle, end) = places[index];
            let padded = rank.next_multiple_of(RANKS);
            if shape.site == Site::EMBED {
                widened.resize(a.len(), 0.0);
                a.widen(&mut widened);
                transpose(&widened, input, padded, dtype, &mut blob[first..middle]);
            } else {
                store(a, dtype, &mut blob[first..middle], &mut widened);
            }
            for (row, out) in blob[middle..end].chunks_exact_mut(padded * size_of::<u16>()).take(output).enumerate() {
                store(b.part(row * rank..(row + 1) * rank), dtype, out, &mut widened);
            }
            Ok(())
        })?;
        if let Some(index) = packed.iter().position(|packed| !packed) {
            return Err(KernelError::Source(format!("site `{}` got no factors", sites[index].site.0)));
        }
        // Not before all was read, which may take long: until it is uploaded nobody can move it.
        let mut placing = backend.place_adapter(adapter_bytes(sites, all))?;
        let memory = placing.memory();
        write_table(&mut blob, sites, &places, all, memory.pointer());
        let upload = backend.uploader.upload(memory, 0, &blob)?;
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let factors = sites.iter().zip(&places).map(|(shape, (a, b, _))| (shape.site.0, *a, *b)).collect();
        Ok(Self {
            blob: placing.settle(&backend.adapters, upload, id, (factors, all)),
            touched: sites.iter().fold(0, |all, shape| all | touched(shape.site)),
            largest_rank: sites.iter().map(|shape| shape.rank as usize).max().unwrap_or(0),
        })
    }
}

fn check(sites: &[SiteShape], all: usize) -> Result<(), KernelError> {
    let mut seen = vec![false; all];
    for shape in sites {
        let site = shape.site;
        let Some(seen) = seen.get_mut(site.index()) else {
            return Err(KernelError::Source(format!("site `{}` is beyond the model's {all} sites", site.0)));
        };
        if std::mem::replace(seen, true) {
            return Err(KernelError::Source(format!("site `{}` appears twice in one adapter", site.0)));
        }
        if shape.rank == 0 || site != Site::EMBED && !shape.input.is_multiple_of(RANKS as u32) {
            return Err(KernelError::Source(format!(
                "site `{}` has rank `{}` and `{}` inputs; cards take ranks from 1 on and multiples of {RANKS} inputs",
                site.0, shape.rank, shape.input
            )));
        }
    }
    Ok(())
}

/// The adapter's rows of the four tables, one after the other.
fn write_table(
    blob: &mut [u8],
    sites: &[SiteShape],
    places: &[(usize, usize, usize)],
    all: usize,
    base: DevicePointer<u8>,
) {
    for (shape, (a, b, _)) in sites.iter().zip(places) {
        let index = shape.site.index();
        let values = [
            base.add(*a).address().to_le_bytes().to_vec(),
            base.add(*b).address().to_le_bytes().to_vec(),
            shape.rank.to_le_bytes().to_vec(),
            shape.scale.to_le_bytes().to_vec(),
        ];
        let mut table = 0;
        for (value, width) in values.iter().zip(ENTRY_BYTES) {
            blob[table + index * width..][..width].copy_from_slice(value);
            table += all * width;
        }
    }
}

/// Values in their order, in the card's format.
fn store(stored: StoredFactor<'_>, dtype: StorageType, out: &mut [u8], widened: &mut Vec<f32>) {
    let same =
        matches!((stored.dtype, dtype), (FactorType::Bf16, StorageType::Bf16) | (FactorType::F16, StorageType::F16));
    if same {
        out[..stored.bytes.len()].copy_from_slice(stored.bytes);
        return;
    }
    widened.resize(stored.len(), 0.0);
    stored.widen(widened);
    for (two, &value) in out.as_chunks_mut::<2>().0.iter_mut().zip(&*widened) {
        *two = rounded(value, dtype).to_le_bytes();
    }
}

/// `[rank][input]` to `[input][padded]`, in squares that stay in the cache.
fn transpose(values: &[f32], input: usize, padded: usize, dtype: StorageType, out: &mut [u8]) {
    const SQUARE: usize = 64;
    for first in (0..input).step_by(SQUARE) {
        for (rank, row) in values.chunks_exact(input).enumerate() {
            for (column, &value) in row[first..(first + SQUARE).min(input)].iter().enumerate() {
                let at = ((first + column) * padded + rank) * size_of::<u16>();
                out[at..at + 2].copy_from_slice(&rounded(value, dtype).to_le_bytes());
            }
        }
    }
}

/// Copies an adapter's rows to their place in the four columns of the table.
fn write_row(
    columns: &mut [DeviceSlice<u8>; 4],
    sites: usize,
    stream: &Stream,
    row: usize,
    source: &DeviceSlice<u8>,
) -> Result<(), CudaError> {
    let mut from = 0;
    for (column, width) in columns.iter_mut().zip(ENTRY_BYTES) {
        let bytes = sites * width;
        column.copy_from(stream, row * bytes, source, from..from + bytes)?;
        from += bytes;
    }
    Ok(())
}

/// The table on the card. Its rows are for the adapters of a step, whatever their slots: as many as a step can have, so that
/// how many are resident costs nothing here.
#[derive(Debug)]
pub(super) struct DeviceTable {
    /// Addresses of A and B, ranks, scales: `[rows][sites]` each.
    columns: [DeviceSlice<u8>; 4],
    empty: DeviceSlice<u8>,
    sites: usize,
    /// The adapter in each row, and the step that used it last.
    held: Vec<(u64, u64)>,
    row_of: HashMap<u64, usize>,
    /// The row of each slot that the step refers to.
    places: Vec<u32>,
    step: u64,
}

/// Bytes of a table.
pub(super) fn device_table_bytes(sites: usize, rows: usize) -> usize {
    ENTRY_BYTES.iter().map(|width| granules(rows * sites * width)).sum::<usize>() + granules(table_bytes(sites))
}

/// In place of an adapter's number: what no adapter has.
const NOTHING: u64 = u64::MAX;

impl DeviceTable {
    pub(super) fn new(arena: &Arena, stream: &Stream, sites: usize, rows: usize) -> Result<Self, CudaError> {
        let zeroed = |bytes: usize| -> Result<DeviceSlice<u8>, CudaError> {
            let mut memory = arena.allocate(Holding::Adapters, "the table of adapters", bytes)?;
            memory.fill_zero(stream)?;
            Ok(memory)
        };
        let [a, b, ranks, scales] = ENTRY_BYTES.map(|width| zeroed(rows * sites * width));
        Ok(Self {
            columns: [a?, b?, ranks?, scales?],
            empty: zeroed(table_bytes(sites))?,
            sites,
            held: vec![(NOTHING, 0); rows],
            row_of: HashMap::with_capacity(rows),
            places: Vec::new(),
            step: 0,
        })
    }

    /// Adapters that it has room for.
    pub(super) fn rows(&self) -> usize {
        self.held.len()
    }

    /// The row of each slot that was provided since the step began.
    pub(super) fn places(&self) -> &[u32] {
        &self.places
    }

    /// A step begins: rows that only earlier ones used may be given to others.
    pub(super) fn begin(&mut self) {
        self.step += 1;
    }

    /// Lets what is queued on `stream` from now on find the adapter of `slot`. A step provides no more than there are rows.
    pub(super) fn provide(
        &mut self,
        stream: &Stream,
        slot: u32,
        adapters: &AdapterTable<CudaAdapter>,
    ) -> Result<(), CudaError> {
        let adapter = adapters.get(slot);
        let (slot, id) = (slot as usize, adapter.map_or(0, |adapter| adapter.blob.id));
        let row = match self.row_of.get(&id) {
            Some(&row) => row,
            None => self.fill(stream, id, adapter)?,
        };
        self.held[row].1 = self.step;
        if slot >= self.places.len() {
            self.places.resize(slot + 1, 0);
        }
        self.places[slot] = row as u32;
        Ok(())
    }

    /// Puts an adapter in the row that was used longest ago.
    fn fill(&mut self, stream: &Stream, id: u64, adapter: Option<&CudaAdapter>) -> Result<usize, CudaError> {
        let oldest = self.held.iter().enumerate().min_by_key(|(_, (_, step))| *step);
        let row = oldest.map_or(0, |(row, _)| row);
        self.row_of.remove(&self.held[row].0);
        // Until all of it is queued.
        self.held[row].0 = NOTHING;
        match adapter {
            Some(adapter) => {
                adapter.blob.upload.before(stream)?;
                let (columns, sites) = (&mut self.columns, self.sites);
                adapter.blob.with(|memory| write_row(columns, sites, stream, row, memory)).transpose()?;
            }
            None => write_row(&mut self.columns, self.sites, stream, row, &self.empty)?,
        }
        self.held[row].0 = id;
        self.row_of.insert(id, row);
        Ok(row)
    }

    /// An adapter lies elsewhere from now on: its row, if it has one, is written anew.
    pub(super) fn moved(&mut self, stream: &Stream, id: u64, memory: &DeviceSlice<u8>) -> Result<(), CudaError> {
        match self.row_of.get(&id) {
            Some(&row) => write_row(&mut self.columns, self.sites, stream, row, memory),
            None => Ok(()),
        }
    }

    pub(super) fn a_pointers(&self) -> DevicePointer<u64> {
        self.columns[0].pointer().cast()
    }

    pub(super) fn b_pointers(&self) -> DevicePointer<u64> {
        self.columns[1].pointer().cast()
    }

    pub(super) fn ranks(&self) -> DevicePointer<i32> {
        self.columns[2].pointer().cast()
    }

    pub(super) fn scales(&self) -> DevicePointer<f32> {
        self.columns[3].pointer().cast()
    }
}
