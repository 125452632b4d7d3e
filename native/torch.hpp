// What torch's Python type of tensors can be asked: DLPack's table and the version counter.
#pragma once
#include "dlpack.hpp"
#include "python.hpp"

namespace zs {

// What is known of a type of tensors. Most tensors of a state share one or two.
struct TensorType {
  PyTypeObject* type;
  const dlpack::ExchangeApi* api;  // null: none
  // `_version` of the type and how to read it, where an attribute lookup would come to nothing else; saves a
  // quarter of the time of reading a version.
  PyObject* version = nullptr;
  descrgetfunc read_version = nullptr;

  static const TensorType& of(PyObject* tensor);
};

// The version counter; -1 with no error set where there is none (an inference tensor).
int64_t version_of(PyObject* tensor);

// An address that torch tells of its own accord (`_cdata`); null where it does not.
const std::byte* inner_address(PyObject* object);

}  // namespace zs
