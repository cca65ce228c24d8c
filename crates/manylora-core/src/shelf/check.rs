//! What must always hold on the shelf: every sum and list equals what it stands for, counted anew.

use super::{Registration, Shelf};

impl Shelf {
    pub(crate) fn check(&self) -> Result<(), String> {
        let sum: u64 = self.residents().map(|(_, version)| version.bytes).sum();
        let places = self.residents().filter(|(_, version)| version.live > 0).count();
        if (sum, places) != (self.resident_bytes, self.places) {
            return Err(format!("resident bytes `{}` and places are not the sum `{sum}`", self.resident_bytes));
        }
        let loading = self.registrations.values().filter_map(|registration| registration.loading);
        let sums = loading.fold((0, 0, 0), |sums, (bytes, places)| (sums.0 + bytes, sums.1 + places, sums.2 + 1));
        let mut listed = self.loading.clone();
        listed.sort_unstable();
        let all = self.registrations.iter().filter(|(_, registration)| registration.loading.is_some());
        if sums != (self.loading_bytes, self.loading_places, self.loading.len()) || !all.map(|(&id, _)| id).eq(listed) {
            return Err(format!("loads miscounted: {sums:?}"));
        }
        let mut fixed = (0, 0, 0);
        for (index, version) in self.versions() {
            let standing: Vec<_> = self.registrations.values().filter(|one| one.version == Some(index)).collect();
            let count = |which: fn(&Registration) -> bool| standing.iter().filter(|one| which(one)).count();
            let counted = (version.registrations, version.pins, version.live, version.given, version.anchors);
            let anchored = count(|one| one.superseded || !one.rereadable);
            let live = count(|one| !one.superseded);
            let given = count(|one| !one.rereadable && !one.superseded);
            if (standing.len(), count(|one| one.pinned), live, given, anchored) != counted || standing.is_empty() {
                return Err(format!("version `{}` miscounts its registrations", version.digest));
            }
            if version.slot.is_some_and(|slot| self.in_slot(slot) != Some(index)) {
                return Err(format!("version `{}` is not in its slot", version.digest));
            }
            if version.slot.is_none() && (version.active > 0 || version.given > 0) {
                return Err(format!("version `{}` is in use and not resident", version.digest));
            }
            let idle = version.is_resident() && version.leases == 0 && version.may_go();
            if (idle, idle) != (version.listed, self.idle.contains(&(version.rank, index))) {
                return Err(format!("version `{}` is listed otherwise than it is", version.digest));
            }
            fixed.0 += usize::from(version.pins > 0);
            fixed.1 += usize::from(version.is_fixed());
            fixed.2 += if version.is_fixed() { version.bytes } else { 0 };
        }
        for registration in self.registrations.values().filter(|one| one.pinned && one.version.is_none()) {
            fixed = (fixed.0 + 1, fixed.1 + 1, fixed.2 + registration.bytes);
        }
        if fixed != (self.pinned_count, self.fixed_count, self.fixed_bytes) {
            return Err(format!("pins miscounted: {fixed:?}"));
        }
        if self.idle.len() != self.versions().filter(|(_, version)| version.listed).count() {
            return Err("versions are listed that are gone".to_owned());
        }
        let unpinned = self.registrations.values().filter(|registration| !registration.pinned);
        if self.sizes.values().sum::<usize>() != unpinned.count() {
            return Err("sizes miscounted".to_owned());
        }
        for (root, line) in &self.lines {
            let members = self.registrations.values().filter(|one| one.line == *root).count();
            if members != line.members {
                return Err(format!("line {root:?} has `{members}` members"));
            }
        }
        let active = self.versions().filter(|(_, version)| version.active > 0).count();
        if active != self.active_count {
            return Err(format!("`{active}` versions are active and `{}` counted", self.active_count));
        }
        Ok(())
    }
}
