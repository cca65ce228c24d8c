//! The bytes each token stands for.
//!
//! Byte-level BPE and SentencePiece vocabularies join tokens by concatenating bytes, so a table of bytes is all that
//! decoding needs: exact, constant work per token, and a character that is split over tokens is just bytes not yet
//! complete. Other decoders (WordPiece, ...) stay with the library.

use serde_json::Value;

/// The character that stands for a space in SentencePiece vocabularies.
const SPACE_MARK: &str = "\u{2581}";

/// How a decoder joins tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Joining {
    /// Every byte is written as one character of the GPT-2 byte alphabet.
    ByteLevel,
    /// `▁` is a space, `<0xHH>` a byte; up to `strip` spaces at the start of a text are dropped.
    SentencePiece {
        /// Spaces dropped at the start.
        strip: usize,
        /// Whether `<0xHH>` tokens are bytes.
        byte_fallback: bool,
    },
    /// Whatever the library's decoder does.
    Library,
}

impl Joining {
    /// Recognises a decoder as `tokenizer.json` writes it.
    pub fn of_decoder(decoder: &Value) -> Self {
        let steps: Vec<&Value> = match (decoder.get("type").and_then(Value::as_str), decoder.get("decoders")) {
            (Some("Sequence"), Some(Value::Array(steps))) => steps.iter().collect(),
            _ => vec![decoder],
        };
        let kind = |step: &Value| step.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
        if steps.len() == 1 && kind(steps[0]) == "ByteLevel" {
            return Self::ByteLevel;
        }
        let (mut strip, mut byte_fallback, mut replaces) = (0, false, false);
        for step in steps {
            match kind(step).as_str() {
                "Replace" if step["pattern"]["String"] == SPACE_MARK && step["content"] == " " => replaces = true,
                "ByteFallback" => byte_fallback = true,
                "Fuse" => {}
                "Strip" if step["content"] == " " && step["stop"] == 0 => {
                    strip = step["start"].as_u64().unwrap_or(0) as usize;
                }
                _ => return Self::Library,
            }
        }
        if replaces { Self::SentencePiece { strip, byte_fallback } } else { Self::Library }
    }

    /// Appends what a token of the model's vocabulary stands for.
    fn append(self, token: &str, alphabet: &ByteAlphabet, out: &mut Vec<u8>) {
        match self {
            Self::ByteLevel => {
                let start = out.len();
                for character in token.chars() {
                    let Some(byte) = alphabet.byte(character) else {
                        // Not written in the alphabet: the token is plain text.
                        out.truncate(start);
                        out.extend_from_slice(token.as_bytes());
                        return;
                    };
                    out.push(byte);
                }
            }
            Self::SentencePiece { byte_fallback, .. } => match byte_token(token).filter(|_| byte_fallback) {
                Some(byte) => out.push(byte),
                None => out.extend_from_slice(token.replace(SPACE_MARK, " ").as_bytes()),
            },
            Self::Library => out.extend_from_slice(token.as_bytes()),
        }
    }
}

/// The byte of a `<0xHH>` token.
pub fn byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit()))
        .then(|| u8::from_str_radix(digits, 16).ok())
        .flatten()
}

/// GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for characters from U+0100 on.
struct ByteAlphabet {
    bytes: [Option<u8>; 324],
}

impl ByteAlphabet {
    fn new() -> Self {
        let mut bytes = [None; 324];
        let mut next = 256;
        for byte in 0..=255u8 {
            if matches!(byte, 33..=126 | 161..=172 | 174..=255) {
                bytes[byte as usize] = Some(byte);
            } else {
                bytes[next] = Some(byte);
                next += 1;
            }
        }
        Self { bytes }
    }

    fn byte(&self, character: char) -> Option<u8> {
        self.bytes.get(character as usize).copied().flatten()
    }
}

/// One token on its way into the table.
pub enum Entry<'a> {
    /// No token has this id.
    Hole,
    /// A token of the model, written as the vocabulary writes it.
    Model(&'a str),
    /// An added token: its text is what it says.
    Added(&'a str),
}

/// Bytes of all tokens, by id.
pub struct TokenText {
    joining: Joining,
    bytes: Vec<u8>,
    ends: Vec<u32>,
    holes: Vec<bool>,
}

impl TokenText {
    /// The table of all ids from 0 on.
    pub fn new<'a>(joining: Joining, entries: impl Iterator<Item = Entry<'a>>) -> Self {
        let alphabet = ByteAlphabet::new();
        let mut table = Self { joining, bytes: Vec::new(), ends: Vec::new(), holes: Vec::new() };
        for entry in entries {
            match entry {
                Entry::Hole => {}
                Entry::Model(token) => joining.append(token, &alphabet, &mut table.bytes),
                Entry::Added(token) => table.bytes.extend_from_slice(token.as_bytes()),
            }
            table.holes.push(matches!(entry, Entry::Hole));
            table.ends.push(table.bytes.len() as u32);
        }
        table
    }

    /// Ids the table covers.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether it covers no id.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Whether texts are concatenated bytes.
    pub fn is_bytewise(&self) -> bool {
        self.joining != Joining::Library
    }

    /// Spaces dropped at the start of a text.
    pub fn strip(&self) -> usize {
        match self.joining {
            Joining::SentencePiece { strip, .. } => strip,
            _ => 0,
        }
    }

    /// Bytes of a token; None for an id without one.
    pub fn bytes(&self, id: u32) -> Option<&[u8]> {
        let index = id as usize;
        if *self.holes.get(index)? {
            return None;
        }
        let start = if index == 0 { 0 } else { self.ends[index - 1] as usize };
        Some(&self.bytes[start..self.ends[index] as usize])
    }
}
