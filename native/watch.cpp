#include "python.hpp"
// Python.h must come first.
#include <algorithm>
#include <utility>

#include "error.hpp"
#include "prefetch.hpp"
#include "watch.hpp"

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

constexpr size_t kAhead = 48;

// CPython up to 3.13 gives a dict another tag, of 64 bits, each time it is changed. Whether this one does,
// and where, is found out by trying; elsewhere every item is looked at each time.
constexpr size_t kTagAt = 24;

const uint64_t* tag_at(const PyObject* dict) {
  return reinterpret_cast<const uint64_t*>(reinterpret_cast<const std::byte*>(dict) + kTagAt);
}

uint64_t tag_of(const PyObject* dict) {
  return *tag_at(dict);
}

// Does a dict's tag tell each change that there is, and is it silent where there is none?
bool tags_tell() {
  const Ref dict = checked(PyDict_New()), one = checked(PyFloat_FromDouble(1)),
            other = checked(PyFloat_FromDouble(1));
  const auto set = [&](const char* key, const Ref& value) {
    if (PyDict_SetItemString(dict.get(), key, value.get()) != 0) throw take_error();
  };
  set("a", one);
  set("b", one);
  std::vector<uint64_t> seen{tag_of(dict.get())};
  const auto tells = [&](auto&& change) {
    change();
    const uint64_t tag = tag_of(dict.get());
    const bool fresh = std::find(seen.begin(), seen.end(), tag) == seen.end();
    seen.push_back(tag);
    return fresh;
  };
  const bool told =
      tells([&] { set("a", other); }) && tells([&] { set("a", one); }) && tells([&] { set("c", one); }) &&
      tells([&] {
        if (PyDict_DelItemString(dict.get(), "c") != 0) throw take_error();
      }) &&
      tells([&] { checked(PyObject_CallMethod(dict.get(), "pop", "s", "b")); }) &&
      tells([&] { checked(PyObject_CallMethod(dict.get(), "setdefault", "sO", "b", one.get())); }) &&
      tells([&] { checked(PyObject_CallMethod(dict.get(), "update", "{s:O}", "b", other.get())); }) &&
      tells([&] { checked(PyObject_CallMethod(dict.get(), "popitem", nullptr)); }) &&
      tells([&] { PyDict_Clear(dict.get()); }) && tells([&] { set("a", one); });
  const bool found = PyDict_GetItemString(dict.get(), "a") == one.get() && PyDict_Size(dict.get()) == 1;
  return told && found && tag_of(dict.get()) == seen.back();
}

// CPython 3.13 keeps attributes within their object, also where its dict has been asked for, and gives that
// dict no other tag where one is set. Such a dict has its values, which lie here, apart from its keys.
constexpr size_t kValuesAt = 40;

bool has_values_apart(const PyObject* dict) {
  return *reinterpret_cast<void* const*>(reinterpret_cast<const std::byte*>(dict) + kValuesAt) != nullptr;
}

enum class Told : uint8_t { none, of_dicts, of_attributes_too };

Told told_by_tags() {
  if (!tags_tell()) return Told::none;
  const Ref kind =
      checked(PyObject_CallFunction(reinterpret_cast<PyObject*>(&PyType_Type), "s(){}", "Tried"));
  const Ref object = checked(PyObject_CallFunction(kind.get(), nullptr));
  const Ref one = checked(PyFloat_FromDouble(1)), other = checked(PyFloat_FromDouble(1));
  const auto set = [&](const char* name, const Ref& value) {
    if (PyObject_SetAttrString(object.get(), name, value.get()) != 0) throw take_error();
  };
  set("a", one);
  const Ref dict = checked(PyObject_GetAttrString(object.get(), "__dict__")), plain = checked(PyDict_New());
  const bool apart = has_values_apart(dict.get());
  const auto tells = [&](auto&& change) {
    const uint64_t before = tag_of(dict.get());
    change();
    return tag_of(dict.get()) != before;
  };
  const bool replaced = tells([&] { set("a", other); }), added = tells([&] { set("b", one); });
  if (replaced && added) return Told::of_attributes_too;
  return apart && !has_values_apart(plain.get()) ? Told::of_dicts : Told::none;
}

Told told() {
  static const Told known = [] {
    try {
      return told_by_tags();
    } catch (const Refusal&) {
      return Told::none;
    }
  }();
  return known;
}

bool has_tags() {
  return told() != Told::none;
}

bool tells_all(const PyObject* dict) {
  return told() == Told::of_attributes_too || (has_tags() && !has_values_apart(dict));
}

}  // namespace

Watch::Watch(const std::vector<PyObject*>& containers) {
  try {
    for (PyObject* container : containers) {
      const Shape shape = shape_of(container);
      Py_INCREF(container);
      const bool tagged = shape == Shape::dict && tells_all(container);
      if (!tagged) others_.emplace_back(containers_.size(), items_.size());
      containers_.push_back({container, shape, tagged, 0});
      if (shape == Shape::dict) {
        PyObject *key = nullptr, *value = nullptr;
        for (Py_ssize_t position = 0; PyDict_Next(container, &position, &key, &value);) {
          hold(key);
          hold(value);
        }
        if (tagged) containers_.back().tag = containers_.back().renewed = tag_of(container);
      } else if (shape == Shape::list) {
        for (Py_ssize_t k = 0; k < PyList_Size(container); ++k) hold(PyList_GetItem(container, k));
      } else if (shape == Shape::set) {
        const Ref members = checked(PySequence_List(container));
        for (Py_ssize_t k = 0; k < PyList_Size(members.get()); ++k) hold(PyList_GetItem(members.get(), k));
      } else {
        hold(checked(PyObject_GetAttr(PyTuple_GetItem(container, 0), PyTuple_GetItem(container, 1))).get());
      }
      containers_.back().end = items_.size();
    }
  } catch (const Refusal& refusal) {
    drop();
    throw Error(Kind::usage, refusal.text);
  } catch (...) {
    drop();
    throw;
  }
}

