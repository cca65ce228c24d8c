//! How many threads make sense here: physical cores, the affinity mask and the cgroup's quota, whichever is least.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// What this process may use of the machine's processors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Processors {
    /// Logical processors of the affinity mask.
    pub logical: usize,
    /// Physical cores of those.
    pub physical: usize,
    /// Processors' worth of time that the cgroup grants; None = no limit.
    pub quota: Option<f64>,
}

impl Processors {
    /// As it is now.
    pub fn here() -> Self {
        let cpus = allowed_cpus();
        Self {
            logical: cpus.len(),
            physical: physical_cores(&cpus, Path::new("/sys/devices/system/cpu")),
            quota: cgroup_quota(Path::new("/proc/self/cgroup"), Path::new("/sys/fs/cgroup")),
        }
    }

    /// Threads to use when nobody says otherwise: min(physical cores, cgroup quota), at least 1.
    pub fn default_threads(&self) -> usize {
        self.quota.map_or(self.physical, |quota| self.physical.min(quota as usize)).max(1)
    }
}

/// Threads to use when nobody says otherwise: min(physical cores of the affinity mask, cgroup quota), at least 1.
pub fn default_threads() -> usize {
    Processors::here().default_threads()
}

/// The logical processors this process may run on.
pub(super) fn allowed_cpus() -> Vec<usize> {
    #[cfg(target_os = "linux")]
    if let Some(cpus) = super::pool::affinity::affinity() {
        return cpus;
    }
    (0..std::thread::available_parallelism().map_or(1, usize::from)).collect()
}

/// One logical processor of each physical core among `cpus`, in order.
pub(super) fn first_of_each_core(cpus: &[usize], root: &Path) -> Vec<usize> {
    let mut seen = BTreeSet::new();
    cpus.iter()
        .copied()
        .filter(|cpu| {
            let read = |name: &str| {
                std::fs::read_to_string(root.join(format!("cpu{cpu}/topology/{name}")))
                    .ok()
                    .and_then(|text| text.trim().parse::<i64>().ok())
            };
            match (read("physical_package_id"), read("core_id")) {
                (Some(package), Some(core)) => seen.insert((package, core)),
                // Without topology every logical processor counts.
                _ => true,
            }
        })
        .collect()
}

fn physical_cores(cpus: &[usize], root: &Path) -> usize {
    first_of_each_core(cpus, root).len()
}

/// Processors' worth of time the cgroup grants (v2 `cpu.max`, v1 `cpu.cfs_quota_us`), the least along the path to the
/// root; `None` without a limit.
fn cgroup_quota(membership: &Path, mount: &Path) -> Option<f64> {
    let membership = std::fs::read_to_string(membership).ok()?;
    let mut least: Option<f64> = None;
    for line in membership.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let version_two = controllers.is_empty();
        if !version_two && !controllers.split(',').any(|name| name == "cpu") {
            continue;
        }
        let root = if version_two { mount.to_owned() } else { mount.join("cpu") };
        // In a container the path may lie outside what is mounted: then the root itself holds the limit.
        let mut directory: PathBuf = root.join(path.trim_start_matches('/'));
        loop {
            let quota = if version_two { quota_v2(&directory) } else { quota_v1(&directory) };
            if let Some(quota) = quota {
                least = Some(least.map_or(quota, |value: f64| value.min(quota)));
            }
            if directory == root || !directory.pop() {
                break;
            }
        }
    }
    least
}

fn quota_v2(directory: &Path) -> Option<f64> {
    let text = std::fs::read_to_string(directory.join("cpu.max")).ok()?;
    let mut fields = text.split_whitespace();
    let quota: f64 = fields.next()?.parse().ok()?;
    let period: f64 = fields.next()?.parse().ok()?;
    (quota > 0.0 && period > 0.0).then(|| quota / period)
}

fn quota_v1(directory: &Path) -> Option<f64> {
    let read = |name: &str| std::fs::read_to_string(directory.join(name)).ok()?.trim().parse::<f64>().ok();
    let (quota, period) = (read("cpu.cfs_quota_us")?, read("cpu.cfs_period_us")?);
    (quota > 0.0 && period > 0.0).then(|| quota / period)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::{cgroup_quota, default_threads, first_of_each_core};

    fn scratch(name: &str) -> PathBuf {
        let directory = std::env::temp_dir().join(format!("manylora-topology-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).unwrap();
        directory
    }

    #[test]
    fn at_least_one_thread() {
        assert!(default_threads() >= 1);
    }

    #[test]
    fn siblings_count_once() {
        let root = scratch("cores");
        for (cpu, core) in [(0, 0), (1, 0), (2, 1), (3, 1)] {
            let directory = root.join(format!("cpu{cpu}/topology"));
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("physical_package_id"), "0\n").unwrap();
            fs::write(directory.join("core_id"), format!("{core}\n")).unwrap();
        }
        assert_eq!(first_of_each_core(&[0, 1, 2, 3], &root), [0, 2]);
        assert_eq!(first_of_each_core(&[1, 3], &root), [1, 3]);
        assert_eq!(first_of_each_core(&[7, 8], &root), [7, 8]);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn version_two_takes_the_least_on_the_path() {
        let root = scratch("v2");
        fs::create_dir_all(root.join("mount/a/b")).unwrap();
        fs::write(root.join("membership"), "0::/a/b\n").unwrap();
        fs::write(root.join("mount/a/b/cpu.max"), "max 100000\n").unwrap();
        assert_eq!(cgroup_quota(&root.join("membership"), &root.join("mount")), None);
        fs::write(root.join("mount/a/cpu.max"), "150000 100000\n").unwrap();
        assert_eq!(cgroup_quota(&root.join("membership"), &root.join("mount")), Some(1.5));
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn version_one_reads_quota_and_period() {
        let root = scratch("v1");
        fs::create_dir_all(root.join("mount/cpu/job")).unwrap();
        fs::write(root.join("membership"), "5:memory:/job\n4:cpu,cpuacct:/job\n").unwrap();
        fs::write(root.join("mount/cpu/job/cpu.cfs_quota_us"), "200000").unwrap();
        fs::write(root.join("mount/cpu/job/cpu.cfs_period_us"), "100000").unwrap();
        assert_eq!(cgroup_quota(&root.join("membership"), &root.join("mount")), Some(2.0));
        fs::remove_dir_all(root).unwrap();
    }
}
