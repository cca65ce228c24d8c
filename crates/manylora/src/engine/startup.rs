//! From an [`EngineConfig`] to running threads: what fits is decided here, before any weight is read.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::SystemTime;

use manylora_core::budget::NumberFormat;
use manylora_core::trace::TraceHeader;
use manylora_core::{ControlPlane, CoreConfig, Digest, LARGEST_COUNT};
use manylora_kernels::cpu::{CpuBackend, CpuOptions, SimdLevel};
use manylora_kernels::{Backend, StorageType};
use manylora_model::adapter::AdapterPolicy;
use manylora_model::adapter::combinations::EngineFeature;
use manylora_model::chat::ChatTemplate;
use manylora_model::checkpoint::{Checkpoint, GenerationDefaults};
use manylora_model::decoder::DecoderWeights;
use manylora_model::tokenizer::Tokenizer;
use manylora_model::{ModelSpec, PackedHandle, Runner};

pub use manylora_model::decoder::LoadProgress;

use super::courier::{self, Courier};
use super::device::{self, Chosen};
use super::handle::{EngineHandle, Shared};
use super::library::Library;
use super::loader::{self, Job, Reader};
use super::lower::LoweredStep;
use super::meters::{LoadFailures, Meters};
use super::phases::Phase;
use super::processor;
use super::recorder::{Plane, TraceFile, Writer};
use super::sizes::{self, Sizes};
use super::worker::Worker;
use crate::config::{DType, EngineConfig};
use crate::error::EngineError;
use crate::registry::Registry;
use crate::stream::Sleeper;
use crate::structure::Structure;

/// What was decided at start. All bytes are exact.
#[derive(Clone, Debug)]
pub struct EngineInfo {
    /// Backend, SIMD level, threads.
    pub backend: String,
    /// What it computes on: `cpu` or `cuda:0`.
    pub device: String,
    /// Why, where that was left to it.
    pub device_reason: Option<String>,
    /// Number format of weights, adapters and KV cache.
    pub dtype: &'static str,
    /// Bytes of the packed weights.
    pub weight_bytes: u64,
    /// Bytes of activations, tables and the working memory of kernels, for the largest step.
    pub working_bytes: u64,
    /// Bytes that KV blocks and adapters share.
    pub ledger_bytes: u64,
    /// How a card's memory is divided.
    pub card: Option<CardMemory>,
    /// Most adapters that one request can compose; None = any number.
    pub max_composed: Option<usize>,
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

/// How a card's memory is divided, in bytes, rounding included. All but the driver's part is one reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CardMemory {
    /// The card's memory.
    pub total_bytes: u64,
    /// What the engine may take in all.
    pub budget_bytes: u64,
    /// Of that, what the driver has for its context and code, and what is left to it for recorded steps.
    pub driver_bytes: u64,
    /// Weights.
    pub weight_bytes: u64,
    /// Activations, tables and the working memory of kernels.
    pub working_bytes: u64,
    /// KV blocks and adapters.
    pub shared_bytes: u64,
}

impl CardMemory {
    /// The reservation.
    pub const fn reserved_bytes(&self) -> u64 {
        self.weight_bytes + self.working_bytes + self.shared_bytes
    }
}

/// More threads than any machine has cores for are a mistake, and would exhaust the user's limit on threads.
const MOST_THREADS: usize = 1024;

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
    pub(crate) sleepers: Receiver<Vec<Sleeper>>,
    /// Writes the trace, if there is to be one.
    writer: Option<Writer>,
    loader_threads: usize,
}

/// Loads the base and puts the engine together.
pub(crate) fn assemble(config: EngineConfig, progress: &mut dyn FnMut(LoadProgress)) -> Result<Assembled, EngineError> {
    check_limits(&config)?;
    let trace = config.record_trace.as_deref().map(TraceFile::create).transpose()?;
    let checkpoint = Checkpoint::open(&config.model)?;
    let checkpoint = if config.dtype == DType::Float16 { checkpoint.within_fp16_range() } else { checkpoint };
    let spec = checkpoint.spec.clone();
    let mut notes = Vec::new();
    let tokenizer = open_tokenizer(&config, &checkpoint)?;
    let chat_template = open_template(&config, &checkpoint, tokenizer.as_ref())?;
    let (chosen, device_reason) = device::choose(&config, &spec, &mut notes)?;
    let parts = Parts { config, trace, checkpoint, tokenizer, chat_template, device_reason, notes };
    match chosen {
        Chosen::Processor => on_processor(parts, progress),
        #[cfg(feature = "cuda")]
        Chosen::Card(card) => on_card(parts, *card, progress),
    }
}

