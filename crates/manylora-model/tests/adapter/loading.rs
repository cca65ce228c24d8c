//! Loading in one pass: the same checks, digest and report as reading first, and the same factors reach the packer.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use manylora_kernels::cpu::{CpuBackend, CpuOptions};
use manylora_kernels::{FactorFeed, FactorType, SiteShape, StorageType};
use manylora_model::adapter::{LoadReport, LoadedContent, PreparedAdapter, inspect};
use manylora_model::decoder::BackendPacker;
use manylora_model::{AdapterPacker, ModelError, PackedHandle};
use serde_json::json;

use crate::fixtures::{HandMade, oracle, policy, read_json, tensor};

type Factor = (FactorType, Vec<u8>);

/// Packs as the engine does, and keeps a copy of the factors.
struct Recorder {
    packer: BackendPacker<CpuBackend>,
    factors: Mutex<BTreeMap<usize, (Factor, Factor)>>,
}

impl Recorder {
    fn new() -> Self {
        let backend = CpuBackend::new(CpuOptions { num_threads: Some(1), ..CpuOptions::default() }).unwrap();
        Self { packer: BackendPacker::new(Arc::new(backend), StorageType::F32, 64), factors: Mutex::default() }
    }
}

impl AdapterPacker for Recorder {
    fn bytes(&self, sites: &[SiteShape]) -> u64 {
        self.packer.bytes(sites)
    }

    fn pack_stored(&self, sites: &[SiteShape], feed: &mut FactorFeed<'_>) -> Result<PackedHandle, ModelError> {
        let mut factors = self.factors.lock().unwrap();
        self.packer.pack_stored(sites, &mut |sink| {
            feed(&mut |index, a, b| {
                factors.insert(index, ((a.dtype, a.bytes.to_vec()), (b.dtype, b.bytes.to_vec())));
                sink(index, a, b)
            })
        })
    }
}

fn refusal_of(error: ModelError) -> String {
    match error {
        ModelError::Adapter(refusal) => refusal.to_string(),
        other => panic!("not a refusal: {other}"),
    }
}

#[test]
fn one_pass_is_reading_and_packing() {
    let (mut loaded, mut refused) = (0, 0);
    for base in ["llama", "llama-tied", "qwen2"] {
        let policy = policy(base);
        let manifest = read_json(&oracle().join(base).join("manifest.json"));
        for name in manifest["adapters"].as_object().unwrap().keys() {
            let open = || inspect(name, &oracle().join(base).join("adapters").join(name), &policy);
            let (Ok(one), Ok(two)) = (open(), open()) else { continue };
            let (in_one, in_two) = (Recorder::new(), Recorder::new());
            match (one.load(&in_one), two.read()) {
                (Ok(content), Ok(prepared)) => {
                    let LoadedContent { digest, report, packed } = content;
                    assert_eq!((digest, report), (prepared.digest, prepared.report.clone()), "{base}/{name}");
                    assert_eq!(packed.bytes, in_two.pack(&prepared).unwrap().bytes);
                    assert_eq!(*in_one.factors.lock().unwrap(), *in_two.factors.lock().unwrap(), "{base}/{name}");
                    loaded += 1;
                }
                (Err(error), Err(refusal)) => {
                    assert_eq!(refusal_of(error), refusal.to_string());
                    refused += 1;
                }
                (one, two) => panic!("{base}/{name}: {one:?} and {two:?}"),
            }
        }
    }
    assert!(loaded > 40, "{loaded} loaded, {refused} refused");
}

/// Content that was loaded before is packed as it was, with the report that it had; other content is an error, whatever
/// its values are, and so is a report that names no version.
#[test]
fn what_was_loaded_before_must_be_the_same_again() {
    let policy = policy("llama");
    let folder = tempfile::tempdir().unwrap();
    let mut adapter = HandMade::on_llama(8);
    adapter.write(folder.path());
    let open = || inspect("again", folder.path(), &policy).unwrap();
    let (first, again) = (Recorder::new(), Recorder::new());
    let known = open().load(&first).unwrap();
    let content = open().load_again(&again, &known.report).unwrap();
    assert_eq!((content.digest, &content.report), (known.digest, &known.report));
    assert_eq!(*first.factors.lock().unwrap(), *again.factors.lock().unwrap());
    let unnamed = LoadReport { version: None, ..known.report.clone() };
    let refused = open().load_again(&Recorder::new(), &unnamed);
    assert!(matches!(refused, Err(ModelError::OtherContent { found }) if found == known.digest));

    let key = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight";
    for value in [0.25, f32::NAN] {
        adapter.tensors.insert(key.to_owned(), tensor(&[32, 8], &[value; 32 * 8]));
        adapter.write(folder.path());
        let changed = open().load_again(&Recorder::new(), &known.report);
        assert!(matches!(changed, Err(ModelError::OtherContent { found }) if found != known.digest), "{value}");
    }
}

