//! The oracle's models on the emulated device, end to end: bases, an adapter, adapters composed and in turn. Each case runs
//! in a process of its own, which names the device.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a test program")]

mod harness;
#[path = "../../manylora-kernels/tests/stand_in/mod.rs"]
mod stand_in;

use std::process::{Command, ExitCode};
use std::sync::Arc;

use harness::{BASES, Model, Oracle, compare};
use manylora_kernels::cuda::{AlgorithmChoice, BLAS_VARIABLE, CudaBackend, CudaOptions, DRIVER_VARIABLE};
use manylora_kernels::{Backend, StorageType};
use manylora_model::Runner;
use manylora_model::adapter::{AdapterHeader, AdapterPolicy, inspect};
use manylora_model::checkpoint::Checkpoint;

/// Says to a child which case it is.
const CASE_VARIABLE: &str = "MANYLORA_CUDA_CASE";

fn options(checkpoint: &Checkpoint, dtype: StorageType) -> CudaOptions {
    let spec = &checkpoint.spec;
    CudaOptions {
        ordinal: 0,
        dtype,
        layers: spec.layers,
        heads: spec.heads,
        kv_heads: spec.kv_heads,
        head_dim: spec.head_dim,
        memory_bytes: 160 << 20,
        adapter_bytes: 32 << 20,
        algorithms: AlgorithmChoice::OnePerWeight { rows: harness::CONTEXT },
        workspace_bytes: Some(1 << 20),
        library_folders: Vec::new(),
        graphs: true,
    }
}

/// A base whose rows are no multiples of 16 bytes is refused when it is loaded.
fn refused(base: &str) {
    let checkpoint = Checkpoint::open(&Oracle::open(base).base_folder()).unwrap();
    let spec = &checkpoint.spec;
    assert!(!spec.hidden_size.is_multiple_of(8) && !spec.head_dim.is_multiple_of(8), "{base} has become regular");
    let error = CudaBackend::open(options(&checkpoint, StorageType::Bf16)).unwrap_err().to_string();
    assert!(error.contains(&format!("`{}` wide", spec.head_dim)), "{error}");
}

/// A base and its adapter `alpha` stay within twice the error that PEFT itself has in bf16.
fn base_and_adapter(base: &str) {
    let oracle = Oracle::open(base);
    let checkpoint = Checkpoint::open(&oracle.base_folder()).unwrap();
    let spec = checkpoint.spec.clone();
    let backend = Arc::new(CudaBackend::open(options(&checkpoint, StorageType::Bf16)).unwrap());
    let mut model = Model::on(Arc::clone(&backend), &checkpoint, StorageType::Bf16);
    let error = oracle.half_precision_error("base");
    let most = compare(&oracle, &mut model, base, None, &[], 2.0 * error, 4.0 * f64::from(error));
    println!("{base}: {most:e} of {error:e}");
    let mut policy = AdapterPolicy::new(spec, Arc::new(checkpoint));
    policy.max_rank = 512;
    policy.dtype = StorageType::Bf16;
    let path = oracle.folder.join("adapters/alpha");
    let adapter = inspect("alpha", &path, &policy).and_then(AdapterHeader::read).unwrap();
    let packer = model.decoder.packer();
    let handle = packer.pack(&adapter).unwrap();
    assert_eq!(handle.bytes, packer.bytes(&adapter.sites), "announced and packed bytes differ");
    model.decoder.install(3, handle);
    let error = oracle.half_precision_error("alpha");
    let label = format!("{base}/alpha");
    let near_tie = 4.0 * f64::from(error);
    let most = compare(&oracle, &mut model, &label, Some("alpha"), &[(3, 1.0)], 2.0 * error, near_tie);
    println!("{label}: {most:e} of {error:e}; {} recorded steps", backend.recorded_steps());
    assert!(backend.recorded_steps() > 0);
    println!("{}", backend.describe());
}

fn main() -> ExitCode {
    if let Ok(base) = std::env::var(CASE_VARIABLE) {
        if base == "llama-odd" {
            refused(&base);
        } else {
            base_and_adapter(&base);
        }
        return ExitCode::SUCCESS;
    }
    if std::env::args().any(|argument| argument == "--list") {
        BASES.iter().for_each(|base| println!("{base}: test"));
        return ExitCode::SUCCESS;
    }
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    let required = std::env::var(stand_in::REQUIRE_VARIABLE).is_ok_and(|value| value == "1");
    let folder = match stand_in::build(stand_in::Build::Plain) {
        Ok(folder) => folder,
        Err(reason) => {
            println!("test result: all skipped: no emulated device: {reason}");
            return if required { ExitCode::FAILURE } else { ExitCode::SUCCESS };
        }
    };
    let (mut passed, mut failed) = (0, 0);
    for base in BASES.iter().filter(|base| base.contains(&filter)) {
        let output = Command::new(std::env::current_exe().unwrap())
            .env(DRIVER_VARIABLE, folder.join("libcuda.so"))
            .env(BLAS_VARIABLE, folder.join("libcublasLt.so"))
            .env(CASE_VARIABLE, base)
            .output()
            .unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() {
            println!("{}test {base} ... ok", text(&output.stdout));
            passed += 1;
        } else {
            println!("test {base} ... FAILED ({})\n{}{}", output.status, text(&output.stdout), text(&output.stderr));
            failed += 1;
        }
    }
    println!("\ntest result: {passed} passed; {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
