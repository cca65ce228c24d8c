//! A tokenizer's tokens as a trie of their bytes, through which a grammar finds all tokens that can come next at once.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use llguidance::ParserFactory;
use llguidance::earley::SlicedBiasComputer;
use manylora_model::tokenizer::Tokenizer;
use toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

/// Longer tokens do not fit the trie; no grammar permits them.
const LONGEST: usize = 512;

/// Ways in which a text may go on that a parser follows at the same time.
const MOST_ITEMS: usize = 20_000;

/// The vocabulary, for grammars. Tokens are masked and never forced, so that nothing has to be tokenized on the way: a model
/// may spell what the grammar demands by any tokens that add up to it.
struct Vocabulary {
    trie: TokTrie,
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.greedy_tokenize(bytes)
    }

    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

/// What makes parsers over a vocabulary of `vocab_size` tokens, the length of a row of logits.
pub(super) fn factory(tokenizer: &Tokenizer, vocab_size: usize, end_tokens: &[u32]) -> Result<ParserFactory, String> {
    if !tokenizer.is_bytewise() {
        return Err("its decoder does more than to join the bytes of tokens".to_owned());
    }
    let build = || {
        let environment: TokEnv = Arc::new(Vocabulary { trie: trie(tokenizer, vocab_size, end_tokens) });
        let slices = SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices)
            .map_err(|error| error.to_string())?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.verbose_errors = false;
        // Large unions are no fault: what a token costs is bounded by its time.
        limits.max_items_in_row = MOST_ITEMS;
        Ok(factory)
    };
    // A vocabulary that the library does not bear must not take the caller's thread with it.
    catch_unwind(AssertUnwindSafe(build)).unwrap_or_else(|_| Err("its vocabulary does not fit a trie".to_owned()))
}

fn trie(tokenizer: &Tokenizer, vocab_size: usize, end_tokens: &[u32]) -> TokTrie {
    let end_tokens: Vec<u32> = end_tokens.iter().copied().filter(|&token| (token as usize) < vocab_size).collect();
    let mut words: Vec<Vec<u8>> =
        (0..vocab_size as u32).map(|id| word(tokenizer, id, end_tokens.contains(&id))).collect();
    if end_tokens.is_empty() {
        // A model without an end: a token beyond its vocabulary, which no row has a logit for.
        words.push(vec![TokTrie::SPECIAL_TOKEN_MARKER, b'<', b'>']);
    }
    let first_end = end_tokens.first().copied().unwrap_or(vocab_size as u32);
    let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, first_end), &words);
    if end_tokens.len() > 1 { trie.with_eos_tokens(&end_tokens) } else { trie }
}

/// Bytes of a token as a grammar sees them: marked where they are no text, none where no grammar can mean them.
fn word(tokenizer: &Tokenizer, id: u32, is_end: bool) -> Vec<u8> {
    let Some(bytes) = tokenizer.token_bytes(id) else { return Vec::new() };
    let special = is_end || tokenizer.is_special(id);
    // The byte of the mark is in no UTF-8 text.
    let damaged = bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER);
    if bytes.is_empty() || bytes.len() > LONGEST || damaged {
        return Vec::new();
    }
    if special { [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat() } else { bytes.to_vec() }
}
