// A stand-in for libcuda.so.1: host memory plays the device's, a thread plays each stream. What is queued
// runs later and out of step with other streams, as on a device, so that a forgotten order shows in the
// bytes. One file a subject: what tests ask of it (this one), devices, streams, memory, copies, and kernels,
// which are interpreted from their text (ptx).
//
// Beside the driver's functions, tests have:
//   fake_cuda_reset()                    no delays, no faults, no counts (memory and streams stay)
//   fake_cuda_delay(microseconds)        every copy takes up to twice that long, at random
//   fake_cuda_fail(function, nth, code)  the nth call from now on of that function fails
//   fake_cuda_without(function)          that function fails with CUDA_ERROR_NOT_SUPPORTED until reset
//   fake_cuda_work(stream, microseconds, to, nbytes, value)  a kernel: takes its time, then fills memory
//   fake_cuda_hold(stream)               what is queued behind this waits for fake_cuda_release(), or a reset
//   fake_cuda_hold_copies()              so does every copy, of whatever stream
//   fake_cuda_capturing(stream, yes)     the stream is being captured into a graph
//   fake_cuda_count(function)            calls since reset
//   fake_cuda_calls()                    calls of the driver by this thread, since it began
//   fake_cuda_allocated()                bytes of the device's memory in use
//
// Environment: FAKE_CUDA_DEVICES says how many devices there are (2), FAKE_CUDA_LINKS which reach each other
// ("0-1,2-3"; all by default, "" for none), FAKE_CUDA_MEMORY how many bytes one process may allocate in all.
// FAKE_CUDA_FAIL="word function nth code" is fake_cuda_fail in processes whose command line has that word.
// A device's memory is a memfd: by its handle another process maps it for as long as the owner lives, and
// keeps what it has mapped.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>

#include "fake.hpp"
#include "streams.hpp"

namespace fake {
namespace {

// What a test has asked for, and what was called.
struct Wishes {
  std::mutex mutex;
  std::map<std::string, std::pair<int, CUresult>> faults;
  std::set<std::string> missing;
  std::map<std::string, int> counts;
  std::atomic<int> delay{0};
};

bool commanded(const std::string& word) {
  std::ifstream file("/proc/self/cmdline");
  const std::string line((std::istreambuf_iterator<char>(file)), {});
  return line.find(word) != std::string::npos;
}

Wishes* of_environment() {
  auto* const wishes = new Wishes;  // streams run until the process ends
  const char* setting = std::getenv("FAKE_CUDA_FAIL");
  std::istringstream words(setting != nullptr ? setting : "");
  std::string word, function;
  int nth = 0, code = 0;
  if (words >> word >> function >> nth >> code && commanded(word))
    wishes->faults[function] = {nth, static_cast<CUresult>(code)};
  return wishes;
}

Wishes& wishes() {
  static auto* const the = of_environment();
  return *the;
}

thread_local int calls = 0;

}  // namespace

CUresult enter(const char* function) {
  Wishes& w = wishes();
  ++calls;
  const std::lock_guard lock(w.mutex);
  ++w.counts[function];
  if (w.missing.count(function) != 0) return CUDA_ERROR_NOT_SUPPORTED;
  const auto fault = w.faults.find(function);
  if (fault == w.faults.end() || --fault->second.first != 0) return CUDA_SUCCESS;
  const CUresult code = fault->second.second;
  w.faults.erase(fault);
  return code;
}

void dawdle() {
  const int delay = wishes().delay.load();
  if (delay == 0) return;
  thread_local std::mt19937 random(
      static_cast<unsigned>(std::hash<std::thread::id>()(std::this_thread::get_id())));
  std::this_thread::sleep_for(std::chrono::microseconds(random() % (2 * static_cast<unsigned>(delay))));
}

}  // namespace fake

EXPORT void fake_cuda_reset() {
  fake::open_gate();
  fake::forget_errors();
  fake::Wishes& w = fake::wishes();
  const std::lock_guard lock(w.mutex);
  w.faults.clear();
  w.missing.clear();
  w.counts.clear();
  w.delay = 0;
}
EXPORT void fake_cuda_delay(int us) {
  fake::wishes().delay = us;
}
EXPORT void fake_cuda_fail(const char* function, int nth, int code) {
  const std::lock_guard lock(fake::wishes().mutex);
  fake::wishes().faults[function] = {nth, static_cast<CUresult>(code)};
}
EXPORT void fake_cuda_without(const char* function) {
  const std::lock_guard lock(fake::wishes().mutex);
  fake::wishes().missing.insert(function);
}
EXPORT int fake_cuda_calls() {
  return fake::calls;
}
EXPORT int fake_cuda_count(const char* function) {
  const std::lock_guard lock(fake::wishes().mutex);
  return fake::wishes().counts[function];
}
