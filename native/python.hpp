// CPython's limited API with owned references and with what it complains about as exceptions.
#pragma once
#include <Python.h>
// Python.h must come first.
#include <cstdint>
#include <string>
#include <vector>

namespace zs {

class Ref {
 public:
  explicit Ref(PyObject* object = nullptr) : object_(object) {}
  Ref(Ref&& other) noexcept : object_(other.release()) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  PyObject* release() {
    PyObject* object = object_;
    object_ = nullptr;
    return object;
  }

 private:
  PyObject* object_;
};

// What Python complained about, taken off the interpreter.
struct Refusal {
  std::string text;
};

Refusal take_error();

// These throw a Refusal.
Ref checked(PyObject* object);
Ref attribute(PyObject* object, const char* name);
Ref call(PyObject* object, const char* name);
uint64_t unsigned_of(PyObject* object);
std::vector<int64_t> integers_of(PyObject* tuple);

bool truth_of(const Ref& object);
bool equal(PyObject* a, PyObject* b);

}  // namespace zs
