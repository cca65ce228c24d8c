//! The log of the native side, on stderr: text or lines of JSON. `MANYLORA_LOG` says what is told, in `tracing`'s syntax;
//! without it warnings and errors are, until somebody asks for another level.

use std::sync::OnceLock;

use pyo3::prelude::*;
use tracing_subscriber::layer::{Layered, SubscriberExt};
use tracing_subscriber::reload::Handle;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt, reload};

const VARIABLE: &str = "MANYLORA_LOG";

type Shape = Box<dyn Layer<Registry> + Send + Sync>;
type Shaped = Layered<reload::Layer<Shape, Registry>, Registry>;

/// What of the log can be changed later.
static CHANGEABLE: OnceLock<(Handle<Shape, Registry>, Handle<EnvFilter, Shaped>)> = OnceLock::new();

fn shape(json: bool) -> Shape {
    let layer = fmt::layer().with_writer(std::io::stderr);
    if json { layer.json().flatten_event(true).boxed() } else { layer.boxed() }
}

/// Begins to write what `MANYLORA_LOG` asks for.
pub(crate) fn start() {
    let filter = EnvFilter::try_from_env(VARIABLE).unwrap_or_else(|_| EnvFilter::new("warn"));
    let (shape, shape_handle) = reload::Layer::new(shape(false));
    let (filter, filter_handle) = reload::Layer::new(filter);
    // Another extension of this process may have set a subscriber: then that one gets the events.
    if tracing_subscriber::registry().with(shape).with(filter).try_init().is_ok() {
        let _ = CHANGEABLE.set((shape_handle, filter_handle));
    }
}

/// Writes what is of `level` (`debug`, `info`, `warning` or `error`) or worse from now on, unless `MANYLORA_LOG` says what is
/// told, as text or as lines of JSON.
#[pyfunction]
pub(crate) fn set_log(level: &str, json: bool) {
    let Some((shape_handle, filter_handle)) = CHANGEABLE.get() else { return };
    // An error means that the subscriber is gone.
    let _ = shape_handle.reload(shape(json));
    if EnvFilter::try_from_env(VARIABLE).is_err() {
        let level = if level == "warning" { "warn" } else { level };
        let _ = filter_handle.reload(EnvFilter::new(level));
    }
}
