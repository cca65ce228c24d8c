//! Tokenizer metadata of a GGUF file: a vocabulary that is accepted can be built, and every id has its bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use manylora_model::checkpoint::gguf;
use manylora_model::checkpoint::gguf::header::GgufHeader;
use manylora_model::vocabulary::GgufVocabulary;
use manylora_model::vocabulary::gguf::{Kind, MERGE_BYTES};

fuzz_target!(|file: &[u8]| {
    let Ok(header) = GgufHeader::parse(file) else { return };
    let Ok(metadata) = gguf::tokenizer(&header.metadata) else { return };
    let Ok(vocabulary) = GgufVocabulary::read(&metadata) else { return };
    let count = metadata.tokens.len();
    for (token, &id) in &vocabulary.ids {
        assert_eq!(metadata.tokens[id as usize], *token);
    }
    assert!(metadata.tokens.iter().all(|token| vocabulary.ids.contains_key(token)));
    let mut bytes = 0;
    for (left, right) in &vocabulary.merges {
        assert!(!left.is_empty() && !right.is_empty());
        for token in [left, right, &format!("{left}{right}")] {
            assert!(vocabulary.ids.contains_key(token));
        }
        bytes += left.len() + right.len();
    }
    assert!(bytes <= MERGE_BYTES);
    if vocabulary.kind == Kind::SentencePiece && !metadata.scores.is_empty() {
        let scores = vocabulary.merges.iter().map(|(left, right)| {
            // Of two ids with one text either may be the scored one.
            let joined = format!("{left}{right}");
            let of = |id: usize| metadata.scores[id];
            (0..count).filter(|&id| metadata.tokens[id] == joined).map(of).fold(f32::NEG_INFINITY, f32::max)
        });
        assert!(scores.collect::<Vec<_>>().windows(2).all(|pair| pair[0] >= pair[1]) || vocabulary.ids.len() < count);
    }
    let text = vocabulary.token_text(&metadata);
    assert_eq!(text.len(), count);
    for added in &vocabulary.added {
        assert_eq!(text.bytes(added.id), Some(metadata.tokens[added.id as usize].as_bytes()));
    }
    assert!((0..count as u32).all(|id| text.bytes(id).is_some()));
    assert!(vocabulary.named.values().all(|token| vocabulary.ids.contains_key(token)));
});
