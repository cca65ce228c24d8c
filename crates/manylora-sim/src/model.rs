//! Models as the planner sees them: dimensions, context, and how their checkpoint is stored. Common ones are built in, as
//! data; any other is described by its `config.json`, which whoever asks has read.

use manylora_core::budget::ModelDimensions;
use manylora_core::budget::TargetModule;
use serde::{Deserialize, Serialize};

use crate::error::SimError;

/// A checkpoint whose weights are stored in fewer bits than they are computed in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quantized {
    /// As people name it: `AWQ 4-bit`.
    pub scheme: String,
    /// Bytes of the checkpoint's tensors as they are stored.
    pub packed_bytes: u64,
}

/// A model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelDescription {
    /// What to call it.
    pub name: String,
    /// Its dimensions.
    pub dimensions: ModelDimensions,
    /// Positions that it was made for.
    pub context: usize,
    /// Whether the checkpoint's numbers are float16, which cards keep and processors turn into bfloat16.
    pub float16: bool,
    /// How the checkpoint is stored, if not as plain numbers.
    pub quantized: Option<Quantized>,
}

/// Layers, hidden, intermediate, heads, kv heads, head width, vocabulary.
type Widths = [u64; 7];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Llama,
    /// As Llama, its checkpoint in float16.
    Llama2,
    /// Biases on q, k and v.
    Qwen2,
    /// Norms on the heads of q and k.
    Qwen3,
}

