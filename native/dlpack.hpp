// The few declarations of DLPack's C exchange API, major version 1, that are needed to ask a tensor where it
// lies. An ABI fixed by https://dmlc.github.io/dlpack: the order and width of every field matter, the names
// do not.
#pragma once
#include <cstdint>

namespace zs::dlpack {

constexpr uint32_t kMajor = 1;
constexpr const char* kAttribute = "__dlpack_c_exchange_api__";  // on the tensor's type
constexpr const char* kCapsule = "dlpack_exchange_api";
constexpr int32_t kCpu = 1, kCuda = 2, kCudaHost = 3;

struct Device {
  int32_t type;
  int32_t index;
  bool operator==(const Device&) const = default;
};

struct Type {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
  bool operator==(const Type&) const = default;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  Type type;
  int64_t* shape;    // both belong to the tensor
  int64_t* strides;  // elements
  uint64_t byte_offset;
};

struct Header {
  uint32_t major, minor;
  const Header* previous;  // an older API of the same producer
};

struct ExchangeApi {
  Header header;
  void* allocate;
  void* from_object;
  void* to_object;
  int (*describe)(void* object, Tensor* out);  // may be null; -1 with a Python error set
  void* current_stream;
};

static_assert(sizeof(void*) == 8 && sizeof(Tensor) == 48 && sizeof(ExchangeApi) == 56);

}  // namespace zs::dlpack
