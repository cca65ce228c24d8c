//! Tensors and configuration put together: every tensor is applied, known to be harmless, or the reason to refuse.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use manylora_kernels::{Site, SiteShape};
use safetensors::Dtype;

use super::combinations::{AdapterFeature, Verdict, verdict};
use super::config::AdapterConfig;
use super::fault::{Fault, listed};
use super::modules::{self, MODULE_NAMES, Resolved};
use super::names::{Part, TensorName};
use super::policy::AdapterPolicy;
use super::report::{LoadReport, ModuleReport};
use super::tensor_file::TensorEntry;

/// One adapted site and the tensors it is made of, as indices into the tensor list.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MatchedSite {
    pub(super) shape: SiteShape,
    pub(super) module: String,
    pub(super) a: usize,
    pub(super) b: usize,
}

/// A copy of a base matrix, to be compared with the base.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct BaseCopy {
    pub(super) module: String,
    pub(super) tensor: usize,
}

/// What an adapter consists of. Sites are sorted by their index.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Matched {
    pub(super) sites: Vec<MatchedSite>,
    pub(super) copies: Vec<BaseCopy>,
}

/// Tensors of one module.
#[derive(Default)]
struct Group {
    module: String,
    a: Option<usize>,
    b: Option<usize>,
    copy: Option<usize>,
}

/// Keys that are refused, in the order in which they were found, with their reasons.
#[derive(Default)]
struct Problems(Vec<(String, String)>);

impl Problems {
    fn add(&mut self, key: &str, reason: impl Into<String>) {
        self.0.push((key.to_owned(), reason.into()));
    }

    /// Writes them to the report, where it says nothing of the key yet.
    fn note(self, report: &mut LoadReport) {
        for (key, reason) in self.0 {
            report.refused.entry(key).or_insert(reason);
        }
    }

    /// The fault, if there is a problem: the first reason stands for all, the report has each.
    fn into_result(self, report: &mut LoadReport) -> Result<(), Fault> {
        let Some((_, reason)) = self.0.first() else {
            return Ok(());
        };
        let others = self.0.iter().filter(|(_, other)| other != reason).count();
        let mut reason = reason.clone();
        if others > 0 {
            reason = format!("{reason} (and {others} more keys were refused; the report has each with its reason)");
        }
        let keys: Vec<String> = self.0.iter().map(|(key, _)| key.clone()).collect();
        report.refused.extend(self.0);
        Err(Fault::invalid(reason).keys(keys))
    }
}

/// Matches `tensors` with the base and the configuration, and writes what was found to the report.
pub(super) fn match_tensors(
    config: &AdapterConfig,
    tensors: &[TensorEntry],
    policy: &AdapterPolicy,
    report: &mut LoadReport,
) -> Result<Matched, Fault> {
    if tensors.is_empty() {
        return Err(Fault::invalid("the adapter has no tensors; it was saved without its weights, save it again"));
    }
    let mut problems = Problems::default();
    for tensor in tensors.iter().filter(|tensor| tensor.shape.contains(&0)) {
        let name = &tensor.name;
        problems.add(
            name,
            format!(
                "zero-size tensor `{name}` of shape {:?}: sharded training saved it without its values",
                tensor.shape
            ),
        );
    }
    problems.into_result(report)?;

    let (groups, problems) = group_by_site(tensors, policy, report);
    let (matched, others) = check_groups(config, tensors, policy, groups);
    // The first kind of problem is the reason; for whoever looks closer, the report has every key.
    let (reason, rest) = if problems.0.is_empty() { (others, Problems::default()) } else { (problems, others) };
    if let Err(fault) = reason.into_result(report) {
        rest.note(report);
        note_matched(tensors, &matched, report);
        note_others(tensors, &matched, report);
        return Err(fault);
    }
    if matched.sites.is_empty() {
        let keys: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        return Err(Fault::invalid(format!(
            "none of its {} tensors is a LoRA factor of this base: it has {}; this base has {}",
            tensors.len(),
            listed(&keys, 3),
            listed(&modules::example_keys(&policy.spec), 3)
        ))
        .keys(keys));
    }
    check_tying(config, policy, &matched)?;
    check_combinations(policy, &matched)?;
    fill_report(tensors, policy, &matched, report);
    report.warnings.extend(untouched_targets(config, policy, &matched));
    Ok(matched)
}

