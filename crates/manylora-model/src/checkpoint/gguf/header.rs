//! The GGUF header (versions 2 and 3): metadata and tensor directory, parsed from bytes that are not trusted.
//!
//! Every count and length is checked against what is left of the file before anything is allocated for it, so that
//! memory stays within a small multiple of the header's true size; nothing here panics. Depends on nothing but the
//! standard library and [`super::metadata`]. Source of the layout: ggml's `docs/gguf.md`.

use std::collections::HashSet;

use super::metadata::{GgufError, GgufMetadata, GgufValue, shown};

/// Most metadata entries of a file; real ones have under a hundred.
const MAX_ENTRIES: u64 = 1 << 16;
/// Most tensors of a file; real ones have a few thousand.
const MAX_TENSORS: u64 = 1 << 18;
/// Most dimensions of a tensor, as in ggml.
const MAX_DIMENSIONS: u32 = 4;
/// Longest key or tensor name, as in the specification.
const MAX_NAME: usize = 65535;
/// Alignment of the data when the metadata does not say.
const DEFAULT_ALIGNMENT: u64 = 32;
/// Largest alignment that is believed.
const MAX_ALIGNMENT: u64 = 1 << 20;

/// How a tensor's elements are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgmlType {
    /// IEEE single
    F32,
    /// IEEE half
    F16,
    /// bfloat16
    Bf16,
    /// blocks of 32, 4 bits, one scale
    Q4_0,
    /// blocks of 32, 4 bits, scale and minimum
    Q4_1,
    /// blocks of 32, 5 bits, one scale
    Q5_0,
    /// blocks of 32, 5 bits, scale and minimum
    Q5_1,
    /// blocks of 32, 8 bits, one scale
    Q8_0,
    /// super-blocks of 256, 2 bits
    Q2K,
    /// super-blocks of 256, 3 bits
    Q3K,
    /// super-blocks of 256, 4 bits
    Q4K,
    /// super-blocks of 256, 5 bits
    Q5K,
    /// super-blocks of 256, 6 bits
    Q6K,
}

impl GgmlType {
    /// Names of all types that load, for messages.
    pub const SUPPORTED: &'static str = "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K and Q6_K";

    fn from_code(code: u32) -> Result<Self, GgufError> {
        Ok(match code {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            10 => Self::Q2K,
            11 => Self::Q3K,
            12 => Self::Q4K,
            13 => Self::Q5K,
            14 => Self::Q6K,
            30 => Self::Bf16,
            _ => {
                let name = match code {
                    9 => "Q8_1",
                    15 => "Q8_K",
                    16 => "IQ2_XXS",
                    17 => "IQ2_XS",
                    18 => "IQ3_XXS",
                    19 => "IQ1_S",
                    20 => "IQ4_NL",
                    21 => "IQ3_S",
                    22 => "IQ2_S",
                    23 => "IQ4_XS",
                    24 => "I8",
                    25 => "I16",
                    26 => "I32",
                    27 => "I64",
                    28 => "F64",
                    29 => "IQ1_M",
                    34 => "TQ1_0",
                    35 => "TQ2_0",
                    39 => "MXFP4",
                    40 => "NVFP4",
                    _ => "unknown",
                };
                return Err(GgufError(format!(
                    "tensor type `{name}` (code {code}) is not supported; supported are {}",
                    Self::SUPPORTED
                )));
            }
        })
    }

    /// The type's usual name.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q2K => "Q2_K",
            Self::Q3K => "Q3_K",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
        }
    }

    /// Elements of one block.
    pub fn block_elements(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }
}

/// One tensor of the directory, checked to lie inside the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor {
    /// Name in the file: `blk.0.attn_q.weight`.
    pub name: String,
    /// How it is stored.
    pub kind: GgmlType,
    /// Rows: the product of all dimensions but the first (fastest) one.
    pub rows: usize,
    /// Columns: the first (fastest) dimension, a whole number of blocks.
    pub columns: usize,
    /// Number of dimensions.
    pub dimensions: usize,
    /// First byte, counted from the start of the file.
    pub start: usize,
    /// Bytes.
    pub bytes: usize,
}

