//! Which device is chosen, and what is said where a card cannot be used.

use std::path::PathBuf;

use manylora::{DType, Device, Engine, EngineConfig};

use crate::common::{Oracle, answers, greedy, request};
use crate::{leave_room_for_others, stand_in};

fn config(device: Device) -> EngineConfig {
    let mut config = EngineConfig::new(Oracle::open("llama").base_folder());
    config.device = device;
    config.max_num_batched_tokens = Some(64);
    config.max_num_seqs = 4;
    config.num_threads = Some(1);
    if device != (Device::Cuda { ordinal: 0 }) || stand_in::on_card() {
        config.kv_cache_memory_bytes = Some(1 << 20);
    }
    leave_room_for_others(&mut config);
    config
}

fn refusal(configure: impl FnOnce(&mut EngineConfig)) -> String {
    let mut config = config(Device::Cuda { ordinal: 0 });
    configure(&mut config);
    Engine::start(config).expect_err("it cannot start").to_string()
}

fn assert_says(text: &str, words: &[&str]) {
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
}

/// `auto` takes the processor, says why, and works.
fn assert_falls_back(why: &[&str], surprising: bool, configure: impl FnOnce(&mut EngineConfig)) {
    let mut config = config(Device::Auto);
    configure(&mut config);
    let engine = Engine::start(config).unwrap();
    let info = engine.info();
    assert_eq!((info.device.as_str(), info.card), ("cpu", None));
    let reason = info.device_reason.clone().unwrap();
    assert_says(&reason, why);
    assert_eq!(info.notes.contains(&reason), surprising, "{:?}", info.notes);
    assert_eq!(answers(&engine, vec![request(&[5, 6, 7], None, greedy(2))])[0].0.len(), 2);
}

pub(crate) fn no_driver() {
    if PathBuf::from("/dev/nvidiactl").exists() {
        println!("there is a driver here");
        return;
    }
    assert_says(&refusal(|_| {}), &["no NVIDIA driver", "libcuda.so.1", "device \"cpu\""]);
    assert_falls_back(&["cpu, because", "no NVIDIA driver"], false, |_| {});
}

pub(crate) fn automatic() {
    let mut settings = config(Device::Auto);
    settings.lora_memory_bytes = Some(1 << 20);
    let engine = Engine::start(settings).unwrap();
    let info = engine.info();
    assert_eq!(info.device, "cuda:0");
    assert_says(info.device_reason.as_ref().unwrap(), &["cuda:0"]);
    assert_says(&info.backend, if stand_in::on_card() { &["cuda:0"] } else { &["cuda:0", "emulated"] });
    drop(engine);
    let mut settings = config(Device::Cpu);
    settings.gpu_memory_utilization = 0.5;
    let engine = Engine::start(settings).unwrap();
    assert_eq!((engine.info().device.as_str(), &engine.info().device_reason), ("cpu", &None));
    drop(engine);
    assert_says(
        &refusal(|config| config.device = Device::Cuda { ordinal: 99 }),
        &["`cuda:99` does not exist", if stand_in::on_card() { "there are" } else { "there are 1" }],
    );
}

pub(crate) fn no_card() {
    assert_says(&refusal(|_| {}), &["no NVIDIA card", "CUDA_VISIBLE_DEVICES", "device \"cpu\""]);
    assert_falls_back(&["no NVIDIA card"], false, |_| {});
}

pub(crate) fn a_card_too_old() {
    assert_says(&refusal(|_| {}), &["too old", "7.5", "8.0", "device \"cpu\""]);
    assert_falls_back(&["too old", "7.5"], true, |_| {});
}

pub(crate) fn a_driver_too_old() {
    assert_says(&refusal(|_| {}), &["driver is too old", "11.8", "install driver", "device \"cpu\""]);
    assert_falls_back(&["driver is too old"], true, |_| {});
}

pub(crate) fn too_little_memory() {
    // The working memory of matrix products alone is more than this card has.
    let text = refusal(|_| {});
    assert_says(
        &text,
        &["cuda:0 of 4194304 bytes", "gpu_memory_utilization `0.92`", "weights", "working memory", "device \"cpu\""],
    );
    assert_falls_back(&["cuda:0 of 4194304 bytes"], true, |_| {});
}

