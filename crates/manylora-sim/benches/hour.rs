//! How fast the simulator is: one hour at 10 requests a second, 2,000 adapters, Llama-2-7B on an A100 of 80 GB. Figures are
//! printed, and written as JSON with `-- --json FILE`; nothing is judged.

#![expect(clippy::print_stdout, reason = "a bench tells its figures")]

use std::time::Instant;

use manylora_core::budget::division::SizeSettings;
use manylora_core::{SchedulingPolicy, SchedulingSettings};
use manylora_sim::card::CardSpec;
use manylora_sim::cost::{Efficiency, Roofline};
use manylora_sim::engine::{EngineSettings, run};
use manylora_sim::model::ModelDescription;
use manylora_sim::plan::{DType, FleetGroup, PlanRequest, PlannedDevice};
use manylora_sim::results::{Summary, SummaryOptions};
use manylora_sim::workload::slora::SloraWorkload;

fn main() {
    let mut results = Vec::new();
    let adapters = 2000;
    let model = ModelDescription::named("Llama-2-7b").expect("it is built in");
    let card = CardSpec::named("a100-80").expect("it is known");
    let cost = Roofline::new(&model.dimensions, card.clone(), Efficiency::default());
    let modules = FleetGroup::modules_named(["q_proj", "k_proj", "v_proj", "o_proj"]).expect("they are known");
    for (policy, prefix_caching) in
        [(SchedulingPolicy::Fair, true), (SchedulingPolicy::Fair, false), (SchedulingPolicy::Fcfs, false)]
    {
        let request = PlanRequest {
            settings: SizeSettings { max_num_seqs: 256, ..SizeSettings::new(model.context) },
            model: model.clone(),
            device: PlannedDevice::Card(card.clone()),
            dtype: DType::Auto,
            fleet: vec![FleetGroup { count: adapters, rank: 8, modules: modules.clone() }],
            lengths: Vec::new(),
            scheduling: SchedulingSettings {
                policy,
                enable_prefix_caching: prefix_caching,
                ..SchedulingSettings::default()
            },
            hot_adapters: None,
            cublas: true,
            free_bytes: None,
        };
        let (settings, _) = EngineSettings::planned(&request).expect("it fits");
        let load = SloraWorkload::new(adapters as u32, 10.0, 3600.0).requests().expect("a load");
        let mut summary = Summary::new(SummaryOptions { adapters: adapters as u32, slo_ttft: 6.0 });
        let begun = Instant::now();
        let totals = run(settings, &cost, load, &mut summary).expect("it runs");
        let seconds = begun.elapsed().as_secs_f64();
        let result = serde_json::json!({
            "policy": policy,
            "prefix_caching": prefix_caching,
            "seconds": seconds,
            "requests": totals.completed,
            "steps": totals.steps,
            "output_tokens": totals.output_tokens,
            "simulated_seconds": totals.seconds,
            "requests_per_second": summary.request_throughput(&totals),
            "ttft": summary.ttft(),
            "hit_rate": totals.shelf.hit_rate(),
        });
        println!("{result:#}");
        results.push(result);
    }
    let mut arguments = std::env::args().skip_while(|argument| argument != "--json").skip(1);
    if let Some(path) = arguments.next() {
        std::fs::write(&path, format!("{:#}\n", serde_json::Value::from(results))).expect("the file can be written");
    }
}
