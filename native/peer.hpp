// What processes lend each other of a device's memory, and which devices reach which.
#pragma once
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda.hpp"

namespace zs {

struct DeviceFacts {
  int ordinal;
  std::string uuid;  // as nvidia-smi writes it; the same in every process, whatever CUDA_VISIBLE_DEVICES says
  std::string name;
  bool multicast;  // NVLink multicast could be had; nothing here uses it
};

struct LinkFacts {
  bool access;   // the one's copy engines reach the other's memory
  int rank;      // by the driver; 0 is the fastest kind of link
  bool atomics;  // all atomic operations work over it: NVLink, not PCIe
};

std::vector<DeviceFacts> visible_devices();
LinkFacts link_between(int from, int to);

// Memory of a device that other processes can open by its handle. Goes with this.
class Vault {
 public:
  Vault(std::shared_ptr<cuda::Context> context, size_t nbytes);  // Kind::capacity
  Vault(const Vault&) = delete;
  Vault& operator=(const Vault&) = delete;
  ~Vault();
  CUdeviceptr at() const { return at_; }
  size_t nbytes() const { return nbytes_; }
  std::string handle() const;
  const std::shared_ptr<cuda::Context>& context() const { return context_; }

 private:
  const std::shared_ptr<cuda::Context> context_;
  const size_t nbytes_;
  CUdeviceptr at_ = 0;
};

// The same memory in another process. `context`: of the device whose copy engines will use it.
class Peer {
 public:
  Peer(std::shared_ptr<cuda::Context> context, const std::string& handle);
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;
  ~Peer() { close(); }
  CUdeviceptr at() const;  // Kind::usage after close
  void close() noexcept;   // nothing may be copying

 private:
  const std::shared_ptr<cuda::Context> context_;
  CUdeviceptr at_ = 0;
  const uint32_t owner_;  // as forks() says
};

// Free and total bytes.
std::pair<size_t, size_t> memory_of(const cuda::Context& context);

}  // namespace zs
