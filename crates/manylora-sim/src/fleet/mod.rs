//! Several engines behind a router: each a control plane of its own, all under one clock.
//!
//! What happens next anywhere is one heap. A request is given to a replica when it arrives, by what the router knows then; the
//! replica sees it when its step is over. Of one moment, steps end first, then requests arrive, then steps begin, so that a
//! fleet of one replica does what [`crate::engine::run`] does, whatever the router.
//!
//! Memory: each replica has its table of KV blocks, some 70 bytes a block, and the adapters that it was ever asked for.

mod router;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;

pub use router::{Router, RouterKind};

use crate::cost::CostModel;
use crate::engine::{EngineSettings, Inbox, Observer, Stream, VirtualEngine};
use crate::error::SimError;
use crate::results::Totals;
use crate::run::Watch;
use crate::workload::SimRequest;

/// What one replica came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReplicaTotals {
    /// Its engine's totals; `seconds` is when it was done.
    pub totals: Totals,
    /// Distinct adapters that it was asked for.
    pub adapters: usize,
}

/// What happens; of one moment, in this order, with arrivals in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    End,
    Begin,
}

/// When, what, where. Times are never negative nor NaN: their bits are ordered as they are.
type Due = Reverse<(u64, Phase, u32)>;

struct Replica<'a, O> {
    engine: VirtualEngine<'a, O>,
    inbox: VecDeque<SimRequest>,
    /// When its step ends.
    step_end: Option<f64>,
    /// When it looks next whether a step can begin. Other entries of the heap are stale.
    look: Option<f64>,
}

/// Runs requests, which come by arrival, until all have ended: one replica for each observer. `delivered` is told where each
/// request goes.
pub(crate) fn run<O: Observer>(
    settings: &EngineSettings,
    cost: &dyn CostModel,
    (router, requests): (&mut Router, impl Iterator<Item = SimRequest>),
    observers: &mut [O],
    delivered: &mut dyn FnMut(usize, &SimRequest),
    watch: &Watch,
) -> Result<Vec<ReplicaTotals>, SimError> {
    settings.validate()?;
    let adapters: Arc<[_]> = settings.adapters.as_slice().into();
    let replicas = observers.iter_mut().map(|observer| {
        let engine = VirtualEngine::new(settings, adapters.clone(), cost, observer)?;
        Ok(Replica { engine, inbox: VecDeque::new(), step_end: None, look: None })
    });
    let mut replicas: Vec<Replica<'_, O>> = replicas.collect::<Result<_, SimError>>()?;
    let mut heap: BinaryHeap<Due> = BinaryHeap::new();
    let mut arrivals = Stream::new(requests)?;
    for events in 0_u64.. {
        if events % 1024 == 0 {
            watch.check()?;
        }
        let next = heap.peek().map(|Reverse(due)| *due);
        let arrival = arrivals.next().filter(|request| {
            next.is_none_or(|(time, phase, _)| (request.arrival.to_bits(), Phase::Begin) <= (time, phase))
        });
        if let Some(request) = arrival.copied() {
            let place = router.route(&request);
            delivered(place, &request);
            replicas[place].inbox.push_back(request);
            replicas[place].look_at(request.arrival, place, &mut heap);
            arrivals.advance()?;
            continue;
        }
        let Some(Reverse((time, phase, place))) = heap.pop() else { break };
        let (time, index) = (f64::from_bits(time), place as usize);
        let replica = &mut replicas[index];
        let ended = replica.engine.ended();
        match phase {
            Phase::End => {
                replica.step_end = None;
                replica.engine.end_step(time)?;
                replica.look_at(time, index, &mut heap);
            }
            Phase::Begin if replica.step_end.is_some() || replica.look != Some(time) => continue,
            Phase::Begin => replica.begin(time, index, &mut heap)?,
        }
        let done = replica.engine.ended() - ended;
        router.ended(index, done);
        watch.advance(done);
    }
    let totals = replicas.iter().enumerate().map(|(index, replica)| {
        all_taken(index, &replica.inbox)?;
        replica.engine.finished()?;
        Ok(ReplicaTotals { totals: replica.engine.totals(), adapters: replica.engine.adapters_seen() })
    });
    totals.collect()
}

/// Nothing that was given to a replica may be left with it.
fn all_taken(replica: usize, inbox: &VecDeque<SimRequest>) -> Result<(), SimError> {
    match inbox.front() {
        None => Ok(()),
        Some(first) => Err(SimError::NotTaken { replica, left: inbox.len(), arrival: first.arrival }),
    }
}

impl<O: Observer> Replica<'_, O> {
    /// It looks at this time, or sooner if it would anyway; while a step runs, at its end.
    fn look_at(&mut self, time: f64, place: usize, heap: &mut BinaryHeap<Due>) {
        if self.step_end.is_none() && self.look.is_none_or(|look| time < look) {
            self.look = Some(time);
            heap.push(Reverse((time.to_bits(), Phase::Begin, place as u32)));
        }
    }

    /// Takes what is due and begins a step, if one can run.
    fn begin(&mut self, time: f64, place: usize, heap: &mut BinaryHeap<Due>) -> Result<(), SimError> {
        self.look = None;
        self.engine.wake(time);
        loop {
            self.engine.handle_due(&mut self.inbox)?;
            if let Some(end) = self.engine.begin_step()? {
                self.step_end = Some(end);
                heap.push(Reverse((end.to_bits(), Phase::End, place as u32)));
                return Ok(());
            }
            if !self.engine.carry_out_effects()? {
                break;
            }
        }
        if let Some(end) = self.engine.next_load_end() {
            self.look_at(end, place, heap);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_in_an_inbox_is_an_error() {
        let inbox: VecDeque<SimRequest> = [2.5, 3.0].map(|arrival| SimRequest::new(arrival, None, 4, 4)).into();
        let error = all_taken(7, &inbox).unwrap_err().to_string();
        assert!(
            error.starts_with("replica `7` ended without `2` of its requests, first the one that arrived at `2.5` s")
        );
        assert_eq!(all_taken(7, &VecDeque::new()), Ok(()));
    }
}
