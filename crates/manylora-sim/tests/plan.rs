//! What the planner answers: the published figures, sums that add up, and errors and warnings that name their field.

use manylora_core::SchedulingSettings;
use manylora_core::budget::division::SizeSettings;
use manylora_core::budget::working::StepLimits;
use manylora_core::budget::{ModelDimensions, NumberFormat, WeightPacking};
use manylora_sim::card::CardSpec;
use manylora_sim::model::ModelDescription;
use manylora_sim::plan::{DType, FleetGroup, PlanRequest, PlannedDevice, ProcessorSpec, plan};

const ATTENTION: [&str; 4] = ["q_proj", "k_proj", "v_proj", "o_proj"];

fn group(count: u64, rank: u64, modules: &[&str]) -> FleetGroup {
    FleetGroup { count, rank, modules: FleetGroup::modules_named(modules.iter().copied()).expect("it is known") }
}

fn on_card<'a>(model: &str, card: &str, fleet: Vec<FleetGroup>) -> PlanRequest<'a> {
    let model = ModelDescription::named(model).expect("it is known");
    PlanRequest {
        settings: SizeSettings::new(model.context),
        model,
        device: PlannedDevice::Card(CardSpec::named(card).expect("it is known")),
        dtype: DType::Auto,
        fleet,
        lengths: vec![1024, 4096],
        scheduling: SchedulingSettings::default(),
        hot_adapters: None,
        cublas: true,
        free_bytes: None,
    }
}

/// The figures that people plan by, each within what is lost to rounding in print.
#[test]
fn the_published_figures() {
    let answer = plan(&on_card("Qwen2.5-7B-Instruct", "rtx4090", vec![group(30, 16, &ATTENTION)])).unwrap();
    let gigabytes = |bytes: u64| (bytes as f64 / 1e7).round() / 100.0;
    assert_eq!(gigabytes(2 * answer.parameters), 15.23);
    assert_eq!(gigabytes(answer.bytes.base), 15.23);
    assert_eq!(answer.full_copies.count, 30);
    assert_eq!((answer.full_copies.bytes as f64 / 1e9).round(), 457.0);
    assert_eq!(answer.full_copies.fit, 1);
    let three = plan(&on_card("Qwen2.5-7B-Instruct", "rtx4090", vec![group(3, 16, &ATTENTION)])).unwrap();
    assert_eq!((three.full_copies.bytes as f64 / 1e8).round() / 10.0, 45.7);

    let megabytes = |bytes: u64| (bytes as f64 / 1e5).round() / 10.0;
    assert_eq!(megabytes(answer.fleet[0].bytes), 20.2);
    assert_eq!(gigabytes(answer.fleet_bytes), 0.61);
    let linear = plan(&on_card("Qwen2.5-7B-Instruct", "rtx4090", vec![group(1, 16, &["all-linear"])])).unwrap();
    assert_eq!(megabytes(linear.fleet[0].bytes), 80.7);

    let llama = plan(&on_card("Llama-2-7b", "a100-80", vec![group(1, 16, &["q_proj"])])).unwrap();
    let q = &llama.modules[0];
    assert_eq!((q.shape, q.base_parameters, q.adapter_parameters), ([4096, 4096], 16_777_216, 131_072));
    assert_eq!(q.ratio, 128.0);
    insta::assert_json_snapshot!(answer);
}

#[test]
fn bytes_add_up() {
    for card in CardSpec::names() {
        for model in ["Qwen2.5-0.5B", "SmolLM2-135M", "Llama-3.1-8B", "Qwen3-4B"] {
            for fleet in [vec![], vec![group(200, 8, &ATTENTION), group(7, 16, &["all-linear"])]] {
                let answer = plan(&on_card(model, card, fleet)).unwrap();
                let bytes = answer.bytes;
                let parts = bytes.driver + bytes.base + bytes.workspace + bytes.adapters + bytes.kv_blocks + bytes.rest;
                assert_eq!(parts, bytes.budget, "{model} on {card}: {bytes:?}");
                assert_eq!(bytes.budget + bytes.unused, bytes.total);
                assert!(bytes.rest < answer.block_bytes + 256, "{model} on {card}: {bytes:?}");
                let one = &answer.sequences[0];
                assert!(one.fit <= one.fit_without_adapters && one.running <= 64);
            }
        }
    }
}

