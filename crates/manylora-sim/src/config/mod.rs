//! A run as data: what is simulated, as a file or a command line says it. Every field is checked, and errors name it by its
//! path, with its value and what is allowed.

mod cost;
mod engine;
mod parameter;
mod value;
mod workload;

use manylora_core::budget::WeightPacking;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use cost::{CalibrationFile, CostConfig};
pub use engine::EngineOptions;
pub use value::{Described, LengthChoice, OneOrMany, PopularityChoice};
pub use workload::{
    ArrivalKind, AzureFunctionsConfig, Load, PunicaConfig, PunicaMix, SloraConfig, SyntheticConfig, TraceConfig,
    WorkloadConfig,
};

use crate::card::CardSpec;
use crate::cost::{AdapterShape, CostModel};
use crate::engine::EngineSettings;
use crate::error::SimError;
use crate::fleet::RouterKind;
use crate::model::ModelDescription;
use crate::plan::{FleetGroup, Plan, PlanRequest, PlannedDevice, ProcessorSpec};
use crate::results::Slo;

/// More adapters than this are a mistake.
const MOST_ADAPTERS: u32 = 1 << 24;
/// More replicas than this are a mistake.
const MOST_REPLICAS: u32 = 1 << 16;
/// More than any machine has.
const PROCESSOR_BYTES: u64 = 1 << 50;

/// One run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// A model that is built in, or its figures.
    pub model: Described<ModelDescription>,
    /// A card that is known, or its figures; or `cpu`, whose times must be calibrated.
    pub gpu: Described<CardSpec>,
    /// How many adapters there are; None = as many as the load asks for, where it says so, and else none.
    #[serde(default)]
    pub adapters: Option<u32>,
    /// Their ranks, which they have in turn; of other shares, by `rank_shares`.
    #[serde(default = "default_rank")]
    pub rank: OneOrMany<u64>,
    /// Shares of the adapters that have each rank; None = all alike.
    #[serde(default)]
    pub rank_shares: Option<Vec<f64>>,
    /// What they touch, in every layer.
    #[serde(default = "attention")]
    pub target_modules: Vec<String>,
    /// The engine's settings.
    #[serde(default)]
    pub engine: EngineOptions,
    /// The load.
    #[serde(default)]
    pub workload: WorkloadConfig,
    /// What steps and loads take.
    #[serde(default)]
    pub cost: CostConfig,
    /// How many engines there are, each on a card of its own.
    #[serde(default = "one_replica")]
    pub replicas: u32,
    /// Who says which of them a request goes to.
    #[serde(default)]
    pub router: RouterKind,
    /// Of consistent hashing: how many times the mean load a replica may have, above 1.
    #[serde(default = "default_bound")]
    pub router_load_bound: f64,
    /// What is promised to requests.
    #[serde(default)]
    pub slo: Slo,
    /// Seed of all that is drawn.
    #[serde(default = "default_seed")]
    pub seed: u32,
}

fn default_rank() -> OneOrMany<u64> {
    OneOrMany(vec![16])
}

fn attention() -> Vec<String> {
    ["q_proj", "k_proj", "v_proj", "o_proj"].map(str::to_owned).to_vec()
}

const fn one_replica() -> u32 {
    1
}

const fn default_bound() -> f64 {
    1.25
}

const fn default_seed() -> u32 {
    42
}

/// A run that was found to be possible.
pub struct Prepared {
    /// Each replica's engine.
    pub settings: EngineSettings,
    /// What that engine's bytes are.
    pub plan: Plan,
    /// What its steps and loads take.
    pub cost: Box<dyn CostModel + Send + Sync>,
    /// The load.
    pub load: Load,
}

impl Config {
    /// A run with defaults for all but the model and the card.
    pub fn new(model: &str, gpu: &str) -> Self {
        Self {
            model: Described::Name(model.to_owned()),
            gpu: Described::Name(gpu.to_owned()),
            adapters: None,
            rank: default_rank(),
            rank_shares: None,
            target_modules: attention(),
            engine: EngineOptions::default(),
            workload: WorkloadConfig::default(),
            cost: CostConfig::default(),
            replicas: 1,
            router: RouterKind::default(),
            router_load_bound: default_bound(),
            slo: Slo::default(),
            seed: default_seed(),
        }
    }

    /// Reads a run. What is not there has its default; what is not known is refused by its path.
    pub fn from_value(value: Value) -> Result<Self, SimError> {
        let shown = value.clone();
        serde_path_to_error::deserialize(value).map_err(|error| {
            let path = error.path().to_string();
            let found = parameter::at(&shown, &path).map_or_else(|| "nothing".to_owned(), parameter::shown);
            let field = if path == "." { "config".to_owned() } else { path };
            SimError::field(field, found, error.into_inner().to_string())
        })
    }

    /// The same with one parameter changed: `max_loras`, or `engine.max_loras` where a name alone could be several.
    pub fn with(&self, name: &str, value: Value) -> Result<Self, SimError> {
        let mut whole = self.to_value();
        let path = parameter::find(&whole, name)?;
        parameter::put(&mut whole, &path, value);
        Self::from_value(whole)
    }

    /// The path of the parameter that a name stands for.
    pub fn parameter(&self, name: &str) -> Result<String, SimError> {
        parameter::find(&self.to_value(), name)
    }