/// Name, kind, widths, whether embedding and head are one, context. From the models' `config.json`; a test holds their
/// numbers of parameters to the published ones.
type Row = (&'static str, Kind, Widths, bool, usize);

const MODELS: [Row; 33] = [
    ("qwen2.5-0.5b", Kind::Qwen2, [24, 896, 4864, 14, 2, 64, 151_936], true, 32_768),
    ("qwen2.5-1.5b", Kind::Qwen2, [28, 1536, 8960, 12, 2, 128, 151_936], true, 32_768),
    ("qwen2.5-3b", Kind::Qwen2, [36, 2048, 11_008, 16, 2, 128, 151_936], true, 32_768),
    ("qwen2.5-7b", Kind::Qwen2, [28, 3584, 18_944, 28, 4, 128, 152_064], false, 32_768),
    ("qwen2.5-14b", Kind::Qwen2, [48, 5120, 13_824, 40, 8, 128, 152_064], false, 32_768),
    ("qwen2.5-32b", Kind::Qwen2, [64, 5120, 27_648, 40, 8, 128, 152_064], false, 32_768),
    ("qwen2.5-72b", Kind::Qwen2, [80, 8192, 29_568, 64, 8, 128, 152_064], false, 32_768),
    ("qwen2.5-coder-7b", Kind::Qwen2, [28, 3584, 18_944, 28, 4, 128, 152_064], false, 32_768),
    ("qwen2.5-coder-32b", Kind::Qwen2, [64, 5120, 27_648, 40, 8, 128, 152_064], false, 32_768),
    ("llama-2-7b", Kind::Llama2, [32, 4096, 11_008, 32, 32, 128, 32_000], false, 4096),
    ("llama-2-13b", Kind::Llama2, [40, 5120, 13_824, 40, 40, 128, 32_000], false, 4096),
    ("llama-2-70b", Kind::Llama2, [80, 8192, 28_672, 64, 8, 128, 32_000], false, 4096),
    ("llama-3-8b", Kind::Llama, [32, 4096, 14_336, 32, 8, 128, 128_256], false, 8192),
    ("llama-3-70b", Kind::Llama, [80, 8192, 28_672, 64, 8, 128, 128_256], false, 8192),
    ("llama-3.1-8b", Kind::Llama, [32, 4096, 14_336, 32, 8, 128, 128_256], false, 131_072),
    ("llama-3.1-70b", Kind::Llama, [80, 8192, 28_672, 64, 8, 128, 128_256], false, 131_072),
    ("llama-3.1-405b", Kind::Llama, [126, 16_384, 53_248, 128, 8, 128, 128_256], false, 131_072),
    ("llama-3.2-1b", Kind::Llama, [16, 2048, 8192, 32, 8, 64, 128_256], true, 131_072),
    ("llama-3.2-3b", Kind::Llama, [28, 3072, 8192, 24, 8, 128, 128_256], true, 131_072),
    ("llama-3.3-70b", Kind::Llama, [80, 8192, 28_672, 64, 8, 128, 128_256], false, 131_072),
    ("mistral-7b-v0.1", Kind::Llama, [32, 4096, 14_336, 32, 8, 128, 32_000], false, 32_768),
    ("mistral-7b-v0.2", Kind::Llama, [32, 4096, 14_336, 32, 8, 128, 32_000], false, 32_768),
    ("mistral-7b-v0.3", Kind::Llama, [32, 4096, 14_336, 32, 8, 128, 32_768], false, 32_768),
    ("mistral-7b", Kind::Llama, [32, 4096, 14_336, 32, 8, 128, 32_768], false, 32_768),
    ("qwen3-0.6b", Kind::Qwen3, [28, 1024, 3072, 16, 8, 128, 151_936], true, 40_960),
    ("qwen3-1.7b", Kind::Qwen3, [28, 2048, 6144, 16, 8, 128, 151_936], true, 40_960),
    ("qwen3-4b", Kind::Qwen3, [36, 2560, 9728, 32, 8, 128, 151_936], true, 40_960),
    ("qwen3-8b", Kind::Qwen3, [36, 4096, 12_288, 32, 8, 128, 151_936], false, 40_960),
    ("qwen3-14b", Kind::Qwen3, [40, 5120, 17_408, 40, 8, 128, 151_936], false, 40_960),
    ("qwen3-32b", Kind::Qwen3, [64, 5120, 25_600, 64, 8, 128, 151_936], false, 40_960),
    ("smollm2-135m", Kind::Llama, [30, 576, 1536, 9, 3, 64, 49_152], true, 8192),
    ("smollm2-360m", Kind::Llama, [32, 960, 2560, 15, 5, 64, 49_152], true, 8192),
    ("smollm2-1.7b", Kind::Llama, [24, 2048, 8192, 32, 32, 64, 49_152], true, 8192),
];

/// Endings that say how a model was trained on, and nothing of its shape.
const ENDINGS: [&str; 5] = ["-instruct", "-chat", "-hf", "-base", "-it"];

/// Endings of quantized checkpoints' names: scheme, bits, weights that share a scale.
const QUANTIZED: [(&str, &str, u64, u64); 4] = [
    ("-awq", "AWQ 4-bit", 4, 128),
    ("-gptq-int4", "GPTQ 4-bit", 4, 128),
    ("-gptq-int8", "GPTQ 8-bit", 8, 128),
    ("-gptq", "GPTQ 4-bit", 4, 128),
];

impl ModelDescription {
    /// A model that is built in: `Qwen2.5-7B-Instruct`, `meta-llama/Llama-3.1-8B`, `Qwen2.5-7B-Instruct-AWQ`. Capitals, the
    /// owner, and endings like `-Instruct` make no difference to the shape.
    pub fn named(name: &str) -> Result<Self, SimError> {
        let lower = name.trim().to_lowercase();
        let mut wanted = lower.rsplit('/').next().unwrap_or_default();
        wanted = wanted.strip_prefix("meta-").unwrap_or(wanted);
        let quantized = QUANTIZED.iter().find(|(ending, ..)| wanted.ends_with(ending));
        wanted = quantized.map_or(wanted, |(ending, ..)| wanted.trim_end_matches(ending));
        while let Some(shorter) = ENDINGS.iter().find_map(|ending| wanted.strip_suffix(ending)) {
            wanted = shorter;
        }
        // `Mistral-7B-Instruct-v0.3` and `Qwen2.5-Coder-7B` have theirs in the middle.
        let plain = wanted.replace("-instruct", "");
        let Some((_, kind, widths, tied, context)) = MODELS.iter().find(|(known, ..)| *known == plain) else {
            let known = Self::names().collect::<Vec<_>>().join(", ");
            return Err(SimError::field(
                "model",
                name,
                format!(
                    "no such model is built in, and no such folder or file is there; give a config.json, or one of {known}"
                ),
            ));
        };
        let [layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary] = *widths;
        let dimensions = ModelDimensions {
            layers,
            hidden,
            intermediate,
            heads,
            kv_heads,
            head_dim,
            vocabulary,
            tied: *tied,
            attention_bias: *kind == Kind::Qwen2,
            output_bias: false,
            mlp_bias: false,
            head_norm: *kind == Kind::Qwen3,
        };
        let quantized = quantized.map(|(_, scheme, bits, group)| Quantized {
            scheme: (*scheme).to_owned(),
            packed_bytes: packed_bytes(&dimensions, *bits, Some(*group)),
        });
        Ok(Self {
            name: name.trim().to_owned(),
            dimensions,
            context: *context,
            float16: *kind == Kind::Llama2,
            quantized,
        })
    }

    /// The names of the models that are built in.
    pub fn names() -> impl Iterator<Item = &'static str> {
        MODELS.iter().map(|(name, ..)| *name)
    }
}

