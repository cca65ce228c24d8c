//! A-55: the planner's bytes are the ledger's: it is asked about an engine's base, adapters and settings, and says what the
//! engine says once it runs.

mod common;

use std::fs;
use std::path::Path;

use common::{Oracle, adapter_path, engine};
use manylora::model::checkpoint::Checkpoint;
use manylora::{AdapterSource, DType, Device, Engine, EngineConfig, ProcessorBytes, model_dimensions};
use manylora_core::SchedulingSettings;
use manylora_core::budget::division::SizeSettings;
use manylora_core::budget::working::StepLimits;
use manylora_core::budget::{ModelDimensions, NumberFormat};
use manylora_sim::model::ModelDescription;
use manylora_sim::plan::{self, FleetGroup, Plan, PlanRequest, PlannedDevice, ProcessorSpec};

/// The planner's answer about what `config` would start, given these adapters.
fn planned(config: &EngineConfig, fleet: Vec<FleetGroup>) -> Plan {
    let checkpoint = Checkpoint::open(&config.model).expect("the base opens");
    let processor = ProcessorBytes::new(config.num_threads, config.simd.as_deref()).expect("a processor");
    let packing = |number: NumberFormat| processor.packing(number);
    let working = |dimensions: &ModelDimensions, limits: &StepLimits, number: NumberFormat| {
        processor.working(dimensions, limits, number)
    };
    let context = checkpoint.spec.max_position_embeddings;
    let request = PlanRequest {
        model: ModelDescription {
            name: "base".to_owned(),
            dimensions: model_dimensions(&checkpoint.spec),
            context,
            float16: false,
            quantized: None,
        },
        device: PlannedDevice::Processor(ProcessorSpec {
            name: "cpu".to_owned(),
            free_bytes: ProcessorBytes::available().unwrap_or(u64::MAX),
            packing: &packing,
            working: &working,
        }),
        dtype: if config.dtype == DType::Float32 { plan::DType::Float32 } else { plan::DType::Auto },
        fleet,
        lengths: Vec::new(),
        settings: SizeSettings {
            max_model_len: config.max_model_len,
            max_num_seqs: config.max_num_seqs,
            max_num_batched_tokens: config.max_num_batched_tokens,
            enable_chunked_prefill: config.enable_chunked_prefill,
            block_size: config.block_size,
            kv_cache_memory_bytes: config.kv_cache_memory_bytes,
            enable_lora: config.enable_lora,
            max_lora_rank: config.max_lora_rank,
            max_loras: config.max_loras,
            ..SizeSettings::new(context)
        },
        scheduling: SchedulingSettings {
            lora_memory_bytes: config.lora_memory_bytes,
            max_cpu_loras: config.max_cpu_loras,
            ..SchedulingSettings::default()
        },
        hot_adapters: None,
        cublas: false,
        free_bytes: None,
    };
    plan::plan(&request).expect("a plan")
}

fn assert_same(plan: &Plan, engine: &Engine, what: &str) {
    let info = engine.info();
    assert_eq!(plan.bytes.base, info.weight_bytes, "{what}: weights");
    assert_eq!(plan.bytes.workspace, info.working_bytes, "{what}: working memory");
    assert_eq!((plan.block_bytes, plan.total_blocks), (info.block_bytes, info.kv_blocks), "{what}: KV blocks");
    assert_eq!((plan.ledger_bytes, plan.max_model_len), (info.ledger_bytes, info.max_model_len), "{what}");
}

/// Rank and modules of an adapter that has one rank on whole modules of all layers.
fn plain(folder: &Path) -> Option<(u64, Vec<String>)> {
    let text = fs::read_to_string(folder.join("adapter_config.json")).ok()?;
    let config: serde_json::Value = serde_json::from_str(&text).ok()?;
    let empty = |key: &str| match &config[key] {
        serde_json::Value::Null | serde_json::Value::Bool(false) => true,
        serde_json::Value::Array(list) => list.is_empty(),
        serde_json::Value::Object(map) => map.is_empty(),
        _ => false,
    };
    let unusual = [
        "rank_pattern",
        "layers_to_transform",
        "exclude_modules",
        "modules_to_save",
        "layer_replication",
        "use_dora",
        "lora_bias",
        "trainable_token_indices",
        "target_parameters",
    ];
    if !unusual.iter().all(|key| empty(key)) {
        return None;
    }
    let modules = config["target_modules"].as_array()?.iter().map(|module| module.as_str().map(str::to_owned));
    Some((config["r"].as_u64()?, modules.collect::<Option<_>>()?))
}

#[test]
fn a_55_the_planners_bytes_are_the_ledgers() {
    let mut compared = 0;
    for base in ["llama", "llama-tied", "llama-odd", "qwen2", "qwen3", "mistral"] {
        let oracle = Oracle::open(base);
        for (dtype, rank, lora, rows) in
            [(DType::Float32, 64, true, 64), (DType::Auto, 512, true, 300), (DType::Auto, 64, false, 100)]
        {
            let mut config = EngineConfig::new(oracle.base_folder());
            let engine = engine(&oracle, |own| {
                own.dtype = dtype;
                own.max_lora_rank = rank;
                own.enable_lora = lora;
                own.max_num_batched_tokens = Some(rows);
                config = own.clone();
            });
            assert_same(&planned(&config, Vec::new()), &engine, base);
            if !lora {
                continue;
            }
            for entry in fs::read_dir(oracle.folder.join("adapters")).expect("adapters") {
                let name = entry.expect("an adapter").file_name().into_string().expect("a name");
                let Some((rank, modules)) = plain(&adapter_path(&oracle, &name)) else { continue };
                let modules = FleetGroup::modules_named(modules.iter().map(String::as_str));
                let Ok(modules) = modules else { continue };
                let source = AdapterSource::directory(name.as_str(), adapter_path(&oracle, &name));
                let Ok(loaded) = engine.load_adapter(source) else { continue };
                let answer = planned(&config, vec![FleetGroup { count: 1, rank, modules }]);
                assert_eq!(answer.fleet[0].bytes, loaded.report.bytes, "{base} {name}");
                engine.unload_adapter(&name, manylora::UnloadMode::Drain).expect("it goes");
                compared += 1;
            }
        }
    }
    assert!(compared >= 20, "{compared} adapters were compared");
}

/// The same of a real model.
#[test]
fn a_55_smollm2_too() {
    let Some(model) = std::env::var_os("MANYLORA_SMOLLM2") else {
        assert!(std::env::var_os("MANYLORA_REQUIRE_DATA").is_none(), "MANYLORA_SMOLLM2 must name the model");
        return;
    };
    let mut config = EngineConfig::new(model);
    config.device = Device::Cpu;
    config.num_threads = Some(2);
    config.kv_cache_memory_bytes = Some(200 << 20);
    let engine = Engine::start(config.clone()).expect("the engine starts");
    let answer = planned(&config, Vec::new());
    assert_same(&answer, &engine, "SmolLM2-135M");
    let built_in = ModelDescription::named("SmolLM2-135M-Instruct").expect("it is built in");
    let opened = Checkpoint::open(&config.model).expect("the model opens");
    assert_eq!((built_in.dimensions, built_in.context), (model_dimensions(&opened.spec), 8192));
}