    /// All parameters of this run, by path.
    pub fn parameters(&self) -> Vec<String> {
        parameter::leaves(&self.to_value())
    }

    /// As it would be read again.
    pub fn to_value(&self) -> Value {
        serde_json::to_value(self).expect("a configuration is numbers and text")
    }

    /// Checks everything, and makes what is run.
    pub fn prepare(&self) -> Result<Prepared, SimError> {
        self.check()?;
        let model = match &self.model {
            Described::Name(name) => ModelDescription::named(name)?,
            Described::Is(model) => model.clone(),
        };
        let device = self.device()?;
        let modules = FleetGroup::modules_named(self.target_modules.iter().map(String::as_str))?;
        let places = self.ranks()?;
        let count = |rank: usize| places.iter().filter(|&&place| place == rank).count() as u64;
        let groups = self.rank.0.iter().enumerate();
        let groups = groups.map(|(place, &rank)| FleetGroup { count: count(place), rank, modules: modules.clone() });
        let (cost, cost_notes) = self.cost.model(&model.dimensions, &device, !places.is_empty())?;
        let request = PlanRequest {
            settings: self.engine.sizes(model.context),
            model,
            device,
            dtype: self.engine.dtype,
            fleet: if places.is_empty() { Vec::new() } else { groups.collect() },
            lengths: Vec::new(),
            scheduling: self.engine.scheduling(),
            hot_adapters: None,
            cublas: !self.engine.batch_invariant,
            free_bytes: None,
        };
        let (mut settings, mut plan) = EngineSettings::planned(&request)?;
        let shape = |&place: &usize| {
            let group = &plan.fleet[place];
            AdapterShape { bytes: group.bytes, parameters: group.parameters, rank: group.rank }
        };
        settings.adapters = places.iter().map(shape).collect();
        settings.host_cache_bytes = self.engine.host_cache_bytes;
        let load = self.workload.load(places.len() as u32, self.seed, plan.max_model_len)?;
        plan.notes.extend(cost_notes.into_iter().chain(load.notes.iter().cloned()));
        Ok(Prepared { settings, plan, cost, load })
    }

    /// A card, or processors. Of these, what weights and steps take is not asked for: the bytes that KV blocks and adapters share
    /// are given, and nothing that is simulated depends on the others.
    fn device(&self) -> Result<PlannedDevice<'static>, SimError> {
        match &self.gpu {
            Described::Name(name) if name.trim().eq_ignore_ascii_case("cpu") => {
                if self.engine.kv_cache_memory_bytes.is_none() {
                    let message = "a processor's share is not known here: say how many bytes the engine has";
                    return Err(SimError::field("engine.kv_cache_memory_bytes", "null", message));
                }
                Ok(PlannedDevice::Processor(ProcessorSpec {
                    name: "cpu".to_owned(),
                    free_bytes: PROCESSOR_BYTES,
                    packing: &|_| WeightPacking::Panels16,
                    working: &|_, _, _| 0,
                }))
            }
            Described::Name(name) => CardSpec::named(name).map(PlannedDevice::Card),
            Described::Is(card) => Ok(PlannedDevice::Card(card.clone())),
        }
    }

    fn check(&self) -> Result<(), SimError> {
        if self.replicas == 0 || self.replicas > MOST_REPLICAS {
            return Err(SimError::field("replicas", self.replicas, format!("from 1 to {MOST_REPLICAS}")));
        }
        if !(self.router_load_bound.is_finite() && self.router_load_bound > 1.0) {
            let message = "a finite number above 1: how many times the mean load a replica may have";
            return Err(SimError::field("router_load_bound", self.router_load_bound, message));
        }
        self.slo.validate()
    }

    /// Which of `rank` each adapter has: the one that is furthest behind its share, so that equal shares are in turn.
    fn ranks(&self) -> Result<Vec<usize>, SimError> {
        let asked = self.workload.adapters()?;
        let adapters = self.adapters.or(asked).unwrap_or(0);
        if adapters > MOST_ADAPTERS {
            return Err(SimError::field("adapters", adapters, format!("at most {MOST_ADAPTERS} are simulated")));
        }
        if let Some(asked) = asked.filter(|&asked| asked > adapters) {
            let message = format!("the load asks for {asked}; give that many, or leave it out");
            return Err(SimError::field("adapters", adapters, message));
        }
        let ranks = &self.rank.0;
        if ranks.is_empty() {
            return Err(SimError::field("rank", "[]", "a number, or several"));
        }
        let shares = self.rank_shares.clone().unwrap_or_else(|| vec![1.0; ranks.len()]);
        let sum: f64 = shares.iter().sum();
        if shares.len() != ranks.len() || shares.iter().any(|&share| share < 0.0) || !(sum.is_finite() && sum > 0.0) {
            let message = format!("one share from 0 up for each of the {} ranks, and not all 0", ranks.len());
            return Err(SimError::field("rank_shares", parameter::shown(&Value::from(shares)), message));
        }
        let mut given = vec![0_u32; ranks.len()];
        let ranks = (1..=adapters).map(|number| {
            let behind = |place: usize| shares[place] / sum * f64::from(number) - f64::from(given[place]);
            let next =
                (1..shares.len()).fold(0, |best, one| if behind(one) > behind(best) + 1e-9 { one } else { best });
            given[next] += 1;
            next
        });
        Ok(ranks.collect())
    }
}
