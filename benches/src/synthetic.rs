//! Models and adapters of real shapes with random weights, written as the files that the loaders read.

use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use manylora_core::budget::ModelDimensions;

/// Shape of a Qwen2-like decoder.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    /// Layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Vocabulary.
    pub vocab: usize,
    /// Whether the embedding is the head.
    pub tied: bool,
    /// Positions that a sequence can have.
    pub positions: usize,
}

impl Shape {
    /// Qwen2.5-0.5B.
    pub const HALF_BILLION: Self = Self {
        hidden: 896,
        intermediate: 4864,
        layers: 24,
        heads: 14,
        kv_heads: 2,
        head_dim: 64,
        vocab: 151_936,
        tied: true,
        positions: 32_768,
    };

    /// Qwen2.5-7B.
    pub const SEVEN_BILLION: Self = Self {
        hidden: 3584,
        intermediate: 18_944,
        layers: 28,
        heads: 28,
        kv_heads: 4,
        head_dim: 128,
        vocab: 152_064,
        tied: false,
        positions: 32_768,
    };

    /// One that an emulated device can take, with a vocabulary for the benches' prompts.
    pub const TINY: Self = Self {
        hidden: 64,
        intermediate: 96,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        vocab: 40_960,
        tied: false,
        positions: 4096,
    };

    /// What formulas of bytes take.
    pub const fn dimensions(&self) -> ModelDimensions {
        ModelDimensions {
            layers: self.layers as u64,
            hidden: self.hidden as u64,
            intermediate: self.intermediate as u64,
            heads: self.heads as u64,
            kv_heads: self.kv_heads as u64,
            head_dim: self.head_dim as u64,
            vocabulary: self.vocab as u64,
            tied: self.tied,
            attention_bias: true,
            output_bias: false,
            mlp_bias: false,
            head_norm: false,
        }
    }

    /// The linear maps of a layer: name, outputs, inputs.
    pub fn linears(&self) -> [(&'static str, usize, usize); 7] {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        [
            ("self_attn.q_proj", q, self.hidden),
            ("self_attn.k_proj", kv, self.hidden),
            ("self_attn.v_proj", kv, self.hidden),
            ("self_attn.o_proj", self.hidden, q),
            ("mlp.gate_proj", self.intermediate, self.hidden),
            ("mlp.up_proj", self.intermediate, self.hidden),
            ("mlp.down_proj", self.hidden, self.intermediate),
        ]
    }

    /// Weights that every decode step reads.
    pub fn parameters(&self) -> usize {
        let layer: usize = self.linears().iter().map(|(_, outputs, inputs)| outputs * inputs).sum();
        self.layers * layer + self.head_parameters()
    }

    /// Weights of the head.
    pub fn head_parameters(&self) -> usize {
        self.vocab * self.hidden
    }

    /// Weights of an adapter on all linear maps of the layers.
    pub fn adapter_parameters(&self, rank: usize) -> usize {
        let layer: usize = self.linears().iter().map(|(_, outputs, inputs)| (outputs + inputs) * rank).sum();
        self.layers * layer
    }
}

/// Small random numbers as bf16, the same on every run.
struct Random(u64);

