//! Where adapters lie and what they call their base.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use manylora_kernels::StorageType;
use manylora_kernels::cpu::{CpuBackend, CpuOptions};
use manylora_model::adapter::base_name::{BaseMatch, compare};
use manylora_model::adapter::{AdapterPolicy, inspect};
use manylora_model::decoder::BackendPacker;
use manylora_model::{AdapterRefusal, RefusalKind};
use serde_json::json;

use crate::fixtures::{HandMade, load_path, oracle, policy};

fn refused(path: &Path, policy: &AdapterPolicy) -> AdapterRefusal {
    inspect("x", path, policy).map(|header| header.report().clone()).unwrap_err()
}

fn confined(root: &Path) -> AdapterPolicy {
    AdapterPolicy { allowed_roots: Some(vec![root.to_owned()]), ..policy("llama") }
}

#[test]
fn a_22_paths_that_are_no_adapters() {
    let policy = policy("llama");
    let folder = tempfile::tempdir().unwrap();
    let missing = refused(&folder.path().join("missing"), &policy);
    assert_eq!(missing.kind, RefusalKind::NotFound);
    assert!(missing.reason.contains("No adapter found for"), "{missing}");

    let file = folder.path().join("file");
    fs::write(&file, "x").unwrap();
    assert_eq!(refused(&file, &policy).kind, RefusalKind::Invalid);
    assert_eq!(refused(&file.join("below"), &policy).kind, RefusalKind::Invalid);
    assert_eq!(refused(Path::new(""), &policy).kind, RefusalKind::Invalid);

    // The same name can be loaded properly afterwards.
    let path = folder.path().join("missing");
    fs::create_dir(&path).unwrap();
    assert_eq!(refused(&path, &policy).kind, RefusalKind::NotFound);
    HandMade::on_llama(4).write(&path);
    assert!(load_path(&path, &policy).is_ok());
}

#[test]
fn a_14_pickles_are_never_opened() {
    let folder = tempfile::tempdir().unwrap();
    let adapter = HandMade::on_llama(4);
    let path = folder.path().join("adapter");
    adapter.write(&path);
    fs::rename(path.join("adapter_model.safetensors"), path.join("kept")).unwrap();
    // A link that leads nowhere: opening it would fail, so it is not opened.
    symlink("nowhere", path.join("adapter_model.bin")).unwrap();
    let refusal = refused(&path, &policy("llama"));
    assert_eq!(refusal.keys, ["adapter_model.bin"]);
    assert!(refusal.reason.contains("never opened"), "{refusal}");
    fs::rename(path.join("kept"), path.join("adapter_model.safetensors")).unwrap();
    assert!(load_path(&path, &policy("llama")).is_ok());
}

#[test]
fn a_48_only_the_roots() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("root");
    let adapter = HandMade::on_llama(4);
    adapter.write(&root.join("inside"));
    adapter.write(&folder.path().join("outside"));
    let policy = confined(&root);
    assert!(load_path(&root.join("inside"), &policy).is_ok());
    assert!(load_path(&root.join("../root/inside"), &policy).is_ok());
    for path in [
        PathBuf::from("/etc"),
        PathBuf::from("../../x"),
        PathBuf::from("/nowhere/at/all"),
        root.join("../outside"),
        root.join("../missing"),
        folder.path().join("outside"),
        folder.path().to_owned(),
    ] {
        assert_eq!(refused(&path, &policy).kind, RefusalKind::Forbidden, "{}", path.display());
    }
    assert_eq!(refused(&root.join("missing"), &policy).kind, RefusalKind::NotFound);
    // A root whose name begins like another folder's.
    adapter.write(&folder.path().join("root-2/x"));
    assert_eq!(refused(&folder.path().join("root-2/x"), &policy).kind, RefusalKind::Forbidden);
    symlink("../outside", root.join("link")).unwrap();
    assert_eq!(refused(&root.join("link"), &policy).kind, RefusalKind::Forbidden);
    symlink("inside", root.join("alias")).unwrap();
    assert!(load_path(&root.join("alias"), &policy).is_ok());
    // The tokenizer's file is a file of the adapter too.
    symlink("../../outside/adapter_config.json", root.join("inside/tokenizer.json")).unwrap();
    assert_eq!(refused(&root.join("inside"), &policy).kind, RefusalKind::Forbidden);
}

