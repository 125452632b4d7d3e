// File → memory of a device and back, through cuFile: no copy of the bytes in host memory, nor a look at
// them.
#pragma once
#include <cstdint>
#include <memory>

#include "cufile.hpp"
#include "pool.hpp"

namespace zs {

// A file that cuFile has taken, for one device.
struct DeviceFile {
  DeviceFile(std::shared_ptr<cuda::Context> on, int fd);  // keeps a duplicate of `fd`, with O_DIRECT on
  DeviceFile(const DeviceFile&) = delete;
  DeviceFile& operator=(const DeviceFile&) = delete;
  ~DeviceFile();

  const std::shared_ptr<cuda::Context> context;

  // Whole pages are moved, up to the end of the last; with the context current. `offset`: a multiple of a
  // page.
  bool read(CUdeviceptr to, uint64_t nbytes, uint64_t offset) const;  // false: the file ended early
  void write(CUdeviceptr base, uint64_t within, uint64_t nbytes, uint64_t offset) const;

 private:
  const int fd_, flags_;
  std::unique_ptr<const cufile::Handle> handle_;
};

// `nbytes` from byte `offset` of the file on, which is a multiple of a page, a block at a time. Both ends may
// be used up to the end of the last page: what a device's copy has there is written, too, for the caller to
// cut off; what a file has there is read. Syncs nothing. The first error ends it. `base`: where the
// registered memory begins that is written from; 0 where none is.
class DeviceTransfer final : public Job {
 public:
  static constexpr uint64_t kBlock = 16 << 20;
  enum class Way : uint8_t { to_device, to_file };
  static std::shared_ptr<DeviceTransfer> begin(const Pool& pool, std::shared_ptr<const DeviceFile> file,
                                               Way way, CUdeviceptr memory, uint64_t nbytes, uint64_t offset,
                                               CUdeviceptr base = 0);

 protected:
  void work(uint64_t block) override;

 private:
  DeviceTransfer(const Pool& pool, std::shared_ptr<const DeviceFile> file, Way way, CUdeviceptr memory,
                 uint64_t nbytes, uint64_t offset, CUdeviceptr base);
  const std::shared_ptr<const DeviceFile> file_;
  const Way way_;
  const CUdeviceptr memory_, base_;
  const uint64_t nbytes_, offset_;
};

}  // namespace zs
