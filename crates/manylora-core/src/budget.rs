//! The arithmetic of bytes, in one place: loader, engine, planner and simulator cannot disagree, because all of them ask
//! here. Pure functions; a test of the engine asserts that they equal what the kernels allocate.
//!
//! Here is what packed things take, [`working`] has what a step takes, [`card`] what is different on cards, and [`division`]
//! how the memory there is becomes KV blocks and adapters.

pub mod card;
pub mod division;
pub mod working;

/// Boundary on which each packed array of an adapter starts, in bytes: a cache line.
pub const ARRAY_ALIGNMENT: u64 = 64;
/// Outputs per panel of an adapter's B, and of a base weight unless its format says otherwise.
pub const PANEL_OUTPUTS: u64 = 16;

/// How numbers of the base and of adapters are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum NumberFormat {
    /// Four bytes.
    F32,
    /// Two bytes.
    Bf16,
}

impl NumberFormat {
    /// Bytes of one number.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// How a base weight is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum WeightPacking {
    /// Panels of 16 outputs.
    Panels16,
    /// Panels of 32 outputs with inputs in pairs (bf16 on AVX-512 BF16 and AMX).
    Panels32Pairs,
}

/// Bytes of one KV block over all layers: keys and values of `block_size` positions.
pub const fn kv_block_bytes(layers: u64, kv_heads: u64, head_dim: u64, block_size: u64, number_bytes: u64) -> u64 {
    2 * layers * kv_heads * head_dim * block_size * number_bytes
}

/// Bytes of a packed base weight `[output, input]`, padding included.
pub const fn linear_bytes(output: u64, input: u64, number_bytes: u64, packing: WeightPacking) -> u64 {
    match packing {
        WeightPacking::Panels16 => output.next_multiple_of(PANEL_OUTPUTS) * input * number_bytes,
        WeightPacking::Panels32Pairs => output.next_multiple_of(32) * input.next_multiple_of(2) * number_bytes,
    }
}

/// Bytes of one adapted site in an adapter's blob: `A` is `rank x input` without padding (of the embedding,
/// `vocabulary x rank`: the same product), `B` is `rank` inputs in panels of 16 outputs, each on its own cache line.
pub const fn adapter_site_bytes(rank: u64, input: u64, output: u64, number_bytes: u64) -> u64 {
    (rank * input * number_bytes).next_multiple_of(ARRAY_ALIGNMENT)
        + (output.next_multiple_of(PANEL_OUTPUTS) * rank * number_bytes).next_multiple_of(ARRAY_ALIGNMENT)
}

/// The modules of a decoder layer that adapters can touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum TargetModule {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// Attention output.
    O,
    /// Gate of the feed-forward block.
    Gate,
    /// Its up projection.
    Up,
    /// Its down projection.
    Down,
}

impl TargetModule {
    /// All of them ("all-linear").
    pub const ALL: [Self; 7] = [Self::Q, Self::K, Self::V, Self::O, Self::Gate, Self::Up, Self::Down];
}

/// Plain dimensions of a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ModelDimensions {
    /// Decoder layers.
    pub layers: u64,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Width of the feed-forward block.
    pub intermediate: u64,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Rows of the embedding.
    pub vocabulary: u64,
    /// Whether the output projection is the embedding.
    pub tied: bool,
    /// Whether q, k and v have biases (f32).
    pub attention_bias: bool,
    /// Whether the attention output has one.
    pub output_bias: bool,
    /// Whether gate, up and down have biases.
    pub mlp_bias: bool,
    /// Whether queries and keys are normed per head.
    pub head_norm: bool,
}

impl ModelDimensions {
    /// Lengths of the vectors of a layer, which are stored in f32: biases and norms.
    pub(crate) fn layer_vectors(&self) -> impl Iterator<Item = u64> {
        let (queries, keys) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let present = |there: bool, lengths: &'static [usize]| if there { lengths } else { &[] };
        let lengths = [queries, keys, self.hidden, self.intermediate, self.head_dim];
        let biases = present(self.attention_bias, &[0, 1, 1]).iter().chain(present(self.output_bias, &[2]));
        let biases = biases.chain(present(self.mlp_bias, &[3, 3, 2]));
        let norms = present(true, &[2, 2]).iter().chain(present(self.head_norm, &[4, 4]));
        biases.chain(norms).map(move |&which| lengths[which])
    }

    /// Parameters, in numbers: matrices, biases and norms.
    pub fn parameters(&self) -> u64 {
        let linear: u64 = TargetModule::ALL.iter().map(|&module| self.shape(module)).map(|(a, b)| a * b).sum();
        let ends = if self.tied { 1 } else { 2 };
        self.layers * (linear + self.layer_vectors().sum::<u64>()) + self.hidden + ends * self.vocabulary * self.hidden
    }

    /// Parameters of an adapter of one rank on `modules` of every layer.
    pub fn adapter_parameters(&self, rank: u64, modules: &[TargetModule]) -> u64 {
        let layer: u64 = modules.iter().map(|&module| self.shape(module)).map(|(a, b)| rank * (a + b)).sum();
        self.layers * layer
    }

