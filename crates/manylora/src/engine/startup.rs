//! From an [`EngineConfig`] to running threads: what fits is decided here, before any weight is read.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{Builder, JoinHandle};

use manylora_core::budget::{Ledger, ModelDimensions, NumberFormat, TargetModule};
use manylora_core::{ControlPlane, CoreConfig, Digest, LoraMemory};
use manylora_kernels::StorageType;
use manylora_kernels::cpu::{CpuBackend, CpuOptions, SimdLevel};
use manylora_model::adapter::combinations::EngineFeature;
use manylora_model::adapter::{AdapterPolicy, MAX_RANK};
use manylora_model::chat::ChatTemplate;
use manylora_model::checkpoint::{Checkpoint, GenerationDefaults, memory};
use manylora_model::decoder::{DecoderLimits, DecoderWeights, packed_bytes, working_bytes};
use manylora_model::tokenizer::Tokenizer;
use manylora_model::{ModelSpec, PackedHandle, Runner};

pub use manylora_model::decoder::LoadProgress;

use super::handle::{EngineHandle, Shared};
use super::library::Library;
use super::loader::{self, Job, Reader};
use super::lower::LoweredStep;
use super::worker::Worker;
use crate::config::{DType, EngineConfig};
use crate::error::EngineError;
use crate::registry::Registry;

/// Share of the free memory that the KV cache and adapters take when nothing is said.
const DEFAULT_SHARE_OF_FREE: u64 = 2;
/// Room for adapters that the default budget adds to the KV cache's need.
const DEFAULT_ADAPTER_BYTES: u64 = 1 << 30;

/// What was decided at start. All bytes are exact.
#[derive(Clone, Debug)]
pub struct EngineInfo {
    /// Backend, SIMD level, threads.
    pub backend: String,
    /// Number format of weights, adapters and KV cache.
    pub dtype: &'static str,
    /// Bytes of the packed weights.
    pub weight_bytes: u64,
    /// Bytes of activations, tables and the working memory of kernels, for the largest step.
    pub working_bytes: u64,
    /// Bytes that KV blocks and adapters share.
    pub ledger_bytes: u64,
    /// KV blocks when no adapter is resident.
    pub kv_blocks: usize,
    /// Bytes of one block over all layers.
    pub block_bytes: u64,
    /// Tokens per block.
    pub block_size: usize,
    /// Longest sequence.
    pub max_model_len: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Sampling defaults of generation_config.json.
    pub generation: GenerationDefaults,
    /// The names that the base answers to.
    pub base_names: Vec<String>,
    /// Lines worth telling: quantized checkpoints, a lowered context.
    pub notes: Vec<String>,
}

/// Rows of a step when nothing is said.
const DEFAULT_BATCHED_TOKENS: usize = 2048;
/// Counts beyond this are mistakes, and would overflow the arithmetic of bytes.
const LARGEST_COUNT: usize = 1 << 24;

/// More threads than any machine has cores for are a mistake, and would exhaust the user's limit on threads.
const MOST_THREADS: usize = 1024;

struct Sizes {
    max_rows: usize,
    dtype: StorageType,
    dtype_name: &'static str,
    block_bytes: u64,
    ledger_bytes: u64,
    blocks: usize,
    max_model_len: usize,
}

