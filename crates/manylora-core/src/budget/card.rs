//! The arithmetic of bytes on cards: everything lies in one reservation, in parts that start and end at whole granules.

mod working;

pub use working::{MOST_COMPOSED, StepRoom, most_kv_blocks, product_workspace_bytes, whole_granules};

use super::{ModelDimensions, TargetModule};

/// Every part of a card's memory starts at a multiple of so many bytes.
pub const GRANULE: u64 = 256;
/// Ranks of B, and of the embedding's A, are padded to this, so that rows start at multiples of 16 bytes.
pub const RANK_PADDING: u64 = 8;
/// Boundary on which each factor starts in an adapter's blob.
pub const FACTOR_ALIGNMENT: u64 = 16;
/// Bytes of one site in an adapter's rows of the table: two addresses, a rank, a scale.
pub const TABLE_ENTRY: u64 = 24;
/// Numbers on a card take two bytes (bf16, f16); norms, biases and sums four.
const HALF: u64 = 2;
const SINGLE: u64 = 4;

/// Bytes that a part takes: whole granules, at least one.
pub const fn granules(bytes: u64) -> u64 {
    if bytes == 0 { GRANULE } else { bytes.div_ceil(GRANULE).saturating_mul(GRANULE) }
}

/// Places of a model that adapters can touch: embedding, head and final norm, and nine for each layer.
pub const fn sites(layers: u64) -> u64 {
    3 + 9 * layers
}

/// Bytes of the factors of one adapted linear map: A `[rank][input]`, B `[output][rank padded to 8]`.
pub const fn factor_bytes(rank: u64, input: u64, output: u64) -> u64 {
    (rank * input * HALF).next_multiple_of(FACTOR_ALIGNMENT)
        + (output * rank.next_multiple_of(RANK_PADDING) * HALF).next_multiple_of(FACTOR_ALIGNMENT)
}

/// As [`factor_bytes`] of the embedding, whose A `[vocabulary][rank padded to 8]` is gathered.
pub const fn embedding_factor_bytes(rank: u64, vocabulary: u64, output: u64) -> u64 {
    (vocabulary + output) * rank.next_multiple_of(RANK_PADDING) * HALF
}

/// Bytes of an adapter with these factors in a model of so many layers: its rows of the table come first.
pub const fn adapter_bytes(layers: u64, factors: u64) -> u64 {
    granules((sites(layers) * TABLE_ENTRY).next_multiple_of(FACTOR_ALIGNMENT) + factors)
}

impl ModelDimensions {
    /// Bytes of all weights on a card. q, k and v lie one behind the other, and so do gate and up.
    pub fn card_weight_bytes(&self) -> u64 {
        let elements = |modules: &[TargetModule]| {
            let sizes = modules.iter().map(|&module| self.shape(module)).map(|(input, output)| input * output);
            granules(HALF * sizes.sum::<u64>())
        };
        let [q, k, v, o, gate, up, down] = TargetModule::ALL;
        let vector = |width: u64| granules(SINGLE * width);
        let vectors: u64 = self.layer_vectors().map(vector).sum();
        let layer = elements(&[q, k, v]) + elements(&[o]) + elements(&[gate, up]) + elements(&[down]);
        let ends = if self.tied { 1 } else { 2 };
        self.layers * (layer + vectors) + vector(self.hidden) + ends * granules(HALF * self.vocabulary * self.hidden)
    }

    /// Bytes on a card of an adapter of one rank on `modules` of every layer.
    pub fn card_adapter_bytes(&self, rank: u64, modules: &[TargetModule]) -> u64 {
        let shapes = modules.iter().map(|&module| self.shape(module));
        let layer: u64 = shapes.map(|(input, output)| factor_bytes(rank, input, output)).sum();
        adapter_bytes(self.layers, self.layers * layer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formulas_by_hand() {
        assert_eq!([0, 1, 256, 257].map(granules), [256, 256, 256, 512]);
        // Rank 5: A [5][16] of two bytes, B [10][8].
        assert_eq!(factor_bytes(5, 16, 10), 160 + 160);
        assert_eq!(embedding_factor_bytes(5, 100, 16), 116 * 8 * 2);
        // 21 sites of 24 bytes, padded to 512 already; and 320 bytes of factors.
        assert_eq!(adapter_bytes(2, 320), 1024);
        let dimensions = ModelDimensions {
            layers: 2,
            hidden: 64,
            intermediate: 128,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            vocabulary: 100,
            tied: true,
            attention_bias: true,
            output_bias: false,
            mlp_bias: false,
            head_norm: true,
        };
        // q, k, v of 64 + 32 + 32 rows, o, gate and up, down; five vectors and two norms of heads, a granule each.
        let layer = 2 * (128 * 64 + 64 * 64 + 256 * 64 + 64 * 128) + 7 * 256;
        assert_eq!(dimensions.card_weight_bytes(), 2 * layer + 256 + 100 * 64 * 2);
    }
}
