//! Packed adapters: one blob per adapter, of its true rank and only the sites it touches.
//!
//! For every site A lies row-major `[rank, input]` (the embedding's transposed, `[vocabulary, rank]`, because it is
//! gathered by token) and B in panels as weights do, `[output/16][rank][16]`. Stored factors are never scaled.

use super::memory::{ALIGNMENT, AlignedVec};
use super::pack::{PanelFormat, f32_to_bf16};
use crate::backend::{FillFactors, PackedAdapter, StorageType};
use crate::error::KernelError;
use crate::site::{Site, SiteShape};

/// Bytes of the packed blob of an adapter with these sites: A without padding, B padded to 16 outputs, each factor
/// starting on a cache line.
pub fn packed_adapter_bytes(sites: &[SiteShape], dtype: StorageType) -> usize {
    sites.iter().map(|shape| factor_bytes(shape, dtype)).map(|(a, b)| a + b).sum()
}

fn factor_bytes(shape: &SiteShape, dtype: StorageType) -> (usize, usize) {
    let (rank, input, output) = (shape.rank as usize, shape.input as usize, shape.output as usize);
    let a = rank * input * dtype.bytes();
    let b = PanelFormat::of_adapter(dtype).bytes(output, rank);
    (a.next_multiple_of(ALIGNMENT), b.next_multiple_of(ALIGNMENT))
}

/// Where one site's factors are in the blob; rank 0 means that the adapter does not touch the site.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    rank: u32,
    input: u32,
    output: u32,
    scale: f32,
    a: usize,
    b: usize,
}

/// One site's factors.
#[derive(Clone, Copy)]
pub(super) struct Factors<'a> {
    pub(super) rank: usize,
    pub(super) input: usize,
    pub(super) output: usize,
    pub(super) scale: f32,
    /// `[rank, input]`, or `[input, rank]` of the embedding.
    pub(super) a: &'a [u8],
    /// Panels.
    pub(super) b: &'a [u8],
}

/// An adapter as the CPU kernels read it.
#[derive(Debug)]
pub struct CpuAdapter {
    dtype: StorageType,
    places: Vec<Place>,
    blob: AlignedVec<u8>,
}

impl PackedAdapter for CpuAdapter {
    fn bytes(&self) -> usize {
        self.blob.len()
    }
}

impl CpuAdapter {
    /// See [`crate::Backend::pack_adapter`].
    pub(super) fn pack(
        sites: &[SiteShape],
        dtype: StorageType,
        fill: &mut FillFactors<'_>,
    ) -> Result<Self, KernelError> {
        let mut blob = AlignedVec::zeroed("an adapter", packed_adapter_bytes(sites, dtype))?;
        let table = sites.iter().map(|shape| shape.site.index() + 1).max().unwrap_or(0);
        let mut places = vec![Place::default(); table];
        let (mut a, mut b) = (Vec::new(), Vec::new());
        let mut offset = 0;
        for (index, shape) in sites.iter().enumerate() {
            let (rank, input, output) = (shape.rank as usize, shape.input as usize, shape.output as usize);
            fill(index, &mut a, &mut b)?;
            if a.len() != rank * input || b.len() != output * rank || rank == 0 {
                return Err(KernelError::Source(format!(
                    "site `{}` got {} and {} values for factors of shapes [{rank}, {input}] and [{output}, {rank}]",
                    shape.site.0,
                    a.len(),
                    b.len(),
                )));
            }
            let (a_bytes, b_bytes) = factor_bytes(shape, dtype);
            let place = &mut places[shape.site.index()];
            if place.rank != 0 {
                return Err(KernelError::Source(format!("site `{}` appears twice in one adapter", shape.site.0)));
            }
            *place = Place {
                rank: shape.rank,
                input: shape.input,
                output: shape.output,
                scale: shape.scale,
                a: offset,
                b: offset + a_bytes,
            };
            let (a_blob, b_blob) = blob[offset..offset + a_bytes + b_bytes].split_at_mut(a_bytes);
            if shape.site == Site::EMBED {
                for (rank_row, values) in a.chunks_exact(input).enumerate() {
                    for (column, value) in values.iter().enumerate() {
                        store(dtype, a_blob, column * rank + rank_row, *value);
                    }
                }
            } else {
                store_all(dtype, a_blob, &a);
            }
            let format = PanelFormat::of_adapter(dtype);
            let panels = b_blob.chunks_exact_mut(format.panel_bytes(rank));
            for (panel, rows) in panels.zip(b.chunks(format.width() * rank)) {
                store_panel(dtype, rows, rank, panel);
            }
            offset += a_bytes + b_bytes;
        }
        Ok(Self { dtype, places, blob })
    }

    /// Element type of the factors.
    pub const fn dtype(&self) -> StorageType {
        self.dtype
    }

    /// The factors of a site, if the adapter touches it.
    pub(super) fn factors(&self, site: Site) -> Option<Factors<'_>> {
        let place = self.places.get(site.index()).filter(|place| place.rank != 0)?;
        Some(Factors {
            rank: place.rank as usize,
            input: place.input as usize,
            output: place.output as usize,
            scale: place.scale,
            a: &self.blob[place.a..place.b],
            b: &self.blob[place.b..],
        })
    }
}

/// Values in their order. A load should take no longer than copying: these loops are written to become vector code.
fn store_all(dtype: StorageType, blob: &mut [u8], values: &[f32]) {
    match dtype {
        StorageType::F32 => {
            for (four, value) in blob.chunks_exact_mut(4).zip(values) {
                four.copy_from_slice(&value.to_ne_bytes());
            }
        }
        StorageType::Bf16 => {
            for (two, value) in blob.chunks_exact_mut(2).zip(values) {
                two.copy_from_slice(&f32_to_bf16(*value).to_ne_bytes());
            }
        }
    }
}

/// Packs up to one panel's rows of B, for the few inputs that B has: its panels stay in the first-level cache.
fn store_panel(dtype: StorageType, rows: &[f32], rank: usize, panel: &mut [u8]) {
    for (output, row) in rows.chunks_exact(rank).enumerate() {
        match dtype {
            StorageType::F32 => {
                for (step, value) in panel.as_chunks_mut::<64>().0.iter_mut().zip(row) {
                    step[output * 4..output * 4 + 4].copy_from_slice(&value.to_ne_bytes());
                }
            }
            StorageType::Bf16 => {
                let offset = output % 8 * 4 + output / 8 * 2;
                for (step, value) in panel.as_chunks_mut::<32>().0.iter_mut().zip(row) {
                    step[offset..offset + 2].copy_from_slice(&f32_to_bf16(*value).to_ne_bytes());
                }
            }
        }
    }
}

fn store(dtype: StorageType, blob: &mut [u8], element: usize, value: f32) {
    match dtype {
        StorageType::F32 => blob[element * 4..element * 4 + 4].copy_from_slice(&value.to_ne_bytes()),
        StorageType::Bf16 => blob[element * 2..element * 2 + 2].copy_from_slice(&f32_to_bf16(value).to_ne_bytes()),
    }
}
