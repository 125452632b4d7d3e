// Captures from devices, played by the stand-in driver: kernels still queued at save, memory overwritten by
// the training stream as soon as it may be, delays.
#include <thread>

#include "training.hpp"

namespace {

using stand_in::count, stand_in::delay, stand_in::fail, stand_in::function, stand_in::reset;
using namespace training;

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

// What a guard may still move aside is not given to the device long before, and the rest twice as fast as it
// lands; by calls of some chunks each where training waits for them all, else one by one, so that a copy of
// its own gets in between.
void few_are_in_flight() {
  constexpr int kMost = 16, kAtATime = 4;
  for (const uint64_t ahead : {uint64_t{0}, UINT64_MAX, zs::kForecast}) {
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
    const int marks = ahead == zs::kForecast ? kMost : kMost / kAtATime;
    while (count("cuStreamWriteValue64") < marks) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(count("cuStreamWriteValue64") == marks);
    // The guard has the rest follow by few calls.
    const uint64_t pending = capture->protect(0, trainings).pending;
    CHECK(pending == (ahead == zs::kForecast ? 0 : static_cast<uint64_t>(chunks - kMost)));
    CHECK(count("cuStreamWriteValue64") - marks < (chunks - kMost) / 2);
    CHECK(capture->pending().empty());
    function<void()>("fake_cuda_release")();
    CHECK(capture->wait_for(std::nullopt));
    capture->rethrow();
    CHECK(image.is(state.image(1)));
    CHECK(capture->checksums() == checksums_of(state.image(1)));
  }
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
  few_are_in_flight();
  return 0;
}
