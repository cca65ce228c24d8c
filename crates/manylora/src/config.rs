//! Everything an engine can be told at start. Names and defaults are the field's own where it has them.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use manylora_core::budget::division::SizeSettings;
use manylora_core::eviction::EvictionPolicyKind;
use manylora_core::sampling::LogprobsMode;
use manylora_core::{SchedulingPolicy, SchedulingSettings};

use crate::error::EngineError;
use crate::registry::AdapterSource;

/// Number format of the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DType {
    /// bf16 for bf16, fp16 and fp32 checkpoints and GGUF.
    #[default]
    Auto,
    /// bfloat16 weights, adapters and KV cache; f32 accumulation.
    BFloat16,
    /// f32 throughout.
    Float32,
    /// On processors: computes in f32, and refuses values beyond fp16's range. On cards: fp16 weights, adapters and KV
    /// cache; f32 accumulation.
    Float16,
}

impl DType {
    /// Parses `auto`, `bfloat16`, `float32`, `float16` and their short forms.
    pub fn parse(text: &str) -> Option<Self> {
        match text.trim_start_matches("torch.") {
            "auto" => Some(Self::Auto),
            "bfloat16" | "bf16" => Some(Self::BFloat16),
            "float32" | "float" | "fp32" | "f32" => Some(Self::Float32),
            "float16" | "half" | "fp16" | "f16" => Some(Self::Float16),
            _ => None,
        }
    }
}

/// What an engine computes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// The first card, where there is a driver and a card that can be used, and the build has feature `cuda`; else processors.
    #[default]
    Auto,
    /// Processors.
    Cpu,
    /// An NVIDIA card.
    Cuda {
        /// Its number.
        ordinal: usize,
    },
}

impl Device {
    /// Parses `auto`, `cpu`, `cuda` (the first card) and `cuda:1`.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "auto" => Some(Self::Auto),
            "cpu" => Some(Self::Cpu),
            "cuda" => Some(Self::Cuda { ordinal: 0 }),
            _ => {
                let number = text.strip_prefix("cuda:")?;
                let plain = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
                plain.then(|| number.parse().ok()).flatten().map(|ordinal| Self::Cuda { ordinal })
            }
        }
    }
}

/// Called before an adapter's files are read, on a thread that may take its time: to fetch them, or to take note.
#[derive(Clone)]
pub struct ReadHook(Arc<Hook>);

type Hook = dyn Fn(&AdapterSource) -> Result<(), String> + Send + Sync;

impl ReadHook {
    /// A hook; an error that it returns fails that read.
    pub fn new(hook: impl Fn(&AdapterSource) -> Result<(), String> + Send + Sync + 'static) -> Self {
        Self(Arc::new(hook))
    }

    pub(crate) fn call(&self, source: &AdapterSource) -> Result<(), EngineError> {
        (self.0)(source).map_err(|message| EngineError::AdapterOperation { name: source.name.clone(), message })
    }
}

impl fmt::Debug for ReadHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReadHook")
    }
}

