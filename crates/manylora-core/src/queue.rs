//! Requests that wait and were never admitted, in the order in which they may start.
//!
//! Requests of one client with one priority and the same adapters differ in nothing that admission asks; they form a
//! *lane*, first come, first served. Lanes are kept by *class*: what keeps them out, if anything does. So a scan for the
//! next request, or for the next load, looks at heads of classes and never at what cannot start, however much waits; and
//! when an adapter arrives, goes, or becomes active, its lanes change their class, not each of its requests.
//!
//! Inside a class, clients are sorted by what they were served ([`crate::fairness`]), inside a client lanes by arrival.
//! Under policies that are not fair everyone is the same client.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::event::Client;
use crate::fairness::{AccountIndex, Accounts};
use crate::identity::RegistrationId;
use crate::order::Order;
use crate::request::RequestIndex;
use crate::shelf::{Shelf, VersionIndex};

/// Place of a lane in [`Queue`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct LaneIndex(u32);

/// What keeps a lane from starting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Class {
    /// It needs no adapter.
    Base,
    /// All its adapters are resident.
    Ready {
        /// Distinct versions among them that no admitted request uses.
        missing: usize,
        /// One of them was superseded: only by being served does it go.
        outgoing: bool,
        /// Its turn came and it was kept out: its wait is bounded.
        passed: bool,
    },
    /// What is not resident is being loaded.
    Coming,
    /// Something must be loaded and there was no room yet.
    Cold,
}

/// What lanes are kept out so that one that waited too long has its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Closing {
    /// Lanes of this priority or a lower one (a greater number).
    pub(crate) priority: i64,
    /// But this.
    pub(crate) lane: Option<LaneIndex>,
}

impl Closing {
    fn keeps_out(&self, outgoing: bool, priority: i64) -> bool {
        !outgoing && priority >= self.priority
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LaneAdapter {
    pub(crate) registration: RegistrationId,
    pub(crate) version: Option<VersionIndex>,
}

/// Requests that differ in nothing but their arrival.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) account: AccountIndex,
    pub(crate) priority: i64,
    /// Distinct registrations.
    pub(crate) adapters: Vec<LaneAdapter>,
    pub(crate) requests: BTreeSet<(u64, RequestIndex)>,
    pub(crate) class: Class,
    /// Since which step its first request is kept out, and that request's arrival.
    pub(crate) deferred: Option<(u64, u64)>,
}

type LaneKey = (AccountIndex, i64, Vec<RegistrationId>);

/// The queue.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    pub(crate) accounts: Accounts,
    lanes: Vec<Option<Lane>>,
    vacant: Vec<u32>,
    by_key: HashMap<LaneKey, LaneIndex>,
    by_version: HashMap<VersionIndex, BTreeSet<LaneIndex>>,
    /// Lanes that wait for a first read.
    by_registration: HashMap<RegistrationId, BTreeSet<LaneIndex>>,
    /// Clients with lanes of a class, by their first.
    order: BTreeMap<Class, BTreeSet<(Order, AccountIndex)>>,
    /// Deferred lanes: priority, step since, arrival.
    deferred: BTreeSet<(i64, u64, u64, LaneIndex)>,
    len: usize,
}

impl Queue {
    /// Number of requests.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// All lanes.
    pub(crate) fn lanes(&self) -> impl Iterator<Item = &Lane> {
        self.lanes.iter().flatten()
    }

    pub(crate) fn lane(&self, index: LaneIndex) -> &Lane {
        self.lanes[index.0 as usize].as_ref().expect("a lane is there while it has requests")
    }

    fn lane_mut(&mut self, index: LaneIndex) -> &mut Lane {
        self.lanes[index.0 as usize].as_mut().expect("a lane is there while it has requests")
    }

    pub(crate) fn has(&self, class: Class) -> bool {
        self.order.contains_key(&class)
    }

    /// Whether a lane, if it is still there, lacks room for a load.
    pub(crate) fn is_cold(&self, index: LaneIndex) -> bool {
        self.lanes.get(index.0 as usize).and_then(Option::as_ref).is_some_and(|lane| lane.class == Class::Cold)
    }

