// Streams, events and captured graphs: queues of operations that one worker thread carries out, in an order that each
// stream and the events between streams allow, and no earlier than the schedule says.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "../../include/integers.h"
#include "status.h"

namespace emu {

struct Stream;

// A piece of a device's work. `launch` is what it counts as among launches; empty for copies.
struct Operation {
    std::function<Status()> run;
    std::string launch;
};

// A place in a stream's queue: the work up to and including the `upto`-th operation that was ever put there.
struct Mark {
    std::shared_ptr<Stream> stream;
    u64 upto = 0;
};

// What a stream's queue holds: work to do, after other streams have come as far as `after`.
struct Queued {
    Operation operation;
    std::vector<Mark> after;
};

struct Node {
    Operation operation;
    std::vector<size_t> after; // indices of nodes
};

struct Graph {
    std::vector<Node> nodes;
};

enum class CaptureMode { Global = 0, ThreadLocal = 1, Relaxed = 2 };

struct Capture {
    std::shared_ptr<Stream> origin;
    CaptureMode mode = CaptureMode::Global;
    std::thread::id thread;
    bool invalid = false;
    std::vector<Node> nodes;
    std::vector<std::shared_ptr<Stream>> streams;
};

struct Stream {
    bool blocking = false; // orders itself with the legacy default stream
    bool legacy = false;
    u64 queued = 0;
    u64 finished = 0;
    std::deque<Queued> queue;
    std::shared_ptr<Capture> capture;
    std::vector<size_t> capture_tail;
};

struct Event {
    bool timing = true;
    Mark mark;
    std::shared_ptr<Capture> capture;
    std::vector<size_t> capture_nodes;
    // Shared with the queued operation that sets it, which may outlive the event.
    std::shared_ptr<std::chrono::steady_clock::time_point> time;
};

// Handles. Null, 1 (legacy) and 2 (per thread) name default streams. An unknown handle gives null.
std::shared_ptr<Stream> stream_of(void* handle);
void* new_stream(bool blocking);
Status destroy_stream(void* handle);
Event* event_of(void* handle);
void* new_event(bool timing);
Status destroy_event(void* handle);
size_t live_streams();
size_t live_events();

// Puts work into a stream (or into the graph that it captures).
Status submit(const std::shared_ptr<Stream>& stream, Operation operation);
Status record_event(Event& event, const std::shared_ptr<Stream>& stream);
Status wait_event(const std::shared_ptr<Stream>& stream, Event& event);

// Waits for all work that is queued in a stream now, in an event's stream up to the event, in all streams.
Status finish(const std::shared_ptr<Stream>& stream);
Status finish(const Event& event);
Status finish_all();
// Whether it is done; if not, a deferred schedule carries out one operation more.
bool poll(const std::shared_ptr<Stream>& stream);
bool poll(const Event& event);

Status begin_capture(const std::shared_ptr<Stream>& stream, CaptureMode mode);
Status end_capture(const std::shared_ptr<Stream>& stream, std::unique_ptr<Graph>& graph);
// 900, and the capture is void, if this thread may not make calls like this one now.
Status refuse_in_capture();
Operation replay(std::shared_ptr<const Graph> graph);

// Forgets all queues and captures. Nothing may wait.
void reset_streams();

} // namespace emu
