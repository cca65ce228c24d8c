//! How the memory there is becomes weights, working memory, KV blocks and adapters: what an engine decides at its start, and
//! what the planner says it would.
//!
//! A processor's memory is what is free. On a card, the engine takes a share (`gpu_memory_utilization`) of what there is, and
//! out of that one budget come the driver's own, weights, working memory, and what KV blocks and adapters share.

use super::Ledger;
use super::card;
use super::working::StepLimits;

/// Share of a processor's free memory that KV blocks and adapters take when nothing is said: one part in so many.
const DEFAULT_SHARE_OF_FREE: u64 = 2;
/// Room for adapters that the default adds to the KV blocks' need.
const DEFAULT_ADAPTER_BYTES: u64 = 1 << 30;
/// Rows of a step when nothing is said.
const DEFAULT_BATCHED_TOKENS: usize = 2048;
/// What is taken of a card's memory once it is open is the driver's, for our context and code, up to one part in so many and
/// a limit; beyond that it is others'.
const DRIVER_SHARE: u64 = 40;
const DRIVER_LIMIT: u64 = 1 << 30;
/// One part in so many, up to a limit, is left free for what the driver takes later. An estimate, which no card has confirmed yet
/// (the bench `card` tells what it was): some 500 launches are a recorded step of a 7B model, each takes the driver about a
/// KiB, and 256 steps are kept, hence 128 MiB; and cuBLASLt's code, tens of MiB for each of a few algorithms. Both are less
/// for smaller models, which smaller cards have: 150 MiB are left of 24 GB. Where it is not enough, steps are no
/// longer recorded, and run.
const LATER_SHARE: u64 = 160;
const LATER_LIMIT: u64 = 512 << 20;

/// What a user should change where a context does not fit.
const RAISE: &str = "kv_cache_memory_bytes";

/// Why nothing fits, or what is wrong with a setting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// A setting cannot be met; the message names it.
    #[error("{0}")]
    Setting(String),
    /// The model does not fit.
    #[error("the model needs {needed} bytes and {available} are free: {message}")]
    DoesNotFit {
        /// Bytes needed.
        needed: u64,
        /// Bytes free.
        available: u64,
        /// What to do.
        message: String,
    },
}

/// The settings of an engine that decide its sizes.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct SizeSettings {
    /// Positions that the model was made for.
    pub model_context: usize,
    /// Longest sequence; None = the model's context, lowered to what fits.
    pub max_model_len: Option<usize>,
    /// Sequences per step.
    pub max_num_seqs: usize,
    /// Rows per step; None = 2048, or more where `max_num_seqs` or whole prompts need it.
    pub max_num_batched_tokens: Option<usize>,
    /// Whether prompts may be split over steps.
    pub enable_chunked_prefill: bool,
    /// Positions of a KV block.
    pub block_size: usize,
    /// Bytes that KV blocks and adapters share; None = from the memory there is.
    pub kv_cache_memory_bytes: Option<u64>,
    /// Share of a card's memory that the engine takes in all.
    pub gpu_memory_utilization: f64,
    /// Whether adapters can be used at all.
    pub enable_lora: bool,
    /// Largest rank that is accepted, up to the largest that is computed.
    pub max_lora_rank: usize,
    /// Distinct adapters per step; None = no cap.
    pub max_loras: Option<usize>,
}

impl SizeSettings {
    /// An engine's defaults, for a model of this context.
    pub const fn new(model_context: usize) -> Self {
        Self {
            model_context,
            max_model_len: None,
            max_num_seqs: 64,
            max_num_batched_tokens: None,
            enable_chunked_prefill: true,
            block_size: 16,
            kv_cache_memory_bytes: None,
            gpu_memory_utilization: 0.92,
            enable_lora: true,
            max_lora_rank: 16,
            max_loras: None,
        }
    }

    /// Rows of a step.
    pub fn max_rows(&self, context: usize) -> usize {
        let whole_prompts = if self.enable_chunked_prefill { 1 } else { context };
        let default = DEFAULT_BATCHED_TOKENS.max(self.max_num_seqs).max(whole_prompts);
        self.max_num_batched_tokens.unwrap_or(default)
    }

    /// The longest sequence that was asked for, or the model's context.
    pub fn context(&self) -> Result<usize, SizeError> {
        let context = self.max_model_len.unwrap_or(self.model_context);
        if context > self.model_context {
            return Err(SizeError::Setting(format!(
                "max_model_len `{context}` is beyond the model's context of {} positions; give a smaller one",
                self.model_context
            )));
        }
        Ok(context)
    }