    /// Puts a request at the end of its lane. Its adapters must be bound as far as their versions are known.
    pub(crate) fn push(
        &mut self,
        (arrival, request): (u64, RequestIndex),
        priority: i64,
        client: Option<Client>,
        mut adapters: Vec<LaneAdapter>,
        shelf: &Shelf,
    ) -> LaneIndex {
        adapters.sort_unstable_by_key(|adapter| adapter.registration);
        adapters.dedup_by_key(|adapter| adapter.registration);
        self.settle();
        let account = self.accounts.open(client);
        let firsts = self.order.values().filter_map(|clients| clients.first());
        let least = firsts.map(|(order, _)| order.service.0).reduce(f64::min);
        self.accounts.arrive(account, least);
        self.len += 1;
        let key = (account, priority, adapters.iter().map(|adapter| adapter.registration).collect());
        if let Some(&index) = self.by_key.get(&key) {
            self.lane_mut(index).requests.insert((arrival, request));
            return index;
        }
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.lanes.push(None);
            (self.lanes.len() - 1) as u32
        });
        let index = LaneIndex(slot);
        for adapter in &adapters {
            match adapter.version {
                Some(version) => self.by_version.entry(version).or_default().insert(index),
                None => self.by_registration.entry(adapter.registration).or_default().insert(index),
            };
        }
        let mut lane = Lane {
            account,
            priority,
            adapters,
            requests: BTreeSet::from([(arrival, request)]),
            class: Class::Base,
            deferred: None,
        };
        lane.class = classify(&lane, shelf);
        self.lanes[slot as usize] = Some(lane);
        self.by_key.insert(key, index);
        self.attach(index);
        index
    }

    /// Takes a request out: it was admitted, or it is gone.
    pub(crate) fn remove(&mut self, index: LaneIndex, request: (u64, RequestIndex), admitted: bool) {
        self.detach(index);
        if admitted {
            self.stop_deferring(index);
        }
        let lane = self.lane_mut(index);
        lane.requests.remove(&request);
        let account = lane.account;
        self.len -= 1;
        if self.lane(index).requests.is_empty() {
            self.drop_lane(index);
        } else {
            self.attach(index);
        }
        self.accounts.leave(account, admitted);
    }

    fn drop_lane(&mut self, index: LaneIndex) {
        self.stop_deferring(index);
        let Some(lane) = self.lanes[index.0 as usize].take() else { return };
        self.vacant.push(index.0);
        for adapter in &lane.adapters {
            match adapter.version {
                Some(version) => remove_from(&mut self.by_version, &version, index),
                None => remove_from(&mut self.by_registration, &adapter.registration, index),
            }
        }
        let registrations = lane.adapters.iter().map(|adapter| adapter.registration).collect();
        self.by_key.remove(&(lane.account, lane.priority, registrations));
    }

    /// Where the first request of a lane stands.
    pub(crate) fn order_of(&self, index: LaneIndex) -> Order {
        let lane = self.lane(index);
        let arrival = lane.requests.first().map_or(u64::MAX, |&(arrival, _)| arrival);
        Order { priority: lane.priority, service: self.accounts[lane.account].sorted_as, arrival }
    }

    /// Where the first request stands that waits for a version.
    pub(crate) fn order_of_version(&self, version: VersionIndex) -> Option<Order> {
        self.by_version.get(&version)?.iter().map(|&lane| self.order_of(lane)).min()
    }

    /// Whether a lane waits for a version.
    pub(crate) fn needs(&self, lane: LaneIndex, version: VersionIndex) -> bool {
        self.by_version.get(&version).is_some_and(|lanes| lanes.contains(&lane))
    }

    /// Adds a lane to its class.
    fn attach(&mut self, index: LaneIndex) {
        let lane = self.lane(index);
        let (class, account, order) = (lane.class, lane.account, self.order_of(index));
        let set = self.accounts[account].lanes.entry(class).or_default();
        let first = set.first().copied();
        set.insert((order.priority, order.arrival, index));
        if first.is_none_or(|(priority, arrival, _)| (order.priority, order.arrival) < (priority, arrival)) {
            let clients = self.order.entry(class).or_default();
            if let Some((priority, arrival, _)) = first {
                clients.remove(&(Order { priority, arrival, ..order }, account));
            }
            clients.insert((order, account));
        }
    }

    /// Takes a lane out of its class. It must not have changed since it was added.
    fn detach(&mut self, index: LaneIndex) {
        let lane = self.lane(index);
        let (class, account, order) = (lane.class, lane.account, self.order_of(index));
        let Some(set) = self.accounts[account].lanes.get_mut(&class) else { return };
        set.remove(&(order.priority, order.arrival, index));
        let next = set.first().copied();
        if next.is_none() {
            self.accounts[account].lanes.remove(&class);
        }
        let Some(clients) = self.order.get_mut(&class) else { return };
        if clients.remove(&(order, account))
            && let Some((priority, arrival, _)) = next
        {
            clients.insert((Order { priority, arrival, ..order }, account));
        }
        if clients.is_empty() {
            self.order.remove(&class);
        }
    }

    /// Sorts the clients by what they were served meanwhile.
    pub(crate) fn settle(&mut self) {
        while let Some(index) = self.accounts.dirty.pop() {
            let old = self.accounts[index].sorted_as;
            self.accounts.settle(index);
            let account = &self.accounts[index];
            for (class, lanes) in &account.lanes {
                let (Some(clients), Some(&(priority, arrival, _))) = (self.order.get_mut(class), lanes.first()) else {
                    continue;
                };
                clients.remove(&(Order { priority, service: old, arrival }, index));
                clients.insert((Order { priority, service: account.sorted_as, arrival }, index));
            }
        }
    }

    /// Lanes that wait for a version.
    pub(crate) fn lanes_of_version(&self, version: VersionIndex) -> impl Iterator<Item = LaneIndex> + '_ {
        self.by_version.get(&version).into_iter().flatten().copied()
    }

    /// Lanes that wait for the first read of a registration.
    pub(crate) fn lanes_of_registration(&self, id: RegistrationId) -> impl Iterator<Item = LaneIndex> + '_ {
        self.by_registration.get(&id).into_iter().flatten().copied()
    }

    /// The first read of a registration found this version.
    pub(crate) fn bind(&mut self, index: LaneIndex, id: RegistrationId, version: VersionIndex) {
        let adapters = &mut self.lane_mut(index).adapters;
        if let Some(adapter) = adapters.iter_mut().find(|adapter| adapter.registration == id) {
            adapter.version = Some(version);
        }
        remove_from(&mut self.by_registration, &id, index);
        self.by_version.entry(version).or_default().insert(index);
    }

    /// Puts a lane into the class where it belongs now; true if it has just become ready.
    pub(crate) fn refresh(&mut self, index: LaneIndex, shelf: &Shelf) -> bool {
        let (old, new) = (self.lane(index).class, classify(self.lane(index), shelf));
        if old == new {
            return false;
        }
        self.detach(index);
        self.lane_mut(index).class = new;
        self.attach(index);
        matches!(new, Class::Ready { .. }) && !matches!(old, Class::Ready { .. })
    }

    /// The lane whose first request may be admitted next: of those that `free` further versions are enough for.
    pub(crate) fn next(&self, free: usize, closing: Option<Closing>) -> Option<(Order, LaneIndex)> {
        let open = self.order.iter().filter_map(|(class, clients)| {
            let &(order, account) = clients.first()?;
            let open = match class {
                Class::Base => true,
                &Class::Ready { missing, outgoing, .. } => {
                    missing <= free && closing.is_none_or(|closing| !closing.keeps_out(outgoing, order.priority))
                }
                Class::Coming | Class::Cold => false,
            };
            let &(.., lane) = self.accounts[account].lanes.get(class)?.first()?;
            open.then_some((order, lane))
        });
        let favoured = closing
            .and_then(|closing| closing.lane)
            .filter(|&lane| matches!(self.lane(lane).class, Class::Ready { missing, .. } if missing <= free));
        open.chain(favoured.map(|lane| (self.order_of(lane), lane))).min()
    }

    /// Lanes of a class, in order.
    pub(crate) fn lanes_in(&self, class: Class) -> impl Iterator<Item = (Order, LaneIndex)> + '_ {
        self.order.get(&class).into_iter().flatten().flat_map(move |&(order, account)| {
            let lanes = self.accounts[account].lanes.get(&class).into_iter().flatten();
            lanes.map(move |&(priority, arrival, lane)| (Order { priority, arrival, ..order }, lane))
        })
    }

    /// Defers the ready lanes ahead of `end` that the cap or `closing` keeps out.
    pub(crate) fn defer_passed(&mut self, end: Order, free: usize, closing: Option<Closing>, step: u64) {
        loop {
            let passed = self.order.iter().find_map(|(class, clients)| {
                let &Class::Ready { missing, outgoing, passed: false } = class else { return None };
                let &(order, account) = clients.first()?;
                let closed = closing.is_some_and(|closing| closing.keeps_out(outgoing, order.priority));
                let &(.., lane) = self.accounts[account].lanes.get(class)?.first()?;
                ((missing > free || closed) && order < end).then_some(lane)
            });
            match passed {
                Some(lane) => self.defer(lane, step),
                None => return,
            }
        }
    }

    /// Starts the clock of a lane that is kept out.
    pub(crate) fn defer(&mut self, index: LaneIndex, step: u64) {
        if self.lane(index).deferred.is_some() {
            return;
        }
        self.detach(index);
        let arrival = self.order_of(index).arrival;
        let lane = self.lane_mut(index);
        lane.deferred = Some((step, arrival));
        let priority = lane.priority;
        if let Class::Ready { passed, .. } = &mut lane.class {
            *passed = true;
        }
        self.deferred.insert((priority, step, arrival, index));
        self.attach(index);
    }

    /// Forgets that a lane, which is in no class just now, was kept out.
    fn stop_deferring(&mut self, index: LaneIndex) {
        let lane = self.lane_mut(index);
        let priority = lane.priority;
        if let Class::Ready { passed, .. } = &mut lane.class {
            *passed = false;
        }
        if let Some((since, arrival)) = lane.deferred.take() {
            self.deferred.remove(&(priority, since, arrival, index));
        }
    }

    /// The most important lane, and of these the one kept out longest, that is kept out since `latest` or before.
    pub(crate) fn overdue(&self, latest: u64) -> Option<(u64, LaneIndex)> {
        let mut first = self.deferred.first();
        while let Some(&(priority, since, _, lane)) = first {
            if since <= latest {
                return Some((since, lane));
            }
            // All others of this priority were kept out later.
            first = self.deferred.range((priority.checked_add(1)?, 0, 0, LaneIndex(0))..).next();
        }
        None
    }

    pub(crate) fn check(&self, shelf: &Shelf) -> Result<(), String> {
        self.accounts.check()?;
        let (mut requests, mut attached, mut deferred) = (0, 0, 0);
        for (slot, lane) in self.lanes.iter().enumerate() {
            let Some(lane) = lane else { continue };
            let index = LaneIndex(slot as u32);
            let wrong = |what: &str| Err(format!("lane {slot} {what}: {lane:?}"));
            requests += lane.requests.len();
            deferred += usize::from(lane.deferred.is_some());
            if lane.requests.is_empty() || (shelf.stale.is_empty() && lane.class != classify(lane, shelf)) {
                return wrong("is in the wrong class");
            }
            let order = self.order_of(index);
            let lanes = self.accounts[lane.account].lanes.get(&lane.class);
            if !lanes.is_some_and(|lanes| lanes.contains(&(order.priority, order.arrival, index))) {
                return wrong("is not with its client");
            }
            for adapter in &lane.adapters {
                let bound = match adapter.version {
                    Some(version) => self.by_version.get(&version),
                    None => self.by_registration.get(&adapter.registration),
                };
                if !bound.is_some_and(|lanes| lanes.contains(&index)) {
                    return wrong("is not found by its adapter");
                }
            }
        }
        for (index, account) in self.accounts.iter() {
            for (class, lanes) in &account.lanes {
                attached += lanes.len();
                let first = lanes.first().map(|&(priority, arrival, _)| Order {
                    priority,
                    service: account.sorted_as,
                    arrival,
                });
                let sorted = first.is_some_and(|order| {
                    self.order.get(class).is_some_and(|clients| clients.contains(&(order, index)))
                });
                if !sorted {
                    return Err(format!("client {index:?} is not where it should be in {class:?}"));
                }
            }
        }
        let clients: usize = self.order.values().map(BTreeSet::len).sum();
        let listed: usize = self.accounts.iter().map(|(_, account)| account.lanes.len()).sum();
        let lanes = self.lanes.iter().flatten().count();
        if (requests, attached, deferred, clients) != (self.len, lanes, self.deferred.len(), listed) {
            return Err("the queue miscounts".to_owned());
        }
        Ok(())
    }
}