/// neither `max_loras` nor `max_lora_rank` takes a KV block's byte but for working memory, and a cache of n times an adapter's
/// bytes holds n.
#[test]
fn a_55_a_cache_of_n_adapters_holds_n() {
    let modules = ATTENTION;
    let mut request = on_card("Llama-2-7b", "a100-80", vec![group(100, 8, &modules)]);
    let each = plan(&request).unwrap().fleet[0].bytes;
    // 32 layers, rank 8, four maps of 4096 x 4096 in two bytes, and the adapter's table.
    assert!((16_777_216..16_777_216 + 8192).contains(&each), "{each}");
    for n in [1, 2, 3, 50] {
        request.scheduling.lora_memory_bytes = Some(n * each);
        assert_eq!(plan(&request).unwrap().fleet[0].resident, n);
        request.scheduling.lora_memory_bytes = Some(n * each - 1);
        assert_eq!(plan(&request).unwrap().fleet[0].resident, n - 1);
    }
    request.scheduling.lora_memory_bytes = None;
    request.scheduling.max_cpu_loras = Some(2);
    assert_eq!(plan(&request).unwrap().fleet[0].resident, 2);
}

#[test]
fn reserving_by_max_rank_wastes_elsewhere_and_not_here() {
    let mut request = on_card("Qwen2.5-7B-Instruct", "rtx4090", vec![group(30, 16, &ATTENTION)]);
    request.settings.max_lora_rank = 256;
    let answer = plan(&request).unwrap();
    let reservation = answer.reservation.unwrap();
    // 30 places of 256 x (all-linear's 80.7 MB at rank 16) / 16.
    assert_eq!(reservation.reserved_bytes, 30 * 16 * 80_740_352);
    assert_eq!(reservation.used_bytes, 30 * 20_185_088);
    assert_eq!(reservation.wasted_bytes, reservation.reserved_bytes - reservation.used_bytes);
    request.settings.max_lora_rank = 16;
    let tight = plan(&request).unwrap();
    // What the ledger charges is the adapters' own.
    assert_eq!(tight.bytes.adapters, answer.bytes.adapters);
    assert_eq!(tight.reservation.unwrap().charged_here_bytes, reservation.charged_here_bytes);
    assert!(reservation.charged_here_bytes < reservation.used_bytes * 101 / 100);
    // And what `max_lora_rank` does take here, working memory, is told.
    assert_eq!(answer.bytes.workspace - tight.bytes.workspace, reservation.workspace_here_bytes);
}

#[test]
fn quantized_checkpoints_show_both_sizes() {
    let plain = plan(&on_card("Qwen2.5-7B-Instruct", "a100-80", vec![])).unwrap();
    let answer = plan(&on_card("Qwen2.5-7B-Instruct-AWQ", "a100-80", vec![])).unwrap();
    assert_eq!(answer.bytes, plain.bytes);
    let quantization = answer.quantization.unwrap();
    assert_eq!(quantization.loaded_bytes, plain.bytes.base);
    assert_eq!(
        quantization.note,
        "AWQ 4-bit is dequantized at load by this version: 15.23 GB in memory as bfloat16; as it is stored it would take \
         5.57 GB"
    );
}

