//! The header of a GGUF file: tensors that are accepted lie inside the file, ids inside the vocabulary.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use manylora_model::checkpoint::gguf;
use manylora_model::checkpoint::gguf::header::GgufHeader;

fuzz_target!(|file: &[u8]| {
    let Ok(header) = GgufHeader::parse(file) else { return };
    for tensor in &header.tensors {
        assert!(tensor.bytes > 0 && tensor.start + tensor.bytes <= file.len());
        assert_eq!(tensor.rows * tensor.row_bytes(), tensor.bytes);
    }
    let Ok(contents) = gguf::read(Path::new("fuzz.gguf"), file) else { return };
    let tokenizer = &contents.tokenizer;
    for id in [tokenizer.bos, tokenizer.eos, tokenizer.unknown, tokenizer.padding].into_iter().flatten() {
        assert!((id as usize) < tokenizer.tokens.len());
    }
    assert!([0, tokenizer.tokens.len()].contains(&tokenizer.token_types.len()));
    assert!([0, tokenizer.tokens.len()].contains(&tokenizer.scores.len()));
    assert!(contents.spec.layers <= header.tensors.len());
    assert!(contents.spec.parameters() > 0);
});
