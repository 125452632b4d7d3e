#include "peer.hpp"

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <utility>

#include "error.hpp"
#include "forks.hpp"

namespace zs {
namespace {

std::string uuid_of(CUdevice device) {
  CUuuid uuid{};
  ZS_CUDA(cuDeviceGetUuid, &uuid, device);
  std::string text = "GPU-";
  for (size_t k = 0; k < sizeof(uuid.bytes); ++k) {
    char two[3];
    std::snprintf(two, sizeof(two), "%02x", static_cast<unsigned char>(uuid.bytes[k]));
    if (k == 4 || k == 6 || k == 8 || k == 10) text += '-';
    text += two;
  }
  return text;
}

int attribute(CUdevice_P2PAttribute which, CUdevice from, CUdevice to) {
  int value = 0;
  ZS_CUDA(cuDeviceGetP2PAttribute, &value, which, from, to);
  return value;
}

}  // namespace

std::vector<DeviceFacts> visible_devices() {
  int count = 0;
  ZS_CUDA(cuDeviceGetCount, &count);
  std::vector<DeviceFacts> found;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CUdevice device = 0;
    ZS_CUDA(cuDeviceGet, &device, ordinal);
    char name[256] = {};
    ZS_CUDA(cuDeviceGetName, name, sizeof(name) - 1, device);
    int multicast = 0;  // an older driver does not know the question
    cuda::driver().cuDeviceGetAttribute(&multicast, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, device);
    found.push_back({ordinal, uuid_of(device), name, multicast != 0});
  }
  return found;
}

LinkFacts link_between(int from, int to) {
  CUdevice one = 0, other = 0;
  ZS_CUDA(cuDeviceGet, &one, from);
  ZS_CUDA(cuDeviceGet, &other, to);
  int access = 0;
  ZS_CUDA(cuDeviceCanAccessPeer, &access, one, other);
  if (access == 0) return {false, 0, false};
  return {true, attribute(CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK, one, other),
          attribute(CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, one, other) != 0};
}

Vault::Vault(std::shared_ptr<cuda::Context> context, size_t nbytes)
    : context_(std::move(context)), nbytes_(nbytes) {
  const cuda::Context::Current current(*context_);
  ZS_CUDA(cuMemAlloc, &at_, nbytes);
}

Vault::~Vault() {
  try {
    const cuda::Context::Current current(*context_);
    cuda::driver().cuMemFree(at_);
  } catch (const Error&) {
    // The process ends and the driver has gone before us.
  }
}

std::string Vault::handle() const {
  const cuda::Context::Current current(*context_);
  CUipcMemHandle handle{};
  ZS_CUDA(cuIpcGetMemHandle, &handle, at_);
  return {handle.reserved, sizeof(handle.reserved)};
}

Peer::Peer(std::shared_ptr<cuda::Context> context, const std::string& handle)
    : context_(std::move(context)), owner_(forks()) {
  CUipcMemHandle opened{};
  if (handle.size() != sizeof(opened.reserved)) throw Error(Kind::usage, "that is no handle of memory");
  std::memcpy(opened.reserved, handle.data(), sizeof(opened.reserved));
  const cuda::Context::Current current(*context_);
  ZS_CUDA(cuIpcOpenMemHandle, &at_, opened, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
}

CUdeviceptr Peer::at() const {
  if (at_ == 0) throw Error(Kind::usage, "the memory of the other process is closed");
  return at_;
}

void Peer::close() noexcept {
  if (at_ == 0 || forks() != owner_) return;  // a forked child has no driver
  try {
    const cuda::Context::Current current(*context_);
    cuda::driver().cuIpcCloseMemHandle(std::exchange(at_, 0));
  } catch (const Error&) {
    // The process ends and the driver has gone before us.
  }
}

std::pair<size_t, size_t> memory_of(const cuda::Context& context) {
  const cuda::Context::Current current(context);
  size_t free = 0, total = 0;
  ZS_CUDA(cuMemGetInfo, &free, &total);
  return {free, total};
}

}  // namespace zs
