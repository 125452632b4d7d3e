// What torch keeps of a tensor, byte for byte: while no byte has changed, torch need not be asked again.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

#include "prefetch.hpp"

struct _object;  // PyObject

namespace zs {

// Shape, strides, type, device and place in its storage are written in one block of memory, the tensor's; the
// storage's says where that begins, and the version counter is a third. Where all bytes of the first, and the
// address in the second, are what they were when torch was asked, its answer would be the same, whatever the
// bytes mean; so nothing of torch's layout is assumed but which words lead from one to the next, and where
// the address and the counter's number are. That is found by experiment, once a process, on tensors made for
// it (see learn()); where an experiment comes out otherwise than expected, no imprint is ever taken, and
// torch is asked each time as before.
//
// No block is read but through a pointer that was just seen in its owner: what it points to lives.
//
// Everything here needs the GIL.
class Imprint {
 public:
  // Remembers the tensor as it is now; torch has just said where it lies. False: nothing can be told from its
  // bytes. `shape` is where torch keeps its shape, `version` what it says of the counter, or -1 where that
  // does not matter.
  bool take(_object* tensor, const void* shape, int64_t version);
  void forget() { impl_ = nullptr; }
  bool taken() const { return impl_ != nullptr; }

  // Whether torch would say of address, shape, strides, type and device what it said at take() of the tensor.
  bool same(const _object* tensor) const { return in_place(tensor) && sum() == sum_; }
  // Whether the version counter is where it was, so that version() reads this tensor's.
  bool counted(const _object* tensor) const {
    return taken() && counter_ != nullptr && leads(tensor, places_.impl, impl_) &&
           leads(impl_, places_.counter, counter_);
  }
  // Whether it has the storage it had, and that the memory it had: an exchange in place changes no counter.
  bool in_place(const _object* tensor) const {
    return taken() && leads(tensor, places_.impl, impl_) && leads(impl_, places_.storage, storage_) &&
           leads(storage_, places_.data, data_);
  }
  // Whether it has the storage it had, whatever the memory of that.
  bool stays(const _object* tensor) const {
    return taken() && leads(tensor, places_.impl, impl_) && leads(impl_, places_.storage, storage_);
  }
  int64_t version() const { return counted_at(counter_); }

  // What a tensor that shares storage and counter with this one keeps alive: no owner need be asked for it.
  struct Kept {
    const std::byte *counter = nullptr, *storage = nullptr, *data = nullptr;  // no counter: nothing is kept

    int64_t version() const { return counted_at(counter); }
    bool in_place() const { return leads(storage, places_.data, data); }
    [[gnu::always_inline]] void fetch() const {
      if (counter == nullptr) return;
      prefetch(counter + places_.version);
    }
    [[gnu::always_inline]] void fetch_data() const {
      if (counter == nullptr) return;
      prefetch(storage + places_.data);
    }
  };
  // What `twin` keeps of this, if it shares all of it.
  Kept kept_by(_object* twin) const;
  // Whether that is what kept_by() would say: nothing where no imprint, or none with a counter, is taken.
  bool shares(const Kept& kept) const {
    if (!taken() || counter_ == nullptr) return kept.counter == nullptr;
    return kept.counter == counter_ && kept.storage == storage_ && kept.data == data_;
  }

  // What same() and version() read, beside the tensor.
  std::array<const std::byte*, 3> blocks() const { return {impl_, storage_, counter_}; }

  // Ask for the memory that same() and version() will read.
  [[gnu::always_inline]] void fetch(const _object* tensor) const {
    if (!taken()) return;
    prefetch(address(tensor, places_.impl));
    prefetch(impl_, 0, impl_words_ * 8u - 1);
    prefetch(storage_ + places_.data);
    if (counter_ != nullptr) prefetch(counter_ + places_.version);
  }
  // Likewise for stays().
  [[gnu::always_inline]] void fetch_owners(const _object* tensor) const {
    if (!taken()) return;
    prefetch(address(tensor, places_.impl));
    prefetch(impl_ + places_.storage);
  }

 private:
  struct Places {  // in bytes
    uint16_t impl = 0, storage = 0, counter = 0, version = 0, data = 0;
  };
  enum class Learning : uint8_t { none, done, failed };

  static bool learn();
  static bool find_places();
  static bool find_version(const std::byte* shared, _object* tensor);
  static bool find_data();
  static bool seen_to_tell();
  static const std::byte* address(const void* block, uint16_t place) {
    return static_cast<const std::byte*>(block) + place;
  }
  static bool leads(const void* block, uint16_t place, const std::byte* to) {
    return *reinterpret_cast<const std::byte* const*>(address(block, place)) == to;
  }
  static int64_t counted_at(const std::byte* counter) {
    return __atomic_load_n(reinterpret_cast<const uint32_t*>(counter + places_.version), __ATOMIC_RELAXED);
  }
  uint64_t sum() const;

  static Places places_;
  static Learning learning_;

  const std::byte* impl_ = nullptr;
  const std::byte* storage_ = nullptr;
  const std::byte* counter_ = nullptr;
  const std::byte* data_ = nullptr;  // the storage's memory
  uint64_t sum_ = 0;
  uint8_t impl_words_ = 0;
};

}  // namespace zs