#[test]
fn one_folder_more_can_only_confine() {
    let folder = tempfile::tempdir().unwrap();
    let (all, inside, other) =
        (folder.path().join("all"), folder.path().join("all/inside"), folder.path().join("other"));
    let adapter = HandMade::on_llama(4);
    for place in [&all, &inside, &other] {
        adapter.write(&place.join("x"));
    }
    let loads =
        |policy: &AdapterPolicy| [&all, &inside, &other].map(|place| load_path(&place.join("x"), policy).is_ok());
    assert_eq!(loads(&policy("llama").within(&inside)), [false, true, false]);
    assert_eq!(loads(&confined(&all).within(&inside)), [false, true, false]);
    assert_eq!(loads(&confined(&inside).within(&all)), [false, true, false]);
    assert_eq!(loads(&confined(&other).within(&all)), [false, false, false]);
    let several = AdapterPolicy { allowed_roots: Some(vec![other.clone(), inside.clone()]), ..policy("llama") };
    assert_eq!(loads(&several.within(folder.path())), [false, true, true]);
    assert_eq!(loads(&several.within(&folder.path().join("missing"))), [false, false, false]);
}

#[test]
fn a_hub_cache_loads_and_its_links_stay_in_it() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("hub");
    let repository = cache.join("models--someone--adapter");
    let snapshot = repository.join("snapshots/0123abcd");
    fs::create_dir_all(repository.join("blobs")).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    let adapter = HandMade::on_llama(4);
    fs::write(repository.join("blobs/1"), adapter.config.to_string()).unwrap();
    fs::write(repository.join("blobs/2"), adapter.file()).unwrap();
    symlink("../../blobs/1", snapshot.join("adapter_config.json")).unwrap();
    symlink("../../blobs/2", snapshot.join("adapter_model.safetensors")).unwrap();
    let own_root = folder.path().join("loras");
    fs::create_dir(&own_root).unwrap();
    let policy = AdapterPolicy { allowed_roots: Some(vec![own_root.clone(), cache]), ..policy("llama") };
    assert!(load_path(&snapshot, &policy).is_ok());
    assert_eq!(refused(&snapshot, &confined(&own_root)).kind, RefusalKind::Forbidden);
    // A file in one root that is a link into another one leaves its root.
    fs::create_dir(own_root.join("x")).unwrap();
    fs::write(own_root.join("x/adapter_config.json"), adapter.config.to_string()).unwrap();
    symlink(repository.join("blobs/2"), own_root.join("x/adapter_model.safetensors")).unwrap();
    assert_eq!(refused(&own_root.join("x"), &policy).kind, RefusalKind::Forbidden);
}

#[test]
fn only_regular_files_are_opened() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adapter");
    HandMade::on_llama(4).write(&path);
    fs::remove_file(path.join("adapter_model.safetensors")).unwrap();
    fs::create_dir(path.join("adapter_model.safetensors")).unwrap();
    assert!(refused(&path, &policy("llama")).reason.contains("not a regular file"));
    fs::remove_dir(path.join("adapter_model.safetensors")).unwrap();
    symlink("/dev/zero", path.join("adapter_model.safetensors")).unwrap();
    assert!(refused(&path, &policy("llama")).reason.contains("not a regular file"));
    fs::remove_file(path.join("adapter_model.safetensors")).unwrap();
    symlink("nowhere", path.join("adapter_model.safetensors")).unwrap();
    assert!(refused(&path, &policy("llama")).reason.contains("a link to a file that does not exist"));
}

