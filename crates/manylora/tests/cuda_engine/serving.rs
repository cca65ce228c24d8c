//! What the engine generates on a card, and what it holds meanwhile.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use manylora::{AdapterSource, DType, Device, Engine, EngineConfig, SamplingParams};
use manylora_core::budget::{TargetModule, card};
use manylora_kernels::cuda;
use manylora_kernels::{Module, Site, SiteShape};

use crate::common::{
    Answer, Oracle, adapter_path, answers, assert_every_ordering, engine, greedy, in_memory, load, request,
};
use crate::leave_room_for_others;
use crate::stand_in::{self, StandIn};

pub(crate) const ADAPTERS: [Option<&str>; 7] =
    [None, Some("alpha"), Some("beta"), Some("gamma"), Some("rank5"), Some("embed-head-nocopy"), Some("layers-0")];

/// An engine on the card: bf16, small steps, 2 MiB for KV blocks and adapters, at most half of it for adapters, unless
/// `configure` says otherwise.
pub(crate) fn on_card(oracle: &Oracle, configure: impl FnOnce(&mut EngineConfig)) -> Engine {
    engine(oracle, |config| {
        config.device = Device::Cuda { ordinal: 0 };
        config.dtype = DType::BFloat16;
        config.kv_cache_memory_bytes = Some(2 << 20);
        config.lora_memory_bytes = Some(1 << 20);
        leave_room_for_others(config);
        configure(config);
    })
}

pub(crate) fn with_adapters(oracle: &Oracle, configure: impl FnOnce(&mut EngineConfig)) -> Engine {
    let engine = on_card(oracle, configure);
    let names: Vec<&str> = ADAPTERS.iter().flatten().copied().collect();
    load(&engine, oracle, &names);
    engine
}

pub(crate) fn answer(engine: &Engine, oracle: &Oracle, adapter: Option<&str>) -> Answer {
    answers(engine, vec![request(&oracle.prompt("mid"), adapter, greedy(6))]).remove(0)
}

const LENGTH: usize = 8;

/// Tokens are the processor's in bf16 as long as no two candidates are closer than what bf16 blurs.
pub(crate) fn greedy_agrees_with_the_processor() {
    for base in ["llama", "qwen2", "qwen3"] {
        let oracle = Oracle::open(base);
        let names = ["alpha", "beta"];
        let reference = engine(&oracle, |config| config.dtype = DType::BFloat16);
        let card = on_card(&oracle, |_| {});
        let mut compared = 0;
        for (at, adapter) in [None].into_iter().chain(names.map(Some)).enumerate() {
            if let Some(name) = adapter {
                load(&reference, &oracle, &[name]);
                load(&card, &oracle, &[name]);
            }
            let blur = 4.0 * oracle.half_precision_error(adapter.map_or("base", |_| "alpha"));
            let prompts = ["few", "mid", "long"].map(|prompt| oracle.prompt(prompt));
            let run = |engine: &Engine| {
                answers(engine, prompts.iter().map(|prompt| request(prompt, adapter, greedy(LENGTH))).collect())
            };
            for ((tokens, logprobs), (wanted, reference)) in run(&card).into_iter().zip(run(&reference)) {
                assert_eq!((tokens.len(), logprobs.len()), (LENGTH, 2 * LENGTH));
                for step in 0..LENGTH {
                    let pair = &reference[2 * step..2 * step + 2];
                    let [best, second] = [f32::from_bits(pair[0].1), f32::from_bits(pair[1].1)];
                    let certain = (best - second).abs() >= blur;
                    assert!(!certain || tokens[step] == wanted[step], "{base} {adapter:?} step {step}");
                    if tokens[step] != wanted[step] {
                        break;
                    }
                    compared += 1;
                }
            }
            assert!(card.stats().unwrap().adapters.len() == at);
        }
        assert!(compared > 40, "{base}: {compared} tokens agree");
        println!("{base}: {compared} tokens");
    }
}

