// A stand-in for libcuda.so.1: host memory plays the device's, a thread plays each stream. What is queued
// runs later and out of step with other streams, as on a device, so that a forgotten order shows in the
// bytes. Kernels are interpreted from their text (kernels.cpp, ptx.cpp).
//
// Beside the driver's functions, tests have:
//   fake_cuda_reset()                    no delays, no faults, no counts (memory and streams stay)
//   fake_cuda_delay(microseconds)        every copy takes up to twice that long, at random
//   fake_cuda_fail(function, nth, code)  the nth call from now on of that function fails
//   fake_cuda_without(function)          that function fails with CUDA_ERROR_NOT_SUPPORTED until reset
//   fake_cuda_work(stream, microseconds, to, nbytes, value)  a kernel: takes its time, then fills memory
//   fake_cuda_hold(stream)               what is queued behind this waits for fake_cuda_release(), or a reset
//   fake_cuda_hold_copies()              so does every copy, of whatever stream
//   fake_cuda_capturing(stream, yes)     the stream is being captured into a graph
//   fake_cuda_count(function)            calls since reset
//   fake_cuda_allocated()                bytes of the device's memory in use
//
// Environment: FAKE_CUDA_DEVICES says how many devices there are (2), FAKE_CUDA_LINKS which reach each other
// ("0-1,2-3"; all by default, "" for none), FAKE_CUDA_MEMORY how many bytes one process may allocate in all.
// FAKE_CUDA_FAIL="word function nth code" is fake_cuda_fail in processes whose command line has that word.
// A device's memory is a memfd: by its handle another process maps it for as long as the owner lives, and
// keeps what it has mapped.
#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "fake.hpp"

namespace {

using std::chrono::microseconds;

class Stream {
 public:
  Stream() : thread_([this] { serve(); }) {}
  ~Stream() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }
  void add(std::function<void()> work) {
    {
      const std::lock_guard lock(mutex_);
      work_.push_back(std::move(work));
    }
    wake_.notify_all();
  }
  bool idle() {
    const std::lock_guard lock(mutex_);
    return work_.empty();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    wake_.wait(lock, [this] { return work_.empty(); });
  }
  std::atomic<bool> capturing{false};
  std::atomic<int> error{0};  // of a copy that failed while it ran

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return stop_ || !work_.empty(); });
      if (work_.empty()) return;
      const std::function<void()> work = work_.front();
      lock.unlock();
      work();
      lock.lock();
      work_.pop_front();
      wake_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> work_;
  bool stop_ = false;
  std::thread thread_;
};

// What one cuEventRecord marks.
struct Mark {
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;
  std::chrono::steady_clock::time_point when{};
};

struct Event {
  std::shared_ptr<Mark> mark;
};

struct World {
  std::mutex mutex;
  std::set<Stream*> streams;
  Stream* standard = nullptr;            // the legacy default stream
  std::map<CUdeviceptr, size_t> memory;  // of the devices
  std::map<CUdeviceptr, size_t> opened;  // of other processes
  char* next = nullptr;                  // where the next allocation begins, with `room` bytes behind it
  size_t room = 0;
  struct Arena {
    char* at;
    size_t nbytes;
    int fd;
  };
  std::vector<Arena> arenas;
  std::map<CUdeviceptr, size_t> pinned;  // of the host
  std::map<std::string, std::pair<int, CUresult>> faults;
  std::set<std::string> missing;
  std::map<std::string, int> counts;
  std::atomic<int> delay{0};
};

bool commanded(const std::string& word) {
  std::ifstream file("/proc/self/cmdline");
  const std::string line((std::istreambuf_iterator<char>(file)), {});
  return line.find(word) != std::string::npos;
}

World* make_world() {
  auto* const world = new World;  // streams run until the process ends
  const char* setting = std::getenv("FAKE_CUDA_FAIL");
  std::istringstream words(setting != nullptr ? setting : "");
  std::string word, function;
  int nth = 0, code = 0;
  if (words >> word >> function >> nth >> code && commanded(word))
    world->faults[function] = {nth, static_cast<CUresult>(code)};
  return world;
}

