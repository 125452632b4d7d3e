#include "torch.hpp"

#include <deque>

namespace zs {
namespace {

const dlpack::ExchangeApi* exchange_api(PyObject* type) {
  const Ref capsule(PyObject_GetAttrString(type, dlpack::kAttribute));  // on the type, as the standard asks
  if (capsule.get() == nullptr || PyCapsule_IsValid(capsule.get(), dlpack::kCapsule) == 0) {
    PyErr_Clear();
    return nullptr;
  }
  auto header = static_cast<const dlpack::Header*>(PyCapsule_GetPointer(capsule.get(), dlpack::kCapsule));
  while (header != nullptr && header->major != dlpack::kMajor) header = header->previous;
  auto api = reinterpret_cast<const dlpack::ExchangeApi*>(header);
  return api != nullptr && api->describe != nullptr ? api : nullptr;
}

}  // namespace

const TensorType& TensorType::of(PyObject* tensor) {
  PyTypeObject* const type = Py_TYPE(tensor);
  static std::deque<TensorType> all;  // guarded by the GIL; its elements stay where they are
  for (const TensorType& one : all)
    if (one.type == type) return one;
  auto* const object = reinterpret_cast<PyObject*>(type);
  Py_INCREF(object);  // so that its address is never another type's
  TensorType& fresh = all.emplace_back(TensorType{type, exchange_api(object)});
  const auto getattro = reinterpret_cast<getattrofunc>(PyType_GetSlot(type, Py_tp_getattro));
  PyObject* const version = PyObject_GetAttrString(object, "_version");
  if (version == nullptr) {
    PyErr_Clear();
  } else if (getattro == PyObject_GenericGetAttr && Py_TYPE(version) == &PyGetSetDescr_Type) {
    fresh.version = version;  // kept for good
    fresh.read_version = reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(version), Py_tp_descr_get));
  } else {
    Py_DECREF(version);
  }
  return fresh;
}

int64_t version_of(PyObject* tensor) {
  const TensorType& type = TensorType::of(tensor);
  const Ref value(type.read_version != nullptr
                      ? type.read_version(type.version, tensor, reinterpret_cast<PyObject*>(type.type))
                      : PyObject_GetAttrString(tensor, "_version"));
  const int64_t version = value.get() != nullptr ? PyLong_AsLongLong(value.get()) : -1;
  if (version == -1) PyErr_Clear();
  return version;
}

const std::byte* inner_address(PyObject* object) {
  const Ref number(object != nullptr ? PyObject_GetAttrString(object, "_cdata") : nullptr);
  void* const address = number.get() != nullptr ? PyLong_AsVoidPtr(number.get()) : nullptr;
  PyErr_Clear();
  return static_cast<const std::byte*>(address);
}

}  // namespace zs