#[test]
fn what_was_inspected_is_what_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adapter");
    HandMade::on_llama(4).write(&path);
    let header = inspect("x", &path, &policy("llama")).unwrap();
    assert_eq!(header.sites().len(), 4);
    assert_eq!(header.report().version, None);
    let sites = header.sites().to_vec();
    let first = header.read().unwrap();
    assert_eq!(sites, first.sites);
    assert_eq!(first.report.modules.len(), 4);
    assert_eq!(first.report.bytes, 4 * (2 * (4 * 32 + 32 * 4) + 2 * (4 * 32 + 16 * 4)));

    // Files that are renamed into place, or removed, take nothing from who has opened the old ones.
    let (header, other) = (inspect("x", &path, &policy("llama")).unwrap(), folder.path().join("other"));
    HandMade::on_llama(8).write(&other);
    fs::rename(other.join("adapter_model.safetensors"), path.join("adapter_model.safetensors")).unwrap();
    fs::remove_dir_all(&path).unwrap();
    assert_eq!(header.read().unwrap().digest, first.digest);
    assert_eq!(inspect("x", &path, &policy("llama")).unwrap_err().kind, RefusalKind::NotFound);

    // Half of one and half of another is neither.
    HandMade::on_llama(4).write(&path);
    let open = || inspect("x", &path, &policy("llama")).unwrap();
    let headers = [open(), open()];
    HandMade::on_llama(8).write(&path);
    let backend = CpuBackend::new(CpuOptions { num_threads: Some(1), ..CpuOptions::default() }).unwrap();
    let packer = BackendPacker::new(Arc::new(backend), StorageType::F32, 64);
    let [one, two] = headers;
    assert!(one.read().unwrap_err().reason.contains("changed while it was read"));
    assert!(two.load(&packer).unwrap_err().to_string().contains("changed while it was read"));
}

#[test]
fn memory_and_disk_give_the_same_adapter() {
    let policy = policy("llama");
    let adapter = HandMade::on_llama(5);
    let (memory, disk) = (adapter.load(&policy).unwrap(), adapter.load_from_disk(&policy).unwrap());
    assert_eq!(memory.digest, disk.digest);
    assert_eq!(memory.sites, disk.sites);
    assert_eq!(memory.report.modules, disk.report.modules);
}

#[test]
fn names_of_bases() {
    let names = ["meta-llama/Llama-3.2-1B-Instruct".to_owned(), "served".to_owned()];
    let same = [
        "meta-llama/Llama-3.2-1B-Instruct",
        "someone/llama-3.2-1b-instruct",
        "/models/Llama-3.2-1B-Instruct/",
        "C:\\models\\Llama-3.2-1B-Instruct",
        "served",
        "",
        "/",
        "/cache/hub/models--unsloth--Llama-3.2-1B-Instruct/snapshots/0123abc",
    ];
    for name in same {
        assert_eq!(compare(name, &names), BaseMatch::Same, "{name}");
    }
    let siblings = [
        "unsloth/Llama-3.2-1B-Instruct-bnb-4bit",
        "unsloth/llama-3.2-1b-instruct-unsloth-bnb-4bit",
        "x/Llama-3.2-1B-Instruct-AWQ",
        "x/Llama-3.2-1B-Instruct-GPTQ-Int4",
        "x/Llama-3.2-1B-Instruct-GGUF",
        "Llama-3.2-1B-Instruct.Q4_1.gguf",
        "Llama-3.2-1B-Instruct-Q4_K_M.gguf",
        "Llama-3.2-1B-Instruct-quantized.w4a16",
    ];
    for name in siblings {
        assert_eq!(compare(name, &names), BaseMatch::SameButForFormat, "{name}");
    }
    for name in ["meta-llama/Llama-3.2-3B-Instruct", "meta-llama/Llama-3.2-1B", "Llama", "-4bit", "gguf"] {
        assert_eq!(compare(name, &names), BaseMatch::Other, "{name}");
    }
    let quantized = ["SmolLM2-135M-Instruct.Q4_1.gguf".to_owned()];
    assert_eq!(compare("SmolLM2-135M-Instruct", &quantized), BaseMatch::SameButForFormat);
    assert_eq!(compare("Qwen2.5-0.5B", &["qwen2.5-7b".to_owned()]), BaseMatch::Other);
}

#[test]
fn a_19_another_base_warns_and_strict_base_refuses() {
    let plain = policy("llama");
    let strict = AdapterPolicy { strict_base: true, ..plain.clone() };
    let named = |name| HandMade::on_llama(4).with("base_model_name_or_path", name);
    for (name, warnings) in [(json!("x/LLAMA"), 0), (json!(null), 0), (json!("x/llama-bnb-4bit"), 1), (json!("opt"), 1)]
    {
        let adapter = named(name.clone()).load(&plain).unwrap();
        assert_eq!(adapter.report.warnings.len(), warnings, "{name}: {:?}", adapter.report.warnings);
    }
    assert!(named(json!("x/llama-bnb-4bit")).load(&strict).is_ok());
    let refusal = named(json!("facebook/opt")).refusal(&strict);
    assert_eq!(refusal.keys, ["base_model_name_or_path"]);
    assert!(refusal.reason.contains("`facebook/opt`") && refusal.reason.contains("`oracle/llama`"), "{refusal}");
    assert_eq!(named(json!(7)).refusal(&plain).keys, ["base_model_name_or_path"]);
}

