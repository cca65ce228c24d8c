// Entry points: streams, events, captured graphs.
#include <mutex>
#include <unordered_map>

#include "calls.h"
#include "streams.h"

namespace emu {

namespace {

// Calls that name a stream. Handles that are unknown are answered before the body runs.
template <typename Body> Status with_stream(const char* function, void* handle, Body&& body) {
    return call(function, Needs::Context, [&]() -> Status {
        const std::shared_ptr<Stream> stream = stream_of(handle);
        return stream == nullptr ? invalid_handle : body(stream);
    });
}

template <typename Body> Status with_event(const char* function, void* handle, Body&& body) {
    return call(function, Needs::Context, [&]() -> Status {
        Event* event = event_of(handle);
        return event == nullptr ? invalid_handle : body(*event);
    });
}

struct Graphs {
    std::mutex lock;
    std::unordered_map<void*, std::shared_ptr<const Graph>> graphs;
    std::unordered_map<void*, std::shared_ptr<const Graph>> executables;
};

Graphs& graphs() {
    static auto* instance = new Graphs;
    return *instance;
}

} // namespace

size_t live_graphs() {
    const std::lock_guard<std::mutex> guard(graphs().lock);
    return graphs().graphs.size() + graphs().executables.size();
}

void reset_graphs() {
    const std::lock_guard<std::mutex> guard(graphs().lock);
    graphs().graphs.clear();
    graphs().executables.clear();
}

EMU_API Status cuStreamCreate(void** stream, unsigned flags) {
    return call(__func__, Needs::Context, [&] {
        if (stream == nullptr || flags > 1) return invalid_value;
        *stream = new_stream(flags == 0);
        return success;
    });
}

EMU_API Status cuStreamCreateWithPriority(void** stream, unsigned flags, int) {
    return call(__func__, Needs::Context, [&] {
        if (stream == nullptr || flags > 1) return invalid_value;
        *stream = new_stream(flags == 0);
        return success;
    });
}

EMU_API Status cuStreamDestroy_v2(void* stream) {
    return call(__func__, Needs::Context, [&] { return destroy_stream(stream); });
}

EMU_API Status cuStreamSynchronize(void* handle) {
    return with_stream(__func__, handle, [](const auto& stream) -> Status { return finish(stream); });
}

EMU_API Status cuStreamQuery(void* handle) {
    return with_stream(__func__, handle, [](const auto& stream) -> Status {
        if (const Status status = refuse_in_capture(); status != success) return status;
        return poll(stream) ? sticky_error() : not_ready;
    });
}

EMU_API Status cuStreamWaitEvent(void* handle, void* event_handle, unsigned) {
    return with_stream(__func__, handle, [&](const auto& stream) -> Status {
        Event* event = event_of(event_handle);
        return event == nullptr ? invalid_handle : wait_event(stream, *event);
    });
}

EMU_API Status cuLaunchHostFunc(void* handle, void (*function)(void*), void* data) {
    return with_stream(__func__, handle, [&](const auto& stream) -> Status {
        if (function == nullptr) return invalid_value;
        return submit(stream, {[=] {
                                   function(data);
                                   return success;
                               },
                               ""});
    });
}

EMU_API Status cuEventCreate(void** event, unsigned flags) {
    return call(__func__, Needs::Context, [&] {
        if (event == nullptr) return invalid_value;
        *event = new_event((flags & 2) == 0);
        return success;
    });
}

EMU_API Status cuEventDestroy_v2(void* event) {
    return call(__func__, Needs::Context, [&] { return destroy_event(event); });
}

EMU_API Status cuEventRecord(void* event_handle, void* handle) {
    return with_stream(__func__, handle, [&](const auto& stream) -> Status {
        Event* event = event_of(event_handle);
        return event == nullptr ? invalid_handle : record_event(*event, stream);
    });
}

EMU_API Status cuEventQuery(void* handle) {
    return with_event(__func__, handle, [](Event& event) -> Status {
        if (event.capture != nullptr) return captured_event;
        return poll(event) ? sticky_error() : not_ready;
    });
}

EMU_API Status cuEventSynchronize(void* handle) {
    return with_event(__func__, handle, [](Event& event) -> Status { return finish(event); });
}

namespace {
Status elapsed(float* milliseconds, void* start_handle, void* end_handle) {
    Event* start = event_of(start_handle);
    Event* end = event_of(end_handle);
    if (milliseconds == nullptr) return invalid_value;
    if (start == nullptr || end == nullptr || !start->timing || !end->timing) return invalid_handle;
    if (start->time == nullptr || end->time == nullptr) return invalid_handle;
    if (!poll(*start) || !poll(*end)) return not_ready;
    *milliseconds = std::chrono::duration<float, std::milli>(*end->time - *start->time).count();
    return success;
}
} // namespace

EMU_API Status cuEventElapsedTime(float* milliseconds, void* start, void* end) {
    return call(__func__, Needs::Context, [&] { return elapsed(milliseconds, start, end); });
}

EMU_API Status cuEventElapsedTime_v2(float* milliseconds, void* start, void* end) {
    return call(__func__, Needs::Context, [&] { return elapsed(milliseconds, start, end); });
}

// --- capture

EMU_API Status cuStreamBeginCapture_v2(void* handle, int mode) {
    return with_stream(__func__, handle, [&](const auto& stream) -> Status {
        if (mode < 0 || mode > 2) return invalid_value;
        return begin_capture(stream, static_cast<CaptureMode>(mode));
    });
}

EMU_API Status cuStreamEndCapture(void* handle, void** out) {
    return with_stream(__func__, handle, [&](const auto& stream) -> Status {
        if (out == nullptr) return invalid_value;
        *out = nullptr;
        std::unique_ptr<Graph> graph;
        if (const Status status = end_capture(stream, graph); status != success) return status;
        const std::lock_guard<std::mutex> guard(graphs().lock);
        *out = graph.get();
        graphs().graphs[*out] = std::move(graph);
        return success;
    });
}

EMU_API Status cuStreamIsCapturing(void* handle, int* status) {
    return with_stream(__func__, handle, [&](const auto& stream) -> Status {
        if (status == nullptr) return invalid_value;
        *status = stream->capture == nullptr ? 0 : stream->capture->invalid ? 2 : 1;
        return success;
    });
}

EMU_API Status cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
    return call(__func__, Needs::Context, [&] {
        if (executable == nullptr) return invalid_value;
        const std::lock_guard<std::mutex> guard(graphs().lock);
        const auto at = graphs().graphs.find(graph);
        if (at == graphs().graphs.end()) return invalid_value;
        auto copy = std::make_shared<const Graph>(*at->second);
        *executable = const_cast<Graph*>(copy.get());
        graphs().executables[*executable] = std::move(copy);
        return success;
    });
}

