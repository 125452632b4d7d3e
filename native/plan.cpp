#include "plan.hpp"

#include "error.hpp"

namespace zs {

Plan::Plan(uint64_t nbytes, std::string header, uint64_t chunk_bytes, std::vector<uint64_t> offsets,
           std::vector<uint64_t> sizes)
    : nbytes_(nbytes),
      chunk_bytes_(chunk_bytes),
      header_(std::move(header)),
      offsets_(std::move(offsets)),
      sizes_(std::move(sizes)) {
  if (chunk_bytes_ == 0) throw Error(Kind::usage, "a chunk has no bytes");
  if (nbytes_ > UINT64_MAX - chunk_bytes_) throw Error(Kind::usage, "an image is impossibly large");
  if (offsets_.size() != sizes_.size())
    throw Error(Kind::usage,
                std::to_string(offsets_.size()) + " offsets for " + std::to_string(sizes_.size()) + " sizes");
  if (header_.size() > nbytes_) throw Error(Kind::usage, "the header is longer than the image");
  uint64_t at = header_.size();
  for (size_t k = 0; k < offsets_.size(); ++k) {
    if (offsets_[k] < at)
      throw Error(Kind::usage, "piece " + std::to_string(k) + " begins at " + std::to_string(offsets_[k]) +
                                   ", before the end of what precedes it at " + std::to_string(at));
    if (offsets_[k] > nbytes_ || sizes_[k] > nbytes_ - offsets_[k])
      throw Error(Kind::usage, "piece " + std::to_string(k) + " ends beyond the image");
    at = offsets_[k] + sizes_[k];
  }
  rooms_.reserve(kRooms);
  in_chunk_.reserve(chunks());
  size_t first = 0, last = 0;
  for (uint64_t chunk = 0; chunk < chunks(); ++chunk) {
    while (first < offsets_.size() && offsets_[first] + sizes_[first] <= chunk_begin(chunk)) ++first;
    while (last < offsets_.size() && offsets_[last] < chunk_end(chunk)) ++last;
    in_chunk_.emplace_back(first, last < first ? first : last);
  }
}

std::pair<size_t, size_t> Plan::pieces_in(uint64_t chunk) const {
  if (chunk >= in_chunk_.size()) throw Error(Kind::usage, "there is no chunk " + std::to_string(chunk));
  return in_chunk_[chunk];
}

std::shared_ptr<const Route> Plan::route(const Arrays& arrays, int16_t place) const {
  const std::lock_guard lock(mutex_);
  for (const std::shared_ptr<const Route>& route : routes_)
    if (route->is_of(arrays, place)) return route;
  std::erase_if(routes_, [place](const auto& route) { return route->place == place; });
  return routes_.emplace_back(Route::make(*this, arrays, place));
}

std::shared_ptr<const AtOnce> Plan::at_once(const Arrays& arrays, const Pieces& pieces) const {
  const std::lock_guard lock(mutex_);
  if (!at_once_ || !at_once_->is_of(arrays, pieces)) at_once_ = AtOnce::make(*this, arrays, pieces);
  return at_once_;
}

Room Plan::take_room() const {
  const std::lock_guard lock(mutex_);
  if (rooms_.empty()) return {};
  Room room = std::move(rooms_.back());
  rooms_.pop_back();
  return room;
}

void Plan::give_back(Room room) const noexcept {
  const std::lock_guard lock(mutex_);
  if (rooms_.size() < rooms_.capacity()) rooms_.push_back(std::move(room));
}

void Plan::check(const std::shared_ptr<const std::vector<Geometry>>& geometries) const {
  const std::lock_guard lock(mutex_);
  if (checked_ == geometries) return;
  for (size_t k = 0; k < pieces(); ++k)
    if ((*geometries)[k].nbytes != sizes_[k])
      throw Error(Kind::usage, "tensor " + std::to_string(k) + " has " +
                                   std::to_string((*geometries)[k].nbytes) +
                                   " bytes, its piece of the plan " + std::to_string(sizes_[k]));
  checked_ = geometries;
}

}  // namespace zs
