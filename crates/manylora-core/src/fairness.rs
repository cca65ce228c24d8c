//! Weighted fair service: virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).
//!
//! A *client* is a tenant if the request names one, else the line of its first adapter (registrations that replaced one
//! another are one client), else the base. Each client has a counter of the service it got, in tokens over its weight: all
//! prompt tokens count once, when a request is admitted (cached ones too: a client pays for what it asks, not for what
//! others computed before), and each generated token counts twice, when it is committed. A preempted request keeps its
//! place ahead of everyone and what is computed again costs nothing. Aborting refunds nothing.
//!
//! The client with the least counter is next; inside a client it is first come, first served. A client that comes back
//! after a pause is lifted to the least counter of those that wait, so that pausing saves nothing up.
//!
//! # The bound
//!
//! Let two clients be continuously backlogged over an interval, with requests that can be admitted (their adapters are
//! resident and the cap on distinct adapters keeps nobody out). The services they get in it, each over its weight, differ
//! by at most `2 x max(L / w, 2 x M / w)`: L is the longest prompt, M the most tokens that can be in the batch at once (what
//! the KV blocks hold, or `max_num_seqs` x `max_model_len` if that is less), w the smaller of their weights. Nobody idles
//! for it: whenever a request fits, one is admitted.
//!
//! # What is remembered
//!
//! Counters of clients that neither wait nor run are forgotten as soon as they would be lifted anyway (looked at whenever a
//! request arrives), so that clients that never come back leave nothing behind. Only while ever new clients arrive faster
//! than they are served, so that the queue itself grows, does the memory of those served meanwhile grow with it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::{Index, IndexMut};

use crate::event::Client;
use crate::identity::RegistrationId;
use crate::order::Ordered;
use crate::queue::{Class, LaneIndex};

/// What a prompt token costs.
const PROMPT_TOKEN: f64 = 1.0;
/// What a generated token costs.
const GENERATED_TOKEN: f64 = 2.0;

/// Place of a client in [`Accounts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct AccountIndex(u32);

/// One client's account, and its lanes in the queue.
#[derive(Debug)]
pub(crate) struct Account {
    /// None: everyone's, under policies that are not fair.
    client: Option<Client>,
    service: f64,
    weight: f64,
    /// The counter that the queue sorts it by; follows `service` when somebody is to be admitted.
    pub(crate) sorted_as: Ordered,
    is_dirty: bool,
    /// Requests that wait and were never admitted.
    pub(crate) waiting: usize,
    /// Requests that run or were preempted.
    pub(crate) admitted: usize,
    /// Its lanes by class: arrival of the first request, after its priority.
    pub(crate) lanes: BTreeMap<Class, BTreeSet<(i64, u64, LaneIndex)>>,
}

/// All clients that wait, run, or are still remembered.
#[derive(Debug, Default)]
pub(crate) struct Accounts {
    slots: Vec<Option<Account>>,
    vacant: Vec<u32>,
    by_client: HashMap<Option<Client>, AccountIndex>,
    /// Weights other than 1.
    weights: HashMap<Client, f64>,
    /// Clients that neither wait nor run, by counter.
    idle: BTreeSet<(Ordered, AccountIndex)>,
    /// Counters below this one would be lifted.
    floor: f64,
    /// The client that waited last, while nobody waits.
    last: Option<AccountIndex>,
    /// Clients whose counter is not the one they are sorted by.
    pub(crate) dirty: Vec<AccountIndex>,
}

