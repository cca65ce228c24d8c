// Switching between stacks: what makes the threads of a block cheap enough to run every kernel of a test suite.
#pragma once

namespace emu {

// Where a stack that does not run now goes on: its registers are on it (by hand) or in `saved` (portable fallback).
struct Context {
    void* stack_pointer;
    void* saved;
};

// Prepares `context` to run `entry` on the stack [low, high) when first switched to. `entry` never returns.
void prepare_context(Context& context, char* low, char* high, void (*entry)());

// Saves this stack's state in `from` and goes on with `to`.
void switch_context(Context& from, Context& to);

} // namespace emu