impl GgufTensor {
    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.columns / self.kind.block_elements() * self.kind.block_bytes()
    }
}

/// A parsed header.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufHeader {
    /// Version of the format: 2 or 3.
    pub version: u32,
    /// Metadata.
    pub metadata: GgufMetadata,
    /// Tensors in the file's order.
    pub tensors: Vec<GgufTensor>,
}

impl GgufHeader {
    /// Parses the header of a whole file.
    pub fn parse(file: &[u8]) -> Result<Self, GgufError> {
        let mut reader = Reader { bytes: file, at: 0 };
        match reader.take(4, "the magic")? {
            b"GGUF" => {}
            b"FUGG" => return Err(broken("the file is a big-endian GGUF; convert it to little-endian".to_owned())),
            other => {
                return Err(broken(format!("the file does not start with `GGUF` but with `{}`", other.escape_ascii())));
            }
        }
        let version = reader.u32("the version")?;
        if !matches!(version, 2 | 3) {
            let why = match version {
                1 => "version 1 was used for a few weeks in 2023: convert the model again",
                _ if matches!(version.swap_bytes(), 1..=3) => "the file is big-endian: convert it to little-endian",
                _ => "supported are 2 and 3",
            };
            return Err(broken(format!("GGUF version `{version}` is not supported: {why}")));
        }
        let tensor_count = reader.u64("the number of tensors")?;
        let entry_count = reader.u64("the number of metadata entries")?;
        // The least an entry takes is a key's length, one character, a type and one byte; a tensor takes a name's
        // length, one character, a dimension count, one dimension, a type and an offset.
        reader.count(entry_count, 14, MAX_ENTRIES, "metadata entries")?;
        reader.count(tensor_count, 33, MAX_TENSORS, "tensors")?;
        let mut metadata = GgufMetadata::default();
        for _ in 0..entry_count {
            let key = reader.name("a metadata key")?;
            let value = reader.value(&key)?;
            metadata.insert(key, value)?;
        }
        let alignment = metadata.u64("general.alignment")?.unwrap_or(DEFAULT_ALIGNMENT);
        if !alignment.is_multiple_of(8) || alignment == 0 || alignment > MAX_ALIGNMENT {
            return Err(broken(format!(
                "`general.alignment` is `{alignment}`; it must be a multiple of 8, at most {MAX_ALIGNMENT}"
            )));
        }
        let mut tensors = Vec::new();
        let mut names = HashSet::new();
        for _ in 0..tensor_count {
            let tensor = reader.tensor(alignment)?;
            if !names.insert(tensor.name.clone()) {
                return Err(broken(format!("the tensor `{}` appears twice", shown(&tensor.name))));
            }
            tensors.push(tensor);
        }
        let data = (reader.at as u64).next_multiple_of(alignment);
        place(&mut tensors, data, file.len() as u64)?;
        Ok(Self { version, metadata, tensors })
    }
}

/// Turns offsets into places in the file, and refuses what lies outside or overlaps.
fn place(tensors: &mut [GgufTensor], data: u64, file: u64) -> Result<(), GgufError> {
    for tensor in tensors.iter_mut() {
        let end = data
            .checked_add(tensor.start as u64)
            .and_then(|start| start.checked_add(tensor.bytes as u64))
            .filter(|&end| end <= file);
        let Some(end) = end else {
            return Err(broken(format!(
                "the tensor `{}` has {} bytes at offset {} of the data, which starts at {data}: beyond the end of the \
                 file at {file}; the download may be incomplete",
                shown(&tensor.name),
                tensor.bytes,
                tensor.start
            )));
        };
        tensor.start = to_usize(end)? - tensor.bytes;
    }
    let mut order: Vec<&GgufTensor> = tensors.iter().collect();
    order.sort_by_key(|tensor| tensor.start);
    for pair in order.windows(2) {
        if pair[0].start + pair[0].bytes > pair[1].start {
            return Err(broken(format!(
                "the tensors `{}` and `{}` overlap",
                shown(&pair[0].name),
                shown(&pair[1].name)
            )));
        }
    }
    Ok(())
}

