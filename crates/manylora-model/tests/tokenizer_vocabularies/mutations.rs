//! Damaged tokenizer files through the real library: a tokenizer or an error that says why, and never a panic, minutes
//! or gigabytes.

use std::time::{Duration, Instant};

use manylora_model::checkpoint::GgufTokenizer;
use manylora_model::checkpoint::gguf::{self, header::GgufHeader};
use manylora_model::tokenizer::Tokenizer;
use serde_json::{Value, json};

use crate::workspace;

/// Reproducible numbers (xorshift).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end.max(1) as u64) as usize
    }

    fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }
}

/// What a damaged file must lead to, and how long it may take; a tokenizer must be usable or say why not.
fn survive(what: &str, load: impl FnOnce() -> Result<Tokenizer, manylora_model::ModelError>) -> bool {
    let started = Instant::now();
    let loaded = load();
    let usable = match &loaded {
        Err(error) => {
            let message = error.to_string();
            assert!(!message.is_empty() && message.len() < 2000, "{what}: {message}");
            false
        }
        Ok(tokenizer) => {
            for text in ["hello <|im_end|> wörld\n", "", "\u{2581} \u{1f600}<0x41>"] {
                if let Ok(ids) = tokenizer.encode(text, true) {
                    assert!(ids.len() <= 1000, "{what}: {} tokens", ids.len());
                    let _ = tokenizer.decode(&ids, true, true);
                }
            }
            for id in [0, 1, 255, tokenizer.max_id(), u32::MAX] {
                let _ = (tokenizer.token_text(id), tokenizer.token_bytes(id), tokenizer.is_special(id));
            }
            true
        }
    };
    assert!(started.elapsed() < Duration::from_secs(5), "{what}: {:?}", started.elapsed());
    usable
}

/// Largest memory this process had, in bytes; None where the system does not say.
fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib << 10)
}

fn assert_bounded(before: Option<u64>) {
    if let (Some(before), Some(after)) = (before, peak_memory()) {
        assert!(after - before < 600 << 20, "memory grew by {} bytes", after - before);
    }
}

/// Puts something else in the place of one value somewhere in the tree.
fn mutate(value: &mut Value, numbers: &mut Numbers) {
    let values = [
        json!(null),
        json!(true),
        json!(-1),
        json!(0),
        json!(1e300),
        json!(4_294_967_295u64),
        json!(u64::MAX),
        json!(""),
        json!("\u{0}"),
        json!("é"),
        json!("(?=a)*(a+)+$"),
        json!("AAAA"),
        json!([]),
        json!({}),
        json!(["a", "b"]),
        json!({"type": "Sequence", "normalizers": [], "pretokenizers": [], "decoders": [], "processors": []}),
        json!({"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}),
        json!({"type": "Replace", "pattern": {"Regex": "(a*)*\\1"}, "content": "aa"}),
        json!({"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": true}),
        json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}], "pair": [],
               "special_tokens": {}}),
        json!({"type": "Metaspace", "replacement": "", "prepend_scheme": "always"}),
        json!({"type": "ByteLevel"}),
        json!({"type": "Unigram", "unk_id": 7, "vocab": [["a", -1.0]]}),
        json!({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "u"}),
        json!({"type": "WordPiece", "vocab": {"a": 3}, "unk_token": "u", "max_input_chars_per_word": 0}),
    ];
    let children = match value {
        Value::Object(map) if !map.is_empty() => map.len(),
        Value::Array(items) if !items.is_empty() => items.len(),
        _ => 0,
    };
    if children == 0 || numbers.below(4) == 0 {
        *value = numbers.pick(&values).clone();
        return;
    }
    let (index, action) = (numbers.below(children), numbers.below(8));
    match value {
        Value::Object(map) => {
            let Some(key) = map.keys().nth(index).cloned() else { return };
            match action {
                0 => drop(map.remove(&key)),
                1 => {
                    let moved = map.remove(&key).unwrap_or_default();
                    map.insert(format!("{key}x"), moved);
                }
                _ => mutate(&mut map[&key], numbers),
            }
        }
        Value::Array(items) => match action {
            0 => drop(items.remove(index)),
            1 => items.insert(index, items[index].clone()),
            _ => mutate(&mut items[index], numbers),
        },
        _ => {}
    }
}

