// CPython's limited API and DLPack's C ABI; no torch header and no torch symbol.
#include "torch.hpp"
// Python.h must come first.
#include <algorithm>
#include <utility>

#include "error.hpp"
#include "prefetch.hpp"
#include "tensors.hpp"

namespace zs {
namespace {

uint32_t item_bytes(const dlpack::Type& type) {
  return (static_cast<uint32_t>(type.bits) * type.lanes + 7) / 8;
}

std::byte* address(const dlpack::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
}

std::byte* memory_of(PyObject* tensor_or_storage) {
  return reinterpret_cast<std::byte*>(unsigned_of(call(tensor_or_storage, "data_ptr").get()));
}

std::vector<int64_t> in_bytes(const int64_t* strides, size_t n, int64_t item) {
  std::vector<int64_t> result(strides, strides + n);
  for (int64_t& stride : result) stride *= item;
  return result;
}

// A state of 100 000 tensors does not fit into the caches, and an optimizer's step leaves little in them of a
// smaller one: each look would wait for memory several times in a row. Asked for this many tensors ahead, the
// lines are there in time.
constexpr size_t kAhead = 16;
constexpr size_t kAheadOfCounters = 64;  // of which a tensor has one line

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
    answer.data = memory_of(object);
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
  facts_.resize(objects.size());
  versions_.resize(objects.size());
  kept_.resize(objects.size());
  data_.reserve(objects.size());
  for (size_t k = 0; k < objects.size(); ++k) {
    Entry& entry = entries_.emplace_back();
    Py_INCREF(objects[k]);
    entry.object = objects[k];
    entry.tracked = tracked[k];
    try {
      geometries->push_back(describe(k, exchange, (*places)[k]));
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
  for (const Entry& entry : entries_) Py_XDECREF(entry.object);
  for (const Facts& facts : facts_)
    for (PyObject* object : {facts.dtype, facts.place, facts.held}) Py_XDECREF(object);
  entries_.clear();
  facts_.clear();
}

void Tensors::remember(Facts& facts, const int64_t* shape, const int64_t* strides) {
  facts.extent = extents_.size();
  extents_.insert(extents_.end(), shape, shape + facts.ndim);
  extents_.insert(extents_.end(), strides, strides + facts.ndim);
}

Geometry Tensors::describe(size_t index, bool exchange, int16_t& place) {
  Entry& entry = entries_[index];
  Facts& facts = facts_[index];
  const bool torch = PyObject_HasAttrString(entry.object, "data_ptr") != 0;
  if (torch && (truth_of(call(entry.object, "is_conj")) || truth_of(call(entry.object, "is_neg"))))
    throw Refusal{
        "it is a lazy conjugate or negative; its memory holds other values (see resolve_conj, resolve_neg)"};
  int64_t& version = versions_[index];
  version = entry.tracked ? version_of(entry.object) : 0;
  if (version < 0) throw Refusal{"it has no version counter to track (an inference tensor, or no tensor)"};

  dlpack::Tensor seen{};
  const dlpack::ExchangeApi* api = exchange && torch ? TensorType::of(entry.object).api : nullptr;
  Geometry geometry;
  if (api != nullptr && api->describe(entry.object, &seen) == 0) {
    facts.api = api;
    facts.device = seen.device;
    facts.type = seen.type;
    facts.ndim = static_cast<uint32_t>(seen.ndim);
    remember(facts, seen.shape, seen.strides);
    data_.push_back(address(seen));
    const uint32_t item = item_bytes(seen.type);
    geometry = Geometry::of(item, {seen.shape, facts.ndim}, in_bytes(seen.strides, facts.ndim, item));
    if (seen.device.type == dlpack::kCuda)
      place = static_cast<int16_t>(seen.device.index);
    else if (seen.device.type != dlpack::kCpu && seen.device.type != dlpack::kCudaHost && !elsewhere_)
      elsewhere_ = index;
  } else {
    PyErr_Clear();  // method calls know more dtypes, and their complaint is the one to show
    Answer answer = ask(entry.object);
    facts.ndim = static_cast<uint32_t>(answer.shape.size());
    remember(facts, answer.shape.data(), answer.strides.data());
    data_.push_back(answer.data);
    geometry = Geometry::of(static_cast<uint32_t>(answer.itemsize), answer.shape,
                            in_bytes(answer.strides.data(), facts.ndim, torch ? answer.itemsize : 1));
    facts.dtype = answer.dtype.release();
    facts.place = answer.place.release();
    place = answer.device;
    if (!answer.reachable && !elsewhere_) elsewhere_ = index;
    if (answer.read_only && !read_only_) read_only_ = index;
  }
  if (geometry.nbytes != 0 && data_.back() == nullptr && !elsewhere_) throw Refusal{"it has no memory"};
  // An array keeps its memory itself; what is not tracked in host memory is read before `save` returns.
  entry.leaves = geometry.nbytes != 0 && (place != Arrays::kHost || (entry.tracked && torch));
  if (facts.api != nullptr) entry.imprint.take(entry.object, seen.shape, entry.tracked ? version : -1);
  if (entry.leaves) hold(index);
  return geometry;
}

// A twin keeps the counter, too, so that moved() finds it without asking the tensor.
bool Tensors::hold_twin(size_t index) {
  Entry& entry = entries_[index];
  kept_[index] = {};
  if (!entry.tracked || !entry.imprint.taken()) return false;
  Ref twin;
  try {
    twin = call(entry.object, "detach");
  } catch (const Refusal&) {
    return false;  // a tensor of a type of the user's need not have it
  }
  kept_[index] = entry.imprint.kept_by(twin.get());
  if (kept_[index].counter == nullptr) return false;
  facts_[index].held_at = data_[index];
  Py_XDECREF(std::exchange(facts_[index].held, twin.release()));
  return true;
}

void Tensors::hold(size_t index) {
  if (hold_twin(index)) return;
  Facts& facts = facts_[index];
  Ref storage = call(entries_[index].object, "untyped_storage");
  facts.begins = memory_of(storage.get());
  Py_XDECREF(std::exchange(facts.held, storage.release()));
  facts.held_at = data_[index];
}

bool Tensors::exchanged(size_t index) const {
  const Facts& facts = facts_[index];
  try {
    return facts.held != nullptr && memory_of(facts.held) != facts.begins;
  } catch (const Refusal&) {
    return true;  // it has none at all any more
  }
}

void Tensors::let_go() noexcept {
  for (size_t k = 0; k < entries_.size(); ++k) {
    Entry& entry = entries_[k];
    if (k + kAhead < entries_.size()) entries_[k + kAhead].imprint.fetch_owners(entries_[k + kAhead].object);
    if (!entry.leaves || entry.imprint.stays(entry.object) || facts_[k].held == nullptr) continue;
    std::byte* data = nullptr;
    const int64_t* shape = nullptr;
    if (look(k, data, shape) && data == facts_[k].held_at) continue;
    entry.imprint.forget();
    kept_[k] = {};
    Py_DECREF(std::exchange(facts_[k].held, nullptr));
  }
}

size_t Tensors::imprinted() const {
  return static_cast<size_t>(std::count_if(entries_.begin(), entries_.end(),
                                           [](const Entry& entry) { return entry.imprint.taken(); }));
}

std::vector<const void*> Tensors::blocks() const {
  std::vector<const void*> result;
  for (const Entry& entry : entries_) {
    if (!entry.imprint.taken()) continue;
    result.push_back(entry.object);
    for (const std::byte* block : entry.imprint.blocks())
      if (block != nullptr) result.push_back(block);
  }
  return result;
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

bool Tensors::look(size_t index, std::byte*& data, const int64_t*& shape) const {
  const Facts& facts = facts_[index];
  if (facts.api == nullptr) return look_by_calls(index, data);
  dlpack::Tensor seen{};
  if (facts.api->describe(entries_[index].object, &seen) != 0) {
    PyErr_Clear();
    return false;
  }
  data = address(seen);
  shape = seen.shape;
  if (!(seen.device == facts.device && seen.type == facts.type) ||
      static_cast<uint32_t>(seen.ndim) != facts.ndim)
    return false;
  const int64_t* const remembered = extents_.data() + facts.extent;
  for (uint32_t k = 0; k < facts.ndim; ++k)
    if (seen.shape[k] != remembered[k] || seen.strides[k] != remembered[facts.ndim + k]) return false;
  return true;
}

bool Tensors::look_by_calls(size_t index, std::byte*& data) const {
  const Facts& facts = facts_[index];
  try {
    const Answer answer = ask(entries_[index].object);
    data = answer.data;
    const auto remembered = extents_.begin() + static_cast<ptrdiff_t>(facts.extent);
    const auto strides = remembered + facts.ndim;
    return answer.shape.size() == facts.ndim && answer.strides.size() == facts.ndim &&
           std::equal(answer.shape.begin(), answer.shape.end(), remembered) &&
           std::equal(answer.strides.begin(), answer.strides.end(), strides) &&
           equal(answer.dtype.get(), facts.dtype) &&
           (facts.place == nullptr || equal(answer.place.get(), facts.place));
  } catch (const Refusal&) {
    return false;
  }
}

bool Tensors::ask_anew(size_t index) {
  Entry& entry = entries_[index];
  const int64_t* shape = nullptr;
  entry.imprint.forget();
  bool fits = look(index, data_[index], shape);
  if (data_[index] == nullptr && (*geometries_)[index].nbytes != 0 && !elsewhere_) fits = false;
  if (entry.tracked) {
    versions_[index] = version_of(entry.object);
    if (versions_[index] < 0) fits = false;
  }
  if (fits && shape != nullptr)
    entry.imprint.take(entry.object, shape, entry.tracked ? versions_[index] : -1);
  if (entry.leaves && (facts_[index].held == nullptr || facts_[index].held_at != data_[index] ||
                       !entry.imprint.shares(kept_[index]))) {
    try {
      hold(index);
    } catch (const Refusal&) {
      fits = false;
    }
  }
  return fits;
}

std::vector<uint32_t> Tensors::refresh() {
  misfits_.clear();
  for (size_t k = 0; k < entries_.size(); ++k) {
    if (k + kAhead < entries_.size()) entries_[k + kAhead].imprint.fetch(entries_[k + kAhead].object);
    Entry& entry = entries_[k];
    if (!entry.imprint.same(entry.object)) {
      if (!ask_anew(k)) misfits_.push_back(static_cast<uint32_t>(k));
    } else if (entry.tracked) {
      versions_[k] = entry.imprint.version();
    }
  }
  return misfits_;
}

std::vector<uint32_t> Tensors::moved(bool exchanges) const {
  std::vector<uint32_t> result;
  for (size_t k = 0; k < kept_.size(); ++k) {
    if (k + kAheadOfCounters < kept_.size()) {
      const Imprint::Kept& next = kept_[k + kAheadOfCounters];
      next.fetch();
      if (exchanges) next.fetch_data();
    }
    const Imprint::Kept& kept = kept_[k];
    if (kept.counter != nullptr ? kept.version() != versions_[k] || (exchanges && !kept.in_place())
                                : moved_alone(k, exchanges))
      result.push_back(static_cast<uint32_t>(k));
  }
  return result;
}

// Of a tensor of which nothing is kept that could be asked in its place.
bool Tensors::moved_alone(size_t index, bool exchanges) const {
  const Entry& entry = entries_[index];
  if (!entry.tracked) return false;
  const int64_t now =
      entry.imprint.counted(entry.object) ? entry.imprint.version() : version_of(entry.object);
  return now != versions_[index] ||
         (exchanges && entry.leaves && !entry.imprint.in_place(entry.object) && exchanged(index));
}

bool Tensors::any_within(const std::byte* begin, size_t nbytes) const {
  return std::any_of(data_.begin(), data_.end(),
                     [=](const std::byte* data) { return data >= begin && data < begin + nbytes; });
}

std::vector<uint64_t> Tensors::pointers() const {
  std::vector<uint64_t> result;
  result.reserve(data_.size());
  for (const std::byte* data : data_) result.push_back(reinterpret_cast<uint64_t>(data));
  return result;
}

Arrays Tensors::arrays(std::vector<std::byte*> room) const {
  if (!misfits_.empty())
    throw Error(Kind::usage, "tensor " + std::to_string(misfits_.front()) +
                                 " is no longer what it was: make Tensors anew");
  if (elsewhere_)
    throw Error(Kind::capability,
                "tensor " + std::to_string(*elsewhere_) + " is neither in host memory nor on a CUDA device");
  room.assign(data_.begin(), data_.end());
  return {std::move(room), geometries_, places_};
}

Arrays Tensors::sources(std::vector<std::byte*> room) const {
  return arrays(std::move(room));
}

Arrays Tensors::targets() const {
  if (read_only_) throw Error(Kind::usage, "tensor " + std::to_string(*read_only_) + " is read-only");
  return arrays({});
}

}  // namespace zs
