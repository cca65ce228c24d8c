//! How long a large fleet takes: 1,000 replicas of Llama-3.1-8B on an A100 of 80 GB each and 100,000 adapters by Zipf's law, 5
//! requests a second for each replica, behind each router. Figures are printed, and written as JSON with `-- --json FILE`;
//! `-- --replicas N --seconds S` makes it smaller. Nothing is judged.

#![expect(clippy::print_stdout, reason = "a bench tells its figures")]

use std::time::Instant;

use manylora_sim::{Config, run};
use serde_json::{Value, json};

fn argument(name: &str) -> Option<String> {
    std::env::args().skip_while(|argument| argument != name).nth(1)
}

/// Peak of the process's memory in bytes, where the system tells it.
fn peak_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().trim_end_matches(" kB").trim().parse::<u64>().ok()? * 1024)
}

fn main() {
    let number = |name: &str, default: u32| argument(name).map_or(default, |text| text.parse().expect("a number"));
    let (replicas, seconds) = (number("--replicas", 1000), number("--seconds", 60));
    let adapters = 100 * replicas;
    let mut results = Vec::new();
    for router in ["round_robin", "least_loaded", "random_two_choices", "consistent_hashing"] {
        let config = json!({
            "model": "Llama-3.1-8B",
            "gpu": "a100-80",
            "adapters": adapters,
            "engine": {"max_cpu_loras": 200, "max_model_len": 8192},
            "workload": {"synthetic": {
                "rate": 5 * replicas, "duration": seconds, "popularity": "zipf:0.8", "input": "16:512", "output": "16:256",
            }},
            "replicas": replicas,
            "router": router,
        });
        let config = Config::from_value(config).expect("it is a configuration");
        let begun = Instant::now();
        let report = run(&config).expect("it runs");
        let result = json!({
            "router": router,
            "replicas": replicas,
            "adapters": adapters,
            "seconds": begun.elapsed().as_secs_f64(),
            "peak_bytes": peak_bytes(),
            "requests": report.requests,
            "steps": report.steps,
            "simulated_seconds": report.seconds,
            "ttft_p50": report.ttft.p50,
            "ttft_p99": report.ttft.p99,
            "hit_rate": report.hit_rate,
            "loads": report.shelf.disk_loads + report.shelf.host_loads,
            "spread": report.spread,
        });
        println!("{result:#}");
        results.push(result);
    }
    if let Some(path) = argument("--json") {
        std::fs::write(&path, format!("{:#}\n", Value::from(results))).expect("the file can be written");
    }
}