#[test]
fn damaged_tokenizer_files_are_refused_or_load() {
    let base = workspace().join("tests/oracle/llama/base");
    let read = |name: &str| std::fs::read(base.join(name)).unwrap();
    let (tokenizer, configuration) = (read("tokenizer.json"), read("tokenizer_config.json"));
    let folder = tempfile::tempdir().unwrap();
    let mut numbers = Numbers(0x9E37_79B9_7F4A_7C15);
    let before = peak_memory();
    let mut outcomes = [0, 0];
    for round in 0..2000 {
        let mut files = [("tokenizer.json", tokenizer.clone()), ("tokenizer_config.json", configuration.clone())];
        let damaged = &mut files[usize::from(round % 4 == 3)].1;
        if round % 2 == 0 {
            let mut value: Value = serde_json::from_slice(damaged).unwrap();
            for _ in 0..=numbers.below(2) {
                // Deep in the tree, beside the vocabulary that is most of it.
                let keys: Vec<String> = value.as_object().map(|map| map.keys().cloned().collect()).unwrap_or_default();
                match numbers.below(keys.len() + 1) {
                    at if at < keys.len() => mutate(&mut value[&keys[at]], &mut numbers),
                    _ => mutate(&mut value, &mut numbers),
                }
            }
            *damaged = value.to_string().into_bytes();
        } else {
            for _ in 0..=numbers.below(2) {
                let at = numbers.below(damaged.len());
                match numbers.below(4) {
                    0 => damaged[at] ^= 1 << numbers.below(8),
                    1 => damaged.truncate(at),
                    2 => damaged.insert(at, b"0\"{[,:9\xc3"[numbers.below(8)]),
                    _ => {
                        let end = (at + numbers.below(40)).min(damaged.len());
                        drop(damaged.drain(at..end));
                    }
                }
                if damaged.is_empty() {
                    damaged.push(b'{');
                }
            }
        }
        for (name, content) in &files {
            std::fs::write(folder.path().join(name), content).unwrap();
        }
        let usable = survive(&format!("round {round}"), || Tokenizer::from_directory(folder.path()));
        outcomes[usize::from(usable)] += 1;
    }
    assert!(outcomes.iter().all(|&count| count > 100), "{outcomes:?}");
    assert_bounded(before);
}

