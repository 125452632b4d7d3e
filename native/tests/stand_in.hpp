// What the stand-in driver has for tests; see fake/fake_cuda.cpp.
#pragma once
#include <cuda.h>
#include <dlfcn.h>

#include <cstdlib>

#include "check.hpp"

namespace stand_in {

template <class F>
F* function(const char* name) {
  static void* const library = ::dlopen(std::getenv("ZEROSTALL_LIBCUDA"), RTLD_NOW);
  void* const found = ::dlsym(library, name);
  CHECK(found != nullptr);
  return reinterpret_cast<F*>(found);
}

inline void reset() {
  function<void()>("fake_cuda_reset")();
}
inline void delay(int us) {
  function<void(int)>("fake_cuda_delay")(us);
}
inline void fail(const char* name, int nth, int code) {
  function<void(const char*, int, int)>("fake_cuda_fail")(name, nth, code);
}
inline void without(const char* name) {
  function<void(const char*)>("fake_cuda_without")(name);
}
inline int count(const char* name) {
  return function<int(const char*)>("fake_cuda_count")(name);
}
inline void work(CUstream stream, int us, CUdeviceptr to, size_t nbytes, int value) {
  function<void(CUstream, int, CUdeviceptr, size_t, int)>("fake_cuda_work")(stream, us, to, nbytes, value);
}

}  // namespace stand_in
