// Memory of the stand-in driver: a device's is a memfd, so that other processes can map it.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "fake.hpp"

namespace fake {
namespace {

struct Memory {
  struct Arena {
    char* at;
    size_t nbytes;
    int fd;
  };
  std::mutex mutex;
  std::map<CUdeviceptr, size_t> devices;
  std::map<CUdeviceptr, size_t> opened;  // of other processes
  std::map<CUdeviceptr, size_t> pinned;  // of the host
  std::vector<Arena> arenas;
  char* next = nullptr;  // where the next allocation begins, with `room` bytes behind it
  size_t room = 0;
};

Memory& memory() {
  static auto* const the = new Memory;  // streams run until the process ends
  return *the;
}

bool inside(const std::map<CUdeviceptr, size_t>& all, CUdeviceptr at, size_t nbytes) {
  auto next = all.upper_bound(at);
  if (next == all.begin()) return false;
  --next;
  return at + nbytes <= next->first + next->second;
}

size_t in_use(const Memory& w) {
  size_t total = 0;
  for (const auto& [at, nbytes] : w.devices) total += nbytes;
  return total;
}

// What a handle holds: where to find the memory of whose process.
struct Handle {
  int pid, fd;
  uint64_t offset, nbytes;
};

}  // namespace

bool on_device(CUdeviceptr at, size_t nbytes) {
  Memory& w = memory();
  const std::lock_guard lock(w.mutex);
  return inside(w.devices, at, nbytes) || inside(w.opened, at, nbytes);
}

bool pinned(CUdeviceptr at, size_t nbytes) {
  Memory& w = memory();
  const std::lock_guard lock(w.mutex);
  return inside(w.pinned, at, nbytes);
}

size_t most_memory() {
  const char* setting = std::getenv("FAKE_CUDA_MEMORY");
  return setting != nullptr ? std::strtoull(setting, nullptr, 10) : size_t{8} << 30;
}

}  // namespace fake

