//! Tokenizers against what other programs say about real vocabularies.
//!
//! The oracle's small tokenizers are in the tree. Real ones come from packages that are fetched, never committed: the
//! folder in `MANYLORA_VOCABS` holds `ggml-vocab-*.gguf` with `.inp` and `.out` (llama.cpp's own vectors) and, for
//! SmolLM2, `MANYLORA_SMOLLM2` is its GGUF file. Where a variable is not set, its test says so and passes.

#![allow(clippy::unwrap_used, reason = "a panic is a failed test")]

#[path = "tokenizer_vocabularies/mutations.rs"]
mod mutations;

use std::path::{Path, PathBuf};

use manylora_model::checkpoint::gguf::{self, header::GgufHeader};
use manylora_model::tokenizer::{Detokenizer, Tokenizer};

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn fetched(variable: &str) -> Option<PathBuf> {
    let path = std::env::var_os(variable).map(PathBuf::from);
    if path.is_none() {
        assert!(std::env::var_os("MANYLORA_REQUIRE_DATA").is_none(), "{variable} is not set");
        eprintln!("{variable} is not set: the real vocabularies are not checked");
    }
    path
}

fn from_file(path: &Path) -> Tokenizer {
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    Tokenizer::from_gguf(&gguf::tokenizer(&GgufHeader::parse(&bytes).unwrap().metadata).unwrap()).unwrap()
}

fn streamed(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let mut stream = Detokenizer::new(tokenizer, false, true);
    let mut text = String::new();
    for &id in ids {
        text.push_str(stream.push(id).unwrap());
    }
    text + &stream.finish().unwrap()
}

#[test]
fn llama_cpp_vectors_are_met() {
    let Some(folder) = fetched("MANYLORA_VOCABS") else {
        return;
    };
    // SentencePiece prefixes texts with a space that decoding takes away again.
    for name in
        ["qwen2", "qwen35", "llama-bpe", "gpt-2", "starcoder", "refact", "command-r", "falcon", "llama-spm", "phi-3"]
    {
        let path = folder.join(format!("ggml-vocab-{name}.gguf"));
        let tokenizer = from_file(&path);
        let read = |suffix: &str| std::fs::read_to_string(format!("{}{suffix}", path.display())).unwrap();
        let (inputs, outputs) = (read(".inp"), read(".out"));
        let inputs: Vec<&str> = inputs.split("\n__ggml_vocab_test__\n").collect();
        let mut checked = 0;
        for (input, output) in inputs.iter().zip(outputs.lines()) {
            let expected: Vec<u32> = output.split_whitespace().map(|id| id.parse().unwrap()).collect();
            assert_eq!(tokenizer.encode(input, false).unwrap(), expected, "{name}: {input:?}");
            assert_eq!(tokenizer.decode(&expected, false, true).unwrap(), *input, "{name}");
            assert_eq!(streamed(&tokenizer, &expected), *input, "{name}");
            checked += 1;
        }
        assert!(checked > 40, "{name}: only {checked} vectors");
    }
}

#[test]
fn smollm2_prompts_have_the_oracles_ids() {
    let Some(path) = fetched("MANYLORA_SMOLLM2") else {
        return;
    };
    let tokenizer = from_file(&path);
    let expected = std::fs::read(workspace().join("tests/oracle/smollm2/expected.json")).unwrap();
    let expected: serde_json::Value = serde_json::from_slice(&expected).unwrap();
    let prompts = expected["prompts"].as_array().unwrap();
    assert!(prompts.len() > 3);
    for prompt in prompts {
        let ids: Vec<u32> = prompt["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        let text = prompt["text"].as_str().unwrap();
        assert_eq!(tokenizer.encode(text, true).unwrap(), ids, "{text:?}");
        assert_eq!(tokenizer.decode(&ids, false, true).unwrap(), text);
    }
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.vocab_size()), (Some(1), Some(2), 49152));
}

#[test]
fn oracle_tokenizers_give_the_manifests_ids() {
    for base in ["llama", "llama-tied", "llama-odd", "qwen2", "qwen2-padded", "qwen3", "mistral"] {
        let folder = workspace().join("tests/oracle").join(base);
        let tokenizer = Tokenizer::from_directory(&folder.join("base")).unwrap();
        let manifest: serde_json::Value =
            serde_json::from_slice(&std::fs::read(folder.join("manifest.json")).unwrap()).unwrap();
        let mut with_text = 0;
        for (name, prompt) in manifest["prompts"].as_object().unwrap() {
            let ids: Vec<u32> =
                prompt["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
            if let Some(text) = prompt["text"].as_str() {
                assert_eq!(tokenizer.encode(text, false).unwrap(), ids, "{base}: {name}");
                assert_eq!(tokenizer.decode(&ids, false, true).unwrap(), text, "{base}: {name}");
                with_text += 1;
            }
            assert_eq!(streamed(&tokenizer, &ids), tokenizer.decode(&ids, false, true).unwrap(), "{base}: {name}");
        }
        assert!(with_text > 0, "{base}");
        assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(0), Some(2)));
        assert_eq!((tokenizer.vocab_size(), tokenizer.max_id()), (288, 287));
        assert!(tokenizer.is_special(1) && !tokenizer.is_special(3));
        assert_eq!(tokenizer.id_of("<|im_end|>"), Some(2));
        assert_eq!(tokenizer.token_bytes(300), None);
    }
}
