// Captures under load: many pieces, several jobs at once, sources overwritten the moment protect() returns. A
// thread sanitizer sees any read that comes later; the image and its checksums show any that went wrong.
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "../capture.hpp"
#include "../crc32c.hpp"
#include "../scatter.hpp"
#include "../verify.hpp"
#include "check.hpp"

namespace {

constexpr uint64_t kChunk = 64 << 10;

// Tensors, half of them transposed matrices, and a plan for them with a header and gaps.
struct State {
  std::vector<std::vector<uint32_t>> tensors;
  std::shared_ptr<const zs::Plan> plan;
  zs::Arrays arrays;

  State(size_t count, uint64_t seed) {
    std::mt19937_64 random(seed);
    auto geometries = std::make_shared<std::vector<zs::Geometry>>();
    std::vector<uint64_t> offsets, sizes;
    uint64_t at = 100;
    for (size_t k = 0; k < count; ++k) {
      const auto rows = static_cast<int64_t>(random() % (k % 50 == 0 ? 300 : 6));
      const auto columns = static_cast<int64_t>(1 + random() % (k % 50 == 0 ? 300 : 8));
      tensors.emplace_back(static_cast<size_t>(rows * columns));
      std::iota(tensors.back().begin(), tensors.back().end(), static_cast<uint32_t>(random()));
      const bool turned = random() % 2 == 0;
      const int64_t shape[] = {turned ? columns : rows, turned ? rows : columns};
      const int64_t strides[] = {turned ? 4 : 4 * columns, turned ? 4 * columns : 4};
      geometries->push_back(zs::Geometry::of(4, shape, strides));
      offsets.push_back(at);
      sizes.push_back(geometries->back().nbytes);
      at += sizes.back() + random() % 3;
    }
    plan = std::make_shared<zs::Plan>(at, std::string(100, 'h'), kChunk, offsets, sizes);
    for (auto& tensor : tensors) arrays.data.push_back(reinterpret_cast<std::byte*>(tensor.data()));
    arrays.geometries = std::move(geometries);
  }

  std::vector<std::byte> image() const {
    std::vector<std::byte> result(plan->nbytes());
    std::memset(result.data(), 'h', 100);
    for (size_t k = 0; k < tensors.size(); ++k)
      zs::gather(result.data() + plan->offset(k), arrays.data[k], (*arrays.geometries)[k], 0, plan->size(k));
    return result;
  }

  void overwrite() {
    for (auto& tensor : tensors)
      for (uint32_t& value : tensor) ++value;
  }
};

std::vector<uint32_t> checksums_of(const std::vector<std::byte>& image) {
  std::vector<uint32_t> result;
  for (uint64_t at = 0; at < image.size(); at += kChunk)
    result.push_back(zs::crc32c(image.data() + at, std::min<uint64_t>(kChunk, image.size() - at)));
  return result;
}

void train(unsigned threads, uint64_t freeze_bytes, size_t count, int steps) {
  zs::Pool pool("test", threads);
  State state(count, count);
  std::vector<uint32_t> at_once;
  for (uint32_t k = 0; k < count; k += 5) at_once.push_back(k);
  std::vector<std::byte> image(state.plan->nbytes(), std::byte{0xEE});
  for (int step = 0; step < steps; ++step) {
    const std::vector<std::byte> expected = state.image();
    const auto capture = zs::Capture::begin(pool, state.plan, state.arrays, image.data(),
                                            std::make_shared<const std::vector<uint32_t>>(at_once));
    for (uint32_t k : at_once)
      for (uint32_t& value : state.tensors[k]) value = 0;
    const zs::Protection seen = capture->protect(freeze_bytes);
    CHECK(seen.frozen_bytes <= freeze_bytes);
    state.overwrite();
    CHECK(capture->wait_for(std::nullopt));
    capture->rethrow();
    CHECK(image == expected);
    CHECK(capture->checksums() == checksums_of(expected));
    CHECK(capture->nbytes_done() == image.size());
  }
}

void several_at_once() {
  zs::Pool pool("test", 3);
  State state(400, 3);
  const std::vector<std::byte> expected = state.image();
  std::vector<std::thread> users;
  for (int user = 0; user < 4; ++user)
    users.emplace_back([&] {
      std::vector<std::byte> image(state.plan->nbytes());
      for (int k = 0; k < 20; ++k) {
        std::memset(image.data(), 0xEE, image.size());
        const auto capture = zs::Capture::begin(pool, state.plan, state.arrays, image.data(), {});
        if (k % 2 == 0) capture->protect(k % 4 == 0 ? 1 << 20 : 0);
        CHECK(capture->wait_for(std::nullopt) && image == expected);
        const auto verify = zs::Verify::begin(pool, image.data(), image.size(), kChunk, capture->checksums());
        CHECK(verify->wait_for(std::nullopt) && verify->bad().empty());
      }
    });
  for (auto& user : users) user.join();
}

void cancelled_at_any_time() {
  zs::Pool pool("test", 2);
  State state(600, 4);
  std::vector<std::byte> image(state.plan->nbytes());
  std::mt19937 random(5);
  for (int k = 0; k < 100; ++k) {
    const auto capture = zs::Capture::begin(pool, state.plan, state.arrays, image.data(), {});
    std::thread other([&] {
      if (k % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      capture->cancel();
    });
    capture->protect(k % 2 == 0 ? 200'000 : 0);
    state.overwrite();
    CHECK(capture->wait_for(std::nullopt));
    other.join();
  }
}

void closed_at_any_time() {
  State state(600, 6);
  std::vector<std::byte> image(state.plan->nbytes());
  for (int k = 0; k < 30; ++k) {
    auto pool = std::make_unique<zs::Pool>("test", 2);
    const auto capture = zs::Capture::begin(*pool, state.plan, state.arrays, image.data(), {});
    std::thread other([&] { pool->close(); });
    capture->protect(k % 2 == 0 ? UINT64_MAX : 0);
    state.overwrite();
    CHECK(capture->wait_for(std::nullopt));
    other.join();
    pool.reset();
  }
}

void there_and_back() {
  zs::Pool pool("test", 2);
  State state(500, 8), copy(500, 8);
  std::vector<std::byte> image(state.plan->nbytes());
  const auto capture = zs::Capture::begin(pool, state.plan, state.arrays, image.data(), {});
  CHECK(capture->wait_for(std::nullopt));
  for (auto& tensor : copy.tensors) std::fill(tensor.begin(), tensor.end(), 0);
  std::vector<uint32_t> all(500);
  std::iota(all.begin(), all.end(), 0);
  const auto scatter = zs::Scatter::begin(pool, state.plan, copy.arrays, image.data(), all);
  CHECK(scatter->wait_for(std::nullopt));
  CHECK(copy.tensors == state.tensors);
}

}  // namespace

int main() {
  train(1, 0, 300, 10);
  train(2, 0, 300, 20);
  train(2, 300'000, 300, 20);
  train(3, UINT64_MAX, 300, 20);
  train(2, 100'000, 10'000, 5);
  several_at_once();
  cancelled_at_any_time();
  closed_at_any_time();
  there_and_back();
  return 0;
}
