// Tensors → image, in the background, while the tensors' owner goes on until it must change them.
#pragma once
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "arrays.hpp"
#include "at_once.hpp"
#include "device.hpp"
#include "job.hpp"
#include "plan.hpp"
#include "pool.hpp"

namespace zs {

// A device, and the stream on which training gives it work now.
struct Training {
  std::shared_ptr<Device> device;
  CUstream stream;
};

// Throws where an array lies on a device that is none of these.
void check_devices(const Arrays& arrays, std::span<const Training> trainings);

// Whether what arrived is what devices held when a capture began: of sampled chunks.
struct Comparison {
  uint64_t chunks = 0, nbytes = 0;     // that were compared
  std::vector<uint32_t> pieces;        // that are different, rising
  std::vector<std::string> unchecked;  // by device: why nothing was looked at there
};

// What protect() had to do.
struct Protection {
  uint64_t pending = 0;       // chunks nobody had begun
  uint64_t frozen_bytes = 0;  // within devices
  uint64_t helped_bytes = 0;
  uint64_t spared_bytes = 0;  // of chunks that stay pending
  double waited = 0;          // seconds, for chunks in flight
};

// Pieces whose owner goes on although they have not been read: see protect().
struct Kept {
  uint32_t piece;
  std::byte* elsewhere;
};
struct Spared {
  std::span<const uint32_t> left;  // their memory stays as it is until the job is done
  std::span<const Kept> kept;      // what they hold now will lie elsewhere, shaped alike, by release()
};

// A unit is a chunk's host memory. A chunk is *released* once none of its sources there will be read again:
// copied or dropped. What of it lies on a device comes by that device's lane, one part a chunk; who
// brings the last of a chunk's parts, host or lane, sees to its checksum.
class Capture final : public Job, private Landing {
 public:
  // Copies the pieces in `at_once` before it returns; those on a device in the order of its training stream.
  // At the end 1 is added to the eventfd `announce`, if given. `image` has plan->nbytes() bytes; it and the
  // arrays must live until the job is done. `trainings`: one for each device that has sources, which must be
  // contiguous there. `ahead`: chunks that a guard waits for, however few of them have landed; kForecast:
  // those that should land by then. `held`: the host's threads begin after
  // start_soon(), so that none of them takes this core while the caller has still something to do.
  // `sampling`: of each device's chunks, those of which it looks at the sources itself, in the order of its
  // training stream. `peer`: memory of another device, of the image's size. What lies on devices goes there,
  // each byte to its place in the image, and only the rest into `image`; there are no checksums then.
  static std::shared_ptr<Capture> begin(const Pool& pool, std::shared_ptr<const Plan> plan, Arrays sources,
                                        std::byte* image, const Pieces& at_once, int announce = -1,
                                        std::vector<Training> trainings = {}, uint64_t ahead = UINT64_MAX,
                                        bool held = false, Sampling sampling = {}, CUdeviceptr peer = 0,
                                        Room room = {});
  ~Capture() override;
  // Lets the pool's threads begin, a moment later. Where devices have a part in it their threads, which are
  // awake anyway, let them, and this costs nothing.
  void start_soon() {
    if (drains_.empty() || (come_.fetch_or(kCaller) & kLanes) != 0) Job::start_soon();
  }

  // Somebody waits: what start_soon() left for later begins now.
  void hurry() const { workers_->hurry(); }

  // Returns when no source in host memory will be read any more, and none on a device by anything that its
  // training stream does not wait for. Pending chunks are moved out of the way while `freeze_bytes` last
  // (of each device's memory), in host memory helped along; those in flight are awaited. `trainings`: streams
  // of now, where they are others than at the beginning. Pending chunks of spared pieces alone stay pending,
  // those with kept ones until release(), which must follow.
  Protection protect(uint64_t freeze_bytes, std::span<const Training> trainings = {},
                     const Spared& spared = {});

  // What was kept is in its place; on devices, once their training streams have done what they have been
  // given.
  void release(std::span<const Training> trainings = {});

  // Pieces that some pending chunk has bytes of, rising.
  std::vector<uint32_t> pending() const;

  // How long the devices took, or the host where there are none, when done.
  double drain_seconds() const;

  // Once done and not cancelled; not of what went to a peer.
  Comparison compare_sources() const;

  // What was looked at of the sources: offset in the image, size and CRC-32C. Once done.
  struct Sample {
    uint64_t offset, nbytes;
    uint32_t checksum;
  };
  std::vector<Sample> samples() const;

