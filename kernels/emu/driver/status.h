// Result codes of the driver API that the stand-in gives, with their names and explanations.
#pragma once

namespace emu {

enum Status : int {
    success = 0,
    invalid_value = 1,
    out_of_memory = 2,
    not_initialized = 3,
    no_device = 100,
    invalid_device = 101,
    invalid_image = 200,
    invalid_context = 201,
    file_not_found = 301,
    invalid_handle = 400,
    not_found = 500,
    not_ready = 600,
    illegal_address = 700,
    launch_out_of_resources = 701,
    launch_failed = 719,
    not_supported = 801,
    capture_unsupported = 900,
    capture_invalidated = 901,
    capture_merge = 902,
    capture_unmatched = 903,
    capture_unjoined = 904,
    capture_isolation = 905,
    captured_event = 907,
    capture_wrong_thread = 908,
    unknown = 999,
};

// Null for a code that is not in the table.
const char* status_name(int code);
const char* status_text(int code);

} // namespace emu
