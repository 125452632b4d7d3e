// What the files of the stand-in driver share.
#pragma once
#include <cuda.h>

#include <cstddef>
#include <functional>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fake {

CUresult enter(const char* function);  // counts the call; the fault that a test asked for, if any
bool has_context();
bool reachable(CUdeviceptr at, size_t nbytes);  // by a kernel: the device's memory, or pinned

// The stream runs it in its turn, after a delay; false: it touched memory that it must not.
void queue_kernel(CUstream stream, std::function<bool()> kernel);

}  // namespace fake
