//! What has no name elsewhere: residency by tier, adapters per step, loads, and what was served for each adapter.

use std::fmt;

use manylora::{Distribution, Phase};

use super::adapters::Series;
use super::page::{Labels, Page, label};
use super::{Seen, Tier};

pub(super) fn write(page: &mut Page<'_>, seen: &Seen) -> fmt::Result {
    residency(page, seen)?;
    steps_and_loads(page, seen)?;
    for_each_adapter(page, seen)
}

fn residency(page: &mut Page<'_>, seen: &Seen) -> fmt::Result {
    let stats = &seen.stats;
    page.gauge("manylora:adapters_registered", "Adapters that requests can name", stats.registered as f64)?;
    // Both tiers are always told, so that an idle server's page says where nothing is.
    let tiers = |value: f64| {
        let of = |tier| if seen.tier() == tier { value } else { 0.0 };
        [(vec![label("tier", "host")], of(Tier::Host)), (vec![label("tier", "device")], of(Tier::Device))]
    };
    page.gauges("manylora:adapters_resident", "Resident adapters", tiers(stats.residents.len() as f64))?;
    page.gauges("manylora:adapter_bytes", "Bytes of resident adapters", tiers(stats.adapter_bytes as f64))?;
    page.gauges("manylora:adapter_loading_bytes", "Bytes set aside for loads", tiers(stats.loading_bytes as f64))?;
    page.gauges("manylora:adapter_room_bytes", "Bytes that adapters can take", tiers(stats.adapter_room as f64))?;
    page.gauge("manylora:kv_blocks", "KV blocks that adapters have left", stats.total_blocks as f64)?;
    page.gauge("manylora:kv_blocks_free", "KV blocks that no request holds", stats.free_blocks as f64)
}

fn steps_and_loads(page: &mut Page<'_>, seen: &Seen) -> fmt::Result {
    let (stats, meters) = (&seen.stats, &seen.stats.meters);
    page.counter("manylora:steps", "Steps", stats.steps)?;
    page.seconds(
        "manylora:engine_seconds",
        "Seconds of the engine's thread, by what it did: forward is the backend's work",
        Phase::ALL.map(|phase| (vec![label("phase", phase.name())], stats.phase_seconds.of(phase))),
    )?;
    page.histogram("manylora:step_adapters", "Distinct adapters per step", &meters.step_adapters)?;
    page.counter("manylora:adapter_streamed_bytes", "Bytes of adapters that steps have read", stats.streamed_bytes)?;
    page.counter("manylora:adapter_loads", "Loads that were ordered", stats.loads)?;
    page.counter("manylora:adapter_loaded_bytes", "Bytes of adapters that were loaded", stats.loaded_bytes)?;
    page.histogram("manylora:adapter_load_seconds", "Seconds to read and pack an adapter", &meters.load_seconds)?;
    page.counter("manylora:adapter_lookups", "Adapters that submitted requests named", meters.adapter_lookups)?;
    page.counter("manylora:adapter_hits", "Those of them that were resident", meters.adapter_hits)?;
    page.counter("manylora:adapter_evictions", "Adapters that made room for others", stats.evictions)?;
    let failures = [("refused", stats.load_failures.refused), ("io", stats.load_failures.io)];
    page.counters(
        "manylora:adapter_load_failures",
        "Adapters that could not be loaded: what was read cannot be served (refused), or it could not be read (io)",
        failures.map(|(reason, count)| (vec![label("reason", reason)], count)),
    )
}

fn for_each_adapter(page: &mut Page<'_>, seen: &Seen) -> fmt::Result {
    let all: Vec<(&str, &Series)> = seen.adapters.series_by_name().collect();
    let named = |name: &str| -> Labels { vec![label("adapter_name", name)] };
    let counts = |count: fn(&Series) -> u64| all.iter().map(move |&(name, series)| (named(name), count(series)));
    let ended = all.iter().flat_map(|&(name, series)| {
        let ends = [("stop", series.stop), ("length", series.length), ("abort", series.abort), ("error", series.error)];
        ends.map(|(reason, count)| (vec![label("adapter_name", name), label("finished_reason", reason)], count))
    });
    page.counters("manylora:adapter_requests", "Samples that have ended, by adapter or base, and how", ended)?;
    page.counters("manylora:adapter_prompt_tokens", "Prompt tokens of those", counts(|series| series.prompt_tokens))?;
    page.counters(
        "manylora:adapter_generation_tokens",
        "Generated tokens of those",
        counts(|series| series.generation_tokens),
    )?;
    page.counters(
        "manylora:adapter_request_hits",
        "Those that got a token and whose adapters were resident when they came",
        counts(|series| series.hits),
    )?;
    let mut histograms = |name, help, values: fn(&Series) -> &Distribution| {
        page.histograms(name, help, all.iter().map(|&(adapter, series)| (named(adapter), values(series))))
    };
    histograms("manylora:adapter_time_to_first_token_seconds", "Seconds to the first token", |it| &it.first_token)?;
    histograms("manylora:adapter_e2e_request_latency_seconds", "Seconds to the last token", |it| &it.whole)?;
    histograms("manylora:adapter_request_queue_time_seconds", "Seconds until scheduled", |it| &it.queue)
}