/// A name and what it changes.
type Variant = (&'static str, fn(&mut EngineConfig));

/// Promise P3: tokens, and the bits of logprobs, do not depend on who shares a batch.
pub(crate) fn solo_equals_batched() {
    let oracle = Oracle::open("llama");
    let rows: Vec<_> = (0..24)
        .map(|row| {
            let prompt: Vec<u32> =
                (0..3 + 5 * (row % 4) as u32).map(|index| 3 + (index * 7 + row as u32 * 13) % 250).collect();
            let params = if row % 3 == 2 {
                SamplingParams { temperature: 0.9, top_p: 0.9, seed: Some(11), repetition_penalty: 1.1, ..greedy(6) }
            } else {
                greedy(4 + row % 5)
            };
            (prompt, ADAPTERS[row % ADAPTERS.len()], params)
        })
        .collect();
    let requests = || rows.iter().map(|(prompt, adapter, params)| request(prompt, *adapter, params.clone()));
    let alone = with_adapters(&oracle, |config| {
        config.batch_invariant = true;
        config.enable_prefix_caching = false;
    });
    let wanted: Vec<Answer> = requests().map(|request| answers(&alone, vec![request]).remove(0)).collect();
    drop(alone);
    let variants: [Variant; 4] = [
        ("batched", |_| {}),
        ("launched one by one", |config| config.enforce_eager = true),
        ("chunks of 5", |config| {
            config.max_num_batched_tokens = Some(5);
            config.max_num_seqs = 4;
        }),
        ("one adapter a step, two resident", |config| {
            config.max_loras = Some(1);
            config.max_cpu_loras = Some(2);
        }),
    ];
    for (name, configure) in variants {
        let engine = with_adapters(&oracle, |config| {
            config.batch_invariant = true;
            configure(config);
        });
        for round in 0..2 {
            assert_eq!(answers(&engine, requests().collect()), wanted, "{name}, round {round}");
        }
    }
}

/// `fixed_gemm_algorithm`: cuBLASLt is asked once for each shape of weight, and what it computes does not depend on how many
/// rows there are. The emulated one sums in another order for other numbers of rows, as the real one does.
pub(crate) fn one_algorithm_for_each_weight() {
    const LOOK_UP: &str = "cublasLtMatmulAlgoGetHeuristic";
    let oracle = Oracle::open("llama");
    let rows = || {
        (0..20u32).map(|row| {
            let prompt: Vec<u32> = (0..2 + 4 * (row % 5)).map(|index| 3 + (index * 5 + row * 11) % 250).collect();
            request(&prompt, ADAPTERS[row as usize % ADAPTERS.len()], greedy(4))
        })
    };
    let device = StandIn::counting();
    let run = |fixed: bool| {
        if let Some(device) = device {
            device.reset_counts();
        }
        let engine = with_adapters(&oracle, |config| {
            config.fixed_gemm_algorithm = fixed;
            config.enable_prefix_caching = false;
        });
        let at_start = device.map_or(0, |device| device.calls(LOOK_UP));
        let alone: Vec<Answer> = rows().map(|request| answers(&engine, vec![request]).remove(0)).collect();
        let together = answers(&engine, rows().collect());
        (alone == together, at_start, device.map_or(0, |device| device.calls(LOOK_UP)))
    };
    let (same, at_start, lookups) = run(true);
    println!("rows have the same bits alone and together, with one algorithm for each weight: {same}");
    let (fastest_same, _, fastest) = run(false);
    println!("with the fastest for each shape: {fastest_same}");
    if device.is_none() {
        // What a card's library does is told, since its maker promises nothing.
        return;
    }
    assert!(same && !fastest_same);
    // q/k/v, o, gate/up, down, and the head, whose shape is the embedding's: none is looked up once requests run.
    assert_eq!((at_start, lookups), (5, 5));
    assert!(fastest > 3 * 5, "{fastest}");
}

/// Promise P8: what is told at the start is what the card holds, and formulas are those of what is allocated.
pub(crate) fn held_bytes_are_those_told() {
    for (base, rows, lora, own_products) in [
        ("llama", 64, true, false),
        ("qwen2", 300, true, true),
        ("qwen3", 40, false, false),
        ("llama-tied", 64, true, false),
    ] {
        let oracle = Oracle::open(base);
        let engine = on_card(&oracle, |config| {
            config.max_num_batched_tokens = Some(rows);
            config.enable_lora = lora;
            // Which need no working memory of a library.
            config.batch_invariant = own_products;
        });
        let info = engine.info().clone();
        let memory = info.card.unwrap();
        let used = engine.stats().unwrap().device_memory.unwrap();
        if let Some(device) = StandIn::counting() {
            // The device rounds up to 512 bytes.
            assert_eq!(device.held()[0] as u64, memory.reserved_bytes().next_multiple_of(512), "{base}");
        }
        assert_eq!(used.reserved, memory.reserved_bytes());
        assert_eq!(used.weights + used.working, memory.weight_bytes + memory.working_bytes, "{base}");
        assert_eq!((info.weight_bytes, info.working_bytes), (memory.weight_bytes, memory.working_bytes));
        assert_eq!((used.kv_cache + used.adapter_room, used.adapters), (memory.shared_bytes, 0));
        assert_eq!((info.ledger_bytes, info.kv_blocks as u64), (2 << 20, (2 << 20) / info.block_bytes));
        assert_eq!(info.ledger_bytes, memory.shared_bytes);
        // What is no whole block.
        assert!(used.adapter_room < info.block_bytes, "{base}: {used:?}");
        assert!(memory.driver_bytes + memory.reserved_bytes() <= memory.budget_bytes);
        if lora {
            load(&engine, &oracle, &["alpha", "beta", "qv"]);
            let stats = engine.stats().unwrap();
            let used = stats.device_memory.unwrap();
            assert_eq!(used.adapters, stats.adapter_bytes, "{base}");
            assert_eq!(stats.total_blocks as u64, (info.ledger_bytes - stats.adapter_bytes) / info.block_bytes);
            assert!((used.adapters..used.adapters + info.block_bytes).contains(&used.adapter_room), "{base}: {used:?}");
            assert_eq!(used.kv_cache + used.adapter_room, memory.shared_bytes);
            // Steps take nothing more.
            let all = (0..12)
                .map(|row| request(&oracle.prompt("mid"), ["alpha", "beta", "qv"].get(row % 4).copied(), greedy(6)));
            answers(&engine, all.collect());
            assert_eq!(engine.stats().unwrap().device_memory, stats.device_memory);
        }
        drop(engine);
        StandIn::get().assert_nothing_held();
    }
    formulas();
}

fn formulas() {
    for (layers, hidden, intermediate, heads, kv_heads, head_dim) in [(2, 32, 64, 4, 2, 8), (3, 896, 4864, 14, 2, 64)] {
        for tied in [false, true] {
            let dimensions = manylora_core::budget::ModelDimensions {
                layers,
                hidden,
                intermediate,
                heads,
                kv_heads,
                head_dim,
                vocabulary: 288,
                tied,
                attention_bias: tied,
                output_bias: false,
                mlp_bias: false,
                head_norm: !tied,
            };
            for rank in [1, 2, 5, 8, 12, 64, 512] {
                let shape = |layer: u64, module: TargetModule| {
                    let (input, output) = dimensions.shape(module);
                    let kernel = [Module::Q, Module::K, Module::V, Module::O, Module::Gate, Module::Up, Module::Down];
                    let site = Site::layer(layer as u32, kernel[module as usize]);
                    SiteShape { site, rank: rank as u32, input: input as u32, output: output as u32, scale: 1.0 }
                };
                let modules = [TargetModule::Q, TargetModule::V, TargetModule::Down];
                let sites: Vec<_> = (0..layers).flat_map(|layer| modules.map(|module| shape(layer, module))).collect();
                assert_eq!(
                    dimensions.card_adapter_bytes(rank, &modules),
                    cuda::packed_adapter_bytes(&sites, layers as usize) as u64
                );
                let embedding =
                    SiteShape { site: Site::EMBED, rank: rank as u32, input: 288, output: hidden as u32, scale: 1.0 };
                assert_eq!(
                    card::adapter_bytes(layers, card::embedding_factor_bytes(rank, 288, hidden)),
                    cuda::packed_adapter_bytes(&[embedding], layers as usize) as u64
                );
            }
        }
    }
    assert_eq!(card::GRANULE, cuda::GRANULE as u64);
    working_memory();
    for base in ["llama", "llama-tied", "qwen2", "qwen3", "mistral"] {
        let oracle = Oracle::open(base);
        let spec = manylora_model::checkpoint::Checkpoint::open(&oracle.base_folder()).unwrap().spec;
        let dimensions = manylora::model_dimensions(&spec);
        let engine = on_card(&oracle, |_| {});
        assert_eq!(dimensions.card_weight_bytes(), engine.info().weight_bytes, "{base}");
    }
}

/// What core says that steps take is what the kernels make for them.
fn working_memory() {
    let spec = manylora_model::checkpoint::Checkpoint::open(&Oracle::open("qwen2").base_folder()).unwrap().spec;
    let dimensions = manylora::model_dimensions(&spec);
    for rows in [1, 40, 257, 2048] {
        for (entries, rank, adapters) in [(0, 0, 1), (rows, 8, 64), (8 * rows, 64, 512), (rows, 512, 3)] {
            for block_tables in [1, 999, 64 * 2048] {
                let ours = card::StepRoom { rows, entries, rank, block_tables, adapters };
                let theirs = cuda::StepRoom { rows, entries, rank, block_tables, adapters };
                assert_eq!(
                    dimensions.card_step_bytes(&ours),
                    cuda::step_bytes(&theirs, spec.layers, spec.heads, spec.head_dim) as u64,
                    "{ours:?}"
                );
            }
        }
    }
    for block_size in [1, 16, 1024] {
        let ours = card::most_kv_blocks(dimensions.layers, block_size);
        assert_eq!(ours, cuda::most_kv_blocks(spec.layers, block_size));
    }
}

/// With nothing said, KV blocks and adapters share all that weights and working memory leave.
pub(crate) fn default_sizes() {
    let oracle = Oracle::open("llama");
    // Some 64 MiB are to be left.
    let utilization = if stand_in::on_card() {
        let memory = on_card(&oracle, |_| {}).info().card.unwrap();
        let needed = memory.driver_bytes + memory.weight_bytes + memory.working_bytes + (64 << 20);
        needed as f64 / memory.total_bytes as f64
    } else {
        0.1
    };
    let engine = on_card(&oracle, |config| {
        config.gpu_memory_utilization = utilization;
        config.kv_cache_memory_bytes = None;
        config.lora_memory_bytes = None;
    });
    let card = engine.info().card.unwrap();
    let left = card.budget_bytes - card.driver_bytes - card.weight_bytes - card.working_bytes;
    assert!(card.shared_bytes <= left && left - card.shared_bytes < 1024, "{card:?}");
    assert_eq!(engine.info().kv_blocks as u64, card.shared_bytes / engine.info().block_bytes);
    assert_eq!(engine.info().max_model_len, 512);
    load(&engine, &oracle, &["alpha"]);
    answer(&engine, &oracle, Some("alpha"));
    drop(engine);
    // A context that does not fit is lowered, and what fits is used.
    let engine = on_card(&oracle, |config| {
        config.kv_cache_memory_bytes = Some(16 << 10);
        config.max_model_len = None;
    });
    let info = engine.info();
    // Half of it is left to adapters, since one of the largest rank takes more.
    assert_eq!(info.max_model_len, info.kv_blocks / 2 * info.block_size);
    assert!(info.max_model_len < 512 && info.notes.iter().any(|note| note.contains("lowered from 512")), "{info:?}");
    assert_eq!(engine.stats().unwrap().device_memory.unwrap().reserved, info.card.unwrap().reserved_bytes());
}

/// a slot that held a big adapter gives a smaller one, and one without effect, nothing of it.
pub(crate) fn a_29_slots_are_clean() {
    let oracle = Oracle::open("llama");
    let names = ["gamma", "layers-0", "null", "alpha", "rank1"];
    let reference = on_card(&oracle, |_| {});
    load(&reference, &oracle, &names);
    let wanted: Vec<Answer> = names.iter().map(|name| answer(&reference, &oracle, Some(name))).collect();
    assert_eq!(wanted[2], answer(&reference, &oracle, None), "an adapter without effect is the base");
    assert_ne!(wanted[0], wanted[3]);
    drop(reference);
    let engine = on_card(&oracle, |config| {
        config.max_loras = Some(1);
        config.max_cpu_loras = Some(1);
        config.enable_prefix_caching = false;
    });
    load(&engine, &oracle, &names);
    let mut state = 7_usize;
    for step in 0..200 {
        state = state.wrapping_mul(1_103_515_245).wrapping_add(12_345);
        let index = if step < names.len() { step } else { (state >> 16) % names.len() };
        assert_eq!(answer(&engine, &oracle, Some(names[index])), wanted[index], "swap {step}: {}", names[index]);
    }
    assert!(engine.stats().unwrap().evictions > 100);
}

/// every ordering of base, ALPHA, BETA, ALPHA in one batch, the same prompt and sampling object.
pub(crate) fn a_36_every_ordering_of_one_batch() {
    let oracle = Oracle::open("llama");
    let engine = with_adapters(&oracle, |config| config.batch_invariant = true);
    assert_every_ordering(&engine, &oracle);
}

/// A-37, promise P4: LoRA off, on with nothing loaded, and on with idle adapters give identical base results.
pub(crate) fn a_37_base_is_neutral() {
    let oracle = Oracle::open("llama");
    let prompts = ["few", "mid", "long"].map(|name| oracle.prompt(name));
    let run =
        |engine: &Engine| answers(engine, prompts.iter().map(|prompt| request(prompt, None, greedy(8))).collect());
    // A step may begin before all have arrived, and cuBLASLt promises no bits for any number of rows.
    let own = |config: &mut EngineConfig| config.batch_invariant = true;
    let off = run(&on_card(&oracle, |config| {
        own(config);
        config.enable_lora = false;
    }));
    assert_eq!(run(&on_card(&oracle, own)), off);
    assert_eq!(run(&with_adapters(&oracle, own)), off);
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(from.join(file), to.join(file)).unwrap();
    }
}

