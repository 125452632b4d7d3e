// File → tensors, in the host's memory or a device's, in one pass: read, checked, brought to where it
// belongs. What lies in memory already is taken from there.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "capture.hpp"
#include "checks.hpp"
#include "device_file.hpp"
#include "file.hpp"
#include "huge_pages.hpp"
#include "idle.hpp"
#include "plan.hpp"
#include "pool.hpp"
#include "segment.hpp"

namespace zs {

// A unit is a block of the file that holds wanted bytes; with checksums, all blocks of a chunk that does. The
// first chunk that fails, or that the file does not have, ends the job with Kind::corrupt; what was written
// by then stays, and a chunk's bytes are written before the last of its blocks is checked: nobody may use
// them before the job is done. A block that is all of one target's is read right into it, where the disk can
// bring it there at the speed that it has. Copies to a device are done when the job is; they are ordered with
// no stream, so its memory must be idle before.
class Load final : public Job {
 public:
  // targets[i] receives piece pieces[i] of the plan, which rise; offsets of the plan count from the file's
  // first byte. `device`: of all targets that are not in the host's memory, which must be contiguous.
  // `straight`: the same file, for cuFile to read; all targets are on the device then. `staging`: where bytes
  // are on the way, a block for each thread of the pool, for this job alone; pinned where a device is to get
  // something. `only`: no chunk but these, which rise. `held`: memory laid out as the file, in which those
  // chunks are already; they are taken from there, and checked all the same.
  struct Order {
    std::shared_ptr<const Plan> plan;
    Arrays targets;
    std::vector<uint32_t> pieces;
    std::optional<std::vector<uint32_t>> checksums;
    int fd;
    bool direct;
    std::shared_ptr<const Mapping> staging;
    std::shared_ptr<Device> device = nullptr;
    std::shared_ptr<const DeviceFile> straight = nullptr;
    std::optional<std::vector<uint64_t>> only = std::nullopt;
    const std::byte* held = nullptr;
  };
  static std::shared_ptr<Load> begin(const Pool& pool, Order order);
  ~Load() override;
  std::optional<std::string> fell_back() const { return file_.fell_back(); }
  // Why cuFile does not know the memory it reads into; empty where it does, or has nothing to do.
  const std::string& bounced() const { return bounced_; }

 protected:
  void work(uint64_t unit) override;
  void close(bool whole) override;

 private:
  // Bytes [begin, end) of the file are read; those of targets [first, last) among them are wanted.
  struct Stretch {
    uint64_t block, begin, end;
    size_t first, last;
  };
  struct Slot {
    std::byte* host;
    CUdeviceptr device;
    CUstream stream;
  };

  // So much of a block is read and passed on at a time. Smaller requests are slower, but what all threads
  // have on the way then stays in the processor's cache (docs/decisions/2026-11-30-huge-pages-on-the-way.md).
  static constexpr uint64_t kWarm = 2 << 20;

  Load(const Pool& pool, Order order, std::unique_ptr<Checks> checks, std::vector<Stretch> stretches);
  static void check(const Pool& pool, const Order& order);
  static std::vector<Stretch> cut(const Order& order, const Checks& checks);
  void open(unsigned threads);
  void let_go() noexcept;
  // Whether the disk may read so much right to there.
  bool in_place(const std::byte* place, uint64_t nbytes) const;
  // Where all of it belongs, if that is one run of the host's memory.
  std::byte* within_target(const Stretch& stretch) const;
  void take_held(const Stretch& stretch, const Slot& slot);
  void read(std::byte* to, const Stretch& stretch);
  void need(bool there, const Stretch& stretch) const;  // the file has it
  // Through the slot's block, to the host's memory; `place`: where all of it belongs, if that is one run.
  void pass_on(const Stretch& stretch, const Slot& slot, std::byte* place);
  void send(const Stretch& stretch, const Slot& slot);  // to the device
  void judge(const Stretch& stretch, uint32_t checksum);
  void deliver(const Stretch& stretch, const Slot& slot);

  const Order order_;
  const std::unique_ptr<Checks> checks_;
  const std::vector<Stretch> stretches_;
  File file_;
  const PageTable pages_;
  Vram::Loan straight_memory_;
  std::optional<cufile::Registration> registration_;
  std::string bounced_;
  Idle<Slot> slots_;
};

}  // namespace zs
