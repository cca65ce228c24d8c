// What streams.cpp and capture.cpp share.
#pragma once

#include <condition_variable>
#include <mutex>
#include <unordered_map>

#include "streams.h"

namespace emu {

struct StreamState {
    std::mutex lock;
    std::condition_variable wanted;   // the worker waits for goals
    std::condition_variable progress; // others wait for finished work
    bool worker_started = false;
    std::deque<Mark> goals;
    std::shared_ptr<Stream> legacy = std::make_shared<Stream>();
    std::shared_ptr<Stream> per_thread = std::make_shared<Stream>();
    std::unordered_map<void*, std::shared_ptr<Stream>> streams;
    std::unordered_map<void*, std::unique_ptr<Event>> events;
    std::unordered_map<Stream*, std::vector<Mark>> pending_waits;
    std::vector<std::shared_ptr<Capture>> captures;

    StreamState() { legacy->legacy = true; }
};

StreamState& stream_state();

// A stream waits for an event that was recorded in a capture: it becomes part of it. The lock is held.
Status join_capture(const std::shared_ptr<Stream>& stream, Event& event);

} // namespace emu
