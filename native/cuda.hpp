// NVIDIA's driver, opened when it is first needed. The header gives types and names of symbols; nothing is
// linked, so the same build serves machines that have no driver.
#pragma once
#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace zs::cuda {

#define ZS_CUDA_FUNCTIONS(X)           \
  X(cuInit)                            \
  X(cuGetErrorName)                    \
  X(cuDeviceGet)                       \
  X(cuDeviceGetCount)                  \
  X(cuDeviceGetName)                   \
  X(cuDeviceGetUuid)                   \
  X(cuDeviceGetAttribute)              \
  X(cuDeviceCanAccessPeer)             \
  X(cuDeviceGetP2PAttribute)           \
  X(cuDevicePrimaryCtxRetain)          \
  X(cuDevicePrimaryCtxRelease)         \
  X(cuCtxPushCurrent)                  \
  X(cuCtxPopCurrent)                   \
  X(cuCtxGetStreamPriorityRange)       \
  X(cuStreamCreateWithPriority)        \
  X(cuStreamDestroy)                   \
  X(cuStreamQuery)                     \
  X(cuStreamSynchronize)               \
  X(cuStreamIsCapturing)               \
  X(cuThreadExchangeStreamCaptureMode) \
  X(cuStreamWaitEvent)                 \
  X(cuStreamWriteValue64)              \
  X(cuEventCreate)                     \
  X(cuEventDestroy)                    \
  X(cuEventRecord)                     \
  X(cuEventElapsedTime)                \
  X(cuEventSynchronize)                \
  X(cuModuleLoadData)                  \
  X(cuModuleUnload)                    \
  X(cuModuleGetFunction)               \
  X(cuLaunchKernel)                    \
  X(cuMemAlloc)                        \
  X(cuMemFree)                         \
  X(cuMemGetInfo)                      \
  X(cuIpcGetMemHandle)                 \
  X(cuIpcOpenMemHandle)                \
  X(cuIpcCloseMemHandle)               \
  X(cuMemHostAlloc)                    \
  X(cuMemFreeHost)                     \
  X(cuMemHostGetDevicePointer)         \
  X(cuMemHostRegister)                 \
  X(cuMemHostUnregister)               \
  X(cuPointerGetAttribute)             \
  X(cuMemcpyDtoHAsync)                 \
  X(cuMemcpyHtoDAsync)                 \
  X(cuMemcpyDtoDAsync)

#define ZS_STRING_OF(x) #x
#define ZS_STRING(x) ZS_STRING_OF(x)  // of what the header's macros make of the name: the exported symbol

struct Driver {
#define ZS_FIELD(f) decltype(&::f) f = nullptr;
  ZS_CUDA_FUNCTIONS(ZS_FIELD)
#if CUDA_VERSION >= 12080
  ZS_FIELD(cuMemcpyBatchAsync)  // null where the driver is older
#endif
#undef ZS_FIELD
};

// Opens libcuda.so.1, or what ZEROSTALL_LIBCUDA names. Throws Kind::capability where that cannot be; the next
// call tries again.
const Driver& driver();

// Throws Kind::device (Kind::capacity for want of memory), naming the function and the driver's word for it.
void check(CUresult result, const char* function);

#define ZS_CUDA(f, ...) ::zs::cuda::check(::zs::cuda::driver().f(__VA_ARGS__), #f)

// Host addresses are numbers like the device's: all live in one address space.
struct Copy {
  CUdeviceptr to, from;
  size_t nbytes;
};
enum class Way { to_host, to_device, within, to_peer, from_peer };

// Queues the copies; with `batch`, in one call where there are several and the driver can. A batch must not
// go to the legacy default stream, and its host memory must be pinned. By how many calls.
size_t copy(Way way, std::span<const Copy> copies, CUstream stream, bool batch);
bool has_batches();

// The primary context of a device, the one torch uses; kept as long as somebody holds this.
class Context {
 public:
  explicit Context(int ordinal);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context();
  int ordinal() const { return ordinal_; }

  // Makes it this thread's current context for as long as it lives.
  class Current {
   public:
    explicit Current(const Context& context);
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    ~Current();
  };

 private:
  int ordinal_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
};

bool is_pinned(const void* host);

}  // namespace zs::cuda
