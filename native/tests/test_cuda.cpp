// Captures from devices, played by the stand-in driver: kernels still queued at save, memory overwritten by
// the training stream as soon as it may be, delays, faults, ends at any time.
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "../capture.hpp"
#include "../crc32c.hpp"
#include "../error.hpp"
#include "../pinned.hpp"
#include "../relay.hpp"
#include "../scatter.hpp"
#include "../unload.hpp"
#include "check.hpp"
#include "stand_in.hpp"

namespace {

constexpr uint64_t kChunk = 16 << 10;

using stand_in::count, stand_in::delay, stand_in::fail, stand_in::function, stand_in::reset,
    stand_in::without;

void work(CUstream stream, int us, const std::byte* to, size_t nbytes, int value) {
  stand_in::work(stream, us, reinterpret_cast<CUdeviceptr>(to), nbytes, value);
}

struct Opened {
  std::shared_ptr<zs::Device> device;
  explicit Opened(int ordinal) : device(zs::Device::open(ordinal)) {}
  ~Opened() { device->close(); }
};

CUstream new_stream(const Opened& opened) {
  const zs::cuda::Context::Current current(*opened.device->context());
  CUstream stream = nullptr;
  ZS_CUDA(cuStreamCreateWithPriority, &stream, CU_STREAM_NON_BLOCKING, 0);
  return stream;
}

// Each tensor is one byte value all over, so that one kernel writes it whole.
struct State {
  std::vector<std::byte*> data;
  std::vector<uint64_t> sizes;
  std::vector<int16_t> places;
  std::vector<std::vector<std::byte>> host;
  std::shared_ptr<const zs::Plan> plan;
  zs::Arrays arrays;

  State(size_t count, const std::vector<const Opened*>& devices, bool some_on_host) {
    std::mt19937_64 random(count);
    auto geometries = std::make_shared<std::vector<zs::Geometry>>();
    std::vector<uint64_t> offsets;
    uint64_t at = 64;
    for (size_t k = 0; k < count; ++k) {
      // Some lie next to one another, on the device and in the image, and still in allocations of their own.
      const uint64_t nbytes = k % 3 != 2 ? 512 * (1 + random() % 40) : 4 * (1 + random() % 300);
      const size_t where = random() % (devices.size() + (some_on_host ? 1 : 0));
      sizes.push_back(nbytes);
      if (where == devices.size()) {
        places.push_back(zs::Arrays::kHost);
        host.emplace_back(nbytes);
        data.push_back(host.back().data());
      } else {
        const zs::cuda::Context::Current current(*devices[where]->device->context());
        CUdeviceptr memory = 0;
        ZS_CUDA(cuMemAlloc, &memory, nbytes);
        places.push_back(static_cast<int16_t>(devices[where]->device->ordinal()));
        data.push_back(reinterpret_cast<std::byte*>(memory));
      }
      const int64_t shape[] = {static_cast<int64_t>(nbytes / 4)}, strides[] = {4};
      geometries->push_back(zs::Geometry::of(4, shape, strides));
      offsets.push_back(at);
      at += nbytes + (k % 3 == 0 ? 0 : random() % 3);
    }
    plan = std::make_shared<zs::Plan>(at, std::string(64, 'h'), kChunk, offsets, sizes);
    arrays.data = data;
    arrays.geometries = std::move(geometries);
    arrays.places = std::make_shared<std::vector<int16_t>>(places);
  }

