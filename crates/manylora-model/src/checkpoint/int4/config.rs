//! `quantization_config` of config.json: which method, and every option that changes what the packed words mean.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::ModelError;

/// How weights were quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// AutoAWQ's `gemm` layout: words along the outputs in the order 0, 2, 4, 6, 1, 3, 5, 7.
    Awq,
    /// GPTQ: words along the inputs.
    Gptq {
        /// Zero points are stored as they are (`gptq_v2`), not less one.
        plain_zeros: bool,
        /// Columns were quantized in order of activation, so `g_idx` is needed.
        act_order: bool,
    },
    /// compressed-tensors `pack-quantized`: words along the inputs, values offset by half their range.
    CompressedTensors {
        /// No zero points.
        symmetric: bool,
        /// What shares a scale.
        strategy: Strategy,
        /// Columns were quantized in order of activation with `weight_g_idx`.
        group_order: bool,
    },
}

/// What shares a scale in compressed-tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// The whole matrix.
    Tensor,
    /// A row.
    Channel,
    /// `group_size` columns of a row.
    Group,
}

/// A configuration that was understood completely.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantization {
    /// Method and its options.
    pub method: Method,
    /// 4 or 8 (AWQ: 4).
    pub bits: usize,
    /// Columns that share a scale; None = all of a row.
    pub group_size: Option<usize>,
}

const SUPPORTED: &str = "supported are awq (version gemm, 4 bits), gptq (4 or 8 bits) and compressed-tensors (format \
                         pack-quantized, 4 or 8 bits)";

impl Quantization {
    /// Reads a configuration; anything that is not understood is refused with its name.
    pub fn parse(path: &Path, value: &Value) -> Result<Self, ModelError> {
        let Value::Object(map) = value else {
            return Err(ModelError::Malformed {
                path: path.to_path_buf(),
                message: "`quantization_config` is not an object".to_owned(),
            });
        };
        let fields = Fields { path, map, within: "quantization_config" };
        match fields.text("quant_method")? {
            Some("awq") => awq(&fields),
            Some("gptq") => gptq(&fields),
            Some("compressed-tensors" | "compressed_tensors") => compressed_tensors(&fields),
            Some(other) => Err(ModelError::Unsupported {
                message: format!("the quantization method `{other}` is not supported; {SUPPORTED}"),
            }),
            None => Err(fields.damaged("`quantization_config.quant_method` is missing".to_owned())),
        }
    }

    /// The scheme as people name it.
    pub fn scheme(&self) -> String {
        let method = match self.method {
            Method::Awq => "AWQ",
            Method::Gptq { .. } => "GPTQ",
            Method::CompressedTensors { .. } => "compressed-tensors",
        };
        format!("{method} {}-bit", self.bits)
    }
}

fn awq(fields: &Fields<'_>) -> Result<Quantization, ModelError> {
    for key in ["version", "format"] {
        match fields.text(key)? {
            Some(version) if !version.eq_ignore_ascii_case("gemm") => {
                return Err(fields.unsupported(key, version, "only AWQ's `gemm` layout is"));
            }
            _ => {}
        }
    }
    if !fields.flag("zero_point")?.unwrap_or(true) {
        return Err(fields.unsupported("zero_point", "false", "AWQ's gemm layout has zero points"));
    }
    let bits = match fields.number("bits")? {
        None => fields.number("w_bit")?.unwrap_or(4),
        Some(bits) => bits,
    };
    if bits != 4 {
        return Err(fields.unsupported("bits", &bits.to_string(), "AWQ is supported with 4 bits"));
    }
    let group_size = match fields.group_size("group_size")? {
        None => fields.group_size("q_group_size")?,
        size => size,
    };
    let group_size = group_size.ok_or_else(|| fields.missing("group_size"))?;
    Ok(Quantization { method: Method::Awq, bits: 4, group_size: group_size.columns() })
}