/// A warning when `target_modules` lists modules of this base for which the file has nothing: a half-saved adapter
/// looks like this, and so does one that was narrowed by `exclude_modules` or `layers_to_transform`.
fn untouched_targets(config: &AdapterConfig, policy: &AdapterPolicy, matched: &Matched) -> Option<String> {
    // As PEFT reads an entry: the whole path of a module, or its end.
    fn ends(path: &str) -> impl Iterator<Item = &str> {
        path.match_indices('.').map(|(dot, _)| &path[dot + 1..]).chain([path])
    }
    let touched: HashSet<&str> = matched.sites.iter().flat_map(|site| ends(&site.module)).collect();
    let untouched: BTreeSet<&str> =
        config.target_modules.iter().map(String::as_str).filter(|entry| !touched.contains(entry)).collect();
    if untouched.is_empty() {
        return None;
    }
    let paths: Vec<String> = modules::paths(&policy.spec).collect();
    let of_base: HashSet<&str> = paths.iter().flat_map(|path| ends(path)).collect();
    let untouched: Vec<&str> = untouched.into_iter().filter(|entry| of_base.contains(entry)).collect();
    (!untouched.is_empty()).then(|| {
        format!(
            "`target_modules` lists {} and the file has no tensors for {}: it was narrowed by `exclude_modules` or \
             `layers_to_transform`, or it was saved incompletely",
            listed(&untouched, 5),
            if untouched.len() == 1 { "it" } else { "them" }
        )
    })
}

/// Sorts tensors to the sites they name.
fn group_by_site(
    tensors: &[TensorEntry],
    policy: &AdapterPolicy,
    report: &mut LoadReport,
) -> (BTreeMap<Site, Group>, Problems) {
    let mut groups: BTreeMap<Site, Group> = BTreeMap::new();
    let mut problems = Problems::default();
    let mut foreign = Vec::new();
    let mut adapters: BTreeMap<String, &str> = BTreeMap::new();
    let (mut wrapped, mut plain) = (Vec::new(), 0_usize);
    for (index, tensor) in tensors.iter().enumerate() {
        let key = tensor.name.as_str();
        let name = match TensorName::parse(key) {
            Ok(name) => name,
            Err(unsupported) => {
                problems.add(key, format!("`{key}`: {}", unsupported.reason));
                continue;
            }
        };
        let (site, module) = match modules::resolve(&policy.spec, &name.module) {
            Resolved::Module { site, path, wrapped: false } => {
                plain += 1;
                (site, path)
            }
            Resolved::Module { site, path, wrapped: true } => {
                wrapped.push(key);
                (site, path)
            }
            Resolved::LayerBeyond { layer } => {
                let layers = policy.spec.layers;
                problems.add(
                    key,
                    format!("`{key}` is of layer {layer}; this base has {layers} layers, 0 to {}", layers - 1),
                );
                continue;
            }
            Resolved::Foreign => {
                foreign.push((key, name.module.join(".")));
                continue;
            }
        };
        if let Some(adapter) = name.adapter {
            adapters.insert(adapter, key);
        }
        let embedding = site == Site::EMBED;
        let group = groups.entry(site).or_default();
        group.module = module;
        let slot = match name.part {
            Part::A if !embedding => &mut group.a,
            Part::B if !embedding => &mut group.b,
            Part::EmbeddingA if embedding => &mut group.a,
            Part::EmbeddingB if embedding => &mut group.b,
            Part::BaseCopy => &mut group.copy,
            Part::A | Part::B => {
                problems.add(key, format!("`{key}`: an embedding is adapted by lora_embedding_A and lora_embedding_B"));
                continue;
            }
            Part::EmbeddingA | Part::EmbeddingB => {
                problems.add(key, format!("`{key}`: a linear module is adapted by lora_A and lora_B"));
                continue;
            }
        };
        if let Some(first) = slot.replace(index) {
            let reason = format!("`{}` and `{key}` are two spellings of the same tensor", tensors[first].name);
            problems.add(&tensors[first].name, reason.clone());
            problems.add(key, reason);
        }
    }
    if !foreign.is_empty() {
        let reason = foreign_reason(&foreign, policy);
        for (key, _) in &foreign {
            problems.add(key, reason.clone());
        }
    }
    if adapters.len() > 1 {
        let names: Vec<&String> = adapters.keys().collect();
        let reason =
            format!("its keys hold tensors of {} adapters: {}; save them apart", names.len(), listed(&names, 3));
        for key in adapters.values() {
            problems.add(key, reason.clone());
        }
    }
    if !wrapped.is_empty() && plain > 0 {
        for key in &wrapped {
            problems
                .add(key, format!("`{key}` is inside `language_model` and other keys are not: which model is meant?"));
        }
    } else if !wrapped.is_empty() && problems.0.is_empty() {
        report.warnings.push(format!(
            "all keys carry a multimodal wrapper's prefix (`{}`); they were read as those of this text model",
            wrapped[0]
        ));
    }
    (groups, problems)
}