    /// The largest step. Up to `composed` adapters of one request have entries on each of its rows.
    pub fn step_limits(&self, max_rows: usize, max_position: usize, blocks: usize, composed: usize) -> StepLimits {
        let (max_entries, max_rank) = if self.enable_lora { (max_rows * composed, self.max_lora_rank) } else { (0, 0) };
        StepLimits {
            max_rows,
            max_logit_rows: self.max_num_seqs.min(max_rows),
            max_position,
            block_size: self.block_size,
            blocks,
            max_entries,
            max_rank,
        }
    }

    /// The context, or what of it fits beside `kept` bytes of adapters where nobody has asked for one that does not.
    /// `raise` says what would give it room.
    fn lowered_context(&self, ledger: &Ledger, (context, kept): (usize, u64), raise: &str) -> Result<usize, SizeError> {
        let bytes = ledger.bytes;
        if ledger.sequence_bytes(context) <= bytes {
            return Ok(context);
        }
        let fits = ledger.longest_sequence(if self.max_model_len.is_none() { kept } else { 0 });
        if self.max_model_len.is_some() || fits == 0 {
            return Err(SizeError::Setting(format!(
                "max_model_len `{context}` needs {} bytes of KV cache and there are {bytes}; at most {fits} tokens fit: lower \
                 max_model_len or raise {raise}",
                ledger.sequence_bytes(context),
            )));
        }
        Ok(fits)
    }
}

/// What to tell about a lowered context.
fn lowered_note(context: usize, fits: usize, bytes: u64) -> Option<String> {
    let told = || format!("max_model_len lowered from {context} to {fits}: {bytes} bytes of KV cache hold no more");
    (fits < context).then(told)
}

/// What is to be held on a device, in its bytes.
#[derive(Clone, Copy, Debug)]
pub struct ModelBytes<'a> {
    /// Weights.
    pub weights: u64,
    /// One KV block.
    pub block: u64,
    /// One adapter of the largest rank on all modules.
    pub largest_adapter: u64,
    /// What the number format is called.
    pub dtype: &'a str,
}

/// What was decided.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Division {
    /// Rows of a step.
    pub max_rows: usize,
    /// Longest sequence.
    pub max_model_len: usize,
    /// KV blocks where no adapter is resident.
    pub blocks: usize,
    /// Bytes that KV blocks and adapters share.
    pub ledger_bytes: u64,
    /// Bytes of working memory.
    pub working_bytes: u64,
    /// What a card's driver has and will want; 0 on a processor.
    pub driver_bytes: u64,
    /// What the engine may take: a card's budget, or what is free.
    pub budget_bytes: u64,
    /// What a user should be told.
    pub notes: Vec<String>,
}

/// Divides a processor's free memory; `working` is what a largest step takes there.
pub fn divide_processor(
    settings: &SizeSettings,
    model: &ModelBytes<'_>,
    free: u64,
    working: &dyn Fn(&StepLimits) -> u64,
) -> Result<Division, SizeError> {
    let context = settings.context()?;
    let max_rows = settings.max_rows(context);
    let most_blocks = u32::MAX as usize / settings.block_size;
    // The context and the number of blocks are at most these: what is left depends on what is needed here.
    let working_bytes = working(&settings.step_limits(max_rows, context, most_blocks, 1));
    let needed = model.weights.saturating_add(working_bytes);
    if needed > free {
        return Err(SizeError::DoesNotFit {
            needed,
            available: free,
            message: format!(
                "weights in {} ({} bytes) and the working memory of {max_rows} rows ({working_bytes} bytes); use \
                 a smaller model, dtype bfloat16, a smaller max_num_batched_tokens, or a bigger machine",
                model.dtype, model.weights
            ),
        });
    }
    let left = free - needed;
    let ledger_bytes = settings.kv_cache_memory_bytes.unwrap_or_else(|| {
        let sequence = (context.div_ceil(settings.block_size) as u64).saturating_mul(model.block);
        let wanted = sequence.saturating_mul(settings.max_num_seqs as u64).saturating_add(DEFAULT_ADAPTER_BYTES);
        wanted.min(left / DEFAULT_SHARE_OF_FREE)
    });
    if ledger_bytes > left {
        return Err(SizeError::Setting(format!(
            "kv_cache_memory_bytes `{ledger_bytes}` and {needed} bytes of weights and working memory are more than the \
             {free} bytes that are free; lower it"
        )));
    }
    let ledger = Ledger { bytes: ledger_bytes, block_bytes: model.block, block_size: settings.block_size };
    // A lowered context leaves room for one adapter of the largest rank, so that the shelf is not empty for ever.
    let kept = if settings.enable_lora { model.largest_adapter.min(ledger_bytes / 2) } else { 0 };
    let max_model_len = settings.lowered_context(&ledger, (context, kept), RAISE)?;
    let blocks = ledger.blocks_beside(0).min(most_blocks);
    Ok(Division {
        max_rows,
        max_model_len,
        blocks,
        ledger_bytes,
        working_bytes: working(&settings.step_limits(max_rows, max_model_len, blocks, 1)),
        driver_bytes: 0,
        budget_bytes: free,
        notes: lowered_note(context, max_model_len, ledger_bytes).into_iter().collect(),
    })
}

