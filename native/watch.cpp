#include "watch.hpp"

#include <Python.h>

#include <utility>

#include "error.hpp"
#include "prefetch.hpp"

namespace zs {

namespace {

// Values that are saved by value, not by identity: another one of the same type changes nothing about the
// layout.
bool plain(PyObject* item) {
  PyTypeObject* const type = Py_TYPE(item);
  return item == Py_None || type == &PyLong_Type || type == &PyFloat_Type || type == &PyBool_Type ||
         type == &PyUnicode_Type || type == &PyBytes_Type;
}

bool alike(PyObject* now, PyObject* then) {
  return now == then || (Py_TYPE(now) == Py_TYPE(then) && plain(then));
}

// Keys name what is below them: another spelling is another name.
bool same_key(PyObject* now, PyObject* then) {
  return now == then || (PyUnicode_Check(now) && PyUnicode_Check(then) && PyUnicode_Compare(now, then) == 0);
}

constexpr size_t kAhead = 16;
constexpr size_t kDictBytes = 48, kTableAt = 32, kTableBytes = 160;  // of CPython's dicts, small ones

}  // namespace

Watch::Watch(const std::vector<PyObject*>& containers) {
  try {
    for (PyObject* container : containers) {
      const bool is_dict = PyDict_Check(container);
      if (!is_dict && !PyList_Check(container)) throw Error(Kind::usage, "only dicts and lists are watched");
      Py_INCREF(container);
      containers_.push_back({container, is_dict, 0, nullptr});
      if (is_dict) {
        PyObject *key = nullptr, *value = nullptr;
        for (Py_ssize_t position = 0; PyDict_Next(container, &position, &key, &value);) {
          hold(key);
          hold(value);
        }
        containers_.back().table =
            *reinterpret_cast<const void* const*>(reinterpret_cast<const std::byte*>(container) + kTableAt);
      } else {
        for (Py_ssize_t k = 0; k < PyList_Size(container); ++k) hold(PyList_GetItem(container, k));
      }
      containers_.back().end = items_.size();
    }
  } catch (...) {
    drop();
    throw;
  }
}

Watch::~Watch() {
  drop();
}

bool Watch::same() const {
  size_t next = 0;
  for (size_t k = 0; k < containers_.size(); ++k) {
    if (k + kAhead < containers_.size()) fetch_ahead(containers_[k + kAhead]);
    const Container& container = containers_[k];
    if (container.is_dict) {
      if (static_cast<size_t>(PyDict_Size(container.object)) != (container.end - next) / 2) return false;
      PyObject *key = nullptr, *value = nullptr;
      for (Py_ssize_t position = 0; PyDict_Next(container.object, &position, &key, &value); next += 2)
        if (!same_key(key, items_[next]) || !alike(value, items_[next + 1])) return false;
    } else {
      if (static_cast<size_t>(PyList_Size(container.object)) != container.end - next) return false;
      for (Py_ssize_t n = 0; next < container.end; ++n, ++next)
        if (!alike(PyList_GetItem(container.object, n), items_[next])) return false;
    }
  }
  return true;
}

void Watch::fetch_ahead(const Container& container) noexcept {
  prefetch(container.object, 0, kDictBytes - 1);
  if (container.table != nullptr) prefetch(container.table, 0, kTableBytes - 1);
}

void Watch::hold(PyObject* item) {
  items_.push_back(item);
  Py_INCREF(item);
}

int Watch::traverse(int (*visit)(PyObject*, void*), void* argument) const {
  for (PyObject* item : items_)
    if (const int stop = visit(item, argument)) return stop;
  for (const Container& container : containers_)
    if (const int stop = visit(container.object, argument)) return stop;
  return 0;
}

void Watch::drop() noexcept {
  // Letting go may run any code, this watch's own methods too: it must be empty by then.
  const std::vector<PyObject*> items = std::move(items_);
  const std::vector<Container> containers = std::move(containers_);
  items_.clear();
  containers_.clear();
  for (PyObject* item : items) Py_DECREF(item);
  for (const Container& container : containers) Py_DECREF(container.object);
}

}  // namespace zs