  // What of the image lies on devices: offsets and sizes, rising; none touches the next.
  std::vector<std::pair<uint64_t, uint64_t>> on_devices() const;
  bool to_peer() const { return peer_ != 0; }

  // Of each chunk; valid when done and not cancelled.
  const std::vector<uint32_t>& checksums() const { return checksums_; }

  bool has_work() const override;

 protected:
  void work(uint64_t chunk) override;
  bool work_aside() override;
  void skipped(uint64_t chunks) override;
  uint64_t drop_kept() noexcept override;
  void close(bool whole) override;

 private:
  struct Drain {
    Training training;
    std::shared_ptr<Lane> lane;
    std::vector<cuda::Copy> at_once;
    cuda::Way at_once_way;
    CUdeviceptr base;  // of the image there
    std::shared_ptr<const Route> route;
    struct Run {
      uint32_t piece;
      uint64_t begin;
    };
    // These two are there with the lane's copies, once it is filled.
    std::vector<Run> runs;       // of the lane's copies
    std::vector<size_t> firsts;  // by part, as the lane was at first: its first copy
  };
  Capture(const Pool& pool, std::shared_ptr<const Plan> plan, Arrays sources, std::byte* image,
          std::shared_ptr<const AtOnce> at_once, std::vector<Drain> drains, CUdeviceptr peer, Room room);
  static void check(const Plan& plan, const Arrays& sources, std::span<const Training> trainings);
  static Drain drain_of(const Plan& plan, const Arrays& sources, std::byte* image, const AtOnce& at_once,
                        Training training, uint64_t ahead, CUdeviceptr peer);
  void begun() noexcept override {
    if (come_.fetch_or(kLanes) == kCaller) ask_for_workers();
  }
  void landed(std::span<const uint64_t> chunks) noexcept override;
  void dropped(uint64_t chunks, std::exception_ptr why) noexcept override;
  void start_lanes();
  void fill(Drain& drain) const;
  void copy_at_once();
  bool copied(size_t piece) const { return at_once_->marks[piece] != AtOnce::kNot; }
  bool on_lane(uint64_t chunk) const {
    return missing_ && missing_[chunk].load(std::memory_order_relaxed) > 0;
  }
  bool bring(uint64_t chunk) noexcept;  // one of its parts; true: the last
  void check_chunk(uint64_t chunk);
  uint64_t host_bytes(uint64_t chunk) const;
  void pack(uint64_t chunk);
  std::vector<uint8_t> marks_of(const Spared& spared) const;
  bool spare(uint64_t chunk, std::span<const uint8_t> marks);
  Sparing sparing_of(const Drain& drain, std::span<const uint8_t> marks) const;
  static CUstream stream_of(const Drain& drain, std::span<const Training> trainings);
  void read_later(uint64_t chunk) noexcept;
  void ask_for_workers() noexcept;
  bool may_check() const;
  void released(uint64_t chunks) noexcept;

  const std::shared_ptr<const Plan> plan_;
  Arrays sources_;  // changed by release() alone: the pieces that were kept
  const std::shared_ptr<const AtOnce> at_once_;
  std::unique_ptr<std::byte[]> beside_;  // its tiny pieces
  std::byte* const image_;
  const CUdeviceptr peer_;  // 0: what lies on devices goes into the image, too
  std::vector<uint32_t> checksums_;
  std::vector<Drain> drains_;
  std::unique_ptr<std::atomic<uint32_t>[]>
      missing_;  // by chunk: parts not brought yet; 0 where no lane has any
  mutable std::mutex aside_mutex_;
  std::vector<uint64_t> spared_;  // chunks whose pieces can be read for as long as it takes
  std::vector<uint64_t> parked_;  // until release(); these two by the guard alone
  std::vector<Kept> kept_;
  std::vector<uint64_t> landed_;  // chunks whose checksum is to be taken
  uint64_t arriving_;             // parts that lanes still bring
  unsigned checking_ = 0;         // threads that take checksums of what landed
  const unsigned threads_;        // of the pool
  // Whoever comes second lets the pool's threads begin: what is copied at once must be in its place by then.
  enum Come : uint8_t { kCaller = 1, kLanes = 2 };
  std::atomic<uint8_t> come_{0};
  const std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
  double seconds_ = 0;  // when done
  std::atomic<uint64_t> unreleased_;
  std::mutex release_mutex_;
  std::condition_variable all_released_;
};

}  // namespace zs
