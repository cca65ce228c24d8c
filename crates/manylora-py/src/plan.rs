//! `manylora.plan`: what was asked becomes the planner's question, and its answer JSON.

use std::path::Path;

use manylora::model::ModelSpec;
use manylora::model::checkpoint::Checkpoint;
use manylora::model::checkpoint::int4::config::Quantization;
use manylora::model::error::ModelError;
use manylora::model::spec::config_object;
use manylora::{EngineError, ProcessorBytes, model_dimensions};
use manylora_core::SchedulingSettings;
use manylora_core::budget::division::SizeSettings;
use manylora_core::budget::working::StepLimits;
use manylora_core::budget::{ModelDimensions, NumberFormat};
use manylora_sim::SimError;
use manylora_sim::card::CardSpec;
use manylora_sim::model::{ModelDescription, Quantized, packed_bytes};
use manylora_sim::plan::{DType, FleetGroup, PlanRequest, PlannedDevice, ProcessorSpec, plan as answer};
use pyo3::prelude::*;

use crate::errors::IntoPython;

/// Every key must be there: `manylora/planning.py` has the defaults.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Question {
    model: String,
    gpu: String,
    memory_bytes: Option<u64>,
    dtype: String,
    /// Count, rank, modules.
    adapters: Vec<(u64, u64, Vec<String>)>,
    lengths: Vec<usize>,
    hot_adapters: Option<u64>,
    max_model_len: Option<usize>,
    max_num_seqs: usize,
    max_num_batched_tokens: Option<usize>,
    block_size: usize,
    kv_cache_memory_bytes: Option<u64>,
    gpu_memory_utilization: f64,
    batch_invariant: bool,
    enable_chunked_prefill: bool,
    max_lora_rank: usize,
    max_loras: Option<usize>,
    max_cpu_loras: Option<usize>,
    lora_memory_bytes: Option<u64>,
    num_threads: Option<usize>,
}

/// Answers as JSON.
#[pyfunction]
pub(crate) fn plan(py: Python<'_>, question: Question) -> PyResult<String> {
    py.detach(|| ask(question)).into_python(py)
}

/// The cards and the models that are known by name.
#[pyfunction]
pub(crate) fn planned_names() -> (Vec<&'static str>, Vec<&'static str>) {
    (CardSpec::names().collect(), ModelDescription::names().collect())
}

pub(crate) fn wrong(error: SimError) -> EngineError {
    match error {
        SimError::Size(error) => error.into(),
        error => EngineError::InvalidArgument(error.to_string()),
    }
}

fn ask(question: Question) -> Result<String, EngineError> {
    let model = describe(&question.model)?;
    let groups = question.adapters.iter().map(|(count, rank, modules)| {
        let modules = FleetGroup::modules_named(modules.iter().map(String::as_str))?;
        Ok(FleetGroup { count: *count, rank: *rank, modules })
    });
    let fleet = groups.collect::<Result<Vec<_>, SimError>>().map_err(wrong)?;
    let dtype = DType::named(&question.dtype).map_err(wrong)?;
    let settings = SizeSettings {
        max_model_len: question.max_model_len,
        max_num_seqs: question.max_num_seqs,
        max_num_batched_tokens: question.max_num_batched_tokens,
        enable_chunked_prefill: question.enable_chunked_prefill,
        block_size: question.block_size,
        kv_cache_memory_bytes: question.kv_cache_memory_bytes,
        gpu_memory_utilization: question.gpu_memory_utilization,
        max_lora_rank: question.max_lora_rank,
        max_loras: question.max_loras,
        ..SizeSettings::new(model.context)
    };
    let request = |device| PlanRequest {
        model,
        device,
        dtype,
        fleet,
        lengths: question.lengths,
        settings,
        scheduling: SchedulingSettings {
            max_cpu_loras: question.max_cpu_loras,
            lora_memory_bytes: question.lora_memory_bytes,
            ..SchedulingSettings::default()
        },
        hot_adapters: question.hot_adapters,
        cublas: !question.batch_invariant,
        free_bytes: None,
    };
    let answer = if question.gpu == "cpu" {
        let processor = ProcessorBytes::new(question.num_threads, None)?;
        let working = |dimensions: &ModelDimensions, limits: &StepLimits, number: NumberFormat| {
            processor.working(dimensions, limits, number)
        };
        answer(&request(PlannedDevice::Processor(ProcessorSpec {
            name: "cpu".to_owned(),
            free_bytes: question.memory_bytes.or_else(ProcessorBytes::available).unwrap_or(u64::MAX),
            packing: &|number| processor.packing(number),
            working: &working,
        })))
    } else {
        let known = CardSpec::named(&question.gpu).map_err(wrong)?;
        let memory_bytes = question.memory_bytes.unwrap_or(known.memory_bytes);
        answer(&request(PlannedDevice::Card(CardSpec { memory_bytes, ..known })))
    };
    let answer = answer.map_err(wrong)?;
    Ok(serde_json::to_string(&answer).expect("a plan is numbers and text"))
}

/// A model by the path of a checkpoint or of a config.json, or by name.
pub(crate) fn describe(model: &str) -> Result<ModelDescription, EngineError> {
    let path = Path::new(model);
    let config = if path.is_dir() { path.join("config.json") } else { path.to_path_buf() };
    if !path.exists() {
        return ModelDescription::named(model).map_err(wrong);
    }
    let is_config = config.extension().is_some_and(|ending| ending == "json");
    if is_config && path.is_file() {
        return from_config(model, &config);
    }
    match Checkpoint::open(path) {
        Ok(checkpoint) => {
            let quantized = checkpoint.quantization.as_ref();
            let quantized =
                quantized.map(|note| Quantized { scheme: note.scheme.clone(), packed_bytes: note.bytes_on_disk });
            Ok(description(model, &checkpoint.spec, quantized))
        }
        // A folder without weights is a model all the same.
        Err(ModelError::NotFound { .. }) if is_config && config.is_file() => from_config(model, &config),
        Err(error) => Err(error.into()),
    }
}

fn from_config(model: &str, config: &Path) -> Result<ModelDescription, EngineError> {
    let unreadable = |error: std::io::Error| {
        EngineError::InvalidArgument(format!("model `{}` cannot be read: {error}", config.display()))
    };
    let map = config_object(config, &std::fs::read(config).map_err(unreadable)?)?;
    let spec = ModelSpec::from_config(config, &map)?;
    let quantized = match map.get("quantization_config").filter(|value| !value.is_null()) {
        None => None,
        Some(value) => {
            let found = Quantization::parse(config, value)?;
            let group = found.group_size.map(|size| size as u64);
            let packed_bytes = packed_bytes(&model_dimensions(&spec), found.bits as u64, group);
            Some(Quantized { scheme: found.scheme(), packed_bytes })
        }
    };
    Ok(description(model, &spec, quantized))
}

fn description(name: &str, spec: &ModelSpec, quantized: Option<Quantized>) -> ModelDescription {
    ModelDescription {
        name: name.to_owned(),
        dimensions: model_dimensions(spec),
        context: spec.max_position_embeddings,
        float16: spec.checkpoint_dtype == "float16",
        quantized,
    }
}
