//! The engine thread's side of the shelf: what names stand for, and the loads, replacements and unloads under way.
//!
//! `manylora_core` decides what is resident; this module tells it what callers want, has the reading done by the loader
//! threads, and answers. For one name things happen one after the other, so whatever callers do at once, the end is that
//! of some order; loads of the same folder that come together are one load. A name is published, or led elsewhere, only
//! when the content behind it was read and found good (promise P7); an adapter that is registered to be read on demand
//! was checked as far as its header goes.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::SystemTime;

use manylora_core::trace::TracedAdapter;
use manylora_core::{AdapterSlot, ControlPlane, Digest, Event, LoadedAdapter, RegistrationId, Time, UnloadMode};
use manylora_model::adapter::LoadReport;
use manylora_model::{PackedHandle, Runner};

use super::command::{Given, Identified, Order, ReadAdapter, Reply};
use super::loader::{Identify, Job, Known, changed_on_disk};
use super::recorder::Plane;
use super::stamp::Stamp;
use crate::error::EngineError;
use crate::registry::{AdapterInfo, AdapterSource, Entry, Registry};

/// What a caller waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Awaited {
    Pinned,
    Unloaded,
}

/// A caller that waits for a registration to be pinned or unloaded.
struct Waiter {
    awaited: Awaited,
    name: String,
    reply: Reply<()>,
}

/// A registration and what is known of its content.
struct Shelved {
    source: AdapterSource,
    report: Arc<LoadReport>,
    /// State of its files before they were read.
    stamp: Option<Stamp>,
    /// Known once it was read; other content is then refused.
    version: Option<Digest>,
    /// Content given in memory, until the control plane asks for it.
    given: Option<Given>,
    /// It is on its way to stand for its name, and why it will not, if a read has failed.
    arriving: bool,
    /// Its name has led to it.
    published: bool,
    failure: Option<EngineError>,
}

/// Who has the control plane, and the time.
pub(super) struct Core<'a> {
    pub(super) plane: &'a mut Plane,
    pub(super) now: Time,
}

impl Core<'_> {
    fn handle(&mut self, event: Event) {
        self.plane.handle(self.now, event);
    }
}

pub(super) struct Library {
    registry: Arc<Registry>,
    jobs: Sender<Job>,
    /// Where packed adapters go that nobody needs: giving memory back takes a while.
    discards: Sender<PackedHandle>,
    shelved: HashMap<RegistrationId, Shelved>,
    /// Orders for each name; the first is under way.
    orders: HashMap<String, VecDeque<Order>>,
    /// Integer ids that orders under way bring, and the name that each is for.
    reserved_ids: HashMap<u64, String>,
    waiters: HashMap<RegistrationId, Vec<Waiter>>,
    /// Entries taken off the table whose unload waits for requests that named them and are still on their way here.
    departing: Vec<(Entry, UnloadMode)>,
    /// Packed adapters in the runner's table, by version.
    packed: HashMap<Digest, PackedHandle>,
    /// Packed adapters that were just read: the effects of their `LoadFinished` install them, or they are dropped.
    landed: HashMap<Digest, PackedHandle>,
    /// Packed bytes in each slot of the runner's table.
    slot_bytes: Vec<u64>,
    /// Adapters read so far, whatever came of it, and the packed bytes that were.
    pub(super) reads: u64,
    pub(super) loaded_bytes: u64,
}

impl Library {
    pub(super) fn new(registry: Arc<Registry>, jobs: Sender<Job>, discards: Sender<PackedHandle>) -> Self {
        Self {
            registry,
            jobs,
            discards,
            shelved: HashMap::new(),
            orders: HashMap::new(),
            reserved_ids: HashMap::new(),
            waiters: HashMap::new(),
            departing: Vec::new(),
            packed: HashMap::new(),
            landed: HashMap::new(),
            slot_bytes: Vec::new(),
            reads: 0,
            loaded_bytes: 0,
        }
    }

    /// Takes an order, or joins it to one for the same folder that has not ended yet.
    pub(super) fn shelve(&mut self, mut order: Order, core: &mut Core<'_>) {
        let queue = self.orders.entry(order.source.name.clone()).or_default();
        let same = queue.iter_mut().find(|other| {
            let stamps = other.stamp.as_ref().zip(order.stamp.as_ref());
            stamps.is_some_and(|(other, stamp)| other.agrees(stamp))
                && (&other.source, other.expected, other.lazy) == (&order.source, order.expected, order.lazy)
        });
        if let Some(same) = same {
            same.replies.append(&mut order.replies);
            return;
        }
        let name = order.source.name.clone();
        queue.push_back(order);
        if queue.len() == 1 {
            self.advance(&name, core);
        }
    }

