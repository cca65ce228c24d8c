//! Every block type against the `gguf` package's own reader, and headers that lie (fixtures: tests/fixtures).

use std::path::{Path, PathBuf};

use manylora_kernels::RowSource;
use safetensors::SafeTensors;

use super::header::{GgmlType, GgufHeader};
use super::*;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

#[test]
fn every_type_equals_the_reference_reader() {
    let file = std::fs::read(fixtures().join("gguf-tensors/tensors.gguf")).unwrap();
    let expected = std::fs::read(fixtures().join("gguf-tensors/expected.safetensors")).unwrap();
    let expected = SafeTensors::deserialize(&expected).unwrap();
    let header = GgufHeader::parse(&file).unwrap();
    assert_eq!(
        header.tensors.len(),
        GgmlType::SUPPORTED.split([',', ' ']).filter(|it| it.len() > 2 && *it != "and").count()
    );
    for tensor in header.tensors {
        let name = tensor.name.clone();
        assert_eq!(name, tensor.kind.name());
        let bytes = &file[tensor.start..tensor.start + tensor.bytes];
        let stored = Stored { tensor, permuted_head: None, content: Arc::default() };
        let rows = GgufRows { bytes, stored: &stored };
        assert_eq!((rows.rows(), rows.columns()), (6, 512));
        let want = expected.tensor(&name).unwrap();
        let want: Vec<f32> = want.data().as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
        let mut got = vec![f32::NAN; 6 * 512];
        rows.read(0, &mut got).unwrap();
        for (index, (got, want)) in got.iter().zip(&want).enumerate() {
            assert!(got == want, "{name}, element {index}: {got} instead of {want}");
        }
        // Any rows in any portion are the same.
        let mut part = vec![0.0; 2 * 512];
        rows.read(3, &mut part).unwrap();
        assert_eq!(part, want[3 * 512..5 * 512]);
        assert!(rows.read(5, &mut part).is_err());
        assert!(rows.read(0, &mut part[1..]).is_err());
    }
}