World& world() {
  static auto* const world = make_world();
  return *world;
}

CUresult enter(const char* function) {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  ++w.counts[function];
  if (w.missing.count(function) != 0) return CUDA_ERROR_NOT_SUPPORTED;
  const auto fault = w.faults.find(function);
  if (fault == w.faults.end() || --fault->second.first != 0) return CUDA_SUCCESS;
  const CUresult code = fault->second.second;
  w.faults.erase(fault);
  return code;
}

#define ENTER(function) \
  if (const CUresult code = enter(function); code != CUDA_SUCCESS) return code

Stream* of(CUstream stream) {
  if (stream != nullptr) return reinterpret_cast<Stream*>(stream);
  World& w = world();
  const std::lock_guard lock(w.mutex);
  if (w.standard == nullptr) w.standard = new Stream;
  return w.standard;
}

bool inside(const std::map<CUdeviceptr, size_t>& all, CUdeviceptr at, size_t nbytes) {
  auto next = all.upper_bound(at);
  if (next == all.begin()) return false;
  --next;
  return at + nbytes <= next->first + next->second;
}

bool on_device(CUdeviceptr at, size_t nbytes) {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  return inside(w.memory, at, nbytes) || inside(w.opened, at, nbytes);
}

int devices() {
  const char* setting = std::getenv("FAKE_CUDA_DEVICES");
  return setting != nullptr ? std::atoi(setting) : 2;
}

bool linked(int one, int other) {
  if (one == other) return false;
  const char* setting = std::getenv("FAKE_CUDA_LINKS");
  if (setting == nullptr) return true;
  const std::string links = "," + std::string(setting) + ",";
  const auto has = [&](int a, int b) {
    return links.find("," + std::to_string(a) + "-" + std::to_string(b) + ",") != std::string::npos;
  };
  return has(one, other) || has(other, one);
}

size_t most_memory() {
  const char* setting = std::getenv("FAKE_CUDA_MEMORY");
  return setting != nullptr ? std::strtoull(setting, nullptr, 10) : size_t{8} << 30;
}

size_t in_use(const World& w) {
  size_t total = 0;
  for (const auto& [at, nbytes] : w.memory) total += nbytes;
  return total;
}

// What a handle holds: where to find the memory of whose process.
struct Handle {
  int pid, fd;
  uint64_t offset, nbytes;
};

bool pinned(CUdeviceptr at, size_t nbytes) {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  return inside(w.pinned, at, nbytes);
}

void dawdle() {
  const int delay = world().delay.load();
  if (delay == 0) return;
  thread_local std::mt19937 random(
      static_cast<unsigned>(std::hash<std::thread::id>()(std::this_thread::get_id())));
  std::this_thread::sleep_for(microseconds(random() % (2 * static_cast<unsigned>(delay))));
}

