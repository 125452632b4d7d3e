// CPython's limited API and DLPack's C ABI; no torch header and no torch symbol.
#include <Python.h>
// Python.h must come first.
#include <algorithm>
#include <deque>
#include <utility>

#include "error.hpp"
#include "prefetch.hpp"
#include "tensors.hpp"

namespace zs {
namespace {

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

// What is known of a type of tensors. Most tensors of a state share one or two.
struct Known {
  PyTypeObject* type;
  const dlpack::ExchangeApi* api;  // null: none
  // `_version` of the type and how to read it, where an attribute lookup would come to nothing else; saves a
  // quarter of the time of reading a version.
  PyObject* version = nullptr;
  descrgetfunc read_version = nullptr;
};

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

const Known& known(PyTypeObject* type) {
  static std::deque<Known> all;  // guarded by the GIL; its elements stay where they are
  for (const Known& one : all)
    if (one.type == type) return one;
  auto* const object = reinterpret_cast<PyObject*>(type);
  Py_INCREF(object);  // so that its address is never another type's
  Known& fresh = all.emplace_back(Known{type, exchange_api(object)});
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

// The version counter; -1 with no error set where there is none (an inference tensor).
int64_t version_of(PyObject* object, const Known& type) {
  const Ref value(type.read_version != nullptr
                      ? type.read_version(type.version, object, reinterpret_cast<PyObject*>(type.type))
                      : PyObject_GetAttrString(object, "_version"));
  const int64_t version = value.get() != nullptr ? PyLong_AsLongLong(value.get()) : -1;
  if (version == -1) PyErr_Clear();
  return version;
}

uint32_t item_bytes(const dlpack::Type& type) {
  return (static_cast<uint32_t>(type.bits) * type.lanes + 7) / 8;
}

std::byte* address(const dlpack::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
}

std::vector<int64_t> in_bytes(const int64_t* strides, size_t n, int64_t item) {
  std::vector<int64_t> result(strides, strides + n);
  for (int64_t& stride : result) stride *= item;
  return result;
}

}  // namespace

namespace {

// An address that torch tells of its own accord (`_cdata`); null where it does not.
const std::byte* inner_address(PyObject* object) {
  const Ref number(object != nullptr ? PyObject_GetAttrString(object, "_cdata") : nullptr);
  void* const address = number.get() != nullptr ? PyLong_AsVoidPtr(number.get()) : nullptr;
  PyErr_Clear();
  return static_cast<const std::byte*>(address);
}

// A state of 100 000 tensors does not fit into the caches: each look would wait for memory three times in a
// row. Asked for this many tensors ahead, the lines are there in time.
constexpr size_t kAhead = 24;
constexpr size_t kObject = 40, kImpl = 184, kStorage = 64;  // bytes of each that torch looks at

}  // namespace

struct Tensors::Answer {
  std::byte* data = nullptr;
  std::vector<int64_t> shape, strides;  // bytes for numpy, elements for torch
  int64_t itemsize = 0;
  Ref dtype, place;  // no place: a numpy array
  int16_t device = Arrays::kHost;
  bool reachable = true, read_only = false;
};

Tensors::Answer Tensors::ask(PyObject* object) {
  Answer answer;
  answer.dtype = attribute(object, "dtype");
  if (PyObject_HasAttrString(object, "data_ptr") != 0) {
    answer.data = reinterpret_cast<std::byte*>(unsigned_of(call(object, "data_ptr").get()));
    answer.shape = integers_of(attribute(object, "shape").get());
    answer.strides = integers_of(call(object, "stride").get());
    answer.itemsize = static_cast<int64_t>(unsigned_of(call(object, "element_size").get()));
    answer.place = attribute(object, "device");
    const Ref kind = attribute(answer.place.get(), "type");
    if (PyUnicode_CompareWithASCIIString(kind.get(), "cuda") == 0) {
      const Ref index = attribute(answer.place.get(), "index");
      answer.device = index.get() == Py_None ? 0 : static_cast<int16_t>(unsigned_of(index.get()));
    } else {
      answer.reachable = PyUnicode_CompareWithASCIIString(kind.get(), "cpu") == 0;
    }
    return answer;
  }
  const Ref facts = attribute(object, "__array_interface__");
  const Ref place = checked(PyMapping_GetItemString(facts.get(), "data"));
  const Ref data = checked(PySequence_GetItem(place.get(), 0));
  answer.data = reinterpret_cast<std::byte*>(unsigned_of(data.get()));
  answer.read_only = truth_of(checked(PySequence_GetItem(place.get(), 1)));
  answer.shape = integers_of(attribute(object, "shape").get());
  answer.strides = integers_of(attribute(object, "strides").get());
  answer.itemsize = static_cast<int64_t>(unsigned_of(attribute(object, "itemsize").get()));
  if (truth_of(attribute(answer.dtype.get(), "hasobject"))) throw Refusal{"it holds Python objects"};
  return answer;
}

Tensors::Tensors(const std::vector<PyObject*>& objects, const std::vector<bool>& tracked, bool exchange) {
  if (objects.size() != tracked.size())
    throw Error(Kind::usage,
                std::to_string(tracked.size()) + " marks for " + std::to_string(objects.size()) + " tensors");
  auto geometries = std::make_shared<std::vector<Geometry>>();
  auto places = std::make_shared<std::vector<int16_t>>(objects.size(), Arrays::kHost);
  geometries->reserve(objects.size());
  entries_.reserve(objects.size());
  data_.reserve(objects.size());
  for (size_t k = 0; k < objects.size(); ++k) {
    Entry& entry = entries_.emplace_back();
    Py_INCREF(objects[k]);
    entry.object = objects[k];
    entry.tracked = tracked[k];
    try {
      geometries->push_back(describe(entry, exchange, (*places)[k]));
    } catch (const Refusal& refusal) {
      drop();
      throw Error(Kind::usage, "tensor " + std::to_string(k) + " cannot be used: " + refusal.text);
    }
  }
  geometries_ = std::move(geometries);
  const auto on_device = [](int16_t place) { return place != Arrays::kHost; };
  if (std::any_of(places->begin(), places->end(), on_device)) places_ = std::move(places);
}

Tensors::~Tensors() {
  drop();
}

void Tensors::drop() noexcept {
  for (Entry& entry : entries_) {
    Py_XDECREF(entry.object);
    Py_XDECREF(entry.dtype);
    Py_XDECREF(entry.place);
    Py_XDECREF(entry.held);
  }
  entries_.clear();
}

void Tensors::remember(Entry& entry, const int64_t* shape, const int64_t* strides) {
  entry.extent = extents_.size();
  extents_.insert(extents_.end(), shape, shape + entry.ndim);
  extents_.insert(extents_.end(), strides, strides + entry.ndim);
}

Geometry Tensors::describe(Entry& entry, bool exchange, int16_t& place) {
  const size_t index = entries_.size() - 1;
  const bool torch = PyObject_HasAttrString(entry.object, "data_ptr") != 0;
  if (torch && (truth_of(call(entry.object, "is_conj")) || truth_of(call(entry.object, "is_neg"))))
    throw Refusal{
        "it is a lazy conjugate or negative; its memory holds other values (see resolve_conj, resolve_neg)"};
  entry.version = entry.tracked ? version_of(entry.object, known(Py_TYPE(entry.object))) : 0;
  if (entry.version < 0)
    throw Refusal{"it has no version counter to track (an inference tensor, or no tensor)"};

  dlpack::Tensor seen{};
  const dlpack::ExchangeApi* api = exchange && torch ? known(Py_TYPE(entry.object)).api : nullptr;
  Geometry geometry;
  if (api != nullptr && api->describe(entry.object, &seen) == 0) {
    entry.api = api;
    entry.impl = inner_address(entry.object);
    entry.storage = inner_address(Ref(PyObject_CallMethod(entry.object, "untyped_storage", nullptr)).get());
    entry.device = seen.device;
    entry.type = seen.type;
    entry.ndim = static_cast<uint32_t>(seen.ndim);
    remember(entry, seen.shape, seen.strides);
    data_.push_back(address(seen));
    const uint32_t item = item_bytes(seen.type);
    geometry = Geometry::of(item, {seen.shape, entry.ndim}, in_bytes(seen.strides, entry.ndim, item));
    if (seen.device.type == dlpack::kCuda)
      place = static_cast<int16_t>(seen.device.index);
    else if (seen.device.type != dlpack::kCpu && seen.device.type != dlpack::kCudaHost && !elsewhere_)
      elsewhere_ = index;
  } else {
    PyErr_Clear();  // method calls know more dtypes, and their complaint is the one to show
    Answer answer = ask(entry.object);
    entry.ndim = static_cast<uint32_t>(answer.shape.size());
    remember(entry, answer.shape.data(), answer.strides.data());
    data_.push_back(answer.data);
    geometry = Geometry::of(static_cast<uint32_t>(answer.itemsize), answer.shape,
                            in_bytes(answer.strides.data(), entry.ndim, torch ? answer.itemsize : 1));
    entry.dtype = answer.dtype.release();
    entry.place = answer.place.release();
    place = answer.device;
    if (!answer.reachable && !elsewhere_) elsewhere_ = index;
    if (answer.read_only && !read_only_) read_only_ = index;
  }
  if (geometry.nbytes != 0 && data_.back() == nullptr && !elsewhere_) throw Refusal{"it has no memory"};
  // An array keeps its memory itself; what is not tracked in host memory is read before `save` returns.
  entry.leaves = geometry.nbytes != 0 && (place != Arrays::kHost || (entry.tracked && torch));
  if (entry.leaves) hold(entry, data_.back());
  return geometry;
}

void Tensors::hold(Entry& entry, const std::byte* data) {
  Ref storage = call(entry.object, "untyped_storage");
  Py_XDECREF(std::exchange(entry.held, storage.release()));
  entry.held_at = data;
}

void Tensors::let_go() noexcept {
  for (Entry& entry : entries_) {
    if (entry.held == nullptr) continue;
    std::byte* data = nullptr;
    if (!look(entry, data) || data != entry.held_at) Py_DECREF(std::exchange(entry.held, nullptr));
  }
}

std::vector<int> Tensors::devices() const {
  std::vector<int> result;
  if (places_)
    for (const int16_t place : *places_)
      if (place != Arrays::kHost && std::find(result.begin(), result.end(), place) == result.end())
        result.push_back(place);
  std::sort(result.begin(), result.end());
  return result;
}

bool Tensors::look(Entry& entry, std::byte*& data) const {
  if (entry.api == nullptr) return look_by_calls(entry, data);
  dlpack::Tensor seen{};
  if (entry.api->describe(entry.object, &seen) != 0) {
    PyErr_Clear();
    return false;
  }
  data = address(seen);
  if (!(seen.device == entry.device && seen.type == entry.type) ||
      static_cast<uint32_t>(seen.ndim) != entry.ndim)
    return false;
  const int64_t* const remembered = extents_.data() + entry.extent;
  for (uint32_t k = 0; k < entry.ndim; ++k)
    if (seen.shape[k] != remembered[k] || seen.strides[k] != remembered[entry.ndim + k]) return false;
  return true;
}

bool Tensors::look_by_calls(const Entry& entry, std::byte*& data) const {
  try {
    const Answer answer = ask(entry.object);
    data = answer.data;
    const auto remembered = extents_.begin() + static_cast<ptrdiff_t>(entry.extent);
    const auto strides = remembered + entry.ndim;
    return answer.shape.size() == entry.ndim && answer.strides.size() == entry.ndim &&
           std::equal(answer.shape.begin(), answer.shape.end(), remembered) &&
           std::equal(answer.strides.begin(), answer.strides.end(), strides) &&
           equal(answer.dtype.get(), entry.dtype) &&
           (entry.place == nullptr || equal(answer.place.get(), entry.place));
  } catch (const Refusal&) {
    return false;
  }
}

void Tensors::fetch_ahead(const Entry& entry) noexcept {
  prefetch(entry.object, 0, kObject - 1);
  if (entry.impl != nullptr) prefetch(entry.impl, 0, kImpl - 1);
  if (entry.storage != nullptr) prefetch(entry.storage, 0, kStorage - 1);
}

std::vector<uint32_t> Tensors::refresh() {
  misfits_.clear();
  const Known* type = nullptr;
  for (size_t k = 0; k < entries_.size(); ++k) {
    if (k + kAhead < entries_.size()) fetch_ahead(entries_[k + kAhead]);
    Entry& entry = entries_[k];
    bool fits = look(entry, data_[k]);
    if (data_[k] == nullptr && (*geometries_)[k].nbytes != 0 && !elsewhere_) fits = false;
    if (entry.leaves && (entry.held == nullptr || entry.held_at != data_[k])) {
      try {
        hold(entry, data_[k]);
      } catch (const Refusal&) {
        fits = false;
      }
    }
    if (entry.tracked) {
      if (type == nullptr || type->type != Py_TYPE(entry.object)) type = &known(Py_TYPE(entry.object));
      entry.version = version_of(entry.object, *type);
      if (entry.version < 0) fits = false;
    }
    if (!fits) misfits_.push_back(static_cast<uint32_t>(k));
  }
  return misfits_;
}

std::vector<uint32_t> Tensors::moved() const {
  std::vector<uint32_t> result;
  const Known* type = nullptr;
  for (size_t k = 0; k < entries_.size(); ++k) {
    if (k + kAhead < entries_.size() && entries_[k + kAhead].tracked) fetch_ahead(entries_[k + kAhead]);
    const Entry& entry = entries_[k];
    if (!entry.tracked) continue;
    if (type == nullptr || type->type != Py_TYPE(entry.object)) type = &known(Py_TYPE(entry.object));
    if (version_of(entry.object, *type) != entry.version) result.push_back(static_cast<uint32_t>(k));
  }
  return result;
}

std::vector<uint64_t> Tensors::pointers() const {
  std::vector<uint64_t> result;
  result.reserve(data_.size());
  for (const std::byte* data : data_) result.push_back(reinterpret_cast<uint64_t>(data));
  return result;
}

Arrays Tensors::arrays() const {
  if (!misfits_.empty())
    throw Error(Kind::usage, "tensor " + std::to_string(misfits_.front()) +
                                 " is no longer what it was: make Tensors anew");
  if (elsewhere_)
    throw Error(Kind::capability,
                "tensor " + std::to_string(*elsewhere_) + " is neither in host memory nor on a CUDA device");
  return {data_, geometries_, places_};
}

Arrays Tensors::sources() const {
  return arrays();
}

Arrays Tensors::targets() const {
  if (read_only_) throw Error(Kind::usage, "tensor " + std::to_string(*read_only_) + " is read-only");
  return arrays();
}

}  // namespace zs
