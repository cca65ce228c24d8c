//! Packed adapters: one blob per adapter, of its true rank and only the sites it touches.
//!
//! For every site A lies row-major `[rank, input]` (the embedding's transposed, `[vocabulary, rank]`, because it is
//! gathered by token) and B in panels as weights do, `[output/16][rank][16]`; levels with tile registers have pairs
//! ([`tiles`]), in as many bytes. Stored factors are never scaled. A load
//! should take no longer than copying the bytes: factors that are stored in the format they are packed in are not widened.

use super::level::SimdLevel;
use super::memory::{ALIGNMENT, AlignedVec};
use super::pack::PanelFormat;
use super::panel::{pack_rows, store_values};
use super::tiles;
use crate::backend::{FactorFeed, FactorType, FillFactors, PackedAdapter, StorageType, StoredFactor};
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

/// An adapter of which some sites are packed.
struct Packing<'s> {
    level: SimdLevel,
    sites: &'s [SiteShape],
    adapter: CpuAdapter,
    /// By position in `sites`.
    packed: Vec<bool>,
    rounding: Rounding,
}

impl CpuAdapter {
    /// See [`crate::Backend::pack_adapter`].
    pub(super) fn pack(
        level: SimdLevel,
        sites: &[SiteShape],
        dtype: StorageType,
        fill: &mut FillFactors<'_>,
    ) -> Result<Self, KernelError> {
        let (mut a, mut b) = (Vec::new(), Vec::new());
        Self::pack_stored(level, sites, dtype, &mut |sink| {
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
        level: SimdLevel,
        sites: &[SiteShape],
        dtype: StorageType,
        feed: &mut FactorFeed<'_>,
    ) -> Result<Self, KernelError> {
        let mut packing = Packing::new(level, sites, dtype)?;
        feed(&mut |index, a, b| packing.add(index, a, b))?;
        packing.finish()
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

impl<'s> Packing<'s> {
    fn new(level: SimdLevel, sites: &'s [SiteShape], dtype: StorageType) -> Result<Self, KernelError> {
        let table = sites.iter().map(|shape| shape.site.index() + 1).max().unwrap_or(0);
        let mut places = vec![Place::default(); table];
        let mut offset = 0;
        for shape in sites {
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
            offset += a_bytes + b_bytes;
        }
        let blob = AlignedVec::zeroed_apart("an adapter", offset)?;
        let adapter = CpuAdapter { dtype, places, blob };
        let packed = vec![false; sites.len()];
        Ok(Self { level, sites, adapter, packed, rounding: Rounding::default() })
    }

    fn finish(self) -> Result<CpuAdapter, KernelError> {
        match self.packed.iter().position(|packed| !packed) {
            None => Ok(self.adapter),
            Some(index) => Err(KernelError::Source(format!("site `{}` got no factors", self.sites[index].site.0))),
        }
    }

    /// Packs the factors of one site.
    fn add(&mut self, index: usize, a: StoredFactor<'_>, b: StoredFactor<'_>) -> Result<(), KernelError> {
        let (Some(shape), Some(packed)) = (self.sites.get(index), self.packed.get_mut(index)) else {
            return Err(KernelError::Source(format!("an adapter of {} sites has no site `{index}`", self.sites.len())));
        };
        if std::mem::replace(packed, true) {
            return Err(KernelError::Source(format!("site `{}` got factors twice", shape.site.0)));
        }
        let (rank, input, output) = (shape.rank as usize, shape.input as usize, shape.output as usize);
        if a.len() != rank * input || b.len() != output * rank || rank == 0 {
            return Err(KernelError::Source(format!(
                "site `{}` got {} and {} values for factors of shapes [{rank}, {input}] and [{output}, {rank}]",
                shape.site.0,
                a.len(),
                b.len(),
            )));
        }
        let CpuAdapter { dtype, places, blob } = &mut self.adapter;
        let dtype = *dtype;
        let offset = places[shape.site.index()].a;
        let (a_bytes, b_bytes) = factor_bytes(shape, dtype);
        let (a_blob, b_blob) = blob[offset..offset + a_bytes + b_bytes].split_at_mut(a_bytes);
        let tiled = tiles::tiled(self.level, dtype);
        if shape.site == Site::EMBED {
            store_transposed(dtype, a_blob, a, input);
        } else if tiled {
            for first in (0..rank).step_by(tiles::TILE_ROWS) {
                let last = (first + tiles::TILE_ROWS).min(rank);
                let rows = self.rounding.rows(dtype, a.part(first * input..last * input));
                let group = &mut a_blob[first * input * dtype.bytes()..last * input * dtype.bytes()];
                tiles::pack_pairs(rows, input, last - first, group);
            }
        } else {
            store_all(dtype, a_blob, a);
        }
        let format = PanelFormat::of_adapter(dtype);
        let panels = b_blob.chunks_exact_mut(format.panel_bytes(rank));
        for (panel, first) in panels.zip((0..output).step_by(format.width())) {
            let rows = b.part(first * rank..(first + format.width()).min(output) * rank);
            let rows = self.rounding.rows(dtype, rows);
            if tiled {
                tiles::pack_pairs(rows, rank, format.width(), panel);
            } else {
                pack_rows(self.level, format, rows, rank, panel);
            }
        }
        Ok(())
    }
}

/// Rows of a factor in the format of the adapter.
#[derive(Default)]
struct Rounding {
    widened: Vec<f32>,
    rounded: Vec<u8>,
}

impl Rounding {
    fn rows<'a>(&'a mut self, dtype: StorageType, rows: StoredFactor<'a>) -> &'a [u8] {
        if holds(rows, dtype) {
            return rows.bytes;
        }
        self.widened.resize(rows.len(), 0.0);
        rows.widen(&mut self.widened);
        self.rounded.resize(rows.len() * dtype.bytes(), 0);
        store_values(dtype, &mut self.rounded, &self.widened);
        &self.rounded
    }
}

/// Values that are widened at a time.
const BLOCK: usize = 512;

/// Whether the stored bytes are already what `dtype` has in memory.
const fn holds(stored: StoredFactor<'_>, dtype: StorageType) -> bool {
    cfg!(target_endian = "little")
        && matches!((stored.dtype, dtype), (FactorType::Bf16, StorageType::Bf16) | (FactorType::F32, StorageType::F32))
}

/// Values in their order.
fn store_all(dtype: StorageType, blob: &mut [u8], stored: StoredFactor<'_>) {
    if holds(stored, dtype) {
        blob[..stored.bytes.len()].copy_from_slice(stored.bytes);
        return;
    }
    let mut values = [0.0; BLOCK];
    for (index, blob) in blob.chunks_mut(BLOCK * dtype.bytes()).enumerate() {
        // The blob's padding may reach beyond the values.
        let first = (index * BLOCK).min(stored.len());
        let part = stored.part(first..(first + BLOCK).min(stored.len()));
        part.widen(&mut values);
        store_values(dtype, blob, &values[..part.len()]);
    }
}

/// `[rank, columns]` as `[columns, rank]`.
fn store_transposed(dtype: StorageType, blob: &mut [u8], stored: StoredFactor<'_>, columns: usize) {
    let rank = stored.len() / columns;
    let mut values = [0.0; BLOCK];
    for first in (0..columns).step_by(BLOCK) {
        let last = (first + BLOCK).min(columns);
        for rank_row in 0..rank {
            let values = &mut values[..last - first];
            stored.part(rank_row * columns + first..rank_row * columns + last).widen(values);
            for (column, value) in (first..last).zip(&*values) {
                let element = (column * rank + rank_row) * dtype.bytes();
                store_values(dtype, &mut blob[element..element + dtype.bytes()], &[*value]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::CpuAdapter;
    use crate::backend::{FactorType, StorageType, StoredFactor};
    use crate::cpu::level::SimdLevel;
    use crate::cpu::pack::PanelFormat;
    use crate::cpu::tiles;
    use crate::site::{Site, SiteShape};

    const TYPES: [FactorType; 3] = [FactorType::Bf16, FactorType::F16, FactorType::F32];

    fn bytes(values: &[f32], dtype: FactorType) -> Vec<u8> {
        match dtype {
            FactorType::Bf16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
            FactorType::F16 => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
            FactorType::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        }
    }

    /// What is stored in `dtype`, read as f32.
    fn stored(value: f32, dtype: FactorType) -> f32 {
        match dtype {
            FactorType::Bf16 => bf16::from_f32(value).to_f32(),
            FactorType::F16 => f16::from_f32(value).to_f32(),
            FactorType::F32 => value,
        }
    }

    fn element(blob: &[u8], dtype: StorageType, index: usize) -> f32 {
        match dtype {
            StorageType::F32 => f32::from_ne_bytes(blob[index * 4..][..4].try_into().unwrap()),
            StorageType::Bf16 => bf16::from_ne_bytes(blob[index * 2..][..2].try_into().unwrap()).to_f32(),
            StorageType::F16 => unreachable!(),
        }
    }

    /// Where pairs of columns of a factor `width` rows wide have an element.
    fn pair_place(row: usize, column: usize, columns: usize, width: usize) -> usize {
        let odd = column / 2 == columns / 2;
        if odd { columns / 2 * width * 2 + row } else { (column / 2 * width + row) * 2 + column % 2 }
    }

    /// Place of an element of A, by the definition of the format.
    fn a_place(tiled: bool, r: usize, column: usize, (rank, input): (usize, usize)) -> usize {
        let group = r / 16 * 16;
        let width = (rank - group).min(16);
        if tiled { group * input + pair_place(r % 16, column, input, width) } else { r * input + column }
    }

    /// Element of B in its panels, by the definition of the format.
    fn panel_element(tiled: bool, blob: &[u8], dtype: StorageType, output: usize, r: usize, rank: usize) -> f32 {
        let panel = &blob[output / 16 * PanelFormat::of_adapter(dtype).panel_bytes(rank)..];
        let lane = output % 16;
        if tiled {
            return element(panel, dtype, pair_place(lane, r, rank, 16));
        }
        match dtype {
            StorageType::F32 => element(panel, dtype, r * 16 + lane),
            StorageType::Bf16 => element(panel, dtype, r * 16 + lane % 8 * 2 + lane / 8),
            StorageType::F16 => unreachable!(),
        }
    }

    #[test]
    fn every_stored_format_is_packed_as_the_layout_says() {
        for (rank, input, output) in [(1, 5, 3), (7, 600, 16), (8, 40, 33), (16, 64, 48), (19, 1030, 32), (64, 17, 80)]
        {
            let value = |index: usize| ((index * 7919 + 13) % 2003) as f32 / 1001.0 - 1.0;
            let a: Vec<f32> = (0..rank * input).map(value).collect();
            let b: Vec<f32> = (0..rank * output).map(|index| value(index + 5)).collect();
            let shape =
                |site| SiteShape { site, rank: rank as u32, input: input as u32, output: output as u32, scale: 0.5 };
            let sites = [shape(Site::EMBED), shape(Site(6))];
            for (level, dtype) in
                SimdLevel::available().into_iter().flat_map(|l| [StorageType::Bf16, StorageType::F32].map(|d| (l, d)))
            {
                for stored_as in TYPES {
                    let [a_bytes, b_bytes] = [&a, &b].map(|values| bytes(values, stored_as));
                    let [stored_a, stored_b] =
                        [&a_bytes, &b_bytes].map(|bytes| StoredFactor { dtype: stored_as, bytes });
                    let adapter = CpuAdapter::pack_stored(level, &sites, dtype, &mut |sink| {
                        sink(1, stored_a, stored_b)?;
                        sink(0, stored_a, stored_b)
                    })
                    .unwrap();
                    let wanted = |value: f32| match dtype {
                        StorageType::F32 => stored(value, stored_as),
                        StorageType::Bf16 => bf16::from_f32(stored(value, stored_as)).to_f32(),
                        StorageType::F16 => unreachable!(),
                    };
                    let (embedding, linear) =
                        (adapter.factors(Site::EMBED).unwrap(), adapter.factors(Site(6)).unwrap());
                    let tiled = tiles::tiled(level, dtype);
                    for (index, &value) in a.iter().enumerate() {
                        let (r, column) = (index / input, index % input);
                        let found = element(linear.a, dtype, a_place(tiled, r, column, (rank, input)));
                        assert_eq!(found, wanted(value), "{level} {dtype:?} {stored_as:?} {rank} {input} {index}");
                        assert_eq!(element(embedding.a, dtype, column * rank + r), wanted(value));
                    }
                    for (index, &value) in b.iter().enumerate() {
                        for factors in [&embedding, &linear] {
                            let found = panel_element(tiled, factors.b, dtype, index / rank, index % rank, rank);
                            assert_eq!(found, wanted(value), "{level} {dtype:?} {stored_as:?} {rank} {output} {index}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn each_site_is_given_once() {
        let shape = |site| SiteShape { site, rank: 1, input: 2, output: 2, scale: 1.0 };
        let sites = [shape(Site(5)), shape(Site(6))];
        let factor = StoredFactor { dtype: FactorType::Bf16, bytes: &[0; 4] };
        let pack = |order: &[usize]| {
            CpuAdapter::pack_stored(SimdLevel::Portable, &sites, StorageType::Bf16, &mut |sink| {
                order.iter().try_for_each(|&index| sink(index, factor, factor))
            })
        };
        assert!(pack(&[1, 0]).is_ok());
        for (order, phrase) in
            [(&[0][..], "site `6` got no factors"), (&[0, 0], "site `5` got factors twice"), (&[2], "no site `2`")]
        {
            let error = pack(order).unwrap_err().to_string();
            assert!(error.contains(phrase), "{error}");
        }
    }
}
