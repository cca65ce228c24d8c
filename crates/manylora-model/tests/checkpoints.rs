//! Opening model folders: what is found, what is refused before any weight is read, and what a base is identified by.

#![allow(clippy::unwrap_used, reason = "a panic is a failed test")]

mod harness;

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use harness::{BASES, Model, Oracle, levels, oracle_root};
use manylora_kernels::StorageType;
use manylora_model::checkpoint::{Checkpoint, TokenizerSource, content_digest};
use manylora_model::decoder::{Decoder, DecoderLimits, LoadProgress, packed_bytes};
use manylora_model::{ModelError, Runner};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::{Value, json};
use tempfile::TempDir;

fn copy_of(base: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(oracle_root().join(base).join("base")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    folder
}

fn change_json(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut value);
    fs::write(path, serde_json::to_vec(&value).unwrap()).unwrap();
}

type Tensors = HashMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// Rewrites a safetensors file.
fn change_tensors(path: &Path, change: impl FnOnce(&mut Tensors)) {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Tensors = file
        .tensors()
        .into_iter()
        .map(|(name, view)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
        .collect();
    change(&mut tensors);
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, data))| (name.clone(), TensorView::new(*dtype, shape.clone(), data).unwrap()));
    serialize_to_file(views, None, path).unwrap();
}

fn error(folder: &TempDir) -> String {
    Checkpoint::open(folder.path()).expect_err("it must be refused").to_string()
}

#[test]
fn every_base_opens_and_says_what_it_is() {
    for base in BASES {
        let oracle = Oracle::open(base);
        let checkpoint = Checkpoint::open(&oracle.base_folder()).unwrap();
        assert_eq!(checkpoint.generation.eos, [2], "{base}");
        assert_eq!((checkpoint.generation.bos, checkpoint.generation.pad), (Some(0), Some(0)), "{base}");
        assert_eq!(checkpoint.spec.vocab_size as u64, oracle.manifest["model_vocab"].as_u64().unwrap(), "{base}");
        assert_eq!(checkpoint.names, ["base"], "{base}");
        assert!(checkpoint.quantization.is_none(), "{base}");
        assert!(matches!(&checkpoint.tokenizer, TokenizerSource::Directory(path) if *path == oracle.base_folder()));
        assert!(checkpoint.storage_bytes() > 10_000, "{base}");
        assert_eq!(checkpoint.spec.tied, base == "llama-tied" || base == "qwen2", "{base}");
        assert!(checkpoint.has("model.norm.weight") && !checkpoint.has("model.norm.bias"));
    }
}

#[test]
fn digests_tell_bases_apart_and_do_not_depend_on_the_path_or_the_sharding() {
    let mut seen = HashMap::new();
    for base in BASES {
        let original = Checkpoint::open(&oracle_root().join(base).join("base")).unwrap().digest();
        let copy = copy_of(base);
        assert_eq!(Checkpoint::open(copy.path()).unwrap().digest(), original, "{base}");
        assert_eq!(seen.insert(original, base), None, "{base}");
    }
    let changed = copy_of("llama");
    let before = Checkpoint::open(changed.path()).unwrap().digest();
    change_tensors(&changed.path().join("model.safetensors"), |tensors| {
        let (_, _, data) = tensors.get_mut("model.layers.1.mlp.down_proj.weight").unwrap();
        data[1] ^= 1;
    });
    assert_ne!(Checkpoint::open(changed.path()).unwrap().digest(), before, "one bit of one weight");

    let other = copy_of("llama");
    change_json(&other.path().join("config.json"), |config| config["rope_theta"] = json!(20000.0));
    assert_ne!(Checkpoint::open(other.path()).unwrap().digest(), before, "the configuration counts");

    let sharded = copy_of("llama-tied");
    let before = Checkpoint::open(sharded.path()).unwrap().digest();
    let mut all = Tensors::new();
    for shard in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
        change_tensors(&sharded.path().join(shard), |tensors| all.extend(tensors.clone()));
        fs::rename(sharded.path().join(shard), sharded.path().join("model.safetensors")).unwrap();
    }
    change_tensors(&sharded.path().join("model.safetensors"), |tensors| *tensors = all);
    fs::remove_file(sharded.path().join("model.safetensors.index.json")).unwrap();
    assert_eq!(Checkpoint::open(sharded.path()).unwrap().digest(), before, "shards are storage, not content");
}

