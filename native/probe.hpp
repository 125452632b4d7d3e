// Checksums of a device's memory, taken by the device in the order of its own work: the CPU never sees the
// bytes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "cuda.hpp"
#include "fold.hpp"
#include "vram.hpp"

namespace zs {

class Probes;

// One look at some runs of memory.
//
// | verb      | thread | the CPU                              | the stream                        |
// |-----------|--------|--------------------------------------|-----------------------------------|
// | launch    | any    | never waits                          | reads every run, once             |
// | fetch     | any    | never waits                          | brings what that left to the host |
// | checksums | any    | waits for fetch                      | –                                 |
class Probe {
 public:
  struct Run {
    CUdeviceptr at;
    uint64_t nbytes;
  };
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;
  ~Probe();  // waits for what was launched

  void launch(CUstream stream);
  void fetch(CUstream stream);
  CUevent fetched() const { return memory_.fetched; }
  uint64_t nbytes() const { return nbytes_; }
  std::vector<uint32_t> checksums();  // CRC-32C, by run

 private:
  friend class Probes;
  struct Memory {  // pinned: the spans, then their residues; and as much of the device's own
    std::byte* host = nullptr;
    CUdeviceptr at = 0;  // the same for the device
    uint64_t nbytes = 0;
    CUevent fetched = nullptr;
    Vram::Loan residues{};
  };
  Probe(std::shared_ptr<Probes> owner, std::span<const Run> runs, uint64_t span_bytes);
  const std::byte* residues() const { return memory_.host + spans_.size() * sizeof(fold::Span); }

  const std::shared_ptr<Probes> owner_;
  std::vector<fold::Span> spans_;
  std::vector<size_t> ends_;  // by run: one past its last span
  uint64_t nbytes_ = 0;
  uint64_t residue_bytes_ = 0;
  Memory memory_;
  bool launched_ = false, awaited_ = false;
};

// What the probes of a device share: the kernel, a stream for it, memory that goes from one to the next.
class Probes : public std::enable_shared_from_this<Probes> {
 public:
  // Has the driver compile the kernel, and sees whether it finds the CPU's checksum. Throws Kind::device
  // where it does not, or the driver refuses.
  static std::shared_ptr<Probes> load(std::shared_ptr<cuda::Context> context, std::shared_ptr<Vram> vram);
  Probes(const Probes&) = delete;
  Probes& operator=(const Probes&) = delete;
  ~Probes();

  // Of the least priority: what it does must take nothing from training.
  CUstream stream() const { return stream_; }
  // `span_bytes`: how much one warp reads, a multiple of fold::kBlock; 0: as suits the device. Throws
  // Kind::capacity.
  std::shared_ptr<Probe> probe(std::span<const Probe::Run> runs, uint64_t span_bytes = 0);

 private:
  friend class Probe;
  Probes(std::shared_ptr<cuda::Context> context, std::shared_ptr<Vram> vram);
  void prove();
  Probe::Memory lend(uint64_t nbytes);
  void take_back(Probe::Memory memory);
  void destroy() noexcept;

  const std::shared_ptr<cuda::Context> context_;
  const std::shared_ptr<Vram> vram_;
  CUmodule module_ = nullptr;
  CUfunction kernel_ = nullptr;
  CUstream stream_ = nullptr;
  std::mutex mutex_;
  std::vector<Probe::Memory> idle_;
};

}  // namespace zs
