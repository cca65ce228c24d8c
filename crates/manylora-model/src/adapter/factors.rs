//! Reading the factors of an adapter as they are stored: in runs that fit in the cache, so that what was read is checked,
//! measured, hashed and packed while it is there.

use std::ops::Range;
use std::sync::Arc;

use manylora_kernels::cpu::AlignedVec;
use manylora_kernels::{FactorType, StoredFactor};
use safetensors::Dtype;

use super::fault::Fault;
use super::matching::MatchedSite;
use super::tensor_file::TensorEntry;

/// Bytes that are read at a time, unless one site has more: what was read is examined while it is in the cache.
const READ_BYTES: usize = 256 << 10;

/// Where the bytes of an adapter's tensors come from.
pub(super) trait TensorBytes {
    /// Fills `out` with the bytes of `tensor` from `first` on.
    fn read(&mut self, tensor: &TensorEntry, first: u64, out: &mut [u8]) -> Result<(), Fault>;

    /// Fills `out` with the bytes of whole tensors, one after the other. They are sorted by offset.
    fn read_all(&mut self, tensors: &[&TensorEntry], out: &mut [u8]) -> Result<(), Fault> {
        let mut rest = out;
        for tensor in tensors {
            let (content, after) = rest.split_at_mut(tensor.bytes);
            self.read(tensor, 0, content)?;
            rest = after;
        }
        Ok(())
    }
}

/// Format of a factor. The dtype is one of those that [`super::matching`] lets through.
pub(super) fn factor_type(dtype: Dtype) -> FactorType {
    match dtype {
        Dtype::BF16 => FactorType::Bf16,
        Dtype::F16 => FactorType::F16,
        _ => FactorType::F32,
    }
}

/// Widens to f32, exactly. The vector is resized.
pub(super) fn widen(stored: StoredFactor<'_>, out: &mut Vec<f32>) {
    out.resize(stored.len(), 0.0);
    stored.widen(out);
}

/// Where a factor is in the block.
#[derive(Clone, Debug)]
struct Place {
    dtype: FactorType,
    range: Range<usize>,
}

impl Default for Place {
    fn default() -> Self {
        Self { dtype: FactorType::F32, range: 0..0 }
    }
}

impl Place {
    fn stored<'a>(&self, content: &'a [u8]) -> StoredFactor<'a> {
        StoredFactor { dtype: self.dtype, bytes: &content[self.range.clone()] }
    }
}

/// Factors of one site as they were read.
#[derive(Clone, Copy)]
pub(super) struct SiteFactors<'a> {
    pub(super) a: StoredFactor<'a>,
    pub(super) b: StoredFactor<'a>,
    /// The bytes of A and then of B, where the file has them so.
    pub(super) joined: Option<&'a [u8]>,
}

/// Called with a site's position and its factors.
pub(super) type SeeSite<'a> = dyn FnMut(usize, SiteFactors<'_>) -> Result<(), Fault> + 'a;

/// Makes room on the processor for looking at what was read, while it is held.
pub(super) type MakeRoom<'a> = dyn Fn() -> Option<Box<dyn Send + 'a>> + 'a;

/// Reads the factors of `sites` and shows each site's to `see` while they are in the cache, in the order of the file. No
/// more memory is taken than one read needs. Reading, which may be waiting for a disk, holds no core; the rest does.
pub(super) fn stream(
    sites: &[MatchedSite],
    tensors: &[TensorEntry],
    source: &mut dyn TensorBytes,
    make_room: &MakeRoom<'_>,
    see: &mut SeeSite<'_>,
) -> Result<(), Fault> {
    let plan = ReadPlan::new(sites, tensors);
    let mut content = block(plan.groups.iter().map(|group| group.bytes).max().unwrap_or(0))?;
    let mut places = vec![(Place::default(), Place::default()); sites.len()];
    for group in &plan.groups {
        group.read(tensors, source, 0, &mut content, &mut places)?;
        let _room = make_room();
        group.show(&content, &places, see)?;
    }
    Ok(())
}

fn block(bytes: usize) -> Result<AlignedVec<u8>, Fault> {
    AlignedVec::zeroed("an adapter's tensors", bytes).map_err(|error| Fault::invalid(error.to_string()))
}

/// One factor of a site.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    site: usize,
    is_a: bool,
    tensor: usize,
}