/// What packing hashed as it read, in ranges of its own, is the digest of a base that nothing has read: stored in bf16, f16
/// and f32, packed as it is stored and converted, and with values checked.
#[test]
fn digests_do_not_depend_on_what_was_packed() {
    for stored in [Dtype::BF16, Dtype::F16, Dtype::F32] {
        let folder = copy_of("llama");
        change_tensors(&folder.path().join("model.safetensors"), |tensors| {
            for (dtype, _, data) in tensors.values_mut() {
                let values: Vec<f32> = match dtype {
                    Dtype::BF16 => {
                        data.chunks(2).map(|two| half::bf16::from_le_bytes([two[0], two[1]]).to_f32()).collect()
                    }
                    Dtype::F32 => data.chunks(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect(),
                    other => panic!("the oracle has {other:?}"),
                };
                *data = match stored {
                    Dtype::BF16 => values.iter().flat_map(|&value| half::bf16::from_f32(value).to_le_bytes()).collect(),
                    Dtype::F16 => values.iter().flat_map(|&value| half::f16::from_f32(value).to_le_bytes()).collect(),
                    _ => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
                };
                *dtype = stored;
            }
        });
        let untouched = Checkpoint::open(folder.path()).unwrap().digest();
        for packed in [StorageType::Bf16, StorageType::F32] {
            for checked in [false, true] {
                let checkpoint = Checkpoint::open(folder.path()).unwrap();
                let checkpoint = if checked { checkpoint.within_fp16_range() } else { checkpoint };
                Decoder::load(harness::backend(levels()[0]), &checkpoint, packed, &mut |_| {}).unwrap();
                assert_eq!(checkpoint.digest(), untouched, "{stored:?} as {packed:?}, checked: {checked}");
            }
        }
    }
}

#[test]
fn every_byte_of_a_large_tensor_counts() {
    let original = vec![7u8; (3 << 20) + 5];
    let digest = content_digest(&original);
    // Spread over all pieces, their borders among them.
    let borders = (1..=3).flat_map(|piece| [(piece << 20) - 1, piece << 20]);
    for changed in borders.chain((0..original.len()).step_by(77_777)).chain([original.len() - 1]) {
        let mut other = original.clone();
        other[changed] ^= 1;
        assert_ne!(content_digest(&other), digest, "byte {changed}");
    }
    assert_ne!(content_digest(&original[1..]), digest, "the length counts");
}

#[test]
fn broken_weights_are_refused_by_name() {
    let folder = copy_of("llama");
    let weights = folder.path().join("model.safetensors");
    let whole = fs::read(&weights).unwrap();
    for kept in [0, 4, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(&weights, &whole[..kept]).unwrap();
        let message = error(&folder);
        assert!(message.contains("model.safetensors` is damaged") && message.contains("truncated"), "{message}");
    }
    let mut header = whole.clone();
    header[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    fs::write(&weights, &header).unwrap();
    assert!(error(&folder).contains("is damaged"));

    fs::write(&weights, &whole).unwrap();
    change_tensors(&weights, |tensors| {
        tensors.remove("model.layers.1.mlp.up_proj.weight");
        tensors.remove("model.layers.1.mlp.gate_proj.weight");
    });
    let message = error(&folder);
    assert!(message.contains("`model.layers.1.mlp.gate_proj.weight` is missing (and 1 more)"), "{message}");

    fs::write(&weights, &whole).unwrap();
    change_tensors(&weights, |tensors| {
        tensors.get_mut("model.layers.0.self_attn.k_proj.weight").unwrap().1 = vec![32, 16];
    });
    let message = error(&folder);
    assert!(message.contains("`model.layers.0.self_attn.k_proj.weight` has shape [32, 16]"), "{message}");
    assert!(message.contains("asks for [16, 32]"), "{message}");

    fs::write(&weights, &whole).unwrap();
    change_tensors(&weights, |tensors| {
        let bias = (Dtype::F32, vec![32], vec![0; 128]);
        tensors.insert("model.layers.0.self_attn.q_proj.bias".to_owned(), bias);
    });
    let message = error(&folder);
    assert!(message.contains("`model.layers.0.self_attn.q_proj.bias` is not part of this architecture"), "{message}");

    fs::write(&weights, &whole).unwrap();
    change_tensors(&weights, |tensors| {
        let (dtype, _, data) = tensors.get_mut("model.layers.0.mlp.up_proj.weight").unwrap();
        (*dtype, *data) = (Dtype::I32, data.clone());
    });
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let message = checkpoint.matrix("model.layers.0.mlp.up_proj.weight").err().unwrap().to_string();
    assert!(message.contains("stored as `I32`"), "{message}");
}

#[test]
fn rotary_buffers_of_old_checkpoints_are_left_out() {
    let folder = copy_of("llama");
    change_tensors(&folder.path().join("model.safetensors"), |tensors| {
        let buffer = (Dtype::F32, vec![4], vec![0; 16]);
        tensors.insert("model.layers.0.self_attn.rotary_emb.inv_freq".to_owned(), buffer);
    });
    assert!(Checkpoint::open(folder.path()).is_ok());
}

#[test]
fn heads_and_ties() {
    // Not stored: the embedding is the head, unless the configuration says that it is not.
    let absent = copy_of("llama-tied");
    change_json(&absent.path().join("config.json"), |config| {
        config.as_object_mut().unwrap().remove("tie_word_embeddings");
    });
    assert!(Checkpoint::open(absent.path()).unwrap().spec.tied);
    change_json(&absent.path().join("config.json"), |config| config["tie_word_embeddings"] = json!(false));
    assert!(error(&absent).contains("`lm_head.weight` is missing and tie_word_embeddings is false"));
    // Stored and declared tied: tied wins, as in transformers.
    let both = copy_of("llama");
    change_json(&both.path().join("config.json"), |config| config["tie_word_embeddings"] = json!(true));
    let checkpoint = Checkpoint::open(both.path()).unwrap();
    assert!(checkpoint.spec.tied && checkpoint.has("lm_head.weight"));
}

#[test]
fn broken_shards_are_refused_by_name() {
    let index = "model.safetensors.index.json";
    let folder = copy_of("llama-tied");
    fs::remove_file(folder.path().join("model-00002-of-00002.safetensors")).unwrap();
    let message = error(&folder);
    assert!(message.contains("model-00002-of-00002.safetensors` was not found"), "{message}");

    let folder = copy_of("llama-tied");
    change_json(&folder.path().join(index), |json| {
        json["weight_map"]["model.norm.weight"] = json!("../model-00001-of-00002.safetensors");
    });
    assert!(error(&folder).contains("is not a plain file name"));

    let folder = copy_of("llama-tied");
    change_json(&folder.path().join(index), |json| {
        json["weight_map"]["model.extra.weight"] = json!("model-00001-of-00002.safetensors");
    });
    assert!(error(&folder).contains("it says that `model.extra.weight` is in"));

    let folder = copy_of("llama-tied");
    fs::write(folder.path().join(index), b"{\"weight_map\": 3}").unwrap();
    assert!(error(&folder).contains("no `weight_map` object"));
    fs::write(folder.path().join(index), b"{").unwrap();
    assert!(error(&folder).contains("is damaged"));

    let folder = copy_of("llama-tied");
    fs::copy(
        folder.path().join("model-00001-of-00002.safetensors"),
        folder.path().join("model-00002-of-00002.safetensors"),
    )
    .unwrap();
    assert!(error(&folder).contains("stored in two shards"));
}

#[test]
fn paths_that_are_not_models() {
    let folder = tempfile::tempdir().unwrap();
    let absent = folder.path().join("absent");
    assert!(matches!(Checkpoint::open(&absent), Err(ModelError::NotFound { .. })));
    assert!(error(&folder).contains("config.json"));
    fs::write(folder.path().join("notes.txt"), b"hello").unwrap();
    let message = Checkpoint::open(&folder.path().join("notes.txt")).unwrap_err().to_string();
    assert!(message.contains("notes.txt` is not a model"), "{message}");

    let no_weights = copy_of("llama");
    fs::remove_file(no_weights.path().join("model.safetensors")).unwrap();
    fs::write(no_weights.path().join("pytorch_model.bin"), b"pickle").unwrap();
    assert!(error(&no_weights).contains("pickled .bin weights are never read"));

    let several = tempfile::tempdir().unwrap();
    for name in ["a.gguf", "b.gguf"] {
        fs::write(several.path().join(name), b"GGUF").unwrap();
    }
    let message = error(&several);
    assert!(message.contains("`a.gguf`, `b.gguf`"), "{message}");

    let config = copy_of("llama");
    fs::write(config.path().join("config.json"), b"{\"architectures\": [").unwrap();
    assert!(error(&config).contains("config.json` is damaged"));
    let generation = copy_of("llama");
    fs::write(generation.path().join("generation_config.json"), b"{\"eos_token_id\": true}").unwrap();
    assert!(error(&generation).contains("`eos_token_id` of generation_config.json is `true`"));
}

#[test]
fn names_come_from_the_folder_and_the_configuration() {
    let folder = copy_of("llama");
    let renamed = folder.path().parent().unwrap().join("Llama-Test-Names");
    let _ = fs::remove_dir_all(&renamed);
    fs::rename(folder.path(), &renamed).unwrap();
    change_json(&renamed.join("config.json"), |config| config["_name_or_path"] = json!("org/Other-Name"));
    let names = Checkpoint::open(&renamed).unwrap().names;
    fs::remove_dir_all(&renamed).unwrap();
    assert_eq!(names, ["Llama-Test-Names", "org/Other-Name"]);
}

#[test]
fn loading_reports_progress_up_to_the_announced_bytes() {
    for dtype in [StorageType::F32, StorageType::Bf16] {
        let checkpoint = Checkpoint::open(&oracle_root().join("qwen2/base")).unwrap();
        let mut seen: Vec<LoadProgress> = Vec::new();
        let backend = harness::backend(levels()[0]);
        let weights = Decoder::load(backend, &checkpoint, dtype, &mut |progress| seen.push(progress)).unwrap();
        let total = packed_bytes(&checkpoint.spec, dtype);
        assert!(seen.windows(2).all(|pair| pair[0].done_bytes < pair[1].done_bytes));
        assert_eq!(seen.first().unwrap().done_bytes, 0);
        assert_eq!(*seen.last().unwrap(), LoadProgress { done_bytes: total, total_bytes: total });
        assert!(weights.bytes() >= total, "padding only adds");
        let unread = Checkpoint::open(&oracle_root().join("qwen2/base")).unwrap();
        assert_eq!(checkpoint.digest(), unread.digest(), "hashed while loading or afterwards");
    }
}

#[test]
fn limits_of_zero_are_refused() {
    let checkpoint = Checkpoint::open(&oracle_root().join("llama/base")).unwrap();
    let weights = Decoder::load(harness::backend(levels()[0]), &checkpoint, StorageType::F32, &mut |_| {}).unwrap();
    let limits = DecoderLimits {
        max_rows: 8,
        max_logit_rows: 8,
        max_position: 64,
        block_size: 0,
        blocks: 4,
        max_entries: 0,
        max_rank: 0,
    };
    assert!(weights.allocate(limits).err().unwrap().to_string().contains("`block_size` is `0`"));
}

#[test]
fn describe_says_model_dtype_and_backend() {
    let model = Model::load(&oracle_root().join("llama-tied/base"), StorageType::Bf16, levels()[0]);
    insta::assert_snapshot!(
        model.decoder.describe(),
        @"Llama, 2 layers, hidden 32, vocabulary 288 (tied); bfloat16 weights, 0.05 MB; cpu (portable, 2 threads)"
    );
    assert_eq!(model.decoder.weight_bytes(), packed_bytes(model.decoder.spec(), StorageType::Bf16));
}