  // As training would: the host's at once, a device's by its stream.
  void write(size_t k, int value, const std::vector<zs::Training>& trainings, int us = 0) {
    if (places[k] == zs::Arrays::kHost) {
      std::memset(data[k], value, sizes[k]);
      return;
    }
    for (const zs::Training& training : trainings)
      if (training.device->ordinal() == places[k]) work(training.stream, us, data[k], sizes[k], value);
  }
  std::vector<std::byte> image(int value) const {
    std::vector<std::byte> result(plan->nbytes());
    std::memset(result.data(), 'h', 64);
    for (size_t k = 0; k < sizes.size(); ++k) std::memset(result.data() + plan->offset(k), value, sizes[k]);
    return result;
  }
};

// A segment that the driver knows, or does not.
struct Image {
  zs::Segment segment;
  Image(const State& state, const Opened* pin) : segment("test", state.plan->nbytes()) {
    if (pin != nullptr)
      segment.mapping()->attach(
          std::make_shared<zs::Pinned>(pin->device->context(), *segment.mapping(), uint64_t{1} << 30, 2));
  }
  std::byte* data() const { return segment.mapping()->data(); }
  bool is(const std::vector<std::byte>& expected) const {
    return std::memcmp(data(), expected.data(), expected.size()) == 0;
  }
};

std::vector<uint32_t> checksums_of(const std::vector<std::byte>& image) {
  std::vector<uint32_t> result;
  for (uint64_t at = 0; at < image.size(); at += kChunk)
    result.push_back(zs::crc32c(image.data() + at, std::min<uint64_t>(kChunk, image.size() - at)));
  return result;
}

struct Case {
  bool default_stream = false;
  uint64_t freeze_bytes = 0;
  uint64_t reserve = 0;
  uint64_t ahead = UINT64_MAX;
  bool pinned = true, some_on_host = true;
  int us = 0;
  int before_guard = 0;  // microseconds
  bool no_memory = false;
  uint64_t looked_at = 0;  // every so many-th chunk
};

void train(const Case& c) {
  reset();
  zs::Pool pool("test", 2);
  const Opened first(0), second(1);
  State state(120, {&first, &second}, c.some_on_host);
  const std::vector<zs::Training> trainings = {{first.device, c.default_stream ? nullptr : new_stream(first)},
                                               {second.device, new_stream(second)}};
  if (c.reserve != 0) {
    first.device->vram()->reserve(c.reserve, kChunk);
    second.device->vram()->reserve(c.reserve, kChunk);
  }
  if (c.looked_at != 0) first.device->probes(), second.device->probes();
  const Image image(state, c.pinned ? &first : nullptr);
  std::vector<uint32_t> at_once;
  std::vector<bool> is_at_once(120);
  for (uint32_t k = 0; k < 120; k += 7) at_once.push_back(k), is_at_once[k] = true;
  if (c.no_memory) fail("cuMemAlloc", 1, CUDA_ERROR_OUT_OF_MEMORY);
  delay(c.us);
  for (int step = 1; step < 6; ++step) {
    std::memset(image.data(), 0xEE, state.plan->nbytes());
    for (size_t k = 0; k < 120; ++k) state.write(k, step, trainings, k % 40 == 0 ? 2000 : 0);
    // Kernels that write this step's values are still queued.
    const auto capture = zs::Capture::begin(
        pool, state.plan, state.arrays, image.data(), std::make_shared<const std::vector<uint32_t>>(at_once),
        -1, trainings, c.ahead, false, {static_cast<uint64_t>(step), c.looked_at});
    for (uint32_t k : at_once) state.write(k, 0xBB, trainings);
    std::this_thread::sleep_for(std::chrono::microseconds(c.before_guard));
    const zs::Protection seen = capture->protect(c.freeze_bytes, trainings);
    CHECK(seen.frozen_bytes <= 3 * c.freeze_bytes);
    for (size_t k = 0; k < 120; ++k) state.write(k, 0xCC, trainings);
    CHECK(capture->wait_for(std::nullopt));
    capture->rethrow();
    const std::vector<std::byte> expected = state.image(step);
    CHECK(image.is(expected));
    CHECK(capture->checksums() == checksums_of(expected));
    CHECK(capture->nbytes_done() == expected.size());
    const zs::Comparison found = capture->compare_sources();
    CHECK(found.pieces.empty() && found.unchecked.empty() && (found.chunks != 0) == (c.looked_at != 0));
  }
  reset();
}

// With a safeguard taken away the same loop must come out wrong, or the tests above prove nothing: whatever
// takes its time, kernels of before the save or copies, takes longer than all the rest.
bool comes_out_wrong(const std::string& safeguard) {
  reset();
  ::setenv("ZEROSTALL_WITHOUT", safeguard.c_str(), 1);
  const Opened opened(0);
  ::unsetenv("ZEROSTALL_WITHOUT");
  zs::Pool pool("test", 2);
  State state(60, {&opened}, false);
  const std::vector<zs::Training> trainings = {{opened.device, new_stream(opened)}};
  const Image image(state, &opened);
  if (safeguard == "order") function<void(CUstream)>("fake_cuda_hold")(trainings[0].stream);
  if (safeguard == "guard") function<void()>("fake_cuda_hold_copies")();
  delay(200);
  for (size_t k = 0; k < 60; ++k) state.write(k, 1, trainings, k == 0 ? 20'000 : 0);
  const auto capture = zs::Capture::begin(pool, state.plan, state.arrays, image.data(), {}, -1, trainings);
  capture->protect(0, trainings);
  for (size_t k = 0; k < 60; ++k) state.write(k, 2, trainings);
  if (safeguard == "order") CHECK(capture->wait_for(std::nullopt));
  if (safeguard == "guard") {
    const zs::cuda::Context::Current current(*opened.device->context());
    ZS_CUDA(cuStreamSynchronize, trainings[0].stream);
  }
  function<void()>("fake_cuda_release")();
  CHECK(capture->wait_for(std::nullopt));
  return !image.is(state.image(1));
}

// To another device's memory first, and from there to where the rest of the image lies; every other time from
// the copy that a third vault has fetched.
void through_a_vault(uint64_t freeze_bytes, int us) {
  reset();
  zs::Pool pool("test", 2);
  const Opened first(0), second(1);
  State state(120, {&first}, true);
  const std::vector<zs::Training> trainings = {{first.device, new_stream(first)}};
  if (freeze_bytes != 0) first.device->vram()->reserve(freeze_bytes, kChunk);
  const Image image(state, &second);
  const zs::Vault vault(second.device->context(), 2 * state.plan->nbytes() + 4096);
  const zs::Vault mirror(first.device->context(), state.plan->nbytes());
  const std::vector<uint32_t> at_once = {0, 7, 50, 119};
  delay(us);
  for (int step = 1; step < 6; ++step) {
    const uint64_t place = step % 2 == 0 ? 0 : state.plan->nbytes() / 512 * 512 + 512;
    std::memset(image.data(), 0xEE, state.plan->nbytes());
    for (size_t k = 0; k < 120; ++k) state.write(k, step, trainings, k % 40 == 0 ? 2000 : 0);
    const auto capture = zs::Capture::begin(pool, state.plan, state.arrays, image.data(),
                                            std::make_shared<const std::vector<uint32_t>>(at_once), -1,
                                            trainings, UINT64_MAX, false, {}, vault.at() + place);
    for (uint32_t k : at_once) state.write(k, 0xBB, trainings);
    capture->protect(freeze_bytes, trainings);
    for (size_t k = 0; k < 120; ++k) state.write(k, 0xCC, trainings);
    CHECK(capture->wait_for(std::nullopt));
    capture->rethrow();
    const auto relay =
        zs::Relay::begin(pool, first.device, mirror, 0, vault.at() + place, capture->on_devices());
    if (step % 2 == 0) CHECK(relay->wait_for(std::nullopt));
    const auto unload = step % 2 == 0
                            ? zs::Unload::begin(pool, first.device, mirror, 0, image.data(),
                                                state.plan->nbytes(), kChunk, capture->on_devices())
                            : zs::Unload::begin(pool, second.device, vault, place, image.data(),
                                                state.plan->nbytes(), kChunk, capture->on_devices());
    CHECK(unload->wait_for(std::nullopt));
    unload->rethrow();
    const std::vector<std::byte> expected = state.image(step);
    CHECK(image.is(expected));
    CHECK(unload->checksums() == checksums_of(expected));
    CHECK(relay->wait_for(std::nullopt));
    relay->rethrow();
  }
  reset();
}

// What a guard may still move aside is not given to the device long before. The rest is, by calls of some
// chunks each, so that a guard finds nothing to do.
void few_are_in_flight() {
  constexpr int kMost = 16;
  for (const uint64_t ahead : {uint64_t{0}, UINT64_MAX}) {
    reset();
    const Opened opened(0);
    zs::Pool pool("test", 2);
    State state(600, {&opened}, false);
    const int chunks = static_cast<int>(state.plan->chunks());
    CHECK(chunks > 4 * kMost);
    const std::vector<zs::Training> trainings = {{opened.device, new_stream(opened)}};
    const Image image(state, &opened);
    for (size_t k = 0; k < 600; ++k) state.write(k, 1, trainings);
    function<void(CUstream)>("fake_cuda_hold")(trainings[0].stream);
    const auto capture =
        zs::Capture::begin(pool, state.plan, state.arrays, image.data(), {}, -1, trainings, ahead);
    const int calls = ((ahead == 0 ? kMost : chunks) + 3) / 4;
    while (count("cuStreamWriteValue64") < calls) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(count("cuStreamWriteValue64") <= calls + 1);
    // The guard has the rest follow by few calls.
    CHECK(capture->protect(0, trainings).pending <= static_cast<uint64_t>(ahead == 0 ? chunks - kMost : 0));
    CHECK(count("cuStreamWriteValue64") < chunks / 2);
    CHECK(capture->pending().empty());
    function<void()>("fake_cuda_release")();
    CHECK(capture->wait_for(std::nullopt));
    capture->rethrow();
    CHECK(image.is(state.image(1)));
    CHECK(capture->checksums() == checksums_of(state.image(1)));
  }
}

void refused_and_broken() {
  zs::Pool pool("test", 2);
  const Opened opened(0);
  State state(60, {&opened}, true);
  const std::vector<zs::Training> trainings = {{opened.device, new_stream(opened)}};
  const Image image(state, &opened);
  const auto begin = [&] {
    return zs::Capture::begin(pool, state.plan, state.arrays, image.data(), {}, -1, trainings);
  };
  const auto kind_of = [](auto&& f) {
    try {
      f();
    } catch (const zs::Error& error) {
      return error.kind;
    }
    return zs::Kind::format;
  };
  for (const char* function : {"cuMemcpyDtoHAsync", "cuStreamWriteValue64"}) {
    // The copy thread alone makes six such calls, and may have made them all before the guard comes.
    for (const int nth : {1, 2, 5}) {
      reset();
      without("cuMemcpyBatchAsync");
      for (size_t k = 0; k < 60; ++k) state.write(k, 1, trainings);
      fail(function, nth, CUDA_ERROR_LAUNCH_FAILED);
      const auto capture = begin();
      if (nth == 5) capture->protect(0, trainings);
      CHECK(capture->wait_for(std::nullopt));
      CHECK(kind_of([&] { capture->rethrow(); }) == zs::Kind::device);
      reset();
      const auto next = begin();  // the one after is whole
      CHECK(next->wait_for(std::nullopt));
      next->rethrow();
      CHECK(image.is(state.image(1)));
    }
  }
  reset();
  fail("cuEventRecord", 1, CUDA_ERROR_LAUNCH_FAILED);
  CHECK(kind_of(begin) == zs::Kind::device);
  reset();
  fail("cuStreamWaitEvent", 1, CUDA_ERROR_LAUNCH_FAILED);
  CHECK(kind_of([&] {
          const auto capture = begin();  // the copy thread sees to the order
          CHECK(capture->wait_for(std::nullopt));
          capture->rethrow();
        }) == zs::Kind::device);
  reset();
  function<void(CUstream, int)>("fake_cuda_capturing")(trainings[0].stream, 1);
  CHECK(kind_of(begin) == zs::Kind::capability);
  function<void(CUstream, int)>("fake_cuda_capturing")(trainings[0].stream, 0);
  CHECK(kind_of([&] { zs::Capture::begin(pool, state.plan, state.arrays, image.data(), {}); }) ==
        zs::Kind::usage);
  CHECK(kind_of([] { zs::Device::open(7); }) == zs::Kind::device);
}

void a_stream_dies() {
  reset();
  zs::Pool pool("test", 2);
  const Opened opened(0);
  State state(60, {&opened}, false);
  const std::vector<zs::Training> trainings = {{opened.device, new_stream(opened)}};
  const Image image(state, &opened);
  function<void()>("fake_cuda_hold_copies")();
  const auto capture = zs::Capture::begin(pool, state.plan, state.arrays, image.data(), {}, -1, trainings);
  {
    const zs::cuda::Context::Current current(*opened.device->context());
    for (size_t k = 0; k < 60; ++k) ZS_CUDA(cuMemFree, reinterpret_cast<CUdeviceptr>(state.data[k]));
  }
  function<void()>("fake_cuda_release")();
  CHECK(capture->wait_for(std::nullopt));
  bool threw = false;
  try {
    capture->rethrow();
  } catch (const zs::Error& error) {
    threw = error.kind == zs::Kind::device;
  }
  CHECK(threw);
  reset();
}

void ends_at_any_time() {
  std::mt19937 random(5);
  for (int k = 0; k < 40; ++k) {
    reset();
    zs::Pool pool("test", 2);
    auto opened = std::make_unique<Opened>(0);
    State state(80, {opened.get()}, true);
    const std::vector<zs::Training> trainings = {{opened->device, new_stream(*opened)}};
    const Image image(state, opened.get());
    opened->device->vram()->reserve(200'000, kChunk);
    opened->device->probes();
    delay(20);
    const auto capture = zs::Capture::begin(pool, state.plan, state.arrays, image.data(), {}, -1, trainings,
                                            4, false, {static_cast<uint64_t>(k), 3});
    const std::chrono::microseconds one(random() % 1500), two(random() % 1500);
    std::thread other([&, one] {
      std::this_thread::sleep_for(one);
      if (k % 3 == 0) capture->cancel();
      if (k % 3 == 1) opened->device->close();
      if (k % 3 == 2) pool.close();
    });
    std::this_thread::sleep_for(two);
    capture->protect(k % 2 == 0 ? 200'000 : 0, trainings);
    for (size_t n = 0; n < 80; ++n) state.write(n, 3, trainings);
    CHECK(capture->wait_for(std::nullopt));
    other.join();
  }
  reset();
}

void there_and_back(bool pinned) {
  reset();
  zs::Pool pool("test", 2);
  const Opened first(0), second(1);
  State state(90, {&first, &second}, true);
  const std::vector<zs::Training> trainings = {{first.device, new_stream(first)}, {second.device, nullptr}};
  const Image image(state, pinned ? &first : nullptr);
  const std::vector<std::byte> expected = state.image(9);
  std::memcpy(image.data(), expected.data(), expected.size());
  delay(20);
  std::vector<uint32_t> all(90);
  std::iota(all.begin(), all.end(), 0);
  for (size_t k = 0; k < 90; ++k) state.write(k, 1, trainings, 50);  // must not come after what is restored
  const auto scatter =
      zs::Scatter::begin(pool, state.plan, state.arrays, image.data(), all, std::nullopt, trainings);
  CHECK(scatter->wait_for(std::nullopt));
  scatter->rethrow();
  for (size_t k = 0; k < 90; ++k)
    for (uint64_t at = 0; at < state.sizes[k]; at += 97) CHECK(state.data[k][at] == std::byte{9});
  reset();
  fail("cuMemcpyHtoDAsync", 1, CUDA_ERROR_LAUNCH_FAILED);
  without("cuMemcpyBatchAsync");
  const auto broken =
      zs::Scatter::begin(pool, state.plan, state.arrays, image.data(), all, std::nullopt, trainings);
  CHECK(broken->wait_for(std::nullopt));
  bool threw = false;
  try {
    broken->rethrow();
  } catch (const zs::Error&) {
    threw = true;
  }
  CHECK(threw);
  reset();
}

}  // namespace

int main() {
  train({});
  train({.default_stream = true, .us = 50});
  train({.us = 50, .before_guard = 4000});
  train({.ahead = 2, .us = 50, .before_guard = 3000});
  train({.pinned = false});
  train({.some_on_host = false, .us = 30});
  train({.freeze_bytes = UINT64_MAX / 4, .reserve = 1 << 20, .ahead = 2, .us = 30});
  train({.default_stream = true, .freeze_bytes = 300'000, .reserve = 200'000, .ahead = 2, .us = 30});
  train({.us = 30, .no_memory = true});
  train(
      {.freeze_bytes = 1 << 20, .reserve = 1 << 20, .ahead = zs::kForecast, .us = 30, .before_guard = 1000});
  train({.us = 30, .looked_at = 1});
  train({.freeze_bytes = 1 << 20, .reserve = 1 << 20, .ahead = 2, .us = 30, .looked_at = 2});
  CHECK(comes_out_wrong("order"));
  CHECK(comes_out_wrong("guard"));
  CHECK(!comes_out_wrong("nothing"));
  through_a_vault(0, 0);
  through_a_vault(100 << 10, 100);
  few_are_in_flight();
  refused_and_broken();
  a_stream_dies();
  ends_at_any_time();
  there_and_back(true);
  there_and_back(false);
  return 0;
}
