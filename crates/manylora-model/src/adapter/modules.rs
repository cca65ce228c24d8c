//! Module paths of the base: which site a path names, and the shapes its factors must have.

use manylora_kernels::{Module, Site};

use crate::spec::ModelSpec;

/// What a path says about this base.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolved {
    /// A module of the base.
    Module {
        /// Where adapters are applied.
        site: Site,
        /// Its path as Hugging Face names it: `model.layers.0.self_attn.q_proj`.
        path: String,
        /// Whether a multimodal wrapper's `language_model` was taken out of the path.
        wrapped: bool,
    },
    /// A known module of a layer that the base does not have.
    LayerBeyond {
        /// Index of the layer.
        layer: u64,
    },
    /// Something else.
    Foreign,
}

/// Names of modules that adapters can touch, for messages.
pub const MODULE_NAMES: [&str; 9] =
    ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens"];

/// Modules that some families fuse into one.
const FUSED: [(&str, &[&str]); 2] =
    [("qkv_proj", &["q_proj", "k_proj", "v_proj"]), ("gate_up_proj", &["gate_proj", "up_proj"])];

fn parent_and_name(module: Module) -> Option<(&'static str, &'static str)> {
    match module {
        Module::Q => Some(("self_attn", "q_proj")),
        Module::K => Some(("self_attn", "k_proj")),
        Module::V => Some(("self_attn", "v_proj")),
        Module::O => Some(("self_attn", "o_proj")),
        Module::Gate => Some(("mlp", "gate_proj")),
        Module::Up => Some(("mlp", "up_proj")),
        Module::Down => Some(("mlp", "down_proj")),
        Module::InputNorm | Module::PostNorm => None,
    }
}

/// Path of a module of a layer.
fn layer_path(layer: usize, parent: &str, name: &str) -> String {
    format!("model.layers.{layer}.{parent}.{name}")
}

/// Paths of all modules that adapters can touch.
pub fn paths(spec: &ModelSpec) -> impl Iterator<Item = String> {
    let layers = (0..spec.layers).flat_map(|layer| {
        let names = Module::LINEAR.into_iter().filter_map(parent_and_name);
        names.map(move |(parent, name)| layer_path(layer, parent, name))
    });
    ["model.embed_tokens".to_owned(), "lm_head".to_owned()].into_iter().chain(layers)
}

/// Finds the module that a path (without `base_model.model.`) names.
pub fn resolve(spec: &ModelSpec, path: &[String]) -> Resolved {
    let mut segments: Vec<&str> = path.iter().map(String::as_str).collect();
    let wrapper = segments.iter().take(2).position(|&segment| segment == "language_model");
    if let Some(at) = wrapper {
        segments.remove(at);
    }
    let wrapped = wrapper.is_some();
    let module = |site: Site, path: String| Resolved::Module { site, path, wrapped };
    let inner = segments.strip_prefix(&["model"]).unwrap_or(&segments);
    match inner {
        ["lm_head"] if inner.len() == segments.len() => module(Site::HEAD, "lm_head".to_owned()),
        ["embed_tokens"] => module(Site::EMBED, "model.embed_tokens".to_owned()),
        ["layers", index, parent, name] => {
            let found = Module::LINEAR.into_iter().find(|&module| parent_and_name(module) == Some((*parent, *name)));
            let (Some(found), Some(layer)) = (found, canonical_index(index)) else {
                return Resolved::Foreign;
            };
            if layer >= spec.layers as u64 {
                return Resolved::LayerBeyond { layer };
            }
            module(Site::layer(layer as u32, found), layer_path(layer as usize, parent, name))
        }
        _ => Resolved::Foreign,
    }
}

/// A decimal index without sign or leading zeros, so that one layer has one spelling.
fn canonical_index(text: &str) -> Option<u64> {
    let canonical = text == "0" || (!text.starts_with('0') && text.bytes().all(|byte| byte.is_ascii_digit()));
    if canonical { text.parse().ok() } else { None }
}

/// Columns of A and rows of B at a site.
pub fn shape(spec: &ModelSpec, site: Site) -> Option<(usize, usize)> {
    if site == Site::EMBED {
        return Some((spec.vocab_size, spec.hidden_size));
    }
    if site == Site::HEAD {
        return Some((spec.hidden_size, spec.vocab_size));
    }
    let index = site.0.checked_sub(Site::layer(0, Module::Q).0)?;
    let module = Module::LINEAR.into_iter().find(|&module| module as u32 == index % Module::COUNT)?;
    let (queries, keys) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
    match module {
        Module::Q => Some((spec.hidden_size, queries)),
        Module::K | Module::V => Some((spec.hidden_size, keys)),
        Module::O => Some((queries, spec.hidden_size)),
        Module::Gate | Module::Up => Some((spec.hidden_size, spec.intermediate_size)),
        Module::Down => Some((spec.intermediate_size, spec.hidden_size)),
        Module::InputNorm | Module::PostNorm => None,
    }
}

/// Whether a deployment's restriction (names by suffix or full path; a fused name stands for its parts and a part for
/// its fused name) allows a module.
pub fn allowed(restriction: &[String], path: &str) -> bool {
    let name = path.rsplit('.').next().unwrap_or(path);
    let ends_with =
        |path: &str, suffix: &str| path.strip_suffix(suffix).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
    restriction.iter().any(|entry| {
        ends_with(path, entry)
            || FUSED.iter().any(|(fused, parts)| {
                parts.contains(&name) && ends_with(&format!("{}{fused}", path.strip_suffix(name).unwrap_or("")), entry)
            })
    })
}

/// Three keys that this base would understand.
pub fn example_keys(spec: &ModelSpec) -> [String; 3] {
    let last = spec.layers.saturating_sub(1);
    let key = |layer, parent, name| format!("base_model.model.{}.lora_A.weight", layer_path(layer, parent, name));
    [key(0, "self_attn", "q_proj"), key(0, "mlp", "gate_proj"), key(last, "self_attn", "v_proj")]
}
