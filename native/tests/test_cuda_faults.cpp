// Captures from devices that fail, are cancelled or closed at any time, and the way back to devices; played
// by the stand-in driver.
#include <numeric>
#include <thread>

#include "../error.hpp"
#include "../scatter.hpp"
#include "training.hpp"

namespace {

using stand_in::delay, stand_in::fail, stand_in::function, stand_in::reset, stand_in::without;
using namespace training;

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
  refused_and_broken();
  a_stream_dies();
  ends_at_any_time();
  there_and_back(true);
  there_and_back(false);
  return 0;
}