    /// Begins the orders of a name until one of them has to wait.
    fn advance(&mut self, name: &str, core: &mut Core<'_>) {
        while self.orders.get(name).is_some_and(|queue| !queue.is_empty()) {
            let Some(result) = self.begin(name, core) else { return };
            self.answer_order(name, result);
        }
        self.orders.remove(name);
    }

    /// Begins the first order of a name; its result if it has one at once.
    fn begin(&mut self, name: &str, core: &mut Core<'_>) -> Option<Result<AdapterInfo, EngineError>> {
        let order = self.orders.get_mut(name)?.front_mut()?;
        if let Some(id) = order.source.int_id
            && *self.reserved_ids.entry(id).or_insert_with(|| name.to_owned()) != name
        {
            return Some(Err(EngineError::AdapterOperation {
                name: name.to_owned(),
                message: format!("id `{id}` is being given to adapter `{}`; give another one", self.reserved_ids[&id]),
            }));
        }
        let known = order.read.as_ref().map(|read| read.version);
        let Some(existing) = self.registry.get(name) else {
            if order.expected.is_some() {
                return Some(self.registry.resolve(name).map(|entry| entry.info));
            }
            let lazy = order.lazy;
            let registration = self.register(name, core)?;
            if lazy {
                let published = self.publish(registration, core);
                if published.is_err() {
                    core.handle(Event::Unload { registration, mode: UnloadMode::Abort });
                }
                return Some(published);
            }
            core.handle(Event::Prefetch(registration));
            return None;
        };
        let same_place = existing.info.origin == order.source.origin;
        let stamps = self.shelved.get(&existing.registration).and_then(|shelved| shelved.stamp.as_ref());
        let stamps = stamps.zip(order.stamp.as_ref());
        let agrees = stamps.is_some_and(|(before, now)| before.agrees(now));
        let unchanged = stamps.is_some_and(|(before, now)| before.still_holds(now));
        let unread = existing.info.version.is_none();
        // Another version than the caller expects is for the control plane to find out, when it compares.
        let expects_this = order.expected.is_none_or(|expected| existing.info.version == Some(expected));
        if order.lazy && same_place && (agrees || !order.source.replace) {
            return Some(self.same(name, existing.info.clone()));
        }
        if unread && same_place && agrees && expects_this {
            // Registered to be read on demand, and this is the demand.
            if let Some(shelved) = self.shelved.get_mut(&existing.registration) {
                shelved.arriving = true;
            }
            order.registration = Some(existing.registration);
            core.handle(Event::Prefetch(existing.registration));
            return None;
        }
        if !unread && same_place && unchanged && expects_this {
            return Some(self.same(name, existing.info.clone()));
        }
        match known {
            Some(version) if expects_this => match self.registry.check(&order.source, version) {
                Ok(None) => {}
                Ok(Some(info)) => return Some(Ok(self.with_id(name, info))),
                Err(error) => return Some(Err(error)),
            },
            // Whether it is the same content shows only when it is read; what the name stands for stays as it is. What was
            // never read has no content yet that this could contradict.
            None if !(order.source.replace || unread && same_place) => {
                let job = Job::Identify { identify: Identify::Name(name.to_owned()), source: order.source.clone() };
                return self.jobs.send(job).is_err().then(|| Err(loader_gone()));
            }
            _ => {}
        }
        // Once the content is swapped it is too late to find out that the id belongs to another name.
        if let Err(error) = self.registry.check_id(&order.source, known) {
            return Some(Err(error));
        }
        let expected = order.expected;
        let new = self.register(name, core)?;
        core.handle(Event::Replace { old: existing.registration, new, expected });
        None
    }