Watch::Shape Watch::shape_of(PyObject* container) {
  if (PyDict_Check(container)) return Shape::dict;
  if (PyList_Check(container)) return Shape::list;
  if (PySet_Check(container)) return Shape::set;
  if (PyTuple_Check(container) && PyTuple_Size(container) == 2) return Shape::attribute;
  throw Error(Kind::usage, "only dicts, lists, sets and attributes (owner, name) are watched");
}

Watch::Watch(const std::vector<PyObject*>& containers, const std::vector<PyObject*>& behind,
             const std::vector<PyObject*>& doors)
    : Watch(containers) {
  behind_ = std::make_unique<Watch>(behind);
  if (!doors.empty()) doors_ = std::make_unique<Watch>(doors);
}

Watch::~Watch() {
  drop();
}

bool Watch::same() {
  if (dropped_) return false;
  size_t next = 0;
  for (size_t k = 0; k < containers_.size(); ++k) {
    if (k + kAhead < containers_.size()) fetch_ahead(containers_[k + kAhead]);
    Container& container = containers_[k];
    if (container.shape != Shape::dict) {
      if (!same_now(container, next)) return false;
    } else if (!container.tagged || tag_of(container.object) != container.tag) {
      if (!same_items(container, next)) return false;
      if (container.tagged) container.tag = tag_of(container.object);
    }
    next = container.end;
  }
  if (behind_ && !(doors_ && doors_->untouched())) {
    if (!behind_->same()) return false;
    if (doors_) doors_->renew();
  }
  return true;
}

bool Watch::untouched() const {
  return !dropped_ && has_tags() &&
         std::all_of(containers_.begin(), containers_.end(), [](const Container& container) {
           return container.tagged && tag_of(container.object) == container.renewed;
         });
}

bool Watch::add_tags(std::vector<Tag>& tags, bool renewed) const {
  if (dropped_ || !has_tags() || (renewed && !others_.empty())) return false;
  for (const Container& container : containers_)
    if (container.tagged)
      tags.push_back({tag_at(container.object), renewed ? container.renewed : container.tag});
  if (!behind_) return true;
  return doors_ ? doors_->add_tags(tags, true) : behind_->add_tags(tags, false);
}

bool Watch::others_same() const {
  if (dropped_) return false;
  for (const auto& [container, first] : others_)
    if (!same_now(containers_[container], first)) return false;
  return !behind_ || doors_ || behind_->others_same();
}

void Watch::renew() {
  if (!has_tags()) return;
  for (Container& container : containers_)
    if (container.tagged) container.renewed = tag_of(container.object);
}

bool Watch::same_items(const Container& container, size_t next) const {
  if (static_cast<size_t>(PyDict_Size(container.object)) != (container.end - next) / 2) return false;
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t position = 0; PyDict_Next(container.object, &position, &key, &value); next += 2)
    if (!same_key(key, items_[next]) || !alike(value, items_[next + 1])) return false;
  return true;
}

bool Watch::same_elements(const Container& container, size_t next) const {
  if (static_cast<size_t>(PyList_Size(container.object)) != container.end - next) return false;
  for (Py_ssize_t n = 0; next < container.end; ++n, ++next)
    if (!alike(PyList_GetItem(container.object, n), items_[next])) return false;
  return true;
}

bool Watch::same_members(const Container& container, size_t next) const {
  if (static_cast<size_t>(PySet_Size(container.object)) != container.end - next) return false;
  for (; next < container.end; ++next) {
    const int there = PySet_Contains(container.object, items_[next]);
    if (there < 0) PyErr_Clear();
    if (there != 1) return false;
  }
  return true;
}

bool Watch::same_attribute(const Container& container, size_t next) const {
  const Ref now(PyObject_GetAttr(PyTuple_GetItem(container.object, 0), PyTuple_GetItem(container.object, 1)));
  if (now.get() == nullptr) PyErr_Clear();
  return now.get() == items_[next];
}

bool Watch::same_now(const Container& container, size_t next) const {
  if (container.shape == Shape::dict) return same_items(container, next);
  if (container.shape == Shape::list) return same_elements(container, next);
  return container.shape == Shape::set ? same_members(container, next) : same_attribute(container, next);
}

void Watch::fetch_ahead(const Container& container) noexcept {
  prefetch(container.object, 0, kTagAt);
}

void Watch::hold(PyObject* item) {
  items_.push_back(item);
  Py_INCREF(item);
}

int Watch::traverse(int (*visit)(PyObject*, void*), void* argument) const {
  for (const Watch* inner : {behind_.get(), doors_.get()})
    if (inner != nullptr)
      if (const int stop = inner->traverse(visit, argument)) return stop;
  for (PyObject* item : items_)
    if (const int stop = visit(item, argument)) return stop;
  for (const Container& container : containers_)
    if (const int stop = visit(container.object, argument)) return stop;
  return 0;
}

void Watch::drop() noexcept {
  dropped_ = true;
  if (behind_) behind_->drop();
  if (doors_) doors_->drop();
  // Letting go may run any code, this watch's own methods too: it must be empty by then.
  const std::vector<PyObject*> items = std::move(items_);
  const std::vector<Container> containers = std::move(containers_);
  items_.clear();
  containers_.clear();
  others_.clear();
  for (PyObject* item : items) Py_DECREF(item);
  for (const Container& container : containers) Py_DECREF(container.object);
}

}  // namespace zs