fn foreign_reason(foreign: &[(&str, String)], policy: &AdapterPolicy) -> String {
    let received: BTreeSet<&str> = foreign.iter().map(|(_, module)| module.as_str()).collect();
    let received: Vec<&str> = received.into_iter().collect();
    let keys: Vec<&str> = foreign.iter().map(|(key, _)| *key).collect();
    format!(
        "expected target modules in {} but received {}. Please verify that the loaded LoRA module is correct: it has \
         {}; this base has {}",
        listed(&MODULE_NAMES, MODULE_NAMES.len()),
        listed(&received, 3),
        listed(&keys, 3),
        listed(&modules::example_keys(&policy.spec), 3)
    )
}

/// Checks that every group is whole and has the shapes that the base and the configuration ask for.
fn check_groups(
    config: &AdapterConfig,
    tensors: &[TensorEntry],
    policy: &AdapterPolicy,
    groups: BTreeMap<Site, Group>,
) -> (Matched, Problems) {
    let mut problems = Problems::default();
    let mut matched = Matched::default();
    for (site, group) in groups {
        let Some((input, output)) = modules::shape(&policy.spec, site) else { continue };
        let Group { module, a, b, copy } = group;
        if let Some(tensor) = copy {
            check_copy(&tensors[tensor], site, input, output, &mut problems);
            matched.copies.push(BaseCopy { module: module.clone(), tensor });
        }
        let (a, b) = match (a, b) {
            (Some(a), Some(b)) => (a, b),
            (Some(alone), None) | (None, Some(alone)) => {
                let key = &tensors[alone].name;
                let (here, missing) = if a.is_some() { ("A", "B") } else { ("B", "A") };
                problems.add(key, format!("`{key}`: the {here} factor of `{module}` has no {missing} factor"));
                continue;
            }
            (None, None) => continue,
        };
        let before = problems.0.len();
        let rank = config.scaling.rank(&module);
        check_factor(&tensors[a], "A", [rank as usize, input], rank, &mut problems);
        check_factor(&tensors[b], "B", [output, rank as usize], rank, &mut problems);
        if policy.target_modules.as_ref().is_some_and(|restriction| !modules::allowed(restriction, &module)) {
            let allowed = policy.target_modules.as_deref().unwrap_or_default();
            let reason = format!(
                "`{module}` is not among the target modules that this deployment allows: {}",
                listed(allowed, allowed.len())
            );
            problems.add(&tensors[a].name, reason);
        }
        if problems.0.len() > before {
            continue;
        }
        let scale = config.scaling.scale(&module);
        if !scale.is_finite() {
            problems.add(&tensors[a].name, format!("the scale of `{module}` is {scale}: lora_alpha is too large"));
            continue;
        }
        let shape = SiteShape { site, rank, input: input as u32, output: output as u32, scale };
        matched.sites.push(MatchedSite { shape, module, a, b });
    }
    (matched, problems)
}

/// Tensors of whole sites.
fn note_matched(tensors: &[TensorEntry], matched: &Matched, report: &mut LoadReport) {
    report
        .matched
        .extend(matched.sites.iter().flat_map(|site| [site.a, site.b]).map(|tensor| tensors[tensor].name.clone()));
    report.matched.sort();
}

/// Tensors of which nothing was said so far, although their adapter is refused.
fn note_others(tensors: &[TensorEntry], matched: &Matched, report: &mut LoadReport) {
    for copy in &matched.copies {
        let name = &tensors[copy.tensor].name;
        if !report.refused.contains_key(name) {
            let reason = format!("a copy of the base's `{}`, not compared with it", copy.module);
            report.ignored.insert(name.clone(), reason);
        }
    }
    for TensorEntry { name, .. } in tensors {
        if report.matched.binary_search(name).is_err() && !report.ignored.contains_key(name) {
            let reason = "another tensor of its module is refused, or missing";
            report.refused.entry(name.clone()).or_insert_with(|| reason.to_owned());
        }
    }
}

