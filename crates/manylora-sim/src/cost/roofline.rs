//! A step's time from a card's figures (the roofline of Williams et al. 2009): each part of it takes as long as its bytes from
//! memory or its arithmetic, whichever is longer, and launches come on top.
//!
//! What is assumed: all of a step's rows go through the base's weights in one pass, so that these are read once; a sequence's
//! keys and values are read once in each layer; adapters of a step are read once each, and every row's share of their
//! arithmetic is done; nothing overlaps but the two sides of a roofline; and loads take no bandwidth from steps.

use manylora_core::budget::{ModelDimensions, NumberFormat, TargetModule};
use serde::{Deserialize, Serialize};

use super::{AdapterShape, CostModel, StepWork, Tier};
use crate::card::CardSpec;
use crate::error::SimError;
use crate::workload::positive;

/// What of a card's figures is reached, and what the host adds. The defaults are what well-kept engines reach, not a fit to
/// any: whoever has measured a machine should set them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Efficiency {
    /// Share of the memory's bandwidth that streaming weights and keys reaches.
    pub memory: f64,
    /// Share of the peak that products of many rows reach.
    pub compute: f64,
    /// Share of the memory's bandwidth that gathering adapters' factors reaches (Punica's kernels: 0.46 on an A100).
    pub adapter_memory: f64,
    /// Share of the peak that products with adapters' factors reach.
    pub adapter_compute: f64,
    /// Seconds of the host in each step: planning, sampling, delivering.
    pub host_seconds: f64,
    /// Seconds of each layer beyond its arithmetic: launches, or the gaps of a recorded step.
    pub layer_seconds: f64,
    /// Seconds that adapters add to each layer, however many: their launches.
    pub adapter_layer_seconds: f64,
    /// Share of the bus's bandwidth that a load reaches.
    pub bus: f64,
    /// Bytes that a disk gives in a second.
    pub disk_bandwidth: f64,
    /// Seconds of a load before its first byte: opening, reading the header, checking.
    pub load_seconds: f64,
}

impl Default for Efficiency {
    fn default() -> Self {
        Self {
            memory: 0.8,
            compute: 0.6,
            adapter_memory: 0.45,
            adapter_compute: 0.2,
            host_seconds: 1e-3,
            layer_seconds: 30e-6,
            adapter_layer_seconds: 20e-6,
            bus: 0.7,
            disk_bandwidth: 2e9,
            load_seconds: 1e-3,
        }
    }
}

impl Efficiency {
    /// Whether the numbers can be: shares above 0 and up to 1, times from 0, bandwidths above 0.
    pub fn validate(&self) -> Result<(), SimError> {
        let shares = [
            ("memory", self.memory),
            ("compute", self.compute),
            ("adapter_memory", self.adapter_memory),
            ("adapter_compute", self.adapter_compute),
            ("bus", self.bus),
        ];
        if let Some((field, value)) = shares.into_iter().find(|&(_, value)| !(value > 0.0 && value <= 1.0)) {
            return Err(SimError::field(field, value, "a share of the card's figure, above 0 and at most 1"));
        }
        let times = [
            ("host_seconds", self.host_seconds),
            ("layer_seconds", self.layer_seconds),
            ("adapter_layer_seconds", self.adapter_layer_seconds),
            ("load_seconds", self.load_seconds),
        ];
        if let Some((field, value)) = times.into_iter().find(|&(_, value)| !(value.is_finite() && value >= 0.0)) {
            return Err(SimError::field(field, value, "a finite number of seconds from 0 up"));
        }
        positive("disk_bandwidth", self.disk_bandwidth).map(drop)
    }
}

/// A model on a card.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Roofline {
    card: CardSpec,
    efficiency: Efficiency,
    layers: f64,
    /// Bytes of the layers' weights, and of the head's.
    layer_bytes: f64,
    head_bytes: f64,
    /// Multiplications and additions of a row in the layers, and of a sampled row in the head.
    row_flops: f64,
    head_flops: f64,
    /// Bytes of a position's keys and values.
    position_bytes: f64,
    /// Multiplications and additions of a row with a position.
    pair_flops: f64,
}

impl Roofline {
    /// A model in a format of two bytes.
    pub fn new(dimensions: &ModelDimensions, card: CardSpec, efficiency: Efficiency) -> Self {
        let linear: u64 = TargetModule::ALL.iter().map(|&module| dimensions.shape(module)).map(|(a, b)| a * b).sum();
        let elements = (dimensions.layers * linear) as f64;
        let head = (dimensions.vocabulary * dimensions.hidden) as f64;
        let number = NumberFormat::Bf16;
        Self {
            card,
            efficiency,
            layers: dimensions.layers as f64,
            layer_bytes: elements * number.bytes() as f64,
            head_bytes: head * number.bytes() as f64,
            row_flops: 2.0 * elements,
            head_flops: 2.0 * head,
            position_bytes: dimensions.kv_block_bytes(1, number) as f64,
            // Scores and sums over all heads.
            pair_flops: (4 * dimensions.layers * dimensions.heads * dimensions.head_dim) as f64,
        }
    }