fn gptq(fields: &Fields<'_>) -> Result<Quantization, ModelError> {
    let format = match fields.text("checkpoint_format")? {
        None => fields.text("format")?,
        format => format,
    };
    let plain_zeros = match format {
        None | Some("" | "gptq") => false,
        Some("gptq_v2") => true,
        Some(other) => {
            return Err(fields.unsupported("checkpoint_format", other, "the formats `gptq` and `gptq_v2` are"));
        }
    };
    if fields.flag("is_marlin_format")?.unwrap_or(false) {
        return Err(fields.unsupported("is_marlin_format", "true", "the formats `gptq` and `gptq_v2` are"));
    }
    if let Some(word) = fields.text("pack_dtype")?.filter(|word| *word != "int32") {
        return Err(fields.unsupported("pack_dtype", word, "`int32` is"));
    }
    if let Some(dynamic) = fields.value("dynamic") {
        // `-:pattern` leaves modules unquantized, which their tensors show; anything else changes bits or groups.
        let overrides = dynamic.as_object().map(|map| map.keys().any(|key| !key.starts_with("-:")));
        if overrides != Some(false) {
            return Err(fields.unsupported("dynamic", &dynamic.to_string(), "one setting for all modules is"));
        }
    }
    let bits = fields.number("bits")?.ok_or_else(|| fields.missing("bits"))?;
    if !matches!(bits, 4 | 8) {
        return Err(fields.unsupported("bits", &bits.to_string(), "GPTQ is supported with 4 and 8 bits"));
    }
    let group_size = fields.group_size("group_size")?.ok_or_else(|| fields.missing("group_size"))?;
    let act_order = fields.flag("desc_act")?.unwrap_or(false);
    Ok(Quantization {
        method: Method::Gptq { plain_zeros, act_order },
        bits: bits as usize,
        group_size: group_size.columns(),
    })
}

fn compressed_tensors(fields: &Fields<'_>) -> Result<Quantization, ModelError> {
    const FORMAT: &str = "the format `pack-quantized` is";
    let format = fields.text("format")?.ok_or_else(|| fields.missing("format"))?;
    if format != "pack-quantized" {
        return Err(fields.unsupported("format", format, FORMAT));
    }
    if let Some(status) = fields.text("quantization_status")?.filter(|status| *status != "compressed") {
        return Err(fields.unsupported("quantization_status", status, "`compressed` is"));
    }
    for (key, why) in
        [("kv_cache_scheme", "a plain key/value cache is"), ("transform_config", "weights without transforms are")]
    {
        if let Some(value) = fields.value(key).filter(|value| value.as_object().is_none_or(|map| !map.is_empty())) {
            return Err(fields.unsupported(key, &value.to_string(), why));
        }
    }
    if let Some(sparsity) = fields.value("sparsity_config") {
        let format = sparsity.get("format").and_then(Value::as_str);
        if sparsity.as_object().is_none_or(|map| !map.is_empty()) && !matches!(format, None | Some("dense")) {
            return Err(fields.unsupported("sparsity_config", &sparsity.to_string(), "dense weights are"));
        }
    }
    let groups = fields
        .value("config_groups")
        .and_then(Value::as_object)
        .filter(|groups| !groups.is_empty())
        .ok_or_else(|| fields.missing("config_groups"))?;
    let mut common = None;
    for (name, group) in groups {
        let Value::Object(group) = group else {
            return Err(fields.damaged(format!("`config_groups.{name}` is not an object")));
        };
        let group = Fields { path: fields.path, map: group, within: name };
        for key in ["input_activations", "output_activations"] {
            if let Some(value) = group.value(key) {
                return Err(group.unsupported(key, &value.to_string(), "weight-only quantization is"));
            }
        }
        if let Some(format) = group.text("format")?.filter(|format| *format != "pack-quantized") {
            return Err(group.unsupported("format", format, FORMAT));
        }
        let weights = group.value("weights").and_then(Value::as_object).ok_or_else(|| group.missing("weights"))?;
        let quantization = compressed_weights(&Fields { path: fields.path, map: weights, within: name })?;
        if *common.get_or_insert(quantization) != quantization {
            return Err(fields.unsupported(
                "config_groups",
                name,
                "several groups are only where they quantize weights alike, and this one differs",
            ));
        }
    }
    common.ok_or_else(|| fields.missing("config_groups"))
}