    /// Makes a registration of the first order of a name, known to nobody yet.
    fn register(&mut self, name: &str, core: &mut Core<'_>) -> Option<RegistrationId> {
        let order = self.orders.get_mut(name)?.front_mut()?;
        let registration = core.plane.next_registration(|registration| TracedAdapter {
            registration,
            name: name.to_owned(),
            rank: order.report.modules.values().map(|module| u64::from(module.rank)).max().unwrap_or(0),
            bytes: order.bytes,
            file_bytes: order.stamp.as_ref().map(Stamp::bytes),
        });
        let (version, given) = order.read.take().map(|read| (read.version, read.content)).unzip();
        let bytes = order.bytes;
        let shelved = Shelved {
            source: order.source.clone(),
            report: Arc::clone(&order.report),
            stamp: order.stamp.clone(),
            version,
            given,
            arriving: true,
            published: false,
            failure: None,
        };
        order.registration = Some(registration);
        let rereadable = shelved.source.origin.is_rereadable();
        self.shelved.insert(registration, shelved);
        core.handle(Event::Register { registration, bytes, rereadable });
        Some(registration)
    }

    /// The first order of a name is for what the name stands for.
    fn same(&mut self, name: &str, info: AdapterInfo) -> Result<AdapterInfo, EngineError> {
        if let Some(order) = self.orders.get(name).and_then(|queue| queue.front()) {
            self.registry.check_id(&order.source, info.version)?;
        }
        Ok(self.with_id(name, info))
    }

    /// The entry of a name under a further integer id, if the order brings one.
    fn with_id(&mut self, name: &str, info: AdapterInfo) -> AdapterInfo {
        let id = self.orders.get(name).and_then(|queue| queue.front()).and_then(|order| order.source.int_id);
        match id {
            Some(id) => {
                self.registry.add_id(name, id);
                self.registry.get(name).map_or(info, |entry| entry.info)
            }
            None => info,
        }
    }

    /// Ends the first order of a name.
    fn answer_order(&mut self, name: &str, result: Result<AdapterInfo, EngineError>) {
        let Some(order) = self.orders.get_mut(name).and_then(VecDeque::pop_front) else { return };
        if let Some(id) =
            order.source.int_id.filter(|id| self.reserved_ids.get(id).is_some_and(|holder| holder == name))
        {
            self.reserved_ids.remove(&id);
        }
        let mut replies = order.replies.into_iter();
        let Some(first) = replies.next() else { return };
        for reply in replies {
            let copy = match &result {
                Ok(info) => Ok(info.clone()),
                Err(error) => Err(error.for_another()),
            };
            // The caller may have given up waiting.
            let _ = reply.send(copy);
        }
        let _ = first.send(result);
    }

    /// Ends the order that a registration was made for.
    fn arrive(&mut self, registration: RegistrationId, result: Result<(), EngineError>, core: &mut Core<'_>) {
        let Some(shelved) = self.shelved.get_mut(&registration).filter(|shelved| shelved.arriving) else { return };
        shelved.arriving = false;
        let name = shelved.source.name.clone();
        let was_published = shelved.published;
        let result = result.and_then(|()| self.publish(registration, core));
        if result.is_err() && !was_published {
            core.handle(Event::Unload { registration, mode: UnloadMode::Abort });
        }
        self.answer_order(&name, result);
        self.advance(&name, core);
    }

    /// Lets a name lead to a registration from now on; what it led to before is unloaded when nothing uses it any more.
    fn publish(&mut self, registration: RegistrationId, core: &mut Core<'_>) -> Result<AdapterInfo, EngineError> {
        let Some(shelved) = self.shelved.get_mut(&registration) else { return Err(loader_gone()) };
        shelved.arriving = false;
        self.registry.check_id(&shelved.source, shelved.version)?;
        let info = AdapterInfo {
            name: shelved.source.name.clone(),
            int_ids: shelved.source.int_id.into_iter().collect(),
            origin: shelved.source.origin.clone(),
            root: shelved.source.root.clone(),
            version: shelved.version,
            created: SystemTime::now(),
            report: Arc::clone(&shelved.report),
        };
        let name = info.name.clone();
        if let Some(entry) = self.registry.get(&name)
            && entry.registration == registration
        {
            return self.same(&name, entry.info);
        }
        shelved.published = true;
        if let Some(old) = self.registry.publish(Entry::new(info, registration)) {
            self.departing.push((old, UnloadMode::Drain));
            self.unload_departing(core);
        }
        self.registry.resolve(&name).map(|entry| entry.info)
    }

