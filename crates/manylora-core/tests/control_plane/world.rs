//! Everything that can happen to a control plane, as actions on a driver, with checks after them.

use std::collections::BTreeMap;

use manylora_core::{
    AdapterUse, Client, CoreConfig, Effect, Event, NewRequest, RegistrationId, RequestId, StepPlan, UnloadMode,
};

use crate::driver::{BLOCK_BYTES, Driver, digest};

#[derive(Clone, Debug)]
pub(crate) enum Action {
    Submit {
        family: u32,
        length: usize,
        max_tokens: usize,
        priority: i64,
        salt: bool,
        adapters: Vec<(usize, u8, u32)>,
        logits: bool,
        tenant: Option<u8>,
    },
    Abort(usize),
    Register {
        content: u32,
        bytes: u64,
        given: bool,
    },
    /// Registers content and puts it in another registration's place, expecting the version that serves, or another.
    Replace {
        which: usize,
        content: u32,
        bytes: u64,
        given: bool,
        expect: Option<bool>,
    },
    /// Unloads what was replaced.
    Retire,
    SetWeight {
        which: Option<usize>,
        weight: f64,
    },
    Prefetch(usize),
    Pin(usize),
    Unpin(usize),
    Unload {
        which: usize,
        abort: bool,
    },
    AnswerLoad(usize),
    Break(usize),
    Repair(usize),
    Plan,
    Commit,
    Lose,
    Reset,
}

/// Sizes by content, so that equal content has equal bytes.
type Sizes = BTreeMap<u32, u64>;

pub(crate) struct World {
    pub(crate) driver: Driver,
    registrations: Vec<RegistrationId>,
    sizes: Sizes,
    /// Invariants are checked after every so many actions.
    check_every: u64,
    actions: u64,
}

impl World {
    pub(crate) fn new(config: CoreConfig, token_count: bool, check_every: u64) -> Self {
        let mut driver = Driver::new(config);
        driver.instant_loads = false;
        if token_count {
            driver.token_count = |step, request| [1, 1, 2, 1, 0][((step + request.0) % 5) as usize];
        }
        Self { driver, registrations: Vec::new(), sizes: Sizes::new(), check_every, actions: 0 }
    }

    fn pick(&self, which: usize) -> Option<RegistrationId> {
        let known = self.registrations.len().min(6);
        (known > 0).then(|| self.registrations[self.registrations.len() - 1 - which % known])
    }

    fn add(&mut self, content: u32, bytes: u64, given: bool) -> RegistrationId {
        let bytes = *self.sizes.entry(content).or_insert(bytes);
        let id = if given { self.driver.give(content, bytes) } else { self.driver.register(content, bytes) };
        self.registrations.push(id);
        id
    }

