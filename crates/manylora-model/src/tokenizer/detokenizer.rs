//! Streaming detokenization: text appears as soon as it is certain and never in half characters.

use crate::error::ModelError;

use super::Tokenizer;

/// Tokens after which an incomplete text is shown as it is (only for decoders of the library).
const LONGEST_WAIT: usize = 16;

/// Turns the tokens of one sequence into text, piece by piece. All pieces together equal the decoded whole.
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special: bool,
    spaces_between_special: bool,
    fresh: String,
    state: State,
}

enum State {
    /// Tokens are bytes: what is kept is the beginning of one character.
    Bytes { pending: Vec<u8>, strip: usize },
    /// A window of tokens is decoded with and without the newest ones; the difference is new. The window starts at a
    /// token whose text was shown already, so that decoders see the context their spacing depends on.
    Window { ids: Vec<u32>, shown: usize, prefix: String, last_added: bool },
}

impl Detokenizer {
    /// For a text that starts with its first token.
    pub fn new(tokenizer: &Tokenizer, skip_special_tokens: bool, spaces_between_special_tokens: bool) -> Self {
        let text = &tokenizer.inner.text;
        let state = if text.is_bytewise() {
            State::Bytes { pending: Vec::new(), strip: text.strip() }
        } else {
            State::Window { ids: Vec::new(), shown: 0, prefix: String::new(), last_added: false }
        };
        Self {
            tokenizer: tokenizer.clone(),
            skip_special: skip_special_tokens,
            spaces_between_special: spaces_between_special_tokens,
            fresh: String::new(),
            state,
        }
    }

    /// For a text that continues a prompt: the space at the start of the first word stays.
    pub fn after_prompt(
        tokenizer: &Tokenizer,
        prompt: &[u32],
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
    ) -> Result<Self, ModelError> {
        let mut stream = Self::new(tokenizer, skip_special_tokens, spaces_between_special_tokens);
        let visible = |id: &u32| !(skip_special_tokens && tokenizer.is_special(*id));
        match &mut stream.state {
            State::Bytes { strip, .. } => {
                if prompt.iter().any(visible) {
                    *strip = 0;
                }
            }
            State::Window { ids, shown, prefix, .. } => {
                let mut context: Vec<u32> = prompt.iter().rev().copied().filter(visible).take(6).collect();
                context.reverse();
                *prefix = tokenizer.pipeline_decode(&context, skip_special_tokens)?;
                *shown = context.len();
                *ids = context;
            }
        }
        Ok(stream)
    }

    /// Takes the next token; gives the text that became certain with it, often one word, sometimes nothing.
    pub fn push(&mut self, id: u32) -> Result<&str, ModelError> {
        self.fresh.clear();
        if self.skip_special && self.tokenizer.is_special(id) {
            return Ok(&self.fresh);
        }
        match &mut self.state {
            State::Bytes { pending, strip } => {
                pending.extend_from_slice(self.tokenizer.inner.text.bytes(id).unwrap_or_default());
                take_characters(pending, &mut self.fresh);
                while *strip > 0 && self.fresh.starts_with(' ') {
                    self.fresh.remove(0);
                    *strip -= 1;
                }
                if !self.fresh.is_empty() {
                    *strip = 0;
                }
            }
            State::Window { ids, shown, prefix, last_added } => {
                if self.tokenizer.inner.text.bytes(id).is_none() {
                    return Ok(&self.fresh);
                }
                let added = self.tokenizer.inner.added.contains(&id);
                ids.push(id);
                let text = self.tokenizer.pipeline_decode(ids, false)?;
                let complete = !text.ends_with(char::REPLACEMENT_CHARACTER) || ids.len() - *shown > LONGEST_WAIT;
                if complete && text.len() > prefix.len() {
                    let new = text.strip_prefix(prefix.as_str()).unwrap_or_default();
                    let raw = added && *last_added && !self.spaces_between_special;
                    self.fresh.push_str(if raw { new.trim_start_matches(' ') } else { new });
                    ids.drain(..*shown);
                    *shown = ids.len();
                    *prefix = self.tokenizer.pipeline_decode(ids, false)?;
                }
                *last_added = added;
            }
        }
        Ok(&self.fresh)
    }

    /// Ends the text: what was held back because it was no whole character, as replacement characters.
    pub fn finish(mut self) -> Result<String, ModelError> {
        match &mut self.state {
            State::Bytes { pending, .. } => Ok(String::from_utf8_lossy(pending).into_owned()),
            State::Window { ids, shown, prefix, .. } => {
                if ids.len() == *shown {
                    return Ok(String::new());
                }
                let text = self.tokenizer.pipeline_decode(ids, false)?;
                Ok(text.strip_prefix(prefix.as_str()).unwrap_or_default().to_owned())
            }
        }
    }
}

/// Moves whole characters from `pending` to `out`, a replacement character for each run that can never become one;
/// the beginning of a character stays. The same text as decoding all bytes at once, lossily.
fn take_characters(pending: &mut Vec<u8>, out: &mut String) {
    let mut rest = pending.as_slice();
    loop {
        match std::str::from_utf8(rest) {
            Ok(text) => {
                out.push_str(text);
                rest = &[];
                break;
            }
            Err(error) => {
                let (valid, broken) = rest.split_at(error.valid_up_to());
                out.push_str(&String::from_utf8_lossy(valid));
                rest = broken;
                match error.error_len() {
                    Some(length) => {
                        out.push(char::REPLACEMENT_CHARACTER);
                        rest = &rest[length..];
                    }
                    None => break,
                }
            }
        }
    }
    let taken = pending.len() - rest.len();
    pending.drain(..taken);
}
