//! What cases are made of on every device: weights, the place of the map, rows and their adapters.

use std::sync::Arc;

use manylora_kernels::{
    AdapterTable, Backend, KernelError, Module, RowAdapterPlan, RowSource, Site, SiteShape, StorageType,
};

use crate::case::Case;
use crate::popularity::Popularity;

/// A matrix of small numbers.
pub(crate) struct Ramp {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
}

impl RowSource for Ramp {
    fn rows(&self) -> usize {
        self.rows
    }

    fn columns(&self) -> usize {
        self.columns
    }

    fn read(&self, first: usize, out: &mut [f32]) -> Result<(), KernelError> {
        for (index, value) in out.iter_mut().enumerate() {
            *value = ((first * self.columns + index) % 251) as f32 / 2510.0 - 0.05;
        }
        Ok(())
    }
}

/// The map in a layer.
pub(crate) fn site(layer: usize) -> Site {
    Site::layer(layer as u32, Module::Gate)
}

/// An adapter for each row of a case, which touches the map in every one of `layers` layers.
pub(crate) fn adapters<B: Backend>(
    backend: &B,
    case: &Case,
    layers: usize,
) -> Result<AdapterTable<B::Adapter>, KernelError> {
    let (inputs, outputs) = case.shape;
    let (rank, input, output) = (case.rank as u32, inputs as u32, outputs as u32);
    let shapes: Vec<SiteShape> =
        (0..layers).map(|layer| SiteShape { site: site(layer), rank, input, output, scale: 1.0 }).collect();
    let mut adapters = AdapterTable::new(case.rows);
    for slot in 0..case.rows {
        let adapter = backend.pack_adapter(&shapes, StorageType::Bf16, &mut |_, a, b| {
            a.clear();
            a.resize(case.rank * inputs, 0.01);
            b.clear();
            b.resize(case.rank * outputs, 0.01);
            Ok(())
        })?;
        adapters.install(slot as u32, Arc::new(adapter));
    }
    Ok(adapters)
}

/// Rows and their adapters as the kernels want them.
pub(crate) fn plan(mix: Option<Popularity>, rows: usize) -> RowAdapterPlan {
    let mut plan = RowAdapterPlan::default();
    for (row, slot) in mix.map_or(vec![], |mix| mix.adapters(rows)).into_iter().enumerate() {
        plan.push(row as u32, slot, 1.0);
    }
    plan.finish(rows);
    plan
}
