//! The key/value part of a GGUF file, with typed getters: the model's shape, its names and its tokenizer live here.
//!
//! Depends on nothing but the standard library, so that it can be fuzzed alone together with the header's parser.

use std::collections::BTreeMap;
use std::fmt;

/// Why a GGUF file was refused: what is broken, with the value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufError(pub String);

impl fmt::Display for GgufError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for GgufError {}

/// A metadata value. Arrays are held at the file's own width, so that memory stays within a small multiple of the
/// header's bytes.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    /// Any unsigned integer.
    Unsigned(u64),
    /// Any signed integer.
    Signed(i64),
    /// Either float.
    Float(f64),
    /// Boolean.
    Bool(bool),
    /// String.
    Text(String),
    /// Array of u8.
    U8s(Vec<u8>),
    /// Array of i8.
    I8s(Vec<i8>),
    /// Array of u16.
    U16s(Vec<u16>),
    /// Array of i16.
    I16s(Vec<i16>),
    /// Array of u32.
    U32s(Vec<u32>),
    /// Array of i32.
    I32s(Vec<i32>),
    /// Array of u64.
    U64s(Vec<u64>),
    /// Array of i64.
    I64s(Vec<i64>),
    /// Array of f32.
    F32s(Vec<f32>),
    /// Array of f64.
    F64s(Vec<f64>),
    /// Array of booleans.
    Bools(Vec<bool>),
    /// Array of strings.
    Texts(Vec<String>),
}

impl GgufValue {
    /// What the value is, for messages.
    fn kind(&self) -> &'static str {
        match self {
            Self::Unsigned(_) | Self::Signed(_) => "an integer",
            Self::Float(_) => "a float",
            Self::Bool(_) => "a boolean",
            Self::Text(_) => "a string",
            Self::F32s(_) | Self::F64s(_) => "an array of floats",
            Self::Bools(_) => "an array of booleans",
            Self::Texts(_) => "an array of strings",
            _ => "an array of integers",
        }
    }
}

/// All metadata of one file. Absent keys are `None`; a key of another type than asked for is an error that names it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufMetadata {
    values: BTreeMap<String, GgufValue>,
}

type Getter<T> = Result<Option<T>, GgufError>;

impl GgufMetadata {
    /// Adds a value; a key that is already there is refused.
    pub fn insert(&mut self, key: String, value: GgufValue) -> Result<(), GgufError> {
        if self.values.contains_key(&key) {
            return Err(GgufError(format!("the metadata key `{}` appears twice", shown(&key))));
        }
        self.values.insert(key, value);
        Ok(())
    }

    /// The value as it is.
    pub fn get(&self, key: &str) -> Option<&GgufValue> {
        self.values.get(key)
    }

    /// All keys, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.values.keys().map(String::as_str)
    }

    /// A string.
    pub fn text(&self, key: &str) -> Getter<&str> {
        match self.values.get(key) {
            None => Ok(None),
            Some(GgufValue::Text(text)) => Ok(Some(text)),
            Some(other) => Err(wrong(key, "a string", other)),
        }
    }

    /// A boolean.
    pub fn bool(&self, key: &str) -> Getter<bool> {
        match self.values.get(key) {
            None => Ok(None),
            Some(GgufValue::Bool(value)) => Ok(Some(*value)),
            Some(other) => Err(wrong(key, "a boolean", other)),
        }
    }

    /// A non-negative integer, whatever its width in the file.
    pub fn u64(&self, key: &str) -> Getter<u64> {
        match self.values.get(key) {
            None => Ok(None),
            Some(GgufValue::Unsigned(value)) => Ok(Some(*value)),
            Some(GgufValue::Signed(value)) => match u64::try_from(*value) {
                Ok(value) => Ok(Some(value)),
                Err(_) => Err(GgufError(format!("the metadata key `{key}` is `{value}`, which is negative"))),
            },
            Some(other) => Err(wrong(key, "an integer", other)),
        }
    }

    /// A non-negative integer that fits 32 bits, whatever its width in the file.
    pub fn u32(&self, key: &str) -> Getter<u32> {
        match self.u64(key)? {
            None => Ok(None),
            Some(value) => match u32::try_from(value) {
                Ok(value) => Ok(Some(value)),
                Err(_) => Err(GgufError(format!("the metadata key `{key}` is `{value}`, which is beyond 32 bits"))),
            },
        }
    }

    /// A number as f64: floats of either width, or an integer.
    pub fn f64(&self, key: &str) -> Getter<f64> {
        match self.values.get(key) {
            None => Ok(None),
            Some(GgufValue::Float(value)) => Ok(Some(*value)),
            Some(GgufValue::Unsigned(value)) => Ok(Some(*value as f64)),
            Some(other) => Err(wrong(key, "a float", other)),
        }
    }

    /// A number as f32.
    pub fn f32(&self, key: &str) -> Getter<f32> {
        self.f64(key).map(|value| value.map(|value| value as f32))
    }

    /// An array of strings.
    pub fn texts(&self, key: &str) -> Getter<&[String]> {
        match self.values.get(key) {
            None => Ok(None),
            Some(GgufValue::Texts(values)) => Ok(Some(values)),
            Some(other) => Err(wrong(key, "an array of strings", other)),
        }
    }

    /// An array of booleans.
    pub fn bools(&self, key: &str) -> Getter<&[bool]> {
        match self.values.get(key) {
            None => Ok(None),
            Some(GgufValue::Bools(values)) => Ok(Some(values)),
            Some(other) => Err(wrong(key, "an array of booleans", other)),
        }
    }

    /// An array of 32-bit floats.
    pub fn f32s(&self, key: &str) -> Getter<&[f32]> {
        match self.values.get(key) {
            None => Ok(None),
            Some(GgufValue::F32s(values)) => Ok(Some(values)),
            Some(other) => Err(wrong(key, "an array of 32-bit floats", other)),
        }
    }

    /// An array of integers of any width and sign.
    pub fn integers(&self, key: &str) -> Getter<Vec<i64>> {
        fn widen<T: Copy + Into<i64>>(values: &[T]) -> Vec<i64> {
            values.iter().map(|&value| value.into()).collect()
        }
        Ok(Some(match self.values.get(key) {
            None => return Ok(None),
            Some(GgufValue::U8s(values)) => widen(values),
            Some(GgufValue::I8s(values)) => widen(values),
            Some(GgufValue::U16s(values)) => widen(values),
            Some(GgufValue::I16s(values)) => widen(values),
            Some(GgufValue::U32s(values)) => widen(values),
            Some(GgufValue::I32s(values)) => widen(values),
            Some(GgufValue::I64s(values)) => values.clone(),
            Some(GgufValue::U64s(values)) => values
                .iter()
                .map(|&value| i64::try_from(value))
                .collect::<Result<_, _>>()
                .map_err(|_| GgufError(format!("the metadata key `{key}` holds an integer beyond 63 bits")))?,
            Some(other) => return Err(wrong(key, "an array of integers", other)),
        }))
    }

    /// As a getter's result, but absence is an error too.
    pub fn require<T>(key: &str, value: Getter<T>) -> Result<T, GgufError> {
        value?.ok_or_else(|| GgufError(format!("the metadata key `{key}` is missing")))
    }
}

fn wrong(key: &str, wanted: &str, found: &GgufValue) -> GgufError {
    GgufError(format!("the metadata key `{key}` should be {wanted} and is {}", found.kind()))
}

/// A name from the file, cut to what a message can bear.
pub fn shown(name: &str) -> String {
    match name.char_indices().nth(80) {
        Some((end, _)) => format!("{}...", &name[..end]),
        None => name.to_owned(),
    }
}
