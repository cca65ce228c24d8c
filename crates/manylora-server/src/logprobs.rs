//! Logprobs in the shapes that the endpoints have: lists by token for completions, records for chat, vLLM's records for
//! prompts.

use manylora::EngineHandle;
use manylora::sampler::{TokenLogprob, TokenLogprobs};
use serde::Serialize;
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

/// Logprobs of a completion: one item per token in each list.
#[derive(Debug, Default, Serialize)]
pub(crate) struct CompletionLogprobs {
    text_offset: Vec<usize>,
    token_logprobs: Vec<Option<f64>>,
    tokens: Vec<String>,
    top_logprobs: Vec<Option<Map<String, Value>>>,
}

impl CompletionLogprobs {
    /// Adds a token; `offset` is where it begins in the text, in characters, and becomes where it ends.
    pub(crate) fn push(
        &mut self,
        token: u32,
        logprobs: Option<&TokenLogprobs>,
        most: usize,
        offset: &mut usize,
        speller: &Speller,
    ) {
        let text = speller.text(token);
        self.text_offset.push(*offset);
        *offset += text.chars().count();
        self.tokens.push(text);
        self.token_logprobs.push(logprobs.map(|logprobs| told(logprobs.chosen())));
        self.top_logprobs.push(logprobs.map(|logprobs| {
            let listed = logprobs.entries.iter().take(most.saturating_add(1));
            listed.map(|entry| (speller.text(entry.token), json!(told(entry.logprob)))).collect()
        }));
    }
}

/// A token of chat logprobs.
#[derive(Debug, Serialize)]
pub(crate) struct ChatLogprob {
    token: String,
    logprob: f64,
    bytes: Vec<u8>,
}

/// A chosen token of chat logprobs, with the most likely ones.
#[derive(Debug, Serialize)]
pub(crate) struct ChosenLogprob {
    #[serde(flatten)]
    chosen: ChatLogprob,
    top_logprobs: Vec<ChatLogprob>,
}

/// Logprobs of a chat message.
#[derive(Debug, Serialize)]
pub(crate) struct ChatLogprobs {
    pub(crate) content: Vec<ChosenLogprob>,
}

impl ChatLogprobs {
    pub(crate) fn new(positions: &[TokenLogprobs], most: usize, speller: &Speller) -> Self {
        let one = |entry: &TokenLogprob| {
            let token = speller.text(entry.token);
            ChatLogprob { bytes: speller.bytes(entry.token, &token), token, logprob: told(entry.logprob) }
        };
        let position = |logprobs: &TokenLogprobs| {
            let chosen = logprobs.entries.first().map(one)?;
            // The chosen one takes its place among the others by its rank.
            let mut listed: Vec<&TokenLogprob> = logprobs.entries.iter().collect();
            listed.sort_by_key(|entry| (entry.rank, entry.token));
            Some(ChosenLogprob { chosen, top_logprobs: listed.into_iter().take(most).map(one).collect() })
        };
        Self { content: positions.iter().filter_map(position).collect() }
    }
}

/// vLLM's `prompt_logprobs`: null for the first token, then records by token id.
pub(crate) fn of_prompt(positions: &[TokenLogprobs], speller: &Speller) -> Value {
    let record = |entry: &TokenLogprob| {
        let value = json!({
            "logprob": told(entry.logprob), "rank": entry.rank, "decoded_token": speller.text(entry.token),
        });
        (entry.token.to_string(), value)
    };
    let records = positions.iter().map(|logprobs| Value::Object(logprobs.entries.iter().map(record).collect()));
    std::iter::once(Value::Null).chain(records).collect()
}
