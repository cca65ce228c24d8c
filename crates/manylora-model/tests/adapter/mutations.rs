//! Random damage: whatever happens to a valid adapter, it never panics and is never applied in part.

use std::fs;
use std::sync::OnceLock;

use manylora_model::adapter::{AdapterPolicy, PreparedAdapter};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::fixtures::{HandMade, load_path, policy};

fn shared_policy() -> &'static AdapterPolicy {
    static POLICY: OnceLock<AdapterPolicy> = OnceLock::new();
    POLICY.get_or_init(|| policy("llama"))
}

/// Every tensor of an accepted adapter is applied or accounted for, and every site is whole.
fn assert_whole(adapter: &PreparedAdapter, tensors: usize) {
    let report = &adapter.report;
    assert_eq!(report.matched.len() + report.ignored.len(), tensors);
    assert_eq!(report.matched.len(), 2 * adapter.sites.len());
    assert!(report.refused.is_empty());
    let (mut a, mut b) = (Vec::new(), Vec::new());
    for (index, shape) in adapter.sites.iter().enumerate() {
        adapter.fill(index, &mut a, &mut b).unwrap();
        assert_eq!(a.len(), (shape.rank * shape.input) as usize);
        assert_eq!(b.len(), (shape.rank * shape.output) as usize);
        assert!(a.iter().chain(&b).all(|value| value.is_finite()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_tensor_files(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
        tail in prop::collection::vec(any::<u8>(), 0..4),
        in_header in any::<bool>(),
    ) {
        let adapter = HandMade::on_llama(2);
        let original = adapter.load(shared_policy()).unwrap();
        let mut file = adapter.file();
        let header = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        for (place, byte) in changes {
            let range = if in_header { header } else { file.len() };
            file[place.index(range)] = byte;
        }
        if let Some(cut) = cut {
            file.truncate(cut.index(file.len()));
        }
        file.extend(tail);
        let folder = tempfile::tempdir().unwrap();
        adapter.write(folder.path());
        fs::write(folder.path().join("adapter_model.safetensors"), &file).unwrap();
        if let Ok(damaged) = load_path(folder.path(), shared_policy()) {
            let tensors = safetensors::SafeTensors::deserialize(&file).unwrap().len();
            assert_whole(&damaged, tensors);
            // The same digest means the same values.
            let (mut a, mut b, mut x, mut y) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
            let mut same = damaged.sites == original.sites;
            for index in 0..damaged.sites.len().min(original.sites.len()) {
                damaged.fill(index, &mut a, &mut b).unwrap();
                original.fill(index, &mut x, &mut y).unwrap();
                let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                same &= bits(&a) == bits(&x) && bits(&b) == bits(&y);
            }
            prop_assert_eq!(damaged.digest == original.digest, same);
        }
    }

    #[test]
    fn damaged_configurations(
        key in prop::sample::select(vec![
            "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "bias", "target_modules", "peft_type",
            "base_model_name_or_path", "init_lora_weights", "layer_replication", "ensure_weight_tying", "anything",
        ]),
        value in json_value(),
    ) {
        let adapter = HandMade::on_llama(2).with(key, value);
        match adapter.load(shared_policy()) {
            Ok(loaded) => assert_whole(&loaded, 8),
            Err(refusal) => prop_assert!(!refusal.keys.is_empty(), "{}", refusal),
        }
    }

    #[test]
    fn renamed_and_missing_tensors(
        segment in prop::sample::select(vec!["base_model", "model", "layers", "0", "self_attn", "q_proj", "lora_A", "weight"]),
        replacement in "[a-z_0-9.]{0,12}",
        dropped in prop::option::of(0_usize..8),
    ) {
        let mut adapter = HandMade::on_llama(2).renamed(|key| {
            key.split('.').map(|part| if part == segment { replacement.as_str() } else { part }).collect::<Vec<_>>().join(".")
        });
        if let Some(key) = dropped.and_then(|dropped| adapter.tensors.keys().nth(dropped).cloned()) {
            adapter.tensors.remove(&key);
        }
        if let Ok(loaded) = adapter.load(shared_policy()) {
            assert_whole(&loaded, adapter.tensors.len());
        }
    }

    #[test]
    fn arbitrary_bytes(config in prop::collection::vec(any::<u8>(), 0..64), file in prop::collection::vec(any::<u8>(), 0..64)) {
        let folder = tempfile::tempdir().unwrap();
        HandMade::on_llama(2).write(folder.path());
        fs::write(folder.path().join("adapter_model.safetensors"), &file).unwrap();
        prop_assert!(load_path(folder.path(), shared_policy()).is_err());
        fs::write(folder.path().join("adapter_config.json"), &config).unwrap();
        prop_assert!(load_path(folder.path(), shared_policy()).is_err());
    }
}

fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(|number| json!(number)),
        "[a-zA-Z_*.()\\[\\\\]{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec(("[a-z_.(]{0,8}", inner), 0..4).prop_map(|entries| entries.into_iter().collect()),
        ]
    })
}
