//! The control plane as the engine's thread has it: the same, and recorded if that was asked for.

use std::ops::Deref;
use std::time::Instant;

use manylora_core::trace::{TraceLine, TracedAdapter, TracedLoad, TracedLoadResult};
use manylora_core::{ControlPlane, Effect, Event, NewRequest, RegistrationId, StepOutcome, StepPlan, Time};

use super::Recorder;
use crate::engine::phases::PhaseSeconds;

/// What decides, and what remembers how. Whatever changes the control plane goes through here.
pub(crate) struct Plane {
    core: ControlPlane,
    recorder: Option<Box<Recorder>>,
}

impl Deref for Plane {
    type Target = ControlPlane;

    fn deref(&self) -> &ControlPlane {
        &self.core
    }
}

impl Plane {
    pub(crate) fn new(core: ControlPlane, recorder: Option<Recorder>) -> Self {
        Self { core, recorder: recorder.map(Box::new) }
    }

    /// Where its times are since, if it has a say in that.
    pub(crate) fn clock(&self) -> Instant {
        self.recorder.as_ref().map_or_else(Instant::now, |recorder| recorder.clock)
    }

    /// See [`ControlPlane::next_registration`]; what will be registered is this.
    pub(crate) fn next_registration(
        &mut self,
        describe: impl FnOnce(RegistrationId) -> TracedAdapter,
    ) -> RegistrationId {
        let registration = self.core.next_registration();
        if let Some(recorder) = &mut self.recorder {
            recorder.line(TraceLine::Adapter(describe(registration)));
        }
        registration
    }

    /// Takes a request that was submitted at that moment.
    pub(crate) fn submit(&mut self, now: Time, request: NewRequest, submitted: Instant) {
        if let Some(recorder) = &mut self.recorder {
            let resident = |one: &manylora_core::AdapterUse| self.core.is_resident(one.registration);
            recorder.submitted(now, &request, submitted, request.adapters.iter().map(resident).collect());
        }
        self.core.handle(now, Event::Submit(request));
    }

    /// Takes any other event.
    pub(crate) fn handle(&mut self, now: Time, event: Event) {
        if let Some(recorder) = &mut self.recorder {
            recorder.line(line(now, &event));
        }
        self.core.handle(now, event);
    }

    /// See [`ControlPlane::plan`].
    pub(crate) fn plan(&mut self, now: Time, plan: &mut StepPlan) -> bool {
        let planned = self.core.plan(now, plan);
        if let Some(recorder) = &mut self.recorder {
            if planned {
                recorder.planned(now, plan);
            } else {
                recorder.line(TraceLine::Idle { time: now });
            }
        }
        planned
    }

    /// See [`ControlPlane::commit`]; the outcome is this plan's.
    pub(crate) fn commit(&mut self, now: Time, plan: &StepPlan, outcome: &StepOutcome) {
        if let Some(recorder) = &mut self.recorder {
            recorder.committed(now, plan, outcome);
        }
        self.core.commit(now, outcome);
    }

    /// See [`ControlPlane::drain_effects`].
    pub(crate) fn drain_effects(&mut self) -> impl Iterator<Item = Effect> + '_ {
        let recorder = &mut self.recorder;
        self.core.drain_effects().inspect(move |effect| {
            if let Some(recorder) = recorder {
                recorder.decided(effect);
            }
        })
    }

    /// See [`ControlPlane::reset_prefix_cache`].
    pub(crate) fn reset_prefix_cache(&mut self, now: Time) -> bool {
        let done = self.core.reset_prefix_cache();
        if let Some(recorder) = &mut self.recorder {
            recorder.line(TraceLine::ResetPrefixCache { time: now, done });
        }
        done
    }

    /// See [`ControlPlane::take_retired_blocks`]; decides nothing.
    pub(crate) fn take_retired_blocks(&mut self) -> impl ExactSizeIterator<Item = manylora_core::BlockId> + '_ {
        self.core.take_retired_blocks()
    }

    /// A turn of the loop is over.
    pub(crate) fn turned(&mut self, seconds: &PhaseSeconds) {
        if let Some(recorder) = &mut self.recorder {
            recorder.turned(seconds);
        }
    }

    /// Nothing will happen for a while.
    pub(crate) fn rests(&mut self) {
        if let Some(recorder) = &mut self.recorder {
            recorder.hand_over();
        }
    }
}

/// An event other than a request's.
fn line(time: Time, event: &Event) -> TraceLine {
    match event {
        Event::LoadFinished { registration, result } => {
            let result = match result {
                Ok(loaded) => TracedLoadResult::loaded(loaded),
                Err(failure) => TracedLoadResult::Failed { fault: failure.fault },
            };
            TraceLine::Load(TracedLoad { time, registration: *registration, result })
        }
        event => TraceLine::Event { time, event: event.clone() },
    }
}