/// What an engine is made from, whatever it computes on.
struct Parts {
    config: EngineConfig,
    trace: Option<TraceFile>,
    checkpoint: Checkpoint,
    tokenizer: Option<Tokenizer>,
    chat_template: Option<ChatTemplate>,
    device_reason: Option<String>,
    notes: Vec<String>,
}

fn on_processor(mut parts: Parts, progress: &mut dyn FnMut(LoadProgress)) -> Result<Assembled, EngineError> {
    let config = &parts.config;
    let backend = Arc::new(CpuBackend::new(CpuOptions {
        num_threads: config.num_threads,
        level: config.simd.as_deref().map(SimdLevel::parse).transpose()?,
        pin_threads: config.pin_threads,
        park_threads: config.park_threads,
    })?);
    let threads = backend.pool().threads();
    let spec = &parts.checkpoint.spec;
    let sizes = sizes::for_processor(config, spec, &backend, &mut parts.notes)?;
    let device = Placement { name: "cpu".to_owned(), threads };
    put_together(parts, backend, &sizes, device, progress)
}

#[cfg(feature = "cuda")]
fn on_card(
    mut parts: Parts,
    placed: super::card::Placed,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<Assembled, EngineError> {
    let super::card::Placed { card, sizes, memory, notes } = placed;
    parts.notes.extend(notes);
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let device = Placement { name: card.name(), threads };
    let backend = card.backend(&parts.config, &parts.checkpoint.spec, &sizes, &memory)?;
    put_together(parts, backend, &sizes, device, progress)
}

/// Where an engine computes.
struct Placement {
    name: String,
    /// Threads that compute, or that could.
    threads: usize,
}

fn put_together<B: Backend>(
    parts: Parts,
    backend: Arc<B>,
    sizes: &Sizes,
    device: Placement,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<Assembled, EngineError> {
    let Parts { config, trace, checkpoint, tokenizer, chat_template, device_reason, mut notes } = parts;
    let spec = checkpoint.spec.clone();
    let loader_threads = config.loader_threads.unwrap_or((device.threads / 4).clamp(2, 4));
    // Everything that can be refused is refused before the weights are read.
    ControlPlane::new(sizes::core_config(&config, &spec, sizes, loader_threads, Digest([0; 32])))?;
    notes.extend(checkpoint.quantization.as_ref().map(|note| note.line(sizes.dtype.bytes())));
    let weights = DecoderWeights::load(backend, &checkpoint, sizes.dtype, progress)?;
    let decoder = weights.allocate(sizes::decoder_limits(&config, &spec, sizes))?;
    // The weights were hashed as they were read.
    let base_digest = Digest(checkpoint.digest());
    let core = ControlPlane::new(sizes::core_config(&config, &spec, sizes, loader_threads, base_digest))?;

    let generation = checkpoint.generation.clone();
    let tokenizer_size = tokenizer.as_ref().map_or(spec.vocab_size, Tokenizer::vocab_size);
    let policy = adapter_policy(&config, Arc::new(checkpoint), sizes.dtype, tokenizer_size);
    let base_names = policy.base_names.clone();
    let info = EngineInfo {
        backend: decoder.describe(),
        device: device.name,
        device_reason,
        dtype: sizes.dtype_name,
        weight_bytes: sizes.card.map_or(decoder.weight_bytes(), |card| card.weight_bytes),
        working_bytes: sizes.division.working_bytes,
        ledger_bytes: sizes.division.ledger_bytes,
        card: sizes.card,
        max_composed: sizes.most_composed,
        kv_blocks: sizes.division.blocks,
        block_bytes: sizes.block_bytes,
        block_size: config.block_size,
        max_model_len: sizes.division.max_model_len,
        vocab_size: spec.vocab_size,
        generation,
        base_names,
        notes,
    };
    let (commands, received) = channel();
    let (jobs, ordered) = channel();
    let registry = Arc::new(Registry::default());
    let failures = Arc::new(LoadFailures::default());
    let reader = Reader {
        policy: Arc::new(policy),
        packer: decoder.packer(),
        hook: config.before_read.clone(),
        failures: Arc::clone(&failures),
    };
    let (discards, discarded) = channel();
    let library = Library::new(Arc::clone(&registry), jobs, discards);
    let step = LoweredStep::new(
        sizes.division.max_rows,
        config.max_num_seqs,
        info.kv_blocks.min(config.max_num_seqs * info.max_model_len.div_ceil(config.block_size)),
        config.block_size,
    );
    let meters = Meters::new(info.max_model_len);
    let (courier, sleepers) = Courier::new();
    let inputs = (received, courier);
    let recording = trace.and_then(|file| {
        let number = processor::number_format(sizes.dtype);
        Writer::new(file, header(&info, core.config(), &spec, number, loader_threads))
    });
    let (recorder, writer) = recording.unzip();
    let core = Plane::new(core, recorder);
    let worker = Worker::new(core, Box::new(decoder), library, inputs, step, config.max_num_seqs, meters);
    let mut end_tokens: Vec<u32> = tokenizer.as_ref().and_then(Tokenizer::eos).into_iter().collect();
    for end in &info.generation.eos {
        if !end_tokens.contains(end) {
            end_tokens.push(*end);
        }
    }
    let shared = Shared {
        config,
        info,
        structure: Structure::new(spec.vocab_size, &end_tokens),
        spec,
        end_tokens,
        tokenizer,
        chat_template,
        registry,
        reader: Arc::new(Mutex::new(Some(reader))),
        failures,
        next_request: AtomicU64::new(0),
        next_submission: AtomicU64::new(0),
        commands,
        stopped: Arc::new(OnceLock::new()),
    };
    Ok(Assembled { shared, worker, jobs: ordered, discarded, sleepers, writer, loader_threads })
}

/// The first line of a trace.
fn header(
    info: &EngineInfo,
    config: &CoreConfig,
    spec: &ModelSpec,
    number: NumberFormat,
    loader_threads: usize,
) -> TraceHeader {
    let started = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    TraceHeader {
        program: env!("CARGO_PKG_VERSION").to_owned(),
        started: started.as_secs_f64(),
        loader_threads,
        model: info.base_names.clone(),
        device: info.device.clone(),
        backend: info.backend.clone(),
        phases: Phase::ALL.map(|phase| phase.name().to_owned()).to_vec(),
        ..TraceHeader::new(config.clone(), sizes::model_dimensions(spec), number)
    }
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
    let utilization = config.gpu_memory_utilization;
    if !(utilization > 0.0 && utilization <= 1.0) {
        return Err(EngineError::InvalidArgument(format!(
            "gpu_memory_utilization must be above 0 and at most 1, got `{utilization}`"
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

pub(super) fn open_tokenizer(config: &EngineConfig, checkpoint: &Checkpoint) -> Result<Option<Tokenizer>, EngineError> {
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

/// What adapters are checked against.
pub(super) fn adapter_policy(
    config: &EngineConfig,
    checkpoint: Arc<Checkpoint>,
    dtype: StorageType,
    tokenizer_size: usize,
) -> AdapterPolicy {
    let mut base_names = checkpoint.names.clone();
    base_names.extend(config.model_names.iter().cloned());
    AdapterPolicy {
        spec: checkpoint.spec.clone(),
        max_rank: config.max_lora_rank,
        dtype,
        check_fp16_range: config.dtype == DType::Float16,
        base_names,
        strict_base: config.strict_base,
        allowed_roots: config.lora_roots.clone(),
        target_modules: config.lora_target_modules.clone(),
        tokenizer_size,
        features: engine_features(config, &checkpoint),
        base_tensors: checkpoint,
    }
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

fn spawn(assembled: Assembled) -> Result<(EngineHandle, Vec<JoinHandle<()>>), EngineError> {
    let Assembled { shared, mut worker, jobs, discarded, sleepers, writer, loader_threads } = assembled;
    let jobs = Arc::new(Mutex::new(jobs));
    let reader = shared.reader()?;
    let mut threads = (0..loader_threads)
        .map(|_| {
            let (jobs, commands, reader) = (Arc::clone(&jobs), shared.commands.clone(), reader.clone());
            thread("manylora-loader", move || loader::run(&jobs, &commands, &reader))
        })
        .collect::<Result<Vec<_>, _>>()?;
    drop((jobs, reader));
    // Gives the memory of adapters back as they come.
    threads.push(thread("manylora-discard", move || discarded.into_iter().for_each(drop))?);
    threads.push(thread("manylora-courier", move || courier::run(sleepers))?);
    if let Some(writer) = writer {
        threads.push(thread("manylora-trace", move || writer.run())?);
    }
    let (stopped, reader) = (Arc::clone(&shared.stopped), Arc::clone(&shared.reader));
    let engine = thread("manylora-engine", move || {
        // A panic here is a bug; callers still get an error that names it instead of waiting for ever.
        let why = match catch_unwind(AssertUnwindSafe(|| worker.run())) {
            Ok(Ok(())) => "it was shut down".to_owned(),
            Ok(Err(error)) => format!("a step failed: {error}"),
            Err(panic) => format!("its thread failed: {}", panic_message(panic.as_ref())),
        };
        // First: whoever sends a request from now on and is not among those that are told looks here.
        let _ = stopped.set(why.clone());
        worker.close(&why);
        // Handles may stay for long; the device's memory must not.
        drop(worker);
        reader.lock().unwrap_or_else(PoisonError::into_inner).take();
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
