//! Headers of safetensors files, an adapter's and a checkpoint's: both readers accept what the safetensors crate
//! accepts, and find the same tensors.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use manylora_model::adapter::tensor_file::tensors_of;
use manylora_model::checkpoint::safetensors::read_header;
use safetensors::SafeTensors;

fuzz_target!(|file: &[u8]| {
    let expected = SafeTensors::deserialize(file);
    let adapter = tensors_of(file);
    let checkpoint = read_header(Path::new("fuzz.safetensors"), file);
    assert_eq!(adapter.is_ok(), expected.is_ok(), "{:?} {:?}", adapter, expected.err());
    assert_eq!(checkpoint.is_ok(), expected.is_ok());
    let (Ok(expected), Ok(adapter), Ok(checkpoint)) = (expected, adapter, checkpoint) else { return };
    assert_eq!((adapter.len(), checkpoint.len()), (expected.len(), expected.len()));
    for entry in adapter {
        let tensor = expected.tensor(&entry.name).unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (entry.dtype, &entry.shape[..]));
        let first = usize::try_from(entry.offset).unwrap();
        assert_eq!(tensor.data(), &file[first..first + entry.bytes]);
    }
    for (name, entry) in checkpoint {
        let tensor = expected.tensor(&name).unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (entry.dtype, &entry.shape[..]));
    }
});
