//! One line of the log every few seconds in which something happened: what runs and waits, how fast, and what is resident.

use std::sync::Arc;
use std::time::{Duration, Instant};

use manylora::EngineStats;

use super::{Tier, kv_cache_usage, tier};
use crate::app::App;

/// Writes lines until it is dropped, or the engine ends.
pub(crate) async fn report(app: Arc<App>, every: Duration) {
    let Ok(mut before) = app.blocking(|app| Ok(app.engine.stats()?)).await else { return };
    let mut since = Instant::now();
    loop {
        tokio::time::sleep(every).await;
        let Ok(now) = app.blocking(|app| Ok(app.engine.stats()?)).await else { return };
        let seconds = since.elapsed().as_secs_f64();
        since = Instant::now();
        if now.running + now.waiting > 0 || activity(&before) != activity(&now) {
            tell(&app, &before, &now, seconds);
        }
        before = now;
    }
}

/// What changes whenever something happens.
fn activity(stats: &EngineStats) -> [u64; 5] {
    let failures = stats.load_failures.refused + stats.load_failures.io;
    [stats.steps, stats.adapter_reads, stats.evictions, stats.registered as u64, failures]
}

fn tell(app: &App, before: &EngineStats, now: &EngineStats, seconds: f64) {
    let rounded = |value: f64| (value * 10.0).round() / 10.0;
    let rate = |before: u64, now: u64| rounded(now.saturating_sub(before) as f64 / seconds);
    let resident = |one| if tier(app.engine.info()) == one { now.residents.len() } else { 0 };
    tracing::info!(
        running = now.running,
        waiting = now.waiting,
        prompt_tokens_per_second = rate(before.meters.prompt_tokens, now.meters.prompt_tokens),
        generation_tokens_per_second = rate(before.meters.generation_tokens, now.meters.generation_tokens),
        kv_cache_percent = rounded(100.0 * kv_cache_usage(now)),
        step_adapters = now.meters.last_step_adapters,
        resident_host = resident(Tier::Host),
        resident_device = resident(Tier::Device),
        registered = now.registered,
        "engine"
    );
}
