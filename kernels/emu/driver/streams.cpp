// The queues and the worker. One lock guards them all; operations themselves run outside it.
#include "streams.h"

#include <condition_variable>
#include <mutex>
#include <unordered_map>

#include "../runtime/faults.h"
#include "calls.h"
#include "device_memory.h"
#include "settings.h"
#include "streams_state.h"

namespace emu {

namespace {

// Carries out the stream's work up to `upto`, and first what that waits for in other streams.
void advance(StreamState& s, std::unique_lock<std::mutex>& lock, const std::shared_ptr<Stream>& stream, u64 upto) {
    while (stream->finished < upto && !stream->queue.empty()) {
        const std::vector<Mark> after = stream->queue.front().after;
        for (const Mark& mark : after) advance(s, lock, mark.stream, mark.upto);
        Operation operation = std::move(stream->queue.front().operation);
        stream->queue.pop_front();
        lock.unlock();
        // After a fault nothing runs any more.
        if (operation.run && sticky_error() == success) {
            open_device_memory();
            const Status status = operation.run();
            close_device_memory();
            // Nobody waits for a single operation, so its failure is the context's.
            if (status != success && sticky_error() == success) {
                set_sticky_error(illegal_address, "queued work meets memory that is freed by now");
            }
        }
        operation = {};
        lock.lock();
        ++stream->finished;
        s.progress.notify_all();
    }
}

void work() {
    catch_faults();
    StreamState& s = stream_state();
    std::unique_lock<std::mutex> lock(s.lock);
    for (;;) {
        s.wanted.wait(lock, [&] { return !s.goals.empty(); });
        const Mark goal = s.goals.front();
        s.goals.pop_front();
        advance(s, lock, goal.stream, goal.upto);
    }
}

void want(StreamState& s, const std::shared_ptr<Stream>& stream, u64 upto) {
    if (!s.worker_started) {
        s.worker_started = true;
        std::thread(work).detach();
    }
    s.goals.push_back({stream, upto});
    s.wanted.notify_one();
}

void finish_mark(StreamState& s, std::unique_lock<std::mutex>& lock, const std::shared_ptr<Stream>& stream, u64 upto) {
    if (stream->finished >= upto) return;
    want(s, stream, upto);
    s.progress.wait(lock, [&] { return stream->finished >= upto; });
}

std::vector<std::shared_ptr<Stream>> all_streams(StreamState& s) {
    std::vector<std::shared_ptr<Stream>> all = {s.legacy, s.per_thread};
    for (const auto& [handle, stream] : s.streams) all.push_back(stream);
    return all;
}

bool poll_mark(const std::shared_ptr<Stream>& stream, u64 upto) {
    StreamState& s = stream_state();
    std::unique_lock<std::mutex> lock(s.lock);
    if (stream->finished >= upto) return true;
    if (settings().schedule == Schedule::Deferred) {
        finish_mark(s, lock, stream, stream->finished + 1);
    } else {
        want(s, stream, upto);
    }
    return false;
}

} // namespace

StreamState& stream_state() {
    static auto* instance = new StreamState;
    return *instance;
}

std::shared_ptr<Stream> stream_of(void* handle) {
    StreamState& s = stream_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    const auto number = reinterpret_cast<uintptr_t>(handle);
    if (number <= 1) return s.legacy;
    if (number == 2) return s.per_thread;
    const auto at = s.streams.find(handle);
    return at == s.streams.end() ? nullptr : at->second;
}

void* new_stream(bool blocking) {
    StreamState& s = stream_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    auto stream = std::make_shared<Stream>();
    stream->blocking = blocking;
    s.streams[stream.get()] = stream;
    return stream.get();
}

Status destroy_stream(void* handle) {
    StreamState& s = stream_state();
    std::unique_lock<std::mutex> lock(s.lock);
    const auto at = s.streams.find(handle);
    if (at == s.streams.end()) return invalid_handle;
    const std::shared_ptr<Stream> stream = at->second;
    if (stream->capture != nullptr) stream->capture->invalid = true;
    finish_mark(s, lock, stream, stream->queued);
    s.pending_waits.erase(stream.get());
    s.streams.erase(handle);
    return success;
}

Event* event_of(void* handle) {
    StreamState& s = stream_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    const auto at = s.events.find(handle);
    return at == s.events.end() ? nullptr : at->second.get();
}

void* new_event(bool timing) {
    StreamState& s = stream_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    auto event = std::make_unique<Event>();
    event->timing = timing;
    void* handle = event.get();
    s.events[handle] = std::move(event);
    return handle;
}

Status destroy_event(void* handle) {
    StreamState& s = stream_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    return s.events.erase(handle) == 1 ? success : invalid_handle;
}

size_t live_streams() {
    StreamState& s = stream_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    return s.streams.size();
}

size_t live_events() {
    StreamState& s = stream_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    return s.events.size();
}

Status submit(const std::shared_ptr<Stream>& stream, Operation operation) {
    StreamState& s = stream_state();
    std::unique_lock<std::mutex> lock(s.lock);
    if (stream->capture != nullptr) {
        Capture& capture = *stream->capture;
        if (capture.invalid) return capture_invalidated;
        capture.nodes.push_back({std::move(operation), stream->capture_tail});
        stream->capture_tail = {capture.nodes.size() - 1};
        return success;
    }
    if (!operation.launch.empty()) count_launch(operation.launch);
    Queued queued;
    queued.operation = std::move(operation);
    queued.after = std::move(s.pending_waits[stream.get()]);
    s.pending_waits.erase(stream.get());
    if (stream->legacy) {
        for (const auto& [handle, other] : s.streams) {
            if (other->blocking) queued.after.push_back({other, other->queued});
        }
    } else if (stream->blocking) {
        queued.after.push_back({s.legacy, s.legacy->queued});
    }
    stream->queue.push_back(std::move(queued));
    const u64 upto = ++stream->queued;
    if (settings().schedule == Schedule::Background) want(s, stream, upto);
    if (settings().schedule == Schedule::Eager) finish_mark(s, lock, stream, upto);
    return success;
}

Status record_event(Event& event, const std::shared_ptr<Stream>& stream) {
    {
        StreamState& s = stream_state();
        const std::lock_guard<std::mutex> guard(s.lock);
        if (stream->capture != nullptr) {
            event.capture = stream->capture;
            event.capture_nodes = stream->capture_tail;
            return stream->capture->invalid ? capture_invalidated : success;
        }
    }
    auto time = std::make_shared<std::chrono::steady_clock::time_point>();
    const Status status = submit(stream, {[time] {
                                              *time = std::chrono::steady_clock::now();
                                              return success;
                                          },
                                          ""});
    StreamState& s = stream_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    event.capture = nullptr;
    event.time = time;
    event.mark = {stream, stream->queued};
    return status;
}

Status wait_event(const std::shared_ptr<Stream>& stream, Event& event) {
    StreamState& s = stream_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    if (event.capture != nullptr) return join_capture(stream, event);
    if (stream->capture != nullptr) {
        stream->capture->invalid = true;
        return capture_isolation;
    }
    // Binds the work that comes next, as a real wait does; an event that was never recorded binds nothing.
    if (event.mark.stream != nullptr) s.pending_waits[stream.get()].push_back(event.mark);
    return success;
}

Status finish(const std::shared_ptr<Stream>& stream) {
    StreamState& s = stream_state();
    std::unique_lock<std::mutex> lock(s.lock);
    if (stream->capture != nullptr) {
        stream->capture->invalid = true;
        return capture_unsupported;
    }
    // A stream that only waits for others is done when they are.
    const auto pending = s.pending_waits.find(stream.get());
    const std::vector<Mark> waits = pending == s.pending_waits.end() ? std::vector<Mark>{} : pending->second;
    for (const Mark& mark : waits) finish_mark(s, lock, mark.stream, mark.upto);
    if (stream->legacy) {
        for (const auto& other : all_streams(s)) {
            if (other->blocking) finish_mark(s, lock, other, other->queued);
        }
    }
    finish_mark(s, lock, stream, stream->queued);
    return sticky_error();
}

Status finish(const Event& event) {
    StreamState& s = stream_state();
    std::unique_lock<std::mutex> lock(s.lock);
    if (event.capture != nullptr) return captured_event;
    const Mark mark = event.mark;
    if (mark.stream != nullptr) finish_mark(s, lock, mark.stream, mark.upto);
    return sticky_error();
}

Status finish_all() {
    StreamState& s = stream_state();
    std::unique_lock<std::mutex> lock(s.lock);
    for (const auto& stream : all_streams(s)) finish_mark(s, lock, stream, stream->queued);
    return sticky_error();
}

bool poll(const std::shared_ptr<Stream>& stream) {
    u64 upto = 0;
    {
        const std::lock_guard<std::mutex> guard(stream_state().lock);
        upto = stream->queued;
    }
    return poll_mark(stream, upto);
}

bool poll(const Event& event) { return event.mark.stream == nullptr || poll_mark(event.mark.stream, event.mark.upto); }

void reset_streams() {
    finish_all();
    StreamState& s = stream_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    s.streams.clear();
    s.events.clear();
    s.pending_waits.clear();
    s.captures.clear();
    s.legacy->capture = nullptr;
    s.per_thread->capture = nullptr;
}

} // namespace emu
