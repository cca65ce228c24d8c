// Stream capture: work is noted as a graph instead of being queued, and a graph's replay goes through its nodes in any
// order that their dependencies allow, as the order setting says.
#include <algorithm>

#include "settings.h"
#include "streams_state.h"

namespace emu {

namespace {

// All nodes that must be done before, or are among, `tail`.
std::vector<bool> reached(const Capture& capture, const std::vector<size_t>& tail) {
    std::vector<bool> seen(capture.nodes.size(), false);
    std::vector<size_t> open = tail;
    while (!open.empty()) {
        const size_t node = open.back();
        open.pop_back();
        if (seen[node]) continue;
        seen[node] = true;
        for (const size_t before : capture.nodes[node].after) open.push_back(before);
    }
    return seen;
}

std::vector<size_t> replay_order(const Graph& graph, Order order, u64 seed) {
    std::vector<size_t> left(graph.nodes.size());
    std::vector<std::vector<size_t>> next(graph.nodes.size());
    std::vector<size_t> ready;
    for (size_t i = 0; i < graph.nodes.size(); ++i) {
        left[i] = graph.nodes[i].after.size();
        for (const size_t before : graph.nodes[i].after) next[before].push_back(i);
        if (left[i] == 0) ready.push_back(i);
    }
    std::vector<size_t> result;
    while (!ready.empty()) {
        std::sort(ready.begin(), ready.end());
        size_t pick = 0;
        if (order == Order::Descending) pick = ready.size() - 1;
        if (order == Order::Random) pick = (seed = seed * 6364136223846793005u + 1442695040888963407u) % ready.size();
        const size_t node = ready[pick];
        ready.erase(ready.begin() + static_cast<std::ptrdiff_t>(pick));
        result.push_back(node);
        for (const size_t after : next[node]) {
            if (--left[after] == 0) ready.push_back(after);
        }
    }
    return result;
}

} // namespace

Status begin_capture(const std::shared_ptr<Stream>& stream, CaptureMode mode) {
    StreamState& s = stream_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    if (stream->legacy) return capture_unsupported;
    if (stream->capture != nullptr) return invalid_value;
    auto capture = std::make_shared<Capture>();
    capture->origin = stream;
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->streams = {stream};
    stream->capture = capture;
    stream->capture_tail.clear();
    s.captures.push_back(capture);
    return success;
}

Status join_capture(const std::shared_ptr<Stream>& stream, Event& event) {
    const std::shared_ptr<Capture> capture = event.capture;
    const auto& open = stream_state().captures;
    if (std::find(open.begin(), open.end(), capture) == open.end()) return captured_event;
    if (stream->capture != nullptr && stream->capture != capture) {
        stream->capture->invalid = true;
        return capture_merge;
    }
    if (stream->legacy) return capture_unsupported;
    if (stream->capture == nullptr) {
        stream->capture = capture;
        stream->capture_tail.clear();
        capture->streams.push_back(stream);
    }
    for (const size_t node : event.capture_nodes) {
        auto& tail = stream->capture_tail;
        if (std::find(tail.begin(), tail.end(), node) == tail.end()) tail.push_back(node);
    }
    return success;
}

Status end_capture(const std::shared_ptr<Stream>& stream, std::unique_ptr<Graph>& graph) {
    StreamState& s = stream_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    const std::shared_ptr<Capture> capture = stream->capture;
    if (capture == nullptr) return invalid_value;
    if (capture->origin != stream) return capture_unmatched;
    if (capture->mode == CaptureMode::ThreadLocal && capture->thread != std::this_thread::get_id()) {
        return capture_wrong_thread;
    }
    bool joined = true;
    const std::vector<bool> done = reached(*capture, stream->capture_tail);
    for (const auto& other : capture->streams) {
        for (const size_t node : other->capture_tail) joined = joined && done[node];
        other->capture = nullptr;
        other->capture_tail.clear();
    }
    s.captures.erase(std::find(s.captures.begin(), s.captures.end(), capture));
    if (capture->invalid) return capture_invalidated;
    if (!joined) return capture_unjoined;
    graph = std::make_unique<Graph>();
    graph->nodes = std::move(capture->nodes);
    return success;
}

Status refuse_in_capture() {
    StreamState& s = stream_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    Status status = success;
    for (const auto& capture : s.captures) {
        const bool mine = capture->thread == std::this_thread::get_id();
        if (capture->mode == CaptureMode::Global || (capture->mode == CaptureMode::ThreadLocal && mine)) {
            capture->invalid = true;
            status = capture_unsupported;
        }
    }
    return status;
}

Operation replay(std::shared_ptr<const Graph> graph) {
    return {[graph = std::move(graph)] {
                for (const size_t node : replay_order(*graph, settings().order, settings().seed)) {
                    const auto& run = graph->nodes[node].operation.run;
                    if (const Status status = run ? run() : success; status != success) return status;
                }
                return success;
            },
            ""};
}

} // namespace emu
