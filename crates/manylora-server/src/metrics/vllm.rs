//! The series that vLLM has, under its names: dashboards and routers made for it find what they look for.

use std::fmt;

use super::page::{Labels, Page, label};
use super::{Seen, Tier, kv_cache_usage};
use crate::app::unix_time;

/// The series that have the labels `model_name` and `engine`.
pub(super) fn write(page: &mut Page<'_>, seen: &Seen) -> fmt::Result {
    let (stats, meters) = (&seen.stats, &seen.stats.meters);
    page.gauge("vllm:num_requests_running", "Requests in the batch", stats.running as f64)?;
    page.gauge("vllm:num_requests_waiting", "Requests that wait", stats.waiting as f64)?;
    let deferred = stats.waiting_for_adapters;
    let reasons = [("capacity", stats.waiting.saturating_sub(deferred)), ("deferred", deferred)];
    page.gauges(
        "vllm:num_requests_waiting_by_reason",
        "Requests that wait, for their turn (capacity) or for adapters that are not resident (deferred)",
        reasons.map(|(reason, count)| (vec![label("reason", reason)], count as f64)),
    )?;
    let states = [("awake", 1.0), ("weights_offloaded", 0.0), ("discard_all", 0.0)];
    page.gauges(
        "vllm:engine_sleep_state",
        "Whether the engine is awake, which it always is",
        states.map(|(state, value)| (vec![label("sleep_state", state)], value)),
    )?;
    let used = kv_cache_usage(stats);
    page.gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks that requests hold, from 0 to 1", used)?;
    page.counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache", stats.prefix_cache_queries)?;
    page.counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache", stats.prefix_cache_hits)?;
    page.counter("vllm:num_preemptions", "Requests that lost their KV blocks", stats.preemptions)?;
    page.counter("vllm:prompt_tokens", "Prompt tokens", meters.prompt_tokens)?;
    let computed = meters.prompt_tokens.saturating_sub(meters.cached_prompt_tokens);
    let sources =
        [("local_compute", computed), ("local_cache_hit", meters.cached_prompt_tokens), ("external_kv_transfer", 0)];
    page.counters(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens by where their KV came from",
        sources.map(|(source, count)| (vec![label("source", source)], count)),
    )?;
    page.counter("vllm:prompt_tokens_cached", "Prompt tokens from the prefix cache", meters.cached_prompt_tokens)?;
    page.counter("vllm:generation_tokens", "Generated tokens", meters.generation_tokens)?;
    let ended = &meters.ended;
    let ends = [("stop", ended.stop), ("length", ended.length), ("abort", ended.abort), ("error", ended.error)];
    page.counters(
        "vllm:request_success",
        "Samples that have ended, by how",
        ends.map(|(reason, count)| (vec![label("finished_reason", reason)], count)),
    )?;
    page.counters(
        "vllm:admission_rejections",
        "Requests that were turned away",
        seen.rejections.map(|(reason, count)| (vec![label("reason", reason)], count)),
    )?;
    let histograms = [
        ("vllm:iteration_tokens_total", "Rows per step", &meters.step_tokens),
        ("vllm:request_prompt_tokens", "Prompt tokens per sample", &meters.request_prompt_tokens),
        ("vllm:request_generation_tokens", "Generated tokens per sample", &meters.request_generation_tokens),
        ("vllm:request_max_num_generation_tokens", "Tokens of a request's longest sample", &seen.requests.longest),
        ("vllm:request_params_n", "n of requests", &seen.requests.samples),
        ("vllm:request_params_max_tokens", "max_tokens of samples", &meters.request_max_tokens),
        ("vllm:request_num_preemptions", "Preemptions per sample", &meters.request_preemptions),
        (
            "vllm:request_prefill_kv_computed_tokens",
            "Prompt tokens per sample that were not cached",
            &meters.request_computed_tokens,
        ),
        ("vllm:time_to_first_token_seconds", "Seconds to the first token", &meters.time_to_first_token),
        ("vllm:inter_token_latency_seconds", "Seconds between tokens", &meters.inter_token_latency),
        (
            "vllm:request_time_per_output_token_seconds",
            "Mean seconds between a sample's tokens",
            &meters.seconds_per_token,
        ),
        ("vllm:e2e_request_latency_seconds", "Seconds from submission to the last token", &meters.request_seconds),
        ("vllm:request_queue_time_seconds", "Seconds until a sample was scheduled", &meters.queue_seconds),
        ("vllm:request_inference_time_seconds", "Seconds from there to the last token", &meters.inference_seconds),
        ("vllm:request_prefill_time_seconds", "Seconds from there to the first token", &meters.prefill_seconds),
        ("vllm:request_decode_time_seconds", "Seconds from the first token to the last", &meters.decode_seconds),
    ];
    histograms.into_iter().try_for_each(|(name, help, values)| page.histogram(name, help, values))?;
    page.gauges("vllm:cache_config_info", "Settings of the KV cache", [(cache_config(seen), 1.0)])
}

