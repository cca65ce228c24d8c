//! The floor of a step: the bytes it must read at the measured bandwidth, or its arithmetic at the measured peak,
//! whichever is longer.

use std::time::Duration;

use manylora_kernels::KernelError;
use manylora_kernels::cpu::{CpuBackend, limits};

use crate::synthetic::Shape;

/// What the machine can do at most, measured in the same process as what is compared with it.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes per second read from huge pages.
    pub bandwidth: f64,
    /// Floating-point operations per second (a fused multiply-add counts two).
    pub peak: f64,
}

impl Limits {
    /// Measures both with the backend's threads.
    pub fn measure(backend: &CpuBackend, budget: Duration) -> Result<Self, KernelError> {
        Ok(Self {
            bandwidth: limits::read_bandwidth(backend.pool(), budget)?,
            peak: limits::arithmetic_peak(backend.level(), backend.pool(), budget),
        })
    }

    /// Seconds that a step takes at least.
    pub fn floor(&self, work: Work) -> f64 {
        (work.bytes / self.bandwidth).max(work.flops / self.peak)
    }
}

/// What a step must read and compute.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Weights, distinct adapters and KV, each once.
    pub bytes: f64,
    /// Two per weight and row.
    pub flops: f64,
}

impl Work {
    /// A decode step of `rows` sequences with `context` cached tokens each and `adapters` distinct adapters of `rank`.
    pub fn decode(shape: &Shape, rows: usize, context: usize, adapters: usize, rank: usize) -> Self {
        let adapter = shape.adapter_parameters(rank) as f64;
        let kv = (rows * context * 2 * shape.layers * shape.kv_heads * shape.head_dim) as f64;
        let adapted_rows = if adapters == 0 { 0 } else { rows };
        Self {
            bytes: 2.0 * (shape.parameters() as f64 + adapters as f64 * adapter + kv),
            flops: 2.0 * (rows as f64 * shape.parameters() as f64 + adapted_rows as f64 * adapter),
        }
    }

    /// A prefill of `sequences` prompts of `tokens` tokens each, with one adapter of `rank` (0 = the base); only their last
    /// rows meet the head.
    pub fn prefill(shape: &Shape, sequences: usize, tokens: usize, rank: usize) -> Self {
        let (rows, adapter) = ((sequences * tokens) as f64, shape.adapter_parameters(rank) as f64);
        let body = (shape.parameters() - shape.head_parameters()) as f64 + adapter;
        let attention = (sequences * shape.layers * shape.heads * shape.head_dim * tokens * tokens) as f64;
        Self {
            bytes: 2.0 * (shape.parameters() as f64 + adapter),
            flops: 2.0 * (rows * body + (sequences * shape.head_parameters()) as f64 + attention),
        }
    }
}