impl Random {
    fn bf16(&mut self, scale: f32) -> [u8; 2] {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let value = ((self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale;
        ((value.to_bits() >> 16) as u16).to_le_bytes()
    }
}

struct Tensor {
    name: String,
    shape: Vec<usize>,
    scale: f32,
    /// Added to every value: norms are around 1.
    constant: Option<f32>,
}

impl Tensor {
    fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    fn bytes(&self) -> usize {
        2 * self.elements()
    }
}

/// An error that says of which file: a full disk is one among several.
fn of(path: &Path) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Writes a configuration, which says by being there that its folder is whole: at once, or not at all.
fn write_last(path: &Path, config: &serde_json::Value) -> io::Result<()> {
    let part = path.with_extension("part");
    fs::write(&part, serde_json::to_vec_pretty(config)?).map_err(of(&part))?;
    fs::rename(&part, path).map_err(of(path))
}

fn write(path: &Path, tensors: &[Tensor], seed: u64) -> io::Result<()> {
    write_tensors(path, tensors, seed).map_err(of(path))
}

fn write_tensors(path: &Path, tensors: &[Tensor], seed: u64) -> io::Result<()> {
    let mut header = serde_json::Map::new();
    let mut offset = 0;
    for tensor in tensors {
        let end = offset + tensor.bytes();
        let entry = serde_json::json!({ "dtype": "BF16", "shape": tensor.shape, "data_offsets": [offset, end] });
        header.insert(tensor.name.clone(), entry);
        offset = end;
    }
    let header = serde_json::to_vec(&header)?;
    let mut file = BufWriter::with_capacity(1 << 20, fs::File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    let mut random = Random(seed);
    for tensor in tensors {
        for _ in 0..tensor.elements() {
            match tensor.constant {
                Some(value) => file.write_all(&((value.to_bits() >> 16) as u16).to_le_bytes())?,
                None => file.write_all(&random.bf16(tensor.scale))?,
            }
        }
    }
    file.flush()
}

fn tensor(name: String, shape: &[usize], scale: f32) -> Tensor {
    Tensor { name, shape: shape.to_vec(), scale, constant: None }
}

fn constant(name: String, length: usize, value: f32) -> Tensor {
    Tensor { name, shape: vec![length], scale: 0.0, constant: Some(value) }
}

fn model_tensors(shape: &Shape) -> Vec<Tensor> {
    let mut tensors = vec![tensor("model.embed_tokens.weight".to_owned(), &[shape.vocab, shape.hidden], 0.05)];
    for layer in 0..shape.layers {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        for norm in ["input_layernorm.weight", "post_attention_layernorm.weight"] {
            tensors.push(constant(name(norm), shape.hidden, 1.0));
        }
        for (linear, outputs, inputs) in shape.linears() {
            let scale = 1.7 / (inputs as f32).sqrt();
            tensors.push(tensor(name(&format!("{linear}.weight")), &[outputs, inputs], scale));
        }
        for (linear, outputs, _) in &shape.linears()[..3] {
            tensors.push(constant(name(&format!("{linear}.bias")), *outputs, 0.0));
        }
    }
    tensors.push(constant("model.norm.weight".to_owned(), shape.hidden, 1.0));
    if !shape.tied {
        tensors.push(tensor("lm_head.weight".to_owned(), &[shape.vocab, shape.hidden], 0.05));
    }
    tensors
}

/// Writes a model folder, unless it is there already.
pub fn model(folder: &Path, shape: &Shape) -> io::Result<()> {
    model_in_files(folder, shape, 1)
}

/// As [`model`], its weights in `files` files of about the same size with an index.
pub fn model_in_files(folder: &Path, shape: &Shape, files: usize) -> io::Result<()> {
    let config = serde_json::json!({
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": shape.vocab,
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "hidden_act": "silu", "max_position_embeddings": shape.positions, "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0, "tie_word_embeddings": shape.tied, "torch_dtype": "bfloat16", "eos_token_id": 0,
    });
    let path = folder.join("config.json");
    // One of another shape under this name is written over.
    let there = fs::read(&path).ok().and_then(|text| serde_json::from_slice::<serde_json::Value>(&text).ok());
    if there.as_ref() == Some(&config) {
        return Ok(());
    }
    fs::create_dir_all(folder).map_err(of(folder))?;
    // Until it is whole it has none.
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(of(&path)(error)),
        _ => {}
    }
    write_weights(folder, model_tensors(shape), files)?;
    write_last(&path, &config)
}

fn write_weights(folder: &Path, mut tensors: Vec<Tensor>, files: usize) -> io::Result<()> {
    const SEED: u64 = 0x9E37_79B9_7F4A_7C15;
    if files == 1 {
        return write(&folder.join("model.safetensors"), &tensors, SEED);
    }
    let share = tensors.iter().map(Tensor::bytes).sum::<usize>().div_ceil(files);
    let mut places = serde_json::Map::new();
    for file in 1..=files {
        let name = format!("model-{file:05}-of-{files:05}.safetensors");
        let mut bytes = 0;
        let full = |tensor: &Tensor| {
            let full = bytes >= share;
            bytes += tensor.bytes();
            full
        };
        let rest = tensors.split_off(tensors.iter().position(full).unwrap_or(tensors.len()));
        places.extend(tensors.iter().map(|tensor| (tensor.name.clone(), name.clone().into())));
        write(&folder.join(&name), &tensors, SEED.wrapping_mul(file as u64))?;
        tensors = rest;
    }
    let path = folder.join("model.safetensors.index.json");
    fs::write(&path, serde_json::to_vec_pretty(&serde_json::json!({ "weight_map": places }))?).map_err(of(&path))
}

/// Writes a PEFT folder with factors on all linear maps, unless it is there already.
pub fn adapter(folder: &Path, shape: &Shape, rank: usize, seed: u64) -> io::Result<()> {
    let all = shape.linears().map(|(name, ..)| short(name));
    adapter_on(folder, shape, rank, seed, &all)
}

/// Writes a PEFT folder with factors on the linear maps of these names (`q_proj`), unless it is there already.
pub fn adapter_on(folder: &Path, shape: &Shape, rank: usize, seed: u64, maps: &[&str]) -> io::Result<()> {
    if folder.join("adapter_config.json").exists() {
        return Ok(());
    }
    fs::create_dir_all(folder).map_err(of(folder))?;
    let mut tensors = Vec::new();
    for layer in 0..shape.layers {
        for (linear, outputs, inputs) in shape.linears().into_iter().filter(|(name, ..)| maps.contains(&short(name))) {
            let name = format!("base_model.model.model.layers.{layer}.{linear}");
            tensors.push(tensor(format!("{name}.lora_A.weight"), &[rank, inputs], 1.0 / (inputs as f32).sqrt()));
            tensors.push(tensor(format!("{name}.lora_B.weight"), &[outputs, rank], 0.05));
        }
    }
    write(&folder.join("adapter_model.safetensors"), &tensors, seed.wrapping_mul(0x2545_F491_4F6C_DD1D) | 1)?;
    let config = serde_json::json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": null, "r": rank,
        "lora_alpha": 2 * rank, "lora_dropout": 0.0, "bias": "none", "target_modules": maps,
    });
    write_last(&folder.join("adapter_config.json"), &config)
}

