//! The forward pass: the same walk over the layers for every family, adapter and backend.

use std::sync::Arc;

use manylora_kernels::{
    AdapterTable, AttentionShape, Backend, HeadInputs, LargestValues, LinearOutput, LinearPart, MemoryUse, Module,
    Site, StepBatch, StorageType,
};

use super::packer::BackendPacker;
use super::weights::DecoderWeights;
use super::working_memory::{Buffers, Decoder};
use crate::error::ModelError;
use crate::runner::{AdapterPacker, PackedHandle, Runner};

/// What a layer works with, borrowed from the decoder.
struct LayerRun<'a, B: Backend> {
    weights: &'a DecoderWeights<B>,
    attention: &'a [AttentionShape],
    buffers: &'a mut Buffers<B>,
    cosines: &'a B::Vector,
    sines: &'a B::Vector,
    cache: &'a mut B::KvCache,
    adapters: &'a AdapterTable<B::Adapter>,
}

impl<B: Backend> LayerRun<'_, B> {
    fn run_layer(&mut self, batch: &StepBatch, layer: usize) {
        let Self { weights, attention, buffers, cosines, sines, cache, adapters } = self;
        let backend = &*weights.backend;
        let spec = &weights.spec;
        let shape = &attention[layer];
        let parameters = &weights.layers[layer];
        let site = |module| Site::layer(layer as u32, module);
        let (rows, plan, epsilon) = (batch.rows(), &batch.adapters, spec.rms_norm_eps);

        let norm_site = site(Module::InputNorm);
        backend.rms_norm(rows, &buffers.hidden, &parameters.input_norm, epsilon, norm_site, &mut buffers.normed);
        let mut parts = [
            LinearPart {
                weight: &parameters.q.weight,
                bias: None,
                site: site(Module::Q),
                out: &mut buffers.q,
                mode: LinearOutput::Store,
            },
            LinearPart {
                weight: &parameters.k.weight,
                bias: None,
                site: site(Module::K),
                out: &mut buffers.k,
                mode: LinearOutput::Store,
            },
            LinearPart {
                weight: &parameters.v.weight,
                bias: None,
                site: site(Module::V),
                out: &mut buffers.v,
                mode: LinearOutput::Store,
            },
        ];
        backend.linear(rows, plan, adapters, &buffers.normed, &mut parts);
        let heads = HeadInputs {
            q_bias: parameters.q.bias.as_ref(),
            k_bias: parameters.k.bias.as_ref(),
            v_bias: parameters.v.bias.as_ref(),
            q_norm: parameters.q_norm.as_ref(),
            k_norm: parameters.k_norm.as_ref(),
            epsilon,
        };
        let Buffers { q, k, v, .. } = &mut **buffers;
        backend.rope_kv_write(batch, layer, shape, &heads, cosines, sines, q, k, v, cache);
        backend.attention(batch, layer, shape, &buffers.q, cache, &mut buffers.attended);
        let mut part = [LinearPart {
            weight: &parameters.o.weight,
            bias: parameters.o.bias.as_ref(),
            site: site(Module::O),
            out: &mut buffers.hidden,
            mode: LinearOutput::Add,
        }];
        backend.linear(rows, plan, adapters, &buffers.attended, &mut part);
        backend.reduce(rows, &mut buffers.hidden);

        let norm_site = site(Module::PostNorm);
        backend.rms_norm(rows, &buffers.hidden, &parameters.post_norm, epsilon, norm_site, &mut buffers.normed);
        let mut parts = [
            LinearPart {
                weight: &parameters.gate.weight,
                bias: parameters.gate.bias.as_ref(),
                site: site(Module::Gate),
                out: &mut buffers.gate,
                mode: LinearOutput::Store,
            },
            LinearPart {
                weight: &parameters.up.weight,
                bias: parameters.up.bias.as_ref(),
                site: site(Module::Up),
                out: &mut buffers.up,
                mode: LinearOutput::Store,
            },
        ];
        backend.gated_linear(rows, plan, adapters, &buffers.normed, &mut parts, &mut buffers.activated);
        let mut part = [LinearPart {
            weight: &parameters.down.weight,
            bias: parameters.down.bias.as_ref(),
            site: site(Module::Down),
            out: &mut buffers.hidden,
            mode: LinearOutput::Add,
        }];
        backend.linear(rows, plan, adapters, &buffers.activated, &mut part);
        backend.reduce(rows, &mut buffers.hidden);
    }
}

impl<B: Backend> Runner for Decoder<B> {
    fn describe(&self) -> String {
        let spec = &self.weights.spec;
        let dtype = match self.weights.dtype {
            StorageType::Bf16 => "bfloat16",
            StorageType::F16 => "float16",
            StorageType::F32 => "float32",
        };
        format!(
            "{:?}, {} layers, hidden {}, vocabulary {}{}; {dtype} weights, {:.2} MB; {}",
            spec.family,
            spec.layers,
            spec.hidden_size,
            spec.vocab_size,
            if spec.tied { " (tied)" } else { "" },
            self.weights.bytes() as f64 / 1e6,
            self.weights.backend.describe(),
        )
    }

