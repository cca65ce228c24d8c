//! The question: model, device, adapters, lengths and the engine's settings; every field is checked, and errors name it.

use manylora_core::budget::division::SizeSettings;
use manylora_core::budget::working::StepLimits;
use manylora_core::budget::{ModelDimensions, NumberFormat, TargetModule, WeightPacking};
use manylora_core::{LARGEST_COUNT, SchedulingSettings};

use crate::card::CardSpec;
use crate::error::SimError;
use crate::model::ModelDescription;

/// How numbers of weights, adapters and KV blocks are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DType {
    /// float16 for float16 checkpoints on cards, else bfloat16.
    #[default]
    Auto,
    /// Two bytes.
    BFloat16,
    /// Two bytes on cards; four on processors, which compute it in float32.
    Float16,
    /// Four bytes; on processors only.
    Float32,
}

impl DType {
    /// Its name in settings.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::BFloat16 => "bfloat16",
            Self::Float16 => "float16",
            Self::Float32 => "float32",
        }
    }

    /// By its name.
    pub fn named(name: &str) -> Result<Self, SimError> {
        let all = [Self::Auto, Self::BFloat16, Self::Float16, Self::Float32];
        all.into_iter()
            .find(|one| one.name() == name)
            .ok_or_else(|| SimError::field("dtype", name, "it must be auto, bfloat16, float16 or float32"))
    }
}

/// Adapters that are alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetGroup {
    /// How many.
    pub count: u64,
    /// Their rank.
    pub rank: u64,
    /// What they touch, in every layer; each once.
    pub modules: Vec<TargetModule>,
}

/// Module names in checkpoints.
const MODULES: [(&str, TargetModule); 7] = [
    ("q_proj", TargetModule::Q),
    ("k_proj", TargetModule::K),
    ("v_proj", TargetModule::V),
    ("o_proj", TargetModule::O),
    ("gate_proj", TargetModule::Gate),
    ("up_proj", TargetModule::Up),
    ("down_proj", TargetModule::Down),
];

/// What checkpoints call a module.
pub(super) fn module_name(module: TargetModule) -> &'static str {
    MODULES[module as usize].0
}

impl FleetGroup {
    /// Modules by the names that checkpoints have for them; `all-linear` is all of them.
    pub fn modules_named<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<Vec<TargetModule>, SimError> {
        let mut modules = Vec::new();
        for name in names {
            if name == "all-linear" {
                modules.extend(TargetModule::ALL);
                continue;
            }
            let Some((_, module)) =
                MODULES.iter().find(|(known, _)| *known == name || known.trim_end_matches("_proj") == name)
            else {
                let known = MODULES.map(|(known, _)| known).join(", ");
                return Err(SimError::field("target_modules", name, format!("known are {known}, and all-linear")));
            };
            modules.push(*module);
        }
        modules.sort_unstable();
        modules.dedup();
        if modules.is_empty() {
            return Err(SimError::field("target_modules", "", "an adapter touches at least one module"));
        }
        Ok(modules)
    }
}

/// A machine's processors.
pub struct ProcessorSpec<'a> {
    /// What to call them.
    pub name: String,
    /// Bytes of memory that are free.
    pub free_bytes: u64,
    /// How base weights of a number format are packed.
    pub packing: &'a dyn Fn(NumberFormat) -> WeightPacking,
    /// Bytes of working memory of a largest step: what its SIMD level and its threads want, activations included.
    pub working: &'a dyn Fn(&ModelDimensions, &StepLimits, NumberFormat) -> u64,
}

/// Where the model is to run.
pub enum PlannedDevice<'a> {
    /// On a card.
    Card(CardSpec),
    /// On processors.
    Processor(ProcessorSpec<'a>),
}

impl PlannedDevice<'_> {
    /// Its name.
    pub fn name(&self) -> &str {
        match self {
            Self::Card(card) => &card.name,
            Self::Processor(processor) => &processor.name,
        }
    }
}

