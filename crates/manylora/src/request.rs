//! What a caller asks for.

use std::sync::Arc;

use manylora_core::SamplingParams;

/// Text or token ids.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Text, encoded with the model's tokenizer; `add_special_tokens` as the tokenizer defines them.
    Text {
        /// The text.
        text: String,
        /// Whether BOS and the like are added.
        add_special_tokens: bool,
    },
    /// Token ids, taken as they are.
    Tokens(Vec<u32>),
}

/// One adapter of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterSelection {
    /// Name on the shelf.
    pub name: String,
    /// Strength: 1 = as trained, 0 = not at all.
    pub scale: f32,
}

/// A prompt, its sampling parameters and its adapters.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateRequest {
    /// The prompt.
    pub prompt: Prompt,
    /// How to sample. Requests that share them are checked, and their grammar is looked for, once.
    pub params: Arc<SamplingParams>,
    /// Adapters, summed in this order; none = the base.
    pub adapters: Vec<AdapterSelection>,
    /// Lower runs first under the priority policy.
    pub priority: i64,
    /// Keeps KV blocks of different tenants apart.
    pub cache_salt: Option<String>,
    /// Whose share of a fair service it takes; None = its first adapter's, or the base's.
    pub tenant: Option<String>,
}

impl GenerateRequest {
    /// A request for text, with default sampling.
    pub fn text(text: impl Into<String>) -> Self {
        Self::new(Prompt::Text { text: text.into(), add_special_tokens: true })
    }

    /// A request for token ids, with default sampling.
    pub fn tokens(tokens: impl Into<Vec<u32>>) -> Self {
        Self::new(Prompt::Tokens(tokens.into()))
    }

    fn new(prompt: Prompt) -> Self {
        Self { prompt, params: Arc::default(), adapters: Vec::new(), priority: 0, cache_salt: None, tenant: None }
    }

    /// Adds an adapter at full strength.
    #[must_use]
    pub fn adapter(self, name: impl Into<String>) -> Self {
        self.adapter_scaled(name, 1.0)
    }

    /// Adds an adapter with a strength.
    #[must_use]
    pub fn adapter_scaled(mut self, name: impl Into<String>, scale: f32) -> Self {
        self.adapters.push(AdapterSelection { name: name.into(), scale });
        self
    }

    /// Sets the sampling parameters.
    #[must_use]
    pub fn params(mut self, params: impl Into<Arc<SamplingParams>>) -> Self {
        self.params = params.into();
        self
    }
}