/// `q_proj` of `self_attn.q_proj`.
fn short(linear: &str) -> &str {
    linear.rsplit('.').next().unwrap_or(linear)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of its configuration and its weights' index: 7,615,616,512 parameters in two bytes each.
    #[test]
    fn seven_billion_has_the_bytes_of_qwen_2_5() {
        let bytes = |shape: &Shape| -> usize { model_tensors(shape).iter().map(Tensor::bytes).sum() };
        assert_eq!(bytes(&Shape::SEVEN_BILLION), 15_231_233_024);
        // The smaller one, whose embedding is the head, has 494,032,768.
        assert_eq!(bytes(&Shape::HALF_BILLION), 2 * 494_032_768);
        // A card keeps norms and biases in four bytes, in whole granules.
        let held = Shape::SEVEN_BILLION.dimensions().card_weight_bytes();
        assert!((15_231_233_024..15_233_000_000).contains(&held), "{held}");
    }

    #[test]
    fn a_model_of_another_shape_is_written_over() {
        let folder = std::env::temp_dir().join(format!("manylora-synthetic-model-{}", std::process::id()));
        let (small, file) = (Shape { vocab: 64, ..Shape::TINY }, folder.join("model.safetensors"));
        model(&folder, &small).unwrap();
        let untied = fs::read(&file).unwrap();
        model(&folder, &Shape { tied: true, ..small }).unwrap();
        assert!(fs::read(&file).unwrap().len() + 2 * 64 * 64 < untied.len());
        model(&folder, &small).unwrap();
        assert!(fs::read(&file).unwrap() == untied);
        fs::write(&file, b"other").unwrap();
        model(&folder, &small).unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"other");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn what_was_not_finished_is_written_anew() {
        let folder = std::env::temp_dir().join(format!("manylora-synthetic-{}", std::process::id()));
        adapter(&folder, &Shape::TINY, 2, 1).unwrap();
        let file = folder.join("adapter_model.safetensors");
        let whole = fs::read(&file).unwrap();
        // As it is when the disk was full: the configuration did not come to its name.
        fs::rename(folder.join("adapter_config.json"), folder.join("adapter_config.part")).unwrap();
        fs::write(&file, &whole[..100]).unwrap();
        adapter(&folder, &Shape::TINY, 2, 1).unwrap();
        assert!(fs::read(&file).unwrap() == whole && folder.join("adapter_config.json").is_file());
        // And what was finished is left alone.
        fs::write(&file, b"other").unwrap();
        adapter(&folder, &Shape::TINY, 2, 1).unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"other");
        fs::remove_dir_all(&folder).unwrap();
        let error = model(Path::new("/dev/null/model"), &Shape::TINY).unwrap_err().to_string();
        assert!(error.contains("/dev/null/model"), "{error}");
    }
}