EXPORT uint64_t fake_cuda_allocated() {
  const std::lock_guard lock(fake::memory().mutex);
  return fake::in_use(fake::memory());
}
EXPORT CUresult cuMemAlloc(CUdeviceptr* at, size_t nbytes) {
  NEEDS_CONTEXT;
  ENTER("cuMemAlloc");
  const std::lock_guard lock(fake::memory().mutex);
  // One after another, as large ones are on a device: a copy across two allocations is still refused.
  const size_t rounded = (nbytes + 511) / 512 * 512;
  if (fake::in_use(fake::memory()) + rounded > fake::most_memory()) return CUDA_ERROR_OUT_OF_MEMORY;
  if (rounded > fake::memory().room) {
    fake::memory().room = (std::max(rounded, size_t{64} << 20) + 4095) / 4096 * 4096;
    const int fd = ::memfd_create("fake-cuda", MFD_CLOEXEC);
    if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(fake::memory().room)) != 0)
      return CUDA_ERROR_OUT_OF_MEMORY;
    void* const memory = ::mmap(nullptr, fake::memory().room, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    fake::memory().next = static_cast<char*>(memory);
    fake::memory().arenas.push_back({fake::memory().next, fake::memory().room, fd});
  }
  char* const memory = fake::memory().next;
  fake::memory().next += rounded;
  fake::memory().room -= rounded;
  std::memset(memory, 0xAB, nbytes);
  *at = reinterpret_cast<CUdeviceptr>(memory);
  fake::memory().devices[*at] = nbytes;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemFree(CUdeviceptr at) {
  NEEDS_CONTEXT;
  // Never given back to the host's allocator: what still reads it reads wrong bytes, and does not crash.
  const std::lock_guard lock(fake::memory().mutex);
  const auto found = fake::memory().devices.find(at);
  if (found == fake::memory().devices.end()) return CUDA_ERROR_INVALID_VALUE;
  fake::memory().devices.erase(found);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemGetInfo(size_t* free, size_t* total) {
  NEEDS_CONTEXT;
  ENTER("cuMemGetInfo");
  const std::lock_guard lock(fake::memory().mutex);
  *total = fake::most_memory();
  *free = *total - std::min(*total, fake::in_use(fake::memory()));
  return CUDA_SUCCESS;
}
EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr at) {
  NEEDS_CONTEXT;
  ENTER("cuIpcGetMemHandle");
  const std::lock_guard lock(fake::memory().mutex);
  const auto found = fake::memory().devices.find(at);
  if (found == fake::memory().devices.end()) return CUDA_ERROR_INVALID_VALUE;
  auto* const start = reinterpret_cast<char*>(at);
  for (const fake::Memory::Arena& arena : fake::memory().arenas) {
    if (start < arena.at || start >= arena.at + arena.nbytes) continue;
    const fake::Handle made{::getpid(), arena.fd, static_cast<uint64_t>(start - arena.at), found->second};
    std::memset(handle, 0, sizeof(*handle));
    std::memcpy(handle, &made, sizeof(made));
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr* at, CUipcMemHandle handle, unsigned) {
  NEEDS_CONTEXT;
  ENTER("cuIpcOpenMemHandle");
  fake::Handle made;
  std::memcpy(&made, &handle, sizeof(made));
  if (made.pid == ::getpid()) return CUDA_ERROR_INVALID_CONTEXT;  // as the driver: not where it was made
  const std::string path = "/proc/" + std::to_string(made.pid) + "/fd/" + std::to_string(made.fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return CUDA_ERROR_MAP_FAILED;
  const uint64_t skip = made.offset % 4096;
  void* const memory = ::mmap(nullptr, made.nbytes + skip, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                              static_cast<off_t>(made.offset - skip));
  ::close(fd);
  if (memory == MAP_FAILED) return CUDA_ERROR_MAP_FAILED;
  *at = reinterpret_cast<CUdeviceptr>(memory) + skip;
  const std::lock_guard lock(fake::memory().mutex);
  fake::memory().opened[*at] = made.nbytes;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr at) {
  NEEDS_CONTEXT;
  ENTER("cuIpcCloseMemHandle");
  const std::lock_guard lock(fake::memory().mutex);  // stays mapped: who still copies there does not crash
  return fake::memory().opened.erase(at) != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuMemHostAlloc(void** at, size_t nbytes, unsigned) {
  NEEDS_CONTEXT;
  ENTER("cuMemHostAlloc");
  *at = std::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
  const std::lock_guard lock(fake::memory().mutex);
  fake::memory().pinned[reinterpret_cast<CUdeviceptr>(*at)] = nbytes;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemFreeHost(void* at) {
  {
    const std::lock_guard lock(fake::memory().mutex);
    fake::memory().pinned.erase(reinterpret_cast<CUdeviceptr>(at));
  }
  std::free(at);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemHostGetDevicePointer(CUdeviceptr* device, void* host, unsigned) {
  *device = reinterpret_cast<CUdeviceptr>(host);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemHostRegister(void* at, size_t nbytes, unsigned) {
  NEEDS_CONTEXT;
  ENTER("cuMemHostRegister");
  const std::lock_guard lock(fake::memory().mutex);
  fake::memory().pinned[reinterpret_cast<CUdeviceptr>(at)] = nbytes;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemHostUnregister(void* at) {
  NEEDS_CONTEXT;
  ENTER("cuMemHostUnregister");
  const std::lock_guard lock(fake::memory().mutex);
  return fake::memory().pinned.erase(reinterpret_cast<CUdeviceptr>(at)) != 0
             ? CUDA_SUCCESS
             : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}
EXPORT CUresult cuPointerGetAttribute(void* to, CUpointer_attribute, CUdeviceptr at) {
  ENTER("cuPointerGetAttribute");
  if (fake::on_device(at, 1)) {
    *static_cast<unsigned*>(to) = CU_MEMORYTYPE_DEVICE;
    return CUDA_SUCCESS;
  }
  if (!fake::pinned(at, 1)) return CUDA_ERROR_INVALID_VALUE;
  *static_cast<unsigned*>(to) = CU_MEMORYTYPE_HOST;
  return CUDA_SUCCESS;
}
