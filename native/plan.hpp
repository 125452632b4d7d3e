// Where each piece of an image lies. Built once for a layout and shared by all jobs over its images.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "at_once.hpp"
#include "route.hpp"

namespace zs {

// Memory that every capture of a plan needs, from one that has ended. To take kilobytes from the heap has it
// tidy up all small blocks that a step of training has freed: 100 to 200 us, while `save` stands still.
struct Room {
  std::vector<std::byte*> addresses;
  std::vector<uint32_t> checksums;
  std::unique_ptr<std::atomic<uint32_t>[]> missing;
};

class Plan {
 public:
  // Pieces in rising offset order, none over another. What no piece and no header covers is zeros.
  Plan(uint64_t nbytes, std::string header, uint64_t chunk_bytes, std::vector<uint64_t> offsets,
       std::vector<uint64_t> sizes);

  uint64_t nbytes() const { return nbytes_; }
  uint64_t chunk_bytes() const { return chunk_bytes_; }
  uint64_t chunks() const { return (nbytes_ + chunk_bytes_ - 1) / chunk_bytes_; }
  size_t pieces() const { return offsets_.size(); }
  uint64_t offset(size_t piece) const { return offsets_[piece]; }
  uint64_t size(size_t piece) const { return sizes_[piece]; }
  uint64_t chunk_begin(uint64_t chunk) const { return chunk * chunk_bytes_; }
  uint64_t chunk_end(uint64_t chunk) const {
    const uint64_t end = (chunk + 1) * chunk_bytes_;
    return end < nbytes_ ? end : nbytes_;
  }
  // First piece and one past the last that have bytes in the chunk (pieces without bytes may stand between).
  std::pair<size_t, size_t> pieces_in(uint64_t chunk) const;

  // The bytes of one chunk, run by run in rising order.
  //   header(offset, nbytes)              bytes [offset, offset + nbytes) of the header, at the same place in
  //   the image piece(index, offset, begin, end)    bytes [begin, end) of the piece, at `offset` in the image
  //   gap(offset, nbytes)                 zeros
  template <class Header, class Piece, class Gap>
  void runs(uint64_t chunk, Header&& header, Piece&& piece, Gap&& gap) const {
    const uint64_t begin = chunk_begin(chunk), end = chunk_end(chunk);
    uint64_t at = begin;
    if (at < header_.size()) {
      const uint64_t stop = header_.size() < end ? header_.size() : end;
      header(at, stop - at);
      at = stop;
    }
    const auto [first, last] = pieces_in(chunk);
    for (size_t k = first; k < last; ++k) {
      if (sizes_[k] == 0) continue;
      const uint64_t from = offsets_[k] > begin ? offsets_[k] : begin;
      const uint64_t stop = offsets_[k] + sizes_[k] < end ? offsets_[k] + sizes_[k] : end;
      if (from > at) gap(at, from - at);
      piece(k, from, from - offsets_[k], stop - offsets_[k]);
      at = stop;
    }
    if (end > at) gap(at, end - at);
  }
  const std::string& header() const { return header_; }
  // Throws Kind::usage where an array has not its piece's number of bytes. Those that were checked last are
  // told by their address.
  void check(const std::shared_ptr<const std::vector<Geometry>>& geometries) const;
  // Kept for the next time it is asked for; arrays are told apart by where they say what and where they are.
  std::shared_ptr<const Route> route(const Arrays& arrays, int16_t place) const;
  // Kept likewise, the one that was asked for last.
  std::shared_ptr<const AtOnce> at_once(const Arrays& arrays, const Pieces& pieces) const;

  Room take_room() const;  // empty where none was given back
  void give_back(Room room) const noexcept;

 private:
  uint64_t nbytes_;
  uint64_t chunk_bytes_;
  std::string header_;
  std::vector<uint64_t> offsets_;
  std::vector<uint64_t> sizes_;
  std::vector<std::pair<size_t, size_t>> in_chunk_;
  mutable std::mutex mutex_;
  mutable std::vector<std::shared_ptr<const Route>> routes_;
  mutable std::shared_ptr<const std::vector<Geometry>> checked_;
  mutable std::shared_ptr<const AtOnce> at_once_;
  static constexpr size_t kRooms = 2;
  mutable std::vector<Room> rooms_;
};

}  // namespace zs