fn cache_config(seen: &Seen) -> Labels {
    let blocks = seen.info.kv_blocks.to_string();
    let on_card = seen.tier() == Tier::Device;
    vec![
        label("block_size", &seen.info.block_size.to_string()),
        label("cache_dtype", seen.info.dtype),
        label("enable_prefix_caching", if seen.config.enable_prefix_caching { "True" } else { "False" }),
        label("gpu_memory_utilization", &seen.config.gpu_memory_utilization.to_string()),
        label("num_gpu_blocks", if on_card { &blocks } else { "0" }),
        label("num_cpu_blocks", if on_card { "0" } else { &blocks }),
    ]
}

/// Names with commas between them, no more than `most`. Whoever reads them takes them apart at the commas, so that a name
/// with one in it would be two that nobody has.
fn listed<'a>(names: impl Iterator<Item = &'a str>, most: usize) -> String {
    let names: Vec<&str> = names.filter(|name| !name.contains(',')).take(most).collect();
    names.join(",")
}

/// Those about adapters, which have no such labels.
pub(super) fn write_adapters(page: &mut Page<'_>, seen: &Seen) -> fmt::Result {
    let (stats, meters) = (&seen.stats, &seen.stats.meters);
    let most = seen.max_adapters().to_string();
    let requests = vec![
        label("max_lora", &most),
        label("waiting_lora_adapters", &listed(stats.waiting_adapters(), seen.most_series)),
        label("running_lora_adapters", &listed(stats.running_adapters(), seen.most_series)),
    ];
    page.gauges(
        "vllm:lora_requests_info",
        "Adapters with requests that wait and that run, but for names with commas in them; the value is the time",
        [(requests, unix_time() as f64)],
    )?;
    let tier = seen.tier();
    let level = if tier == Tier::Device { "gpu" } else { "cpu" };
    let named = stats.residents.iter().flat_map(|resident| resident.names.iter().map(move |name| (name, resident)));
    page.gauges(
        "vllm:lora_adapter_loaded",
        "Resident adapters",
        named.take(seen.most_series).map(|(name, resident)| {
            let labels = vec![
                label("adapter_name", name),
                label("level", level),
                label("pinned", if resident.pinned { "true" } else { "false" }),
                label("rank", &resident.rank.to_string()),
            ];
            (labels, 1.0)
        }),
    )?;
    let resident = stats.residents.len() as f64;
    let (on_card, on_processor) = if tier == Tier::Device { (resident, 0.0) } else { (0.0, resident) };
    page.gauge("vllm:num_gpu_loaded_lora_adapters", "Adapters that are resident on a card", on_card)?;
    page.gauge("vllm:num_cpu_loaded_lora_adapters", "Adapters that are resident in host memory", on_processor)?;
    page.gauge("vllm:max_gpu_lora_adapters", "Most distinct adapters of a step", seen.max_adapters() as f64)?;
    page.histogram("vllm:lora_adapter_load_seconds", "Seconds to read and pack an adapter", &meters.load_seconds)?;
    page.counter("vllm:lora_cache_lookups", "Adapters that submitted requests named", meters.adapter_lookups)?;
    page.counter("vllm:lora_cache_hits", "Those of them that were resident", meters.adapter_hits)?;
    page.gauge("vllm:lora_cache_num_adapters", "Resident adapters", resident)?;
    let room = stats.adapter_room.max(1) as f64;
    page.gauge(
        "vllm:lora_cache_usage_ratio",
        "Share of the bytes that adapters can take which they have",
        stats.adapter_bytes as f64 / room,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_can_be_taken_apart_and_have_a_bound() {
        let names = || ["a", "a,b", "c", "d"].into_iter();
        assert_eq!(listed(names(), 10), "a,c,d");
        assert_eq!(listed(names(), 2), "a,c");
    }
}