    fn longer(&self, bytes: f64, flops: f64) -> f64 {
        let (card, reached) = (&self.card, &self.efficiency);
        (bytes / (card.memory_bandwidth * reached.memory)).max(flops / (card.peak_flops * reached.compute))
    }
}

impl CostModel for Roofline {
    fn step(&self, work: &StepWork) -> f64 {
        let (card, reached) = (&self.card, &self.efficiency);
        let base = self.longer(self.layer_bytes, work.rows as f64 * self.row_flops);
        let head_bytes = if work.sampled_rows > 0 { self.head_bytes } else { 0.0 };
        let head = self.longer(head_bytes, work.sampled_rows as f64 * self.head_flops);
        let attention =
            self.longer(work.context as f64 * self.position_bytes, work.attention_pairs as f64 * self.pair_flops);
        let adapters = if work.adapters == 0 {
            0.0
        } else {
            let bytes = work.adapter_bytes as f64 / (card.memory_bandwidth * reached.adapter_memory);
            let flops = 2.0 * work.adapter_row_parameters as f64 / (card.peak_flops * reached.adapter_compute);
            bytes.max(flops) + self.layers * reached.adapter_layer_seconds
        };
        base + head + attention + adapters + self.layers * reached.layer_seconds + reached.host_seconds
    }

    fn load(&self, adapter: &AdapterShape, tier: Tier) -> f64 {
        let reached = &self.efficiency;
        let bytes = adapter.bytes as f64;
        let disk = if tier == Tier::Disk { bytes / reached.disk_bandwidth } else { 0.0 };
        reached.load_seconds + disk + bytes / (self.card.host_bandwidth * reached.bus)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ModelDescription;

    fn llama() -> Roofline {
        let model = ModelDescription::named("Llama-2-7b").unwrap();
        Roofline::new(&model.dimensions, CardSpec::named("a100-80").unwrap(), Efficiency::default())
    }

    #[test]
    fn decoding_is_bound_by_memory_and_prefill_by_arithmetic() {
        let model = llama();
        let one = StepWork {
            sequences: 1,
            rows: 1,
            sampled_rows: 1,
            context: 100,
            attention_pairs: 100,
            ..StepWork::default()
        };
        let decode = model.step(&one);
        // 13.2 GB at 0.8 of 2.04 TB/s, 32 layers of 30 us, a millisecond of the host.
        assert!((0.009..0.012).contains(&decode), "{decode}");
        let many = StepWork { sequences: 32, rows: 32, sampled_rows: 32, context: 3200, attention_pairs: 3200, ..one };
        assert!(model.step(&many) < 1.3 * decode);
        let prompt = StepWork { rows: 2048, context: 2048, attention_pairs: 2048 * 1024, ..one };
        // 2 x 6.5 G x 2048 at 0.6 of 312 TFLOP/s.
        assert!((0.13..0.17).contains(&model.step(&prompt)), "{}", model.step(&prompt));
    }

    #[test]
    fn adapters_cost_their_launches_their_bytes_and_their_rows() {
        let model = llama();
        let base = StepWork {
            sequences: 32,
            rows: 32,
            sampled_rows: 32,
            context: 3200,
            attention_pairs: 3200,
            ..StepWork::default()
        };
        let with = |adapters: u64| StepWork {
            adapters,
            adapter_bytes: adapters * 33_554_432,
            adapter_rows: 32,
            adapter_row_parameters: 32 * 16_777_216,
            ..base
        };
        let added = |adapters: u64| model.step(&with(adapters)) - model.step(&base);
        assert!(added(1) > 32.0 * 20e-6 && added(1) < 1.1e-3, "{}", added(1));
        // 32 x 33.6 MB at 0.45 of 2.04 TB/s.
        assert!((1.1e-3..2.0e-3).contains(&(added(32) - added(1))), "{}", added(32));
    }

    #[test]
    fn a_load_from_the_host_needs_no_disk() {
        let model = llama();
        let adapter = AdapterShape { bytes: 64_000_000, parameters: 32_000_000, rank: 32 };
        let (disk, host) = (model.load(&adapter, Tier::Disk), model.load(&adapter, Tier::Host));
        assert!((disk - host - 0.032).abs() < 1e-9);
        assert!((0.003..0.005).contains(&host), "{host}");
    }
}