/// A card's memory as its driver tells it.
#[derive(Clone, Copy, Debug)]
pub struct CardState<'a> {
    /// For people: `cuda:0`.
    pub name: &'a str,
    /// All there is, in bytes.
    pub total: u64,
    /// What is free once the engine has opened it.
    pub free: u64,
    /// KV blocks that it can address at most.
    pub most_blocks: usize,
}

/// What a driver takes of a card at most when a program opens it.
pub const fn largest_driver_share(total: u64) -> u64 {
    if total / DRIVER_SHARE < DRIVER_LIMIT { total / DRIVER_SHARE } else { DRIVER_LIMIT }
}

/// Divides a card's memory; `working` is what a largest step takes there.
pub fn divide_card(
    settings: &SizeSettings,
    model: &ModelBytes<'_>,
    card: &CardState<'_>,
    working: &dyn Fn(&StepLimits) -> u64,
) -> Result<Division, SizeError> {
    let CardState { name, total, free, most_blocks } = *card;
    let utilization = settings.gpu_memory_utilization;
    let budget_bytes = (total as f64 * utilization) as u64;
    // The context is there, and the kernels are loaded.
    let taken = total.saturating_sub(free);
    let driver = taken.min(largest_driver_share(total));
    if budget_bytes > free + driver {
        return Err(SizeError::Setting(format!(
            "gpu_memory_utilization `{utilization}` asks for {budget_bytes} of {name}'s {total} bytes, and {free} are \
             free (others have {} bytes, the driver {driver}); lower it, or end what else runs on the card",
            taken - driver
        )));
    }
    let driver_bytes = driver + (total / LATER_SHARE).min(LATER_LIMIT);
    let context = settings.context()?;
    let max_rows = settings.max_rows(context);
    // A context that has to be lowered needs less working memory: the second round gives the difference to KV blocks.
    let mut max_model_len = context;
    let mut rounds = 0;
    loop {
        let limits = settings.step_limits(max_rows, max_model_len, most_blocks, card::MOST_COMPOSED);
        let working_bytes = working(&limits);
        let needed = driver_bytes.saturating_add(model.weights).saturating_add(working_bytes);
        let left = card::whole_granules(budget_bytes.saturating_sub(needed));
        if left < model.block {
            return Err(SizeError::DoesNotFit {
                needed: needed.saturating_add(model.block),
                available: budget_bytes,
                message: format!(
                    "on {name} of {total} bytes with gpu_memory_utilization `{utilization}`: weights in {} ({} \
                     bytes), working memory of {max_rows} rows ({working_bytes} bytes), the driver's own ({driver_bytes} \
                     bytes), and KV blocks; use a smaller model, a smaller max_num_batched_tokens or max_lora_rank, a \
                     larger gpu_memory_utilization, or device \"cpu\"",
                    model.dtype, model.weights
                ),
            });
        }
        let ledger_bytes = shared(settings, left)?.min(card::whole_granules(most_blocks as u64 * model.block));
        let ledger = Ledger { bytes: ledger_bytes, block_bytes: model.block, block_size: settings.block_size };
        // As on a processor.
        let kept = if settings.enable_lora { model.largest_adapter.min(ledger_bytes / 2) } else { 0 };
        let raise = if settings.kv_cache_memory_bytes.is_some() { RAISE } else { "gpu_memory_utilization" };
        let fits = settings.lowered_context(&ledger, (context, kept), raise)?;
        if fits != max_model_len && rounds < 2 {
            max_model_len = fits;
            rounds += 1;
            continue;
        }
        let max_model_len = fits.min(max_model_len);
        return Ok(Division {
            max_rows,
            max_model_len,
            blocks: ledger.blocks_beside(0),
            ledger_bytes,
            working_bytes: working(&StepLimits { max_position: max_model_len, ..limits }),
            driver_bytes,
            budget_bytes,
            notes: lowered_note(context, max_model_len, ledger_bytes).into_iter().collect(),
        });
    }
}

/// Bytes that KV blocks and adapters share, out of what is left.
fn shared(settings: &SizeSettings, left: u64) -> Result<u64, SizeError> {
    let Some(wanted) = settings.kv_cache_memory_bytes else { return Ok(left) };
    let bytes = wanted.div_ceil(card::GRANULE).saturating_mul(card::GRANULE);
    if bytes > left {
        return Err(SizeError::Setting(format!(
            "kv_cache_memory_bytes `{wanted}` is more than the {left} bytes that gpu_memory_utilization `{}` leaves beside \
             weights and working memory; lower it, or raise gpu_memory_utilization",
            settings.gpu_memory_utilization
        )));
    }
    Ok(bytes)
}