    /// Takes what identifying content brought.
    pub(super) fn identified(
        &mut self,
        identify: Identify,
        result: Result<Identified, EngineError>,
        core: &mut Core<'_>,
    ) {
        self.reads += 1;
        match identify {
            Identify::Name(name) => {
                let Some(order) = self.orders.get(&name).and_then(|queue| queue.front()) else { return };
                let result = match result.and_then(|content| self.registry.check(&order.source, content.version)) {
                    Ok(Some(info)) => Ok(self.with_id(&name, info)),
                    // What the name stood for has gone meanwhile: begin anew.
                    Ok(None) => return self.advance(&name, core),
                    Err(error) => Err(error),
                };
                self.answer_order(&name, result);
                self.advance(&name, core);
            }
            Identify::Registration(registration) => {
                let Some(shelved) = self.shelved.get_mut(&registration) else { return };
                let result = result.map(|Identified { version, report, stamp }| {
                    self.registry.identify(&shelved.source.name, registration, version, &report);
                    shelved.version = Some(version);
                    shelved.report = report;
                    shelved.stamp = stamp;
                });
                self.arrive(registration, result, core);
            }
        }
    }

    /// Takes what a read brought.
    pub(super) fn read(
        &mut self,
        registration: RegistrationId,
        result: Result<ReadAdapter, EngineError>,
        core: &mut Core<'_>,
    ) {
        self.reads += 1;
        let result = match (result, self.shelved.get_mut(&registration)) {
            (Ok(read), Some(shelved)) => match shelved.accept(&read) {
                Ok(()) => {
                    self.registry.identify(&shelved.source.name, registration, read.version, &shelved.report);
                    let bytes = read.packed.bytes;
                    self.loaded_bytes += bytes;
                    self.landed.insert(read.version, read.packed);
                    Ok(LoadedAdapter { load_seconds: Some(read.seconds), ..LoadedAdapter::new(read.version, bytes) })
                }
                Err(error) => Err(error),
            },
            (Ok(read), None) => Ok(LoadedAdapter::new(read.version, read.packed.bytes)),
            (Err(error), _) => Err(error),
        };
        let result = result.map_err(|error| {
            let failure = error.load_failure();
            if let Some(shelved) = self.shelved.get_mut(&registration).filter(|shelved| shelved.arriving) {
                shelved.failure = Some(error);
            }
            failure
        });
        core.handle(Event::LoadFinished { registration, result });
    }

    /// The control plane wants a registration read.
    pub(super) fn order_load(&mut self, registration: RegistrationId, core: &mut Core<'_>) {
        let Some(shelved) = self.shelved.get_mut(&registration) else {
            let result = Err("the registration is unknown".to_owned().into());
            return core.handle(Event::LoadFinished { registration, result });
        };
        let job = match (shelved.given.take(), shelved.version) {
            (Some(Given::Packed(packed)), Some(digest)) => {
                let bytes = packed.bytes;
                self.landed.insert(digest, packed);
                let result = Ok(LoadedAdapter::new(digest, bytes));
                return core.handle(Event::LoadFinished { registration, result });
            }
            (Some(Given::Checked(prepared)), _) => {
                Job::Pack { registration, name: shelved.source.name.clone(), prepared }
            }
            (_, version) => {
                let known = version.map(|version| Known { version, report: Arc::clone(&shelved.report) });
                let set_aside = shelved.report.bytes;
                Job::Read { registration, source: shelved.source.clone(), known, set_aside }
            }
        };
        if self.jobs.send(job).is_err() {
            let result = Err(loader_gone().load_failure());
            core.handle(Event::LoadFinished { registration, result });
        }
    }

    /// There is no room for a registration now: it is checked without staying, and read again when a request asks for it.
    pub(super) fn on_demand(&mut self, registration: RegistrationId, core: &mut Core<'_>) {
        let Some(shelved) = self.shelved.get(&registration).filter(|shelved| shelved.arriving) else { return };
        let job = Job::Identify { identify: Identify::Registration(registration), source: shelved.source.clone() };
        if self.jobs.send(job).is_err() {
            self.arrive(registration, Err(loader_gone()), core);
        }
    }

    /// Drops what was read for a registration that has gone meanwhile, and so was not installed.
    pub(super) fn tidy(&mut self) {
        for (_, packed) in self.landed.drain() {
            // A send error means that the engine is going down: dropped here, then.
            let _ = self.discards.send(packed);
        }
    }

