//! The Python module `manylora._core`: conversion and GIL release, no logic.

mod array;
mod bell;
mod config;
mod dlpack;
mod engine;
mod errors;
mod limits;
mod log;
mod output;
mod plan;
mod request;
mod serve;
mod simulate;
mod tools;
mod traces;

use pyo3::prelude::*;

/// Native core of ManyLoRA. Use the classes of the package `manylora` instead.
#[pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use super::array::Array;
    #[pymodule_export]
    use super::bell::Bell;
    #[pymodule_export]
    use super::engine::{Engine, Stream};
    #[pymodule_export]
    use super::limits::{arithmetic_peak, read_bandwidth};
    #[pymodule_export]
    use super::log::set_log;
    #[pymodule_export]
    use super::output::{AdapterRecord, Delta, Info};
    #[pymodule_export]
    use super::plan::{plan, planned_names};
    #[pymodule_export]
    use super::request::{check_sampling_params, check_structured_outputs};
    #[pymodule_export]
    use super::serve::{Port, serve};
    #[pymodule_export]
    use super::simulate::{simulate, simulate_find, simulate_sweep, simulated_config};
    #[pymodule_export]
    use super::tools::{inspect, machine, merge_adapters};
    #[pymodule_export]
    use super::traces::{calibrate_traces, replay_trace};

    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::log::start();
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
