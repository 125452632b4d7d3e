// Devices of the stand-in driver, and their contexts.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "fake.hpp"

namespace fake {
namespace {
thread_local std::vector<CUcontext> contexts;
}

bool has_context() {
  return !contexts.empty();
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

}  // namespace fake

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
  if (ordinal < 0 || ordinal >= fake::devices()) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetCount(int* count) {
  ENTER("cuDeviceGetCount");
  *count = fake::devices();
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
  *can = fake::linked(one, other) ? 1 : 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute which, CUdevice one,
                                        CUdevice other) {
  ENTER("cuDeviceGetP2PAttribute");
  *value = which != CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK && fake::linked(one, other) ? 1 : 0;
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
EXPORT CUresult cuCtxPushCurrent(CUcontext context) {
  ENTER("cuCtxPushCurrent");
  fake::contexts.push_back(context);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxPopCurrent(CUcontext* context) {
  NEEDS_CONTEXT;
  ENTER("cuCtxPopCurrent");
  *context = fake::contexts.back();
  fake::contexts.pop_back();
  return CUDA_SUCCESS;
}
