//! Bases, policies and hand-made adapters.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use manylora_kernels::StorageType;
use manylora_model::AdapterRefusal;
use manylora_model::adapter::{AdapterPolicy, MemoryTensor, PreparedAdapter, inspect};
use manylora_model::checkpoint::Checkpoint;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

/// Folder of the oracle's fixtures.
pub(crate) fn oracle() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/oracle")
}

/// JSON of a file.
pub(crate) fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// A policy for one of the oracle's bases: float32, rank 64.
pub(crate) fn policy(base: &str) -> AdapterPolicy {
    let checkpoint = Checkpoint::open(&oracle().join(base).join("base")).unwrap();
    let manifest = read_json(&oracle().join(base).join("manifest.json"));
    AdapterPolicy {
        max_rank: 64,
        dtype: StorageType::F32,
        base_names: vec![format!("oracle/{base}")],
        tokenizer_size: manifest["tokenizer_vocab"].as_u64().unwrap() as usize,
        ..AdapterPolicy::new(checkpoint.spec.clone(), Arc::new(checkpoint))
    }
}

/// Loads one of the oracle's adapters completely.
pub(crate) fn load(base: &str, adapter: &str) -> Result<PreparedAdapter, AdapterRefusal> {
    load_path(&oracle().join(base).join("adapters").join(adapter), &policy(base))
}

/// Loads a folder completely, under its own name.
pub(crate) fn load_path(path: &Path, policy: &AdapterPolicy) -> Result<PreparedAdapter, AdapterRefusal> {
    inspect(&path.file_name().unwrap().to_string_lossy(), path, policy)?.read()
}

/// A hand-made adapter: a configuration and tensors that can be changed at will.
#[derive(Clone)]
pub(crate) struct HandMade {
    pub(crate) config: Value,
    pub(crate) tensors: BTreeMap<String, MemoryTensor>,
}

/// Values that differ from element to element and from tensor to tensor.
pub(crate) fn values(key: &str, count: usize) -> Vec<f32> {
    let seed: u32 = key.bytes().fold(17, |seed, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
    (0..count as u32).map(|i| f32::from(((seed ^ i.wrapping_mul(2_654_435_761)) >> 20) as u16) / 4096.0 - 0.5).collect()
}

/// An f32 tensor.
pub(crate) fn tensor(shape: &[usize], values: &[f32]) -> MemoryTensor {
    MemoryTensor {
        shape: shape.to_vec(),
        dtype: Dtype::F32,
        bytes: values.iter().flat_map(|value| value.to_le_bytes()).collect(),
    }
}

impl HandMade {
    /// An adapter of `rank` and alpha 8 with no tensors yet.
    pub(crate) fn new(rank: usize) -> Self {
        let config = json!({
            "peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"],
            "base_model_name_or_path": "oracle/llama", "bias": "none", "task_type": "CAUSAL_LM",
        });
        Self { config, tensors: BTreeMap::new() }
    }

    /// Adapts q and v of both layers of the `llama` base.
    pub(crate) fn on_llama(rank: usize) -> Self {
        let mut adapter = Self::new(rank);
        for layer in 0..2 {
            adapter.add(&format!("model.layers.{layer}.self_attn.q_proj"), rank, 32, 32);
            adapter.add(&format!("model.layers.{layer}.self_attn.v_proj"), rank, 32, 16);
        }
        adapter
    }

    /// Adds the factors of a module.
    pub(crate) fn add(&mut self, module: &str, rank: usize, input: usize, output: usize) {
        for (part, shape) in [("lora_A", [rank, input]), ("lora_B", [output, rank])] {
            self.put(&format!("base_model.model.{module}.{part}.weight"), &shape);
        }
    }

    /// Adds a tensor.
    pub(crate) fn put(&mut self, key: &str, shape: &[usize]) {
        self.tensors.insert(key.to_owned(), tensor(shape, &values(key, shape.iter().product())));
    }

    /// Sets a configuration key.
    pub(crate) fn with(mut self, key: &str, value: Value) -> Self {
        self.config[key] = value;
        self
    }

    /// Renames every key.
    pub(crate) fn renamed(mut self, rename: impl Fn(&str) -> String) -> Self {
        self.tensors = self.tensors.into_iter().map(|(key, tensor)| (rename(&key), tensor)).collect();
        self
    }

    /// Writes it as a folder.
    pub(crate) fn write(&self, folder: &Path) {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join("adapter_config.json"), self.config.to_string()).unwrap();
        fs::write(folder.join("adapter_model.safetensors"), self.file()).unwrap();
    }

    /// The safetensors file.
    pub(crate) fn file(&self) -> Vec<u8> {
        let views = self
            .tensors
            .iter()
            .map(|(key, tensor)| (key, TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes).unwrap()));
        safetensors::serialize(views, None).unwrap()
    }

    /// Loads it from memory.
    pub(crate) fn load(&self, policy: &AdapterPolicy) -> Result<PreparedAdapter, AdapterRefusal> {
        PreparedAdapter::from_tensors("hand-made", &self.config, &self.tensors, policy)
    }

    /// Loads it from a folder.
    pub(crate) fn load_from_disk(&self, policy: &AdapterPolicy) -> Result<PreparedAdapter, AdapterRefusal> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hand-made");
        self.write(&path);
        load_path(&path, policy)
    }

    /// The refusal; fails when it loads.
    pub(crate) fn refusal(&self, policy: &AdapterPolicy) -> AdapterRefusal {
        match self.load(policy) {
            Ok(adapter) => panic!("it was accepted: {:#?}", adapter.report),
            Err(refusal) => refusal,
        }
    }
}