/// Loads the base and starts the threads.
pub(crate) fn start(
    config: EngineConfig,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<(EngineHandle, Vec<JoinHandle<()>>), EngineError> {
    spawn(assemble(config, progress)?)
}

/// Everything that a running engine is made of, before any thread is started.
pub(crate) struct Assembled {
    pub(crate) shared: Shared,
    pub(crate) worker: Worker,
    pub(crate) jobs: Receiver<Job>,
    pub(crate) discarded: Receiver<PackedHandle>,
    loader_threads: usize,
}

/// Loads the base and puts the engine together.
pub(crate) fn assemble(config: EngineConfig, progress: &mut dyn FnMut(LoadProgress)) -> Result<Assembled, EngineError> {
    check_limits(&config)?;
    let checkpoint = Checkpoint::open(&config.model)?;
    let checkpoint = if config.dtype == DType::Float16 { checkpoint.within_fp16_range() } else { checkpoint };
    let spec = checkpoint.spec.clone();
    let mut notes = Vec::new();
    let tokenizer = open_tokenizer(&config, &checkpoint)?;
    let chat_template = open_template(&config, &checkpoint, tokenizer.as_ref())?;
    let backend = Arc::new(CpuBackend::new(CpuOptions {
        num_threads: config.num_threads,
        level: config.simd.as_deref().map(SimdLevel::parse).transpose()?,
        pin_threads: config.pin_threads,
        park_threads: config.park_threads,
    })?);

    let loader_threads = config.loader_threads.unwrap_or((backend.pool().threads() / 4).clamp(2, 4));
    let sizes = decide_sizes(&config, &spec, &backend, &mut notes)?;
    // Everything that can be refused is refused before the weights are read.
    ControlPlane::new(core_config(&config, &sizes, loader_threads, Digest([0; 32])))?;
    notes.extend(checkpoint.quantization.as_ref().map(|note| note.line(sizes.dtype.bytes())));
    let weights = DecoderWeights::load(Arc::clone(&backend), &checkpoint, sizes.dtype, progress)?;
    let limits = decoder_limits(&config, &sizes);
    let working_bytes = working_bytes(&*backend, &spec, &limits, sizes.dtype);
    let decoder = weights.allocate(limits)?;
    // The weights were hashed as they were read.
    let core = ControlPlane::new(core_config(&config, &sizes, loader_threads, Digest(checkpoint.digest())))?;

    let generation = checkpoint.generation.clone();
    let mut base_names = checkpoint.names.clone();
    base_names.extend(config.model_names.iter().cloned());
    let policy = AdapterPolicy {
        spec: spec.clone(),
        max_rank: config.max_lora_rank,
        dtype: sizes.dtype,
        check_fp16_range: config.dtype == DType::Float16,
        base_names: base_names.clone(),
        strict_base: config.strict_base,
        allowed_roots: config.lora_roots.clone(),
        target_modules: config.lora_target_modules.clone(),
        tokenizer_size: tokenizer.as_ref().map_or(spec.vocab_size, Tokenizer::vocab_size),
        features: engine_features(&config, &checkpoint),
        base_tensors: Arc::new(checkpoint),
    };
    let info = EngineInfo {
        backend: decoder.describe(),
        dtype: sizes.dtype_name,
        weight_bytes: decoder.weight_bytes(),
        working_bytes,
        ledger_bytes: sizes.ledger_bytes,
        kv_blocks: sizes.blocks,
        block_bytes: sizes.block_bytes,
        block_size: config.block_size,
        max_model_len: sizes.max_model_len,
        vocab_size: spec.vocab_size,
        generation,
        base_names,
        notes,
    };
    let (commands, received) = channel();
    let (jobs, ordered) = channel();
    let registry = Arc::new(Registry::default());
    let reader = Reader { policy: Arc::new(policy), packer: decoder.packer(), hook: config.before_read.clone() };
    let (discards, discarded) = channel();
    let library = Library::new(Arc::clone(&registry), jobs, discards);
    let step = LoweredStep::new(
        sizes.max_rows,
        config.max_num_seqs,
        info.kv_blocks.min(config.max_num_seqs * info.max_model_len.div_ceil(config.block_size)),
        config.block_size,
    );
    let worker = Worker::new(core, Box::new(decoder), library, received, step, config.max_num_seqs);
    let mut end_tokens: Vec<u32> = tokenizer.as_ref().and_then(Tokenizer::eos).into_iter().collect();
    for end in &info.generation.eos {
        if !end_tokens.contains(end) {
            end_tokens.push(*end);
        }
    }
    let shared = Shared {
        config,
        info,
        spec,
        end_tokens,
        tokenizer,
        chat_template,
        registry,
        reader,
        next_request: AtomicU64::new(0),
        next_submission: AtomicU64::new(0),
        commands,
        stopped: Arc::new(OnceLock::new()),
    };
    Ok(Assembled { shared, worker, jobs: ordered, discarded, loader_threads })
}

fn check_limits(config: &EngineConfig) -> Result<(), EngineError> {
    let positive = [
        ("max_num_seqs", config.max_num_seqs),
        ("max_num_batched_tokens", config.max_num_batched_tokens.unwrap_or(1)),
        ("block_size", config.block_size),
        ("max_lora_rank", config.max_lora_rank),
        ("max_model_len", config.max_model_len.unwrap_or(1)),
        ("max_loras", config.max_loras.unwrap_or(1)),
        ("max_cpu_loras", config.max_cpu_loras.unwrap_or(1)),
        ("num_threads", config.num_threads.unwrap_or(1)),
        ("loader_threads", config.loader_threads.unwrap_or(1)),
    ];
    for (name, value) in positive {
        if value == 0 || value > LARGEST_COUNT {
            return Err(EngineError::InvalidArgument(format!(
                "{name} must be between 1 and {LARGEST_COUNT}, got `{value}`"
            )));
        }
    }
    if config.num_threads.is_some_and(|threads| threads > MOST_THREADS) {
        return Err(EngineError::InvalidArgument(format!(
            "num_threads must be at most {MOST_THREADS}, got `{}`",
            config.num_threads.unwrap_or_default()
        )));
    }
    if config.block_size > 1024 {
        return Err(EngineError::InvalidArgument(format!(
            "block_size must be at most 1024, got `{}`",
            config.block_size
        )));
    }
    if config.max_logprobs < -1 {
        return Err(EngineError::InvalidArgument(format!(
            "max_logprobs must be -1 (the whole vocabulary) or at least 0, got `{}`",
            config.max_logprobs
        )));
    }
    Ok(())
}

fn open_tokenizer(config: &EngineConfig, checkpoint: &Checkpoint) -> Result<Option<Tokenizer>, EngineError> {
    if config.skip_tokenizer_init {
        return Ok(None);
    }
    let tokenizer = match &config.tokenizer {
        Some(path) if path.is_dir() => Tokenizer::from_directory(path)?,
        Some(path) => Tokenizer::from_source(&Checkpoint::open(path)?.tokenizer)?,
        None => Tokenizer::from_source(&checkpoint.tokenizer)?,
    };
    Ok(Some(tokenizer))
}

fn open_template(
    config: &EngineConfig,
    checkpoint: &Checkpoint,
    tokenizer: Option<&Tokenizer>,
) -> Result<Option<ChatTemplate>, EngineError> {
    let Some(tokenizer) = tokenizer else { return Ok(None) };
    Ok(match &config.chat_template {
        Some(text) => Some(ChatTemplate::from_text(text, tokenizer)?),
        None => ChatTemplate::from_source(&checkpoint.tokenizer, tokenizer)?,
    })
}

/// What this engine does with its base, for the table of pairs that adapters are checked against.
fn engine_features(config: &EngineConfig, checkpoint: &Checkpoint) -> Vec<EngineFeature> {
    let spec = &checkpoint.spec;
    let base = if checkpoint.quantization.is_some() {
        EngineFeature::DequantizedBase
    } else {
        EngineFeature::FullPrecisionBase
    };
    let optional = [
        (spec.tied, EngineFeature::TiedEmbeddings),
        (spec.windows.iter().any(Option::is_some), EngineFeature::SlidingWindow),
        (config.enable_chunked_prefill, EngineFeature::ChunkedPrefill),
        (config.enable_prefix_caching, EngineFeature::PrefixCache),
    ];
    let always = [base, EngineFeature::Preemption, EngineFeature::Composition, EngineFeature::RequestScale];
    always.into_iter().chain(optional.into_iter().filter(|(on, _)| *on).map(|(_, feature)| feature)).collect()
}

/// Decides dtype, context and the byte budget, and refuses what cannot fit before any weight is read.
fn decide_sizes(
    config: &EngineConfig,
    spec: &ModelSpec,
    backend: &CpuBackend,
    notes: &mut Vec<String>,
) -> Result<Sizes, EngineError> {
    let (dtype, dtype_name) = match config.dtype {
        DType::Auto | DType::BFloat16 => (StorageType::Bf16, "bfloat16"),
        DType::Float32 => (StorageType::F32, "float32"),
        DType::Float16 => (StorageType::F32, "float16 (computed in float32)"),
    };
    let context = config.max_model_len.unwrap_or(spec.max_position_embeddings);
    let whole_prompts = if config.enable_chunked_prefill { 1 } else { context };
    let max_rows =
        config.max_num_batched_tokens.unwrap_or(DEFAULT_BATCHED_TOKENS.max(config.max_num_seqs).max(whole_prompts));
    let weights = packed_bytes(spec, dtype);
    // The context and the number of blocks are at most these: what is left depends on what is needed here.
    let limits = limits_for(config, max_rows, context, u32::MAX as usize / config.block_size);
    let working = working_bytes(backend, spec, &limits, dtype);
    let needed = weights.saturating_add(working);
    let free = memory::available_bytes().unwrap_or(u64::MAX);
    if needed > free {
        return Err(EngineError::Model(manylora_model::ModelError::DoesNotFit {
            needed,
            available: free,
            message: format!(
                "weights in {dtype_name} ({weights} bytes) and the working memory of {max_rows} rows ({working} bytes); use \
                 a smaller model, dtype bfloat16, a smaller max_num_batched_tokens, or a bigger machine"
            ),
        }));
    }
    let number = match dtype {
        StorageType::Bf16 | StorageType::F16 => NumberFormat::Bf16,
        StorageType::F32 => NumberFormat::F32,
    };
    let dimensions = dimensions(spec);
    let block_bytes = dimensions.kv_block_bytes(config.block_size as u64, number);
    if context > spec.max_position_embeddings {
        return Err(EngineError::InvalidArgument(format!(
            "max_model_len `{context}` is beyond the model's context of {} positions; give a smaller one",
            spec.max_position_embeddings
        )));
    }
    let ledger_bytes = config.kv_cache_memory_bytes.unwrap_or_else(|| {
        let sequence = (context.div_ceil(config.block_size) as u64).saturating_mul(block_bytes);
        let wanted = sequence.saturating_mul(config.max_num_seqs as u64).saturating_add(DEFAULT_ADAPTER_BYTES);
        wanted.min((free - needed) / DEFAULT_SHARE_OF_FREE)
    });
    if ledger_bytes > free - needed {
        return Err(EngineError::InvalidArgument(format!(
            "kv_cache_memory_bytes `{ledger_bytes}` and {needed} bytes of weights and working memory are more than the \
             {free} bytes that are free; lower it"
        )));
    }
    let ledger = Ledger { bytes: ledger_bytes, block_bytes, block_size: config.block_size };
    let mut max_model_len = context;
    if ledger.sequence_bytes(context) > ledger_bytes {
        // A lowered context leaves room for one adapter of the largest rank, so that the shelf is not empty for ever.
        let adapter = dimensions.adapter_bytes(config.max_lora_rank as u64, &TargetModule::ALL, number);
        let kept = if config.enable_lora { adapter.min(ledger_bytes / 2) } else { 0 };
        let fits = ledger.longest_sequence(if config.max_model_len.is_none() { kept } else { 0 });
        if config.max_model_len.is_some() || fits == 0 {
            return Err(EngineError::InvalidArgument(format!(
                "max_model_len `{context}` needs {} bytes of KV cache and there are {ledger_bytes}; at most {fits} tokens \
                 fit: lower max_model_len or raise kv_cache_memory_bytes",
                ledger.sequence_bytes(context)
            )));
        }
        max_model_len = fits;
        notes.push(format!(
            "max_model_len lowered from {context} to {fits}: {ledger_bytes} bytes of KV cache hold no more"
        ));
    }
    let blocks = ledger.blocks_beside(0).min(u32::MAX as usize / config.block_size);
    Ok(Sizes { max_rows, dtype, dtype_name, block_bytes, ledger_bytes, blocks, max_model_len })
}

fn dimensions(spec: &ModelSpec) -> ModelDimensions {
    ModelDimensions {
        layers: spec.layers as u64,
        hidden: spec.hidden_size as u64,
        intermediate: spec.intermediate_size as u64,
        heads: spec.heads as u64,
        kv_heads: spec.kv_heads as u64,
        head_dim: spec.head_dim as u64,
        vocabulary: spec.vocab_size as u64,
        tied: spec.tied,
        attention_bias: spec.qkv_bias,
        head_norm: spec.qk_norm,
    }
}

fn decoder_limits(config: &EngineConfig, sizes: &Sizes) -> DecoderLimits {
    limits_for(config, sizes.max_rows, sizes.max_model_len, sizes.blocks)
}

fn limits_for(config: &EngineConfig, max_rows: usize, max_position: usize, blocks: usize) -> DecoderLimits {
    // One entry per row is the common case.
    let (max_entries, max_rank) =
        if config.enable_lora { (max_rows, config.max_lora_rank.min(MAX_RANK)) } else { (0, 0) };
    DecoderLimits {
        max_rows,
        max_logit_rows: config.max_num_seqs.min(max_rows),
        max_position,
        block_size: config.block_size,
        blocks,
        max_entries,
        max_rank,
    }
}

fn core_config(config: &EngineConfig, sizes: &Sizes, loader_threads: usize, base_digest: Digest) -> CoreConfig {
    CoreConfig {
        max_num_seqs: config.max_num_seqs,
        max_num_batched_tokens: sizes.max_rows,
        max_model_len: sizes.max_model_len,
        block_size: config.block_size,
        block_bytes: sizes.block_bytes,
        ledger_bytes: sizes.ledger_bytes,
        enable_prefix_caching: config.enable_prefix_caching,
        enable_chunked_prefill: config.enable_chunked_prefill,
        policy: config.scheduling_policy,
        max_loras: config.max_loras,
        max_cpu_loras: config.max_cpu_loras,
        lora_memory: config.lora_memory_bytes.map_or(LoraMemory::Elastic, LoraMemory::Bytes),
        eviction: config.lora_eviction,
        base_digest,
        max_deferred_steps: config.max_deferred_steps,
        // One that is read and one that is next, for each thread.
        max_loading: Some(2 * loader_threads),
    }
}

fn spawn(assembled: Assembled) -> Result<(EngineHandle, Vec<JoinHandle<()>>), EngineError> {
    let Assembled { shared, mut worker, jobs, discarded, loader_threads } = assembled;
    let jobs = Arc::new(Mutex::new(jobs));
    let mut threads = (0..loader_threads)
        .map(|_| {
            let (jobs, commands, reader) = (Arc::clone(&jobs), shared.commands.clone(), shared.reader.clone());
            thread("manylora-loader", move || loader::run(&jobs, &commands, &reader))
        })
        .collect::<Result<Vec<_>, _>>()?;
    drop(jobs);
    // Gives the memory of adapters back as they come.
    threads.push(thread("manylora-discard", move || discarded.into_iter().for_each(drop))?);
    let stopped = Arc::clone(&shared.stopped);
    let engine = thread("manylora-engine", move || {
        // A panic here is a bug; callers still get an error that names it instead of waiting for ever.
        let why = match catch_unwind(AssertUnwindSafe(|| worker.run())) {
            Ok(Ok(())) => "it was shut down".to_owned(),
            Ok(Err(error)) => format!("a step failed: {error}"),
            Err(panic) => format!("its thread failed: {}", panic_message(panic.as_ref())),
        };
        worker.close(&why);
        let _ = stopped.set(why);
    })?;
    threads.insert(0, engine);
    Ok((EngineHandle { shared: Arc::new(shared) }, threads))
}

fn thread(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, EngineError> {
    Builder::new()
        .name(name.to_owned())
        .spawn(body)
        .map_err(|error| EngineError::Stopped(format!("thread `{name}` could not be started: {error}")))
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(ToString::to_string)
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "without a message".to_owned())
}
