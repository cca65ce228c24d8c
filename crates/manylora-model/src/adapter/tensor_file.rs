//! The header of an untrusted safetensors file, within bounds, with faults that name the tensor.

use std::io::{Cursor, Read, Seek, SeekFrom};

use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde_json::Value;

use super::fault::Fault;
use super::report::LoadReport;
use crate::error::AdapterRefusal;

/// Largest header that is read: ten times what an adapter of a thousand layers needs.
pub const MAX_HEADER_BYTES: u64 = 16 << 20;

/// One tensor of an adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorEntry {
    /// Its key.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Where its bytes begin in the file.
    pub offset: u64,
    /// How many bytes it has.
    pub bytes: usize,
}

/// The tensors of a safetensors file in memory, under the same checks as one on disk.
pub fn tensors_of(file: &[u8]) -> Result<Vec<TensorEntry>, AdapterRefusal> {
    read_header(&mut Cursor::new(file), file.len() as u64, "the tensor file")
        .map_err(|fault| fault.into_refusal(LoadReport::default()))
}

/// Reads and checks the header of `file`, which is `length` bytes long. Nothing beyond the header is read, and no
/// more memory is taken than the file's own size and [`MAX_HEADER_BYTES`] allow.
pub(super) fn read_header(file: &mut (impl Read + Seek), length: u64, what: &str) -> Result<Vec<TensorEntry>, Fault> {
    let damaged = |message: String| Fault::invalid(format!("`{what}` is damaged: {message}")).key(what);
    if length < 8 {
        return Err(damaged(format!("{length} bytes are too few for a safetensors file; copy it again")));
    }
    let mut size = [0_u8; 8];
    file.seek(SeekFrom::Start(0))
        .and_then(|_| file.read_exact(&mut size))
        .map_err(|error| damaged(error.to_string()))?;
    let size = u64::from_le_bytes(size);
    if size > MAX_HEADER_BYTES {
        return Err(damaged(format!("it declares a header of {size} bytes; at most {MAX_HEADER_BYTES} are read")));
    }
    if size > length - 8 {
        return Err(damaged(format!("file truncated: a header of {size} bytes is declared and {} follow", length - 8)));
    }
    let mut header = vec![0_u8; size as usize];
    file.read_exact(&mut header).map_err(|error| damaged(error.to_string()))?;
    parse_header(&header, length - 8 - size).map_err(|(message, key)| {
        Fault::invalid(format!("`{what}` is damaged: {message}")).key(key.unwrap_or_else(|| what.to_owned()))
    })
}

type Problem = (String, Option<String>);

/// Parses a header whose tensors must cover exactly `data` bytes.
fn parse_header(header: &[u8], data: u64) -> Result<Vec<TensorEntry>, Problem> {
    let text = std::str::from_utf8(header).map_err(|_| ("the header is not UTF-8 text".to_owned(), None))?;
    let metadata: Metadata = serde_json::from_str(text).map_err(|error| explain(text, &error))?;
    let start = 8 + header.len() as u64;
    let mut entries = Vec::new();
    let mut end = 0_u64;
    for name in metadata.offset_keys() {
        let Some(info) = metadata.info(&name) else { continue };
        let (first, last) = info.data_offsets;
        end = end.max(last as u64);
        entries.push(TensorEntry {
            dtype: info.dtype,
            shape: info.shape.clone(),
            offset: start + first as u64,
            bytes: last - first,
            name,
        });
    }
    if end > data {
        let key = entries.iter().rev().find(|entry| entry.offset + entry.bytes as u64 > start + data);
        let message = format!("file truncated: its tensors take {end} bytes and {data} are there");
        return Err((message, key.map(|entry| entry.name.clone())));
    }
    if end < data {
        return Err((format!("{} bytes follow the last tensor; it was not written whole", data - end), None));
    }
    Ok(entries)
}

/// Why the safetensors crate refused a header, with the tensor it is about.
fn explain(text: &str, error: &serde_json::Error) -> Problem {
    let Ok(value) = serde_json::from_str::<Value>(text) else {
        return (format!("the header is not JSON: {error}"), None);
    };
    let Value::Object(map) = value else {
        return ("the header is not a JSON object".to_owned(), None);
    };
    let mut tensors: Vec<(u64, u64, String)> = Vec::new();
    for (key, value) in map.iter().filter(|(key, _)| *key != "__metadata__") {
        let fault = |message: String| (message, Some(key.clone()));
        let dtype = &value["dtype"];
        let Ok(dtype) = serde_json::from_value::<Dtype>(dtype.clone()) else {
            return fault(format!("tensor `{key}` has the unknown dtype `{}`", dtype.as_str().unwrap_or("none")));
        };
        let Ok(shape) = serde_json::from_value::<Vec<u64>>(value["shape"].clone()) else {
            return fault(format!("tensor `{key}` has no valid shape"));
        };
        let Ok((first, last)) = serde_json::from_value::<(u64, u64)>(value["data_offsets"].clone()) else {
            return fault(format!("tensor `{key}` has no valid data_offsets"));
        };
        let elements = shape.iter().try_fold(1_u64, |product, &size| product.checked_mul(size));
        let bytes = elements.and_then(|elements| elements.checked_mul(dtype.bitsize() as u64)).map(|bits| bits / 8);
        if bytes.is_none() || last.checked_sub(first) != bytes {
            return fault(format!(
                "tensor `{key}` of {dtype:?} {shape:?} does not fit its data_offsets [{first}, {last}]"
            ));
        }
        tensors.push((first, last, key.clone()));
    }
    tensors.sort();
    let mut end = 0;
    for (first, last, key) in tensors {
        if first != end {
            let what = if first < end { "overlaps another one" } else { "leaves a gap before it" };
            return (format!("tensor `{key}` {what}: it begins at {first}, expected {end}"), Some(key));
        }
        end = last;
    }
    (format!("the header is not valid: {error}"), None)
}