#[test]
fn bad_values_are_refused_and_ranks_without_working_memory_too() {
    let policy = policy("llama");
    let folder = tempfile::tempdir().unwrap();
    let mut adapter = HandMade::on_llama(8);
    let key = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight";
    let mut bad = vec![0.5; 32 * 8];
    bad[77] = f32::NAN;
    adapter.tensors.insert(key.to_owned(), tensor(&[32, 8], &bad));
    adapter.write(folder.path());
    let open = || inspect("bad", folder.path(), &policy).unwrap();
    let refusal = refusal_of(open().load(&Recorder::new()).unwrap_err());
    assert_eq!(refusal, open().read().unwrap_err().to_string());
    assert!(refusal.contains(key) && refusal.contains("element 77"), "{refusal}");

    HandMade::on_llama(16).with("r", json!(16)).write(folder.path());
    let backend = CpuBackend::new(CpuOptions { num_threads: Some(1), ..CpuOptions::default() }).unwrap();
    let packer = BackendPacker::new(Arc::new(backend), StorageType::F32, 8);
    let error = inspect("wide", folder.path(), &policy).unwrap().load(&packer).unwrap_err();
    assert!(error.to_string().contains("rank `16`"), "{error}");
}

/// Effect of one module whose factors are `a` `[2, 32]` and `b` `[32, 2]`.
fn effect(a: impl Fn(usize, usize) -> f32, b: impl Fn(usize, usize) -> f32) -> (f64, PreparedAdapter) {
    let mut adapter = HandMade::new(2).with("lora_alpha", json!(2));
    let module = "base_model.model.model.layers.0.self_attn.q_proj";
    let wide: Vec<f32> = (0..64).map(|index| a(index / 32, index % 32)).collect();
    let tall: Vec<f32> = (0..64).map(|index| b(index / 2, index % 2)).collect();
    adapter.tensors.insert(format!("{module}.lora_A.weight"), tensor(&[2, 32], &wide));
    adapter.tensors.insert(format!("{module}.lora_B.weight"), tensor(&[32, 2], &tall));
    let loaded = adapter.load(&policy("llama")).unwrap();
    (loaded.report.modules["model.layers.0.self_attn.q_proj"].effect.unwrap(), loaded)
}

#[test]
fn effects_that_single_precision_cannot_tell_are_exact() {
    let warned = |adapter: &PreparedAdapter| adapter.report.warnings.iter().any(|text| text.contains("no effect"));
    // The second rank undoes the first, up to one part in 1024 of one row of B.
    let sign = |rank: usize| if rank == 0 { 1.0 } else { -1.0 };
    let wide = |_: usize, column: usize| column as f32 + 0.25;
    let (nothing, adapter) = effect(wide, |row, rank| sign(rank) * (row as f32 + 0.5));
    assert!(nothing == 0.0 && warned(&adapter), "{nothing}");
    let part = 2.0_f32.powi(-10);
    let (little, adapter) = effect(wide, |row, rank| if row == 3 && rank == 0 { 1.0 + part } else { sign(rank) });
    let norm_of_a = (0..32).map(|column| f64::from(wide(0, column)).powi(2)).sum::<f64>().sqrt();
    let wanted = norm_of_a * f64::from(part);
    assert!((little - wanted).abs() < 1e-5 * wanted && !warned(&adapter), "{little} is not {wanted}");
    // Squares that are below and above all f32.
    let (tiny, adapter) = effect(|_, _| 1e-30, |row, rank| if (row, rank) == (0, 0) { 1.0 } else { 0.0 });
    assert!((tiny - 32.0_f64.sqrt() * 1e-30).abs() < 1e-35 && !warned(&adapter), "{tiny}");
    let (huge, _) = effect(|_, _| 1e30, |row, rank| if (row, rank) == (0, 0) { 1.0 } else { 0.0 });
    assert!((huge - 32.0_f64.sqrt() * 1e30).abs() < 1e25, "{huge}");
}
