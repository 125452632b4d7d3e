// GPUDirect Storage: NVIDIA's cuFile, opened when it is first asked for. Nothing of its header is seen from
// here, so that a build without it differs in one place.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda.hpp"

namespace zs::cufile {

// What cuFile says of this machine once it is open.
struct Facts {
  std::string library;  // the name it was found under
  int version = 0;      // 1000 times the major version and 10 times the minor; 0 where it does not say
  unsigned nvfs_major = 0, nvfs_minor = 0;  // of the nvidia-fs driver; 0 where it is not loaded
  bool p2p = false;                         // reaches NVMe through the kernel's own peer-to-peer DMA
  bool compat = false;  // may move bytes through host memory where it cannot do so directly
  // Whether bytes can go between a file and a device with no copy of them in host memory.
  bool direct() const { return nvfs_major != 0 || nvfs_minor != 0 || p2p; }
};

// Opens the first of these that there is, or what ZEROSTALL_LIBCUFILE names; once a process. Throws
// Kind::capability where that cannot be; the next call tries again. A device's context must be current the
// first time.
const Facts& open(const std::vector<std::string>& libraries);

// An open file that cuFile takes. Safe to use from several threads, with a device's context current.
class Handle {
 public:
  // Keeps `fd`, which must be open past the page cache. Throws Kind::capability where cuFile refuses it.
  explicit Handle(int fd);
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle();

  // As pread and pwrite with memory of a device, and as they may stop short. Throw Kind::storage. What is
  // written lies `within` bytes behind `base`, which is where memory that is registered begins.
  uint64_t read(CUdeviceptr to, uint64_t nbytes, uint64_t offset) const;
  uint64_t write(CUdeviceptr base, uint64_t within, uint64_t nbytes, uint64_t offset) const;

 private:
  void* handle_ = nullptr;
};

// Memory of a device that cuFile is told of, so that it needs no bounce buffer. Refused: problem() says why,
// and everything works all the same. The memory must outlive it.
class Registration {
 public:
  Registration(std::shared_ptr<cuda::Context> context, CUdeviceptr at, uint64_t nbytes);
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;
  ~Registration();
  CUdeviceptr at() const { return at_; }
  const std::string& problem() const { return problem_; }

 private:
  const std::shared_ptr<cuda::Context> context_;
  const CUdeviceptr at_;
  std::string problem_;
};

}  // namespace zs::cufile