    pub(crate) fn act(&mut self, action: &Action) {
        match action {
            Action::Submit { family, length, max_tokens, priority, salt, adapters, logits, tenant } => {
                let adapters = adapters.iter().filter_map(|&(which, scale, first_active)| {
                    let scale = f32::from(scale) * 0.5;
                    Some(AdapterUse { registration: self.pick(which)?, scale, first_active })
                });
                let request = NewRequest {
                    id: RequestId(0),
                    prompt: (0..*length as u32).map(|position| family * 100 + position / 3 + 1).collect(),
                    max_tokens: *max_tokens,
                    priority: *priority,
                    cache_salt: salt.then(|| "salt".to_owned()),
                    tenant: tenant.map(|tenant| format!("tenant {tenant}")),
                    adapters: adapters.collect(),
                    read_prefix_cache: true,
                    all_prompt_logits: *logits,
                };
                self.driver.submit_request(request);
            }
            Action::Abort(back) => {
                let last = self.driver.requests.len() as u64;
                self.driver.handle(Event::Abort(RequestId(last.saturating_sub(*back as u64))));
            }
            Action::Register { content, bytes, given } => {
                self.add(*content, *bytes, *given);
            }
            Action::Replace { which, content, bytes, given, expect } => {
                let Some(old) = self.pick(*which) else { return };
                let serving = self.driver.core.registration(old).and_then(|status| status.digest);
                let new = self.add(*content, *bytes, *given);
                if which % 2 == 0 {
                    // Read before the swap is asked for.
                    self.driver.handle(Event::Prefetch(new));
                }
                let expected = expect.and_then(|right| if right { serving } else { Some(digest(200)) });
                self.driver.handle(Event::Replace { old, new, expected });
            }
            Action::Retire => {
                for registration in std::mem::take(&mut self.driver.replaced) {
                    self.driver.handle(Event::Unload { registration, mode: UnloadMode::Drain });
                }
            }
            Action::SetWeight { which, weight } => {
                let client = match which {
                    Some(which) => self.pick(*which).map(Client::Adapter),
                    None => Some(Client::Tenant("tenant 1".to_owned())),
                };
                if let Some(client) = client {
                    self.driver.handle(Event::SetWeight { client, weight: *weight });
                }
            }
            Action::Prefetch(which) => self.with(*which, Event::Prefetch),
            Action::Pin(which) => self.with(*which, Event::Pin),
            Action::Unpin(which) => self.with(*which, Event::Unpin),
            Action::Unload { which, abort } => {
                let mode = if *abort { UnloadMode::Abort } else { UnloadMode::Drain };
                self.with(*which, |registration| Event::Unload { registration, mode });
            }
            Action::AnswerLoad(which) => {
                if !self.driver.loads.is_empty() {
                    self.driver.answer_load(which % self.driver.loads.len());
                }
            }
            Action::Break(which) => {
                if let Some(id) = self.pick(*which) {
                    self.driver.contents.insert(id, (*which > 2).then_some((77, 300)));
                }
            }
            Action::Repair(which) => {
                if let (Some(id), Some((&content, &bytes))) = (self.pick(*which), self.sizes.first_key_value()) {
                    self.driver.contents.insert(id, Some((content, bytes)));
                }
            }
            Action::Plan => {
                self.driver.plan();
            }
            Action::Commit => self.driver.commit(),
            Action::Lose => self.driver.lose(),
            Action::Reset => {
                self.driver.core.reset_prefix_cache();
            }
        }
        self.actions += 1;
        if self.actions.is_multiple_of(self.check_every) {
            self.check(action);
        }
    }

    fn check(&self, action: &Action) {
        if let Err(problem) = self.driver.core.check_invariants() {
            panic!("{problem} after {action:?}");
        }
        let stats = self.driver.core.stats();
        let resident: u64 = stats.adapters.iter().map(|adapter| adapter.bytes).sum();
        assert_eq!(resident, stats.adapter_bytes);
        let taken = stats.adapter_bytes + stats.loading_bytes;
        assert!(taken <= stats.adapter_room);
        assert_eq!(stats.total_blocks as u64, (stats.ledger_bytes - taken) / BLOCK_BYTES);
    }

    fn with(&mut self, which: usize, event: impl FnOnce(RegistrationId) -> Event) {
        if let Some(id) = self.pick(which) {
            self.driver.handle(event(id));
        }
    }

    pub(crate) fn run(mut self, actions: &[Action]) -> (Vec<StepPlan>, Vec<Effect>) {
        for action in actions {
            self.act(action);
        }
        self.end()
    }

    /// Lets everything end and checks that everything returns.
    pub(crate) fn end(mut self) -> (Vec<StepPlan>, Vec<Effect>) {
        // Everything ends: loads are answered, nothing is stuck.
        self.driver.finish();
        assert!(self.driver.requests.values().all(|request| request.ending.is_some()));
        // Everything returns.
        for id in std::mem::take(&mut self.registrations) {
            self.driver.handle(Event::Unload { registration: id, mode: UnloadMode::Drain });
        }
        while !self.driver.loads.is_empty() {
            self.driver.answer_load(0);
        }
        self.driver.core.check_invariants().unwrap();
        let stats = self.driver.core.stats();
        assert_eq!((stats.adapter_bytes, stats.loading_bytes), (0, 0));
        assert_eq!(stats.free_blocks as u64, stats.ledger_bytes / BLOCK_BYTES);
        assert!(self.driver.core.reset_prefix_cache());
        (self.driver.plans, self.driver.effects)
    }
}
