//! A step that fails while tokens are drawn: each of its requests is told why, those whose tokens were being drawn, too.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use manylora_core::SamplingParams;
use manylora_kernels::{LargestValues, MemoryUse, StepBatch};
use manylora_model::{AdapterPacker, ModelError, PackedHandle, Runner};

use super::handle::EngineHandle;
use super::startup::{Assembled, assemble};
use crate::config::{DType, EngineConfig};
use crate::request::GenerateRequest;

/// How whole rows of logits are missed.
#[derive(Clone, Copy, Debug)]
enum Failure {
    /// They cannot be had.
    Error,
    /// Whoever draws from them panics.
    Panic,
}

/// A runner of whose logits no rows can be had.
struct Failing {
    inner: Box<dyn Runner>,
    failure: Failure,
}

impl Runner for Failing {
    fn share_logits(&mut self, count: usize, work: &(dyn Fn(usize, usize, &[f32]) + Sync)) -> Result<(), ModelError> {
        match self.failure {
            Failure::Error => Err(ModelError::Tokenizer("no rows to be had".to_owned())),
            // In the middle: some tokens are drawn by then, which must not help the others.
            Failure::Panic => self.inner.share_logits(count, &|part, parts, logits| {
                work(part, parts, logits);
                panic!("no more rows to be had");
            }),
        }
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn forward(&mut self, batch: &StepBatch) -> Result<(), ModelError> {
        self.inner.forward(batch)
    }

    fn logits(&mut self, batch: &StepBatch, first: usize, count: usize) -> Result<(), ModelError> {
        self.inner.logits(batch, first, count)
    }

    fn read_logits(&mut self, count: usize) -> Result<&[f32], ModelError> {
        self.inner.read_logits(count)
    }

    fn argmax(&mut self, count: usize, out: &mut [u32]) -> Result<(), ModelError> {
        self.inner.argmax(count, out)
    }

    fn largest(&mut self, count: usize, k: usize, out: &mut LargestValues) -> Result<bool, ModelError> {
        self.inner.largest(count, k, out)
    }

    fn max_logit_rows(&self) -> usize {
        self.inner.max_logit_rows()
    }

    fn run_parts(&self, work: &(dyn Fn(usize, usize) + Sync)) {
        self.inner.run_parts(work);
    }

    fn packer(&self) -> Arc<dyn AdapterPacker> {
        self.inner.packer()
    }

    fn install(&mut self, slot: u32, adapter: PackedHandle) {
        self.inner.install(slot, adapter);
    }

    fn remove(&mut self, slot: u32) {
        self.inner.remove(slot);
    }

    fn release_blocks(&mut self, blocks: &[u32]) {
        self.inner.release_blocks(blocks);
    }

    fn weight_bytes(&self) -> u64 {
        self.inner.weight_bytes()
    }

    fn memory_use(&self) -> Option<MemoryUse> {
        self.inner.memory_use()
    }
}

#[test]
fn each_request_is_told_why_its_step_failed() {
    let oracle = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/oracle/llama");
    for failure in [Failure::Error, Failure::Panic] {
        let mut config = EngineConfig::new(oracle.join("base"));
        config.dtype = DType::Float32;
        config.kv_cache_memory_bytes = Some(8 << 20);
        config.num_threads = Some(2);
        let Assembled { shared, mut worker, .. } = assemble(config, &mut |_| {}).expect("the engine");
        worker.runner = Box::new(Failing { inner: worker.runner, failure });
        let handle = EngineHandle { shared: Arc::new(shared) };
        let requests = (0..5).map(|row| {
            let temperature = if row % 2 == 0 { 1.0 } else { 0.0 };
            let params = SamplingParams { temperature, seed: Some(1), ..SamplingParams::default() };
            GenerateRequest::tokens([5, 6, 7 + row]).params(params)
        });
        let streams = handle.submit_all(requests.collect(), true).expect("queued");
        assert!(worker.take_commands());
        let why = match catch_unwind(AssertUnwindSafe(|| worker.step())) {
            Ok(step) => step.map(drop).expect_err("no rows").to_string(),
            Err(_) => "its thread failed".to_owned(),
        };
        assert_eq!(worker.draws.len(), 3, "{failure:?}");
        worker.close(&why);
        for (row, mut stream) in streams.into_iter().enumerate() {
            let told = stream.collect_all().expect_err("it failed").to_string();
            assert!(told.contains(&why), "{failure:?}, request {row}: {told}");
        }
    }
}
