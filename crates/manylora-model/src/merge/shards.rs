//! Files of weights: which tensor is in which, and writing them a block at a time.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::json;

use super::{MergeProgress, MergedType};
use crate::error::ModelError;
use crate::spec::TensorSpec;

/// Which tensors go to which file.
pub(super) struct ShardPlan {
    shards: Vec<Vec<TensorSpec>>,
    dtype: MergedType,
    bytes: u64,
}

/// Writes one tensor into a file.
pub(super) type WriteTensor<'a> = dyn FnMut(&TensorSpec, &mut ShardWriter<'_>) -> Result<(), ModelError> + 'a;

impl ShardPlan {
    /// Tensors in their order; a file is full when the next one would take it beyond `most` bytes.
    pub(super) fn new(tensors: &[TensorSpec], dtype: MergedType, most: u64) -> Self {
        let mut shards: Vec<Vec<TensorSpec>> = Vec::new();
        let (mut filled, mut bytes) = (0, 0);
        for tensor in tensors {
            let size = tensor.elements() * dtype.bytes() as u64;
            bytes += size;
            match shards.last_mut() {
                Some(shard) if filled + size <= most => shard.push(tensor.clone()),
                _ => {
                    shards.push(vec![tensor.clone()]);
                    filled = 0;
                }
            }
            filled += size;
        }
        Self { shards, dtype, bytes }
    }

    pub(super) fn shards(&self) -> usize {
        self.shards.len()
    }

    /// Bytes of all tensors.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    fn name(&self, shard: usize) -> String {
        match self.shards.len() {
            1 => "model.safetensors".to_owned(),
            count => format!("model-{:05}-of-{count:05}.safetensors", shard + 1),
        }
    }

    /// Writes every file, and the index where there are several.
    pub(super) fn write(&self, folder: &Path, write_tensor: &mut WriteTensor<'_>) -> Result<(), ModelError> {
        let mut done = 0;
        for (number, tensors) in self.shards.iter().enumerate() {
            let path = folder.join(self.name(number));
            let header = self.header(tensors).map_err(|message| output_error(&path, &message))?;
            let file = File::create_new(&path).map_err(|error| output_error(&path, &error))?;
            let mut writer =
                ShardWriter { file: BufWriter::with_capacity(1 << 20, file), path: &path, done, total: self.bytes };
            writer.write_head(&header)?;
            for tensor in tensors {
                write_tensor(tensor, &mut writer)?;
            }
            done = writer.finish()?;
        }
        if self.shards.len() > 1 {
            let mut map = BTreeMap::new();
            for (number, tensors) in self.shards.iter().enumerate() {
                map.extend(tensors.iter().map(|tensor| (tensor.name.as_str(), self.name(number))));
            }
            let index = json!({ "metadata": { "total_size": self.bytes }, "weight_map": map });
            write_json(&folder.join("model.safetensors.index.json"), &index)?;
        }
        Ok(())
    }

    /// A file's header: its length, and JSON that is padded so that numbers lie aligned.
    fn header(&self, tensors: &[TensorSpec]) -> Result<Vec<u8>, String> {
        let dtype = match self.dtype {
            MergedType::F32 => Dtype::F32,
            MergedType::Bf16 => Dtype::BF16,
            MergedType::F16 => Dtype::F16,
        };
        let mut end = 0;
        let infos = tensors.iter().map(|tensor| {
            let start = end;
            end += tensor.elements() as usize * self.dtype.bytes();
            (tensor.name.clone(), TensorInfo { dtype, shape: tensor.shape.clone(), data_offsets: (start, end) })
        });
        let about = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let metadata = Metadata::new(Some(about), infos.collect()).map_err(|error| error.to_string())?;
        let mut text = serde_json::to_vec(&metadata).map_err(|error| error.to_string())?;
        text.resize(text.len().next_multiple_of(8), b' ');
        Ok([&(text.len() as u64).to_le_bytes(), text.as_slice()].concat())
    }
}

/// A file that is being written.
pub(super) struct ShardWriter<'a> {
    file: BufWriter<File>,
    path: &'a PathBuf,
    /// Bytes of tensors that are written, in this file and the ones before.
    done: u64,
    total: u64,
}

impl ShardWriter<'_> {
    fn write_head(&mut self, bytes: &[u8]) -> Result<(), ModelError> {
        self.file.write_all(bytes).map_err(|error| output_error(self.path, &error))
    }

    /// Adds bytes of the current tensor.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), ModelError> {
        self.write_head(bytes)?;
        self.done += bytes.len() as u64;
        Ok(())
    }

    /// Says how far it is; an error if it is to stop.
    pub(super) fn tell(&self, progress: &mut MergeProgress<'_>) -> Result<(), ModelError> {
        if progress(self.done, self.total) { Ok(()) } else { Err(ModelError::Interrupted) }
    }

    fn finish(self) -> Result<u64, ModelError> {
        let error = |error: std::io::Error| output_error(self.path, &error);
        let file = self.file.into_inner().map_err(|failed| error(failed.into_error()))?;
        file.sync_all().map_err(error)?;
        Ok(self.done)
    }
}

/// An error of something that is written.
pub(super) fn output_error(path: &Path, message: &impl ToString) -> ModelError {
    ModelError::Output { path: path.to_path_buf(), message: format!("it cannot be written: {}", message.to_string()) }
}

/// Writes JSON as people read it.
pub(super) fn write_json(path: &Path, value: &serde_json::Value) -> Result<(), ModelError> {
    let mut text = serde_json::to_vec_pretty(value).map_err(|error| output_error(path, &error))?;
    text.push(b'\n');
    std::fs::write(path, text).map_err(|error| output_error(path, &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_keep_their_order_and_files_their_bound() {
        let tensor = |name: &str, size: usize| TensorSpec { name: name.to_owned(), shape: vec![size] };
        let tensors = [tensor("a", 10), tensor("b", 5), tensor("c", 6), tensor("huge", 100), tensor("d", 1)];
        let plan = ShardPlan::new(&tensors, MergedType::F32, 64);
        let names = |shard: &Vec<TensorSpec>| shard.iter().map(|tensor| tensor.name.clone()).collect::<Vec<_>>();
        let found: Vec<Vec<String>> = plan.shards.iter().map(names).collect();
        assert_eq!(found, [vec!["a", "b"], vec!["c"], vec!["huge"], vec!["d"]]);
        assert_eq!((plan.bytes(), plan.name(2).as_str()), (488, "model-00003-of-00004.safetensors"));
        assert_eq!(ShardPlan::new(&tensors, MergedType::Bf16, 1000).name(0), "model.safetensors");
    }
}
