//! Conversion of the configuration dictionary that `manylora.LLM` makes.

use std::path::PathBuf;

use manylora::{DType, Device, EngineConfig, EngineError, EvictionPolicyKind, LogprobsMode, SchedulingPolicy};
use pyo3::prelude::*;

/// Every key must be there: `manylora/engine_args.py` has the defaults.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Config {
    model: PathBuf,
    model_names: Vec<String>,
    tokenizer: Option<PathBuf>,
    skip_tokenizer_init: bool,
    chat_template: Option<String>,
    device: String,
    dtype: String,
    max_model_len: Option<usize>,
    max_num_seqs: usize,
    max_num_batched_tokens: Option<usize>,
    block_size: usize,
    kv_cache_memory_bytes: Option<u64>,
    gpu_memory_utilization: f64,
    batch_invariant: bool,
    fixed_gemm_algorithm: bool,
    enforce_eager: bool,
    cuda_library_folders: Vec<PathBuf>,
    enable_prefix_caching: bool,
    enable_chunked_prefill: bool,
    scheduling_policy: String,
    enable_lora: bool,
    max_lora_rank: usize,
    max_loras: Option<usize>,
    max_cpu_loras: Option<usize>,
    lora_eviction: String,
    lora_memory_bytes: Option<u64>,
    lora_roots: Option<Vec<PathBuf>>,
    lora_target_modules: Option<Vec<String>>,
    strict_base: bool,
    max_logprobs: i64,
    logprobs_mode: String,
    seed: u64,
    num_threads: Option<usize>,
    pin_threads: bool,
    loader_threads: Option<usize>,
    max_deferred_steps: u64,
    record_trace: Option<PathBuf>,
}

impl Config {
    pub(crate) fn into_engine(self) -> Result<EngineConfig, EngineError> {
        let device = Device::parse(&self.device).ok_or_else(|| {
            EngineError::InvalidArgument(format!("device must be auto, cpu, cuda or cuda:N, got `{}`", self.device))
        })?;
        let dtype = DType::parse(&self.dtype).ok_or_else(|| {
            EngineError::InvalidArgument(format!(
                "dtype must be auto, bfloat16, float32 or float16, got `{}`",
                self.dtype
            ))
        })?;
        let scheduling_policy = match self.scheduling_policy.as_str() {
            "fair" => SchedulingPolicy::Fair,
            "fcfs" => SchedulingPolicy::Fcfs,
            "priority" => SchedulingPolicy::Priority,
            other => {
                return Err(EngineError::InvalidArgument(format!(
                    "scheduling_policy must be fair, fcfs or priority, got `{other}`"
                )));
            }
        };
        let lora_eviction = match self.lora_eviction.as_str() {
            "lru" => EvictionPolicyKind::Lru,
            "cost_aware" => EvictionPolicyKind::CostAware,
            other => {
                return Err(EngineError::InvalidArgument(format!(
                    "lora_eviction must be lru or cost_aware, got `{other}`"
                )));
            }
        };
        let logprobs_mode: LogprobsMode = self.logprobs_mode.parse()?;
        Ok(EngineConfig {
            model_names: self.model_names,
            tokenizer: self.tokenizer,
            skip_tokenizer_init: self.skip_tokenizer_init,
            chat_template: self.chat_template,
            device,
            dtype,
            max_model_len: self.max_model_len,
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            block_size: self.block_size,
            kv_cache_memory_bytes: self.kv_cache_memory_bytes,
            gpu_memory_utilization: self.gpu_memory_utilization,
            batch_invariant: self.batch_invariant,
            fixed_gemm_algorithm: self.fixed_gemm_algorithm,
            enforce_eager: self.enforce_eager,
            cuda_library_folders: self.cuda_library_folders,
            enable_prefix_caching: self.enable_prefix_caching,
            enable_chunked_prefill: self.enable_chunked_prefill,
            scheduling_policy,
            enable_lora: self.enable_lora,
            max_lora_rank: self.max_lora_rank,
            max_loras: self.max_loras,
            max_cpu_loras: self.max_cpu_loras,
            lora_eviction,
            lora_memory_bytes: self.lora_memory_bytes,
            lora_roots: self.lora_roots,
            lora_target_modules: self.lora_target_modules,
            strict_base: self.strict_base,
            max_logprobs: self.max_logprobs,
            logprobs_mode,
            seed: self.seed,
            num_threads: self.num_threads,
            pin_threads: self.pin_threads,
            loader_threads: self.loader_threads,
            max_deferred_steps: self.max_deferred_steps,
            record_trace: self.record_trace,
            ..EngineConfig::new(self.model)
        })
    }
}
