//! Recording a step's launches once and replaying them with one call: graphs, kept by the shape of the step.
//!
//! What is recorded must allocate nothing, wait for nothing and copy nothing from the host: addresses and launch shapes
//! are frozen, and everything that varies lies in device memory. Recording has a stream of its own, so other threads may
//! go on recording events on the compute stream meanwhile; the mode is thread-local, so their calls do not spoil it.
#![expect(unsafe_code, reason = "calls the driver")]

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::context::Context;
use super::error::{CudaError, DriverResult};
use super::stream::Stream;

/// Records launches into graphs.
#[derive(Debug)]
pub struct Recorder {
    stream: Arc<Stream>,
}

impl Recorder {
    /// A recorder with a stream of its own, on which nothing ever runs.
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        Ok(Self { stream: Arc::new(Stream::new(context)?) })
    }

    /// Records what `work` queues on the stream that it is given, and makes it ready to run. Whatever happens in `work`,
    /// recording ends: on an error or a panic what was recorded is thrown away.
    ///
    /// Kernels should have run once before, because a driver may load them at their first launch.
    pub fn record<E: From<CudaError>>(&mut self, work: impl FnOnce(&Arc<Stream>) -> Result<(), E>) -> Result<Graph, E> {
        let context = self.stream.context();
        context.bind()?;
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive, and `self` is borrowed for writing, so that it is not recording already.
        unsafe { result::stream::begin_capture(self.stream.raw(), mode) }.of("cuStreamBeginCapture")?;
        let recording = Recording { stream: &self.stream };
        let worked = work(&self.stream);
        let recorded = recording.end();
        worked?;
        let template = recorded?;
        Ok(template.instantiate()?)
    }
}

/// A stream that is recording. Its end is never forgotten: the stream would be of no use any more.
struct Recording<'a> {
    stream: &'a Stream,
}

impl Recording<'_> {
    fn end(self) -> Result<Template, CudaError> {
        let ended = end_capture(self.stream);
        // `drop` sees whether it is still recording, and tries again.
        drop(self);
        ended
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        let _ = self.stream.context().bind();
        // SAFETY: the stream is alive.
        let status = unsafe { result::stream::is_capturing(self.stream.raw()) };
        if !matches!(status, Ok(sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE)) {
            drop(end_capture(self.stream));
        }
    }
}

fn end_capture(stream: &Stream) -> Result<Template, CudaError> {
    stream.context().bind()?;
    // SAFETY: the stream is alive; this is the thread that began.
    let raw = unsafe { result::stream::end_capture(stream.raw()) }.of("cuStreamEndCapture")?;
    if raw.is_null() {
        return Err(CudaError::Driver {
            call: "cuStreamEndCapture",
            code: sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED as u32,
            name: "no graph was recorded".to_owned(),
            hint: "",
        });
    }
    Ok(Template { context: Arc::clone(stream.context()), raw })
}

/// What was recorded.
struct Template {
    context: Arc<Context>,
    raw: sys::CUgraph,
}

impl Template {
    fn instantiate(&self) -> Result<Graph, CudaError> {
        self.context.bind()?;
        let mut nodes = 0usize;
        // SAFETY: the graph is alive; without an array only the number is written.
        unsafe { sys::cuGraphGetNodes(self.raw, std::ptr::null_mut(), &raw mut nodes).result() }
            .of("cuGraphGetNodes")?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the graph is alive; one handle is written.
        unsafe { sys::cuGraphInstantiateWithFlags(&raw mut raw, self.raw, 0).result() }
            .of("cuGraphInstantiateWithFlags")?;
        Ok(Graph { context: Arc::clone(&self.context), raw, nodes })
    }
}

impl Drop for Template {
    fn drop(&mut self) {
        // SAFETY: destroyed once; graphs made from it do not need it.
        self.context.release(|| unsafe { result::graph::destroy(self.raw) });
    }
}

/// Recorded work that is ready to run, any number of times.
pub struct Graph {
    context: Arc<Context>,
    raw: sys::CUgraphExec,
    nodes: usize,
}

// SAFETY: graphs may be used from any bound thread, by one at a time: `replay` takes `&mut self`.
unsafe impl Send for Graph {}
// SAFETY: shared access reads a number.
unsafe impl Sync for Graph {}

impl Graph {
    /// Number of launches, memory operations and the like.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Queues it on `stream`.
    ///
    /// # Safety
    /// All memory that the recorded work uses must still be there.
    pub unsafe fn replay(&mut self, stream: &Stream) -> Result<(), CudaError> {
        self.context.bind()?;
        // SAFETY: graph and stream are alive; the memory is the caller's word.
        unsafe { result::graph::launch(self.raw, stream.raw()) }.of("cuGraphLaunch")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: destroyed once; the driver keeps it until a replay that is under way is done.
        self.context.release(|| unsafe { result::graph::exec_destroy(self.raw) });
    }
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Graph").field("nodes", &self.nodes).finish_non_exhaustive()
    }
}

/// Graphs by the shape of the step that they are for.
#[derive(Debug)]
pub struct GraphCache<K> {
    recorder: Recorder,
    graphs: HashMap<K, Graph>,
}

impl<K: Eq + Hash> GraphCache<K> {
    /// An empty cache.
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        Ok(Self { recorder: Recorder::new(context)?, graphs: HashMap::new() })
    }

    /// The graph for `key`, recorded by `work` at the first call.
    pub fn get_or_record<E: From<CudaError>>(
        &mut self,
        key: K,
        work: impl FnOnce(&Arc<Stream>) -> Result<(), E>,
    ) -> Result<&mut Graph, E> {
        use std::collections::hash_map::Entry;
        match self.graphs.entry(key) {
            Entry::Occupied(graph) => Ok(graph.into_mut()),
            Entry::Vacant(place) => Ok(place.insert(self.recorder.record(work)?)),
        }
    }

    /// The graph for `key`, if there is one.
    pub fn get(&mut self, key: &K) -> Option<&mut Graph> {
        self.graphs.get_mut(key)
    }

    /// Number of graphs.
    pub fn len(&self) -> usize {
        self.graphs.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.graphs.is_empty()
    }

    /// Forgets all graphs: after memory that they use was moved.
    pub fn clear(&mut self) {
        self.graphs.clear();
    }
}
