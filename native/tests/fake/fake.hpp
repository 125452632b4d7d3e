// What the files of the stand-in driver share.
#pragma once
#include <cuda.h>

#include <cstddef>

#define EXPORT extern "C" __attribute__((visibility("default")))
// What each of the driver's functions begins with: it is counted, and a fault that a test asked for is met.
#define ENTER(function) \
  if (const CUresult code = fake::enter(function); code != CUDA_SUCCESS) return code
// Those that need a current context; the program under test must see to it in each of its threads.
#define NEEDS_CONTEXT \
  if (!fake::has_context()) return CUDA_ERROR_INVALID_CONTEXT

namespace fake {

CUresult enter(const char* function);
bool has_context();
void dawdle();  // for as long as a test asked for
int devices();
bool linked(int one, int other);
size_t most_memory();  // that one process may allocate

bool on_device(CUdeviceptr at, size_t nbytes);
bool pinned(CUdeviceptr at, size_t nbytes);
inline bool reachable(CUdeviceptr at, size_t nbytes) {  // by a kernel
  return on_device(at, nbytes) || pinned(at, nbytes);
}

}  // namespace fake