/// Bytes of a checkpoint whose linear maps have `bits` each weight, with a scale of two bytes and a zero point of `bits` for
/// every `group` weights of a row (None: for every row); embedding, head, norms and biases have two bytes a number.
pub fn packed_bytes(dimensions: &ModelDimensions, bits: u64, group: Option<u64>) -> u64 {
    let shapes = TargetModule::ALL.map(|module| dimensions.shape(module));
    let (mut elements, mut packed) = (0, 0);
    for (input, output) in shapes {
        let groups = output * group.map_or(1, |group| input.div_ceil(group));
        elements += input * output;
        packed += (bits * (input * output + groups)).div_ceil(8) + 2 * groups;
    }
    dimensions.layers * packed + 2 * (dimensions.parameters() - dimensions.layers * elements)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parameters as the models' pages give them.
    const PUBLISHED: [(&str, u64); 26] = [
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-1.5B", 1_543_714_304),
        ("Qwen2.5-3B-Instruct", 3_085_938_688),
        ("Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen2.5-14B", 14_770_033_664),
        ("Qwen2.5-32B-Instruct", 32_763_876_352),
        ("Qwen2.5-72B-Instruct", 72_706_203_648),
        ("meta-llama/Llama-2-7b-chat-hf", 6_738_415_616),
        ("meta-llama/Llama-2-13b-hf", 13_015_864_320),
        ("Llama-2-70b", 68_976_648_192),
        ("meta-llama/Meta-Llama-3-8B-Instruct", 8_030_261_248),
        ("meta-llama/Meta-Llama-3-70B", 70_553_706_496),
        ("Llama-3.1-8B", 8_030_261_248),
        ("Llama-3.2-1B-Instruct", 1_235_814_400),
        ("Llama-3.2-3B-Instruct", 3_212_749_824),
        ("mistralai/Mistral-7B-Instruct-v0.1", 7_241_732_096),
        ("Mistral-7B-v0.3", 7_248_023_552),
        ("Qwen3-0.6B", 596_049_920),
        ("Qwen3-1.7B", 1_720_574_976),
        ("Qwen3-4B", 4_022_468_096),
        ("Qwen3-8B", 8_190_735_360),
        ("Qwen3-14B", 14_768_307_200),
        ("Qwen3-32B", 32_762_123_264),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008),
        ("SmolLM2-360M", 361_821_120),
        ("SmolLM2-1.7B-Instruct", 1_711_376_384),
    ];

    #[test]
    fn built_in_models_have_the_published_parameters() {
        for (name, parameters) in PUBLISHED {
            assert_eq!(ModelDescription::named(name).unwrap().dimensions.parameters(), parameters, "{name}");
        }
        for name in ModelDescription::names() {
            ModelDescription::named(name).unwrap();
        }
    }

    #[test]
    fn quantized_names_are_the_plain_model_stored_otherwise() {
        let plain = ModelDescription::named("Qwen2.5-7B-Instruct").unwrap();
        let packed = ModelDescription::named("Qwen/Qwen2.5-7B-Instruct-AWQ").unwrap();
        assert_eq!((plain.quantized, plain.dimensions), (None, packed.dimensions));
        let quantized = packed.quantized.unwrap();
        assert_eq!(quantized.scheme, "AWQ 4-bit");
        // 6.53 G weights of 4 bits with 20 more for every 128, and 1.09 G numbers of two bytes.
        assert!((5.5e9..5.7e9).contains(&(quantized.packed_bytes as f64)), "{quantized:?}");
    }

    #[test]
    fn unknown_models_name_the_field() {
        let error = ModelDescription::named("gpt-5").unwrap_err().to_string();
        assert!(error.starts_with("model `gpt-5`: no such model is built in"), "{error}");
        assert!(error.contains("qwen2.5-7b"));
    }
}
