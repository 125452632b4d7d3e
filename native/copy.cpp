#include "copy.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace zs {
namespace {

// Moves `count` elements between two strided places. Known sizes let the compiler use plain loads and stores.
template <size_t kItem>
void move_items(std::byte* to, int64_t to_step, const std::byte* from, int64_t from_step, int64_t count,
                size_t item) {
  const size_t n = kItem != 0 ? kItem : item;
  for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * to_step, from + i * from_step, n);
}

using Move = void (*)(std::byte*, int64_t, const std::byte*, int64_t, int64_t, size_t);

Move move_for(size_t item) {
  switch (item) {
    case 1:
      return move_items<1>;
    case 2:
      return move_items<2>;
    case 4:
      return move_items<4>;
    case 8:
      return move_items<8>;
    case 16:
      return move_items<16>;
    default:
      return move_items<0>;
  }
}

// The same walk serves both ways: `Packed` is the contiguous side.
struct Gather {
  static void run(std::byte* packed, std::byte* data, const Geometry::Dim& inner, int64_t count, size_t item,
                  Move move) {
    const auto step = static_cast<int64_t>(item);
    if (inner.stride == step)
      std::memcpy(packed, data, static_cast<size_t>(count) * item);
    else
      move(packed, step, data, inner.stride, count, item);
  }
  static void bytes(std::byte* packed, std::byte* data, size_t n) { std::memcpy(packed, data, n); }
};

struct Scatter {
  static void run(std::byte* packed, std::byte* data, const Geometry::Dim& inner, int64_t count, size_t item,
                  Move move) {
    const auto step = static_cast<int64_t>(item);
    if (inner.stride == step)
      std::memcpy(data, packed, static_cast<size_t>(count) * item);
    else
      move(data, inner.stride, packed, step, count, item);
  }
  static void bytes(std::byte* packed, std::byte* data, size_t n) { std::memcpy(data, packed, n); }
};

// Walks the elements of a geometry in logical order from any element on, one inner row at a time.
class Cursor {
 public:
  Cursor(std::byte* data, const Geometry& geometry, uint64_t element) : geometry_(geometry), at_(data) {
    const size_t n = geometry.dims.size();
    index_.resize(n);
    for (size_t k = n; k-- > 0;) {
      const auto size = static_cast<uint64_t>(geometry.dims[k].size);
      index_[k] = static_cast<int64_t>(element % size);
      element /= size;
      at_ += index_[k] * geometry.dims[k].stride;
    }
  }
  std::byte* at() const { return at_; }
  int64_t left_in_row() const { return geometry_.dims.back().size - index_.back(); }
  // Rows from here on that differ in the last but one index only; none if this is within a row.
  int64_t left_rows() const {
    const size_t n = index_.size();
    return n < 2 || index_[n - 1] != 0 ? 0 : geometry_.dims[n - 2].size - index_[n - 2];
  }

  void advance(int64_t count) {  // within the row or just to its end
    index_.back() += count;
    at_ += count * geometry_.dims.back().stride;
    carry(index_.size() - 1);
  }
  void advance_rows(int64_t count) {  // at most left_rows()
    const size_t k = index_.size() - 2;
    index_[k] += count;
    at_ += count * geometry_.dims[k].stride;
    carry(k);
  }

 private:
  void carry(size_t k) {
    for (; index_[k] == geometry_.dims[k].size && k > 0; --k) {
      at_ -= index_[k] * geometry_.dims[k].stride;
      index_[k] = 0;
      ++index_[k - 1];
      at_ += geometry_.dims[k - 1].stride;
    }
  }

  const Geometry& geometry_;
  std::byte* at_;
  std::vector<int64_t> index_;
};

constexpr int64_t kColumns = 16;

