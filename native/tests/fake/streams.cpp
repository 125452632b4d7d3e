#include "streams.hpp"

#include <chrono>
#include <memory>
#include <set>

namespace fake {
namespace {

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

// All there are, until the process ends.
struct Streams {
  std::mutex mutex;
  std::set<Stream*> all;
  Stream* standard = nullptr;
};

Streams& streams() {
  static auto* const the = new Streams;
  return *the;
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

}  // namespace

Stream* stream_of(CUstream stream) {
  if (stream != nullptr) return reinterpret_cast<Stream*>(stream);
  Streams& s = streams();
  const std::lock_guard lock(s.mutex);
  if (s.standard == nullptr) s.standard = new Stream;
  return s.standard;
}

void queue_kernel(CUstream stream, std::function<bool()> kernel) {
  Stream* const on = stream_of(stream);
  on->add([on, kernel = std::move(kernel)] {
    if (on->error != 0) return;
    dawdle();
    if (!kernel()) on->error = CUDA_ERROR_ILLEGAL_ADDRESS;
  });
}

void await_copies_gate() {
  gate().pass(copies_wait_for);
}
void open_gate() {
  gate().open();
}
void forget_errors() {
  const std::lock_guard lock(streams().mutex);
  for (Stream* stream : streams().all) stream->error = 0;
}

}  // namespace fake

EXPORT void fake_cuda_capturing(CUstream stream, int yes) {
  fake::stream_of(stream)->capturing = yes != 0;
}
EXPORT void fake_cuda_work(CUstream stream, int us, CUdeviceptr to, size_t nbytes, int value) {
  fake::stream_of(stream)->add([=] {
    std::this_thread::sleep_for(std::chrono::microseconds(us));
    for (size_t k = 0; k < nbytes; ++k)
      __atomic_store_n(reinterpret_cast<uint8_t*>(to) + k, static_cast<uint8_t>(value), __ATOMIC_RELAXED);
  });
}
EXPORT void fake_cuda_hold(CUstream stream) {
  fake::stream_of(stream)->add([ticket = fake::gate().draw()] { fake::gate().pass(ticket); });
}
EXPORT void fake_cuda_hold_copies() {
  fake::copies_wait_for = fake::gate().draw();
}
EXPORT void fake_cuda_release() {
  fake::open_gate();
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  NEEDS_CONTEXT;
  *least = 0, *greatest = -5;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned, int) {
  NEEDS_CONTEXT;
  ENTER("cuStreamCreateWithPriority");
  auto* const made = new fake::Stream;
  const std::lock_guard lock(fake::streams().mutex);
  fake::streams().all.insert(made);
  *stream = reinterpret_cast<CUstream>(made);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamDestroy(CUstream stream) {
  {
    const std::lock_guard lock(fake::streams().mutex);
    fake::streams().all.erase(fake::stream_of(stream));
  }
  delete fake::stream_of(stream);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamQuery(CUstream stream) {
  NEEDS_CONTEXT;
  ENTER("cuStreamQuery");
  if (fake::stream_of(stream)->error != 0)
    return static_cast<CUresult>(fake::stream_of(stream)->error.load());
  return fake::stream_of(stream)->idle() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
EXPORT CUresult cuStreamSynchronize(CUstream stream) {
  NEEDS_CONTEXT;
  ENTER("cuStreamSynchronize");
  fake::stream_of(stream)->wait();
  return static_cast<CUresult>(fake::stream_of(stream)->error.load());
}
EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  NEEDS_CONTEXT;
  ENTER("cuStreamIsCapturing");
  *status =
      fake::stream_of(stream)->capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  *mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamWriteValue64(CUstream stream, CUdeviceptr to, cuuint64_t value, unsigned) {
  NEEDS_CONTEXT;
  ENTER("cuStreamWriteValue64");
  fake::Stream* const on = fake::stream_of(stream);
  on->add([=] {
    if (on->error == 0) __atomic_store_n(reinterpret_cast<uint64_t*>(to), value, __ATOMIC_RELEASE);
  });
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  NEEDS_CONTEXT;
  ENTER("cuStreamWaitEvent");
  const std::shared_ptr<fake::Mark> mark = reinterpret_cast<fake::Event*>(event)->mark;
  if (mark == nullptr) return CUDA_SUCCESS;
  fake::stream_of(stream)->add([mark] {
    std::unique_lock lock(mark->mutex);
    mark->changed.wait(lock, [&] { return mark->reached; });
  });
  return CUDA_SUCCESS;
}

EXPORT CUresult cuEventCreate(CUevent* event, unsigned) {
  NEEDS_CONTEXT;
  *event = reinterpret_cast<CUevent>(new fake::Event);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuEventDestroy(CUevent event) {
  delete reinterpret_cast<fake::Event*>(event);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuEventRecord(CUevent event, CUstream stream) {
  NEEDS_CONTEXT;
  ENTER("cuEventRecord");
  const auto mark = std::make_shared<fake::Mark>();
  reinterpret_cast<fake::Event*>(event)->mark = mark;
  fake::stream_of(stream)->add([mark] {
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
    const std::shared_ptr<fake::Mark> mark = reinterpret_cast<fake::Event*>(k == 0 ? begin : end)->mark;
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
  const std::shared_ptr<fake::Mark> mark = reinterpret_cast<fake::Event*>(event)->mark;
  if (mark == nullptr) return CUDA_SUCCESS;
  std::unique_lock lock(mark->mutex);
  mark->changed.wait(lock, [&] { return mark->reached; });
  return CUDA_SUCCESS;
}
