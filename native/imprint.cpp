#include <malloc.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <optional>

#include "torch.hpp"
// Python.h must come first.
#include "imprint.hpp"

namespace zs {

Imprint::Places Imprint::places_;
Imprint::Learning Imprint::learning_ = Learning::none;

namespace {

constexpr size_t kMostWords = 64;

// Odd numbers, so that a change of one word always changes the sum of products; changes of several words that
// cancel out are as likely as for any good hash of 64 bits.
constexpr std::array<uint64_t, kMostWords> kFactors = [] {
  std::array<uint64_t, kMostWords> result{};
  uint64_t state = 0x5A45524F5354414C;
  for (uint64_t& factor : result) {
    state += 0x9E3779B97F4A7C15;
    uint64_t x = state;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    factor = (x ^ (x >> 31)) | 1;
  }
  return result;
}();

uint64_t word(const void* block, size_t place) {
  return *reinterpret_cast<const uint64_t*>(static_cast<const std::byte*>(block) + place);
}

uint64_t number(const void* address) {
  return reinterpret_cast<uint64_t>(address);
}

// Words of a block from the heap, so that nothing a later torch may add to it goes unseen.
size_t words_of(const std::byte* block) {
  return block == nullptr || number(block) % 16 != 0
             ? 0
             : malloc_usable_size(const_cast<std::byte*>(block)) / sizeof(uint64_t);
}

// A copy of memory that may not be there at all.
template <size_t kBytes>
std::optional<std::array<std::byte, kBytes>> peek(const void* at) {
  std::array<std::byte, kBytes> result;
  const iovec to{result.data(), kBytes}, from{const_cast<void*>(at), kBytes};
  if (::process_vm_readv(::getpid(), &to, 1, &from, 1, 0) != static_cast<ssize_t>(kBytes))
    return std::nullopt;
  return result;
}

// The only place of [begin, end) in which a block has a word.
std::optional<uint16_t> only_place(const void* block, size_t begin, size_t end, uint64_t value) {
  std::optional<uint16_t> found;
  for (size_t place = begin; place + sizeof(uint64_t) <= end; place += sizeof(uint64_t)) {
    if (word(block, place) != value) continue;
    if (found) return std::nullopt;
    found = static_cast<uint16_t>(place);
  }
  return found;
}

Ref torch_module() {
  return checked(PyImport_ImportModule("torch"));
}

Ref zeros(const char* format, int rows, int columns) {
  const Ref torch = torch_module();
  const Ref shape = checked(Py_BuildValue(format, rows, columns));
  const Ref options = checked(Py_BuildValue("{s:s}", "device", "cpu"));
  return checked(PyObject_Call(attribute(torch.get(), "zeros").get(), shape.get(), options.get()));
}

const std::byte* storage_of(PyObject* tensor) {
  return inner_address(call(tensor, "untyped_storage").get());
}

uint64_t data_of(PyObject* tensor) {
  return unsigned_of(call(call(tensor, "untyped_storage").get(), "data_ptr").get());
}

void count_up(PyObject* tensor) {
  checked(PyObject_CallMethod(tensor, "add_", "i", 1));
}

}  // namespace

uint64_t Imprint::sum() const {
  uint64_t result = 0;
  for (size_t k = 0; k < impl_words_; ++k) result += word(impl_, 8 * k) * kFactors[k];
  return result;
}

bool Imprint::take(PyObject* tensor, const void* shape, int64_t version) {
  forget();
  if (learning_ == Learning::none) learning_ = learn() ? Learning::done : Learning::failed;
  if (learning_ == Learning::failed) return false;
  const auto impl = reinterpret_cast<const std::byte*>(word(tensor, places_.impl));
  if (impl == nullptr || impl != inner_address(tensor)) return false;
  const size_t impl_words = words_of(impl);
  if (impl_words * 8 <= std::max(places_.storage, places_.counter) || impl_words > kMostWords) return false;
  // A shape of many dimensions is kept elsewhere.
  if (number(shape) < number(impl) || number(shape) >= number(impl) + impl_words * 8) return false;
  const auto storage = reinterpret_cast<const std::byte*>(word(impl, places_.storage));
  if (words_of(storage) * 8 <= places_.data) return false;
  storage_ = storage;
  data_ = reinterpret_cast<const std::byte*>(word(storage, places_.data));
  impl_words_ = static_cast<uint8_t>(impl_words);
  counter_ = nullptr;
  if (version >= 0) {
    counter_ = reinterpret_cast<const std::byte*>(word(impl, places_.counter));
    if (words_of(counter_) * 8 < places_.version + sizeof(uint32_t) || this->version() != version)
      return false;
  }
  impl_ = impl;
  sum_ = sum();
  return true;
}

Imprint::Kept Imprint::kept_by(PyObject* twin) const {
  const std::byte* const other = taken() && counter_ != nullptr ? inner_address(twin) : nullptr;
  if (other == nullptr || words_of(other) * 8 <= std::max(places_.storage, places_.counter) ||
      !leads(other, places_.storage, storage_) || !leads(other, places_.counter, counter_))
    return {};
  return {counter_, storage_, data_};
}

// What a tensor's objects have in common with those of a tensor that shares its storage and its counter, and
// with no other's.
bool Imprint::find_places() {
  const Ref one = zeros("((ii))", 2, 3), other = zeros("((ii))", 2, 3), shared = call(one.get(), "detach");
  const Ref kind = attribute(reinterpret_cast<PyObject*>(Py_TYPE(one.get())), "__basicsize__");
  const size_t size = unsigned_of(kind.get());
  std::array<const std::byte*, 3> impls{};
  size_t k = 0;
  for (PyObject* tensor : {one.get(), other.get(), shared.get()}) {
    impls[k] = inner_address(tensor);
    const auto place = only_place(tensor, sizeof(PyObject), size, number(impls[k]));
    if (!place || (k != 0 && *place != places_.impl)) return false;
    places_.impl = *place;
    ++k;
  }
  const size_t bytes = words_of(impls[0]) * 8;
  if (bytes == 0 || bytes != words_of(impls[1]) * 8) return false;
  const auto storage = only_place(impls[0], 0, bytes, number(storage_of(one.get())));
  if (!storage || word(impls[1], *storage) != number(storage_of(other.get()))) return false;
  places_.storage = *storage;
  for (size_t place = 0; place < bytes; place += 8) {
    const uint64_t value = word(impls[0], place);
    if (place == *storage || value == 0 || value % 8 != 0 || value != word(impls[2], place) ||
        value == word(impls[1], place))
      continue;
    if (find_version(reinterpret_cast<const std::byte*>(value), one.get())) {
      places_.counter = static_cast<uint16_t>(place);
      return true;
    }
  }
  return false;
}

// Where the one number is that is the tensor's version each time it has been counted up.
bool Imprint::find_version(const std::byte* shared, PyObject* tensor) {
  constexpr size_t kBytes = 24;
  std::array<bool, kBytes / 4> fits;
  fits.fill(true);
  for (int round = 0; round < 5; ++round) {
    const auto bytes = peek<kBytes>(shared);
    if (!bytes) return false;
    const auto* const numbers = reinterpret_cast<const uint32_t*>(bytes->data());
    for (size_t k = 0; k < fits.size(); ++k)
      fits[k] = fits[k] && static_cast<int64_t>(numbers[k]) == version_of(tensor);
    count_up(tensor);
  }
  size_t found = 0;
  for (size_t k = 0; k < fits.size(); ++k)
    if (fits[k]) {
      ++found;
      places_.version = static_cast<uint16_t>(4 * k);
    }
  return found == 1;
}

// Where a storage keeps the address of its memory: told by one over memory of somebody else's, for what
// belongs to torch may lie there twice.
bool Imprint::find_data() {
  const Ref torch = torch_module(), bytes = checked(PyByteArray_FromStringAndSize(nullptr, 64));
  const Ref type = attribute(torch.get(), "uint8"),
            options = checked(Py_BuildValue("{s:O}", "dtype", type.get()));
  const Ref buffers = checked(PyTuple_Pack(1, bytes.get()));
  const Ref lent =
      checked(PyObject_Call(attribute(torch.get(), "frombuffer").get(), buffers.get(), options.get()));
  const Ref own = zeros("((ii))", 2, 3);
  const std::byte *const first = storage_of(lent.get()), *const second = storage_of(own.get());
  const size_t size = words_of(first) * 8;
  const auto place = only_place(first, 0, size, data_of(lent.get()));
  if (!place || words_of(second) * 8 != size || word(second, *place) != data_of(own.get())) return false;
  places_.data = *place;
  return true;
}

// Does an imprint tell each change that there is, and is it silent where there is none?
bool Imprint::seen_to_tell() {
  const auto tells = [](auto&& change) {
    const Ref tensor = zeros("((ii))", 4, 6);
    Imprint imprint;
    dlpack::Tensor seen{};
    const dlpack::ExchangeApi* const api = TensorType::of(tensor.get()).api;
    if (api == nullptr || api->describe(tensor.get(), &seen) != 0) throw take_error();
    PyObject* const t = tensor.get();
    if (!imprint.take(t, seen.shape, version_of(t)) || !imprint.same(t)) return false;
    count_up(t);
    if (!imprint.same(t) || !imprint.counted(t) || imprint.version() != version_of(t)) return false;
    const uint64_t data = data_of(t);
    if (!imprint.in_place(t)) return false;
    change(t);
    return !imprint.same(t) && (data_of(t) == data || !imprint.in_place(t));
  };
  const auto set_data = [](PyObject* tensor, const Ref& data) {
    if (PyObject_SetAttrString(tensor, "data", data.get()) != 0) throw take_error();
  };
  return tells([&](PyObject* t) { set_data(t, zeros("((ii))", 4, 6)); }) &&
         tells([&](PyObject* t) { set_data(t, zeros("((ii))", 6, 4)); }) &&
         tells([&](PyObject* t) { set_data(t, call(attribute(t, "data").get(), "double")); }) &&
         tells([](PyObject* t) { call(t, "t_"); }) &&
         tells([](PyObject* t) { checked(PyObject_CallMethod(t, "resize_", "ii", 4, 5)); }) &&
         tells([](PyObject* t) {
           checked(PyObject_CallMethod(t, "as_strided_", "(ii)(ii)i", 2, 3, 6, 1, 1));
         }) &&
         tells([](PyObject* t) {
           checked(PyObject_CallMethod(call(t, "untyped_storage").get(), "resize_", "i", 0));
         });
}

bool Imprint::learn() {
  try {
    if (!find_places() || !find_data()) return false;
    learning_ = Learning::done;  // take() is part of what is tried out
    return seen_to_tell();
  } catch (const Refusal&) {
    return false;
  }
}

}  // namespace zs
