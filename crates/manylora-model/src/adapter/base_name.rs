//! Whether the base that an adapter names is the one that is served.
//!
//! Exporters write hub ids, local paths and names of quantized siblings, so the name decides nothing by itself:
//! shapes do. It is compared to warn, and to refuse only where the deployment asks for it.

/// How a name compares with the base's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BaseMatch {
    /// Equal in the last component, whoever the owner and whatever the case.
    Same,
    /// Equal once suffixes of quantization and file format are dropped.
    SameButForFormat,
    /// Different.
    Other,
}

/// Compares the name an adapter gives with the base's names.
pub fn compare(named: &str, base_names: &[String]) -> BaseMatch {
    let named = last_component(named);
    if named.is_empty() {
        return BaseMatch::Same;
    }
    let ours: Vec<String> =
        base_names.iter().map(|name| last_component(name)).filter(|name| !name.is_empty()).collect();
    if ours.contains(&named) {
        return BaseMatch::Same;
    }
    let plain = without_format(&named);
    if ours.iter().any(|name| without_format(name) == plain) { BaseMatch::SameButForFormat } else { BaseMatch::Other }
}

/// The last component in lower case; of a hub cache's snapshot path, the repository's name.
fn last_component(name: &str) -> String {
    let parts: Vec<&str> = name.split(['/', '\\']).filter(|part| !part.is_empty() && *part != ".").collect();
    let component = match parts.as_slice() {
        [.., repository, "snapshots", _] if repository.starts_with("models--") => {
            repository.rsplit("--").next().unwrap_or(repository)
        }
        [.., last] => last,
        [] => "",
    };
    component.trim().to_lowercase()
}

/// Suffixes, without their separator, that say how weights are stored.
const FORMATS: &[&str] = &[
    "gguf",
    "safetensors",
    "bnb",
    "unsloth",
    "awq",
    "gptq",
    "exl2",
    "mlx",
    "hqq",
    "aqlm",
    "quantized",
    "quant",
    "4bit",
    "8bit",
    "3bit",
    "2bit",
    "int4",
    "int8",
    "w4a16",
    "w8a16",
    "w8a8",
    "fp8",
    "fp16",
    "fp32",
    "bf16",
    "f16",
    "f32",
    "nf4",
    "dynamic",
];

/// A name without suffixes such as `-bnb-4bit`, `-AWQ`, `-GPTQ-Int4` or `.Q4_1.gguf`, however many.
fn without_format(name: &str) -> &str {
    let mut rest = name;
    while let Some(at) = rest.rfind(['-', '.', '_']) {
        let suffix = &rest[at + 1..];
        if !FORMATS.contains(&suffix) {
            break;
        }
        rest = &rest[..at];
    }
    match quantization_start(rest) {
        Some(at) => without_format(&rest[..at]),
        None => rest,
    }
}

/// Where a llama.cpp type name (`q4_1`, `q4_k_m`, `iq2_xs`) with its separator begins, when a name ends in one.
fn quantization_start(name: &str) -> Option<usize> {
    let is_type = |text: &str| {
        let digits = text.strip_prefix("iq").or_else(|| text.strip_prefix('q'));
        digits.is_some_and(|digits| {
            let mut parts = digits.split('_');
            parts.next().is_some_and(|first| matches!(first.as_bytes(), [b'1'..=b'8']))
                && parts.all(|part| matches!(part, "0" | "1" | "k" | "s" | "m" | "l" | "xs" | "xxs" | "xl" | "nl"))
        })
    };
    name.match_indices(['-', '.', '_']).map(|(at, _)| at).find(|&at| is_type(&name[at + 1..]))
}