namespace {
std::shared_ptr<const Graph> executable_of(void* handle) {
    const std::lock_guard<std::mutex> guard(graphs().lock);
    const auto at = graphs().executables.find(handle);
    return at == graphs().executables.end() ? nullptr : at->second;
}
} // namespace

EMU_API Status cuGraphUpload(void* executable, void* handle) {
    return with_stream(__func__, handle, [&](const auto&) -> Status {
        return executable_of(executable) == nullptr ? invalid_value : success;
    });
}

EMU_API Status cuGraphLaunch(void* executable, void* handle) {
    return with_stream(__func__, handle, [&](const auto& stream) -> Status {
        const std::shared_ptr<const Graph> graph = executable_of(executable);
        if (graph == nullptr) return invalid_value;
        if (stream->capture != nullptr) return not_supported;
        for (const Node& node : graph->nodes) {
            if (!node.operation.launch.empty()) count_launch(node.operation.launch);
        }
        return submit(stream, replay(graph));
    });
}

EMU_API Status cuGraphGetNodes(void* graph, void** nodes, size_t* count) {
    return call(__func__, Needs::Context, [&] {
        const std::lock_guard<std::mutex> guard(graphs().lock);
        const auto at = graphs().graphs.find(graph);
        if (at == graphs().graphs.end() || count == nullptr) return invalid_value;
        if (nodes != nullptr) return not_supported;
        *count = at->second->nodes.size();
        return success;
    });
}

EMU_API Status cuGraphExecDestroy(void* executable) {
    return call(__func__, Needs::Context, [&] {
        const std::lock_guard<std::mutex> guard(graphs().lock);
        return graphs().executables.erase(executable) == 1 ? success : invalid_value;
    });
}

EMU_API Status cuGraphDestroy(void* graph) {
    return call(__func__, Needs::Context, [&] {
        const std::lock_guard<std::mutex> guard(graphs().lock);
        return graphs().graphs.erase(graph) == 1 ? success : invalid_value;
    });
}

} // namespace emu
