//! What is on a machine, and the errors that say what is missing.

use std::path::PathBuf;

use manylora_kernels::cuda::{
    BlasLibrary, Context, CudaError, DRIVER_VARIABLE, Device, DriverLibrary, LEAST_CAPABILITY, device_count,
    embedded_architectures,
};

use crate::stand_in::StandIn;
use crate::stand_in::cases::CASE_FOLDER_VARIABLE;

/// Without the stand-in the same program says that there is no driver. (A machine that has one opens it.)
pub(crate) fn no_driver() {
    match DriverLibrary::load() {
        Err(error @ CudaError::NoDriver { .. }) => {
            let text = error.to_string();
            assert!(text.contains("libcuda.so.1") && text.contains(DRIVER_VARIABLE) && text.contains("cpu"), "{text}");
            // Everything else says the same, and nothing panics.
            assert_eq!(device_count(), Err(error.clone()));
            assert_eq!(Context::open(0).unwrap_err(), error);
            assert_eq!(Device::open(0).unwrap_err(), error);
        }
        Ok(library) => assert!(!library.is_emulated(), "{library:?} was loaded unasked"),
        other => panic!("{other:?}"),
    }
    match BlasLibrary::load(&[PathBuf::from("/no/such/folder")]) {
        Err(error @ CudaError::NoBlas { .. }) => assert!(error.to_string().contains("/no/such/folder"), "{error}"),
        Ok(library) => assert!(library.version() > 0),
        other => panic!("{other:?}"),
    }
}

pub(crate) fn no_such_file() {
    let error = Device::open(0).unwrap_err();
    assert!(matches!(&error, CudaError::Library { path, .. } if path == "/no/such/libcuda.so"), "{error:?}");
    assert!(error.to_string().contains(DRIVER_VARIABLE), "{error}");
}

pub(crate) fn not_a_library() {
    assert!(matches!(DriverLibrary::load(), Err(CudaError::Library { .. })));
}

pub(crate) fn the_stand_in() {
    let library = DriverLibrary::load().unwrap();
    assert!(library.is_emulated());
    assert_eq!(library.path(), std::env::var(DRIVER_VARIABLE).unwrap());
    let device = Device::open(0).unwrap();
    let properties = device.context().properties();
    assert!(properties.capability >= LEAST_CAPABILITY && properties.memory > 0 && properties.multiprocessors > 0);
    assert!(device.describe().starts_with("cuda:0 (") && device.describe().contains("emulated"), "{device:?}");
    let memory = device.context().memory().unwrap();
    assert!(memory.free <= memory.total && memory.total == properties.memory);
    let count = device_count().unwrap();
    assert_eq!(Context::open(count).unwrap_err(), CudaError::Ordinal { ordinal: count, count });
    drop(device);
    StandIn::get().assert_nothing_held();
}

pub(crate) fn no_card() {
    let error = Device::open(0).unwrap_err();
    assert!(matches!(error, CudaError::NoDevice { .. }), "{error:?}");
    StandIn::get().assert_nothing_held();
}

pub(crate) fn a_card_too_old() {
    let error = Device::open(0).unwrap_err();
    assert!(matches!(error, CudaError::DeviceTooOld { major: 7, minor: 5, .. }), "{error:?}");
    assert!(error.to_string().contains("8.0"), "{error}");
    StandIn::get().assert_nothing_held();
}

pub(crate) fn a_driver_too_old() {
    let error = Device::open(0).unwrap_err();
    let CudaError::DriverTooOld { found, needed, branch } = &error else { panic!("{error:?}") };
    assert!(found == "11.8" && needed.ends_with(".0") && *branch >= 525, "{error}");
    assert!(error.to_string().contains(&format!("driver {branch} or newer")), "{error}");
    assert_eq!(device_count(), Err(error));
    StandIn::get().assert_nothing_held();
}

/// A driver of the major version before the toolkit's runs nothing of what that built, whatever its minor version; with the
/// emulated device alone no toolkit has built anything.
pub(crate) fn the_last_driver_before() {
    let opened = Device::open(0);
    if embedded_architectures().is_none() {
        return drop(opened.unwrap());
    }
    let error = opened.unwrap_err();
    assert_eq!(
        error.to_string(),
        "the NVIDIA driver is too old: it offers CUDA 12.9, this build needs CUDA 13.0; install driver 580 or newer, or use \
         device \"cpu\""
    );
    StandIn::get().assert_nothing_held();
}

/// Any driver of the toolkit's major version does.
pub(crate) fn the_first_driver_that_does() {
    drop(Device::open(0).unwrap());
    StandIn::get().assert_nothing_held();
}

pub(crate) fn no_blas_there() {
    let error = BlasLibrary::load(&[]).unwrap_err();
    assert!(matches!(error, CudaError::Library { .. }), "{error:?}");
}

/// As Python's packages have it: a folder is given, and no variable.
pub(crate) fn blas_in_a_folder() {
    let folder = PathBuf::from(std::env::var_os(CASE_FOLDER_VARIABLE).unwrap());
    let library = BlasLibrary::load(&["/no/such/folder".into(), folder.clone()]).unwrap();
    assert_eq!(library.path(), folder.join("libcublasLt.so").display().to_string());
    assert!(library.version() >= 120_000);
}