    /// Input and output widths of a module.
    pub const fn shape(&self, module: TargetModule) -> (u64, u64) {
        let (queries, keys) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        match module {
            TargetModule::Q => (self.hidden, queries),
            TargetModule::K | TargetModule::V => (self.hidden, keys),
            TargetModule::O => (queries, self.hidden),
            TargetModule::Gate | TargetModule::Up => (self.hidden, self.intermediate),
            TargetModule::Down => (self.intermediate, self.hidden),
        }
    }

    /// Bytes of all packed weights; norms and biases are f32.
    pub fn weight_bytes(&self, number: NumberFormat, packing: WeightPacking) -> u64 {
        let linear: u64 = TargetModule::ALL
            .iter()
            .map(|&module| self.shape(module))
            .map(|(input, output)| linear_bytes(output, input, number.bytes(), packing))
            .sum();
        let ends = if self.tied { 1 } else { 2 };
        self.layers * (linear + 4 * self.layer_vectors().sum::<u64>())
            + 4 * self.hidden
            + ends * linear_bytes(self.vocabulary, self.hidden, number.bytes(), packing)
    }

    /// Bytes of a KV block over all layers.
    pub const fn kv_block_bytes(&self, block_size: u64, number: NumberFormat) -> u64 {
        kv_block_bytes(self.layers, self.kv_heads, self.head_dim, block_size, number.bytes())
    }

    /// Bytes of an adapter of one rank on `modules` of every layer.
    pub fn adapter_bytes(&self, rank: u64, modules: &[TargetModule], number: NumberFormat) -> u64 {
        let layer: u64 = modules
            .iter()
            .map(|&module| self.shape(module))
            .map(|(input, output)| adapter_site_bytes(rank, input, output, number.bytes()))
            .sum();
        self.layers * layer
    }
}

/// The bytes that KV blocks and adapters share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Ledger {
    /// How many there are.
    pub bytes: u64,
    /// Bytes of a KV block.
    pub block_bytes: u64,
    /// Positions of a KV block.
    pub block_size: usize,
}

impl Ledger {
    /// KV blocks there are beside `adapter_bytes` of adapters: as many as fit whole.
    pub const fn blocks_beside(&self, adapter_bytes: u64) -> usize {
        (self.bytes.saturating_sub(adapter_bytes) / self.block_bytes) as usize
    }

    /// Bytes of the KV blocks of one sequence of `tokens` positions.
    pub const fn sequence_bytes(&self, tokens: usize) -> u64 {
        (tokens.div_ceil(self.block_size) as u64).saturating_mul(self.block_bytes)
    }

    /// Longest sequence that fits beside `adapter_bytes` of adapters, in positions.
    pub const fn longest_sequence(&self, adapter_bytes: u64) -> usize {
        self.blocks_beside(adapter_bytes) * self.block_size
    }

    /// Bytes that adapters can take at most: one sequence of `max_model_len` always fits beside them.
    pub const fn adapter_room(&self, max_model_len: usize) -> u64 {
        self.bytes.saturating_sub(self.sequence_bytes(max_model_len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMOLLM2_135M: ModelDimensions = ModelDimensions {
        layers: 30,
        hidden: 576,
        intermediate: 1536,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        vocabulary: 49_152,
        tied: true,
        attention_bias: false,
        output_bias: false,
        mlp_bias: false,
        head_norm: false,
    };

    #[test]
    fn formulas_by_hand() {
        // 30 layers, keys and values, 3 heads of 64, 16 positions, 2 bytes.
        assert_eq!(SMOLLM2_135M.kv_block_bytes(16, NumberFormat::Bf16), 30 * 2 * 3 * 64 * 16 * 2);
        // The published parameter count, two bytes each; its 61 norms of 576 have four.
        let norms = 61 * 576;
        let parameters = 134_515_008;
        let bytes = SMOLLM2_135M.weight_bytes(NumberFormat::Bf16, WeightPacking::Panels16);
        assert_eq!(bytes, 2 * (parameters - norms) + 4 * norms);
        assert_eq!(SMOLLM2_135M.parameters(), parameters);
        // 10 outputs are padded to 16; 2 * 7 * 5 = 70 bytes to 128, 16 * 5 * 2 = 160 to 192.
        assert_eq!(adapter_site_bytes(5, 7, 10, 2), 128 + 192);
        assert_eq!(linear_bytes(33, 7, 2, WeightPacking::Panels16), 48 * 7 * 2);
        assert_eq!(linear_bytes(33, 7, 2, WeightPacking::Panels32Pairs), 64 * 8 * 2);
    }

    #[test]
    fn ledger_counts_whole_blocks() {
        let ledger = Ledger { bytes: 1000, block_bytes: 100, block_size: 16 };
        assert_eq!(ledger.blocks_beside(0), 10);
        assert_eq!(ledger.blocks_beside(1), 9);
        assert_eq!(ledger.blocks_beside(100), 9);
        assert_eq!(ledger.blocks_beside(101), 8);
        assert_eq!(ledger.blocks_beside(5000), 0);
        assert_eq!(ledger.longest_sequence(250), 7 * 16);
        assert_eq!(ledger.adapter_room(17), 800);
        assert_eq!(ledger.adapter_room(usize::MAX), 0);
    }
}
