// What one job has to copy between a device and an image: parts, in the order in which they are queued.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cuda.hpp"
#include "probe.hpp"
#include "vram.hpp"

namespace zs {

// Who wants to know how the parts fare. Called by the device's thread and by a guard, without any lock held.
class Landing {
 public:
  virtual void begun() noexcept {}  // the device's thread has come to the lane; once
  virtual void landed(
      std::span<const uint64_t> parts) noexcept = 0;  // their bytes can be seen by this thread
  virtual void dropped(uint64_t parts, std::exception_ptr why) noexcept = 0;  // these will never land

 protected:
  ~Landing() = default;
};

constexpr uint64_t kForecast = UINT64_MAX - 1;

// Which parts' sources are looked at: every so many-th, but one at least; from the `turn`-th on, so that
// turns one after another come to all of them.
struct Sampling {
  uint64_t turn = 0, every = 0;  // 0: none
};

// A part is *pending* until its copies are queued, *in flight* until the copy stream has gone past them, then
// *landed*. All fields but the first three are guarded by the device's mutex.
struct Lane {
  struct Part {
    uint64_t name;       // what Landing is told
    size_t first, last;  // copies
    uint64_t mark = 0;   // the stream's counter shows this or more once it has landed
    size_t calls = 0;    // of the driver, that queued it and those before it with the same mark
    Vram::Loan frozen{};
  };

  cuda::Way way;
  uint64_t ahead = UINT64_MAX;  // parts that a guard waits for and never moves aside; kForecast: see Device
  bool pinned = false;          // the host side is; `fill` may be what finds that out

  bool forecast = false;  // a guard is to tell when it came
  size_t times = 0;       // the device's, in which it tells

  uint64_t coming = 0;  // parts that extend(), or `fill`, will still bring
  // Opens `coming` parts, and all of them. Called once, with the device's mutex held, by whoever first needs
  // them: mostly the copy thread, so that what is long to write down takes no time of `begin`.
  std::function<void(Lane&)> fill;
  CUevent ordered = nullptr;  // until the copy stream waits for it: what training had been given at `begin`
  bool begun_told = false;    // landing was told that it has
  bool pooled = false;        // it goes back to the device's pool
  std::vector<cuda::Copy> copies;
  std::vector<Part> parts;
  size_t queued = 0, landed = 0;  // parts [0, landed) have landed, [landed, queued) are in flight
  size_t calls_in_flight = 0;     // of the driver, that queued these
  size_t kept_from = SIZE_MAX;    // parts whose sources will lie elsewhere by release()
  bool held = false;              // it has not come yet: they must not be queued
  bool released = false;          // no source will be read that the stream of a guard does not wait for
  Sampling sampling{};
  struct Look {
    uint64_t name;       // of the part
    size_t first, last;  // copies
  };
  std::vector<Look> looks;       // whose copies are the runs of `probe`, in this order
  std::shared_ptr<Probe> probe;  // of the sources as they were at the beginning
  std::string unprobed;          // why there is none although it was asked for
  Vram::Loan staged{};           // of copies taken at once; goes back with the lane
  Vram::Loan beside{};           // of small ones that a guard moved aside; likewise
  std::shared_ptr<void> keep;    // the job that `landing` is, while the lane is with the device
  Landing* landing = nullptr;
  std::chrono::steady_clock::time_point begun{};
  double seconds = 0;  // until the last landing
  std::chrono::steady_clock::time_point first_landing{};
  size_t first_landed = 0;  // parts, then

  size_t pending() const { return parts.size() - queued; }
  bool over() const { return coming == 0 && landed == parts.size(); }
  std::span<const cuda::Copy> copies_of(const Part& part) const {
    return std::span(copies).subspan(part.first, part.last - part.first);
  }
  // Opens a part; add() puts copies into it.
  void open(uint64_t name) { parts.push_back({name, copies.size(), copies.size()}); }
  void add(const cuda::Copy& copy);
};

}  // namespace zs
