#include "cuda.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "error.hpp"

namespace zs::cuda {
namespace {

std::string word_for(const Driver& driver, CUresult result) {
  const char* name = nullptr;
  if (driver.cuGetErrorName != nullptr) driver.cuGetErrorName(result, &name);
  return name != nullptr ? name : "error " + std::to_string(static_cast<int>(result));
}

Driver load() {
  const char* chosen = std::getenv("ZEROSTALL_LIBCUDA");
  const std::string name = chosen != nullptr && *chosen != '\0' ? chosen : "libcuda.so.1";
  void* const library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed: threads may be in it
  if (library == nullptr) {
    const char* why = ::dlerror();
    throw Error(Kind::capability, std::string("NVIDIA's driver cannot be opened: ") + (why ? why : name));
  }
  Driver driver;
#define ZS_LOAD(f)                                                                 \
  driver.f = reinterpret_cast<decltype(driver.f)>(::dlsym(library, ZS_STRING(f))); \
  if (driver.f == nullptr)                                                         \
    throw Error(Kind::capability, name + " has no " ZS_STRING(f) ": the driver is too old");
  ZS_CUDA_FUNCTIONS(ZS_LOAD)
#undef ZS_LOAD
#if CUDA_VERSION >= 12080
  driver.cuMemcpyBatchAsync =
      reinterpret_cast<decltype(driver.cuMemcpyBatchAsync)>(::dlsym(library, ZS_STRING(cuMemcpyBatchAsync)));
#endif
  if (const CUresult result = driver.cuInit(0); result != CUDA_SUCCESS)
    throw Error(Kind::capability, "NVIDIA's driver does not start: " + word_for(driver, result));
  return driver;
}

CUresult copy_one(Way way, const Copy& one, CUstream stream) {
  const Driver& d = driver();
  switch (way) {
    case Way::to_host:
      return d.cuMemcpyDtoHAsync(reinterpret_cast<void*>(one.to), one.from, one.nbytes, stream);
    case Way::to_device:
      return d.cuMemcpyHtoDAsync(one.to, reinterpret_cast<const void*>(one.from), one.nbytes, stream);
    case Way::within:
    case Way::to_peer:
    case Way::from_peer:  // one address space: the driver sees whose memory that is
      return d.cuMemcpyDtoDAsync(one.to, one.from, one.nbytes, stream);
  }
  return CUDA_ERROR_INVALID_VALUE;
}

#if CUDA_VERSION >= 12080
void copy_batch(std::span<const Copy> copies, CUstream stream) {
  std::vector<CUdeviceptr> to, from;
  std::vector<size_t> sizes;
  for (const Copy& one : copies) {
    to.push_back(one.to);
    from.push_back(one.from);
    sizes.push_back(one.nbytes);
  }
  CUmemcpyAttributes attributes{};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  attributes.flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE;
  size_t first = 0;
#if CUDA_VERSION >= 13000
  ZS_CUDA(cuMemcpyBatchAsync, to.data(), from.data(), sizes.data(), copies.size(), &attributes, &first, 1,
          stream);
#else
  size_t failed = 0;
  ZS_CUDA(cuMemcpyBatchAsync, to.data(), from.data(), sizes.data(), copies.size(), &attributes, &first, 1,
          &failed, stream);
#endif
}
#endif

}  // namespace

const Driver& driver() {
  static const Driver driver = load();
  return driver;
}

void check(CUresult result, const char* function) {
  if (result == CUDA_SUCCESS) return;
  throw Error(result == CUDA_ERROR_OUT_OF_MEMORY ? Kind::capacity : Kind::device,
              std::string(function) + ": " + word_for(driver(), result));
}

bool has_batches() {
#if CUDA_VERSION >= 12080
  return driver().cuMemcpyBatchAsync != nullptr;
#else
  return false;
#endif
}

size_t copy(Way way, std::span<const Copy> copies, CUstream stream, bool batch) {
#if CUDA_VERSION >= 12080
  if (batch && copies.size() > 1 && has_batches()) {
    copy_batch(copies, stream);
    return 1;
  }
#else
  (void)batch;
#endif
  for (const Copy& one : copies) check(copy_one(way, one, stream), "cuMemcpyAsync");
  return copies.size();
}

Context::Context(int ordinal) : ordinal_(ordinal) {
  ZS_CUDA(cuDeviceGet, &device_, ordinal);
  ZS_CUDA(cuDevicePrimaryCtxRetain, &context_, device_);
}

Context::~Context() {
  driver().cuDevicePrimaryCtxRelease(device_);
}

Context::Current::Current(const Context& context) {
  ZS_CUDA(cuCtxPushCurrent, context.context_);
}

Context::Current::~Current() {
  CUcontext popped = nullptr;
  driver().cuCtxPopCurrent(&popped);
}

bool is_pinned(const void* host) {
  unsigned kind = 0;
  const CUresult result = driver().cuPointerGetAttribute(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                                         reinterpret_cast<CUdeviceptr>(host));
  return result == CUDA_SUCCESS && kind == CU_MEMORYTYPE_HOST;
}

}  // namespace zs::cuda
