//! Logprobs in the shapes that the endpoints have: lists by token for completions, records for chat, vLLM's records for
//! prompts. They are many times as large as what they are made of, so they are made while they are written.

use std::sync::Arc;

use manylora::EngineHandle;
use manylora::sampler::{TokenLogprob, TokenLogprobs};
use serde::ser::{Serialize, SerializeStruct as _, Serializer};
use serde_json::{Map, Value, json};

/// JSON has no infinity: what is impossible has this logprob.
const LOWEST: f64 = -9999.0;

fn told(logprob: f32) -> f64 {
    f64::from(logprob).max(LOWEST)
}

/// Spells tokens.
#[derive(Clone, Debug)]
pub(crate) struct Speller {
    pub(crate) engine: EngineHandle,
    /// As `token_id:7`, which is unique, instead of the text, which is not.
    pub(crate) as_ids: bool,
}

impl Speller {
    pub(crate) fn text(&self, token: u32) -> String {
        match self.engine.tokenizer() {
            Ok(tokenizer) if !self.as_ids => tokenizer.token_text(token),
            _ => format!("token_id:{token}"),
        }
    }

    fn bytes(&self, token: u32, text: &str) -> Vec<u8> {
        let known = self.engine.tokenizer().ok().and_then(|tokenizer| tokenizer.token_bytes(token));
        known.map_or_else(|| text.as_bytes().to_vec(), <[u8]>::to_vec)
    }
}

/// A list that is made while it is written, and never there as a whole.
struct Each<F>(F);

impl<I: Iterator<Item: Serialize>, F: Fn() -> I> Serialize for Each<F> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq((self.0)())
    }
}

/// Logprobs of a prompt's tokens but the first.
pub(crate) type OfPrompt = Arc<[TokenLogprobs]>;

/// Logprobs of a completion: one item per token in each list.
#[derive(Debug)]
pub(crate) struct CompletionLogprobs {
    /// Where the first token begins in the text, in characters.
    begin: usize,
    /// The prompt, where it is a part of the text.
    prompt: Option<(Arc<[u32]>, OfPrompt)>,
    tokens: Vec<u32>,
    positions: Vec<TokenLogprobs>,
    /// Most likely tokens to list.
    most: usize,
    speller: Speller,
}

impl CompletionLogprobs {
    pub(crate) fn new(begin: usize, most: usize, speller: Speller) -> Self {
        Self { begin, prompt: None, tokens: Vec::new(), positions: Vec::new(), most, speller }
    }

    /// Begins with a prompt.
    pub(crate) fn echo(&mut self, prompt: Arc<[u32]>, known: OfPrompt) {
        self.prompt = Some((prompt, known));
    }

    /// Adds the tokens of a sample.
    pub(crate) fn extend(&mut self, tokens: &[u32], positions: Vec<TokenLogprobs>) {
        self.tokens.extend_from_slice(tokens);
        self.positions.extend(positions);
    }

    /// Tokens with what is known of them: of a prompt's first one nothing.
    fn all(&self) -> impl Iterator<Item = (u32, Option<&TokenLogprobs>)> {
        let prompt = self.prompt.iter().flat_map(|(prompt, known)| {
            prompt.iter().copied().zip(std::iter::once(None).chain(known.iter().map(Some)))
        });
        prompt.chain(self.tokens.iter().copied().zip(self.positions.iter().map(Some)))
    }

    /// Where each token ends in the text, in characters.
    fn ends(&self) -> impl Iterator<Item = usize> {
        let lengths = self.all().map(|(token, _)| self.speller.text(token).chars().count());
        lengths.scan(self.begin, |end, length| {
            *end += length;
            Some(*end)
        })
    }

    /// Where the last token ends.
    pub(crate) fn end(&self) -> usize {
        self.ends().last().unwrap_or(self.begin)
    }
}

impl Serialize for CompletionLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let count = self.all().count();
        let offsets = || std::iter::once(self.begin).chain(self.ends()).take(count);
        let listed = |logprobs: &TokenLogprobs| -> Map<String, Value> {
            // Tokens that are spelled alike are one.
            let listed = logprobs.entries.iter().take(self.most.saturating_add(1));
            listed.map(|entry| (self.speller.text(entry.token), json!(told(entry.logprob)))).collect()
        };
        let mut lists = serializer.serialize_struct("Logprobs", 4)?;
        lists.serialize_field("text_offset", &Each(offsets))?;
        let chosen = || self.all().map(|(_, logprobs)| logprobs.map(|logprobs| told(logprobs.chosen())));
        lists.serialize_field("token_logprobs", &Each(chosen))?;
        lists.serialize_field("tokens", &Each(|| self.all().map(|(token, _)| self.speller.text(token))))?;
        lists.serialize_field("top_logprobs", &Each(|| self.all().map(|(_, logprobs)| logprobs.map(listed))))?;
        lists.end()
    }
}

/// A token of chat logprobs.
#[derive(serde::Serialize)]
struct ChatLogprob {
    token: String,
    logprob: f64,
    bytes: Vec<u8>,
}

/// A chosen token of chat logprobs, with the most likely ones.
#[derive(serde::Serialize)]
struct ChosenLogprob {
    #[serde(flatten)]
    chosen: ChatLogprob,
    top_logprobs: Vec<ChatLogprob>,
}

/// Logprobs of a chat message.
#[derive(Debug)]
pub(crate) struct ChatLogprobs {
    pub(crate) positions: Vec<TokenLogprobs>,
    /// Most likely tokens to list.
    pub(crate) most: usize,
    pub(crate) speller: Speller,
}

impl Serialize for ChatLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { positions, most, speller } = self;
        let one = |entry: &TokenLogprob| {
            let token = speller.text(entry.token);
            ChatLogprob { bytes: speller.bytes(entry.token, &token), token, logprob: told(entry.logprob) }
        };
        let position = |logprobs: &TokenLogprobs| {
            let chosen = logprobs.entries.first().map(one)?;
            // The chosen one takes its place among the others by its rank.
            let mut listed: Vec<&TokenLogprob> = logprobs.entries.iter().collect();
            listed.sort_by_key(|entry| (entry.rank, entry.token));
            Some(ChosenLogprob { chosen, top_logprobs: listed.into_iter().take(*most).map(one).collect() })
        };
        let mut message = serializer.serialize_struct("Logprobs", 1)?;
        message.serialize_field("content", &Each(|| positions.iter().filter_map(position)))?;
        message.end()
    }
}

/// vLLM's record of a token that a prompt might have had.
#[derive(serde::Serialize)]
struct PromptLogprob {
    logprob: f64,
    rank: u32,
    decoded_token: String,
}

/// vLLM's `prompt_logprobs`: null for the first token, then records by token id; null where nothing is known.
#[derive(Debug)]
pub(crate) struct PromptLogprobs {
    pub(crate) known: Option<OfPrompt>,
    pub(crate) speller: Speller,
}

/// Of one token.
struct Records<'a>(&'a TokenLogprobs, &'a Speller);

impl Serialize for Records<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.entries.iter().map(|&TokenLogprob { token, logprob, rank }| {
            (token, PromptLogprob { logprob: told(logprob), rank, decoded_token: self.1.text(token) })
        }))
    }
}

impl Serialize for PromptLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Some(known) = &self.known else { return serializer.serialize_none() };
        let records = known.iter().map(|position| Some(Records(position, &self.speller)));
        serializer.collect_seq(std::iter::once(None).chain(records))
    }
}
