//! Which adapters touch a call, and where their factors and results lie.

use crate::backend::AdapterTable;
use crate::batch::RowAdapterPlan;
use crate::cpu::adapter::CpuAdapter;
use crate::cpu::scratch::{Scratch, Segment};
use crate::site::Site;

/// Looks every segment of the plan up for every part, once per call and not per panel. A slot that is empty, or factors
/// of another shape, are an error of the engine: the call panics rather than answer with the base (fail closed).
pub(super) fn resolve_segments(
    plan: &RowAdapterPlan,
    adapters: &AdapterTable<CpuAdapter>,
    inputs: usize,
    sites: impl Iterator<Item = (Site, usize)> + Clone,
    scratch: &mut Scratch,
) {
    scratch.segments.clear();
    if plan.is_empty() {
        return;
    }
    let parts = sites.clone().count();
    scratch.reserve(plan.segments().len() * parts, 0).expect("working memory of a step: reserve it at start");
    let mut shrunk = 0;
    for (part, (site, outputs)) in sites.enumerate() {
        for segment in plan.segments() {
            let Some(adapter) = adapters.get(segment.slot) else {
                panic!("the plan names slot `{}`, which holds no adapter", segment.slot)
            };
            let Some(factors) = adapter.factors(site) else { continue };
            assert!(
                factors.input == inputs && factors.output == outputs,
                "the adapter in slot `{}` is {} -> {} at site `{}`, where the base is {inputs} -> {outputs}",
                segment.slot,
                factors.input,
                factors.output,
                site.0,
            );
            scratch.segments.push(Segment {
                part,
                first: segment.first as usize,
                count: segment.count as usize,
                rank: factors.rank,
                scale: factors.scale,
                dtype: adapter.dtype(),
                a: factors.a.as_ptr(),
                b: factors.b.as_ptr(),
                shrunk,
            });
            shrunk += segment.count as usize * factors.rank;
        }
    }
    let dtype = scratch.segments.first().map(|segment| segment.dtype);
    assert!(scratch.segments.iter().all(|segment| Some(segment.dtype) == dtype), "adapters of one type of numbers");
    if scratch.shrunk.len() < shrunk {
        let segments = std::mem::take(&mut scratch.segments);
        scratch.reserve(0, shrunk).expect("working memory of a step: reserve it at start");
        scratch.segments = segments;
    }
}