fn broken(message: String) -> GgufError {
    GgufError(message)
}

fn to_usize(value: u64) -> Result<usize, GgufError> {
    usize::try_from(value).map_err(|_| broken(format!("`{value}` is more than this machine can address")))
}

/// A position in the file that never runs past its end.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn take(&mut self, length: usize, what: &str) -> Result<&'a [u8], GgufError> {
        if length > self.left() {
            return Err(broken(format!(
                "the file ends inside {what}: {length} bytes are needed at {} and {} are left",
                self.at,
                self.left()
            )));
        }
        let taken = &self.bytes[self.at..self.at + length];
        self.at += length;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], GgufError> {
        let taken = self.take(N, what)?;
        taken.try_into().map_err(|_| broken(format!("the file ends inside {what}")))
    }

    fn u32(&mut self, what: &str) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// Checks a count of things that take at least `least` bytes each.
    fn count(&self, count: u64, least: usize, most: u64, what: &str) -> Result<usize, GgufError> {
        let fits = count <= most && count.checked_mul(least as u64).is_some_and(|bytes| bytes <= self.left() as u64);
        if !fits {
            return Err(broken(format!(
                "`{count}` {what} cannot be true: {} bytes are left and {most} is the limit",
                self.left()
            )));
        }
        to_usize(count)
    }

    fn text_bytes(&mut self, what: &str) -> Result<&'a [u8], GgufError> {
        let length = self.u64(what)?;
        let length = self.count(length, 1, u64::MAX, &format!("bytes of {what}"))?;
        self.take(length, what)
    }

    /// A key or tensor name: UTF-8, not empty, of bearable length.
    fn name(&mut self, what: &str) -> Result<String, GgufError> {
        let bytes = self.text_bytes(what)?;
        if bytes.is_empty() || bytes.len() > MAX_NAME {
            return Err(broken(format!("{what} has {} bytes; 1 to {MAX_NAME} are possible", bytes.len())));
        }
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(text.to_owned()),
            Err(_) => Err(broken(format!("{what} at {} is not UTF-8", self.at))),
        }
    }

    fn value(&mut self, key: &str) -> Result<GgufValue, GgufError> {
        let what = format!("the value of `{}`", shown(key));
        let kind = self.u32(&what)?;
        Ok(match kind {
            0 => GgufValue::Unsigned(u64::from(u8::from_le_bytes(self.array(&what)?))),
            1 => GgufValue::Signed(i64::from(i8::from_le_bytes(self.array(&what)?))),
            2 => GgufValue::Unsigned(u64::from(u16::from_le_bytes(self.array(&what)?))),
            3 => GgufValue::Signed(i64::from(i16::from_le_bytes(self.array(&what)?))),
            4 => GgufValue::Unsigned(u64::from(self.u32(&what)?)),
            5 => GgufValue::Signed(i64::from(i32::from_le_bytes(self.array(&what)?))),
            6 => GgufValue::Float(f64::from(f32::from_le_bytes(self.array(&what)?))),
            7 => GgufValue::Bool(bool_of(self.array::<1>(&what)?[0], &what)?),
            // Descriptions are for people: what is not UTF-8 in them is replaced.
            8 => GgufValue::Text(String::from_utf8_lossy(self.text_bytes(&what)?).into_owned()),
            9 => self.values(&what)?,
            10 => GgufValue::Unsigned(self.u64(&what)?),
            11 => GgufValue::Signed(i64::from_le_bytes(self.array(&what)?)),
            12 => GgufValue::Float(f64::from_le_bytes(self.array(&what)?)),
            _ => return Err(broken(format!("{what} has the unknown type `{kind}`"))),
        })
    }

    fn values(&mut self, what: &str) -> Result<GgufValue, GgufError> {
        let kind = self.u32(what)?;
        let count = self.u64(what)?;
        let width = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => return Err(broken(format!("{what} is an array of arrays, which no supported model uses"))),
            _ => return Err(broken(format!("{what} is an array of the unknown type `{kind}`"))),
        };
        let count = self.count(count, width, u64::MAX, &format!("elements of {what}"))?;
        if kind == 8 {
            let mut texts = Vec::new();
            for _ in 0..count {
                let bytes = self.text_bytes(what)?;
                // Two tokens must not become one by replacement.
                let text = std::str::from_utf8(bytes)
                    .map_err(|_| broken(format!("{what} holds a string that is not UTF-8, at {}", self.at)))?;
                texts.push(text.to_owned());
            }
            return Ok(GgufValue::Texts(texts));
        }
        let bytes = self.take(count * width, what)?;
        Ok(match kind {
            0 => GgufValue::U8s(bytes.to_vec()),
            1 => GgufValue::I8s(numbers(bytes, i8::from_le_bytes)),
            2 => GgufValue::U16s(numbers(bytes, u16::from_le_bytes)),
            3 => GgufValue::I16s(numbers(bytes, i16::from_le_bytes)),
            4 => GgufValue::U32s(numbers(bytes, u32::from_le_bytes)),
            5 => GgufValue::I32s(numbers(bytes, i32::from_le_bytes)),
            6 => GgufValue::F32s(numbers(bytes, f32::from_le_bytes)),
            7 => GgufValue::Bools(bytes.iter().map(|&byte| bool_of(byte, what)).collect::<Result<_, _>>()?),
            10 => GgufValue::U64s(numbers(bytes, u64::from_le_bytes)),
            11 => GgufValue::I64s(numbers(bytes, i64::from_le_bytes)),
            _ => GgufValue::F64s(numbers(bytes, f64::from_le_bytes)),
        })
    }

    /// One entry of the directory; `start` is still the offset in the data.
    fn tensor(&mut self, alignment: u64) -> Result<GgufTensor, GgufError> {
        let name = self.name("a tensor's name")?;
        let what = format!("the tensor `{}`", shown(&name));
        let dimensions = self.u32(&what)?;
        if dimensions == 0 || dimensions > MAX_DIMENSIONS {
            return Err(broken(format!("{what} has `{dimensions}` dimensions; 1 to {MAX_DIMENSIONS} are possible")));
        }
        let columns = self.u64(&what)?;
        let mut rows = 1u64;
        for _ in 1..dimensions {
            let size = self.u64(&what)?;
            rows = rows.checked_mul(size).ok_or_else(|| broken(format!("{what} has too many elements")))?;
        }
        let code = self.u32(&what)?;
        let kind = GgmlType::from_code(code).map_err(|error| broken(format!("{what}: {error}")))?;
        let offset = self.u64(&what)?;
        if rows == 0 || columns == 0 {
            return Err(broken(format!("{what} is empty")));
        }
        let block = kind.block_elements() as u64;
        if !columns.is_multiple_of(block) {
            return Err(broken(format!(
                "{what} has rows of {columns} elements, which is no multiple of {}'s block of {block}",
                kind.name()
            )));
        }
        if !offset.is_multiple_of(alignment) {
            return Err(broken(format!("{what} is at offset `{offset}`, which is no multiple of {alignment}")));
        }
        let bytes = (columns / block)
            .checked_mul(kind.block_bytes() as u64)
            .and_then(|row| row.checked_mul(rows))
            // Elements as f32 must be addressable too.
            .filter(|_| columns.checked_mul(rows).is_some_and(|elements| elements < u64::MAX / 8))
            .ok_or_else(|| broken(format!("{what} has too many elements")))?;
        Ok(GgufTensor {
            name,
            kind,
            rows: to_usize(rows)?,
            columns: to_usize(columns)?,
            dimensions: dimensions as usize,
            start: to_usize(offset)?,
            bytes: to_usize(bytes)?,
        })
    }
}

fn bool_of(byte: u8, what: &str) -> Result<bool, GgufError> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(broken(format!("{what} holds the boolean `{byte}`; 0 and 1 are possible"))),
    }
}

fn numbers<T, const N: usize>(bytes: &[u8], convert: fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|&chunk| convert(chunk)).collect()
}
