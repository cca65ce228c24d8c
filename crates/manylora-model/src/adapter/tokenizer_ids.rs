//! Token ids of a tokenizer that an adapter brings along.
//!
//! The base's tokenizer is what is used. An adapter trained with ids beyond the base's embedding needs rows that
//! nobody has; ids beyond the base's tokenizer, but with a row, are never produced from text.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::fault::Fault;
use super::folder::Folder;
use super::policy::AdapterPolicy;
use super::report::LoadReport;

/// Largest tokenizer file that is read; real ones reach 35 MB.
const MAX_TOKENIZER_BYTES: u64 = 128 << 20;

/// Refuses ids that the base has no embedding for, and warns of those that its tokenizer does not know.
pub(super) fn check(folder: &Folder, policy: &AdapterPolicy, report: &mut LoadReport) -> Result<(), Fault> {
    for (file, read) in
        [("added_tokens.json", largest_added as fn(&[u8]) -> _), ("tokenizer.json", largest_in_tokenizer)]
    {
        let Some(content) = folder.read(file, MAX_TOKENIZER_BYTES)? else { continue };
        let largest = match read(&content) {
            Ok(largest) => largest,
            Err(error) => {
                report.warnings.push(format!("its `{file}` could not be read ({error}); the base's tokenizer is used"));
                continue;
            }
        };
        let Some(largest) = largest else { continue };
        let vocabulary = policy.spec.vocab_size as u64;
        if largest >= vocabulary {
            return Err(Fault::invalid(format!(
                "its `{file}` has token ids up to {largest} and the base's vocabulary ends at {}: it was trained with \
                 added tokens whose rows are not here",
                vocabulary - 1
            ))
            .key(file));
        }
        if largest >= policy.tokenizer_size as u64 {
            report.warnings.push(format!(
                "its `{file}` has token ids up to {largest} that the base's tokenizer of {} ids never produces",
                policy.tokenizer_size
            ));
        }
    }
    Ok(())
}

fn largest_added(content: &[u8]) -> serde_json::Result<Option<u64>> {
    serde_json::from_slice::<LargestId>(content).map(|largest| largest.0)
}

fn largest_in_tokenizer(content: &[u8]) -> serde_json::Result<Option<u64>> {
    let tokenizer: Tokenizer = serde_json::from_slice(content)?;
    let added = tokenizer.added_tokens.into_iter().map(|token| token.id).max();
    Ok(added.max(tokenizer.model.and_then(|model| model.vocab).and_then(|vocab| vocab.0)))
}

#[derive(Deserialize)]
struct Tokenizer {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    model: Option<Model>,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u64,
}

#[derive(Deserialize)]
struct Model {
    vocab: Option<LargestId>,
}

/// The largest id of a vocabulary, read without keeping it: a map from token to id (BPE, WordPiece), or a list of
/// tokens with scores whose positions are the ids (Unigram).
struct LargestId(Option<u64>);

impl<'de> Deserialize<'de> for LargestId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(LargestIdVisitor)
    }
}

struct LargestIdVisitor;

impl<'de> Visitor<'de> for LargestIdVisitor {
    type Value = LargestId;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a vocabulary")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<LargestId, M::Error> {
        let mut largest = None;
        while let Some((IgnoredAny, id)) = map.next_entry::<IgnoredAny, u64>()? {
            largest = largest.max(Some(id));
        }
        Ok(LargestId(largest))
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut items: S) -> Result<LargestId, S::Error> {
        let mut count = 0_u64;
        while items.next_element::<IgnoredAny>()?.is_some() {
            count += 1;
        }
        Ok(LargestId(count.checked_sub(1)))
    }
}