#[test]
fn interleaved_rows_are_found() {
    // Two heads of six rows: ggml keeps the pairs (0, 3), (1, 4), (2, 5) next to each other.
    let stored: Vec<usize> = (0..12).map(|row| interleaved_row(row, 6)).collect();
    assert_eq!(stored, [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
}

#[test]
fn names_are_one_to_one() {
    assert_eq!(names::hugging_face("blk.12.attn_q.bias").unwrap(), "model.layers.12.self_attn.q_proj.bias");
    assert_eq!(names::hugging_face("token_embd.weight").unwrap(), "model.embed_tokens.weight");
    for name in
        ["blk.007.attn_q.weight", "blk.+1.attn_q.weight", "blk.1.attn_q", "blk.1.attn_q.scale", "blk.x.attn_q.weight"]
    {
        assert_eq!(names::hugging_face(name), None, "{name}");
    }
}

/// Writes headers, right ones and wrong ones.
struct Writer(Vec<u8>);

impl Writer {
    fn new(version: u32, tensors: u64, entries: u64) -> Self {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(version.to_le_bytes());
        bytes.extend(tensors.to_le_bytes());
        bytes.extend(entries.to_le_bytes());
        Self(bytes)
    }

    fn text(mut self, text: &[u8]) -> Self {
        self.0.extend((text.len() as u64).to_le_bytes());
        self.0.extend(text);
        self
    }

    fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn tensor(self, name: &str, shape: &[u64], kind: u32, offset: u64) -> Self {
        let mut writer = self.text(name.as_bytes()).u32(shape.len() as u32);
        for &size in shape {
            writer = writer.u64(size);
        }
        writer.u32(kind).u64(offset)
    }

    fn data(mut self, bytes: usize) -> Vec<u8> {
        self.0.resize(self.0.len().next_multiple_of(32) + bytes, 0);
        self.0
    }
}

const F32: u32 = 0;

#[test]
fn sound_headers_are_read() {
    let file = Writer::new(3, 2, 3)
        .text(b"general.architecture")
        .u32(8)
        .text(b"llama")
        .text(b"numbers")
        .u32(9)
        .u32(5)
        .u64(2)
        .u32(7)
        .u32(u32::MAX)
        .text(b"words")
        .u32(9)
        .u32(8)
        .u64(2)
        .text(b"one")
        .text("zwei".as_bytes())
        .tensor("a", &[4, 2], F32, 32)
        .tensor("b", &[8], F32, 0)
        .data(64);
    let header = GgufHeader::parse(&file).unwrap();
    assert_eq!(header.metadata.text("general.architecture"), Ok(Some("llama")));
    assert_eq!(header.metadata.integers("numbers"), Ok(Some(vec![7, -1])));
    assert_eq!(header.metadata.texts("words").unwrap().unwrap(), ["one", "zwei"]);
    assert_eq!(header.metadata.u32("absent"), Ok(None));
    assert!(header.metadata.u32("words").unwrap_err().0.contains("`words` should be an integer"));
    assert_eq!((header.tensors[0].rows, header.tensors[0].columns, header.tensors[0].dimensions), (2, 4, 2));
    assert_eq!(header.tensors[0].start, header.tensors[1].start + 32);
    assert_eq!(header.tensors[0].start + 32, file.len());
}

#[test]
fn broken_headers_are_refused_and_named() {
    let entry = |kind: u32| Writer::new(3, 0, 1).text(b"key").u32(kind);
    let array = |kind: u32, count: u64| entry(9).u32(kind).u64(count);
    let tensor = |shape: &[u64], kind: u32, offset: u64| Writer::new(3, 1, 0).tensor("t", shape, kind, offset).data(64);
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("empty", Vec::new(), "the file ends inside the magic"),
        ("another format", b"PK\x03\x04 and so on".to_vec(), "does not start with `GGUF`"),
        ("big-endian magic", b"FUGG\0\0\0\x03".to_vec(), "big-endian"),
        ("version 1", Writer::new(1, 0, 0).0, "version `1` is not supported"),
        ("version 4", Writer::new(4, 0, 0).0, "version `4` is not supported"),
        ("swapped version", Writer::new(3 << 24, 0, 0).0, "big-endian"),
        ("no counts", b"GGUF\x03\0\0\0\x01".to_vec(), "the file ends inside the number of tensors"),
        ("huge tensor count", Writer::new(3, u64::MAX, 0).0, "`18446744073709551615` tensors cannot be true"),
        ("huge entry count", Writer::new(3, 0, 1 << 60).0, "metadata entries cannot be true"),
        ("more entries than bytes", Writer::new(3, 0, 100).data(100), "`100` metadata entries cannot be true"),
        ("huge key", Writer::new(3, 0, 1).u64(u64::MAX).data(64), "bytes of a metadata key cannot be true"),
        ("empty key", Writer::new(3, 0, 1).text(b"").u32(4).data(32), "a metadata key has 0 bytes"),
        ("key not UTF-8", Writer::new(3, 0, 1).text(b"\xff\xfe").u32(4).data(32), "is not UTF-8"),
        ("unknown value type", entry(13).data(32), "unknown type `13`"),
        ("bad boolean", entry(7).u32(2).data(32), "the boolean `2`"),
        ("huge string", entry(8).u64(1 << 62).data(32), "cannot be true"),
        ("truncated string", entry(8).u64(4096).data(32), "cannot be true"),
        ("huge array", array(4, 1 << 61).data(32), "elements of the value of `key` cannot be true"),
        ("overflowing array", array(12, u64::MAX).data(32), "cannot be true"),
        ("huge string array", array(8, 1 << 40).data(64), "cannot be true"),
        ("string array not UTF-8", array(8, 1).text(b"\xff").data(32), "not UTF-8"),
        ("nested array", array(9, 1).u32(4).u64(1).u32(0).data(64), "array of arrays"),
        ("array of unknown type", array(99, 1).data(64), "unknown type `99`"),
        (
            "key twice",
            Writer::new(3, 0, 2).text(b"k").u32(4).u32(1).text(b"k").u32(4).u32(2).data(32),
            "`k` appears twice",
        ),
        (
            "alignment zero",
            Writer::new(3, 0, 1).text(b"general.alignment").u32(4).u32(0).data(32),
            "`general.alignment` is `0`",
        ),
        (
            "alignment odd",
            Writer::new(3, 0, 1).text(b"general.alignment").u32(4).u32(33).data(32),
            "`general.alignment` is `33`",
        ),
        (
            "alignment of a wrong type",
            Writer::new(3, 0, 1).text(b"general.alignment").u32(8).text(b"x").data(32),
            "`general.alignment` should be an integer",
        ),
        ("no dimensions", tensor(&[], F32, 0), "has `0` dimensions"),
        ("five dimensions", tensor(&[1, 1, 1, 1, 1], F32, 0), "has `5` dimensions"),
        ("huge dimension count", Writer::new(3, 1, 0).text(b"t").u32(u32::MAX).data(64), "dimensions; 1 to 4"),
        ("empty tensor", tensor(&[0, 4], F32, 0), "`t` is empty"),
        ("overflowing shape", tensor(&[1 << 40, 1 << 40], F32, 0), "too many elements"),
        ("overflowing rows", tensor(&[1, 1 << 40, 1 << 40, 4], F32, 0), "too many elements"),
        ("unknown tensor type", tensor(&[4], 777, 0), "type `unknown` (code 777)"),
        ("unsupported tensor type", tensor(&[256], 20, 0), "`IQ4_NL`"),
        ("part of a block", tensor(&[33], 2, 0), "no multiple of Q4_0's block of 32"),
        ("offset not aligned", tensor(&[4], F32, 8), "offset `8`, which is no multiple of 32"),
        ("offset outside", tensor(&[4], F32, 1 << 20), "beyond the end of the file"),
        ("offset overflows", tensor(&[4], F32, u64::MAX - 31), "beyond the end of the file"),
        ("tensor longer than the file", tensor(&[1000], F32, 0), "beyond the end of the file"),
        (
            "tensor twice",
            Writer::new(3, 2, 0).tensor("t", &[4], F32, 0).tensor("t", &[4], F32, 32).data(64),
            "`t` appears twice",
        ),
        (
            "overlap",
            Writer::new(3, 2, 0).tensor("t", &[12], F32, 0).tensor("u", &[4], F32, 32).data(64),
            "`t` and `u` overlap",
        ),
    ];
    for (name, file, named) in cases {
        let message = GgufHeader::parse(&file).expect_err(name).0;
        assert!(message.contains(named), "{name}: {message}");
    }
}

#[test]
fn every_truncation_and_many_flipped_bytes_are_refused_or_read_without_panic() {
    let file = std::fs::read(fixtures().join("gguf-models/qwen2.gguf")).unwrap();
    let header = GgufHeader::parse(&file).unwrap();
    let data = header.tensors.iter().map(|tensor| tensor.start).min().unwrap();
    for length in 0..file.len().min(data + 64) {
        // All data is missing, so there is always something to refuse.
        assert!(GgufHeader::parse(&file[..length]).is_err(), "{length} bytes");
    }
    let mut state = 1u64;
    let mut changed = file.clone();
    for _ in 0..4000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let at = (state >> 33) as usize % data;
        let before = changed[at];
        changed[at] ^= (state >> 20) as u8 | 1;
        let _ = GgufHeader::parse(&changed);
        changed[at] = before;
    }
}