    pub(super) fn install(&mut self, slot: AdapterSlot, digest: Digest, runner: &mut dyn Runner) {
        let Some(handle) = self.landed.remove(&digest).or_else(|| self.packed.get(&digest).cloned()) else {
            // The kernels refuse an empty slot, so nothing is ever served without its adapter.
            tracing::error!(%digest, "an adapter was to be installed that nobody has read");
            return;
        };
        let place = slot.0 as usize;
        if self.slot_bytes.len() <= place {
            self.slot_bytes.resize(place + 1, 0);
        }
        self.slot_bytes[place] = handle.bytes;
        runner.install(slot.0, handle.clone());
        self.packed.insert(digest, handle);
    }

    pub(super) fn evict(&mut self, slot: AdapterSlot, digest: Digest, runner: &mut dyn Runner) {
        runner.remove(slot.0);
        if let Some(packed) = self.packed.remove(&digest) {
            let _ = self.discards.send(packed);
        }
    }

    /// What a registration is, or was, called.
    pub(super) fn name_of(&self, registration: RegistrationId) -> Option<&str> {
        self.shelved.get(&registration).map(|shelved| shelved.source.name.as_str())
    }

    /// The version that a registration is; None while its content was never read.
    pub(super) fn version_of(&self, registration: RegistrationId) -> Option<Digest> {
        self.shelved.get(&registration).and_then(|shelved| shelved.version)
    }

    /// Bytes of the adapter in a slot.
    pub(super) fn bytes_in(&self, slot: u32) -> u64 {
        self.slot_bytes.get(slot as usize).copied().unwrap_or(0)
    }

    pub(super) fn resident(&mut self, registration: RegistrationId, core: &mut Core<'_>) {
        self.answer(registration, Awaited::Pinned, None);
        self.arrive(registration, Ok(()), core);
    }

    /// The place of `old` is `new`'s now.
    pub(super) fn replaced(&mut self, old: RegistrationId, new: RegistrationId, core: &mut Core<'_>) {
        // Who waits for the name to be pinned waits for what it stands for.
        if let Some(waiters) = self.waiters.get_mut(&old) {
            let moved: Vec<Waiter> = waiters.extract_if(.., |waiter| waiter.awaited == Awaited::Pinned).collect();
            self.waiters.entry(new).or_default().extend(moved);
        }
        self.resident(new, core);
    }

    pub(super) fn failed(&mut self, registration: RegistrationId, message: String, core: &mut Core<'_>) {
        let refused_pin = self.answer(registration, Awaited::Pinned, Some(&message));
        let Some(shelved) = self.shelved.get_mut(&registration) else {
            // What is gone is unloaded.
            self.answer(registration, Awaited::Unloaded, None);
            return;
        };
        if refused_pin && core.plane.registration(registration).is_some_and(|status| status.loading) {
            return;
        }
        let name = shelved.source.name.clone();
        let error = shelved.failure.take().unwrap_or(EngineError::AdapterOperation { name, message });
        self.arrive(registration, Err(error), core);
    }

    pub(super) fn unloaded(&mut self, registration: RegistrationId) {
        self.shelved.remove(&registration);
        self.answer(registration, Awaited::Unloaded, None);
        self.answer(registration, Awaited::Pinned, Some("it was unloaded"));
    }

    pub(super) fn pin(&mut self, name: String, pinned: bool, reply: Reply<()>, core: &mut Core<'_>) {
        let registration = match self.registry.resolve(&name) {
            Ok(entry) => entry.registration,
            Err(error) => return drop(reply.send(Err(error))),
        };
        if pinned {
            self.wait(registration, Waiter { awaited: Awaited::Pinned, name, reply });
            core.handle(Event::Pin(registration));
        } else {
            core.handle(Event::Unpin(registration));
            self.answer(registration, Awaited::Pinned, Some("it was unpinned meanwhile"));
            let _ = reply.send(Ok(()));
        }
    }

    /// Takes a name off the table, and its registration off the shelf once nothing uses it. A name that is gone, but
    /// whose registration still has users, can be told again, with another mode.
    pub(super) fn unload(&mut self, name: &str, mode: UnloadMode, reply: Reply<()>, core: &mut Core<'_>) {
        if let Some(entry) = self.registry.remove(name) {
            self.wait(entry.registration, Waiter { awaited: Awaited::Unloaded, name: name.to_owned(), reply });
            let interrupted = self.interrupt(name, entry.registration, core);
            if mode == UnloadMode::Abort {
                self.abort_leaving(name, core);
            }
            self.departing.push((entry, mode));
            self.unload_departing(core);
            if interrupted {
                self.advance(name, core);
            }
            return;
        }
        let leaving = self.leaving(name);
        let Some(&last) = leaving.last() else {
            return drop(reply.send(self.registry.resolve(name).map(|_| ())));
        };
        self.wait(last, Waiter { awaited: Awaited::Unloaded, name: name.to_owned(), reply });
        if mode == UnloadMode::Abort {
            self.abort_leaving(name, core);
        }
    }