    fn forward(&mut self, batch: &StepBatch) -> Result<(), ModelError> {
        let rows = batch.rows();
        assert!(rows <= self.limits.max_rows, "a step of {rows} rows is larger than max_rows");
        if rows == 0 {
            return Ok(());
        }
        let Self { walk, weights, attention, buffers, cosines, sines, cache, adapters, .. } = self;
        let backend = &*weights.backend;
        backend.begin_step(batch, adapters)?;
        backend.embed(batch, adapters, &weights.embedding, Site::EMBED, &mut buffers.hidden);
        let mut run = LayerRun { weights, attention, buffers, cosines, sines, cache, adapters };
        backend.run_layers(*walk, batch, &mut || {
            for layer in 0..run.weights.layers.len() {
                run.run_layer(batch, layer);
            }
        });
        Ok(backend.end_step()?)
    }

    fn logits(&mut self, batch: &StepBatch, first: usize, count: usize) -> Result<(), ModelError> {
        assert!(count <= self.limits.max_logit_rows, "logits of {count} rows are more than max_logit_rows");
        let Self { weights, buffers, adapters, head_plan, .. } = self;
        let backend = &*weights.backend;
        if count == 0 {
            return Ok(());
        }
        let rows = &batch.sample_rows[first..first + count];
        head_plan.clear();
        if !batch.adapters.is_empty() {
            for (index, row) in rows.iter().enumerate() {
                for entry in batch.adapters.row(*row as usize) {
                    let entry = &batch.adapters.entries()[*entry as usize];
                    head_plan.push(index as u32, entry.slot, entry.scale);
                }
            }
        }
        head_plan.finish(count);
        backend.begin_samples(rows, head_plan, adapters)?;
        backend.gather_rows(rows, &buffers.hidden, &mut buffers.sampled);
        backend.rms_norm(
            count,
            &buffers.sampled,
            &weights.final_norm,
            weights.spec.rms_norm_eps,
            Site::FINAL_NORM,
            &mut buffers.sampled_normed,
        );
        let mut part = [LinearPart {
            weight: weights.head.as_ref().unwrap_or(&weights.embedding),
            bias: None,
            site: Site::HEAD,
            out: &mut buffers.logits,
            mode: LinearOutput::Store,
        }];
        backend.linear(count, head_plan, adapters, &buffers.sampled_normed, &mut part);
        Ok(backend.end_step()?)
    }

    fn read_logits(&mut self, count: usize) -> Result<&[f32], ModelError> {
        Ok(self.weights.backend.read(&mut self.buffers.logits, count)?)
    }

    fn share_logits(&mut self, count: usize, work: &(dyn Fn(usize, usize, &[f32]) + Sync)) -> Result<(), ModelError> {
        let backend = &*self.weights.backend;
        let logits = backend.read(&mut self.buffers.logits, count)?;
        backend.run_parts(&|part, parts| work(part, parts, logits));
        Ok(())
    }

    fn argmax(&mut self, count: usize, out: &mut [u32]) -> Result<(), ModelError> {
        Ok(self.weights.backend.argmax(count, &self.buffers.logits, out)?)
    }

    fn largest(&mut self, count: usize, k: usize, out: &mut LargestValues) -> Result<bool, ModelError> {
        Ok(self.weights.backend.largest(count, k, &self.buffers.logits, out)?)
    }

    fn run_parts(&self, work: &(dyn Fn(usize, usize) + Sync)) {
        self.weights.backend.run_parts(work);
    }

    fn max_logit_rows(&self) -> usize {
        self.limits.max_logit_rows
    }

    fn packer(&self) -> Arc<dyn AdapterPacker> {
        Arc::new(BackendPacker::new(Arc::clone(&self.weights.backend), self.weights.dtype, self.limits.max_rank))
    }

    fn install(&mut self, slot: u32, adapter: PackedHandle) {
        // Its rank was checked when it was packed, so the working memory that was had at start is enough for it.
        // A handle from another backend's packer cannot be used; leaving the slot empty would serve the base.
        let adapter = Arc::downcast::<B::Adapter>(adapter.inner).unwrap_or_else(|_| {
            unreachable!("an adapter that another backend packed was installed");
        });
        drop(self.adapters.install(slot, adapter));
    }

    fn remove(&mut self, slot: u32) {
        drop(self.adapters.remove(slot));
    }

    fn release_blocks(&mut self, blocks: &[u32]) {
        self.weights.backend.release_blocks(&mut self.cache, blocks);
    }

    fn weight_bytes(&self) -> u64 {
        self.weights.bytes()
    }

    fn memory_use(&self) -> Option<MemoryUse> {
        self.weights.backend.memory_use()
    }
}