pub(crate) fn memory_of_others() {
    let device = manylora_kernels::cuda::Device::open(0).unwrap();
    let taken = manylora_kernels::cuda::DeviceMemory::new(device.context(), "others", 300 << 20).unwrap();
    let text = refusal(|_| {});
    assert_says(&text, &["gpu_memory_utilization `0.92`", "are free", "lower it"]);
    let mut settings = config(Device::Cuda { ordinal: 0 });
    settings.gpu_memory_utilization = 0.2;
    let engine = Engine::start(settings.clone()).unwrap();
    let card = engine.info().card.unwrap();
    assert_eq!(card.budget_bytes, (1u64 << 30) / 5);
    assert!(card.reserved_bytes() + card.driver_bytes <= card.budget_bytes);
    assert!(
        card.budget_bytes - card.reserved_bytes() - card.driver_bytes < engine.info().block_bytes + 1024,
        "{card:?}"
    );
    drop((engine, taken));
    settings.gpu_memory_utilization = 0.92;
    settings.kv_cache_memory_bytes = Some(990 << 20);
    let text = Engine::start(settings).expect_err("more than there is").to_string();
    assert_says(&text, &["kv_cache_memory_bytes `1038090240`", "lower it", "gpu_memory_utilization `0.92`"]);
    for utilization in [0.0, 1.1, f64::NAN] {
        let text = refusal(|config| config.gpu_memory_utilization = utilization);
        assert_says(&text, &["gpu_memory_utilization must be above 0"]);
    }
}

/// All of a card that nobody else uses can be had: what the driver took to open it is seen, and left to it.
pub(crate) fn all_of_the_memory() {
    let (total, driver, more) = (128u64 << 20, 2 << 20, 6 << 20);
    let mut settings = config(Device::Cuda { ordinal: 0 });
    settings.gpu_memory_utilization = 1.0;
    settings.lora_memory_bytes = Some(1 << 20);
    let taken_by = |bytes: u64| {
        let device = manylora_kernels::cuda::Device::open(0).unwrap();
        manylora_kernels::cuda::DeviceMemory::new(device.context(), "the driver", bytes as usize).unwrap()
    };
    let taken = taken_by(driver);
    let engine = Engine::start(settings.clone()).unwrap();
    let card = engine.info().card.unwrap();
    let later = total / 160;
    assert_eq!((card.budget_bytes, card.driver_bytes), (total, driver + later));
    assert!((total - driver - later - card.reserved_bytes()) < 1024, "{card:?}");
    assert_eq!(answers(&engine, vec![request(&[5, 6, 7], None, greedy(2))])[0].0.len(), 2);
    drop((engine, taken));
    // More than a driver takes is others', whatever is asked for.
    let taken = taken_by(more);
    let text = Engine::start(settings.clone()).expect_err("others have a part").to_string();
    let (driver, free) = (total / 40, total - more);
    let others = more - driver;
    assert_says(&text, &[&format!("{free} are free (others have {others} bytes, the driver {driver})")]);
    settings.gpu_memory_utilization = (total - others) as f64 / total as f64;
    let engine = Engine::start(settings).unwrap();
    assert!(engine.info().card.unwrap().reserved_bytes() <= free - later);
    drop((engine, taken));
}

/// `auto` keeps what is stored as float16 in float16, which a processor computes in bfloat16.
pub(crate) fn float16_stays_float16() {
    let folder = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(Oracle::open("llama").base_folder()).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    let path = folder.path().join("config.json");
    let mut spec: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    spec.as_object_mut().unwrap().remove("torch_dtype");
    spec["dtype"] = "float16".into();
    std::fs::write(&path, spec.to_string()).unwrap();
    for (device, dtype) in [(Device::Cuda { ordinal: 0 }, "float16"), (Device::Cpu, "bfloat16")] {
        let mut settings = config(device);
        settings.lora_memory_bytes = Some(1 << 20);
        folder.path().clone_into(&mut settings.model);
        let engine = Engine::start(settings).unwrap();
        assert_eq!(engine.info().dtype, dtype, "{device:?}");
        let tokens = answers(&engine, vec![request(&[5, 6, 7], None, greedy(4))]).remove(0).0;
        assert_eq!(tokens.len(), 4);
    }
}

pub(crate) fn what_a_card_does_not_do() {
    let text = refusal(|config| config.dtype = DType::Float32);
    assert_says(&text, &["float32", "bfloat16"]);
    assert_falls_back(&["float32"], true, |config| config.dtype = DType::Float32);
    let odd = Oracle::open("llama-odd").base_folder();
    assert_says(&refusal(|config| config.model.clone_from(&odd)), &["multiples of 8", "device \"cpu\""]);
    assert_falls_back(&["multiples of 8"], true, |config| config.model = odd);
    assert_says(
        &Engine::start(EngineConfig { device: Device::Cuda { ordinal: 0 }, ..EngineConfig::new("/no/such/folder") })
            .expect_err("no model")
            .to_string(),
        &["/no/such/folder"],
    );
}
