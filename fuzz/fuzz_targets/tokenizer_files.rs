//! `tokenizer.json`, `tokenizer_config.json` and `special_tokens_map.json`: what is accepted has ids in range, one per
//! token, and merges that the library can build.
//!
//! The input is the three files with zero bytes between them.
#![no_main]

use libfuzzer_sys::fuzz_target;
use manylora_model::vocabulary::hugging_face::{LARGEST_ID, SpecialTokens, check, configured_tokens};
use manylora_model::vocabulary::token_text::{Entry, Joining, TokenText};
use serde_json::Value;

fuzz_target!(|input: &[u8]| {
    let mut parts = input.splitn(3, |&byte| byte == 0);
    let mut next = || serde_json::from_slice::<Value>(parts.next().unwrap_or(b"{}"));
    let (Ok(json), configuration, map) = (next(), next(), next()) else { return };
    if let (Ok(configuration), Ok(map)) = (configuration, map) {
        let special = SpecialTokens::read(&map, &configuration);
        assert!(special.named.values().all(|token| special.all.contains(token)));
        if let Ok(tokens) = configured_tokens(&configuration) {
            assert!(tokens.keys().all(|&id| u64::from(id) <= LARGEST_ID));
        }
    }
    if check(&json).is_err() {
        return;
    }
    let joining = Joining::of_decoder(&json["decoder"]);
    let Some(vocabulary) = json["model"]["vocab"].as_object() else { return };
    let mut by_id: Vec<(u64, &str)> = vocabulary.iter().map(|(token, id)| (id.as_u64().unwrap(), &**token)).collect();
    by_id.sort_unstable();
    assert!(by_id.windows(2).all(|pair| pair[0].0 < pair[1].0));
    let text = TokenText::new(joining, by_id.iter().map(|&(_, token)| Entry::Model(token)));
    assert_eq!(text.len(), by_id.len());
    for merge in json["model"]["merges"].as_array().into_iter().flatten() {
        let (left, right) = match merge {
            Value::String(pair) => pair.split_once(' ').unwrap(),
            pair => (pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
        };
        assert!(vocabulary.contains_key(left) && vocabulary.contains_key(right));
    }
});