#[test]
fn a_47_a_tokenizer_that_cannot_be_read_is_not_needed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adapter");
    HandMade::on_llama(4).write(&path);
    fs::write(path.join("tokenizer.json"), "{broken").unwrap();
    assert_eq!(load_path(&path, &policy("llama")).unwrap().report.warnings.len(), 1);
    for (content, refused) in [
        (json!({"model": {"vocab": {"a": 0, "b": 287}}}), false),
        (json!({"model": {"vocab": {"a": 0, "b": 288}}}), true),
        (json!({"model": {"vocab": [["a", 0.5], ["b", 0.1]]}}), false),
        (json!({"added_tokens": [{"id": 500, "content": "x"}], "model": {}}), true),
    ] {
        fs::write(path.join("tokenizer.json"), content.to_string()).unwrap();
        assert_eq!(load_path(&path, &policy("llama")).is_err(), refused, "{content}");
    }
    // A padded base has rows that its tokenizer does not reach.
    let padded = oracle().join("qwen2-padded/adapters/qv");
    let copy = folder.path().join("padded");
    fs::create_dir(&copy).unwrap();
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(padded.join(file), copy.join(file)).unwrap();
    }
    fs::write(copy.join("added_tokens.json"), json!({"<x>": 300}).to_string()).unwrap();
    let adapter = load_path(&copy, &policy("qwen2-padded")).unwrap();
    assert!(adapter.report.warnings[0].contains("300"), "{:?}", adapter.report.warnings);
    fs::write(copy.join("added_tokens.json"), json!({"<x>": 320}).to_string()).unwrap();
    assert!(load_path(&copy, &policy("qwen2-padded")).is_err());
}

/// Whoever may write below the root changes what lies there between any two looks at it.
#[test]
fn a_48_what_is_swapped_while_it_is_loaded_brings_nothing_from_outside() {
    let place = tempfile::tempdir().unwrap();
    let (root, outside) = (place.path().join("root"), place.path().join("outside"));
    let adapter = root.join("adapter");
    for (folder, name) in [(&adapter, "small"), (&outside, "rank5")] {
        fs::create_dir_all(folder).unwrap();
        for file in ["adapter_config.json", "adapter_model.safetensors"] {
            fs::copy(oracle().join("llama/adapters").join(name).join(file), folder.join(file)).unwrap();
        }
    }
    let [inside, foreign] = [&adapter, &outside].map(|folder| load_path(folder, &policy("llama")).unwrap().digest);
    assert_ne!(inside, foreign);
    // In turn the files are links that lead out, and the folder is one.
    let (ours, theirs) = (place.path().join("ours"), place.path().join("link"));
    fs::rename(&adapter, &ours).unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    let (loaded, refused) = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                fs::rename(&ours, &adapter).unwrap();
                std::thread::yield_now();
                for file in ["adapter_config.json", "adapter_model.safetensors"] {
                    let (file, kept) = (adapter.join(file), root.join(file));
                    fs::rename(&file, &kept).unwrap();
                    symlink(outside.join(file.file_name().unwrap()), &file).unwrap();
                    std::thread::yield_now();
                    fs::rename(&kept, &file).unwrap();
                }
                fs::rename(&adapter, &ours).unwrap();
                symlink(&outside, &theirs).unwrap();
                fs::rename(&theirs, &adapter).unwrap();
                std::thread::yield_now();
                fs::remove_file(&adapter).unwrap();
            }
        });
        let policy = confined(&root);
        let loads: Vec<_> = (0..2000).map(|_| load_path(&adapter, &policy).map(|loaded| loaded.digest)).collect();
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        let (good, bad): (Vec<_>, Vec<_>) = loads.into_iter().partition(Result::is_ok);
        (good, bad.len())
    });
    assert!(loaded.iter().flatten().all(|digest| *digest == inside), "{} loaded, {refused} refused", loaded.len());
}