/// The question.
pub struct PlanRequest<'a> {
    /// The base.
    pub model: ModelDescription,
    /// Where it is to run.
    pub device: PlannedDevice<'a>,
    /// How numbers are stored.
    pub dtype: DType,
    /// The adapters.
    pub fleet: Vec<FleetGroup>,
    /// Lengths of sequences, prompt and output, in tokens; none = `max_model_len`.
    pub lengths: Vec<usize>,
    /// The engine's settings that decide sizes.
    pub settings: SizeSettings,
    /// Those that decide no sizes, but what adapters may take.
    pub scheduling: SchedulingSettings,
    /// Adapters that requests ask for at the same time; None = all of them, up to `max_num_seqs`.
    pub hot_adapters: Option<u64>,
    /// Whether cuBLASLt multiplies on a card: it wants working memory.
    pub cublas: bool,
    /// Bytes of a card that are free once it was opened; None = all but the most that a driver takes.
    pub free_bytes: Option<u64>,
}

impl PlanRequest<'_> {
    pub(super) fn resolved_dtype(&self) -> Result<DType, SimError> {
        let is_card = matches!(self.device, PlannedDevice::Card(_));
        match self.dtype {
            DType::Auto if is_card && self.model.float16 => Ok(DType::Float16),
            DType::Auto => Ok(DType::BFloat16),
            DType::Float32 if is_card => {
                Err(SimError::field("dtype", "float32", "cards store bfloat16 or float16; use one, or gpu cpu"))
            }
            DType::Float16 if !is_card => Ok(DType::Float32),
            other => Ok(other),
        }
    }

    /// Adapters that there are.
    pub(super) fn adapters(&self) -> u64 {
        self.fleet.iter().map(|group| group.count).sum()
    }

    /// Largest rank among them.
    pub(super) fn largest_rank(&self) -> u64 {
        self.fleet.iter().map(|group| group.rank).max().unwrap_or(0)
    }

    pub(super) fn validate(&self) -> Result<(), SimError> {
        let settings = &self.settings;
        let counts = [
            ("max_num_seqs", settings.max_num_seqs),
            ("max_num_batched_tokens", settings.max_num_batched_tokens.unwrap_or(1)),
            ("block_size", settings.block_size),
            ("max_lora_rank", settings.max_lora_rank),
            ("max_model_len", settings.max_model_len.unwrap_or(1)),
            ("max_loras", settings.max_loras.unwrap_or(1)),
            ("max_cpu_loras", self.scheduling.max_cpu_loras.unwrap_or(1)),
            ("loader_threads", self.scheduling.loader_threads),
        ];
        for (name, value) in counts {
            if !(1..=LARGEST_COUNT).contains(&value) {
                return Err(SimError::field(name, value, format!("it must be between 1 and {LARGEST_COUNT}")));
            }
        }
        if settings.block_size > 1024 {
            return Err(SimError::field("block_size", settings.block_size, "it must be at most 1024"));
        }
        if let (Some(slots), Some(host)) = (settings.max_loras, self.scheduling.max_cpu_loras)
            && host < slots
        {
            return Err(SimError::field("max_cpu_loras", host, format!("it must be >= max_loras ({slots})")));
        }
        if let Some(rows) = settings.max_num_batched_tokens.filter(|&rows| rows < settings.max_num_seqs) {
            let message = format!("it must be at least max_num_seqs ({})", settings.max_num_seqs);
            return Err(SimError::field("max_num_batched_tokens", rows, message));
        }
        let utilization = settings.gpu_memory_utilization;
        if !(utilization > 0.0 && utilization <= 1.0) {
            return Err(SimError::field("gpu_memory_utilization", utilization, "it must be above 0 and at most 1"));
        }
        for group in &self.fleet {
            if group.count > LARGEST_COUNT as u64 {
                return Err(SimError::field("adapters", group.count, format!("at most {LARGEST_COUNT} are planned")));
            }
            if group.rank == 0 || group.rank > settings.max_lora_rank as u64 {
                let message = format!(
                    "an engine with max_lora_rank `{}` takes ranks from 1 to that; set max_lora_rank to {}",
                    settings.max_lora_rank,
                    group.rank.max(1)
                );
                return Err(SimError::field("rank", group.rank, message));
            }
        }
        if !self.fleet.is_empty() && !settings.enable_lora {
            return Err(SimError::field("adapters", self.adapters(), "there are none without enable_lora"));
        }
        Ok(())
    }
}
