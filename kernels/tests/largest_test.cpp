// The largest logits of rows against a sort: ties at the end of the list and beyond it, values that are no numbers, rows
// whose large values are all one thread's.
#include <algorithm>
#include <limits>

#include "check.h"
#include "device.h"

namespace {

using check::Case;
using check::Grid;
using check::Random;
using device::Buffer;

constexpr float NAN_VALUE = std::numeric_limits<float>::quiet_NaN();
constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr uint32_t UNTOUCHED = 0xdddddddd;
constexpr int KINDS = 18;

// One row of each kind, whatever the vocabulary and k.
void fill(Random& random, int kind, int k, int capacity, float* row, int vocabulary) {
    const auto all = [&](float value) { std::fill(row, row + vocabulary, value); };
    const auto scatter = [&](int count, float value) {
        for (int i = 0; i < count; ++i) row[random.below(vocabulary)] = value;
    };
    // Exactly so many tokens, as far as there are, far apart.
    const auto spread = [&](int count, float value) {
        count = std::min(count, vocabulary);
        for (int i = 0; i < count; ++i) row[static_cast<int64_t>(i) * vocabulary / count] = value;
    };
    for (int i = 0; i < vocabulary; ++i) row[i] = random.normal() * 4;
    switch (kind) {
    case 0: break;
    case 1:
        for (int i = 0; i < vocabulary; ++i) row[i] = std::round(row[i] * 8) / 8;
        break;
    case 2: all(-1.5f); break;
    case 3:
        for (int i = 0; i < vocabulary; ++i) row[i] = random.below(2) == 0 ? 0.0f : -0.0f;
        spread(k - 1, 1);
        break;
    case 4: all(NAN_VALUE); break;
    case 5: all(-INFINITE); break;
    case 6: all(-INFINITE), spread(std::max(1, k / 2), -7), row[0] = NAN_VALUE; break;
    case 7: scatter(3, INFINITE), scatter(3, NAN_VALUE), scatter(3, -INFINITE); break;
    case 8: spread(k + 3, INFINITE); break;
    // As many ties as the list takes, and one more.
    case 9: spread(capacity, 40), row[0] = 41; break;
    case 10: spread(capacity + 1, 40); break;
    // The largest are all one thread's: whether it loads them four at a time or one by one.
    case 11:
        for (int i = 0; i < vocabulary; i += 4096) {
            for (int j = i; j < std::min(i + 4, vocabulary); ++j) row[j] = 50 + random.normal();
        }
        break;
    case 12:
        for (int i = 0; i < vocabulary; i += 1024) row[i] = 50 + random.normal();
        break;
    case 13:
        for (int i = 0; i < vocabulary; ++i) row[i] = 1 + random.below(1 << 20) * 0x1p-23f;
        break;
    case 14:
        for (int i = 0; i < vocabulary; ++i) row[i] = -std::abs(row[i]) * 1e-39f;
        break;
    // Fewer distinct values than anybody wants, in large blocks.
    case 15:
        for (int i = 0; i < vocabulary; ++i) row[i] = static_cast<float>(i * 3 / vocabulary);
        break;
    // So many large ones in fewer than k threads that the threads' largest say nothing.
    case 16:
        for (int i = 0; i < vocabulary; ++i) row[i] += i % 4096 < 4 * (k - 1) ? 100 : 0;
        break;
    case 17:
        for (int i = 0; i < vocabulary; ++i) row[i] += i % 1024 < k - 1 ? 100 : 0;
        break;
    }
}

void test_largest(int vocabulary, int stride, int k, int rows, int first_kind) {
    const int capacity = 2 * std::max(k, 16), words = 1 + 2 * capacity;
    Case test("largest_f32 " + std::to_string(k) + " of " + std::to_string(vocabulary) + " (" + std::to_string(stride) + "), " +
              std::to_string(rows) + " rows");
    Random random(vocabulary * 31 + k);
    std::vector<float> logits(std::max<size_t>(1, static_cast<size_t>(rows) * stride), 1e30f);
    for (int row = 0; row < rows; ++row) {
        fill(random, (first_kind + row) % KINDS, k, capacity, logits.data() + static_cast<size_t>(row) * stride, vocabulary);
    }
    std::vector<int> header(16, 0);
    header[0] = 1, header[4] = rows;
    const Buffer<int> header_memory(header);
    const Buffer<float> logits_memory(logits);
    const Buffer<uint32_t> out(std::vector<uint32_t>(static_cast<size_t>(rows + 1) * words, UNTOUCHED));
    device::launch("largest_f32", {3}, 1024, header_memory, 4, logits_memory, stride, vocabulary, k, capacity, out);
    const auto results = out.read();
    for (int row = 0; row < rows; ++row) {
        const float* values = logits.data() + static_cast<size_t>(row) * stride;
        const uint32_t* list = results.data() + static_cast<size_t>(row) * words;
        std::vector<uint32_t> order;
        for (int token = 0; token < vocabulary; ++token) {
            if (values[token] > -INFINITE) order.push_back(token);
        }
        std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return values[a] > values[b]; });
        size_t count = std::min<size_t>(k, order.size());
        while (count > 0 && count < order.size() && values[order[count]] == values[order[count - 1]]) ++count;
        order.resize(count);
        std::sort(order.begin(), order.end());
        const std::string where = "row " + std::to_string(row) + " (kind " + std::to_string((first_kind + row) % KINDS) + ")";
        test.expect(list[0] == count, where + " has " + std::to_string(list[0]) + ", not " + std::to_string(count));
        const size_t listed = count <= static_cast<size_t>(capacity) ? count : 0;
        for (int place = 0; place < capacity; ++place) {
            uint32_t value = UNTOUCHED, token = UNTOUCHED;
            if (static_cast<size_t>(place) < listed) {
                token = order[place];
                std::memcpy(&value, values + token, 4);
            }
            test.expect(list[1 + place] == value, where + ": value " + std::to_string(place) + " differs");
            test.expect(list[1 + capacity + place] == token, where + ": token " + std::to_string(place) + " differs");
        }
    }
    for (int word = rows * words; word < (rows + 1) * words; ++word) test.expect(results[word] == UNTOUCHED, "wrote beyond the rows");
    test.add_hash(results);
}

const check::Family family("largest", [](Grid grid) {
    for (int vocabulary : {1, 3, 63, 1000, 1027, 4096}) {
        for (int k : {1, 20, 256}) test_largest(vocabulary, vocabulary, k, KINDS, 0);
    }
    // Rows that start at multiples of four, and that end between them.
    test_largest(8190, 8192, 50, KINDS, 0);
    test_largest(32001, 32001, 20, 3, 11);
    test_largest(32001, 32001, 256, 3, 15);
    test_largest(32002, 32004, 100, 3, 15);
    test_largest(1000, 1000, 2, 0, 0);
    if (grid != Grid::Deep) return;
    for (int rows : {1, 2, 31, 64}) test_largest(2000, 2000, 20, rows, 5);
    for (int k : {1, 2, 3, 7, 16, 17, 31, 64, 100, 128, 200, 255}) test_largest(5003, 5004, k, KINDS, 0);
    for (int k : {1, 20, 256}) test_largest(151936, 151936, k, KINDS, 0);
    test_largest(200003, 200003, 40, KINDS, 0);
});

} // namespace
