// What lay in some memory once, to tell whether it still does.
#pragma once
#include <malloc.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>

#include "prefetch.hpp"

namespace zs {

class Block {
 public:
  // Copies the bytes. The memory must live as long as same() is asked.
  Block(const std::byte* at, size_t nbytes)
      : at_(at), nbytes_(nbytes), copy_(std::make_unique_for_overwrite<std::byte[]>(nbytes)) {
    std::copy_n(at, nbytes, copy_.get());
  }
  // All that the heap gave to whoever has the memory from there.
  static Block of_heap(const std::byte* at) { return {at, ::malloc_usable_size(const_cast<std::byte*>(at))}; }

  size_t size() const { return nbytes_; }
  // Ask for the memory that same() will read.
  void fetch() const {
    for (size_t k = 0; k < nbytes_; k += kLine) {
      prefetch(at_ + k);
      prefetch(copy_.get() + k);
    }
  }
  bool same() const {
    fetch();
    return std::memcmp(at_, copy_.get(), nbytes_) == 0;
  }

 private:
  const std::byte* at_;
  size_t nbytes_;
  std::unique_ptr<std::byte[]> copy_;
};

}  // namespace zs
