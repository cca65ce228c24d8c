//! One card, opened: its context, its compute stream and its kernels.

use std::sync::Arc;

use super::context::Context;
use super::error::CudaError;
use super::module::Kernels;
use super::stream::Stream;

/// A card that is ready to compute.
#[derive(Debug)]
pub struct Device {
    context: Arc<Context>,
    compute: Arc<Stream>,
    kernels: Kernels,
}

impl Device {
    /// Opens card `ordinal`. What is missing (library, card, driver version, kernels) comes out as the error that says so.
    pub fn open(ordinal: usize) -> Result<Self, CudaError> {
        let context = Context::open(ordinal)?;
        let kernels = Kernels::load(&context)?;
        let compute = Arc::new(Stream::new(&context)?);
        Ok(Self { context, compute, kernels })
    }

    /// Its context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The stream that steps run on.
    pub fn compute(&self) -> &Arc<Stream> {
        &self.compute
    }

    /// Its kernels.
    pub fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// Name for people: `cuda:0 (NVIDIA H200, sm_90, 139.8 GiB, driver for CUDA 13.0)`.
    pub fn describe(&self) -> String {
        let properties = self.context.properties();
        let (major, minor) = properties.capability;
        let gibibytes = properties.memory as f64 / f64::from(1 << 30);
        let (driver, emulated) =
            (properties.driver, if self.context.library().is_emulated() { ", emulated" } else { "" });
        format!(
            "cuda:{} ({}, sm_{major}{minor}, {gibibytes:.1} GiB, driver for CUDA {}.{}{emulated})",
            properties.ordinal, properties.name, driver.0, driver.1
        )
    }
}
