//! The cases: against what PEFT computed in float32, and slots that many adapters pass through.
//!
//! The bound on an error in bf16 is twice that of PEFT itself in bf16, as it is for the CPU. The oracle has that error
//! for each base and for its adapter `alpha`. For every other adapter it is taken from the CPU backend in bf16, whose own
//! bound is held elsewhere: it rounds weights, adapters and the cache as the card does, and nothing else. The card rounds in
//! addition what linear maps read: four activations in a layer, each with an error like that of the weights they meet
//! (2^-9 of a value), and independent of it.

use std::sync::Arc;

use manylora_kernels::cuda::{AlgorithmChoice, CudaBackend, CudaOptions, ProductChoice};
use manylora_kernels::{Backend, StorageType};
use manylora_model::Runner;
use manylora_model::adapter::{AdapterHeader, AdapterPolicy, PreparedAdapter, inspect};
use manylora_model::checkpoint::Checkpoint;

use crate::harness::{self, Model, Oracle, compare, compare_prompt, levels};
use crate::stand_in::on_card;

/// A base on the emulated device.
pub(crate) struct Loaded {
    pub(crate) oracle: Oracle,
    pub(crate) policy: AdapterPolicy,
    pub(crate) backend: Arc<CudaBackend>,
    pub(crate) model: Model<CudaBackend>,
}

/// Products by cuBLASLt, which a machine with a card may lack.
pub(crate) fn library() -> ProductChoice {
    if on_card() { ProductChoice::Auto } else { ProductChoice::Library }
}

fn options(checkpoint: &Checkpoint, dtype: StorageType, graphs: bool, products: ProductChoice) -> CudaOptions {
    let spec = &checkpoint.spec;
    CudaOptions {
        ordinal: 0,
        dtype,
        layers: spec.layers,
        heads: spec.heads,
        kv_heads: spec.kv_heads,
        head_dim: spec.head_dim,
        memory_bytes: 160 << 20,
        shared_bytes: 64 << 20,
        products,
        algorithms: AlgorithmChoice::OnePerWeight { rows: harness::CONTEXT },
        workspace_bytes: Some(1 << 20),
        library_folders: Vec::new(),
        graphs,
    }
}

impl Loaded {
    pub(crate) fn open(base: &str, dtype: StorageType, graphs: bool, products: ProductChoice) -> Self {
        let oracle = Oracle::open(base);
        let checkpoint = Checkpoint::open(&oracle.base_folder()).unwrap();
        let backend = Arc::new(CudaBackend::open(options(&checkpoint, dtype, graphs, products)).unwrap());
        let model = Model::on(Arc::clone(&backend), &checkpoint, dtype);
        let mut policy = AdapterPolicy::new(checkpoint.spec.clone(), Arc::new(checkpoint));
        policy.max_rank = 512;
        policy.dtype = dtype;
        Self { oracle, policy, backend, model }
    }

    pub(crate) fn prepare(&self, name: &str) -> Result<PreparedAdapter, String> {
        let path = self.oracle.folder.join("adapters").join(name);
        inspect(name, &path, &self.policy).and_then(AdapterHeader::read).map_err(|refusal| refusal.to_string())
    }

    /// The base on the CPU, in the same format.
    fn reference(&self) -> Model {
        Model::load(&self.oracle.base_folder(), StorageType::Bf16, levels().pop().unwrap())
    }
}

pub(crate) fn install<B: Backend>(model: &mut Model<B>, slot: u32, adapter: &PreparedAdapter) {
    let packer = model.decoder.packer();
    let handle = packer.pack(adapter).unwrap();
    assert_eq!(handle.bytes, packer.bytes(&adapter.sites), "announced and packed bytes differ");
    model.decoder.install(slot, handle);
}

/// A base whose rows are no multiples of 16 bytes is refused when it is loaded.
pub(crate) fn refused(base: &str) {
    let checkpoint = Checkpoint::open(&Oracle::open(base).base_folder()).unwrap();
    let spec = &checkpoint.spec;
    assert!(!spec.hidden_size.is_multiple_of(8) && !spec.head_dim.is_multiple_of(8), "{base} has become regular");
    let error = CudaBackend::open(options(&checkpoint, StorageType::Bf16, true, library())).unwrap_err().to_string();
    assert!(error.contains(&format!("`{}` wide", spec.head_dim)) && error.contains("device \"cpu\""), "{error}");
    // The other way to find out: heads that fit, on rows that do not.
    let heads = CudaOptions { head_dim: 16, ..options(&checkpoint, StorageType::Bf16, true, library()) };
    let backend = Arc::new(CudaBackend::open(heads).unwrap());
    let loaded = manylora_model::decoder::Decoder::load(backend, &checkpoint, StorageType::Bf16, &mut |_| {});
    let Err(error) = loaded else { panic!("{base} was loaded") };
    assert!(error.to_string().contains(&format!("`{}` columns", spec.hidden_size)), "{error}");
}

