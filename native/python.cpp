#include "python.hpp"

namespace zs {

Refusal take_error() {
#if PY_VERSION_HEX >= 0x030C0000
  const Ref value(PyErr_GetRaisedException());
#else
  PyObject *type = nullptr, *error = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &error, &trace);
  const Ref owned_type(type), value(error), owned_trace(trace);
#endif
  const Ref text(value.get() != nullptr ? PyObject_Str(value.get()) : nullptr);
  Py_ssize_t length = 0;
  const char* chars = text.get() != nullptr ? PyUnicode_AsUTF8AndSize(text.get(), &length) : nullptr;
  if (chars == nullptr) PyErr_Clear();
  std::string first(chars != nullptr ? chars : "unknown error");
  return {first.substr(0, first.find('\n'))};  // torch adds pages of hints
}

Ref checked(PyObject* object) {
  if (object == nullptr) throw take_error();
  return Ref(object);
}

Ref attribute(PyObject* object, const char* name) {
  return checked(PyObject_GetAttrString(object, name));
}

Ref call(PyObject* object, const char* name) {
  return checked(PyObject_CallNoArgs(attribute(object, name).get()));
}

uint64_t unsigned_of(PyObject* object) {
  const unsigned long long value = PyLong_AsUnsignedLongLong(object);
  if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) throw take_error();
  return value;
}

std::vector<int64_t> integers_of(PyObject* tuple) {
  const Py_ssize_t n = PySequence_Size(tuple);
  if (n < 0) throw take_error();
  std::vector<int64_t> result;
  for (Py_ssize_t k = 0; k < n; ++k) {
    const Ref item = checked(PySequence_GetItem(tuple, k));
    result.push_back(PyLong_AsLongLong(item.get()));
    if (result.back() == -1 && PyErr_Occurred() != nullptr) throw take_error();
  }
  return result;
}

bool truth_of(const Ref& object) {
  return PyObject_IsTrue(object.get()) == 1;
}

bool equal(PyObject* a, PyObject* b) {
  if (a == b) return true;
  const int same = PyObject_RichCompareBool(a, b, Py_EQ);
  if (same < 0) PyErr_Clear();
  return same == 1;
}

}  // namespace zs
