//! Settings that will make requests wait, or bytes go to waste: each warning names the setting and what to do.

use super::{Plan, PlanRequest};

pub(super) fn warnings(request: &PlanRequest<'_>, plan: &Plan) -> Vec<String> {
    let settings = &request.settings;
    let mut found = Vec::new();
    let adapters = request.adapters();
    let hot = request.hot_adapters.unwrap_or(adapters).min(adapters).min(settings.max_num_seqs as u64);
    for (name, limit) in [("max_loras", settings.max_loras), ("max_cpu_loras", request.scheduling.max_cpu_loras)] {
        if let Some(limit) = limit.filter(|&limit| (limit as u64) < hot) {
            found.push(format!(
                "{name} `{limit}` lets {limit} adapters share a step and {hot} are asked for at a time: the others' requests \
                 wait for a place; leave {name} unset, or set it to {hot} or more"
            ));
        }
    }
    let resident: u64 = plan.fleet.iter().map(|group| group.resident).sum();
    if resident < adapters {
        let setting = if request.scheduling.max_cpu_loras.is_some_and(|limit| limit as u64 == resident) {
            "max_cpu_loras"
        } else if request.scheduling.lora_memory_bytes.is_some_and(|bytes| bytes <= plan.adapter_room) {
            "lora_memory_bytes"
        } else if settings.kv_cache_memory_bytes.is_some() {
            "kv_cache_memory_bytes"
        } else if settings.max_model_len.is_none() {
            "max_model_len"
        } else {
            "gpu_memory_utilization"
        };
        let advice = if setting == "max_model_len" { "lower it" } else { "raise it" };
        found.push(format!(
            "{resident} of {adapters} adapters are resident at a time: requests for the others load theirs first; {setting} \
             bounds it: {advice}, or take a larger device"
        ));
    }
    for one in &plan.sequences {
        if one.fit == 0 {
            found.push(format!(
                "no sequence of {} tokens has room beside the resident adapters: they will be evicted for it; lower \
                 lora_memory_bytes, or take a larger device",
                one.tokens
            ));
        } else if one.fit < settings.max_num_seqs {
            found.push(format!(
                "max_num_seqs `{}` sequences of {} tokens do not fit at once, {} do: the rest wait or are computed again; \
                 lower max_num_seqs, or take a larger device",
                settings.max_num_seqs, one.tokens, one.fit
            ));
        }
    }
    if let Some(reservation) = plan.reservation.as_ref().filter(|one| one.max_lora_rank > request.largest_rank())
        && reservation.workspace_here_bytes > plan.bytes.budget / 100
    {
        found.push(format!(
            "max_lora_rank `{}` takes {} bytes of working memory more than the largest rank there is, {}; lower it",
            reservation.max_lora_rank,
            reservation.workspace_here_bytes,
            request.largest_rank()
        ));
    }
    found
}
