// Copies of the stand-in driver: what is queued runs later, and out of step with other streams.
#include <cstdint>

#include "fake.hpp"
#include "streams.hpp"

namespace fake {
namespace {

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

CUresult queue_copy(CUdeviceptr to, CUdeviceptr from, size_t nbytes, bool to_device, bool from_device,
                    Stream* stream) {
  if (nbytes == 0) return CUDA_SUCCESS;
  if (to_device && !on_device(to, nbytes)) return CUDA_ERROR_INVALID_VALUE;
  if (from_device && !on_device(from, nbytes)) return CUDA_ERROR_INVALID_VALUE;
  const auto run = [=] {
    if (stream->error != 0) return;
    await_copies_gate();
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
}  // namespace fake

EXPORT CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t nbytes, CUstream stream) {
  NEEDS_CONTEXT;
  ENTER("cuMemcpyDtoHAsync");
  return fake::queue_copy(reinterpret_cast<CUdeviceptr>(to), from, nbytes, false, true,
                          fake::stream_of(stream));
}
EXPORT CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t nbytes, CUstream stream) {
  NEEDS_CONTEXT;
  ENTER("cuMemcpyHtoDAsync");
  return fake::queue_copy(to, reinterpret_cast<CUdeviceptr>(from), nbytes, true, false,
                          fake::stream_of(stream));
}
EXPORT CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t nbytes, CUstream stream) {
  NEEDS_CONTEXT;
  ENTER("cuMemcpyDtoDAsync");
  return fake::queue_copy(to, from, nbytes, true, true, fake::stream_of(stream));
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
    const bool to_device = fake::on_device(to[k], sizes[k]), from_device = fake::on_device(from[k], sizes[k]);
    if ((!to_device && !fake::pinned(to[k], sizes[k])) || (!from_device && !fake::pinned(from[k], sizes[k])))
      return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult code =
            fake::queue_copy(to[k], from[k], sizes[k], to_device, from_device, fake::stream_of(stream));
        code != CUDA_SUCCESS)
      return code;
  }
  return CUDA_SUCCESS;
}
#endif
