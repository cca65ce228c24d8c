//! What cases are made of on every device: weights, the place of the map, rows and their adapters.

use manylora_kernels::{KernelError, Module, RowAdapterPlan, RowSource, Site};

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

/// Rows and their adapters as the kernels want them.
pub(crate) fn plan(mix: Option<Popularity>, rows: usize) -> RowAdapterPlan {
    let mut plan = RowAdapterPlan::default();
    for (row, slot) in mix.map_or(vec![], |mix| mix.adapters(rows)).into_iter().enumerate() {
        plan.push(row as u32, slot, 1.0);
    }
    plan.finish(rows);
    plan
}
