//! The gated activation of the decoder's MLP: `silu(gate) * up`.
#![expect(clippy::inline_always, reason = "inlined into the function that switches the level's instructions on")]

use super::CpuBackend;
use super::exp::exp;
use super::memory::Buffer;
use super::parallel::run_rows;
use super::vector::{self, LANES, Vector8, VectorKernel};

/// Values that a thread should have to work on before another one is worth waking.
const GRAIN: usize = 4096;

/// See [`crate::Backend::gated_activation`].
pub(super) fn gated_activation(backend: &CpuBackend, rows: usize, gate: &Buffer, up: &Buffer, out: &mut Buffer) {
    assert!(gate.width == up.width && gate.width == out.width, "gate, up and the result have one width");
    let used = rows * gate.width;
    let (gate, up) = (&gate.data[..used], &up.data[..used]);
    let level = backend.level;
    // Eight values are a unit (the last one may be shorter), so that one row is shared by threads as many are.
    let (whole, tail) = out.data[..used].split_at_mut(used / LANES * LANES);
    run_rows(&backend.pool, whole, LANES, GRAIN / LANES, &|first, out| {
        let part = first * LANES..first * LANES + out.len();
        vector::run(level, SiluProduct { gate: &gate[part.clone()], up: &up[part], out });
    });
    if !tail.is_empty() {
        let part = used - tail.len()..used;
        vector::run(level, SiluProduct { gate: &gate[part.clone()], up: &up[part], out: tail });
    }
}

struct SiluProduct<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    out: &'a mut [f32],
}

impl VectorKernel for SiluProduct<'_> {
    #[inline(always)]
    fn run<V: Vector8>(self, vector: V) {
        let (gates, gates_tail) = self.gate.as_chunks::<LANES>();
        let (ups, ups_tail) = self.up.as_chunks::<LANES>();
        let (outs, outs_tail) = self.out.as_chunks_mut::<LANES>();
        for (out, (gate, up)) in outs.iter_mut().zip(gates.iter().zip(ups)) {
            let value = gated(vector, vector.load(gate), vector.load(up));
            vector.store(value, out);
        }
        if !outs_tail.is_empty() {
            let value = gated(vector, vector.load_padded(gates_tail), vector.load_padded(ups_tail));
            vector.store_prefix(value, outs_tail);
        }
    }
}

/// `gate / (1 + e^-gate) * up`
#[inline(always)]
fn gated<V: Vector8>(vector: V, gate: V::Lanes, up: V::Lanes) -> V::Lanes {
    let decay = exp(vector, vector.sub(vector.splat(0.0), gate));
    vector.mul(vector.div(gate, vector.add(vector.splat(1.0), decay)), up)
}