/// Sites whose factors are read together.
#[derive(Debug)]
struct Group {
    sites: Vec<usize>,
    /// Their factors in the order of the file.
    wanted: Vec<Wanted>,
    bytes: usize,
}

/// How an adapter is read.
struct ReadPlan {
    groups: Vec<Group>,
}

impl ReadPlan {
    fn new(sites: &[MatchedSite], tensors: &[TensorEntry]) -> Self {
        let mut order: Vec<usize> = (0..sites.len()).collect();
        order.sort_by_key(|&site| tensors[sites[site].a].offset.min(tensors[sites[site].b].offset));
        let mut groups: Vec<Group> = Vec::new();
        for site in order {
            let MatchedSite { a, b, .. } = sites[site];
            let bytes = tensors[a].bytes + tensors[b].bytes;
            let wanted = [Wanted { site, is_a: true, tensor: a }, Wanted { site, is_a: false, tensor: b }];
            match groups.last_mut().filter(|group| group.bytes + bytes <= READ_BYTES) {
                Some(group) => {
                    group.sites.push(site);
                    group.wanted.extend(wanted);
                    group.bytes += bytes;
                }
                None => groups.push(Group { sites: vec![site], wanted: wanted.to_vec(), bytes }),
            }
        }
        for group in &mut groups {
            group.wanted.sort_by_key(|wanted| tensors[wanted.tensor].offset);
        }
        Self { groups }
    }
}

impl Group {
    /// Reads the group to `content` from `first` on, and notes where its factors are.
    fn read(
        &self,
        tensors: &[TensorEntry],
        source: &mut dyn TensorBytes,
        first: usize,
        content: &mut [u8],
        places: &mut [(Place, Place)],
    ) -> Result<(), Fault> {
        let mut start = first;
        for wanted in &self.wanted {
            let entry = &tensors[wanted.tensor];
            let (a, b) = &mut places[wanted.site];
            let place = if wanted.is_a { a } else { b };
            *place = Place { dtype: factor_type(entry.dtype), range: start..start + entry.bytes };
            start += entry.bytes;
        }
        let entries: Vec<&TensorEntry> = self.wanted.iter().map(|wanted| &tensors[wanted.tensor]).collect();
        source.read_all(&entries, &mut content[first..start])
    }

    fn show(&self, content: &[u8], places: &[(Place, Place)], see: &mut SeeSite<'_>) -> Result<(), Fault> {
        self.sites.iter().try_for_each(|&site| {
            let (a, b) = &places[site];
            let joined = (a.range.end == b.range.start).then(|| &content[a.range.start..b.range.end]);
            see(site, SiteFactors { a: a.stored(content), b: b.stored(content), joined })
        })
    }
}

/// The factors of all sites. Cheap to clone.
#[derive(Clone)]
pub(super) struct Factors {
    content: Arc<AlignedVec<u8>>,
    sites: Vec<(Place, Place)>,
}

impl Factors {
    /// Reads the factors of `sites`, shows each site's to `see`, as [`stream`] does, and keeps them.
    pub(super) fn read(
        sites: &[MatchedSite],
        tensors: &[TensorEntry],
        source: &mut dyn TensorBytes,
        see: &mut SeeSite<'_>,
    ) -> Result<Self, Fault> {
        let plan = ReadPlan::new(sites, tensors);
        let bytes = plan.groups.iter().map(|group| group.bytes).sum();
        let mut content = block(bytes)?;
        let mut places = vec![(Place::default(), Place::default()); sites.len()];
        let mut first = 0;
        for group in &plan.groups {
            group.read(tensors, source, first, &mut content, &mut places)?;
            first += group.bytes;
            group.show(&content, &places, see)?;
        }
        Ok(Self { content: Arc::new(content), sites: places })
    }

    /// A and B of a site by its position.
    pub(super) fn site(&self, index: usize) -> Option<(StoredFactor<'_>, StoredFactor<'_>)> {
        self.sites.get(index).map(|(a, b)| (a.stored(&self.content), b.stored(&self.content)))
    }

    /// A and B of every site.
    pub(super) fn iter(&self) -> impl Iterator<Item = (StoredFactor<'_>, StoredFactor<'_>)> {
        self.sites.iter().map(|(a, b)| (a.stored(&self.content), b.stored(&self.content)))
    }

    /// Number of sites.
    pub(super) fn len(&self) -> usize {
        self.sites.len()
    }

    /// Bytes of all factors.
    pub(super) fn bytes(&self) -> usize {
        self.content.len()
    }
}