/// While requests decode, other adapters are loaded, evicted, unloaded and replaced: none of them sees anything of it.
pub(crate) fn adapters_come_and_go_under_running_requests() {
    let oracle = Oracle::open("llama");
    let others = ["gamma", "rank5", "qv", "rs16", "layers-0", "rank64", "rank1", "embed-head-nocopy"];
    let card = |configure: fn(&mut EngineConfig)| {
        on_card(&oracle, |config| {
            config.batch_invariant = true;
            config.enable_prefix_caching = false;
            configure(config);
        })
    };
    let long = || {
        [None, Some("alpha"), Some("beta"), Some("alpha")]
            .map(|adapter| request(&oracle.prompt("few"), adapter, greedy(120)))
    };
    let reference = card(|_| {});
    load(&reference, &oracle, &["alpha", "beta"]);
    load(&reference, &oracle, &others);
    let wanted = answers(&reference, long().into());
    let short: Vec<Answer> = others.iter().map(|name| answer(&reference, &oracle, Some(name))).collect();
    let beta = answer(&reference, &oracle, Some("beta"));
    let bytes = |name: &str| reference.adapter(name).unwrap().report.bytes;
    // Those that run, the largest other one, and a little: something has to go all the time, and holes are left.
    let room =
        bytes("alpha") + bytes("beta") + others.iter().map(|name| bytes(name)).max().unwrap() + bytes("rank5") + 256;
    drop(reference);

    let engine = on_card(&oracle, |config| {
        config.batch_invariant = true;
        config.enable_prefix_caching = false;
        config.lora_memory_bytes = Some(room);
    });
    let folder = tempfile::tempdir().unwrap();
    copy(&adapter_path(&oracle, "alpha"), folder.path());
    load(&engine, &oracle, &["alpha", "beta"]);
    let mut turn = 0;
    // A card is through with its requests before many adapters have come and gone: then there are more rounds.
    let enough = |turn: usize| turn > 20 && engine.stats().unwrap().evictions > 10;
    for round in 0..if stand_in::on_card() { 100 } else { 3 } {
        if round >= 3 && enough(turn) {
            break;
        }
        let running = engine.submit_all(long().into(), false).unwrap();
        let mut turns = 0;
        let busy = || engine.stats().is_ok_and(|stats| stats.running + stats.waiting > 0);
        while busy() && turns < 40 {
            let index = turn % others.len();
            let path = adapter_path(&oracle, others[index]);
            if engine.adapter(others[index]).is_err() {
                engine.register_adapter(AdapterSource::directory(others[index], path)).unwrap();
            }
            assert_eq!(answer(&engine, &oracle, Some(others[index])), short[index], "turn {turn}: {}", others[index]);
            if turn % 5 == 4 {
                engine.unload_adapter(others[index], manylora::UnloadMode::Drain).unwrap();
            }
            if turn % 7 == 3 {
                // Another version takes the place of the one that requests run on.
                let from = adapter_path(&oracle, if turn % 2 == 0 { "rank1" } else { "alpha" });
                copy(&from, folder.path());
                let source = AdapterSource { replace: true, ..AdapterSource::directory("replaced", folder.path()) };
                engine.load_adapter(source).unwrap();
                engine.unload_adapter("replaced", manylora::UnloadMode::Drain).unwrap();
            }
            turn += 1;
            turns += 1;
        }
        let got: Vec<Answer> = running
            .into_iter()
            .map(|mut stream| {
                let sample = stream.collect_all().unwrap().remove(0);
                let entries = sample.logprobs.iter().flat_map(|position| &position.entries);
                let bits = entries.map(|entry| (entry.token, entry.logprob.to_bits())).collect();
                (sample.token_ids, bits)
            })
            .collect();
        assert_eq!(got, wanted, "round {round}");
    }
    assert_eq!(answer(&engine, &oracle, Some("beta")), beta);
    let stats = engine.stats().unwrap();
    println!("{turn} turns, {} evictions, {} steps", stats.evictions, stats.steps);
    assert!(enough(turn), "{turn} turns, {} evictions", stats.evictions);
    assert_eq!(stats.device_memory.unwrap().adapters, stats.adapter_bytes);
}

