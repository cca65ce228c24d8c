//! How much memory this process may still take: the machine's free memory, bounded by the limits of its cgroup.

use std::path::{Path, PathBuf};

/// Bytes that can still be had: the smaller of `MemAvailable` and what each enclosing cgroup's limit leaves.
///
/// None when the system does not say (no `/proc/meminfo`).
pub fn available_bytes() -> Option<u64> {
    available_bytes_under(Path::new("/"))
}

/// Bytes that the cgroup allows, used or not; None without a limit.
pub fn limit_bytes() -> Option<u64> {
    limit_bytes_under(Path::new("/"))
}

/// As [`limit_bytes`], with another root for `proc` and `sys`.
pub fn limit_bytes_under(root: &Path) -> Option<u64> {
    least_of_cgroups(root, limit)
}

/// As [`available_bytes`], with another root for `proc` and `sys`.
pub fn available_bytes_under(root: &Path) -> Option<u64> {
    let machine = meminfo(&root.join("proc/meminfo"))?;
    Some(least_of_cgroups(root, headroom).map_or(machine, |limit| limit.min(machine)))
}

fn meminfo(path: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    let field = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
    };
    field("MemAvailable").or_else(|| field("MemFree"))
}

/// The least of what this process's cgroup and its ancestors, v2 and v1, say.
fn least_of_cgroups(root: &Path, ask: fn(&Path, Version) -> Option<u64>) -> Option<u64> {
    let membership = std::fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let mut least: Option<u64> = None;
    for line in membership.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let (mount, version) = if controllers.is_empty() {
            (root.join("sys/fs/cgroup"), Version::Two)
        } else if controllers.split(',').any(|controller| controller == "memory") {
            (root.join("sys/fs/cgroup/memory"), Version::One)
        } else {
            continue;
        };
        // Inside a container the named path often is not visible; its limits are then at the mount itself.
        for folder in self_and_ancestors(&mount, path) {
            if let Some(found) = ask(&folder, version) {
                least = Some(least.map_or(found, |least| least.min(found)));
            }
        }
    }
    least
}

#[derive(Clone, Copy)]
enum Version {
    One,
    Two,
}

fn self_and_ancestors(mount: &Path, path: &str) -> Vec<PathBuf> {
    let relative = Path::new(path.trim_start_matches('/'));
    let plain = relative.components().all(|component| matches!(component, std::path::Component::Normal(_)));
    let relative = if plain { relative } else { Path::new("") };
    relative.ancestors().map(|ancestor| mount.join(ancestor)).collect()
}

fn limit(folder: &Path, version: Version) -> Option<u64> {
    let name = match version {
        Version::One => "memory.limit_in_bytes",
        Version::Two => "memory.max",
    };
    // "max" (v2) does not parse; v1 spells "no limit" as a number near 2^63.
    std::fs::read_to_string(folder.join(name)).ok()?.trim().parse().ok().filter(|limit| *limit < 1 << 62)
}

fn headroom(folder: &Path, version: Version) -> Option<u64> {
    let (usage, cached) = match version {
        Version::One => ("memory.usage_in_bytes", "total_inactive_file"),
        Version::Two => ("memory.current", "inactive_file"),
    };
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
    let limit = limit(folder, version)?;
    let usage: u64 = read(usage)?.trim().parse().ok()?;
    // Pages of files that can be dropped at once count as usage and are not.
    let cached = read("memory.stat")
        .and_then(|stat| stat.lines().find_map(|line| line.strip_prefix(cached)?.trim().parse::<u64>().ok()))
        .unwrap_or(0);
    Some(limit.saturating_sub(usage.saturating_sub(cached)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, name: &str, text: &str) {
        let path = root.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn this_machine_says_something_sensible() {
        let available = available_bytes().unwrap();
        assert!(available > 1 << 20, "{available}");
    }

    #[test]
    fn the_tightest_of_machine_and_cgroups_counts() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        write(root, "proc/meminfo", "MemTotal: 4000 kB\nMemFree: 100 kB\nMemAvailable:    2000 kB\n");
        assert_eq!(available_bytes_under(root), Some(2000 * 1024));

        write(root, "proc/self/cgroup", "0::/parent/child\n");
        write(root, "sys/fs/cgroup/parent/child/memory.max", "max\n");
        write(root, "sys/fs/cgroup/parent/child/memory.current", "500000\n");
        assert_eq!(available_bytes_under(root), Some(2000 * 1024));

        write(root, "sys/fs/cgroup/parent/memory.max", "1000000\n");
        write(root, "sys/fs/cgroup/parent/memory.current", "700000\n");
        write(root, "sys/fs/cgroup/parent/memory.stat", "anon 1\nfile 9\ninactive_file 50000\n");
        assert_eq!(available_bytes_under(root), Some(350_000));
        assert_eq!(limit_bytes_under(root), Some(1_000_000));

        write(root, "proc/self/cgroup", "5:cpu:/a\n4:memory:/a\n");
        write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "900000\n");
        write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", "1000000\n");
        assert_eq!(available_bytes_under(root), Some(0));
        write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(available_bytes_under(root), Some(2000 * 1024));
    }

    #[test]
    fn a_system_that_does_not_say() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(available_bytes_under(folder.path()), None);
        assert_eq!(limit_bytes_under(folder.path()), None);
    }
}