#[test]
fn warnings_name_the_setting() {
    let mut request = on_card("Qwen2.5-7B-Instruct", "rtx4090", vec![group(30, 16, &ATTENTION)]);
    request.lengths = vec![16];
    assert_eq!(plan(&request).unwrap().warnings, Vec::<String>::new());
    request.settings.max_loras = Some(4);
    request.hot_adapters = Some(8);
    let answer = plan(&request).unwrap();
    assert_eq!(answer.warnings.len(), 1, "{:?}", answer.warnings);
    assert!(answer.warnings[0].starts_with("max_loras `4` lets 4 adapters share a step and 8 are asked for"));
    request.settings.max_loras = None;
    request.scheduling.lora_memory_bytes = Some(100_000_000);
    let answer = plan(&request).unwrap();
    assert_eq!(answer.fleet[0].resident, 4);
    assert!(
        answer.warnings[0].contains("4 of 30 adapters are resident")
            && answer.warnings[0].contains("lora_memory_bytes")
    );
    request.scheduling.lora_memory_bytes = None;
    request.lengths = vec![8192];
    assert!(plan(&request).unwrap().warnings[0].starts_with("max_num_seqs `64` sequences of 8192 tokens do not fit"));
}

#[test]
fn errors_name_the_field() {
    type Change = fn(&mut PlanRequest<'_>);
    let cases: [(Change, &str); 9] = [
        (|request| request.settings.max_num_seqs = 0, "max_num_seqs `0`: it must be between 1 and"),
        (|request| request.settings.block_size = 2048, "block_size `2048`: it must be at most 1024"),
        (|request| request.settings.gpu_memory_utilization = 1.5, "gpu_memory_utilization `1.5`:"),
        (|request| request.fleet[0].rank = 64, "rank `64`: an engine with max_lora_rank `16`"),
        (|request| request.lengths = vec![0], "lengths `0`:"),
        (|request| request.dtype = DType::Float32, "dtype `float32`:"),
        (
            |request| request.settings.max_model_len = Some(1 << 20),
            "max_model_len `1048576` is beyond the model's context",
        ),
        (
            |request| request.settings.max_num_batched_tokens = Some(8),
            "max_num_batched_tokens `8`: it must be at least",
        ),
        (
            |request| {
                request.settings.max_loras = Some(4);
                request.scheduling.max_cpu_loras = Some(2);
            },
            "max_cpu_loras `2`: it must be >= max_loras (4)",
        ),
    ];
    for (change, message) in cases {
        let mut request = on_card("Qwen2.5-7B-Instruct", "rtx4090", vec![group(30, 16, &ATTENTION)]);
        change(&mut request);
        let error = plan(&request).unwrap_err().to_string();
        assert!(error.starts_with(message), "{error}");
    }
    let error = plan(&on_card("Llama-3.1-70B", "rtx4090", vec![])).unwrap_err().to_string();
    assert!(error.contains("the model needs") && error.contains("use a smaller model"), "{error}");
    assert!(FleetGroup::modules_named(["router"]).unwrap_err().to_string().starts_with("target_modules `router`:"));
}

#[test]
fn processors_ask_for_their_kernels_bytes() {
    let packing = |_: NumberFormat| WeightPacking::Panels16;
    let working = |dimensions: &ModelDimensions, limits: &StepLimits, _: NumberFormat| {
        dimensions.processor_activation_bytes(limits) + 4096
    };
    let processor =
        ProcessorSpec { name: "cpu".to_owned(), free_bytes: 20 << 30, packing: &packing, working: &working };
    let mut request = on_card("Qwen2.5-0.5B-Instruct", "l4", vec![group(8, 16, &["all-linear"])]);
    request.device = PlannedDevice::Processor(processor);
    let answer = plan(&request).unwrap();
    assert_eq!((answer.dtype, answer.bytes.driver, answer.bytes.total), ("bfloat16", 0, 20 << 30));
    // 17.6 MB each: what a PEFT file of these adapters has.
    assert_eq!(answer.fleet[0].bytes, 17_596_416);
    request.dtype = DType::Float32;
    assert_eq!(plan(&request).unwrap().fleet[0].bytes, 2 * 17_596_416);
}
