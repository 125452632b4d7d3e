// Gather and scatter against an element-by-element walk, for random shapes, strides, item sizes and byte
// ranges.
#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "../copy.hpp"
#include "check.hpp"

namespace {

std::mt19937_64 random_bits(7);

uint64_t below(uint64_t n) {
  return random_bits() % n;
}

struct Case {
  std::vector<std::byte> memory;
  std::byte* data;
  std::vector<int64_t> shape, strides;
  size_t item;
  std::vector<std::byte> packed;  // what the array's logical bytes are
  std::vector<std::byte*> places;
};

// A view of a block of memory with permuted, stepped and reversed dimensions.
Case make(bool expanded) {
  static constexpr size_t kItems[] = {1, 2, 3, 4, 8, 16, 24};
  Case c;
  c.item = kItems[below(7)];
  const size_t dims = below(5);
  std::vector<int64_t> steps;
  int64_t extent = static_cast<int64_t>(c.item);
  std::vector<size_t> order;
  for (size_t k = 0; k < dims; ++k) order.push_back(k);
  std::shuffle(order.begin(), order.end(), random_bits);
  c.shape.resize(dims), c.strides.resize(dims);
  int64_t start = 0;
  for (size_t k : order) {
    c.shape[k] = static_cast<int64_t>(below(20) == 0 ? 0 : 1 + below(k == order.front() ? 40 : 6));
    const int64_t step = static_cast<int64_t>(1 + below(3) / 2);
    c.strides[k] = extent * step;
    extent *= step * std::max<int64_t>(c.shape[k], 1);
    if (below(6) == 0 && c.shape[k] > 0) {  // reversed
      start += c.strides[k] * (c.shape[k] - 1);
      c.strides[k] = -c.strides[k];
    }
    if (expanded && below(4) == 0) c.strides[k] = 0;
  }
  c.memory.resize(static_cast<size_t>(extent) + 64);
  for (auto& byte : c.memory) byte = static_cast<std::byte>(random_bits());
  c.data = c.memory.data() + (expanded ? 0 : start);
  if (expanded)
    for (auto& stride : c.strides) stride = std::abs(stride);
  uint64_t count = 1;
  for (int64_t size : c.shape) count *= static_cast<uint64_t>(size);
  for (uint64_t e = 0; e < count; ++e) {
    std::byte* at = c.data;
    uint64_t rest = e;
    for (size_t k = dims; k-- > 0;) {
      at += static_cast<int64_t>(rest % static_cast<uint64_t>(c.shape[k])) * c.strides[k];
      rest /= static_cast<uint64_t>(c.shape[k]);
    }
    c.places.push_back(at);
    c.packed.insert(c.packed.end(), at, at + c.item);
  }
  return c;
}

void large_transposed() {
  for (const size_t item : {1, 2, 4, 8}) {
    const int64_t rows = 301, columns = 517, step = static_cast<int64_t>(item);
    std::vector<std::byte> memory(static_cast<size_t>(rows * columns) * item);
    for (auto& byte : memory) byte = static_cast<std::byte>(random_bits());
    const int64_t shape[] = {columns, rows}, strides[] = {step, step * columns};
    const zs::Geometry geometry = zs::Geometry::of(static_cast<uint32_t>(item), shape, strides);
    std::vector<std::byte> packed(memory.size()), back(memory.size());
    for (uint64_t at = 0; at < packed.size();) {
      const uint64_t stop = std::min<uint64_t>(at + 1 + below(60'000), packed.size());
      zs::gather(packed.data() + at, memory.data(), geometry, at, stop);
      zs::scatter(back.data(), packed.data() + at, geometry, at, stop);
      at = stop;
    }
    for (int64_t c = 0; c < columns; ++c)
      for (int64_t r = 0; r < rows; ++r)
        CHECK(std::memcmp(packed.data() + (c * rows + r) * step, memory.data() + (r * columns + c) * step,
                          item) == 0);
    CHECK(back == memory);
  }
}

}  // namespace

int main() {
  for (int i = 0; i < 4000; ++i) {
    const bool expanded = i % 4 == 0;
    Case c = make(expanded);
    const zs::Geometry geometry = zs::Geometry::of(static_cast<uint32_t>(c.item), c.shape, c.strides);
    CHECK(geometry.nbytes == c.packed.size());
    const uint64_t n = c.packed.size(), begin = n == 0 ? 0 : below(n),
                   end = begin + (n == 0 ? 0 : below(n - begin + 1));
    std::vector<std::byte> out(end - begin + 2, std::byte{0xEE});
    zs::gather(out.data() + 1, c.data, geometry, begin, end);
    CHECK(out.front() == std::byte{0xEE} && out.back() == std::byte{0xEE});
    CHECK(std::equal(out.begin() + 1, out.end() - 1, c.packed.begin() + static_cast<ptrdiff_t>(begin)));
    if (expanded) continue;
    std::vector<std::byte> fresh(end - begin);
    for (auto& byte : fresh) byte = static_cast<std::byte>(random_bits());
    std::vector<std::byte> expected = c.memory;
    for (uint64_t at = begin; at < end; ++at)
      expected[static_cast<size_t>(c.places[at / c.item] - c.memory.data()) + at % c.item] =
          fresh[at - begin];
    zs::scatter(c.data, fresh.data(), geometry, begin, end);
    CHECK(c.memory == expected);
  }
  large_transposed();
  return 0;
}