// Device memory is read and written by threads that the program under test knows nothing of. Only what it
// must order itself is to be seen by a thread sanitizer, so bytes are moved one by one with relaxed atomics.
void move(CUdeviceptr to, CUdeviceptr from, size_t nbytes) {
  auto* t = reinterpret_cast<uint8_t*>(to);
  auto* f = reinterpret_cast<const uint8_t*>(from);
  size_t k = 0;
  if (to % 8 == 0 && from % 8 == 0)
    for (; k + 8 <= nbytes; k += 8)
      __atomic_store_n(reinterpret_cast<uint64_t*>(t + k),
                       __atomic_load_n(reinterpret_cast<const uint64_t*>(f + k), __ATOMIC_RELAXED),
                       __ATOMIC_RELAXED);
  for (; k < nbytes; ++k) __atomic_store_n(t + k, __atomic_load_n(f + k, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
}

// Holds streams up until it is opened.
class Gate {
 public:
  uint64_t draw() {
    const std::lock_guard lock(mutex_);
    return ++drawn_;
  }
  void pass(uint64_t ticket) {
    std::unique_lock lock(mutex_);
    opened_up_.wait(lock, [&] { return opened_ >= ticket; });
  }
  void open() {
    const std::lock_guard lock(mutex_);
    opened_ = drawn_;
    opened_up_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_up_;
  uint64_t drawn_ = 0, opened_ = 0;
};

Gate& gate() {
  static Gate& the = *new Gate;  // streams outlive what is torn down at the end
  return the;
}

std::atomic<uint64_t> copies_wait_for{0};

CUresult queue_copy(CUdeviceptr to, CUdeviceptr from, size_t nbytes, bool to_device, bool from_device,
                    Stream* stream) {
  if (nbytes == 0) return CUDA_SUCCESS;
  if (to_device && !on_device(to, nbytes)) return CUDA_ERROR_INVALID_VALUE;
  if (from_device && !on_device(from, nbytes)) return CUDA_ERROR_INVALID_VALUE;
  const auto run = [=] {
    if (stream->error != 0) return;
    gate().pass(copies_wait_for);
    dawdle();
    // Looked at again: memory freed with copies still queued is an illegal address.
    if ((to_device && !on_device(to, nbytes)) || (from_device && !on_device(from, nbytes)))
      stream->error = CUDA_ERROR_ILLEGAL_ADDRESS;
    else
      move(to, from, nbytes);
  };
  const CUdeviceptr host = to_device ? from : to;
  stream->add(run);
  if (to_device != from_device && !pinned(host, nbytes))
    stream->wait();  // pageable memory holds the caller up
  return CUDA_SUCCESS;
}

}  // namespace

EXPORT void fake_cuda_reset() {
  gate().open();
  World& w = world();
  const std::lock_guard lock(w.mutex);
  w.faults.clear();
  w.missing.clear();
  w.counts.clear();
  w.delay = 0;
  for (Stream* stream : w.streams) stream->error = 0;
}
EXPORT void fake_cuda_delay(int us) {
  world().delay = us;
}
EXPORT void fake_cuda_fail(const char* function, int nth, int code) {
  const std::lock_guard lock(world().mutex);
  world().faults[function] = {nth, static_cast<CUresult>(code)};
}
EXPORT void fake_cuda_without(const char* function) {
  const std::lock_guard lock(world().mutex);
  world().missing.insert(function);
}
EXPORT int fake_cuda_count(const char* function) {
  const std::lock_guard lock(world().mutex);
  return world().counts[function];
}
EXPORT uint64_t fake_cuda_allocated() {
  const std::lock_guard lock(world().mutex);
  return in_use(world());
}
EXPORT void fake_cuda_capturing(CUstream stream, int yes) {
  of(stream)->capturing = yes != 0;
}
EXPORT void fake_cuda_work(CUstream stream, int us, CUdeviceptr to, size_t nbytes, int value) {
  of(stream)->add([=] {
    std::this_thread::sleep_for(microseconds(us));
    for (size_t k = 0; k < nbytes; ++k)
      __atomic_store_n(reinterpret_cast<uint8_t*>(to) + k, static_cast<uint8_t>(value), __ATOMIC_RELAXED);
  });
}

EXPORT void fake_cuda_hold(CUstream stream) {
  of(stream)->add([ticket = gate().draw()] { gate().pass(ticket); });
}
EXPORT void fake_cuda_hold_copies() {
  copies_wait_for = gate().draw();
}
EXPORT void fake_cuda_release() {
  gate().open();
}

EXPORT CUresult cuInit(unsigned) {
  ENTER("cuInit");
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorName(CUresult code, const char** name) {
  thread_local std::string text;
  text = code == CUDA_ERROR_OUT_OF_MEMORY     ? "CUDA_ERROR_OUT_OF_MEMORY"
         : code == CUDA_ERROR_ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                              : "CUDA_ERROR_" + std::to_string(code);
  *name = text.c_str();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  ENTER("cuDeviceGet");
  if (ordinal < 0 || ordinal >= devices()) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetCount(int* count) {
  ENTER("cuDeviceGetCount");
  *count = devices();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetName(char* name, int room, CUdevice device) {
  std::snprintf(name, static_cast<size_t>(room), "stand-in %d", device);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  std::memset(uuid, 0, sizeof(*uuid));
  uuid->bytes[15] = static_cast<char>(device);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceCanAccessPeer(int* can, CUdevice one, CUdevice other) {
  ENTER("cuDeviceCanAccessPeer");
  *can = linked(one, other) ? 1 : 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute which, CUdevice one,
                                        CUdevice other) {
  ENTER("cuDeviceGetP2PAttribute");
  *value = which != CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK && linked(one, other) ? 1 : 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  ENTER("cuDevicePrimaryCtxRetain");
  *context = reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device + 1));
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice) {
  return CUDA_SUCCESS;
}

namespace {
thread_local std::vector<CUcontext> contexts;
}
// Functions that need a current context; the program under test must see to it in each of its threads.
#define NEEDS_CONTEXT \
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT

namespace fake {

CUresult enter(const char* function) {
  return ::enter(function);
}
bool has_context() {
  return !contexts.empty();
}
bool reachable(CUdeviceptr at, size_t nbytes) {
  return on_device(at, nbytes) || pinned(at, nbytes);
}
void queue_kernel(CUstream stream, std::function<bool()> kernel) {
  Stream* const on = of(stream);
  on->add([on, kernel = std::move(kernel)] {
    if (on->error != 0) return;
    dawdle();
    if (!kernel()) on->error = CUDA_ERROR_ILLEGAL_ADDRESS;
  });
}

}  // namespace fake

EXPORT CUresult cuCtxPushCurrent(CUcontext context) {
  contexts.push_back(context);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxPopCurrent(CUcontext* context) {
  NEEDS_CONTEXT;
  *context = contexts.back();
  contexts.pop_back();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  NEEDS_CONTEXT;
  *least = 0, *greatest = -5;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned, int) {
  NEEDS_CONTEXT;
  ENTER("cuStreamCreateWithPriority");
  auto* const made = new Stream;
  const std::lock_guard lock(world().mutex);
  world().streams.insert(made);
  *stream = reinterpret_cast<CUstream>(made);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamDestroy(CUstream stream) {
  {
    const std::lock_guard lock(world().mutex);
    world().streams.erase(of(stream));
  }
  delete of(stream);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamQuery(CUstream stream) {
  NEEDS_CONTEXT;
  ENTER("cuStreamQuery");
  if (of(stream)->error != 0) return static_cast<CUresult>(of(stream)->error.load());
  return of(stream)->idle() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
EXPORT CUresult cuStreamSynchronize(CUstream stream) {
  NEEDS_CONTEXT;
  ENTER("cuStreamSynchronize");
  of(stream)->wait();
  return static_cast<CUresult>(of(stream)->error.load());
}
EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  NEEDS_CONTEXT;
  *status = of(stream)->capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  *mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuEventCreate(CUevent* event, unsigned) {
  NEEDS_CONTEXT;
  *event = reinterpret_cast<CUevent>(new Event);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuEventDestroy(CUevent event) {
  delete reinterpret_cast<Event*>(event);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuEventRecord(CUevent event, CUstream stream) {
  NEEDS_CONTEXT;
  ENTER("cuEventRecord");
  const auto mark = std::make_shared<Mark>();
  reinterpret_cast<Event*>(event)->mark = mark;
  of(stream)->add([mark] {
    const std::lock_guard lock(mark->mutex);
    mark->reached = true;
    mark->when = std::chrono::steady_clock::now();
    mark->changed.notify_all();
  });
  return CUDA_SUCCESS;
}
EXPORT CUresult cuEventElapsedTime(float* milliseconds, CUevent begin, CUevent end) {
  std::chrono::steady_clock::time_point at[2];
  for (const int k : {0, 1}) {
    const std::shared_ptr<Mark> mark = reinterpret_cast<Event*>(k == 0 ? begin : end)->mark;
    if (mark == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const std::lock_guard lock(mark->mutex);
    if (!mark->reached) return CUDA_ERROR_NOT_READY;
    at[k] = mark->when;
  }
  *milliseconds = std::chrono::duration<float, std::milli>(at[1] - at[0]).count();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuEventSynchronize(CUevent event) {
  NEEDS_CONTEXT;
  ENTER("cuEventSynchronize");
  const std::shared_ptr<Mark> mark = reinterpret_cast<Event*>(event)->mark;
  if (mark == nullptr) return CUDA_SUCCESS;
  std::unique_lock lock(mark->mutex);
  mark->changed.wait(lock, [&] { return mark->reached; });
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  NEEDS_CONTEXT;
  ENTER("cuStreamWaitEvent");
  const std::shared_ptr<Mark> mark = reinterpret_cast<Event*>(event)->mark;
  if (mark == nullptr) return CUDA_SUCCESS;
  of(stream)->add([mark] {
    std::unique_lock lock(mark->mutex);
    mark->changed.wait(lock, [&] { return mark->reached; });
  });
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamWriteValue64(CUstream stream, CUdeviceptr to, cuuint64_t value, unsigned) {
  NEEDS_CONTEXT;
  ENTER("cuStreamWriteValue64");
  Stream* const on = of(stream);
  on->add([=] {
    if (on->error == 0) __atomic_store_n(reinterpret_cast<uint64_t*>(to), value, __ATOMIC_RELEASE);
  });
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAlloc(CUdeviceptr* at, size_t nbytes) {
  NEEDS_CONTEXT;
  ENTER("cuMemAlloc");
  const std::lock_guard lock(world().mutex);
  // One after another, as large ones are on a device: a copy across two allocations is still refused.
  const size_t rounded = (nbytes + 511) / 512 * 512;
  if (in_use(world()) + rounded > most_memory()) return CUDA_ERROR_OUT_OF_MEMORY;
  if (rounded > world().room) {
    world().room = (std::max(rounded, size_t{64} << 20) + 4095) / 4096 * 4096;
    const int fd = ::memfd_create("fake-cuda", MFD_CLOEXEC);
    if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(world().room)) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
    void* const memory = ::mmap(nullptr, world().room, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    world().next = static_cast<char*>(memory);
    world().arenas.push_back({world().next, world().room, fd});
  }
  char* const memory = world().next;
  world().next += rounded;
  world().room -= rounded;
  std::memset(memory, 0xAB, nbytes);
  *at = reinterpret_cast<CUdeviceptr>(memory);
  world().memory[*at] = nbytes;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemFree(CUdeviceptr at) {
  NEEDS_CONTEXT;
  // Never given back to the host's allocator: what still reads it reads wrong bytes, and does not crash.
  const std::lock_guard lock(world().mutex);
  const auto found = world().memory.find(at);
  if (found == world().memory.end()) return CUDA_ERROR_INVALID_VALUE;
  world().memory.erase(found);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemGetInfo(size_t* free, size_t* total) {
  NEEDS_CONTEXT;
  ENTER("cuMemGetInfo");
  const std::lock_guard lock(world().mutex);
  *total = most_memory();
  *free = *total - std::min(*total, in_use(world()));
  return CUDA_SUCCESS;
}
EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr at) {
  NEEDS_CONTEXT;
  ENTER("cuIpcGetMemHandle");
  const std::lock_guard lock(world().mutex);
  const auto found = world().memory.find(at);
  if (found == world().memory.end()) return CUDA_ERROR_INVALID_VALUE;
  auto* const start = reinterpret_cast<char*>(at);
  for (const World::Arena& arena : world().arenas) {
    if (start < arena.at || start >= arena.at + arena.nbytes) continue;
    const Handle made{::getpid(), arena.fd, static_cast<uint64_t>(start - arena.at), found->second};
    std::memset(handle, 0, sizeof(*handle));
    std::memcpy(handle, &made, sizeof(made));
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr* at, CUipcMemHandle handle, unsigned) {
  NEEDS_CONTEXT;
  ENTER("cuIpcOpenMemHandle");
  Handle made;
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
  const std::lock_guard lock(world().mutex);
  world().opened[*at] = made.nbytes;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr at) {
  NEEDS_CONTEXT;
  ENTER("cuIpcCloseMemHandle");
  const std::lock_guard lock(world().mutex);  // stays mapped: who still copies there does not crash
  return world().opened.erase(at) != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuMemHostAlloc(void** at, size_t nbytes, unsigned) {
  NEEDS_CONTEXT;
  ENTER("cuMemHostAlloc");
  *at = std::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
  const std::lock_guard lock(world().mutex);
  world().pinned[reinterpret_cast<CUdeviceptr>(*at)] = nbytes;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemFreeHost(void* at) {
  {
    const std::lock_guard lock(world().mutex);
    world().pinned.erase(reinterpret_cast<CUdeviceptr>(at));
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
  const std::lock_guard lock(world().mutex);
  world().pinned[reinterpret_cast<CUdeviceptr>(at)] = nbytes;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemHostUnregister(void* at) {
  NEEDS_CONTEXT;
  ENTER("cuMemHostUnregister");
  const std::lock_guard lock(world().mutex);
  return world().pinned.erase(reinterpret_cast<CUdeviceptr>(at)) != 0 ? CUDA_SUCCESS
                                                                      : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}
EXPORT CUresult cuPointerGetAttribute(void* to, CUpointer_attribute, CUdeviceptr at) {
  if (on_device(at, 1)) {
    *static_cast<unsigned*>(to) = CU_MEMORYTYPE_DEVICE;
    return CUDA_SUCCESS;
  }
  if (!pinned(at, 1)) return CUDA_ERROR_INVALID_VALUE;
  *static_cast<unsigned*>(to) = CU_MEMORYTYPE_HOST;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t nbytes, CUstream stream) {
  NEEDS_CONTEXT;
  ENTER("cuMemcpyDtoHAsync");
  return queue_copy(reinterpret_cast<CUdeviceptr>(to), from, nbytes, false, true, of(stream));
}
EXPORT CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t nbytes, CUstream stream) {
  NEEDS_CONTEXT;
  ENTER("cuMemcpyHtoDAsync");
  return queue_copy(to, reinterpret_cast<CUdeviceptr>(from), nbytes, true, false, of(stream));
}
EXPORT CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t nbytes, CUstream stream) {
  NEEDS_CONTEXT;
  ENTER("cuMemcpyDtoDAsync");
  return queue_copy(to, from, nbytes, true, true, of(stream));
}
#if CUDA_VERSION >= 12080
#if CUDA_VERSION >= 13000
EXPORT CUresult cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                                   CUmemcpyAttributes*, size_t*, size_t attributes, CUstream stream) {
#else
EXPORT CUresult cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                                   CUmemcpyAttributes*, size_t*, size_t attributes, size_t*,
                                   CUstream stream) {
#endif
  NEEDS_CONTEXT;
  ENTER("cuMemcpyBatchAsync");
  if (stream == nullptr || attributes == 0) return CUDA_ERROR_INVALID_VALUE;
  for (size_t k = 0; k < count; ++k) {
    const bool to_device = on_device(to[k], sizes[k]), from_device = on_device(from[k], sizes[k]);
    if ((!to_device && !pinned(to[k], sizes[k])) || (!from_device && !pinned(from[k], sizes[k])))
      return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult code = queue_copy(to[k], from[k], sizes[k], to_device, from_device, of(stream));
        code != CUDA_SUCCESS)
      return code;
  }
  return CUDA_SUCCESS;
}
#endif
