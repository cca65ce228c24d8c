//! Which load is simulated: a published generator, any mixture, or a trace from a file.

use std::fs::File;
use std::io::BufReader;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::value::{LengthChoice, PopularityChoice};
use crate::error::SimError;
use crate::workload::arrivals::Arrivals;
use crate::workload::dlora::AzureFunctions;
use crate::workload::popularity::Popularity;
use crate::workload::punica::{PunicaPopularity, PunicaWorkload};
use crate::workload::slora::SloraWorkload;
use crate::workload::synthetic::SyntheticWorkload;
use crate::workload::trace::Trace;
use crate::workload::{SimRequest, count, positive};

/// A load. Adapters and seed are the run's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkloadConfig {
    /// Any arrivals, popularity and lengths.
    Synthetic(SyntheticConfig),
    /// S-LoRA's generator, draw for draw.
    Slora(SloraConfig),
    /// Punica's text generation: everything is there at the start.
    Punica(PunicaConfig),
    /// dLoRA's replay of Azure's function traces.
    AzureFunctions(AzureFunctionsConfig),
    /// Requests from a file, see [`crate::workload::trace`].
    Trace(TraceConfig),
}

impl Default for WorkloadConfig {
    fn default() -> Self {
        Self::Synthetic(SyntheticConfig::default())
    }
}

/// How requests arrive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ArrivalKind {
    /// Gaps of a Gamma distribution; a Poisson process where `cv` is 1.
    #[default]
    Gamma,
    /// The same gap between any two.
    Regular,
    /// All at the start.
    AtOnce,
}

/// Any arrivals, popularity and lengths.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SyntheticConfig {
    /// Requests a second.
    pub rate: f64,
    /// Coefficient of variation of the gaps: more is burstier.
    pub cv: f64,
    /// Seconds in which requests arrive.
    pub duration: f64,
    /// How many requests; None = rate x duration.
    pub requests: Option<usize>,
    /// How they arrive.
    pub arrivals: ArrivalKind,
    /// Which adapters they ask for.
    pub popularity: PopularityChoice,
    /// Share of requests for the base.
    pub base_share: f64,
    /// Tokens of prompts.
    pub input: LengthChoice,
    /// Tokens of outputs.
    pub output: LengthChoice,
    /// Tokens that prompts for the same adapter begin with.
    pub shared_prefix: u32,
}

impl Default for SyntheticConfig {
    fn default() -> Self {
        Self {
            rate: 1.0,
            cv: 1.0,
            duration: 300.0,
            requests: None,
            arrivals: ArrivalKind::Gamma,
            popularity: PopularityChoice(Popularity::Zipf { s: 1.0 }),
            base_share: 0.0,
            input: LengthChoice::Uniform(8, 511),
            output: LengthChoice::Uniform(8, 511),
            shared_prefix: 0,
        }
    }
}

/// The arguments of S-LoRA's `generate_requests`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SloraConfig {
    /// Requests a second.
    pub rate: f64,
    /// Coefficient of variation of the gaps.
    pub cv: f64,
    /// Seconds in which requests arrive.
    pub duration: f64,
    /// Exponent of the power law: 1 is uniform, less is more skewed.
    pub alpha: f64,
    /// Tokens of prompts, the end excluded.
    pub input_range: [u32; 2],
    /// Tokens of outputs, the end excluded.
    pub output_range: [u32; 2],
}

impl Default for SloraConfig {
    fn default() -> Self {
        let SloraWorkload { alpha, rate, cv, duration, input, output, .. } = SloraWorkload::new(0, 1.0, 300.0);
        Self { rate, cv, duration, alpha, input_range: input, output_range: output }
    }
}

/// Punica's popularities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PunicaMix {
    /// One adapter for all.
    Identical,
    /// One for each request.
    #[default]
    Distinct,
    /// About the square root of the requests, all alike.
    Uniform,
    /// Each adapter has `alpha` times as many as the next.
    Skewed,
}

/// Punica's text generation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PunicaConfig {
    /// How many requests.
    pub requests: u32,
    /// Most tokens of a sequence.
    pub max_len: u32,
    /// Which adapters they ask for: this decides how many there are.
    pub mix: PunicaMix,
    /// Ratio of `skewed`.
    pub alpha: f64,
}

impl Default for PunicaConfig {
    fn default() -> Self {
        Self { requests: 1000, max_len: 2048, mix: PunicaMix::Distinct, alpha: 1.5 }
    }
}

impl PunicaConfig {
    const fn popularity(&self) -> PunicaPopularity {
        match self.mix {
            PunicaMix::Identical => PunicaPopularity::Identical,
            PunicaMix::Distinct => PunicaPopularity::Distinct,
            PunicaMix::Uniform => PunicaPopularity::Uniform,
            PunicaMix::Skewed => PunicaPopularity::Skewed { alpha: self.alpha },
        }
    }
}