/// What of the tensors of an adapter whose configuration is refused already would be applied and what would not, for its
/// report.
pub(super) fn note_tensors(
    config: &AdapterConfig,
    tensors: &[TensorEntry],
    policy: &AdapterPolicy,
    report: &mut LoadReport,
) {
    let (groups, problems) = group_by_site(tensors, policy, report);
    let (matched, others) = check_groups(config, tensors, policy, groups);
    problems.note(report);
    others.note(report);
    note_matched(tensors, &matched, report);
    note_others(tensors, &matched, report);
}

fn check_dtype(tensor: &TensorEntry, problems: &mut Problems) {
    if !matches!(tensor.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
        let reason =
            format!("`{}` is stored as {:?}; adapters are float32, float16 or bfloat16", tensor.name, tensor.dtype);
        problems.add(&tensor.name, reason);
    }
}

fn check_factor(tensor: &TensorEntry, factor: &str, expected: [usize; 2], rank: u32, problems: &mut Problems) {
    check_dtype(tensor, problems);
    if tensor.shape == expected {
        return;
    }
    let rank_axis = usize::from(factor == "B");
    let same_module = tensor.shape.len() == 2 && tensor.shape[1 - rank_axis] == expected[1 - rank_axis];
    let name = &tensor.name;
    let reason = if same_module {
        format!(
            "`{name}` has shape {:?}, which is rank {}; adapter_config.json says rank {rank}, which is {expected:?}",
            tensor.shape, tensor.shape[rank_axis]
        )
    } else {
        format!(
            "`{name}` has shape {:?}; this base needs {expected:?} at rank {rank}: it was made for another base",
            tensor.shape
        )
    };
    problems.add(name, reason);
}

fn check_copy(tensor: &TensorEntry, site: Site, input: usize, output: usize, problems: &mut Problems) {
    check_dtype(tensor, problems);
    // The embedding's matrix is stored by token, as the head's.
    let expected = if site == Site::EMBED { [input, output] } else { [output, input] };
    if tensor.shape != expected {
        let reason = format!(
            "`{}` is a copy of a base matrix of shape {:?}; this base has {expected:?}: it was made for another base",
            tensor.name, tensor.shape
        );
        problems.add(&tensor.name, reason);
    }
}

/// With `ensure_weight_tying` on a tied base, the head's delta is part of the adapter: PEFT writes both ends.
fn check_tying(config: &AdapterConfig, policy: &AdapterPolicy, matched: &Matched) -> Result<(), Fault> {
    let has = |site: Site| matched.sites.iter().any(|found| found.shape.site == site);
    if config.ties_head_to_embedding && policy.spec.tied && has(Site::EMBED) != has(Site::HEAD) {
        return Err(Fault::invalid(
            "`ensure_weight_tying` is set and the adapter has factors for one of `embed_tokens` and `lm_head` only; \
             save it with a PEFT that writes both, or switch it off",
        )
        .key("ensure_weight_tying"));
    }
    Ok(())
}

fn check_combinations(policy: &AdapterPolicy, matched: &Matched) -> Result<(), Fault> {
    for site in &matched.sites {
        let adapter = match site.shape.site {
            Site::EMBED => AdapterFeature::Embedding,
            Site::HEAD => AdapterFeature::Head,
            _ => AdapterFeature::Linear,
        };
        if let Some(engine) = policy.features.iter().find(|&&engine| verdict(adapter, engine) == Verdict::Refused) {
            return Err(Fault::invalid(format!(
                "`{}` is adapted, and adapters of this kind ({adapter:?}) do not work together with {engine:?}",
                site.module
            ))
            .key(&site.module));
        }
    }
    Ok(())
}

fn fill_report(tensors: &[TensorEntry], policy: &AdapterPolicy, matched: &Matched, report: &mut LoadReport) {
    for site in &matched.sites {
        let SiteShape { rank, input, output, scale, .. } = site.shape;
        report.modules.insert(site.module.clone(), ModuleReport { rank, scale, effect: None });
        let elements = u64::from(rank) * (u64::from(input) + u64::from(output));
        report.bytes += elements * policy.dtype.bytes() as u64;
    }
    note_matched(tensors, matched, report);
}
