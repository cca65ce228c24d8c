//! Streams, on which work runs in order, and events, by which one stream waits for another.
#![expect(unsafe_code, reason = "calls the driver")]

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::context::Context;
use super::error::{CudaError, DriverResult};

/// A queue of work. It does not wait for the default stream.
pub struct Stream {
    context: Arc<Context>,
    raw: sys::CUstream,
}

// SAFETY: streams may be used from any bound thread.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new stream.
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.bind()?;
        let raw = result::stream::create(result::stream::StreamKind::NonBlocking).of("cuStreamCreate")?;
        Ok(Self { context: Arc::clone(context), raw })
    }

    /// Its context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Waits until everything on it is done.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.context.bind()?;
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(self.raw) }.of("cuStreamSynchronize")
    }

    /// Waits as [`Self::synchronize`] does, for memory that must not be touched any more: tries a second way where the
    /// first fails, and returns the first failure.
    pub(super) fn drain(&self) -> Result<(), CudaError> {
        let done = self.synchronize();
        if done.is_err() {
            let _ = self.context.synchronize();
        }
        done
    }

    /// Marks the work queued so far with `event`.
    pub fn record(&self, event: &Event) -> Result<(), CudaError> {
        self.context.bind()?;
        // SAFETY: both are alive and of one context.
        unsafe { result::event::record(event.raw, self.raw) }.of("cuEventRecord")
    }

    /// Lets what is queued from now on wait until what `event` marks is done. The host does not wait.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        self.context.bind()?;
        // SAFETY: both are alive and of one context.
        unsafe { result::stream::wait_event(self.raw, event.raw, sys::CUevent_wait_flags_enum::CU_EVENT_WAIT_DEFAULT) }
            .of("cuStreamWaitEvent")
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: alive until here. Waiting first makes it safe to free, in any order, what its work uses.
        self.context.release(|| unsafe { result::stream::synchronize(self.raw) });
        // SAFETY: destroyed once.
        self.context.release(|| unsafe { result::stream::destroy(self.raw) });
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("Stream").field(&self.raw).finish()
    }
}

/// A mark in a stream.
pub struct Event {
    context: Arc<Context>,
    raw: sys::CUevent,
}

// SAFETY: events may be used from any bound thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// A new event, which counts as done until it is recorded.
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.bind()?;
        let raw = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).of("cuEventCreate")?;
        Ok(Self { context: Arc::clone(context), raw })
    }

    /// A new event that also takes the time, which costs a little more.
    pub fn timed(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.library().check_measures_time()?;
        context.bind()?;
        let raw = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).of("cuEventCreate")?;
        Ok(Self { context: Arc::clone(context), raw })
    }

    /// Seconds of the device from `start` to this event. Both are timed, were recorded, and are done.
    pub fn seconds_since(&self, start: &Self) -> Result<f64, CudaError> {
        self.context.library().check_measures_time()?;
        self.context.bind()?;
        // SAFETY: both are alive.
        let milliseconds = unsafe { result::event::elapsed(start.raw, self.raw) }.of("cuEventElapsedTime")?;
        Ok(f64::from(milliseconds) * 1e-3)
    }

    /// Whether what it marks is done.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.context.bind()?;
        // SAFETY: the event is alive.
        match unsafe { result::event::query(self.raw) } {
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            answer => answer.of("cuEventQuery").map(|()| true),
        }
    }

    /// Waits until what it marks is done.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.context.bind()?;
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.raw) }.of("cuEventSynchronize")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: destroyed once; the driver keeps it until work that waits for it is done.
        self.context.release(|| unsafe { result::event::destroy(self.raw) });
    }
}

impl std::fmt::Debug for Event {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("Event").field(&self.raw).finish()
    }
}
