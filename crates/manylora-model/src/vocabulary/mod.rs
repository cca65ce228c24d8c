//! What a tokenizer is made of, read from files that are not trusted and checked: the half of `tokenizer` that needs no
//! tokenizer library, so that it can be fuzzed alone.
//!
//! [`gguf`] makes a vocabulary and its merges of GGUF metadata, [`hugging_face`] checks `tokenizer.json` before the
//! library reads it and finds the tokens that the files beside it add, [`token_text`] knows the bytes that a token
//! stands for.

pub mod gguf;
pub mod hugging_face;
pub mod token_text;

pub use gguf::GgufVocabulary;
