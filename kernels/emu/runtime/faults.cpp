// A kernel that touches memory without access raises a signal on the thread that runs it. The handler sends the fiber
// to a function that fails the launch; a fault of anything else goes to whoever handled it before.
#include "faults.h"

#include <sys/mman.h>

#include <csignal>
#include <cstdio>
#include <ucontext.h>
#include <unistd.h>

#include "runtime.h"

namespace emu {

bool in_device_range(const void* p); // of device memory, which this file knows nothing else of

#if !defined(__SANITIZE_ADDRESS__) && (defined(__x86_64__) || defined(__aarch64__))

namespace {

struct sigaction earlier_segv;
struct sigaction earlier_bus;
__thread void* fault_address;

[[noreturn]] void fail_at_fault() {
    char address[32];
    std::snprintf(address, sizeof(address), "%p", fault_address);
    fail(std::string("touches address ") + address +
         ", where it has no memory (out of bounds, freed, or a stack too small)");
}

// With EMU_PROTECT, or for a pointer that was never meant for the host.
void say_host_touched(const void* p) {
    char text[96];
    const int length = std::snprintf(text, sizeof(text), "emulated device: host code touches device memory at %p\n", p);
    if (write(STDERR_FILENO, text, static_cast<size_t>(length)) < 0) return;
}

void handle(int signal, siginfo_t* information, void* machine) {
    if (executor == nullptr || current == nullptr) {
        if (in_device_range(information->si_addr)) say_host_touched(information->si_addr);
        const struct sigaction& earlier = signal == SIGSEGV ? earlier_segv : earlier_bus;
        if ((earlier.sa_flags & SA_SIGINFO) != 0 && earlier.sa_sigaction != nullptr) {
            earlier.sa_sigaction(signal, information, machine);
        } else {
            sigaction(signal, &earlier, nullptr); // the access is repeated and takes its usual course
        }
        return;
    }
    fault_address = information->si_addr;
    // The fiber never goes on, so its stack is free from the top.
    const uintptr_t top = (reinterpret_cast<uintptr_t>(this_fiber().stack_high) & ~uintptr_t{15}) - 64;
    auto* context = static_cast<ucontext_t*>(machine);
#ifdef __x86_64__
    context->uc_mcontext.gregs[REG_RSP] = static_cast<greg_t>(top - 8);
    context->uc_mcontext.gregs[REG_RIP] = reinterpret_cast<greg_t>(&fail_at_fault);
#else
    context->uc_mcontext.sp = top;
    context->uc_mcontext.pc = reinterpret_cast<u64>(&fail_at_fault);
#endif
}

} // namespace

void catch_faults() {
    constexpr size_t bytes = 64 * 1024;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return;
    stack_t stack{};
    stack.ss_sp = memory;
    stack.ss_size = bytes;
    sigaltstack(&stack, nullptr);
    static bool installed = false; // one thread runs launches
    if (installed) return;
    installed = true;
    struct sigaction action {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    sigaction(SIGSEGV, &action, &earlier_segv);
    sigaction(SIGBUS, &action, &earlier_bus);
}

#else

void catch_faults() {}

#endif

} // namespace emu