fn compressed_weights(fields: &Fields<'_>) -> Result<Quantization, ModelError> {
    let bits = fields.number("num_bits")?.ok_or_else(|| fields.missing("num_bits"))?;
    if !matches!(bits, 4 | 8) {
        return Err(fields.unsupported("num_bits", &bits.to_string(), "4 and 8 bits are"));
    }
    if let Some(kind) = fields.text("type")?.filter(|kind| *kind != "int") {
        return Err(fields.unsupported("type", kind, "`int` is"));
    }
    if let Some(dynamic) = fields.value("dynamic").filter(|dynamic| **dynamic != Value::Bool(false)) {
        return Err(fields.unsupported("dynamic", &dynamic.to_string(), "`false` is"));
    }
    let group_size = fields.group_size("group_size")?;
    let strategy = match fields.text("strategy")? {
        Some("tensor") => Strategy::Tensor,
        Some("channel") => Strategy::Channel,
        Some("group") => Strategy::Group,
        // compressed-tensors infers it the same way.
        None => match group_size {
            None => Strategy::Tensor,
            Some(GroupSize::All) => Strategy::Channel,
            Some(GroupSize::Columns(_)) => Strategy::Group,
        },
        Some(other) => return Err(fields.unsupported("strategy", other, "`tensor`, `channel` and `group` are")),
    };
    let group_size = match (strategy, group_size) {
        (Strategy::Tensor | Strategy::Channel, None | Some(GroupSize::All)) => None,
        (Strategy::Group, Some(GroupSize::Columns(columns))) => Some(columns),
        _ => {
            return Err(fields.damaged("`group_size` and `strategy` of the weights do not fit together".to_owned()));
        }
    };
    let group_order = match fields.value("actorder") {
        None => false,
        Some(Value::Bool(order)) => *order,
        Some(Value::String(order)) if order.eq_ignore_ascii_case("group") => true,
        // The order is undone before packing: groups are of neighbouring columns.
        Some(Value::String(order)) if matches!(&*order.to_ascii_lowercase(), "weight" | "static") => false,
        Some(other) => {
            return Err(fields.unsupported("actorder", &other.to_string(), "`group`, `weight` and `static` are"));
        }
    };
    Ok(Quantization {
        method: Method::CompressedTensors {
            symmetric: fields.flag("symmetric")?.unwrap_or(true),
            strategy,
            group_order,
        },
        bits: bits as usize,
        group_size,
    })
}

/// Columns that share a scale.
#[derive(Clone, Copy)]
enum GroupSize {
    /// All of them (-1).
    All,
    /// This many.
    Columns(usize),
}

impl GroupSize {
    fn columns(self) -> Option<usize> {
        match self {
            Self::All => None,
            Self::Columns(columns) => Some(columns),
        }
    }
}

/// An object of the configuration, with the place for messages.
struct Fields<'a> {
    path: &'a Path,
    map: &'a Map<String, Value>,
    within: &'a str,
}

impl<'a> Fields<'a> {
    fn damaged(&self, message: String) -> ModelError {
        ModelError::Malformed { path: self.path.to_path_buf(), message }
    }

    fn missing(&self, key: &str) -> ModelError {
        self.damaged(format!("`{}.{key}` is missing", self.within))
    }

    fn unsupported(&self, key: &str, value: &str, supported: &str) -> ModelError {
        let mut value = value.to_owned();
        if let Some((end, _)) = value.char_indices().nth(200) {
            value.truncate(end);
            value.push_str("...");
        }
        ModelError::Unsupported {
            message: format!(
                "the quantization setting `{}.{key}` = `{value}` is not supported; {supported}",
                self.within
            ),
        }
    }

    fn value(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn wrong(&self, key: &str, value: &Value, wanted: &str) -> ModelError {
        let value: String = value.to_string().chars().take(200).collect();
        self.damaged(format!("`{}.{key}` is `{value}`; {wanted} is needed", self.within))
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(value) => Err(self.wrong(key, value, "a string")),
        }
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(value) => Err(self.wrong(key, value, "true or false")),
        }
    }

    fn number(&self, key: &str) -> Result<Option<i64>, ModelError> {
        match self.value(key) {
            None => Ok(None),
            Some(value) => match value.as_i64() {
                Some(number) => Ok(Some(number)),
                None => Err(self.wrong(key, value, "a whole number")),
            },
        }
    }

    fn group_size(&self, key: &str) -> Result<Option<GroupSize>, ModelError> {
        match self.number(key)? {
            None => Ok(None),
            Some(-1) => Ok(Some(GroupSize::All)),
            Some(columns @ 1..=0x00ff_ffff) => Ok(Some(GroupSize::Columns(columns as usize))),
            Some(other) => Err(self.wrong(key, &Value::from(other), "a positive number or -1")),
        }
    }
}