// Rows whose elements are nearer to those of the next row than to one another, as in a transposed matrix:
// tile by tile, so that a cache line is fetched once and not once a row.
template <class Way>
void tile(std::byte* packed, std::byte* data, const Geometry::Dim& outer, const Geometry::Dim& inner,
          int64_t rows, size_t item, Move move) {
  const auto step = static_cast<int64_t>(item);
  for (int64_t c = 0; c < inner.size; c += kColumns)
    for (int64_t r = 0; r < rows; ++r)
      Way::run(packed + (r * inner.size + c) * step, data + r * outer.stride + c * inner.stride, inner,
               std::min(kColumns, inner.size - c), item, move);
}

template <class Way>
void walk(std::byte* packed, std::byte* data, const Geometry& geometry, uint64_t begin, uint64_t end) {
  if (begin >= end) return;
  if (geometry.contiguous()) return Way::bytes(packed, data + begin, end - begin);
  const uint64_t item = geometry.itemsize;
  Cursor cursor(data, geometry, begin / item);
  if (const uint64_t skip = begin % item; skip != 0) {  // a chunk may end within an element
    const uint64_t n = std::min(item - skip, end - begin);
    Way::bytes(packed, cursor.at() + skip, n);
    packed += n, begin += n;
    cursor.advance(1);
  }
  const Move move = move_for(item);
  const size_t n = geometry.dims.size();
  const Geometry::Dim inner = geometry.dims[n - 1], outer = geometry.dims[n < 2 ? 0 : n - 2];
  const bool crosswise = n >= 2 && std::abs(outer.stride) < std::abs(inner.stride);
  const auto tile_rows = static_cast<int64_t>(std::max<uint64_t>(128 / item, 4));
  for (uint64_t left = (end - begin) / item; left != 0;) {
    const int64_t rows = !crosswise
                             ? 0
                             : std::min({cursor.left_rows(), tile_rows,
                                         static_cast<int64_t>(left / static_cast<uint64_t>(inner.size))});
    if (rows > 1) {
      tile<Way>(packed, cursor.at(), outer, inner, rows, item, move);
      const auto count = static_cast<uint64_t>(rows * inner.size);
      packed += count * item, left -= count;
      cursor.advance_rows(rows);
      continue;
    }
    const auto count =
        static_cast<int64_t>(std::min<uint64_t>(left, static_cast<uint64_t>(cursor.left_in_row())));
    Way::run(packed, cursor.at(), inner, count, item, move);
    packed += static_cast<uint64_t>(count) * item, left -= static_cast<uint64_t>(count);
    cursor.advance(count);
  }
  if (const uint64_t rest = (end - begin) % item; rest != 0) Way::bytes(packed, cursor.at(), rest);
}

}  // namespace

Geometry Geometry::of(uint32_t itemsize, std::span<const int64_t> shape, std::span<const int64_t> strides) {
  Geometry result;
  result.itemsize = itemsize;
  result.nbytes = itemsize;
  for (int64_t size : shape) result.nbytes *= static_cast<uint64_t>(size);
  if (result.nbytes == 0) return result;
  for (size_t k = 0; k < shape.size(); ++k) {
    if (shape[k] == 1) continue;
    const Dim dim{shape[k], strides[k]};
    if (!result.dims.empty() && result.dims.back().stride == dim.size * dim.stride) {
      result.dims.back() = {result.dims.back().size * dim.size, dim.stride};
    } else {
      result.dims.push_back(dim);
    }
  }
  if (result.dims.size() == 1 && result.dims[0].stride == static_cast<int64_t>(itemsize)) result.dims.clear();
  return result;
}

void gather(std::byte* to, const std::byte* data, const Geometry& geometry, uint64_t begin, uint64_t end) {
  walk<Gather>(to, const_cast<std::byte*>(data), geometry, begin, end);
}

void scatter(std::byte* data, const std::byte* from, const Geometry& geometry, uint64_t begin, uint64_t end) {
  walk<Scatter>(const_cast<std::byte*>(from), data, geometry, begin, end);
}

}  // namespace zs