/// dLoRA's replay.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AzureFunctionsConfig {
    /// Invocations of each model in each interval.
    pub counts: Vec<Vec<u64>>,
    /// Requests in all.
    pub requests: usize,
    /// Minutes of an interval.
    pub interval_minutes: u32,
    /// Requests a second of all models together.
    pub rate: f64,
    /// Coefficient of variation of a model's gaps.
    pub cv: f64,
    /// Tokens of prompts.
    pub input: LengthChoice,
    /// Tokens of outputs.
    pub output: LengthChoice,
}

impl Default for AzureFunctionsConfig {
    fn default() -> Self {
        Self {
            counts: Vec::new(),
            requests: 400,
            interval_minutes: 60,
            rate: 1.0,
            cv: 1.0,
            input: LengthChoice::Uniform(8, 511),
            output: LengthChoice::Uniform(8, 511),
        }
    }
}

/// A trace from a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TraceConfig {
    /// Where it is.
    pub path: PathBuf,
    /// How many times faster than it was written requests arrive.
    #[serde(default = "one")]
    pub speed: f64,
}

const fn one() -> f64 {
    1.0
}

/// A load that is ready to be run.
pub struct Load {
    /// How many requests.
    pub count: usize,
    /// The requests, by arrival.
    pub requests: Box<dyn Iterator<Item = SimRequest> + Send>,
    /// Adapters by name, where a trace names them.
    pub names: Vec<String>,
    /// What of it is left out, in words.
    pub notes: Vec<String>,
}

impl WorkloadConfig {
    /// How many adapters the load itself asks for, if it says so.
    pub fn adapters(&self) -> Result<Option<u32>, SimError> {
        Ok(match self {
            Self::Synthetic(_) | Self::Slora(_) => None,
            Self::Punica(own) => Some(own.popularity().sizes(own.requests)?.len() as u32),
            Self::AzureFunctions(own) => Some(own.counts.len() as u32),
            Self::Trace(own) => Some(own.read()?.adapters.len() as u32),
        })
    }

    /// The requests of a run with so many adapters, in an engine of this context.
    pub fn load(&self, adapters: u32, seed: u32, max_model_len: usize) -> Result<Load, SimError> {
        let listed = |requests: Vec<SimRequest>| Load {
            count: requests.len(),
            requests: Box::new(requests.into_iter()),
            names: Vec::new(),
            notes: Vec::new(),
        };
        match self {
            Self::Synthetic(own) => {
                let workload = own.workload(adapters, seed, max_model_len)?;
                let (count, requests) = (workload.requests, Box::new(workload.generate()?));
                Ok(Load { count, requests, names: Vec::new(), notes: Vec::new() })
            }
            Self::Slora(own) => {
                let SloraConfig { rate, cv, duration, alpha, input_range, output_range } = *own;
                SloraWorkload { adapters, alpha, rate, cv, duration, input: input_range, output: output_range, seed }
                    .requests()
                    .map(listed)
            }
            Self::Punica(own) => {
                let (requests, max_len, popularity) = (own.requests, own.max_len, own.popularity());
                PunicaWorkload { requests, max_len, popularity, seed }.requests().map(listed)
            }
            Self::AzureFunctions(own) => {
                let [input, output] = LengthChoice::both(own.input, own.output, max_model_len);
                let AzureFunctionsConfig { counts, requests, interval_minutes, rate, cv, .. } = own.clone();
                AzureFunctions { counts, requests, interval_minutes, rate, cv, input, output, seed }
                    .requests()
                    .map(listed)
            }
            Self::Trace(own) => {
                let speed = positive("speed", own.speed)?;
                let Trace { mut requests, adapters, notes, .. } = own.read()?;
                for request in &mut requests {
                    request.arrival /= speed;
                }
                Ok(Load { names: adapters, notes, ..listed(requests) })
            }
        }
    }
}

impl SyntheticConfig {
    fn workload(&self, adapters: u32, seed: u32, max_model_len: usize) -> Result<SyntheticWorkload, SimError> {
        let arrivals = match self.arrivals {
            ArrivalKind::Gamma => Arrivals::Gamma { rate: self.rate, cv: self.cv },
            ArrivalKind::Regular => Arrivals::Regular { rate: self.rate },
            ArrivalKind::AtOnce => Arrivals::AtOnce,
        };
        let requests = match self.requests {
            Some(requests) => requests,
            None => count(self.rate, self.duration)?,
        };
        let [input, output] = LengthChoice::both(self.input, self.output, max_model_len);
        let (popularity, base_share, shared_prefix) = (self.popularity.0, self.base_share, self.shared_prefix);
        Ok(SyntheticWorkload {
            requests,
            arrivals,
            adapters,
            popularity,
            base_share,
            input,
            output,
            shared_prefix,
            seed,
        })
    }
}

impl TraceConfig {
    fn read(&self) -> Result<Trace, SimError> {
        let file = File::open(&self.path)
            .map_err(|error| SimError::field("path", self.path.display(), format!("it cannot be read: {error}")))?;
        Trace::read(BufReader::new(file))
    }
}