impl Accounts {
    /// The account of a client, opened if need be.
    pub(crate) fn open(&mut self, client: Option<Client>) -> AccountIndex {
        if let Some(&index) = self.by_client.get(&client) {
            return index;
        }
        let weight = client.as_ref().and_then(|client| self.weights.get(client)).copied().unwrap_or(1.0);
        let account = Account {
            client: client.clone(),
            service: 0.0,
            weight,
            sorted_as: Ordered(0.0),
            is_dirty: false,
            waiting: 0,
            admitted: 0,
            lanes: BTreeMap::new(),
        };
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(None);
            (self.slots.len() - 1) as u32
        });
        self.slots[slot as usize] = Some(account);
        self.by_client.insert(client, AccountIndex(slot));
        self.dirty.reserve(self.slots.len());
        AccountIndex(slot)
    }

    /// A request starts to wait; `least` is the least counter of those that wait already.
    pub(crate) fn arrive(&mut self, index: AccountIndex, least: Option<f64>) {
        self.idle.remove(&(Ordered(self[index].service), index));
        self.raise_floor(least);
        let floor = self.floor;
        let account = &mut self[index];
        account.waiting += 1;
        if account.waiting == 1 {
            account.service = account.service.max(floor);
            account.sorted_as = Ordered(account.service);
        }
    }

    /// A request stops waiting: it was admitted, or it is gone.
    pub(crate) fn leave(&mut self, index: AccountIndex, admitted: bool) {
        let account = &mut self[index];
        account.waiting -= 1;
        account.admitted += usize::from(admitted);
        if account.waiting == 0 {
            self.last = Some(index);
        }
        self.rest(index);
    }

    /// An admitted request ended.
    pub(crate) fn end(&mut self, index: AccountIndex) {
        self[index].admitted -= 1;
        self.rest(index);
    }

    fn rest(&mut self, index: AccountIndex) {
        let account = &self[index];
        if account.waiting == 0 && account.admitted == 0 {
            self.idle.insert((Ordered(account.service), index));
        }
    }

    /// Takes note of the least counter of those that wait, and forgets the idle ones that would be lifted to it.
    fn raise_floor(&mut self, least: Option<f64>) {
        let last = self.last.and_then(|index| self.slots[index.0 as usize].as_ref());
        let least = least.or(last.map(|account| account.service));
        self.floor = self.floor.max(least.unwrap_or(0.0));
        while let Some(&(service, index)) = self.idle.first()
            && service.0 <= self.floor
        {
            self.idle.pop_first();
            self.close(index);
        }
    }

    fn close(&mut self, index: AccountIndex) {
        if let Some(account) = self.slots[index.0 as usize].take() {
            self.by_client.remove(&account.client);
            self.vacant.push(index.0);
        }
        if self.last == Some(index) {
            self.last = None;
        }
        self.dirty.retain(|&other| other != index);
    }

    fn charge(&mut self, index: AccountIndex, tokens: usize, price: f64) {
        let account = &mut self[index];
        if account.client.is_none() {
            return;
        }
        account.service += tokens as f64 * price / account.weight;
        // Counters of clients that do not wait are sorted when they do.
        if account.waiting > 0 && !account.is_dirty {
            account.is_dirty = true;
            self.dirty.push(index);
        }
    }

    /// A request of this many prompt tokens is admitted.
    pub(crate) fn charge_prompt(&mut self, index: AccountIndex, tokens: usize) {
        self.charge(index, tokens, PROMPT_TOKEN);
    }

    /// This many tokens were generated.
    pub(crate) fn charge_generated(&mut self, index: AccountIndex, tokens: usize) {
        self.charge(index, tokens, GENERATED_TOKEN);
    }

    /// Sorts a client by its counter from now on.
    pub(crate) fn settle(&mut self, index: AccountIndex) {
        let account = &mut self[index];
        account.is_dirty = false;
        account.sorted_as = Ordered(account.service);
    }

    pub(crate) fn set_weight(&mut self, client: Client, weight: f64) {
        if !weight.is_finite() || weight <= 0.0 {
            return;
        }
        let key = Some(client);
        if let Some(&index) = self.by_client.get(&key) {
            self[index].weight = weight;
        }
        let Some(client) = key else { return };
        if weight == 1.0 {
            self.weights.remove(&client);
        } else {
            self.weights.insert(client, weight);
        }
    }

    /// A line of registrations ended: its adapter has no weight any more, and no account once nobody uses it.
    pub(crate) fn forget_line(&mut self, line: RegistrationId) {
        let key = Some(Client::Adapter(line));
        if let Some(&index) = self.by_client.get(&key) {
            let account = &mut self[index];
            account.weight = 1.0;
            let idle = (Ordered(account.service), index);
            if self.idle.remove(&idle) {
                self.close(index);
            }
        }
        if let Some(client) = key {
            self.weights.remove(&client);
        }
    }

    /// Number of accounts.
    pub(crate) fn len(&self) -> usize {
        self.by_client.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (AccountIndex, &Account)> {
        let numbered = self.slots.iter().enumerate();
        numbered.filter_map(|(slot, account)| Some((AccountIndex(slot as u32), account.as_ref()?)))
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        for (index, account) in self.iter() {
            let idle = account.waiting == 0 && account.admitted == 0;
            if idle != self.idle.contains(&(Ordered(account.service), index)) {
                return Err(format!("client {:?} is idle and not listed, or listed and not idle", account.client));
            }
            if !account.service.is_finite() || account.is_dirty != self.dirty.contains(&index) {
                return Err(format!("client {:?} has an account out of order", account.client));
            }
        }
        if self.len() != self.iter().count() || self.idle.len() > self.len() {
            return Err("clients miscounted".to_owned());
        }
        Ok(())
    }
}

impl Index<AccountIndex> for Accounts {
    type Output = Account;

    fn index(&self, index: AccountIndex) -> &Account {
        self.slots[index.0 as usize].as_ref().expect("requests hold open accounts only")
    }
}

impl IndexMut<AccountIndex> for Accounts {
    fn index_mut(&mut self, index: AccountIndex) -> &mut Account {
        self.slots[index.0 as usize].as_mut().expect("requests hold open accounts only")
    }
}
