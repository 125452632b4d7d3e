// A stand-in for libcufile.so.0: memory of the stand-in device is host memory, so a transfer is a pread or a
// pwrite. Like the real one it takes only open regular files with O_DIRECT, and only handles it has given.
//
// Beside cuFile's functions, tests have:
//   fake_cufile_reset()                    no faults, no counts, nvidia-fs is there
//   fake_cufile_fail(function, nth, code)  the nth call from now on fails: a cuFile code (5000 and more), or
//   for
//                                          cuFileRead and cuFileWrite an errno
//   fake_cufile_short(nbytes)              no read or write moves more than that
//   fake_cufile_without_driver()           nvidia-fs is not there: compatibility mode alone
//   fake_cufile_count(function)            calls since reset
//   fake_cufile_registered()               buffers that are registered
//
// FAKE_CUFILE_FAIL="function nth code" is fake_cufile_fail, FAKE_CUFILE_WITHOUT_DRIVER
// fake_cufile_without_driver in processes that tests do not call into.
#include <cufile.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>

namespace {

struct World {
  std::mutex mutex;
  std::map<std::string, std::pair<int, int>> faults;
  std::map<std::string, int> counts;
  std::set<const void*> buffers;
  std::set<void*> handles;
  size_t most = SIZE_MAX;
  bool driver = true;
};

World* make_world() {
  auto* const world = new World;
  const char* setting = std::getenv("FAKE_CUFILE_FAIL");
  std::istringstream words(setting != nullptr ? setting : "");
  std::string function;
  int nth = 0, code = 0;
  if (words >> function >> nth >> code) world->faults[function] = {nth, code};
  world->driver = std::getenv("FAKE_CUFILE_WITHOUT_DRIVER") == nullptr;
  return world;
}

World& world() {
  static auto* const world = make_world();
  return *world;
}

int enter(const char* function) {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  ++w.counts[function];
  const auto fault = w.faults.find(function);
  if (fault == w.faults.end() || --fault->second.first != 0) return 0;
  const int code = fault->second.second;
  w.faults.erase(fault);
  return code;
}

CUfileError_t status(int code) {
  return {static_cast<CUfileOpError>(code), CUDA_SUCCESS};
}

int fd_of(CUfileHandle_t handle) {
  return static_cast<int>(reinterpret_cast<intptr_t>(handle)) - 1;
}

template <class Move>
ssize_t move(const char* function, CUfileHandle_t handle, size_t nbytes, Move&& one) {
  if (const int code = enter(function); code != 0) {
    if (code >= CUFILEOP_BASE_ERR) return -code;
    errno = code;
    return -1;
  }
  World& w = world();
  {
    const std::lock_guard lock(w.mutex);
    if (w.handles.count(handle) == 0) return -CU_FILE_HANDLE_NOT_REGISTERED;
    nbytes = std::min(nbytes, w.most);
  }
  return one(nbytes);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void fake_cufile_reset() {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  w.faults.clear();
  w.counts.clear();
  w.most = SIZE_MAX;
  w.driver = true;
}
EXPORT void fake_cufile_fail(const char* function, int nth, int code) {
  const std::lock_guard lock(world().mutex);
  world().faults[function] = {nth, code};
}
EXPORT void fake_cufile_short(size_t nbytes) {
  world().most = nbytes;
}
EXPORT void fake_cufile_without_driver() {
  world().driver = false;
}
EXPORT int fake_cufile_count(const char* function) {
  const std::lock_guard lock(world().mutex);
  return world().counts[function];
}
EXPORT int fake_cufile_registered() {
  const std::lock_guard lock(world().mutex);
  return static_cast<int>(world().buffers.size());
}

EXPORT CUfileError_t cuFileDriverOpen() {
  return status(enter("cuFileDriverOpen"));
}
EXPORT CUfileError_t cuFileDriverGetProperties(CUfileDrvProps_t* facts) {
  std::memset(facts, 0, sizeof *facts);
  facts->nvfs.major_version = world().driver ? 2 : 0;
  facts->nvfs.minor_version = world().driver ? 17 : 0;
  facts->nvfs.dcontrolflags = 1U << CU_FILE_ALLOW_COMPAT_MODE;
  return status(enter("cuFileDriverGetProperties"));
}
EXPORT CUfileError_t cuFileGetVersion(int* version) {
  *version = 1140;
  return status(0);
}
EXPORT CUfileError_t cuFileHandleRegister(CUfileHandle_t* handle, CUfileDescr_t* file) {
  if (const int code = enter("cuFileHandleRegister"); code != 0) return status(code);
  struct stat facts{};
  if (file->type != CU_FILE_HANDLE_TYPE_OPAQUE_FD || ::fstat(file->handle.fd, &facts) != 0)
    return status(CU_FILE_INVALID_VALUE);
  if (!S_ISREG(facts.st_mode)) return status(CU_FILE_INVALID_FILE_TYPE);
  if ((::fcntl(file->handle.fd, F_GETFL) & O_DIRECT) == 0) return status(CU_FILE_INVALID_FILE_OPEN_FLAG);
  *handle = reinterpret_cast<CUfileHandle_t>(static_cast<intptr_t>(file->handle.fd) + 1);
  const std::lock_guard lock(world().mutex);
  return status(world().handles.insert(*handle).second ? 0 : CU_FILE_HANDLE_ALREADY_REGISTERED);
}
EXPORT void cuFileHandleDeregister(CUfileHandle_t handle) {
  const std::lock_guard lock(world().mutex);
  world().handles.erase(handle);
}
EXPORT CUfileError_t cuFileBufRegister(const void* at, size_t, int) {
  if (const int code = enter("cuFileBufRegister"); code != 0) return status(code);
  const std::lock_guard lock(world().mutex);
  return status(world().buffers.insert(at).second ? 0 : CU_FILE_MEMORY_ALREADY_REGISTERED);
}
EXPORT CUfileError_t cuFileBufDeregister(const void* at) {
  const std::lock_guard lock(world().mutex);
  return status(world().buffers.erase(at) != 0 ? 0 : CU_FILE_MEMORY_NOT_REGISTERED);
}

namespace {
// Memory of the device need not be aligned, and a transfer may stop anywhere; direct moves of a file are of
// whole pages and to aligned memory.
struct Pages {
  explicit Pages(size_t nbytes)
      : size((nbytes + 4095) / 4096 * 4096), memory(std::aligned_alloc(4096, size)) {}
  ~Pages() { std::free(memory); }
  const size_t size;
  void* const memory;
};
}  // namespace

EXPORT ssize_t cuFileRead(CUfileHandle_t handle, void* to, size_t nbytes, off_t offset, off_t within) {
  return move("cuFileRead", handle, nbytes, [=](size_t n) {
    const Pages pages(n);
    const ssize_t got =
        std::min(::pread(fd_of(handle), pages.memory, pages.size, offset), static_cast<ssize_t>(n));
    if (got > 0) std::memcpy(static_cast<char*>(to) + within, pages.memory, static_cast<size_t>(got));
    return got;
  });
}
EXPORT ssize_t cuFileWrite(CUfileHandle_t handle, const void* from, size_t nbytes, off_t offset,
                           off_t within) {
  return move("cuFileWrite", handle, nbytes, [=](size_t n) {
    const Pages pages(n);
    std::memset(pages.memory, 0, pages.size);
    std::memcpy(pages.memory, static_cast<const char*>(from) + within, n);
    return std::min(::pwrite(fd_of(handle), pages.memory, pages.size, offset), static_cast<ssize_t>(n));
  });
}
