// One CUDA device as the jobs use it: a stream for copies that never holds training up, a thread that feeds
// it, spare memory.
#pragma once
#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "cuda.hpp"
#include "forecast.hpp"
#include "lane.hpp"
#include "probe.hpp"
#include "vram.hpp"

namespace zs {

// What Device::protect had to do.
struct Redirection {
  uint64_t pending = 0;  // parts that were not queued yet
  uint64_t frozen_bytes = 0;
  uint64_t spared_bytes = 0;
};

// What a guard need not see to, by part and by copy.
struct Sparing {
  enum : uint8_t { kNot, kLeft, kKept };
  std::vector<uint8_t> parts;                          // empty: nothing is spared
  std::vector<std::pair<size_t, CUdeviceptr>> copies;  // whose bytes will lie elsewhere by release()
  std::vector<size_t> small;  // copies, rising, of what is not spared: moved aside rather than waited for
};

// Lanes are served one after another; parts of a lane in their order. A counter in host memory that the copy
// stream writes after each part tells which have landed: it is looked at every kLook, no driver call is made
// for it.
//
// | verb    | thread       | the CPU        | the training stream                                          |
// |---------|--------------|----------------|--------------------------------------------------------------|
// | begin   | training     | never waits    | does the `at_once` copies (device to device)                 |
// | protect | training     | never waits    | waits for what is in flight or must be; moves the rest aside |
// | release | training     | never waits    | –                                                            |
// | drop    | any          | –              | –                                                            |
// | close   | any          | for the thread | –                                                            |
class Device : public std::enable_shared_from_this<Device> {
 public:
  static std::shared_ptr<Device> open(int ordinal);  // Kind::capability where there is no driver
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device();
  // Lanes that are not done are dropped; joins the thread. Whoever called open() must, or the device stays.
  void close() noexcept;

  int ordinal() const { return context_->ordinal(); }
  const std::shared_ptr<cuda::Context>& context() const { return context_; }
  const std::shared_ptr<Vram>& vram() const { return vram_; }
  // Loaded when first asked for. Throws Kind::device where the driver refuses the kernel.
  std::shared_ptr<Probes> probes();

  // Throws Kind::capability while the stream records a graph: nothing may be queued, and no memory taken.
  void refuse_capturing(CUstream stream) const;

  // Queues `at_once`, ordered like work of `training`, then lets the lane run after all work that `training`
  // has been given so far. `keep` is the job behind lane->landing. One event is recorded for that; the rest
  // the copy thread does, or a guard that comes first.
  void begin(const std::shared_ptr<Lane>& lane, CUstream training, std::span<const cuda::Copy> at_once,
             cuda::Way at_once_way, std::shared_ptr<void> keep);

  // After this, `training` may be given work that changes the lane's sources. Pending parts: the last ones
  // are copied into reserved memory by `training` while `freeze_bytes` last; `training` waits for the others,
  // which are all queued now, so that its wait depends on nothing that a CPU has still to do.
  // But for spared parts at the end of the lane: those left are queued when their turn comes and nobody waits
  // for them, those kept after release(). What is small in them, and not spared, is copied aside.
  Redirection protect(Lane& lane, CUstream training, uint64_t freeze_bytes, const Sparing& sparing = {});

  // What was kept is in its place when `training` has done the work that it has been given so far.
  void release(Lane& lane, CUstream training);

  // The lane's parts and copies are there after this, if it has not been dropped.
  void fill(Lane& lane);

  // The copies from this one on belong to parts that a guard which comes now would find pending.
  size_t pending_from(Lane& lane);

  // The next of a lane's `coming` parts; nothing where the lane was dropped meanwhile.
  void extend(Lane& lane, uint64_t name, std::span<const cuda::Copy> copies);

  // Pending and coming parts will never be queued; says how many there were. Landing is not told.
  uint64_t drop(Lane& lane) noexcept;

 private:
  explicit Device(int ordinal);
  static void refuse_captured(CUstream stream);  // in the context of now
  void serve();
  bool turn(std::unique_lock<std::mutex>& lock);  // false: nothing could be done now
  void queue(Lane& lane, size_t parts);           // the next pending ones
  void queue_up_to(Lane& lane, size_t end);
  void order(CUstream first, CUstream then, CUevent event) const;
  void mark_order(Lane& lane, CUstream training);
  void prepare(Lane& lane);
  uint64_t give_up(Lane& lane);
  void look_at_sources(Lane& lane);
  size_t spare(Lane& lane, const Sparing& sparing, std::vector<cuda::Copy>& aside);
  bool move_small(Lane& lane, std::span<const size_t> small, std::vector<cuda::Copy>& aside);
  CUresult doubt();
  void look_back(size_t times);  // at how long that guard left the copies to themselves, and waited for them
  void note_rate(const Lane& lane);
  void copy_within_order(CUstream training, cuda::Way way, std::span<const cuda::Copy> copies, bool batch);
  void destroy() noexcept;

  const std::shared_ptr<cuda::Context> context_;
  const std::shared_ptr<Vram> vram_;
  const bool ordered_, guarded_;  // false: a test wants to see what goes wrong then
  std::shared_ptr<Probes> probes_;
  CUstream copies_ = nullptr;   // of the least priority
  CUstream at_once_ = nullptr;  // a batch cannot go to the stream that training mostly uses
  // By the clock of the training stream: a save, its guard, and the guard's wait.
  struct Times {
    CUevent saved = nullptr, guarded = nullptr, moved = nullptr, passed = nullptr;
    bool all = false;    // they are of one snapshot
    bool moves = false;  // it moved chunks aside before it waited
  };
  Times times_[2];  // of the snapshot of now and the one before
  size_t now_ = 0;
  std::vector<CUevent> idle_events_;
  CUevent begun_ = nullptr, joined_ = nullptr, safe_ = nullptr, frozen_ = nullptr;
  uint64_t* counter_ = nullptr;  // pinned; written by the device
  CUdeviceptr counter_at_ = 0;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Lane>> lanes_;
  uint64_t mark_ = 0;  // what the counter will show when all that was queued has landed
  bool stop_ = false;
  Forecast forecast_;
  std::chrono::steady_clock::time_point moved_{};  // when something landed last
  std::thread* thread_ = nullptr;
  const uint32_t owner_;  // as forks() says
};

}  // namespace zs
