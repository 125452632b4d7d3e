// Modules and kernels of the stand-in driver: it interprets the text that it is given.
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "fake.hpp"
#include "ptx.hpp"
#include "streams.hpp"

namespace {
// Kept by kernels that are still queued when their module goes.
using Module = std::shared_ptr<const fake::Ptx>;
}  // namespace

EXPORT CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  NEEDS_CONTEXT;
  ENTER("cuModuleLoadData");
  try {
    *module = reinterpret_cast<CUmodule>(
        new Module(std::make_shared<fake::Ptx>(std::string(static_cast<const char*>(image)))));
  } catch (const std::exception&) {
    return CUDA_ERROR_INVALID_PTX;
  }
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleUnload(CUmodule module) {
  NEEDS_CONTEXT;
  ENTER("cuModuleUnload");
  delete reinterpret_cast<Module*>(module);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  NEEDS_CONTEXT;
  ENTER("cuModuleGetFunction");
  if ((*reinterpret_cast<Module*>(module))->entry() != name) return CUDA_ERROR_NOT_FOUND;
  *function = reinterpret_cast<CUfunction>(module);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned blocks, unsigned, unsigned, unsigned threads,
                               unsigned, unsigned, unsigned, CUstream stream, void** parameters, void**) {
  NEEDS_CONTEXT;
  ENTER("cuLaunchKernel");
  const Module kernel = *reinterpret_cast<Module*>(function);
  if (blocks == 0 || threads == 0 || threads > 32) return CUDA_ERROR_INVALID_VALUE;
  std::vector<uint64_t> arguments;  // read now: the caller's are gone when it runs
  for (size_t k = 0; k < kernel->parameters(); ++k)
    arguments.push_back(*static_cast<const uint64_t*>(parameters[k]));
  fake::queue_kernel(stream, [=] {
    for (unsigned block = 0; block < blocks; ++block)
      if (!kernel->run(block, threads, arguments)) return false;
    return true;
  });
  return CUDA_SUCCESS;
}
