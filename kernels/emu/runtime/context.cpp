// The switch itself, by hand for x86-64 and aarch64 (about 10 ns), through ucontext elsewhere (over 200 ns, because it
// asks the kernel for the signal mask).
#include "context.h"

#include <cstdint>

// -DEMU_UCONTEXT takes the portable way everywhere, so that it can be tested.
#if !defined(__x86_64__) && !defined(__aarch64__) && !defined(EMU_UCONTEXT)
#define EMU_UCONTEXT
#endif
#ifdef EMU_UCONTEXT
#include <ucontext.h>
#endif

namespace emu {

#if defined(__x86_64__) && !defined(EMU_UCONTEXT)

// Callee-saved registers go on the old stack; rounding and exception modes are the same on all.
asm(R"(
.text
.hidden emu_switch_stacks
.type emu_switch_stacks, @function
emu_switch_stacks:
    endbr64
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
.size emu_switch_stacks, .-emu_switch_stacks
)");

extern "C" void emu_switch_stacks(void** save, void* next);

void prepare_context(Context& context, char*, char* high, void (*entry)()) {
    // A function expects rsp % 16 == 8 at its first instruction, as if it had been called.
    uintptr_t top = reinterpret_cast<uintptr_t>(high) & ~uintptr_t{15};
    void** stack = reinterpret_cast<void**>(top - 8);
    *--stack = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--stack = nullptr;
    context.stack_pointer = stack;
}

void switch_context(Context& from, Context& to) { emu_switch_stacks(&from.stack_pointer, to.stack_pointer); }

#elif defined(__aarch64__) && !defined(EMU_UCONTEXT)

asm(R"(
.text
.hidden emu_switch_stacks
.type emu_switch_stacks, %function
emu_switch_stacks:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size emu_switch_stacks, .-emu_switch_stacks
)");

extern "C" void emu_switch_stacks(void** save, void* next);

void prepare_context(Context& context, char*, char* high, void (*entry)()) {
    uintptr_t top = reinterpret_cast<uintptr_t>(high) & ~uintptr_t{15};
    void** stack = reinterpret_cast<void**>(top - 160);
    for (int i = 0; i < 20; ++i) stack[i] = nullptr;
    stack[11] = reinterpret_cast<void*>(entry); // x30, where `ret` goes
    context.stack_pointer = stack;
}

void switch_context(Context& from, Context& to) { emu_switch_stacks(&from.stack_pointer, to.stack_pointer); }

#else

void prepare_context(Context& context, char* low, char* high, void (*entry)()) {
    if (context.saved == nullptr) context.saved = new ucontext_t;
    auto* state = static_cast<ucontext_t*>(context.saved);
    getcontext(state);
    state->uc_stack.ss_sp = low;
    state->uc_stack.ss_size = static_cast<size_t>(high - low);
    state->uc_link = nullptr;
    makecontext(state, entry, 0);
}

void switch_context(Context& from, Context& to) {
    if (from.saved == nullptr) from.saved = new ucontext_t;
    swapcontext(static_cast<ucontext_t*>(from.saved), static_cast<ucontext_t*>(to.saved));
}

#endif

} // namespace emu
