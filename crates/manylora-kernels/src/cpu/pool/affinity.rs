//! Which processors a thread may run on, and whom it gives way to there.
#![expect(unsafe_code, reason = "reads and sets a thread's affinity mask and priority")]

/// The processors in this thread's affinity mask.
#[cfg(target_os = "linux")]
pub(in crate::cpu) fn affinity() -> Option<Vec<usize>> {
    // SAFETY: all-zero is a valid mask.
    let mut mask: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the mask is ours and as large as said.
    if unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut mask) } != 0 {
        return None;
    }
    let limit = 8 * size_of::<libc::cpu_set_t>();
    // SAFETY: every index is within the mask.
    Some((0..limit).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &mask) }).collect())
}

#[cfg(target_os = "linux")]
pub(super) fn pin(cpu: usize) {
    // SAFETY: all-zero is a valid mask.
    let mut mask: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the index came from such a mask. Failing to pin is harmless.
    unsafe {
        libc::CPU_SET(cpu, &mut mask);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const mask);
    }
}

#[cfg(not(target_os = "linux"))]
pub(super) fn pin(_cpu: usize) {}

/// Lets the calling thread have what other threads leave of the processors, from now on.
pub fn take_what_is_left() {
    // There it is a thread's priority; elsewhere it would be the process's.
    #[cfg(target_os = "linux")]
    // SAFETY: no memory is involved. Failing is harmless.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, 19);
    }
}