fn remove_from<K: Eq + std::hash::Hash>(map: &mut HashMap<K, BTreeSet<LaneIndex>>, key: &K, lane: LaneIndex) {
    if let Some(lanes) = map.get_mut(key) {
        lanes.remove(&lane);
        if lanes.is_empty() {
            map.remove(key);
        }
    }
}

fn classify(lane: &Lane, shelf: &Shelf) -> Class {
    if lane.adapters.is_empty() {
        return Class::Base;
    }
    let (mut missing, mut outgoing, mut coming, mut cold) = (0, false, false, false);
    for (position, adapter) in lane.adapters.iter().enumerate() {
        let registration = shelf.registrations.get(&adapter.registration);
        let loading = registration.is_some_and(|registration| registration.loading.is_some());
        outgoing |= registration.is_some_and(|registration| registration.superseded);
        match adapter.version.map(|version| shelf.version(version)) {
            Some(version) if version.is_resident() => {
                let earlier = lane.adapters[..position].iter().any(|earlier| earlier.version == adapter.version);
                missing += usize::from(version.active == 0 && !earlier);
            }
            Some(version) if version.loading || loading => coming = true,
            None if loading => coming = true,
            _ => cold = true,
        }
    }
    match (cold, coming) {
        (true, _) => Class::Cold,
        (false, true) => Class::Coming,
        (false, false) => Class::Ready { missing, outgoing, passed: lane.deferred.is_some() },
    }
}