/// A base and its adapter `alpha` against PEFT's own error.
pub(crate) fn base_and_alpha(base: &str, products: ProductChoice) {
    let mut loaded = Loaded::open(base, StorageType::Bf16, true, products);
    let error = loaded.oracle.half_precision_error("base");
    let most = compare(&loaded.oracle, &mut loaded.model, base, None, &[], 2.0 * error, 4.0 * f64::from(error));
    println!("{base}: {most:e}; PEFT {error:e}");
    let alpha = loaded.prepare("alpha").unwrap();
    install(&mut loaded.model, 3, &alpha);
    let Loaded { oracle, model, backend, .. } = &mut loaded;
    let error = oracle.half_precision_error("alpha");
    let label = format!("{base}/alpha");
    let most = compare(oracle, model, &label, Some("alpha"), &[(3, 1.0)], 2.0 * error, 4.0 * f64::from(error));
    println!("{label}: {most:e}; PEFT {error:e}; {} recorded steps", backend.recorded_steps());
    assert!(backend.recorded_steps() > 0);
}

/// Every adapter of a base that must load, one after the other in one slot.
pub(crate) fn every_adapter(base: &str) {
    let mut loaded = Loaded::open(base, StorageType::Bf16, true, library());
    let mut reference = loaded.reference();
    let (mut compared, mut refused) = (0, 0);
    for (name, expected) in loaded.oracle.adapters() {
        let expected = expected["expect"].as_str().unwrap();
        let adapter = match loaded.prepare(&name) {
            Ok(adapter) => adapter,
            Err(reason) => {
                assert_ne!(expected, "load", "{base}/{name} must load: {reason}");
                refused += 1;
                continue;
            }
        };
        assert_ne!(expected, "refuse", "{base}/{name} must be refused");
        install(&mut loaded.model, 3, &adapter);
        install(&mut reference, 3, &adapter);
        let Loaded { oracle, model, .. } = &mut loaded;
        let label = format!("{base}/{name}");
        let bound = bound(oracle, &mut reference, &label, &name);
        let most = compare(oracle, model, &label, Some(&name), &[(3, 1.0)], bound, 2.0 * f64::from(bound));
        println!("{label}: {most:e}; bound {bound:e}");
        compared += 1;
    }
    println!("{base}: {compared} compared, {refused} refused");
    assert!(compared >= 3, "{base}: only {compared} adapters were compared");
}

/// See the module: three times the CPU's error in bf16, and never more than twice PEFT's with `alpha`.
fn bound(oracle: &Oracle, reference: &mut Model, label: &str, adapter: &str) -> f32 {
    let label = format!("{label} on the CPU");
    // Only to see how far off it is.
    let any = f32::INFINITY;
    let error = compare(oracle, reference, &label, Some(adapter), &[(3, 1.0)], any, f64::INFINITY);
    (3.0 * error).min(2.0 * oracle.half_precision_error("alpha"))
}

/// Several adapters in one request, as sums of their deltas.
pub(crate) fn composition() {
    let mut loaded = Loaded::open("llama", StorageType::Bf16, true, library());
    let mixes = loaded.oracle.manifest["composition"]["mixes"].as_object().unwrap().clone();
    assert!(!mixes.is_empty());
    let bound = 2.0 * loaded.oracle.half_precision_error("alpha");
    for (mix, description) in &mixes {
        let mut entries = Vec::new();
        for (slot, part) in description["parts"].as_array().unwrap().iter().enumerate() {
            let adapter = loaded.prepare(part[0].as_str().unwrap()).unwrap();
            install(&mut loaded.model, slot as u32, &adapter);
            let scale = part[1].as_f64().unwrap() as f32;
            // Entries of scale 0 are dropped before a plan is made.
            if scale != 0.0 {
                entries.push((slot as u32, scale));
            }
        }
        let Loaded { oracle, model, .. } = &mut loaded;
        for (prompt, expectation) in description["expect_by_prompt"].as_object().unwrap() {
            let key = format!("mix:{mix}/{prompt}");
            let tokens = oracle.prompt(prompt);
            let near_tie = 2.0 * f64::from(bound);
            let most = compare_prompt(oracle, model, mix, &key, &tokens, expectation, &entries, bound, near_tie);
            println!("{mix} {prompt}: {most:e}");
        }
    }
}

/// a slot that held a larger adapter leaves nothing of it to the next one.
pub(crate) fn slots_keep_nothing() {
    let mut loaded = Loaded::open("llama", StorageType::Bf16, true, library());
    let tokens = loaded.oracle.prompt("mid");
    let all: Vec<usize> = (0..tokens.len()).collect();
    let adapters = ["gamma", "layers-0", "null"].map(|name| loaded.prepare(name).unwrap());
    let base = loaded.model.logits(&tokens, &all, &[], 13);
    // Each alone, in a slot that held nothing before.
    let fresh: Vec<_> = (0..3)
        .map(|index| {
            install(&mut loaded.model, 10 + index as u32, &adapters[index]);
            loaded.model.logits(&tokens, &all, &[(10 + index as u32, 1.0)], 13)
        })
        .collect();
    assert!(fresh[2] == base && fresh[0] != base && fresh[1] != base && fresh[0] != fresh[1]);
    for swap in 0..40 {
        let index = [0, 1, 2, 1, 0, 2][swap % 6];
        install(&mut loaded.model, 0, &adapters[index]);
        let got = loaded.model.logits(&tokens, &all, &[(0, 1.0)], 13);
        assert!(got == fresh[index], "swap {swap}");
    }
    loaded.model.decoder.remove(0);
    assert!(loaded.model.logits(&tokens, &all, &[(0, 1.0)], 13) == base);
}