#[test]
fn what_the_library_panics_over_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let load = |change: &dyn Fn(&mut Value)| {
        let mut value: Value =
            serde_json::from_slice(&std::fs::read(workspace().join("tests/oracle/llama/base/tokenizer.json")).unwrap())
                .unwrap();
        change(&mut value);
        std::fs::write(folder.path().join("tokenizer.json"), value.to_string()).unwrap();
        Tokenizer::from_directory(folder.path())
    };
    assert!(load(&|_| {}).is_ok());
    let message = |change: &dyn Fn(&mut Value)| load(change).unwrap_err().to_string();
    let broken = |file: &mut Value| file["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "A"});
    assert!(message(&broken).contains("damaged"), "{}", message(&broken));
    // These load, and the first text would have been their end.
    let empty =
        |file: &mut Value| file["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="});
    assert!(message(&empty).contains("the tokenizer's file is damaged"), "{}", message(&empty));
    let absent = |file: &mut Value| {
        file["post_processor"] = json!({"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "x", "type_id": 0}}], "pair": [], "special_tokens": {}});
    };
    assert!(message(&absent).contains("damaged"), "{}", message(&absent));
    // A merge that is shorter than the prefix which the library cuts off, and ids that no table should be made for.
    let short = |file: &mut Value| {
        file["model"]["continuing_subword_prefix"] = json!("#######");
    };
    assert!(message(&short).contains("not in the vocabulary"), "{}", message(&short));
    for id in [1u64 << 23, u64::from(u32::MAX), u64::MAX] {
        assert!(message(&|file| file["model"]["vocab"]["new"] = json!(id)).contains(&id.to_string()));
        assert!(message(&|file| file["added_tokens"][0]["id"] = json!(id)).contains(&id.to_string()));
    }
    assert!(message(&|file| file["model"]["vocab"]["twice"] = json!(7)).contains("both have the id `7`"));
    // Nesting is bounded by the JSON parser, and costs no more than its depth.
    let started = Instant::now();
    for (place, list) in [("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers"), ("decoder", "decoders")] {
        for kind in [json!({"type": "Sequence"}), json!({})] {
            let nested = |file: &mut Value| {
                file[place] = (0..55).fold(json!({"type": "ByteLevel"}), |inner, _| {
                    let mut outer = kind.clone();
                    outer[list] = json!([inner]);
                    outer
                });
            };
            let _ = load(&nested);
        }
    }
    let groups = |count: usize| {
        json!({"type": "Split", "pattern": {"Regex": "(".repeat(count) + &")*".repeat(count)},
                                       "behavior": "Isolated", "invert": false})
    };
    assert!(load(&|file| file["pre_tokenizer"] = groups(100_000)).is_err());
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
}

/// Damages one list, number or name of the metadata.
fn mutate_metadata(metadata: &mut GgufTokenizer, numbers: &mut Numbers) {
    let texts = ["", " ", "a", "\u{2581}", "<0x41>", "<0xZZ>", "h e", "é", "<s>", "\u{0}"];
    let (count, text) = (metadata.tokens.len(), (*numbers.pick(&texts)).to_owned());
    let id = *numbers.pick(&[None, Some(0), Some(2), Some(count as u32), Some(u32::MAX)]);
    let at = numbers.below(count);
    match numbers.below(14) {
        0 if count > 0 => metadata.tokens[at] = text,
        1 if count > 0 => metadata.tokens[at] = text.repeat(numbers.below(5000)),
        2 => drop(metadata.tokens.split_off(at)),
        3 => {
            let other = numbers.below(count);
            metadata.tokens.swap(at, other);
        }
        4 => {
            let kinds = [-1, 0, 1, 2, 3, 4, 5, 6, 7, i32::MAX];
            metadata.token_types = (0..numbers.below(2) * count).map(|_| *numbers.pick(&kinds)).collect();
        }
        5 => {
            let scores = [0.0, -1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0];
            metadata.scores = (0..numbers.below(2) * count).map(|_| *numbers.pick(&scores)).collect();
        }
        6 => metadata.merges.push(text),
        7 if !metadata.merges.is_empty() => {
            let at = numbers.below(metadata.merges.len());
            metadata.merges.swap_remove(at);
        }
        8 => (metadata.bos, metadata.padding) = (id, id),
        9 => metadata.eos = id,
        10 => metadata.unknown = id,
        11 => (metadata.add_bos, metadata.add_eos) = (Some(numbers.below(2) == 0), Some(true)),
        12 => (*numbers.pick(&["gpt2", "llama", "llama", "bert", ""])).clone_into(&mut metadata.model),
        _ => metadata.pre = Some((*numbers.pick(&["qwen2", "llama-bpe", "default", "", "x"])).to_owned()),
    }
}

#[test]
fn damaged_gguf_tokenizers_are_refused_or_load() {
    let bytes = std::fs::read(workspace().join("tests/fixtures/gguf-models/qwen3.gguf")).unwrap();
    let real = gguf::tokenizer(&GgufHeader::parse(&bytes).unwrap().metadata).unwrap();
    assert!(Tokenizer::from_gguf(&real).is_ok());
    let mut pieces = GgufTokenizer { model: "llama".to_owned(), merges: Vec::new(), ..real.clone() };
    pieces.scores = (0..pieces.tokens.len()).map(|rank| -(rank as f32)).collect();
    assert!(Tokenizer::from_gguf(&pieces).is_ok());
    let mut numbers = Numbers(0x2545_F491_4F6C_DD1D);
    let before = peak_memory();
    let mut outcomes = [0, 0];
    for round in 0..3000 {
        let mut metadata = if round % 2 == 0 { real.clone() } else { pieces.clone() };
        for _ in 0..=numbers.below(3) {
            mutate_metadata(&mut metadata, &mut numbers);
        }
        let usable = survive(&format!("round {round}"), || Tokenizer::from_gguf(&metadata));
        outcomes[usize::from(usable)] += 1;
    }
    assert!(outcomes.iter().all(|&count| count > 400), "{outcomes:?}");
    assert_bounded(before);
}

#[test]
fn tokens_that_are_all_made_of_each_other_are_refused() {
    let before = peak_memory();
    let runs = GgufTokenizer {
        model: "llama".to_owned(),
        tokens: (1..=4096).map(|length| "x".repeat(length)).collect(),
        ..GgufTokenizer::default()
    };
    let mut message = String::new();
    survive("runs", || Tokenizer::from_gguf(&runs).inspect_err(|error| message = error.to_string()));
    assert!(message.contains("more ways than any vocabulary's"), "{message}");
    // Long runs of spaces, as real vocabularies have them, are fine.
    let spaces = GgufTokenizer { tokens: (1..=32).map(|length| "\u{2581}".repeat(length)).collect(), ..runs };
    assert!(survive("spaces", || Tokenizer::from_gguf(&spaces)));
    assert_bounded(before);
}

#[test]
fn a_tokenizer_file_that_is_no_file_or_too_long_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    std::fs::create_dir(&path).unwrap();
    assert!(Tokenizer::from_directory(folder.path()).unwrap_err().to_string().contains("not a regular file"));
    std::fs::remove_dir(&path).unwrap();
    // Without content on disk.
    std::fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
    let before = peak_memory();
    assert!(Tokenizer::from_directory(folder.path()).unwrap_err().to_string().contains("longer than"));
    assert_bounded(before);
}