    /// The order of a name that is under way, if it is for what the name stands for or for something in its place, is to
    /// begin anew, as if it had come after the unload of `taken`; whether there is one.
    fn interrupt(&mut self, name: &str, taken: RegistrationId, core: &mut Core<'_>) -> bool {
        let order = self.orders.get_mut(name).and_then(VecDeque::front_mut);
        let Some(registration) = order.and_then(|order| order.registration.take()) else { return false };
        let Some(shelved) = self.shelved.get_mut(&registration) else { return false };
        if !std::mem::take(&mut shelved.arriving) {
            return false;
        }
        if registration != taken {
            core.handle(Event::Unload { registration, mode: UnloadMode::Abort });
        }
        true
    }

    /// Aborts the requests that still hold what a name stood for.
    fn abort_leaving(&mut self, name: &str, core: &mut Core<'_>) {
        for (entry, mode) in &mut self.departing {
            if entry.info.name == name {
                *mode = UnloadMode::Abort;
            }
        }
        for registration in self.leaving(name) {
            if !self.departing.iter().any(|(entry, _)| entry.registration == registration) {
                core.handle(Event::Unload { registration, mode: UnloadMode::Abort });
            }
        }
    }

    /// Registrations that a name stood for and that are not gone yet, in the order they were made.
    fn leaving(&self, name: &str) -> Vec<RegistrationId> {
        let published = self.registry.get(name).map(|entry| entry.registration);
        let all =
            self.shelved.iter().filter(|(id, one)| one.source.name == name && one.published && published != Some(**id));
        let mut ids: Vec<_> = all.map(|(&id, _)| id).collect();
        ids.sort_unstable();
        ids
    }

    /// Requests that hold versions which a name stands for or stood for.
    pub(super) fn holders(&self, name: &str, plane: &ControlPlane) -> usize {
        let published = self.registry.get(name).map(|entry| entry.registration);
        let ids = self.leaving(name).into_iter().chain(published);
        ids.filter_map(|id| plane.registration(id)).map(|status| status.requests).sum()
    }

    /// Whether unloads wait for requests that are on their way here.
    pub(super) fn has_departing(&self) -> bool {
        !self.departing.is_empty()
    }

    /// Starts the unloads that no request on its way here holds back any more.
    pub(super) fn unload_departing(&mut self, core: &mut Core<'_>) {
        self.departing.retain(|(entry, mode)| {
            let waits = !entry.is_free();
            if !waits {
                core.handle(Event::Unload { registration: entry.registration, mode: *mode });
            }
            waits
        });
    }

    fn wait(&mut self, registration: RegistrationId, waiter: Waiter) {
        self.waiters.entry(registration).or_default().push(waiter);
    }

    /// Answers the callers that wait for `awaited`; whether there are any.
    fn answer(&mut self, registration: RegistrationId, awaited: Awaited, failure: Option<&str>) -> bool {
        let Some(waiters) = self.waiters.get_mut(&registration) else { return false };
        let mut any = false;
        for waiter in waiters.extract_if(.., |waiter| waiter.awaited == awaited) {
            let answer = match failure {
                None => Ok(()),
                Some(message) => Err(EngineError::AdapterOperation { name: waiter.name, message: message.to_owned() }),
            };
            // The caller may have given up waiting.
            let _ = waiter.reply.send(answer);
            any = true;
        }
        if waiters.is_empty() {
            self.waiters.remove(&registration);
        }
        any
    }
}

impl Shelved {
    /// Takes note of what was read, unless it is not what was read before.
    fn accept(&mut self, read: &ReadAdapter) -> Result<(), EngineError> {
        match self.version {
            Some(expected) if expected != read.version => Err(changed_on_disk(&self.source, expected, read.version)),
            _ => {
                self.version = Some(read.version);
                self.report = Arc::clone(&read.report);
                self.stamp.clone_from(&read.stamp);
                Ok(())
            }
        }
    }
}

fn loader_gone() -> EngineError {
    EngineError::Stopped("the threads that read adapters are gone".to_owned())
}
