//! What a call does by tile products.
#![expect(unsafe_code, reason = "threads write disjoint columns of shared outputs")]

use std::ops::Range;

use super::{Bench, Call, Deltas, Part, Prepared, panels_side_by_side, run};
use crate::backend::{AdapterTable, LinearOutput, LinearPart};
use crate::batch::RowAdapterPlan;
use crate::cpu::CpuBackend;
use crate::cpu::activation::gated_activation;
use crate::cpu::adapter::CpuAdapter;
use crate::cpu::level::SimdLevel;
use crate::cpu::memory::Buffer;
use crate::cpu::pack::PanelFormat;
use crate::cpu::tiles::{self, Registers};

/// See [`crate::Backend::gated_linear`]: with tile registers gate and up pass from sums to the activation without being
/// written.
pub(in crate::cpu) fn gated_linear(
    backend: &CpuBackend,
    rows: usize,
    plan: &RowAdapterPlan,
    adapters: &AdapterTable<CpuAdapter>,
    input: &Buffer,
    parts: &mut [LinearPart<'_, CpuBackend>; 2],
    out: &mut Buffer,
) {
    assert!(parts[0].weight.outputs() == parts[1].weight.outputs(), "gate and up have one width");
    let fused = backend.level == SimdLevel::Amx
        && parts.iter().all(|part| part.weight.format() == PanelFormat::Bf16Pairs && part.mode == LinearOutput::Store)
        && plan.segments().iter().all(|segment| {
            adapters.get(segment.slot).is_some_and(|adapter| tiles::tiled(backend.level, adapter.dtype()))
        });
    if fused {
        run(backend, rows, plan, adapters, input, parts, Some(out));
    } else {
        run(backend, rows, plan, adapters, input, parts, None);
        gated_activation(backend, rows, parts[0].out, parts[1].out, out);
    }
}

impl Call<'_> {
    /// As [`Self::shrink`] by tile products.
    pub(super) fn tiled_shrink(&self, part: usize, parts: usize) {
        let mut bench = self.bench(part);
        let tiles = self.tiles.as_ref().expect("rows were made tiles where adapters are");
        let call = tiles::ShrinkCall {
            tiles,
            inputs: self.inputs,
            plan: self.plan,
            segments: self.segments,
            shrunk: self.shrunk,
        };
        if let Some(entry) = self.plan.entries().iter().find(|entry| entry.row as usize >= self.rows) {
            panic!("the plan names row `{}` of a batch of {}", entry.row, self.rows);
        }
        // SAFETY: the tiles are those of the plan's rows, the bench is this thread's, and the level is available.
        unsafe { call.run((part, parts), &mut bench.registers, bench.spare) };
    }

    /// Panels of gates and ups of one block of rows, by tile products, and their activation.
    pub(super) fn run_of_gates(
        &self,
        share: Range<usize>,
        prepared: &Prepared<'_>,
        (out, out_width): (*mut f32, usize),
        bench: &mut Bench,
    ) {
        let (first_row, rows) = (prepared.first_row, prepared.rows);
        let mut panel = share.start;
        while panel < share.end {
            let group = panels_side_by_side(self.level, true, rows, share.end - panel);
            let part = &self.parts[0];
            let width = group * part.format.width();
            let first_output = panel * part.format.width();
            let last_output = (first_output + width).min(part.outputs);
            let tiles = [bench.tile, bench.second_tile];
            for ((part, deltas), tile) in self.parts.iter().zip(prepared.deltas.iter().flatten()).zip(tiles) {
                let next = (panel + group).min(part.panels - 1) * part.format.panel_bytes(self.inputs);
                let follows = part.weights.wrapping_add(next);
                self.tiled_base(part, (panel, group), (first_row, rows), deltas, follows, (tile, &mut bench.registers));
                // SAFETY: the tile has these rows; B has panels for all outputs of the part.
                unsafe { Self::add_deltas(deltas, (first_output, last_output), width, tile, bench) };
            }
            let bias = |part: &Part| {
                if part.bias.is_null() { part.bias } else { part.bias.wrapping_add(first_output) }
            };
            let job = tiles::FinishGated {
                sums: tiles.map(<*mut f32>::cast_const),
                width,
                rows,
                count: last_output - first_output,
                bias: [bias(&self.parts[0]), bias(&self.parts[1])],
                out: out.wrapping_add(first_row * out_width + first_output),
                out_width,
            };
            // SAFETY: these columns of the tiles, the result and the biases, which no other thread has; the level is available.
            unsafe { job.run() };
            panel += group;
        }
    }

    /// As [`Self::base`] by tile products.
    pub(super) fn tiled_base(
        &self,
        part: &Part,
        (panel, group): (usize, usize),
        (first_row, rows): (usize, usize),
        deltas: &Deltas<'_>,
        follows: *const u8,
        (tile, registers): (*mut f32, &mut Registers),
    ) {
        let panel_bytes = part.format.panel_bytes(self.inputs);
        let (first_output, width) = (panel * part.format.width(), group * part.format.width());
        let ahead = deltas.ahead(first_output, width, tiles::gaps(self.inputs, rows));
        let panels = tiles::Panels {
            tiles: self.tiles.as_ref().expect("rows were made tiles where the base is"),
            first_row,
            rows,
            inputs: self.inputs,
            weights: part.weights.wrapping_add(panel * panel_bytes),
            panel_bytes,
            count: group,
            sums: tile,
            follows,
            ahead: ahead.as_ref(),
        };
        // SAFETY: panels, tiles and sums are as large as the job says; the backend's level is available.
        unsafe { panels.run(registers) };
    }

    /// As [`Self::finish`] on a level with tile registers.
    pub(super) fn finish_tiled(
        part: &Part,
        (first_output, last_output): (usize, usize),
        width: usize,
        (first_row, rows): (usize, usize),
        tile: *mut f32,
    ) {
        let job = tiles::Finish {
            sums: tile,
            width,
            rows,
            count: last_output - first_output,
            bias: if part.bias.is_null() { part.bias } else { part.bias.wrapping_add(first_output) },
            out: part.out.wrapping_add(first_row * part.out_width + first_output),
            out_width: part.out_width,
            add: part.mode == LinearOutput::Add,
        };
        // SAFETY: these columns of the tile, the result and the bias, which no other thread has; the level is available.
        unsafe { job.run() };
    }
}