/// Configuration of an [`crate::Engine`].
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Directory (Hugging Face layout) or GGUF file of the base.
    pub model: PathBuf,
    /// Further names the base answers to (hub id, served names): compared with adapters' `base_model_name_or_path`.
    pub model_names: Vec<String>,
    /// Directory or GGUF file of the tokenizer, if it is not the model's own.
    pub tokenizer: Option<PathBuf>,
    /// Whether to do without a tokenizer: prompts are token ids, outputs have no text.
    pub skip_tokenizer_init: bool,
    /// Chat template text that replaces the checkpoint's.
    pub chat_template: Option<String>,
    /// What to compute on.
    pub device: Device,
    /// Number format.
    pub dtype: DType,
    /// Longest sequence (prompt and output). None = the model's context, lowered to what the KV budget holds.
    pub max_model_len: Option<usize>,
    /// Sequences per step.
    pub max_num_seqs: usize,
    /// Rows per step. None = 2048, or more where `max_num_seqs` or whole prompts (without chunked prefill) need it.
    pub max_num_batched_tokens: Option<usize>,
    /// Tokens per KV block.
    pub block_size: usize,
    /// Bytes shared by KV blocks and adapters. None = from free memory; on a card: what its budget leaves.
    pub kv_cache_memory_bytes: Option<u64>,
    /// Share of a card's memory that the engine takes in all: the driver's own, weights, working memory, KV blocks, adapters.
    pub gpu_memory_utilization: f64,
    /// On a card: base products by our own kernels, whose sums have one order whatever the number of rows, so that results do
    /// not depend on what shares a step. Off, cuBLASLt is used where it is found, with its fastest algorithm for each shape.
    pub batch_invariant: bool,
    /// On a card, where cuBLASLt computes base products: one algorithm for each shape of weight, that for the largest step, for
    /// any number of rows, so that few rows take longer. An algorithm sums in one order, as far as is known; its maker promises
    /// that for no pair of shapes, and `batch_invariant` is what promises it. Without effect with `batch_invariant`, and where
    /// cuBLASLt is missing: our own kernels sum in one order anyway.
    pub fixed_gemm_algorithm: bool,
    /// On a card: whether the layers of small steps are launched one by one instead of being recorded and replayed.
    pub enforce_eager: bool,
    /// Folders in which cuBLASLt may lie (those of Python packages); the system's own are always looked in.
    pub cuda_library_folders: Vec<PathBuf>,
    /// Whether blocks are kept for requests that share a prefix.
    pub enable_prefix_caching: bool,
    /// Whether prompts may be split over steps.
    pub enable_chunked_prefill: bool,
    /// Whose turn it is: fair shares per tenant or adapter, first come first served, or by priority.
    pub scheduling_policy: SchedulingPolicy,
    /// Whether adapters can be used at all.
    pub enable_lora: bool,
    /// Largest rank that is accepted. Checked, never reserved.
    pub max_lora_rank: usize,
    /// Distinct adapters per step; None = no cap.
    pub max_loras: Option<usize>,
    /// Resident adapters; None = unbounded.
    pub max_cpu_loras: Option<usize>,
    /// Which resident adapter goes when room is needed.
    pub lora_eviction: EvictionPolicyKind,
    /// Most bytes of adapters; None = elastic. In either case out of the budget shared with the KV cache.
    pub lora_memory_bytes: Option<u64>,
    /// Directories adapters may come from; None = anywhere.
    pub lora_roots: Option<Vec<PathBuf>>,
    /// Deployment-time restriction of the modules adapters may touch.
    pub lora_target_modules: Option<Vec<String>>,
    /// Whether an adapter that names another base is refused (otherwise: one warning).
    pub strict_base: bool,
    /// Most logprobs per token that a request may ask for; -1 = the whole vocabulary.
    pub max_logprobs: i64,
    /// What logprobs are of.
    pub logprobs_mode: LogprobsMode,
    /// Seed of requests that bring none.
    pub seed: u64,
    /// Threads of the barrier pool; None = min(physical cores, affinity, cgroup quota).
    pub num_threads: Option<usize>,
    /// Whether threads are pinned to cores.
    pub pin_threads: bool,
    /// Whether threads that wait long park. Off, they spin: only for measurements that forbid system calls.
    pub park_threads: bool,
    /// SIMD level by name; None = the best of this processor, or `MANYLORA_SIMD`.
    pub simd: Option<String>,
    /// Threads that read adapters. None = one for every four that compute, at least 2 and at most 4: reading takes a core
    /// from decoding, and one slow read must not hold up the others.
    pub loader_threads: Option<usize>,
    /// A new file for a trace: everything that the control plane is told and decides, and how long it takes, without texts and
    /// tokens. None = none.
    pub record_trace: Option<PathBuf>,
    /// Called before an adapter is read.
    pub before_read: Option<ReadHook>,
    /// A waiting adapter that the cap keeps out for this many steps closes admission to others (promise P5).
    pub max_deferred_steps: u64,
}

impl EngineConfig {
    /// Defaults for the base in `model`.
    pub fn new(model: impl Into<PathBuf>) -> Self {
        // What decides sizes is the planner's and the simulator's, too.
        let (sizes, scheduling) = (SizeSettings::new(0), SchedulingSettings::default());
        Self {
            model: model.into(),
            model_names: Vec::new(),
            tokenizer: None,
            skip_tokenizer_init: false,
            chat_template: None,
            device: Device::Auto,
            dtype: DType::Auto,
            max_model_len: sizes.max_model_len,
            max_num_seqs: sizes.max_num_seqs,
            max_num_batched_tokens: sizes.max_num_batched_tokens,
            block_size: sizes.block_size,
            kv_cache_memory_bytes: sizes.kv_cache_memory_bytes,
            gpu_memory_utilization: sizes.gpu_memory_utilization,
            batch_invariant: false,
            fixed_gemm_algorithm: false,
            enforce_eager: false,
            cuda_library_folders: Vec::new(),
            enable_prefix_caching: scheduling.enable_prefix_caching,
            enable_chunked_prefill: sizes.enable_chunked_prefill,
            scheduling_policy: scheduling.policy,
            enable_lora: sizes.enable_lora,
            max_lora_rank: sizes.max_lora_rank,
            max_loras: sizes.max_loras,
            max_cpu_loras: scheduling.max_cpu_loras,
            lora_eviction: scheduling.eviction,
            lora_memory_bytes: scheduling.lora_memory_bytes,
            lora_roots: None,
            lora_target_modules: None,
            strict_base: false,
            max_logprobs: 20,
            logprobs_mode: LogprobsMode::RawLogprobs,
            seed: 0,
            num_threads: None,
            pin_threads: false,
            park_threads: true,
            simd: None,
            loader_threads: None,
            record_trace: None,
            before_read: None,
            max_deferred_steps: scheduling.max_deferred_steps,
        }
    }
}