/// Promise P8: adapters and KV blocks that would not fit a memory that is divided beforehand take turns in one that is not,
/// and nobody sees anything of it.
pub(crate) fn a_fleet_and_long_sequences_share_memory() {
    let oracle = Oracle::open("llama");
    let names = ["alpha", "beta", "gamma", "rank5", "rank64", "rank48", "rank24", "all-linear", "embed-head-nocopy"];
    let exact = |config: &mut EngineConfig| {
        config.batch_invariant = true;
        config.enable_prefix_caching = false;
        config.lora_memory_bytes = None;
        config.max_model_len = Some(128);
    };
    let reference = on_card(&oracle, |config| {
        exact(config);
        config.kv_cache_memory_bytes = Some(16 << 20);
    });
    load(&reference, &oracle, &names);
    let fleet: u64 = names.iter().map(|name| reference.adapter(name).unwrap().report.bytes).sum();
    let largest = names.iter().map(|name| reference.adapter(name).unwrap().report.bytes).max().unwrap();
    let sequence = 128 / reference.info().block_size as u64 * reference.info().block_bytes;
    // As many of the longest as take what the fleet takes.
    let count = fleet.div_ceil(sequence) as usize;
    let prompt = |row: usize| -> Vec<u32> { (0..100).map(|index| 3 + (index * 7 + row as u32 * 13) % 250).collect() };
    let adapter = |row: usize| [None, Some("alpha")][row % 2];
    let long = || (0..count).map(|row| request(&prompt(row), adapter(row), greedy(28)));
    let short = || names.iter().map(|name| request(&oracle.prompt("mid"), Some(name), greedy(6)));
    let wanted_long: Vec<Answer> = long().map(|one| answers(&reference, vec![one]).remove(0)).collect();
    let wanted_short: Vec<Answer> = short().map(|one| answers(&reference, vec![one]).remove(0)).collect();
    drop(reference);

    // All of the fleet and one sequence, or all sequences and what they need: not both.
    let shared = (fleet + sequence).max(count as u64 * sequence + largest) + 1000;
    assert!(shared < fleet + count as u64 * sequence && fleet > shared / 2, "{fleet} {sequence} {count} {shared}");
    let engine = on_card(&oracle, |config| {
        exact(config);
        config.max_num_seqs = count.max(names.len());
        config.kv_cache_memory_bytes = Some(shared);
    });
    let register = |name: &&str| engine.register_adapter(AdapterSource::directory(*name, adapter_path(&oracle, name)));
    for name in names {
        drop(register(&name).unwrap());
    }
    let told = |when: &str| {
        // What was counted out is given back a little later, by a thread of its own.
        let deadline = Instant::now() + Duration::from_secs(20);
        let stats = loop {
            let stats = engine.stats().unwrap();
            if stats.device_memory.unwrap().adapters == stats.adapter_bytes || Instant::now() > deadline {
                break stats;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        let (used, card) = (stats.device_memory.unwrap(), engine.info().card.unwrap());
        assert_eq!(used.kv_cache + used.adapter_room, card.shared_bytes, "{when}");
        assert_eq!(used.adapters, stats.adapter_bytes, "{when}");
        let blocks = (engine.info().ledger_bytes - stats.adapter_bytes) / engine.info().block_bytes;
        assert_eq!(stats.total_blocks as u64, blocks, "{when}");
        println!("{when}: {used:?}, {} evictions, {} preemptions", stats.evictions, stats.preemptions);
        (stats.adapter_bytes, stats.total_blocks as u64 * engine.info().block_bytes)
    };
    for round in 0..3 {
        assert_eq!(answers(&engine, short().collect()), wanted_short, "round {round}");
        assert!(told("after the fleet").0 > shared / 2);
        assert_eq!(answers(&engine, long().collect()), wanted_long, "round {round}");
        assert!(told("after long sequences").1 > shared / 2);
        // Both at once.
        let mixed = answers(&engine, long().chain(short()).collect());
        assert_eq!((&mixed[..count], &mixed[count..]), (&wanted_long[..], &wanted_short[..]), "round {round}");
        told("after both");
    }
    assert!(engine.stats().unwrap().evictions > 0);
    for name in names {
        engine.unload_adapter(name, manylora::UnloadMode::Drain).unwrap();
    }
    assert_eq!(told("at the end").0, 0);
}

/// Content that is given in memory takes its bytes when there is room, like all other.
pub(crate) fn adapters_from_memory() {
    let oracle = Oracle::open("llama");
    let reference = on_card(&oracle, |_| {});
    load(&reference, &oracle, &["alpha", "beta", "rank64"]);
    let wanted = ["alpha", "beta", "rank64"].map(|name| answer(&reference, &oracle, Some(name)));
    let bytes = |name: &str| reference.adapter(name).unwrap().report.bytes;
    let room = bytes("alpha") + bytes("rank64");
    drop(reference);
    let engine = on_card(&oracle, |config| config.lora_memory_bytes = Some(room));
    load(&engine, &oracle, &["rank64"]);
    engine.load_adapter(in_memory(&oracle, "given", "alpha")).unwrap();
    assert_eq!(answer(&engine, &oracle, Some("given")), wanted[0]);
    assert_eq!(answer(&engine, &oracle, Some("rank64")), wanted[2]);
    // From disk, so it gives way.
    load(&engine, &oracle, &["beta"]);
    assert_eq!(answer(&engine, &oracle, Some("beta")), wanted[1]);
    engine.load_adapter(in_memory(&oracle, "second", "rank64")).unwrap();
    assert_eq!(answer(&engine, &oracle, Some("second")), wanted[2]);
    assert_eq!(answer(&engine, &oracle, Some("given")), wanted[0]);
    // Now all is taken by what stays, and that is said.
    let mut late = engine.submit(request(&oracle.prompt("mid"), Some("beta"), greedy(6))).unwrap();
    let error = late.collect_all().expect_err("there is no room").to_string();
    assert!(error.contains("given from memory") && error.contains(&format!("`{room}`")), "{error}");
    assert_eq!(answer(&engine, &oracle, Some("given")), wanted[0]);
    let stats = engine.stats().unwrap();
    assert_eq!(stats.device_memory.unwrap().adapters, stats.adapter_bytes);
}

/// What fits by its bytes is loaded, however many holes they are spread over, while others run.
pub(crate) fn holes_keep_nothing_out() {
    let oracle = Oracle::open("llama");
    let names = ["rank2", "alpha", "beta", "qv", "gamma", "rank5", "rank64", "rank48", "rank24", "all-linear", "rs16"];
    let reference = with_adapters(&oracle, |config| config.batch_invariant = true);
    load(&reference, &oracle, &names);
    let bytes = |name: &str| reference.adapter(name).unwrap().report.bytes;
    // One to go, one to stay, and so on.
    let (go, stay) = (["beta", "gamma", "rank5"], ["alpha", "qv", "rank2"]);
    let (freed, longest) = (go.map(bytes).iter().sum::<u64>(), go.map(bytes).into_iter().max().unwrap());
    let fits = |name: &&&str| bytes(name) > longest && bytes(name) <= freed;
    let large =
        *names.iter().filter(|name| !stay.contains(*name)).find(fits).expect("one between the longest hole and all");
    let room = freed + stay.map(bytes).iter().sum::<u64>();
    let long = || stay.map(|name| request(&oracle.prompt("few"), Some(name), greedy(100)));
    let wanted = answers(&reference, long().into());
    let wanted_large = answer(&reference, &oracle, Some(large));
    drop(reference);

    let engine = on_card(&oracle, |config| {
        config.batch_invariant = true;
        config.enable_prefix_caching = false;
        config.lora_memory_bytes = Some(room);
    });
    for (go, stay) in go.iter().zip(stay) {
        load(&engine, &oracle, &[go, stay]);
    }
    for name in stay {
        engine.pin_adapter(name).unwrap();
    }
    let running = engine.submit_all(long().into(), true).unwrap();
    for name in go {
        engine.unload_adapter(name, manylora::UnloadMode::Drain).unwrap();
    }
    load(&engine, &oracle, &[large]);
    assert_eq!(answer(&engine, &oracle, Some(large)), wanted_large);
    // A card may have been faster than the files were read.
    assert!(stand_in::on_card() || engine.stats().unwrap().running > 0, "the others still run");
    for (mut stream, wanted) in running.into_iter().zip(&wanted) {
        let tokens: Vec<u32> =
            std::iter::from_fn(|| stream.next_delta()).flat_map(|delta| delta.unwrap().token_ids).collect();
        assert_eq!(tokens, wanted.0);
    }
    assert_eq!(answers(&engine, long().into()), wanted);
    let stats = engine.stats().unwrap();
    assert_eq!((stats.evictions, stats.device_memory.unwrap().adapters), (0, stats.adapter_bytes));
}
