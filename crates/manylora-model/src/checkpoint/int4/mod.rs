//! INT4 (and INT8) weights in safetensors: AWQ, GPTQ and compressed-tensors, dequantized at load.
//!
//! `quantization_config` in config.json names the method; which modules are quantized is seen from their tensors. A
//! method, layout or option that is not understood completely is refused by name. Values are `(q - zero) x scale` in
//! f32, without the intermediate rounding to the scale's own type that GPU kernels have.
//!
//! [`config`] reads the configuration, [`layout`] checks one module's tensors and turns packed words into rows.

pub mod config;
mod layout;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::Path;

use manylora_kernels::RowSource;
use serde_json::Value;

use self::config::{Method, Quantization};
use self::layout::{Module, PackedRows};
use super::safetensors::SafetensorsStore;
use super::{QuantizationNote, TensorStore, hash_field};
use crate::error::ModelError;
use crate::spec::ModelSpec;

/// Puts a dequantizing store on top of the files of a folder. `quantization` is config.json's `quantization_config`;
/// `path` names config.json in errors. No weight is read.
pub fn open(
    path: &Path,
    quantization: &Value,
    spec: &ModelSpec,
    files: SafetensorsStore,
) -> Result<(Box<dyn TensorStore>, QuantizationNote), ModelError> {
    let quantization = Quantization::parse(path, quantization)?;
    let marker = quantization.marker();
    let mut modules = BTreeMap::new();
    for name in files.names() {
        let Some(module) = name.strip_suffix(marker).and_then(|module| module.strip_suffix('.')) else { continue };
        let weight = format!("{module}.weight");
        if files.entry(&weight).is_some() {
            return Err(ModelError::Malformed {
                path: files.path_of(&weight),
                message: format!("both `{weight}` and `{name}` are there; only one of them can be the weight"),
            });
        }
        modules.insert(weight, Module::read(&files, module, &quantization)?);
    }
    if modules.is_empty() {
        return Err(ModelError::Malformed {
            path: path.to_path_buf(),
            message: format!(
                "`quantization_config` says {}, and no tensor of the files ends in `.{marker}`",
                quantization.scheme()
            ),
        });
    }
    let store = QuantizedStore { files, modules, quantization };
    let note = QuantizationNote {
        scheme: store.quantization.scheme(),
        bytes_on_disk: store.storage_bytes(),
        parameters: spec.parameters(),
    };
    Ok((Box::new(store), note))
}

/// Quantized modules as `<module>.weight`, everything else as the files have it.
#[derive(Debug)]
struct QuantizedStore {
    files: SafetensorsStore,
    /// By the name of the weight that they stand for.
    modules: BTreeMap<String, Module>,
    quantization: Quantization,
}

impl QuantizedStore {
    /// Whether a tensor of the files is a part of a quantized module.
    fn is_part(&self, name: &str) -> bool {
        name.rsplit_once('.').is_some_and(|(module, part)| {
            self.quantization.parts().contains(&part) && self.modules.contains_key(&format!("{module}.weight"))
        })
    }
}

impl TensorStore for QuantizedStore {
    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.files.names().into_iter().filter(|name| !self.is_part(name)).collect();
        names.extend(self.modules.keys().cloned());
        names
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        match self.modules.get(name) {
            Some(module) => Some(vec![module.rows, module.columns]),
            None if self.is_part(name) => None,
            None => self.files.shape(name),
        }
    }

    fn matrix(&self, name: &str) -> Result<Box<dyn RowSource + '_>, ModelError> {
        match self.modules.get(name) {
            Some(module) => Ok(Box::new(PackedRows::new(&self.files, module)?)),
            None => self.files.matrix(name),
        }
    }

    fn vector(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        self.files.vector(name)
    }

    fn discard(&self, name: &str) {
        match self.modules.get(name) {
            Some(module) => {
                for part in self.quantization.parts() {
                    self.files.discard(&format!("{}.{part}", module.name));
                }
            }
            None => self.files.discard(name),
        }
    }

    fn storage_bytes(&self) -> u64 {
        self.files.storage_bytes()
    }

    fn digest_into(&self, hasher: &mut blake3::Hasher) {
        // The same words mean other weights under another configuration.
        hash_field(hasher, format!("{:?}", self.quantization).as_bytes());
        self.files.digest_into(hasher);
    }
}

impl Quantization {
    /// The tensor by which a quantized module is recognized.
    fn marker(&self) -> &'static str {
        match self.method {
            Method::Awq | Method::Gptq { .. } => "qweight",
            Method::CompressedTensors { .. } => "weight_packed",
        }
    }

    /// All tensors of a quantized module that the dequantized weight stands for.
    fn parts(&self) -> &'static [&'static str] {
        match self.method {
            Method::Awq => &["qweight", "qzeros", "scales"],
            Method::Gptq { .. } => &["qweight", "qzeros", "scales", "g_idx"],
            Method::CompressedTensors { .. } => {
                &["weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"]
            }
        }
    }
}
